"""Compare AdamW and Muon for fine-tuning, on models that were pre-trained with AdamW or with Muon.

python -m experiments.finetuning                                                # a model of 1M parameters, on a CPU
python -m experiments.finetuning --size h200 --seeds 2 --output docs/experiments     # 32M parameters, on a GPU

A small Llama learns the bytes of Python's standard library and is then fine-tuned to answer questions about it
(examples/finetune.py). The program reports the loss of held-out answers and, as a measure of forgetting, the loss of
held-out text.

Muon runs at its four scales. Its learning rates are given for scale v4. For the other scales they are converted so that
a square matrix moves equally far. A run at v1 therefore equals the run at v4, because v1 is 5 times v4 for every shape;
v2 and v3 differ from it for matrices that are not square.
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.plots import Panel, curve_over_seeds, draw_panels
from muon_fsdp.training.data import Corpus, open_corpus, training_batches, validation_batches
from muon_fsdp.training.loop import make_schedule

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Transformers reads this at import; nothing has to be downloaded

from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from examples.finetune import Example, encode, make_optimizer, shuffled, standard_library_pairs, validate
from examples.finetune import collate as collate_pairs

PRETRAINERS = ("AdamW", "Muon")
FINETUNERS = ("AdamW", "Muon v1", "Muon v2", "Muon v3", "Muon v4")
# The curves of the plot, with the key of the colour and the label. "Muon v1" equals "Muon v4" by construction.
DRAWN = {
    "AdamW": ("AdamW", "AdamW"),
    "Muon v2": ("Muon", "Muon, original"),
    "Muon v3": ("Muon, spectral", "Muon, spectral"),
    "Muon v4": ("Muon, match_rms_adamw", "Muon, match_rms_adamw or size"),
}
REST_LR = 1e-3  # learning rate of embedding, head and vectors, when Muon fine-tunes
PRETRAINING_RATES = {
    "AdamW": (2e-3, 2e-3),
    "Muon": (0.02, 4e-3),
}  # learning rates of matrices (Muon at scale v2) and of other parameters
BYTE_OFFSET = 3  # the tokenizer's ids for padding, end and unknown come before the bytes
MAX_LENGTH = 160


@dataclass(frozen=True)
class Size:
    """The sizes of a model, how long it is trained, and the learning rates to try."""

    width: int
    hidden: int
    num_layers: int
    num_heads: int
    sequence_length: int
    pretraining_steps: int
    pretraining_batch: int
    steps: int
    batch: int
    num_answers: int  # held-out answers and windows of text that are evaluated
    num_windows: int
    adamw_rates: tuple[float, ...]
    muon_rates: tuple[float, ...]  # at scale v4

    def model(self) -> LlamaForCausalLM:
        """Build the model with random weights."""
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256 + BYTE_OFFSET, hidden_size=self.width, intermediate_size=self.hidden,
                num_hidden_layers=self.num_layers, num_attention_heads=self.num_heads,
                max_position_embeddings=max(self.sequence_length, MAX_LENGTH), bos_token_id=None, eos_token_id=1,
                pad_token_id=0, use_cache=False,
            )
        )  # fmt: skip

    def rates(self, name: str) -> tuple[float, ...]:
        """Return the learning rates to try with an optimizer."""
        return self.adamw_rates if name == "AdamW" else self.muon_rates


SIZES = {
    "small": Size(
        128, 352, 5, 4, 128, pretraining_steps=120, pretraining_batch=8, steps=30, batch=8, num_answers=64,
        num_windows=16, adamw_rates=(1e-3, 3e-3, 1e-2), muon_rates=(3e-3, 1e-2, 3e-2),
    ),
    "h200": Size(
        512, 1408, 10, 8, 512, pretraining_steps=400, pretraining_batch=32, steps=80, batch=32, num_answers=256,
        num_windows=64, adamw_rates=(3e-5, 1e-4, 3e-4, 1e-3), muon_rates=(1e-4, 3e-4, 1e-3, 3e-3),
    ),
}  # fmt: skip


def muon_rate(scale: str, rate: float, width: int) -> float:
    """Return the learning rate at which a (width, width) matrix moves as far as at scale v4 with `rate`."""
    v4 = 0.2 * math.sqrt(width)
    return rate * v4 / {"v1": math.sqrt(width), "v2": 1.0, "v3": 1.0, "v4": v4}[scale]


def device_and_threads() -> str:
    """Set up PyTorch in a process that shares the machine with others.

    Returns:
        The device to train on.
    """
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    return "cuda" if torch.cuda.is_available() else "cpu"


@cache
def corpus(sequence_length: int) -> Corpus:
    """Return the first 8 MB of the standard library, loaded once per process."""
    return open_corpus(None, sequence_length, byte_budget=8_000_000)


@cache
def pairs() -> tuple[list[Example], list[Example]]:
    """Split the questions and answers, in the same way in all runs.

    Returns:
        The examples to learn from, and the held-out examples.
    """
    found = standard_library_pairs()
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    examples = encode(ByT5Tokenizer(extra_ids=0), [found[index] for index in order], MAX_LENGTH)
    num_held_out = len(examples) // 5
    return examples[num_held_out:], examples[:num_held_out]


@torch.no_grad()
def text_loss(model: LlamaForCausalLM, size: Size, device: str) -> float:
    """Return the loss on text that was held out of pre-training."""
    held_out, losses = corpus(size.sequence_length).validation, []
    for inputs, targets in validation_batches(held_out, size.pretraining_batch, size.sequence_length, size.num_windows):
        losses.append(float(next_byte_loss(model, inputs, targets, device)))
    return statistics.mean(losses)


def next_byte_loss(model: LlamaForCausalLM, inputs: Tensor, targets: Tensor, device: str) -> Tensor:
    """Return the mean cross-entropy of the next byte."""
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits = model(input_ids=inputs.to(device) + BYTE_OFFSET).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.to(device).flatten() + BYTE_OFFSET)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, next_loss: Callable[[], Tensor]) -> None:
    """Train with the warm-up, cosine schedule and gradient clipping that all runs share."""
    factor = make_schedule("cosine", steps)
    initial = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, lr in zip(optimizer.param_groups, initial, strict=True):
            group["lr"] = lr * factor(step)
        next_loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def pretrain(size: Size, name: str, seed: int, folder: str) -> dict[str, Any]:
    """Pre-train a model on the text and save its weights in `folder`.

    Returns:
        What was run, and the losses before fine-tuning.
    """
    device, start = device_and_threads(), time.perf_counter()
    torch.manual_seed(seed)
    model = size.model().to(device)
    lr, rest_lr = PRETRAINING_RATES[name]
    optimizer = make_optimizer(model, name.lower(), lr, "v2", rest_lr)
    tokens = corpus(size.sequence_length).train
    generator = torch.Generator().manual_seed(seed)
    batches = training_batches(tokens, size.pretraining_batch, size.sequence_length, generator)
    train(model, optimizer, size.pretraining_steps, lambda: next_byte_loss(model, *next(batches), device))
    torch.save(model.state_dict(), Path(folder) / f"{name}-{seed}.pt")
    _, held_out = pairs()
    return {
        "pretraining": name,
        "seed": seed,
        "text_loss": round(text_loss(model, size, device), 5),
        "answer_loss": round(validate(model, held_out[: size.num_answers], size.batch, 0, device), 5),
        "seconds": round(time.perf_counter() - start, 2),
    }


def finetune(size: Size, pretraining: str, name: str, rate: float, seed: int, folder: str) -> dict[str, Any]:
    """Fine-tune a pre-trained model from `folder`.

    Returns:
        What was run, and the losses after fine-tuning.
    """
    device, start = device_and_threads(), time.perf_counter()
    torch.manual_seed(seed)
    model = size.model()
    model.load_state_dict(torch.load(Path(folder) / f"{pretraining}-{seed}.pt", map_location="cpu", weights_only=True))
    model.to(device)
    optimizer_name, _, scale = name.lower().partition(" ")
    lr = muon_rate(scale, rate, size.width) if scale else rate
    optimizer = make_optimizer(model, optimizer_name, lr, scale, REST_LR)
    examples, held_out = pairs()
    batches = shuffled(examples, size.batch, seed)

    def next_loss() -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss: Tensor = model(**collate_pairs(next(batches), 0, device)).loss
        return loss

    train(model, optimizer, size.steps, next_loss)
    return {
        "pretraining": pretraining,
        "finetuning": name,
        "rate": rate,
        "lr": float(f"{lr:.4g}"),
        "seed": seed,
        "answer_loss": round(validate(model, held_out[: size.num_answers], size.batch, 0, device), 5),
        "text_loss": round(text_loss(model, size, device), 5),
        "seconds": round(time.perf_counter() - start, 2),
    }


def run_all(
    function: Callable[..., dict[str, Any]], jobs: Sequence[tuple[Any, ...]], pool: Executor, at_once: int, end: float
) -> Iterator[dict[str, Any]]:
    """Run jobs in the pool and yield results in the order in which they finish.

    Args:
        function: what to call for each job.
        jobs: the arguments of each call.
        pool: the processes that run the jobs.
        at_once: how many jobs run at the same time.
        end: the value of `time.perf_counter()` after which no further job is started.
    """
    waiting = iter(jobs)
    running: set[Future[dict[str, Any]]] = set()
    while True:
        while len(running) < at_once and time.perf_counter() < end and (job := next(waiting, None)) is not None:
            running.add(pool.submit(function, *job))
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()


class ThisProcess(Executor):
    """An executor that runs each job in this process when it is submitted."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the function now and return a finished future."""
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


