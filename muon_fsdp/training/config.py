"""Describe a training run as a `TrainConfig`, whose fields are the command-line flags, and parse one."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from muon_fsdp.declarations.option import Option, meant_name, suggestion
from muon_fsdp.declarations.settings import SETTINGS
from muon_fsdp.rules import DEFAULT_OTHER_RULE, DEFAULT_RULE, RULES, Rule
from muon_fsdp.rules.base import VIEW_OPTIONS
from muon_fsdp.rules.recipes import recipes
from muon_fsdp.training.arguments import ConfigError, OneLineParser
from muon_fsdp.training.model import PRESETS, GPTConfig, preset
from muon_fsdp.training.plugins import find_rule, load_plugins

VOCABULARY_MULTIPLE = 64  # 50,257 tokens get 50,304 rows, because GPUs are slow on odd sizes
DEFAULT_REST_LR = 4e-3
OWN_FIELDS = ("lr", "weight_decay", "state_dtype", "rounding")  # options of rules that are fields of TrainConfig
COMMON_OPTIONS = ("momentum", "nesterov", "beta2", "betas", "lambda_mode")  # options of rules that have flags
SET_BY_RECIPE = (
    "optimizer", "lr", "rest_lr", "weight_decay", "rest_weight_decay", "rest_betas", "attention", "schedule",
    "warmup_fraction", "decay_fraction", "final_lr_fraction",
)  # fmt: skip
STARTS_FROM = {"nesterov": True}  # defaults of the program that replace those of the rules

# Flags of `muon-fsdp plan` and of other programs that have another name here.
MEANT = {
    "--rule": "--optimizer",
    "--world-size": "--processes",
    "--nproc-per-node": "--processes",
    "--mesh": "--replicas and --processes",
    "--hsdp": "--replicas",
    "--dtype": "--weights or --precision",
    "--bf16": "--precision bfloat16",
}

Check = tuple[Callable[[Any], bool], str]
_COUNT: Check = (lambda value: value >= 1, "be at least 1")
_FRACTION: Check = (lambda value: 0 <= value <= 1, "be between 0 and 1")
_POSITIVE: Check = (lambda value: value > 0, "be positive")
_FINITE: Check = (lambda value: not math.isinf(value), "be finite")
_NOT_NEGATIVE: Check = (lambda value: value >= 0, "not be negative")
_SEED: Check = (lambda value: 0 <= value < 2**63, "be between 0 and 2**63 - 1")


def _flag(default: Any, text: str, *checks: Check, section: str = "", **options: Any) -> Any:
    """Make a field, with the help text of its flag and what a value other than None must be.

    `section` is the section of `--help` that starts with this flag, and `options` are arguments of `add_argument` that
    do not follow from the field's type, and `flag` if its name differs.
    """
    return field(default=default, metadata={"text": text, "checks": checks, "section": section, "options": options})


@dataclass(frozen=True)
class TrainConfig:
    """The configuration of one run. None means a default that depends on other fields; the help texts describe it.

    `optimizer` is given by name or alias and stored by name. `options` are the options of that rule that differ from
    its defaults. `plugin` lists files that register rules; creating the configuration imports them.
    """

    model: str = _flag("small", "model size", section="model and data", choices=list(PRESETS), metavar=None)
    sequence_length: int | None = _flag(None, "tokens per sequence (default: that of --model)", _COUNT)
    vocab_size: int | None = _flag(None, "size of the model's vocabulary (default: the data's, rounded up to a "
        "multiple of 64; that of --model for token shards without a tokenizer.json)", _COUNT)  # fmt: skip
    positions: Literal["rope", "learned"] | None = _flag(None, "positional encoding (default: that of --model)")
    qk_norm: bool | None = _flag(None, "normalize queries and keys (default: as --model does)")
    tie_embeddings: bool | None = _flag(None, "use the embedding's weight as the head (default: as --model does)")
    scale_embedding: bool | None = _flag(None, "multiply the embedding's output by the square root of the width "
        "(default: as --model does)")  # fmt: skip
    data: Path | None = _flag(None, "text file, folder of text files, or folder of token shards "  # noqa: RUF009
        "(*.bin, 16 bits per token) (default: the source code of Python's standard library)")  # fmt: skip

    steps: int | None = _flag(None, "number of optimizer steps (default: 100, or as --epochs requires)", _COUNT,
        section="training length and batches")  # fmt: skip
    epochs: float | None = _flag(None, "train on X times as many tokens as the training data has, instead of --steps",
        _POSITIVE, _FINITE)  # fmt: skip
    batch_size: int = _flag(16, "sequences per step, over all ranks", _COUNT)
    micro_batch_size: int | None = _flag(None, "sequences per forward pass on one rank; gradients of several passes "
        "are accumulated (default: all sequences of a rank in one pass)", _COUNT)  # fmt: skip
    seed: int = _flag(0, "seed of the initial weights and of the order of the data", _SEED)

    optimizer: str = _flag(DEFAULT_RULE, "update rule of the hidden matrices; the rule "
        f"{DEFAULT_OTHER_RULE} updates all other parameters", section="optimizer")  # fmt: skip
    plugin: Sequence[str] = _flag((), "Python file, or package.module, that registers update rules of your own; repeat "
        "it for several", action="append", metavar="FILE")  # fmt: skip
    lr: float | None = _flag(None, "learning rate of the hidden matrices (default: {by_rule})", _NOT_NEGATIVE)
    rest_lr: float | None = _flag(None, "learning rate of all other parameters: embedding, head and vectors (default: "
        f"{DEFAULT_REST_LR})", _NOT_NEGATIVE)  # fmt: skip
    weight_decay: float | None = _flag(None, "weight decay of the hidden matrices (default: {by_rule})", _NOT_NEGATIVE)
    rest_weight_decay: float | None = _flag(None, "weight decay of embedding and head; vectors never have any "
        "(default: 0)", _NOT_NEGATIVE)  # fmt: skip
    rest_betas: Sequence[float] | None = _flag(None, "decay of both moments of all other parameters (default: those of "
        "the rule that updates them)", metavar="X,X", type=lambda text: _numbers(text))  # fmt: skip
    recipe: str | None = _flag(None, "published recipe, whose optimizer and schedules replace all flags about these: "
        + ", ".join(recipes), metavar="NAME")  # fmt: skip
    attention: Literal["split", "whole", "per_head"] = _flag("split", "whether each head of Q, K and V is a matrix of "
        "its own (per_head); split and whole are the same for this model")  # fmt: skip
    state_dtype: Literal["float32", "bfloat16", "int8"] = _flag("float32", "how moments are stored, those of all "
        "parameters; int8 takes a quarter of the memory")  # fmt: skip
    offload_state: bool = _flag(False, "keep moments in the memory of the host, and copy them to the device while it "
        "computes")  # fmt: skip
    weights: Literal["float32", "bfloat16"] = _flag("float32", "precision of the weights themselves; bfloat16 keeps no "
        "float32 copy, and the forward pass is bfloat16 too")  # fmt: skip
    rounding: Literal["nearest", "stochastic", "remainder"] = _flag("nearest", "how --weights bfloat16 are rounded "
        "after a step; nearest loses updates below half an ulp")  # fmt: skip
    cuda_graph: bool | None = _flag(None, "run the optimizer's step as a CUDA graph, which needs a GPU (default: where "
        "it is possible and costs little memory)")  # fmt: skip
    schedule: Literal["cosine", "trapezoid"] = _flag("cosine", "how the learning rates fall after the warmup")
    warmup_fraction: float = _flag(0.1, "fraction of the steps in which the learning rates rise", _FRACTION)
    decay_fraction: float = _flag(0.4, "fraction of the steps in which they fall, with --schedule trapezoid", _FRACTION)
    final_lr_fraction: float = _flag(0.05, "learning rate at the end, as a fraction of --lr and --rest-lr", _FRACTION)
    clip_norm: float = _flag(1.0, "clip the gradient to this norm", _POSITIVE)
    qk_clip: float | None = _flag(None, "after each step, scale queries and keys of heads whose largest attention "
        "logit exceeds this; needs --no-qk-norm (default: no clipping)", _POSITIVE, _FINITE)  # fmt: skip
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    parallel: Literal["none", "ddp", "fsdp"] = "none"
    replicas: int = _flag(1, "HSDP: shard the model within each of N replicas (implies --fsdp)", _COUNT,
        section="devices and ranks")  # fmt: skip
    tensor_parallel: int = _flag(1, "tensor parallelism: split the matrices of a block over N ranks (implies --fsdp)",
        _COUNT, flag="--tp")  # fmt: skip
    timeout: float = _flag(600.0, "seconds to wait for a rank that has stopped or hangs before the run ends", _POSITIVE,
        _FINITE)  # fmt: skip
    device: Literal["cpu", "cuda"] | None = _flag(None, "device to train on (default: cuda if there is a GPU)")
    precision: Literal["auto", "float32", "bfloat16"] = _flag("auto", "precision of forward and backward pass; auto is "
        "bfloat16 on a GPU and float32 on a CPU")  # fmt: skip
    compile: bool = _flag(False, "compile the transformer blocks with torch.compile")

    output: Path | None = _flag(None, "folder for checkpoints and metrics "  # noqa: RUF009
        "(default: runs/MODEL-RULE)", section="checkpoints and metrics")  # fmt: skip
    resume: bool = _flag(False, "resume from the newest checkpoint in --output")
    save_every: int | None = _flag(None, "steps between checkpoints (default: only one, at the end)", _COUNT)
    keep: int = _flag(2, "number of checkpoints to keep; older ones are deleted", _COUNT)
    eval_every: int | None = _flag(None, "steps between validations (default: a twentieth of the run)", _COUNT)
    eval_windows: int = _flag(64, "sequences per validation", _COUNT)
    log_every: int | None = _flag(None, "steps between log updates, for which the host waits for the device (default: "
        "1 on a CPU, 10 on a GPU)", _COUNT)  # fmt: skip
    tensorboard: bool = _flag(False, "write TensorBoard events too")
    name: str | None = _flag(None, "name of the run in its output (default: the name of the rule)")

    def __post_init__(self) -> None:
        preset(self.model)
        if self.steps is not None and self.epochs is not None:
            raise ConfigError("pass --steps or --epochs, not both")
        for each in fields(self):
            value = getattr(self, each.name)
            for is_valid, words in each.metadata.get("checks", ()) if value is not None else ():
                if not is_valid(value):
                    raise ConfigError(f"{_flag_name(each)} must {words}, got {value}")
        if self.rounding != "nearest" and self.weights == "float32":
            raise ConfigError(f"--rounding {self.rounding} is not for float32 weights: pass --weights bfloat16 too")
        if self.precision == "float32" and self.weights != "float32":
            raise ConfigError(f"--precision float32 does not work with --weights {self.weights}: leave out one")
        if self.parallel == "ddp" and self.replicas * self.tensor_parallel > 1:
            raise ConfigError("--replicas and --tp work only with --fsdp; leave out --ddp")
        self._settle_optimizer()

    def _settle_optimizer(self) -> None:
        """Import the plugins, find the rule and check its options."""
        load_plugins(self.plugin)
        if self.recipe is not None:
            object.__setattr__(self, "optimizer", self._rule_of_recipe())
        rule = find_rule(self.optimizer)
        _check_options(self.options, rule)
        for name, value in (("optimizer", rule.name), ("options", dict(self.options)), ("plugin", tuple(self.plugin))):
            object.__setattr__(self, name, value)
        if self.rest_betas is not None:
            try:
                RULES[DEFAULT_OTHER_RULE].all_options["betas"].validate(self.rest_betas)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"--rest-betas: {error}") from None
        if self.qk_clip is not None and (preset(self.model).qk_norm if self.qk_norm is None else self.qk_norm):
            raise ConfigError("--qk-clip does nothing if queries and keys are normalized: pass --no-qk-norm too")
        if self.qk_clip is not None and rule.multiplies_weights:
            raise ConfigError(
                f"--qk-clip does not work with --optimizer {rule.name}, which decides the size of weights"
            )
        reason = rule.not_capturable(self.matrix_options) if self.cuda_graph else None
        if reason is not None:
            raise ConfigError(f"--cuda-graph cannot capture this optimizer's step: {reason}; leave out --cuda-graph")

    def _rule_of_recipe(self) -> str:
        """Return the rule of the recipe; raise if there is no such recipe, or if flags are about what it sets."""
        assert self.recipe is not None
        if self.recipe not in recipes:
            near = suggestion(self.recipe, recipes)
            raise ConfigError(f"unknown --recipe {self.recipe}; valid names are {', '.join(recipes)}{near}")
        rule: str = recipes[self.recipe].options.get("rule", DEFAULT_RULE)
        own = [each for each in fields(self) if each.name in SET_BY_RECIPE and getattr(self, each.name) != each.default]
        flags = [_flag_name(each) for each in own if (each.name, getattr(self, each.name)) != ("optimizer", rule)]
        flags += [f"--set {name}=..." for name in self.options]
        if flags:
            raise ConfigError(
                f"--recipe {self.recipe} sets the optimizer and its schedules: leave out {', '.join(flags)}"
            )
        return rule

    @property
    def rule(self) -> Rule:
        """Return the rule that updates the hidden matrices."""
        return RULES[self.optimizer]

    @property
    def matrix_options(self) -> dict[str, Any]:
        """Return all options of the hidden matrices, defaults included."""
        if self.recipe is not None:
            given = recipes[self.recipe].options
            return {**default_options(self.rule), **{n: given[n] for n in self.rule.all_options if n in given}}
        own = {name: getattr(self, name) for name in OWN_FIELDS if getattr(self, name) is not None}
        return {**default_options(self.rule), **own, **self.options}

    @property
    def label(self) -> str:
        """Return the name of the run in what it prints."""
        return self.name or self.recipe or self.rule.display_name

    @property
    def folder(self) -> Path:
        """Return the folder for checkpoints and metrics."""
        return self.output or Path("runs") / f"{self.model}-{self.recipe or self.optimizer}"

    def model_config(self, data_vocabulary: int | None) -> GPTConfig:
        """Return the preset with the changes of the flags; `data_vocabulary` is None for data of unknown vocabulary."""
        base = preset(self.model)
        rounded = -(-(data_vocabulary or base.vocab_size) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        vocab_size = self.vocab_size or rounded
        if data_vocabulary is not None and vocab_size < data_vocabulary:
            raise ConfigError(
                f"--vocab-size {vocab_size} is too small: the data has a vocabulary of {data_vocabulary} tokens"
            )
        names = ("sequence_length", "positions", "qk_norm", "tie_embeddings", "scale_embedding")
        changes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        try:
            return replace(base, vocab_size=vocab_size, **changes)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def as_json(self) -> dict[str, Any]:
        """Return the configuration as it comes back from JSON."""
        return dict(json_value(asdict(self)))


def json_value(value: Any) -> Any:
    """Return a value as it comes back from JSON: paths as text, tuples as lists."""
    return json.loads(json.dumps(value, default=str))


# --------------------------------------------------------------------------------------------------- options of rules


def default_options(rule: Rule) -> dict[str, Any]:
    """Return the options of the hidden matrices, without views, if no flag is passed."""
    views = {option.name for option in VIEW_OPTIONS}
    declared = {name: option.default for name, option in rule.all_options.items() if name not in views}
    starts = {name: value for name, value in STARTS_FROM.items() if name in declared}
    recipe = {name: value for name, value in rule.recipe.items() if name in OWN_FIELDS}
    return {**declared, **starts, **recipe}


def _check_options(options: Mapping[str, Any], rule: Rule) -> None:
    """Raise ConfigError for an option that a rule does not have, or a value that it does not accept."""
    flags = {each.name: _flag_name(each) for each in fields(TrainConfig) if each.metadata}
    for name, value in options.items():
        meant = _of_the_rest(name)
        if meant in flags and (name in OWN_FIELDS or name not in rule.all_options):
            flag = flags[meant] if str(value).lower() == "true" else f"{flags[meant]} {value}"
            raise ConfigError(f"{meant!r} is a field of TrainConfig, not an option: pass {meant}={value!r}, or {flag}")
        if name not in rule.all_options:
            if name in rule.hints:
                raise ConfigError(f"option {name!r}: rule {rule.name!r} has no {name}: {rule.hints[name]}")
            owners = ", ".join(repr(other.name) for other in RULES.values() if name in other.all_options)
            near = suggestion(name, default_options(rule).keys() - set(OWN_FIELDS))
            instead = f"only {owners} has it; leave it out" if owners else f"no rule has it{near}"
            raise ConfigError(f"option {name!r} is not an option of rule {rule.name!r}: {instead}")
        try:
            rule.all_options[name].validate(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from None


def _of_the_rest(name: str) -> str:
    """Return the name of an option of this program, given that of the optimizer: `adamw_lr` is `rest_lr` here."""
    return name.replace(f"{DEFAULT_OTHER_RULE}_", "rest_")


def _read_option(option: Option, text: str) -> Any:
    """Convert the text of an option. Without a check of its own, the value must have the type of the default."""
    if text in option.choices or (isinstance(option.default, str) and not option.choices):
        return text
    value = read_value(text)
    if isinstance(option.default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    unchecked = option.check is None and not option.choices and option.default is not None
    if unchecked and type(value) is not type(option.default):
        raise ConfigError(f"option {option.name!r} must be like its default {option.default!r}, got {text!r}")
    return value


def read_value(text: str) -> Any:
    """Convert a text to None, True or False, a number, a tuple, or leave it as it is."""
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    if "," in text:
        return tuple(map(read_value, text.split(",")))
    try:
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        return text


# ------------------------------------------------------------------------------------------------------ command line


def _flag_name(each: Any) -> str:
    return str(each.metadata["options"].get("flag", "--" + each.name.replace("_", "-")))


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Make the parser of every program that trains: a flag for each field of `TrainConfig`, and a few others."""
    parser = OneLineParser(
        prog=prog,
        allow_abbrev=False,  # a new flag must not change what an abbreviation means
        description="Train a GPT on one device, or on several with DDP, FSDP2, HSDP or tensor parallelism.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=100),
    )
    types, group = get_type_hints(TrainConfig), parser.add_argument_group()
    for each in fields(TrainConfig):
        if each.metadata.get("section"):
            group = parser.add_argument_group(each.metadata["section"])
        if each.name == "options":
            _add_option_flags(parser.add_argument_group("options of the update rule"))
        elif each.name == "replicas":
            modes = group.add_mutually_exclusive_group()
            mode: Any = {"dest": "parallel", "action": "store_const"}
            modes.add_argument("--fsdp", **mode, const="fsdp", help="shard the model over the ranks with FSDP2")
            modes.add_argument("--ddp", **mode, const="ddp", help="copy the model to every rank with DDP")
            text = "start N ranks on this machine, without torchrun"
            group.add_argument("--processes", metavar="N", type=int, help=text)
        if each.metadata:
            text = each.metadata["text"].replace("{by_rule}", _defaults_by_rule(each.name))
            options = {**_argument_of(types[each.name], each.default), **each.metadata["options"]}
            options.pop("flag", None)
            if each.name == "optimizer":
                options["metavar"] = "|".join(name for rule in RULES.values() for name in (rule.name, *rule.aliases))
            shown = each.default is not None and each.default is not False and each.default != ()
            text += " (default: %(default)s)" if shown else ""
            default = list(each.default) if each.default == () else each.default  # argparse appends to it
            group.add_argument(_flag_name(each), dest=each.name, default=default, help=text, **options)
    return parser


