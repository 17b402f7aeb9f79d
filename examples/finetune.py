"""Fine-tunes a causal language model of Transformers on questions and answers; the loss is that of the answers.

python examples/finetune.py                                        # offline: a tiny model, the standard library's docs
python examples/finetune.py --model PATH_OR_NAME --data pairs.jsonl             # {"question": ..., "answer": ...}
python examples/finetune.py --model PATH_OR_NAME --data pairs.jsonl --optimizer adamw
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import random
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muon_fsdp.training.arguments import OneLineParser, fail

if TYPE_CHECKING:  # the others are imported where they are used: after flags and data have been checked
    import torch
    from torch import Tensor

MODULES = (
    "argparse", "ast", "asyncio", "base64", "bisect", "calendar", "cmath", "codecs", "collections",
    "concurrent.futures", "configparser", "contextlib", "copy", "csv", "ctypes", "dataclasses", "datetime", "decimal",
    "difflib", "dis", "enum", "fnmatch", "fractions", "functools", "gettext", "glob", "gzip", "hashlib", "heapq",
    "hmac", "html", "http.client", "importlib.util", "inspect", "io", "ipaddress", "itertools", "json", "keyword",
    "linecache", "locale", "logging", "math", "mimetypes", "numbers", "operator", "os", "os.path", "pathlib",
    "pickle", "platform", "pprint", "queue", "random", "re", "secrets", "shelve", "shlex", "shutil", "stat",
    "statistics", "string", "struct", "subprocess", "sys", "sysconfig", "tarfile", "tempfile", "textwrap",
    "threading", "time", "timeit", "tokenize", "traceback", "types", "unicodedata", "unittest.mock",
    "urllib.parse", "urllib.request", "uuid", "warnings", "weakref", "zipfile", "zlib",
)  # fmt: skip
# What a size of update means depends on the scale: v4 takes AdamW's rate, v1 a fifth of it, v2 and v3 a larger one.
RATES = {"adamw": 1e-4, "v1": 2e-5, "v2": 1e-3, "v3": 1e-3, "v4": 1e-4}
FROM_SCRATCH = 20  # a model that has learned nothing yet takes larger steps

Pair = tuple[str, str]  # question, answer
Example = tuple[list[int], int]  # tokens, and the number of them that are the question


def standard_library_pairs() -> list[Pair]:
    """What every public function and class of the modules does, in the words of its documentation; no answer twice."""
    questions: dict[str, str] = {}  # by answer: many functions are found in several modules
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name, member in sorted(vars(module).items()):
            if not (inspect.isroutine(member) or inspect.isclass(member)) or name.startswith("_"):
                continue
            line = (inspect.getdoc(member) or "").split("\n")[0].strip()
            if len(line) > 10 and line[0].isupper() and "(" not in line and "XXX" not in line:  # no signatures
                questions.setdefault(line, f"What does {module_name}.{name} do?")
    return [(question, answer) for answer, question in questions.items()]


def read_pairs(path: Path, question: str, answer: str) -> list[Pair]:
    """The pairs of a JSONL file; a line that can't be used is an error that names it."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        fail(f"can't read {path}: {error.strerror}; give --data a JSONL file")
    pairs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError:
            fail(f"{path}, line {number}: not UTF-8; save the file in this encoding")
        except json.JSONDecodeError as error:
            fail(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}); write one object a line")
        if not isinstance(record, dict):
            fail(f"{path}, line {number}: not an object with fields {question!r} and {answer!r}")
        for field in (question, answer):
            if not isinstance(record.get(field), str) or not record[field].strip():
                fail(
                    f"{path}, line {number}: field {field!r} must be a text that is not empty; "
                    "--question and --answer name the fields"
                )
        pairs.append((record[question], record[answer]))
    if len(pairs) < 2:
        fail(f"{path} has {len(pairs)} pair(s); at least 2 are needed, one of them to validate on")
    return pairs


