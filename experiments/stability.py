"""Compare the loss and stability of AdamW, Muon, MuonSphere and SSO over learning rates and seeds, on a small GPT.

python -m experiments.stability --output docs/experiments      # 126 runs: a small model on a CPU, a larger one on a GPU
"""

from __future__ import annotations

import argparse
import csv
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.plots import Panel, curve_over_seeds, draw_panels
from muon_fsdp import SpectralSphereOptimizer, create_hybrid_optimizer
from muon_fsdp.training.data import open_corpus, training_batches, validation_batches
from muon_fsdp.training.loop import evaluate, make_schedule
from muon_fsdp.training.model import GPT, CausalSelfAttention, GPTConfig
from muon_fsdp.training.parallel import World

# Without normalization of queries and keys attention logits can grow without bound, which is part of the comparison.
CONFIG = GPTConfig(num_layers=6, num_heads=6, d_model=384, sequence_length=256, qk_norm=False)
SMALL = GPTConfig(
    num_layers=3, num_heads=3, d_model=96, sequence_length=128, qk_norm=False
)  # for machines without a GPU
REST_LR = 4e-3  # learning rate of embedding, head and vectors, in all runs
RATES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
ADAMW_RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)

Make = Callable[[GPT, float, bool], torch.optim.Optimizer]


def _muon(weight_decay: float) -> Make:
    """Return what makes the hybrid of Muon and AdamW, with this weight decay for matrices."""
    return lambda model, lr, graph: create_hybrid_optimizer(
        model, muon_lr=lr, nesterov=True, weight_decay=weight_decay, adamw_lr=REST_LR, adamw_weight_decay=0.0,
        cuda_graph=graph,
    )  # fmt: skip


def _sphere(lambda_mode: str) -> Make:
    """Return what makes SpectralSphereOptimizer with this way of finding the multiplier."""
    return lambda model, lr, graph: SpectralSphereOptimizer(
        model, lr=lr, nesterov=True, lambda_mode=lambda_mode, adamw_lr=REST_LR, cuda_graph=graph
    )


def _adamw(model: GPT, lr: float, graph: bool) -> torch.optim.Optimizer:
    """Make torch.optim.AdamW, with `lr` for matrices and `REST_LR` for other parameters; it never uses a graph."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    groups = [{"params": matrices, "lr": lr, "weight_decay": 0.1}, {"params": rest, "lr": REST_LR, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


OPTIMIZERS: dict[str, Make] = {
    "AdamW": _adamw,
    "Muon": _muon(0.0),
    "Muon, decay 0.1": _muon(0.1),
    "MuonSphere (zero)": _sphere("zero"),
    "SSO (projection)": _sphere("projection"),
    "SSO (bracketed)": _sphere("bracketed"),
}


@torch.no_grad()
def look_inside(model: GPT, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Run one batch forward and measure what grows when training becomes unstable.

    Returns:
        The largest spectral norm of a matrix over sqrt(d_out/d_in), the largest activation, and the largest attention
        logit.
    """
    activations: list[Tensor] = []
    rotated: dict[nn.Module, list[Tensor]] = {}
    hooks = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            hooks.append(module.register_forward_hook(lambda _m, _i, out: activations.append(out.abs().max())))
        if isinstance(module, CausalSelfAttention):
            hooks.append(
                module.rope.register_forward_hook(lambda m, _i, out: rotated.setdefault(m, []).append(out.float()))
            )
    try:
        model(*batch)
    finally:
        for hook in hooks:
            hook.remove()
    logits = [(q @ k.mT).abs().max() / math.sqrt(q.shape[-1]) for q, k in rotated.values()]
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    finite = all(bool(torch.isfinite(p).all()) for p in matrices)
    norms = [torch.linalg.matrix_norm(p.float(), 2) / math.sqrt(p.shape[0] / p.shape[1]) for p in matrices if finite]
    return {
        "spectral_norm": float(torch.stack(norms).max()) if finite else math.inf,
        "activation": float(torch.stack(activations).max()),
        "attention_logit": float(torch.stack(logits).max()),
    }


