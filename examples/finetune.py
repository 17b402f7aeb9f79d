"""Fine-tune a causal language model from Transformers on questions and answers; only the answers count in the loss.

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

if TYPE_CHECKING:  # slow imports come later, after flags and data have been checked
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
# The right learning rate depends on the scale: v4 needs that of AdamW, v1 a fifth of it, v2 and v3 a larger one.
LEARNING_RATES = {"adamw": 1e-4, "v1": 2e-5, "v2": 1e-3, "v3": 1e-3, "v4": 1e-4}
FROM_SCRATCH = 20  # factor on the learning rate of a model that is not pre-trained

Pair = tuple[str, str]  # question, answer
Example = tuple[list[int], int]  # tokens, and the number of them that are the question


def standard_library_pairs() -> list[Pair]:
    """Return a question about every public function and class of the modules, with the first line of its docstring."""
    questions: dict[str, str] = {}  # by answer, because many functions are found in several modules
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name, member in sorted(vars(module).items()):
            if not (inspect.isroutine(member) or inspect.isclass(member)) or name.startswith("_"):
                continue
            line = (inspect.getdoc(member) or "").split("\n")[0].strip()
            if (
                len(line) > 10 and line[0].isupper() and "(" not in line and "XXX" not in line
            ):  # skips docstrings that begin with a signature
                questions.setdefault(line, f"What does {module_name}.{name} do?")
    return [(question, answer) for answer, question in questions.items()]


def read_pairs(path: Path, question: str, answer: str) -> list[Pair]:
    """Return the pairs of a JSONL file; exit with an error that names a line that cannot be used."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}; pass a JSONL file as --data")
    pairs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError:
            fail(f"{path}, line {number}: not UTF-8; save the file as UTF-8")
        except json.JSONDecodeError as error:
            fail(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno}); write one object per line")
        if not isinstance(record, dict):
            fail(f"{path}, line {number}: not an object with fields {question!r} and {answer!r}")
        for field in (question, answer):
            if not isinstance(record.get(field), str) or not record[field].strip():
                fail(
                    f"{path}, line {number}: field {field!r} must be a text that is not empty; "
                    "pass the names of your fields as --question and --answer"
                )
        pairs.append((record[question], record[answer]))
    if len(pairs) < 2:
        fail(f"{path} has {len(pairs)} pair(s); at least 2 are needed, one of them for validation")
    return pairs


def encode(tokenizer: Any, pairs: Sequence[Pair], max_length: int) -> list[Example]:
    """Return the tokens of every pair; leave out pairs whose question alone has `max_length` tokens."""
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
    """Return the inputs (B, T) of a batch, with labels of -100 on questions and padding."""
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
    """Yield batches without end, with every example once per epoch."""
    order: list[int] = []
    generator = random.Random(seed)
    while True:
        while len(order) < batch_size:
            order += generator.sample(range(len(examples)), len(examples))
        yield [examples[index] for index in order[:batch_size]]
        del order[:batch_size]


def validate(model: Any, examples: Sequence[Example], batch_size: int, padding: int, device: str) -> float:
    """Return the mean loss per token of the answers."""
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


def make_optimizer(model: Any, name: str, lr: float, scale: str, adamw_lr: float) -> torch.optim.Optimizer:
    """Return AdamW for all parameters, or Muon for the matrices and AdamW for all other parameters."""
    import torch

    from muon_fsdp import create_hybrid_optimizer

    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return create_hybrid_optimizer(
        model, muon_lr=lr, scale=scale, nesterov=True, adamw_lr=adamw_lr, adamw_weight_decay=0.0
    )