def encode(tokenizer: Any, pairs: Sequence[Pair], max_length: int) -> list[Example]:
    """Tokens of every pair; one whose answer lies beyond `max_length` is left out."""
    examples = []
    for question, answer in pairs:
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        prompt = start + tokenizer(f"Question: {question}\nAnswer:", add_special_tokens=False).input_ids
        reply = [*tokenizer(f" {answer}", add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        if len(prompt) < max_length:
            examples.append(((prompt + reply)[:max_length], len(prompt)))
    if len(examples) < len(pairs):
        print(f"{len(pairs) - len(examples)} pairs left out: their questions alone have {max_length} tokens or more")
    return examples


def collate(examples: Sequence[Example], padding: int, device: str) -> dict[str, Tensor]:
    """Inputs (B, T), and labels that are -100 on questions and padding."""
    import torch

    length = max(len(tokens) for tokens, _ in examples)
    rows = torch.full((3, len(examples), length), 0)
    rows[0], rows[2] = padding, -100
    for row, (tokens, num_prompt) in enumerate(examples):
        rows[0, row, : len(tokens)] = torch.tensor(tokens)
        rows[1, row, : len(tokens)] = 1
        rows[2, row, num_prompt : len(tokens)] = torch.tensor(tokens[num_prompt:])
    return dict(zip(("input_ids", "attention_mask", "labels"), rows.to(device), strict=True))


def shuffled(examples: Sequence[Example], batch_size: int, seed: int) -> Iterator[list[Example]]:
    """Endless batches, every example once an epoch."""
    order: list[int] = []
    generator = random.Random(seed)
    while True:
        while len(order) < batch_size:
            order += generator.sample(range(len(examples)), len(examples))
        yield [examples[index] for index in order[:batch_size]]
        del order[:batch_size]


def validate(model: Any, examples: Sequence[Example], batch_size: int, padding: int, device: str) -> float:
    """The mean loss of a token of the answers."""
    import torch

    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(examples), batch_size):
        batch = collate(examples[start : start + batch_size], padding, device)
        num_tokens = int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            total += float(model(**batch).loss) * num_tokens
        count += num_tokens
    model.train()
    return total / count


def make_optimizer(model: Any, name: str, lr: float, scale: str, rest_lr: float) -> torch.optim.Optimizer:
    import torch

    from muon_fsdp import create_hybrid_optimizer

    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return create_hybrid_optimizer(
        model, muon_lr=lr, scale=scale, nesterov=True, adamw_lr=rest_lr, adamw_weight_decay=0.0
    )


def tiny_model(vocabulary: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def load(kind: Any, name: str) -> Any:
    try:
        return kind.from_pretrained(name)
    except Exception as error:  # Transformers and what it loads with raise many kinds
        reason = str(error).strip().split("\n")[0].rstrip(".")
        fail(
            f"{kind.__name__} can't load {name}: {reason}; "
            "give --model a folder with a model and its tokenizer, or a name on the hub"
        )


def check_model(name: str) -> None:
    """What can be known of `--model` before Transformers is imported."""
    folder = Path(name)
    if not folder.is_dir():
        if folder.exists():
            fail(f"{name} is a file; give --model the folder with the model and its tokenizer")
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):  # can't be one on the hub
            fail(f"no such folder: {name}; give --model a folder with a model and its tokenizer, or a name on the hub")
    elif not (folder / "config.json").is_file():
        fail(f"{name} has no config.json; give --model a folder that save_pretrained has written a model to")
    elif not any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model")):
        fail(f"{name} has no tokenizer; write it there too, with its save_pretrained")


def make_folder(path: Path) -> None:
    """Find out before the training whether it can be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        fail(f"can't write to {path}: {error.strerror}; give --output another folder")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a name on the hub; without it, a tiny model from scratch")
    parser.add_argument("--data", type=Path, help="a JSONL file; without it, questions about the standard library")
    parser.add_argument("--question", default="question", help="the field of a line that holds the question")
    parser.add_argument("--answer", default="answer", help="the field of a line that holds the answer")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--scale", choices=("v1", "v2", "v3", "v4"), default="v4")
    parser.add_argument("--lr", type=float, help="by default chosen by optimizer and scale")
    parser.add_argument("--adamw-lr", type=float, help="with Muon, of embeddings, head and vectors")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--output", type=Path, default=Path("finetuned"))
    args = parser.parse_args(argv)
    for flag, value, least in (
        ("--steps", args.steps, 1),
        ("--batch-size", args.batch_size, 1),
        ("--max-length", args.max_length, 2),
    ):
        if value < least:
            fail(f"{flag} must be at least {least}, got {value}")
    for flag, rate in (("--lr", args.lr), ("--adamw-lr", args.adamw_lr)):
        if rate is not None and not 0 < rate < math.inf:
            fail(f"{flag} must be positive and finite, got {rate}")
    if args.model is not None:
        check_model(args.model)
    return args


def main(argv: Sequence[str] | None = None) -> float:
    args = parse(argv)
    pairs = read_pairs(args.data, args.question, args.answer) if args.data else standard_library_pairs()
    make_folder(args.output)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, get_cosine_schedule_with_warmup

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    tokenizer: Any = load(AutoTokenizer, args.model) if args.model else ByT5Tokenizer(extra_ids=0)
    if tokenizer.eos_token_id is None:
        fail(f"the tokenizer of {args.model} has no end token to end answers with; set its eos_token and save it again")
    examples = encode(tokenizer, random.Random(0).sample(pairs, len(pairs)), args.max_length)
    if len(examples) < 2:
        fail(f"{len(examples)} pair(s) left; at least 2 are needed: raise --max-length {args.max_length}")
    num_held_out = max(1, len(examples) // 10)
    held_out, examples = examples[:num_held_out], examples[num_held_out:]
    model: Any = load(AutoModelForCausalLM, args.model) if args.model else tiny_model(len(tokenizer))
    model.float().to(device).train()
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    factor = 1 if args.model else FROM_SCRATCH
    lr = factor * RATES["adamw" if args.optimizer == "adamw" else args.scale] if args.lr is None else args.lr
    rest_lr = factor * RATES["adamw"] if args.adamw_lr is None else args.adamw_lr
    optimizer = make_optimizer(model, args.optimizer, lr, args.scale, rest_lr)
    scheduler = get_cosine_schedule_with_warmup(optimizer, args.steps // 10, args.steps)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.1f}M parameters, {len(examples)} pairs, {len(held_out)} held out; {args.optimizer}, lr {lr:g}")
    print(f"validation loss before: {validate(model, held_out, args.batch_size, padding, device):.4f}", flush=True)
    batches = shuffled(examples, args.batch_size, seed=0)
    start = time.perf_counter()
    for step in range(1, args.steps + 1):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(**collate(next(batches), padding, device)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 10 == 0 or step == args.steps:
            seconds = (time.perf_counter() - start) / step
            print(f"step {step:4d}/{args.steps}  loss {loss.item():.4f}  {seconds:.2f} s a step", flush=True)
    final = validate(model, held_out, args.batch_size, padding, device)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"validation loss after: {final:.4f}; saved to {args.output}")
    return final


if __name__ == "__main__":
    main()