def _argument_of(annotation: Any, default: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` that follow from the type of a field."""
    without_none = get_args(annotation)[0] if type(None) in get_args(annotation) else annotation
    if get_origin(without_none) is Literal:
        return {"choices": list(get_args(without_none))}
    if without_none is bool:
        return {"action": "store_true" if default is False else argparse.BooleanOptionalAction}
    metavars = {int: "N", float: "X", Path: "PATH", str: "NAME"}
    return {"type": without_none, "metavar": metavars[without_none]} if without_none in metavars else {}


def _add_option_flags(group: argparse._ActionsContainer) -> None:
    """Add `--set`, and a flag for each common option; `parse` moves their values to `options`."""
    for name in COMMON_OPTIONS:
        rules = [rule for rule in RULES.values() if name in rule.all_options]
        option, default = rules[0].all_options[name], default_options(rules[0])[name]
        text = f"{option.doc} (default: {_written(default)}; {', '.join(rule.name for rule in rules)})"
        if isinstance(default, bool):
            values: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        else:
            values = {"metavar": "|".join(option.choices) or ",".join("X" for _ in _written(default).split(","))}
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"option {name}", help=text.replace("%", "%%"), **values)
    text = "any option of the update rule, such as ns_steps=3 (docs/options.md lists them); repeat it for several"
    group.add_argument("--set", action="append", default=[], type=_name_and_value, metavar="NAME=VALUE", help=text)


def _hint_at_flag(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """Return what to pass instead of the first unknown argument that means something; nothing if none does."""
    declared = {name for rule in RULES.values() for name in rule.all_options}
    flags = {flag.removeprefix("--").replace("-", "_"): flag for flag in parser._option_string_actions}
    for argument in unknown:
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if argument in PRESETS:
            return f": did you mean --model {argument}?"
        if not flag.startswith("--"):
            continue
        if flag.startswith("--no-") and name in flags:
            return f": leave out {flags[name]}"
        near = flags.get(_of_the_rest(name)) or MEANT.get(flag)
        if near is not None:
            return f": pass {near}"
        if name in declared:
            return f": pass an option of a rule as --set {name}={value if equals else 'VALUE'}"
        if name in {setting.name for setting in SETTINGS}:
            return f": {name} is an argument of MuonOptimizer that this program does not have"
        likely = meant_name(name, flags) or next((each for each in flags if each.startswith(name)), None)
        if likely is not None:
            return f": did you mean {flags[likely]}?"
    return ""


def _name_and_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers separated by commas, got {text!r}") from None


def _defaults_by_rule(option: str) -> str:
    """Return the default of an option as text, such as "0.02 for a, b; 0.1 for c"."""
    names: dict[str, list[str]] = {}
    for rule in RULES.values():
        names.setdefault(_written(default_options(rule).get(option)), []).append(rule.name)
    return "; ".join(f"{value} for {', '.join(rules)}" for value, rules in names.items())


def _written(value: object) -> str:
    """Return a value as a user writes it after a flag."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(map(_written, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse(argv: Sequence[str], prog: str) -> tuple[TrainConfig, int | None]:
    """Return the configuration of a command line, and how many processes to start; None means to train in this one."""
    parser = make_parser(prog)
    parsed, unknown = parser.parse_known_args(argv)
    values = vars(parsed)
    processes = values.pop("processes")
    if processes is not None and processes < 1:
        parser.error(f"--processes must be at least 1, got {processes}")
    if values["parallel"] is None:
        values["parallel"] = "fsdp" if values["replicas"] * values["tensor_parallel"] > 1 else "none"
    common = {name: values.pop(f"option {name}") for name in COMMON_OPTIONS}
    options = {name: value for name, value in common.items() if value is not None} | dict(values.pop("set"))
    try:
        load_plugins(values["plugin"])  # first, because they register rules
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint_at_flag(unknown, parser)}")
        declared = find_rule(values["optimizer"]).all_options
        for name, text in options.items():
            if name in declared and isinstance(text, str):
                options[name] = _read_option(declared[name], text)
        return TrainConfig(**values, options=options), processes
    except ValueError as error:
        parser.error(str(error))
