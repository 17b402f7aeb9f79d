"""What a training run is told: `TrainConfig`, and the same as flags of a command line."""

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

VOCABULARY_MULTIPLE = 64  # 50,257 tokens get 50,304 rows: GPUs multiply odd sizes slowly
DEFAULT_REST_LR = 4e-3


@dataclass(frozen=True)
class TrainConfig:
    """One run. None stands for a default that depends on the rest, as the flags' help says.

    `optimizer` is the rule of the hidden matrices, by name or alias; it ends up as the name. `options` are those of the
    rule that differ from its defaults. `plugin` names files that register rules, and they are imported.
    """

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

    optimizer: str = DEFAULT_RULE
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    plugin: Sequence[str] = ()
    lr: float | None = None
    rest_lr: float | None = None
    weight_decay: float | None = None
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
            raise ConfigError("give --steps or --epochs, not both")
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
        for name in ("lr", "rest_lr", "weight_decay"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ConfigError(f"{_flag(name)} must not be negative, got {value}")
        if self.parallel == "ddp" and self.replicas * self.tensor_parallel > 1:
            raise ConfigError("--replicas and --tp belong to --fsdp; leave out --ddp")
        self._settle_optimizer()

    def _settle_optimizer(self) -> None:
        """Find the rule and check its options."""
        load_plugins(self.plugin)
        rule = find_rule(self.optimizer)
        check_options(self.options, rule)
        for name, value in (("optimizer", rule.name), ("options", dict(self.options)), ("plugin", tuple(self.plugin))):
            object.__setattr__(self, name, value)
        reason = rule.not_capturable(self.matrix_options) if self.cuda_graph else None
        if reason is not None:
            raise ConfigError(f"--cuda-graph can't capture this step: {reason}; leave it out")

    @property
    def rule(self) -> Rule:
        """The rule of the hidden matrices."""
        return RULES[self.optimizer]

    @property
    def matrix_options(self) -> dict[str, Any]:
        """All options of the hidden matrices."""
        own = {"lr": self.lr, "weight_decay": self.weight_decay}
        given = {name: value for name, value in own.items() if value is not None}
        return {**default_options(self.rule), **given, **self.options}

    @property
    def label(self) -> str:
        return self.name or self.rule.display_name

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


def make_parser(prog: str) -> tuple[argparse.ArgumentParser, list[OptionFlag]]:
    """Return the flags of every program that trains, and those of options of rules.

    Each of the others sets the field of `TrainConfig` that has its name. Rules must have been registered before.
    """
    parser = OneLineParser(
        prog=prog,
        allow_abbrev=False,  # the launcher has to find --processes
        description="Train a GPT on one device, or on ranks with DDP, FSDP2, HSDP and tensor parallelism.",
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
    _add(model, "--model", "preset", choices=list(PRESETS))
    _add(model, "--sequence-length", "tokens in a window (default: the preset's)", type=int)
    _add(model, "--vocab-size", "rows of the embedding (default: the data's, up to a multiple of 64; the preset's for "
         "token shards without a tokenizer.json)", type=int)  # fmt: skip
    _add(model, "--positions", "default: the preset's", choices=["rope", "learned"])
    switch = argparse.BooleanOptionalAction
    _add(model, "--qk-norm", "normalize queries and keys (default: the preset's)", action=switch)
    _add(model, "--data", "text file, folder of texts, or folder of token shards *.bin with 16 bits a token "
         "(default: the source of Python's standard library)", type=Path)  # fmt: skip


def _add_length(parser: argparse.ArgumentParser) -> None:
    length = parser.add_argument_group("length and batches")
    _add(length, "--steps", "optimizer steps (default: 100, or what --epochs says)", type=int)
    _add(length, "--epochs", "as many steps as read the text so many times", type=float)
    _add(length, "--batch-size", "sequences in a step, over all ranks", type=int)
    _add(length, "--micro-batch-size", "sequences in one forward on one rank; gradients of several add up "
         "(default: all that a rank has)", type=int)  # fmt: skip
    _add(length, "--seed", "of the weights and of the data's order", type=int)


def _add_optimizer(parser: argparse.ArgumentParser) -> None:
    optimizer = parser.add_argument_group("optimizer")
    rest, names = RULES[DEFAULT_OTHER_RULE].display_name, [n for r in RULES.values() for n in (r.name, *r.aliases)]
    _add(optimizer, "--optimizer", f"rule of the hidden matrices; the rest takes {rest}", type=_rule_name,
         metavar="|".join(names))  # fmt: skip
    add_plugin_flag(optimizer)
    _add(optimizer, "--lr", f"of the matrices (default: {_by_rule('lr')})", type=float)
    _add(optimizer, "--rest-lr", f"of embedding, head and vectors (default: {DEFAULT_REST_LR})", type=float)
    _add(optimizer, "--weight-decay", f"of the matrices (default: {_by_rule('weight_decay')})", type=float)
    _add(optimizer, "--cuda-graph", "capture the optimizer's step (on a GPU)", action="store_true")
    _add(optimizer, "--schedule", "of every lr", choices=list(get_args(ScheduleName)))
    _add(optimizer, "--warmup-fraction", "of the steps", type=float)
    _add(optimizer, "--decay-fraction", "of the steps, at the end of a trapezoid", type=float)
    _add(optimizer, "--final-lr-fraction", "of the lr, at the last step", type=float)
    _add(optimizer, "--clip-norm", "largest norm of the gradient", type=float)


def _by_rule(option: str) -> str:
    return by_value(lambda rule: default_options(rule)[option])


def _rule_name(text: str) -> str:
    try:
        return find_rule(text).name
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_devices(parser: argparse.ArgumentParser) -> None:
    parallel = parser.add_argument_group("devices and ranks")
    modes = parallel.add_mutually_exclusive_group()
    modes.add_argument("--fsdp", dest="parallel", action="store_const", const="fsdp", help="FSDP2: shard everything")
    modes.add_argument("--ddp", dest="parallel", action="store_const", const="ddp", help="DDP: replicas")
    parser.set_defaults(parallel=None)
    _add(parallel, "--replicas", "HSDP: so many replicas of the shards (implies --fsdp)", type=int)
    _add(parallel, "--tp", "tensor parallelism over so many ranks (implies --fsdp)", dest="tensor_parallel", type=int)
    parallel.add_argument("--processes", metavar="N", type=int, help="start N processes here, instead of torchrun")
    _add(parallel, "--timeout", "seconds to wait for a rank that is stopped or hangs", type=float)
    _add(parallel, "--device", "cpu or cuda (default: cuda where there is one)", choices=["cpu", "cuda"])
    precisions = list(get_args(Precision))
    _add(parallel, "--precision", "of the forward and backward; auto is bfloat16 on GPUs", choices=precisions)
    _add(parallel, "--compile", "torch.compile the blocks", action="store_true")


def _add_files(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("what it leaves behind")
    _add(files, "--output", "folder (default: runs/MODEL-RULE)", type=Path)
    _add(files, "--resume", "go on from the newest checkpoint in the folder", action="store_true")
    _add(files, "--save-every", "steps between checkpoints (default: one at the end)", type=int)
    _add(files, "--keep", "checkpoints", type=int)
    _add(files, "--eval-every", "steps between validations (default: a twentieth of the run)", type=int)
    _add(files, "--eval-windows", "sequences in a validation", type=int)
    _add(files, "--log-every", "steps between looks at the device (default: 1 on a CPU, 10 on a GPU)", type=int)
    _add(files, "--tensorboard", "write TensorBoard events too", action="store_true")
    _add(files, "--name", "of the run, in its lines", type=str)


def parse(argv: Sequence[str] | None, prog: str) -> tuple[TrainConfig, int | None]:
    """Return the configuration, and how many processes to start (None: this one)."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        load_plugins(plugins_in(arguments, prog))  # before the flags are made, which depend on them
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
    """Return the configuration as JSON holds it."""
    return {field.name: json_value(getattr(config, field.name)) for field in fields(config)}


def json_value(value: Any) -> Any:
    """Return a value as it comes back from JSON: paths as text, tuples as lists."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {name: json_value(each) for name, each in value.items()}
    return [json_value(each) for each in value] if isinstance(value, tuple | list) else value