def best_rates(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], tuple[float, list[dict[str, Any]]]]:
    """Find the best learning rate for every pair of pre-training and fine-tuning optimizers.

    Returns:
        For each pair, the learning rate with the lowest mean loss of held-out answers, and its runs. Rates with fewer
        seeds than others do not count.
    """
    best = {}
    for pretraining in PRETRAINERS:
        for name in FINETUNERS:
            by_rate: dict[float, list[dict[str, Any]]] = {}
            for row in rows:
                if (row["pretraining"], row["finetuning"]) == (pretraining, name):
                    by_rate.setdefault(row["rate"], []).append(row)
            most = max(map(len, by_rate.values()), default=0)
            complete = {rate: runs for rate, runs in by_rate.items() if len(runs) == most}
            if complete:
                rate = min(complete, key=lambda rate: mean(complete[rate], "answer_loss"))
                best[pretraining, name] = (rate, complete[rate])
    return best


def mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    """Return the mean of one figure over runs, or infinity if a run diverged."""
    values = [row[key] for row in rows]
    return statistics.mean(values) if all(map(math.isfinite, values)) else math.inf


def table(rows: Sequence[dict[str, Any]], bases: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the losses before fine-tuning, and of each pair at its best learning rate."""
    lines = [
        "| pre-trained | fine-tuned | best rate (lr of matrices) | answers, mean (spread) | text (change) | runs |",
        "|---|---|---|---|---|---|",
    ]
    for pretraining in PRETRAINERS:
        mine = [base for base in bases if base["pretraining"] == pretraining]
        if mine:
            answers, words = mean(mine, "answer_loss"), mean(mine, "text_loss")
            lines.append(f"| {pretraining} | - | - | {answers:.4f} | {words:.4f} | {len(mine)} |")
    for (pretraining, name), (rate, runs) in best_rates(rows).items():
        tried = {row["rate"] for row in rows if row["finetuning"] == name}
        edge = ", at the edge" if len(tried) > 1 and rate in (min(tried), max(tried)) else ""
        values = [run["answer_loss"] for run in runs]
        words, before = (
            mean(runs, "text_loss"),
            mean([b for b in bases if b["pretraining"] == pretraining], "text_loss"),
        )
        lines.append(
            f"| {pretraining} | {name} | {rate:g} ({runs[0]['lr']:g}{edge}) | {mean(runs, 'answer_loss'):.4f} "
            f"({max(values) - min(values):.4f}) | {words:.4f} ({words - before:+.4f}) | {len(runs)} |"
        )
    return "\n".join(lines)


def title_of(size: Size) -> str:
    """Return the title of the plot: the number of parameters and of steps."""
    num_parameters = sum(p.numel() for p in size.model().parameters())
    return f"Llama of {num_parameters / 1e6:.1f}M parameters, {size.pretraining_steps} + {size.steps} steps"


def write_plot(rows: Sequence[dict[str, Any]], path_stem: Path, title: str) -> None:
    """Plot the losses of held-out answers and text against the learning rate, with the range of the seeds."""
    panels = []
    for key, label in (("answer_loss", "held-out answers"), ("text_loss", "held-out text")):
        seen = [row[name] for row in rows for name in (key, f"{key}_before") if name != "answer_loss_before"]
        finite = [value for value in seen if math.isfinite(value)]
        margin = 0.05 * (max(finite) - min(finite)) or 0.1
        for pretraining in PRETRAINERS:
            mine = [row for row in rows if row["pretraining"] == pretraining]
            curves = {}
            for name, (optimizer, shown) in DRAWN.items():
                points = [(row["rate"], row[key]) for row in mine if row["finetuning"] == name]
                if curve := curve_over_seeds(optimizer, points):
                    curves[shown] = curve
            before = statistics.mean(row["text_loss_before"] for row in mine) if mine and key == "text_loss" else None
            panels.append(
                Panel(
                    curves, f"pre-trained with {pretraining}: {label}", target=before,
                    target_label="before fine-tuning", x_scale="log", markers=True, spread=True,
                    y_limits=(min(finite) - margin, max(finite) + margin),
                    x_ticks={rate: f"{rate:g}" for rate in sorted({row["rate"] for row in mine})},
                    x_label="learning rate (Muon's as with match_rms_adamw)",
                    y_label=f"loss of {label} (nats per byte)",
                )
            )  # fmt: skip
    draw_panels(path_stem, panels, title=title, num_columns=2)


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write one line per run."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Read what `write_csv` wrote."""
    with path.open(newline="") as file:
        return [{k: v if k.endswith("ing") else float(v) for k, v in row.items()} for row in csv.DictReader(file)]


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Size]:
    """Parse the flags.

    Returns:
        The flags, and the chosen size with the values that the flags replace.
    """
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m experiments.finetuning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", choices=list(SIZES), default="small", help="model and length of the runs")
    parser.add_argument("--seeds", type=int, default=3 if on_gpu else 2, help="runs of each combination")
    parser.add_argument("--adamw-rates", type=float, nargs="+", help="learning rates to try with AdamW")
    parser.add_argument(
        "--muon-rates",
        type=float,
        nargs="+",
        help="learning rates to try with Muon, for scale v4; they are converted for the other scales",
    )
    parser.add_argument("--pretraining-steps", type=int, help="steps of pre-training")
    parser.add_argument("--steps", type=int, help="steps of fine-tuning")
    parser.add_argument(
        "--processes", type=int, default=8 if on_gpu else 2, help="runs at the same time; 1 runs all in this process"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="start no further run after this time; the first seed of all combinations runs first",
    )
    parser.add_argument("--output", type=Path, default=Path("finetuning_output"), help="folder of the output files")
    args = parser.parse_args(argv)
    size = SIZES[args.size]
    given = {key: getattr(args, key) for key in ("pretraining_steps", "steps", "adamw_rates", "muon_rates")}
    return args, replace(size, **{key: value for key, value in given.items() if value is not None})


