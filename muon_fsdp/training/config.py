"""What a training run is told: `TrainConfig`, and the same as flags of a command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from muon_fsdp.training.arguments import OneLineParser
from muon_fsdp.training.model import PRESETS, GPTConfig, preset

OptimizerName = Literal["muon", "normuon", "sso", "adamw"]
Parallelism = Literal["none", "ddp", "fsdp"]
ScheduleName = Literal["cosine", "trapezoid"]
Precision = Literal["auto", "float32", "bfloat16"]

VOCABULARY_MULTIPLE = 64  # 50,257 tokens get 50,304 rows: GPUs multiply odd sizes slowly
NAMES = {"muon": "Muon", "normuon": "NorMuon", "sso": "SSO", "adamw": "AdamW"}


class ConfigError(ValueError):
    """What was asked for cannot be done; the message says what to change."""


@dataclass(frozen=True)
class TrainConfig:
    """One run. None stands for a default that depends on the rest, as the flags' help says."""

    model: str = "small"
    sequence_length: int | None = None
    vocab_size: int | None = None
    positions: str | None = None
    qk_norm: bool | None = None
    data: Path | None = None

    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 16
    micro_batch_size: int | None = None
    seed: int = 0

    optimizer: OptimizerName = "muon"
    lr: float | None = None
    rest_lr: float | None = None
    weight_decay: float | None = None
    scale: str = "v2"
    lambda_mode: str = "bracketed"
    cuda_graph: bool = False
    schedule: ScheduleName = "cosine"
    warmup_fraction: float = 0.1
    decay_fraction: float = 0.4
    final_lr_fraction: float = 0.05
    clip_norm: float = 1.0

    parallel: Parallelism = "none"
    replicas: int = 1
    tensor_parallel: int = 1
    device: str | None = None
    precision: Precision = "auto"
    compile: bool = False

    output: Path | None = None
    resume: bool = False
    save_every: int | None = None
    keep: int = 2
    eval_every: int | None = None
    eval_windows: int = 64
    log_every: int | None = None
    tensorboard: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        preset(self.model)
        if self.steps is not None and self.epochs is not None:
            raise ConfigError("give --steps or --epochs, not both")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{_flag(name)} must be at least 1, got {value}")
        for name in ("warmup_fraction", "decay_fraction", "final_lr_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{_flag(name)} must be between 0 and 1, got {getattr(self, name)}")
        for name in ("clip_norm", "epochs"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{_flag(name)} must be positive, got {value}")
        if self.epochs is not None and math.isinf(self.epochs):
            raise ConfigError("--epochs must be finite, got inf")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed must be between 0 and 2**63 - 1, got {self.seed}")
        for name in ("lr", "rest_lr", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{_flag(name)} must not be negative, got {value}")
        if self.parallel == "ddp" and self.replicas * self.tensor_parallel > 1:
            raise ConfigError("--replicas and --tp belong to --fsdp; leave out --ddp")
        if self.cuda_graph and self.optimizer == "adamw":
            raise ConfigError("--cuda-graph is not of adamw; leave it out with --optimizer adamw")

    @property
    def label(self) -> str:
        return self.name or NAMES[self.optimizer]

    @property
    def folder(self) -> Path:
        return self.output or Path("runs") / f"{self.model}-{self.optimizer}"

    def model_config(self, data_vocabulary: int | None) -> GPTConfig:
        """The preset with what was changed; the vocabulary is the data's where it is known (256 for bytes)."""
        base = preset(self.model)
        rounded = -(-(data_vocabulary or base.vocab_size) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        vocab_size = self.vocab_size or rounded
        if data_vocabulary is not None and vocab_size < data_vocabulary:
            raise ConfigError(f"--vocab-size {vocab_size} is too small: the data has {data_vocabulary} tokens")
        changes: dict[str, Any] = {"vocab_size": vocab_size}
        if self.sequence_length is not None:
            changes["sequence_length"] = self.sequence_length
        if self.positions is not None:
            changes["positions"] = self.positions
        if self.qk_norm is not None:
            changes["qk_norm"] = self.qk_norm
        try:
            return replace(base, **changes)
        except ValueError as error:
            raise ConfigError(str(error)) from None


_COUNTS = (
    "sequence_length", "vocab_size", "steps", "batch_size", "micro_batch_size", "replicas", "tensor_parallel",
    "save_every", "keep", "eval_every", "eval_windows", "log_every",
)  # fmt: skip


def _flag(name: str) -> str:
    return {"tensor_parallel": "--tp"}.get(name, "--" + name.replace("_", "-"))


def make_parser(prog: str) -> argparse.ArgumentParser:
    """The flags of every program that trains: each sets the field of `TrainConfig` that has its name."""
    parser = OneLineParser(
        prog=prog,
        allow_abbrev=False,  # the launcher has to find --processes
        description="Train a GPT with Muon on one device, or on ranks with DDP, FSDP2, HSDP and tensor parallelism.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=100),
    )
    default = TrainConfig()

    def add(group: argparse._ArgumentGroup, flag: str, text: str, **options: Any) -> None:
        name = options.setdefault("dest", flag[2:].replace("-", "_"))
        options.setdefault("default", getattr(default, name))
        if options.get("action") is None:
            options.setdefault("type", str)
            if options["default"] is not None:
                text += " (default: %(default)s)"
            if "choices" not in options:
                options.setdefault("metavar", {int: "N", float: "X", Path: "PATH"}.get(options["type"], "NAME"))
        group.add_argument(flag, help=text, **options)

    model = parser.add_argument_group("model and data")
    add(model, "--model", "preset", choices=list(PRESETS))
    add(model, "--sequence-length", "tokens in a window (default: the preset's)", type=int)
    add(model, "--vocab-size", "rows of the embedding (default: the data's, up to a multiple of 64; the preset's for "
        "token shards without a tokenizer.json)", type=int)  # fmt: skip
    add(model, "--positions", "default: the preset's", choices=["rope", "learned"])
    add(model, "--qk-norm", "normalize queries and keys (default: the preset's)", action=argparse.BooleanOptionalAction)
    add(model, "--data", "text file, folder of texts, or folder of token shards *.bin with 16 bits a token "
        "(default: the source of Python's standard library)", type=Path)  # fmt: skip

    length = parser.add_argument_group("length and batches")
    add(length, "--steps", "optimizer steps (default: 100, or what --epochs says)", type=int)
    add(length, "--epochs", "as many steps as read the text so many times", type=float)
    add(length, "--batch-size", "sequences in a step, over all ranks", type=int)
    add(length, "--micro-batch-size", "sequences in one forward on one rank; gradients of several add up "
        "(default: all that a rank has)", type=int)  # fmt: skip
    add(length, "--seed", "of the weights and of the data's order", type=int)

    optimizer = parser.add_argument_group("optimizer")
    add(optimizer, "--optimizer", "of the hidden matrices; the rest takes AdamW", choices=list(get_args(OptimizerName)))
    add(optimizer, "--lr", "of the matrices (default: 0.002 for adamw, 0.02 for the others)", type=float)
    add(optimizer, "--rest-lr", "of embedding, head and vectors (default: 0.004)", type=float)
    add(optimizer, "--weight-decay", "of the matrices (default: 0.01 for muon and normuon, 0.1 for adamw)", type=float)
    add(optimizer, "--scale", "of Muon's update by shape", choices=["v1", "v2", "v3", "v4"])
    add(optimizer, "--lambda-mode", "of sso", choices=["bracketed", "bisection", "projection", "zero"])
    add(optimizer, "--cuda-graph", "capture the optimizer's step (on a GPU, not of adamw)", action="store_true")
    add(optimizer, "--schedule", "of every lr", choices=list(get_args(ScheduleName)))
    add(optimizer, "--warmup-fraction", "of the steps", type=float)
    add(optimizer, "--decay-fraction", "of the steps, at the end of a trapezoid", type=float)
    add(optimizer, "--final-lr-fraction", "of the lr, at the last step", type=float)
    add(optimizer, "--clip-norm", "largest norm of the gradient", type=float)

    parallel = parser.add_argument_group("devices and ranks")
    modes = parallel.add_mutually_exclusive_group()
    modes.add_argument("--fsdp", dest="parallel", action="store_const", const="fsdp", help="FSDP2: shard everything")
    modes.add_argument("--ddp", dest="parallel", action="store_const", const="ddp", help="DDP: replicas")
    parser.set_defaults(parallel=None)
    add(parallel, "--replicas", "HSDP: so many replicas of the shards (implies --fsdp)", type=int)
    add(parallel, "--tp", "tensor parallelism over so many ranks (implies --fsdp)", dest="tensor_parallel", type=int)
    parallel.add_argument("--processes", metavar="N", type=int, help="start N processes here, instead of torchrun")
    add(parallel, "--device", "cpu or cuda (default: cuda where there is one)", choices=["cpu", "cuda"])
    add(
        parallel,
        "--precision",
        "of the forward and backward; auto is bfloat16 on GPUs",
        choices=list(get_args(Precision)),
    )
    add(parallel, "--compile", "torch.compile the blocks", action="store_true")

    files = parser.add_argument_group("what it leaves behind")
    add(files, "--output", "folder (default: runs/MODEL-OPTIMIZER)", type=Path)
    add(files, "--resume", "go on from the newest checkpoint in the folder", action="store_true")
    add(files, "--save-every", "steps between checkpoints (default: one at the end)", type=int)
    add(files, "--keep", "checkpoints", type=int)
    add(files, "--eval-every", "steps between validations (default: a twentieth of the run)", type=int)
    add(files, "--eval-windows", "sequences in a validation", type=int)
    add(files, "--log-every", "steps between looks at the device (default: 1 on a CPU, 10 on a GPU)", type=int)
    add(files, "--tensorboard", "write TensorBoard events too", action="store_true")
    add(files, "--name", "of the run, in its lines", type=str)
    return parser


def parse(argv: Sequence[str] | None, prog: str) -> tuple[TrainConfig, int | None]:
    """The configuration, and how many processes to start (None: this one)."""
    parser = make_parser(prog)
    values = vars(parser.parse_args(argv))
    processes = values.pop("processes")
    if processes is not None and processes < 1:
        parser.error(f"--processes must be at least 1, got {processes}")
    if values["parallel"] is None:
        values["parallel"] = "fsdp" if values["replicas"] * values["tensor_parallel"] > 1 else "none"
    try:
        return TrainConfig(**values), processes
    except ValueError as error:
        parser.error(str(error))


def as_json(config: TrainConfig) -> dict[str, Any]:
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
