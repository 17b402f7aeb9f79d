"""Describe a training run as a `TrainConfig`, and parse one from command-line flags."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from muon_fsdp.rules import DEFAULT_OTHER_RULE, DEFAULT_RULE, RULES, Rule
from muon_fsdp.training.arguments import ConfigError, OneLineParser, fail
from muon_fsdp.training.model import PRESETS, GPTConfig, preset
from muon_fsdp.training.plugins import add_plugin_flag, find_rule, load_plugins, plugins_in
from muon_fsdp.training.rule_flags import (
    OptionFlag,
    add_option_flags,
    by_value,
    check_options,
    default_options,
    given_options,
)

Parallelism = Literal["none", "ddp", "fsdp"]
ScheduleName = Literal["cosine", "trapezoid"]
Precision = Literal["auto", "float32", "bfloat16"]

VOCABULARY_MULTIPLE = 64  # 50,257 tokens get 50,304 rows, because GPUs are slow on odd sizes
DEFAULT_REST_LR = 4e-3


@dataclass(frozen=True)
class TrainConfig:
    """The configuration of one run. None means a default that depends on other fields; `--help` describes it.

    `optimizer` is the rule that updates the hidden matrices, given by name or alias and stored by name. `options` are
    the options of that rule that differ from its defaults. `plugin` lists files that register rules; creating the
    configuration imports them.
    """

    model: str = "small"
    sequence_length: int | None = None
    vocab_size: int | None = None
    positions: str | None = None
    qk_norm: bool | None = None
    tie_embeddings: bool | None = None
    scale_embedding: bool | None = None
    data: Path | None = None

    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 16
    micro_batch_size: int | None = None
    seed: int = 0

    optimizer: str = DEFAULT_RULE
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    plugin: Sequence[str] = ()
    lr: float | None = None
    rest_lr: float | None = None
    weight_decay: float | None = None
    rest_weight_decay: float | None = None
    rest_betas: Sequence[float] | None = None
    cuda_graph: bool | None = None  # None lets the optimizer decide
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
    timeout: float = 600.0

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
            raise ConfigError("pass --steps or --epochs, not both")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{_flag(name)} must be at least 1, got {value}")
        for name in ("warmup_fraction", "decay_fraction", "final_lr_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{_flag(name)} must be between 0 and 1, got {getattr(self, name)}")
        for name in ("clip_norm", "epochs", "timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{_flag(name)} must be positive, got {value}")
        for name in ("epochs", "timeout"):
            value = getattr(self, name)
            if value is not None and math.isinf(value):
                raise ConfigError(f"{_flag(name)} must be finite, got inf")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed must be between 0 and 2**63 - 1, got {self.seed}")
        for name in ("lr", "rest_lr", "weight_decay", "rest_weight_decay"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{_flag(name)} must not be negative, got {value}")
        if self.parallel == "ddp" and self.replicas * self.tensor_parallel > 1:
            raise ConfigError("--replicas and --tp work only with --fsdp; leave out --ddp")
        self._settle_optimizer()

    def _settle_optimizer(self) -> None:
        """Import the plugins, find the rule and check its options."""
        load_plugins(self.plugin)
        rule = find_rule(self.optimizer)
        check_options(self.options, rule)
        for name, value in (("optimizer", rule.name), ("options", dict(self.options)), ("plugin", tuple(self.plugin))):
            object.__setattr__(self, name, value)
        if self.rest_betas is not None:
            try:
                RULES[DEFAULT_OTHER_RULE].all_options["betas"].validate(self.rest_betas)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"--rest-betas: {error}") from None
        reason = rule.not_capturable(self.matrix_options) if self.cuda_graph else None
        if reason is not None:
            raise ConfigError(f"--cuda-graph cannot capture this optimizer's step: {reason}; leave out --cuda-graph")

    @property
    def rule(self) -> Rule:
        """Return the rule that updates the hidden matrices."""
        return RULES[self.optimizer]

    @property
    def matrix_options(self) -> dict[str, Any]:
        """Return all options of the hidden matrices, defaults included."""
        own = {"lr": self.lr, "weight_decay": self.weight_decay}
        given = {name: value for name, value in own.items() if value is not None}
        return {**default_options(self.rule), **given, **self.options}

    @property
    def label(self) -> str:
        """Return the name of the run in what it prints."""
        return self.name or self.rule.display_name

    @property
    def folder(self) -> Path:
        """Return the folder for checkpoints and metrics."""
        return self.output or Path("runs") / f"{self.model}-{self.optimizer}"

    def model_config(self, data_vocabulary: int | None) -> GPTConfig:
        """Return the preset with the changes of the flags; `data_vocabulary` is None for data of unknown vocabulary."""
        base = preset(self.model)
        rounded = -(-(data_vocabulary or base.vocab_size) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        vocab_size = self.vocab_size or rounded
        if data_vocabulary is not None and vocab_size < data_vocabulary:
            raise ConfigError(
                f"--vocab-size {vocab_size} is too small: the data has a vocabulary of {data_vocabulary} tokens"
            )
        changes: dict[str, Any] = {"vocab_size": vocab_size}
        for name in ("sequence_length", "positions", "qk_norm", "tie_embeddings", "scale_embedding"):
            if getattr(self, name) is not None:
                changes[name] = getattr(self, name)
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


def make_parser(prog: str) -> tuple[argparse.ArgumentParser, list[OptionFlag]]:
    """Make the parser of every program that trains; register your rules first, because their options become flags.

    Returns:
        The parser, and the flags of rules' options. Every other flag sets the `TrainConfig` field of the same name.
    """
    parser = OneLineParser(
        prog=prog,
        allow_abbrev=False,  # the launcher could not find an abbreviated --processes
        description="Train a GPT on one device, or on several with DDP, FSDP2, HSDP or tensor parallelism.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=100),
    )
    _add_model_and_data(parser)
    _add_length(parser)
    _add_optimizer(parser)
    _add_devices(parser)
    _add_files(parser)
    return parser, add_option_flags(parser)


_DEFAULT = TrainConfig()


def _add(group: argparse._ActionsContainer, flag: str, text: str, **options: Any) -> None:
    name = options.setdefault("dest", flag[2:].replace("-", "_"))
    options.setdefault("default", getattr(_DEFAULT, name))
    if options.get("action") is None:
        options.setdefault("type", str)
        if options["default"] is not None:
            text += " (default: %(default)s)"
        if "choices" not in options:
            options.setdefault("metavar", {int: "N", float: "X", Path: "PATH"}.get(options["type"], "NAME"))
    group.add_argument(flag, help=text, **options)


def _add_model_and_data(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model and data")
    _add(model, "--model", "model size", choices=list(PRESETS))
    _add(model, "--sequence-length", "tokens per sequence (default: that of --model)", type=int)
    _add(model, "--vocab-size", "size of the model's vocabulary (default: the data's, rounded up to a multiple of 64; "
         "that of --model for token shards without a tokenizer.json)", type=int)  # fmt: skip
    _add(model, "--positions", "positional encoding (default: that of --model)", choices=["rope", "learned"])
    switch = argparse.BooleanOptionalAction
    _add(model, "--qk-norm", "normalize queries and keys (default: as --model does)", action=switch)
    _add(model, "--tie-embeddings", "use the embedding's weight as the head (default: as --model does)", action=switch)
    _add(model, "--scale-embedding", "multiply the embedding's output by the square root of the width (default: as "
         "--model does)", action=switch)  # fmt: skip
    _add(model, "--data", "text file, folder of text files, or folder of token shards (*.bin, 16 bits per token) "
         "(default: the source code of Python's standard library)", type=Path)  # fmt: skip


def _add_length(parser: argparse.ArgumentParser) -> None:
    length = parser.add_argument_group("training length and batches")
    _add(length, "--steps", "number of optimizer steps (default: 100, or as --epochs requires)", type=int)
    _add(length, "--epochs", "train on X times as many tokens as the training data has, instead of --steps", type=float)
    _add(length, "--batch-size", "sequences per step, over all ranks", type=int)
    _add(length, "--micro-batch-size", "sequences per forward pass on one rank; gradients of several passes are "
         "accumulated (default: all sequences of a rank in one pass)", type=int)  # fmt: skip
    _add(length, "--seed", "seed of the initial weights and of the order of the data", type=int)


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    optimizer = parser.add_argument_group("optimizer")
    other, names = RULES[DEFAULT_OTHER_RULE].display_name, [n for r in RULES.values() for n in (r.name, *r.aliases)]
    _add(optimizer, "--optimizer", f"update rule of the hidden matrices; {other} updates all other parameters",
         type=_rule_name, metavar="|".join(names))  # fmt: skip
    add_plugin_flag(optimizer)
    _add(optimizer, "--lr", f"learning rate of the hidden matrices (default: {_by_rule('lr')})", type=float)
    _add(
        optimizer,
        "--rest-lr",
        f"learning rate of all other parameters: embedding, head and vectors (default: {DEFAULT_REST_LR})",
        type=float,
    )
    _add(
        optimizer,
        "--weight-decay",
        f"weight decay of the hidden matrices (default: {_by_rule('weight_decay')})",
        type=float,
    )
    _add(
        optimizer,
        "--rest-weight-decay",
        "weight decay of embedding and head; vectors never have any (default: 0)",
        type=float,
    )
    _add(
        optimizer,
        "--rest-betas",
        "decay of both moments of all other parameters (default: those of the rule that updates them)",
        type=_numbers,
        metavar="X,X",
    )
    _add(optimizer, "--cuda-graph", "run the optimizer's step as a CUDA graph, which needs a GPU (default: where it is "
         "possible and costs little memory)", action=argparse.BooleanOptionalAction)  # fmt: skip
    _add(optimizer, "--schedule", "how the learning rates fall after the warmup", choices=list(get_args(ScheduleName)))
    _add(optimizer, "--warmup-fraction", "fraction of the steps in which the learning rates rise", type=float)
    _add(
        optimizer, "--decay-fraction", "fraction of the steps in which they fall, with --schedule trapezoid", type=float
    )
    _add(
        optimizer,
        "--final-lr-fraction",
        "learning rate at the end, as a fraction of --lr and --rest-lr",
        type=float,
    )
    _add(optimizer, "--clip-norm", "clip the gradient to this norm", type=float)


def _by_rule(option: str) -> str:
    return by_value(lambda rule: default_options(rule)[option])


def _rule_name(text: str) -> str:
    try:
        return find_rule(text).name
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers separated by commas, got {text!r}") from None


def _add_devices(parser: argparse.ArgumentParser) -> None:
    parallel = parser.add_argument_group("devices and ranks")
    modes = parallel.add_mutually_exclusive_group()
    modes.add_argument(
        "--fsdp", dest="parallel", action="store_const", const="fsdp", help="shard the model over the ranks with FSDP2"
    )
    modes.add_argument(
        "--ddp", dest="parallel", action="store_const", const="ddp", help="copy the model to every rank with DDP"
    )
    parser.set_defaults(parallel=None)
    _add(parallel, "--replicas", "HSDP: shard the model within each of N replicas (implies --fsdp)", type=int)
    _add(
        parallel,
        "--tp",
        "tensor parallelism: split the matrices of a block over N ranks (implies --fsdp)",
        dest="tensor_parallel",
        type=int,
    )
    parallel.add_argument("--processes", metavar="N", type=int, help="start N ranks on this machine, without torchrun")
    _add(parallel, "--timeout", "seconds to wait for a rank that has stopped or hangs before the run ends", type=float)
    _add(parallel, "--device", "device to train on (default: cuda if there is a GPU)", choices=["cpu", "cuda"])
    precisions = list(get_args(Precision))
    _add(
        parallel,
        "--precision",
        "precision of forward and backward pass; auto is bfloat16 on a GPU and float32 on a CPU",
        choices=precisions,
    )
    _add(parallel, "--compile", "compile the transformer blocks with torch.compile", action="store_true")


def _add_files(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("checkpoints and metrics")
    _add(files, "--output", "folder for checkpoints and metrics (default: runs/MODEL-RULE)", type=Path)
    _add(files, "--resume", "resume from the newest checkpoint in --output", action="store_true")
    _add(files, "--save-every", "steps between checkpoints (default: only one, at the end)", type=int)
    _add(files, "--keep", "number of checkpoints to keep; older ones are deleted", type=int)
    _add(files, "--eval-every", "steps between validations (default: a twentieth of the run)", type=int)
    _add(files, "--eval-windows", "sequences per validation", type=int)
    _add(
        files,
        "--log-every",
        "steps between log updates, for which the host waits for the device (default: 1 on a CPU, 10 on a GPU)",
        type=int,
    )
    _add(files, "--tensorboard", "write TensorBoard events too", action="store_true")
    _add(files, "--name", "name of the run in its output (default: the name of the rule)", type=str)


def parse(argv: Sequence[str] | None, prog: str) -> tuple[TrainConfig, int | None]:
    """Parse a command line.

    Returns:
        The configuration, and the number of processes to start, or None to train in this one.
    """
    arguments = sys.argv[1:] if argv is None else argv
    try:
        load_plugins(plugins_in(arguments, prog))  # first, because rules that they register get flags too
    except ConfigError as error:
        fail(str(error))
    parser, option_flags = make_parser(prog)
    values = vars(parser.parse_args(arguments))
    processes = values.pop("processes")
    if processes is not None and processes < 1:
        parser.error(f"--processes must be at least 1, got {processes}")
    if values["parallel"] is None:
        values["parallel"] = "fsdp" if values["replicas"] * values["tensor_parallel"] > 1 else "none"
    try:
        options = given_options(values, option_flags, find_rule(values["optimizer"]))
        return TrainConfig(**values, options=options), processes
    except ValueError as error:
        parser.error(str(error))


def as_json(config: TrainConfig) -> dict[str, Any]:
    """Return the configuration as it comes back from JSON."""
    return {field.name: json_value(getattr(config, field.name)) for field in fields(config)}


def json_value(value: Any) -> Any:
    """Return a value as it comes back from JSON: paths as text, tuples as lists."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {name: json_value(each) for name, each in value.items()}
    return [json_value(each) for each in value] if isinstance(value, tuple | list) else value