def tiny_model(vocabulary: int) -> Any:
    """Return a Llama with two layers and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def load(kind: Any, name: str) -> Any:
    """Return `kind.from_pretrained(name)`; exit with an error if that fails."""
    try:
        return kind.from_pretrained(name)
    except Exception as error:  # Transformers and the packages that it uses raise many types
        reason = str(error).strip().split("\n")[0].rstrip(".")
        fail(
            f"{kind.__name__} cannot load {name}: {reason}; "
            "pass a folder with a model and its tokenizer, or a name on the Hugging Face Hub, as --model"
        )


def check_model(name: str) -> None:
    """Check `--model` as far as possible without Transformers, whose import takes seconds."""
    folder = Path(name)
    if not folder.is_dir():
        if folder.exists():
            fail(f"{name} is a file; pass the folder with the model and its tokenizer as --model")
        if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):  # it cannot be a name on the Hub either
            fail(f"no such folder: {name}; pass a folder with a model and its tokenizer as --model, or a Hub name")
    elif not (folder / "config.json").is_file():
        fail(f"{name} has no config.json; pass a folder that model.save_pretrained has written as --model")
    elif not any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model")):
        fail(f"{name} has no tokenizer; save it there too, with tokenizer.save_pretrained")


def make_folder(path: Path) -> None:
    """Create a folder and check that it can be written to, before training takes its time."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        fail(f"cannot write to {path}: {error.strerror}; pass another folder as --output")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line; exit with an error for a flag that cannot be used."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, or name on the Hugging Face Hub (default: a tiny untrained model)")
    parser.add_argument("--data", type=Path, help="JSONL file (default: questions about Python's standard library)")
    parser.add_argument(
        "--question", default="question", help="field of a line with the question (default: %(default)s)"
    )
    parser.add_argument("--answer", default="answer", help="field of a line with the answer (default: %(default)s)")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="(default: %(default)s)")
    parser.add_argument(
        "--scale", choices=("v1", "v2", "v3", "v4"), default="v4", help="of Muon (default: %(default)s)"
    )
    parser.add_argument("--lr", type=float, help="learning rate (default: depends on --optimizer and --scale)")
    parser.add_argument("--adamw-lr", type=float, help="learning rate of embeddings, head and vectors, with Muon")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="pairs per step (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=256, help="tokens per pair (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("finetuned"), help="folder (default: %(default)s)")
    args = parser.parse_args(argv)
    for flag, value, least in (
        ("--steps", args.steps, 1),
        ("--batch-size", args.batch_size, 1),
        ("--max-length", args.max_length, 2),
    ):
        if value < least:
            fail(f"{flag} must be at least {least}, got {value}")
    for flag, lr in (("--lr", args.lr), ("--adamw-lr", args.adamw_lr)):
        if lr is not None and not 0 < lr < math.inf:
            fail(f"{flag} must be positive and finite, got {lr}")
    if args.model is not None:
        check_model(args.model)
    return args


def main(argv: Sequence[str] | None = None) -> float:
    """Fine-tune the model, save it, and return its validation loss."""
    args = parse(argv)
    pairs = read_pairs(args.data, args.question, args.answer) if args.data else standard_library_pairs()
    make_folder(args.output)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, get_cosine_schedule_with_warmup

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    tokenizer: Any = load(AutoTokenizer, args.model) if args.model else ByT5Tokenizer(extra_ids=0)
    if tokenizer.eos_token_id is None:
        fail(f"the tokenizer of {args.model} has no token that ends an answer; set its eos_token and save it again")
    examples = encode(tokenizer, random.Random(0).sample(pairs, len(pairs)), args.max_length)
    if len(examples) < 2:
        fail(f"only {len(examples)} pair(s) are short enough and 2 are needed: raise --max-length {args.max_length}")
    num_held_out = max(1, len(examples) // 10)
    held_out, examples = examples[:num_held_out], examples[num_held_out:]
    model: Any = load(AutoModelForCausalLM, args.model) if args.model else tiny_model(len(tokenizer))
    model.float().to(device).train()
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    factor = 1 if args.model else FROM_SCRATCH
    lr = factor * LEARNING_RATES["adamw" if args.optimizer == "adamw" else args.scale] if args.lr is None else args.lr
    adamw_lr = factor * LEARNING_RATES["adamw"] if args.adamw_lr is None else args.adamw_lr
    optimizer = make_optimizer(model, args.optimizer, lr, args.scale, adamw_lr)
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
            print(f"step {step:4d}/{args.steps}  loss {loss.item():.4f}  {seconds:.2f} s per step", flush=True)
    final = validate(model, held_out, args.batch_size, padding, device)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
    print(f"validation loss after: {final:.4f}; saved to {args.output}")
    return final


if __name__ == "__main__":
    main()