def run(name: str, lr: float, seed: int, steps: int, batch_size: int, config: GPTConfig) -> dict[str, Any]:
    """Train one model with one optimizer, and stop early if the loss is not finite.

    Returns:
        One row of the CSV file: what was run, its losses, the largest values seen, and the seconds.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    world = World(torch.device(device), torch.float32)
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    corpus = open_corpus(None, config.sequence_length, byte_budget=8_000_000)
    validation = [
        (x.to(device), y.to(device))
        for x, y in validation_batches(corpus.validation, batch_size, config.sequence_length, 2 * batch_size)
    ]
    torch.manual_seed(seed)
    model = GPT(config).to(device)
    optimizer = OPTIMIZERS[name](model, lr, device == "cuda")
    factor = make_schedule("cosine", steps)
    initial = [group["lr"] for group in optimizer.param_groups]
    batches = training_batches(corpus.train, batch_size, config.sequence_length, torch.Generator().manual_seed(seed))
    losses, calls, largest = [], [], {"spectral_norm": 0.0, "activation": 0.0, "attention_logit": 0.0}
    start = time.perf_counter()
    diverged = False
    for step in range(steps):
        for group, base in zip(optimizer.param_groups, initial, strict=True):
            group["lr"] = base * factor(step)
        inputs, targets = next(batches)
        _, loss = model(inputs.to(device), targets.to(device))
        assert loss is not None
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9 or step == steps - 1:
            losses.append(loss.item())
            if isinstance(optimizer, SpectralSphereOptimizer):
                calls.append(optimizer.metrics()["msign_calls_median"])
            diverged = not math.isfinite(losses[-1])
            inside = look_inside(model, validation[0]) if not diverged else {}
            largest = {key: max(value, inside.get(key, math.inf)) for key, value in largest.items()}
            if diverged:
                break
    seconds = time.perf_counter() - start
    return {
        "optimizer": name,
        "lr": lr,
        "seed": seed,
        "steps": steps,
        "validation_loss": math.inf if diverged else round(evaluate(model, validation, world), 5),
        "train_loss": round(statistics.mean(losses[-5:]), 5),
        **{f"largest_{key}": round(value, 4) for key, value in largest.items()},
        "msign_calls": statistics.median(calls) if calls else 0.0 if name == "AdamW" else 1.0,
        "lambda_fallbacks": optimizer.metrics()["lambda_fallbacks"] if "SSO" in name else 0.0,
        "seconds": round(seconds, 2),
    }


def title_of(config: GPTConfig, steps: int) -> str:
    """Return the title of the plot: the number of parameters and of steps."""
    return f"GPT of {GPT(config).num_parameters() / 1e6:.1f}M parameters, {steps} steps"


def write_plot(rows: list[dict[str, Any]], path_stem: Path, title: str) -> None:
    """Plot four figures against the learning rate, with bands over seeds."""
    names = {
        "validation_loss": "validation loss",
        "largest_spectral_norm": "largest ||W|| / sqrt(d_out/d_in)",
        "largest_activation": "largest activation",
        "largest_attention_logit": "largest attention logit",
    }
    panels = []
    for key, label in names.items():
        curves = {}
        for name in OPTIMIZERS:
            rates = ADAMW_RATES if name == "AdamW" else RATES
            points = [(rates.index(row["lr"]), row[key]) for row in rows if row["optimizer"] == name]
            if curve := curve_over_seeds(name.split(" ")[0].strip(","), points):
                curves[name] = curve
        finite = [row[key] for row in rows if math.isfinite(row[key])]
        is_loss = key == "validation_loss"
        ticks = {place: f"{a:g}\n{b:g}" for place, (a, b) in enumerate(zip(RATES, ADAMW_RATES, strict=True))}
        shown = sorted({place for curve in curves.values() for place in curve[1]})
        panels.append(
            Panel(
                curves, label, markers=True, x_ticks={place: ticks[int(place)] for place in shown},
                x_label="learning rate of matrices (lower line: AdamW's)" if len(panels) > 1 else "",
                y_scale="linear" if is_loss else "log",
                y_limits=(min(finite) - 0.03, min(finite) + 0.8) if is_loss else None,
            )
        )  # fmt: skip
    draw_panels(path_stem, panels, title=title, num_columns=2)


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Read the rows that `main` wrote."""
    with path.open(newline="") as file:
        return [
            {key: row[key] if key == "optimizer" else float(row[key]) for key in row} for row in csv.DictReader(file)
        ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of each optimizer at its best learning rate."""
    lines = [
        "| optimizer | best lr | validation loss, mean (spread) | at 4x that lr | msign calls |",
        "|---|---|---|---|---|",
    ]
    for name in OPTIMIZERS:
        rates = ADAMW_RATES if name == "AdamW" else RATES
        by_rate = {lr: [r["validation_loss"] for r in rows if (r["optimizer"], r["lr"]) == (name, lr)] for lr in rates}
        means = {lr: statistics.mean(values) for lr, values in by_rate.items() if values}
        if not means:
            continue
        best = min(means, key=lambda lr: means[lr])
        values = by_rate[best]
        later = list(rates).index(best) + 2
        far = f"{means[rates[later]]:.3f}" if later < len(rates) and rates[later] in means else "-"
        calls = statistics.median([r["msign_calls"] for r in rows if r["optimizer"] == name])
        lines.append(f"| {name} | {best:g} | {means[best]:.4f} ({max(values) - min(values):.4f}) | {far} | {calls:g} |")
    return "\n".join(lines)


def main() -> None:
    """Run all combinations in parallel processes and write the results after each run."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m experiments.stability", description=__doc__)
    parser.add_argument("--steps", type=int, default=300 if on_gpu else 200, help="training steps of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each combination")
    parser.add_argument("--batch-size", type=int, default=32 if on_gpu else 8, help="sequences per step")
    parser.add_argument("--processes", type=int, default=8 if on_gpu else 2, help="runs at the same time")
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS), help="optimizers to compare"
    )
    parser.add_argument(
        "--rates",
        type=int,
        nargs="+",
        default=list(range(len(RATES))),
        help=f"positions in the list of {len(RATES)} learning rates, from 0",
    )
    parser.add_argument("--output", type=Path, default=Path("stability_output"), help="folder of the output files")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    config = CONFIG if on_gpu else SMALL
    jobs = [
        (name, (ADAMW_RATES if name == "AdamW" else RATES)[rate], seed)
        for seed in range(args.seeds)
        for name in args.optimizers
        for rate in args.rates
    ]
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    start = time.perf_counter()
    with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
        futures = [pool.submit(run, *job, args.steps, args.batch_size, config) for job in jobs]
        for number, future in enumerate(as_completed(futures), start=1):
            row = future.result()
            rows.append(row)
            left = (time.perf_counter() - start) / number * (len(jobs) - number)
            print(
                f"{number}/{len(jobs)} {row['optimizer']} lr {row['lr']:g} seed {row['seed']}: "
                f"validation loss {row['validation_loss']:.4f}, {row['seconds']:.1f} s; {left:.0f} s left",
                flush=True,
            )
            rows.sort(key=lambda r: (list(OPTIMIZERS).index(r["optimizer"]), r["lr"], r["seed"]))
            with (args.output / "sso_stability.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
                writer.writerows(rows)
    write_plot(rows, args.output / "sso_stability", title_of(config, args.steps))
    print("\n" + table(rows))


if __name__ == "__main__":
    main()