def main(argv: Sequence[str] | None = None) -> None:
    """Pre-train, fine-tune every combination, and write the results after each run."""
    args, size = parse(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    end = start + args.seconds
    bases: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    workers = ProcessPoolExecutor(args.processes, mp_context=context) if args.processes > 1 else ThisProcess()
    with tempfile.TemporaryDirectory() as folder, workers as pool:
        jobs = [(size, name, seed, folder) for seed in range(args.seeds) for name in PRETRAINERS]
        for base in run_all(pretrain, jobs, pool, args.processes, math.inf):  # fine-tuning needs all of them
            bases.append(base)
            print(
                f"pre-trained {len(bases)}/{len(jobs)}: {base['pretraining']} seed {base['seed']}: "
                f"answers {base['answer_loss']:.4f}, text {base['text_loss']:.4f}, {base['seconds']:.1f} s; "
                f"{time.perf_counter() - start:.0f} s in all",
                flush=True,
            )
        cells = [
            (size, pretraining, name, rate, seed, folder)
            for seed in range(args.seeds)
            for pretraining in PRETRAINERS
            for name in FINETUNERS
            for rate in size.rates(name)
        ]
        before = {(base["pretraining"], base["seed"]): base for base in bases}
        for row in run_all(finetune, cells, pool, args.processes, end):
            base = before[row["pretraining"], row["seed"]]
            rows.append({**row, **{f"{key}_before": base[key] for key in ("answer_loss", "text_loss")}})
            print(
                f"{len(rows)}/{len(cells)} {row['pretraining']} -> {row['finetuning']} rate {row['rate']:g} "
                f"seed {row['seed']}: answers {row['answer_loss']:.4f}, text {row['text_loss']:.4f}, "
                f"{row['seconds']:.1f} s; {time.perf_counter() - start:.0f} s in all",
                flush=True,
            )
            rows.sort(key=lambda r: (r["pretraining"], r["finetuning"], r["rate"], r["seed"]))
            write_csv(rows, args.output / f"finetuning_{args.size}.csv")
    if len(rows) < len(cells):
        print(f"{len(cells) - len(rows)} of {len(cells)} runs were left out: {args.seconds:g} s had passed")
    write_plot(rows, args.output / f"finetuning_{args.size}", title_of(size))
    print("\n" + table(rows, bases))


if __name__ == "__main__":
    main()
