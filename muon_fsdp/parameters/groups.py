"""Read users' parameter groups, and resolve the options of a group of one rule."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from muon_fsdp.comm.dtensors import local
from muon_fsdp.declarations.option import Option, UnknownOptionError, canonical, meant_name, suggestion
from muon_fsdp.declarations.settings import ARGUMENTS, FOREIGN_KEYS, PROGRESS, SCHEDULED_LRS, SCHEDULED_MOMENTA
from muon_fsdp.declarations.state import working_dtype
from muon_fsdp.parameters.names import clean_name
from muon_fsdp.parameters.routing import Route
from muon_fsdp.rules import RULES, Rule, rule_named

Params: TypeAlias = nn.Module | Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
Group: TypeAlias = dict[str, Any]
# The learning rate of AdamW where matrices have no usual ratio to it: scale "size" or a number, or a user's own rule.
INDEPENDENT_LR = 3e-4
_WHOLE_OPTIMIZER = (*ARGUMENTS, "gradient_accumulation_steps")  # what a group can't have
_OF_TORCH = {"foreach", "fused", "capturable", "maximize", "amsgrad", "differentiable"}  # options that we do not have


# ------------------------------------------------------------------------------------------------------------ options


@dataclass
class Source:
    """The options that a user passed in one place, and which of them some parameter uses.

    An option belongs to the matrices of this place if their rule has it, else to its other parameters. With the name
    of an element-wise rule as a prefix (`adamw_lr`), it belongs to the parameters of that rule.
    """

    where: str  # for errors: "MuonOptimizer", "a parameter group", "overrides['fc.*']"
    options: dict[str, Any]
    beside: Sequence[Rule] = ()  # the rules of all parameters here, as far as they decide whose option a name is
    is_constructor: bool = False  # there, options of element-wise rules need their prefix
    lr_is_for_others: bool = False  # in a constructor without matrices, lr belongs to the element-wise rule
    taken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        unknown = [name for name in self.options if not rules_with_option(name)]
        if not unknown:
            return
        if unknown[0] in _WHOLE_OPTIMIZER and not self.is_constructor:
            raise UnknownOptionError(
                f"{self.where}: {unknown[0]!r} is a setting of the whole optimizer: pass it to its constructor"
            )
        known = [*_option_names(), *(ARGUMENTS if self.is_constructor else ("rule",))]
        near = "; leave it out" if unknown[0] in _OF_TORCH else suggestion(unknown[0], known)
        raise UnknownOptionError(f"Unknown option {', '.join(map(repr, unknown))} in {self.where}{near}")

    def of(self, rule: Rule) -> dict[str, Any]:
        """Return the options passed here for parameters of a rule."""
        result: dict[str, Any] = {}
        for name, value in self.options.items():
            own = self._own_name(name, rule)
            if own is None:
                continue
            if own in result:
                raise ValueError(
                    f"{self.where}: {own!r} and {prefixed(rule, own)!r} mean the same here, because no parameter is a "
                    "matrix; pass one of them"
                )
            self._validate(rule.all_options[own], value, name)
            self.taken.add(name)
            if own != "lr" or value is not None:  # adamw_lr=None is the same as leaving it out
                result[own] = value
        return result

    def origin_of_lr(self, rule: Rule) -> str | None:
        """Return which option here sets the lr of a rule, for a report; None if none does."""
        for name, value in self.options.items():
            if value is not None and self._own_name(name, rule) == "lr":
                return f"{name} of {self.where}"
        return None

    def _own_name(self, name: str, rule: Rule) -> str | None:
        """Return the option of the rule that a name refers to in this place; None if it refers to none."""
        if not rule.needs_matrices:
            for option in rule.all_options:
                if name == prefixed(rule, option):
                    return option
            if name in rule.all_options and rule.all_options[name].shared:
                return name if prefixed(rule, name) not in self.options else None
            if self.is_constructor and not (name == "lr" and self.lr_is_for_others):
                return None
            if any(other.needs_matrices and name in other.all_options for other in self.beside):
                return None
        return name if name in rule.all_options else None

    def _validate(self, option: Option, value: Any, name: str) -> None:
        try:
            option.validate(value, name)
        except (TypeError, ValueError) as error:
            if self.is_constructor:
                raise
            raise type(error)(f"{self.where}: {error}") from None

    def require_taken(self, rules: Iterable[Rule], unused: Iterable[Rule] = ()) -> None:
        """Raise if an option had no effect, because no parameter of the place has a rule with this option.

        Args:
            rules: the rules of the parameters.
            unused: further rules that the user may have meant.
        """
        in_use = dict.fromkeys(rules)
        rules = list(dict.fromkeys([*in_use, *unused]))
        for name in self.options:
            if name in self.taken:
                continue
            for rule in rules:
                if name in rule.hints:
                    raise ValueError(f"{self.where}: rule {rule.name!r} has no {name}: {rule.hints[name]}")
            used = ", ".join(repr(rule.name) for rule in in_use) or "none"
            instead = next((prefixed(r, name) for r in rules if not r.needs_matrices and name in r.all_options), None)
            advice = f"; pass {instead!r}{' alone' if instead in self.options else ''}" if instead else ""
            owners = [repr(rule.name) for rule in rules_with_option(name)]
            belongs = f"it belongs to rule {', '.join(owners)}, and " if len(owners) <= 3 else ""
            raise ValueError(
                f"{self.where}: option {name!r} has no effect{advice}: {belongs}the rules in use are {used}"
            )


def rules_with_option(name: str) -> list[Rule]:
    """Return the rules that have an option of this name, bare or prefixed with the name of the rule."""
    return [rule for rule in RULES.values() if name in _names_of(rule)]


def prefixed(rule: Rule, option: str) -> str:
    """Return the prefixed name of an element-wise rule's option, such as `adamw_lr`."""
    return f"{rule.name}_{option}"


def _names_of(rule: Rule) -> set[str]:
    """Return the names under which users pass the options of a rule."""
    return {*rule.all_options, *(prefixed(rule, option) for option in rule.all_options if not rule.needs_matrices)}


def _option_names() -> list[str]:
    """Return the names of all options of all rules, in alphabetical order."""
    return sorted(set().union(*map(_names_of, RULES.values())))


def our_name(key: object) -> str | None:
    """Return the option or setting of ours that a key of a group is or resembles; None if the key is another's."""
    names = (*_option_names(), *_WHOLE_OPTIMIZER, "rule")
    return None if not isinstance(key, str) else key if key in names else meant_name(key, names)


def keys_of_others(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what other programs keep in a group, such as timm's `lr_scale`: neither ours, nor torch's own keys."""
    return {key: value for key, value in group.items() if key not in FOREIGN_KEYS and our_name(key) is None}


def resolve(
    rule: Rule,
    class_defaults: Mapping[str, Any],
    parameter_defaults: Mapping[str, Any],
    sources: Sequence[Source],  # general to specific
) -> Group:
    """Return the options of a group: defaults of the rule and of the class, then those of each source in turn."""
    options: Group = {name: option.default for name, option in rule.all_options.items()}
    options.update({name: value for name, value in class_defaults.items() if name in options})
    for index, source in enumerate(sources):
        options.update(source.of(rule))
        if index == 0:  # a group or an override may still change them
            options.update(parameter_defaults)
    group = {"rule": rule.name, **canonical(options)}
    rule.check_options(group)
    return group


def split_foreign(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the keys of a user's group into options and the keys of others: torch, its schedulers, other programs.

    Returns:
        The options, misspelled ones included, and the other keys.
    """
    foreign = {key: value for key, value in given.items() if key in FOREIGN_KEYS} | keys_of_others(given)
    options = {key: value for key, value in given.items() if key not in foreign and key != "rule"}
    if "rule" in given:
        try:
            rule = rule_named(given["rule"])
        except ValueError as error:
            raise ValueError(f"a parameter group: {error}") from None
        # Cyclic schedulers write momentum into every group, whatever its rule.
        if "momentum" not in rule.all_options and any(key in foreign for key in SCHEDULED_MOMENTA):
            foreign |= {"momentum": options.pop("momentum")} if "momentum" in options else {}
    for key in PROGRESS:
        foreign.pop(key, None)
    return options, foreign


def scheduled_lrs(foreign: Mapping[str, Any], given_lr: Any, lr: Any) -> dict[str, float]:
    """Return `initial_lr` and similar keys for a part of a user's group that has another lr than the group.

    They keep their ratio to lr, so a scheduler can resume with every group.
    """
    keys = [key for key in SCHEDULED_LRS if key in foreign]
    if not keys or given_lr is None or float(given_lr) == float(lr):
        return {key: foreign[key] for key in keys}
    ratio = {key: float(foreign[key]) / float(given_lr) if float(given_lr) else 1.0 for key in keys}
    return {key: float(lr) * ratio[key] for key in keys}


# ----------------------------------------------------------------------------------------------------------- parameters


def as_torch_params(params: Params) -> Any:
    """Return parameters in a form that torch.optim.Optimizer accepts; for a model, its trainable named parameters."""
    if isinstance(params, nn.Module):
        trainable = [(clean_name(name), p) for name, p in params.named_parameters() if p.requires_grad]
        frozen = sum(1 for p in params.parameters() if not p.requires_grad)
        if frozen and not trainable:
            raise ValueError(
                f"optimizer got an empty parameter list: all {frozen} parameters of the model are frozen "
                "(requires_grad is False)"
            )
        return trainable
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, (dict, str, set)) or not isinstance(params, Iterable):
        raise TypeError(
            f"params must be a model, tensors, (name, tensor) pairs or a list of groups, got {type(params).__name__}"
        )
    return params


def with_lists(groups: Any) -> list[Any]:
    """Return parameters or groups as lists, so that reading them does not exhaust an iterator."""
    listed = list(groups)
    return [
        {**group, "params": list(group["params"])}
        if isinstance(group, dict) and isinstance(group.get("params"), Iterator)
        else group
        for group in listed
    ]


def names_and_parameters(param_group: Group) -> tuple[list[str] | None, list[Tensor]]:
    """Read the parameters of a user's group.

    Returns:
        Their names, or None if they have none, and the tensors.
    """
    if "params" not in param_group:
        raise ValueError("a parameter group needs 'params'")
    params = param_group["params"]
    if isinstance(params, set):
        raise TypeError("params must be ordered: a set changes its order between runs, use a list")
    listed: list[Any] = [params] if isinstance(params, Tensor) else list(params)
    if not listed:
        return None, []
    pairs = [item for item in listed if isinstance(item, tuple)]
    if not pairs:
        names = param_group.get("param_names")
        if names is not None and (isinstance(names, str) or len(names) != len(listed)):
            raise ValueError(f"param_names must be a list of {len(listed)} names, one per parameter")
        return names, listed
    if len(pairs) != len(listed):
        raise ValueError("either all parameters of a group have names or none: pass model.named_parameters()")
    if not all(len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise TypeError("named parameters must be (name, tensor) pairs, as model.named_parameters() gives")
    return [name for name, _ in pairs], [parameter for _, parameter in pairs]


def check_parameter(name: str, parameter: object) -> None:
    """Raise an error that says what to do instead if a parameter can't be optimized."""
    if not isinstance(parameter, Tensor):
        raise TypeError(f"parameter {name!r} is not a tensor but a {type(parameter).__name__}")
    if getattr(parameter, "_is_flat_param", False):
        raise RuntimeError(f"FSDP1 is not supported: {name!r} is a flat parameter. Use fully_shard (FSDP2).")
    if getattr(parameter, "_fsdp_flattened", False):  # use_orig_params=True: a view into a flat parameter
        raise RuntimeError(f"FSDP1 is not supported: {name!r} is part of a flat parameter. Use fully_shard (FSDP2).")
    if hasattr(parameter, "_st_info"):
        raise RuntimeError(
            f"DDP(model, device_mesh=...) is not supported: it has put this rank's shard of {name!r} in place of the "
            "tensor-parallel DTensor. Use fully_shard over the data-parallel axis of the mesh."
        )
    if parameter.is_complex():
        raise ValueError(
            f"parameter {name!r} is complex, which is not supported; optimize torch.view_as_real(parameter) instead"
        )
    if not parameter.is_floating_point():
        raise ValueError(f"parameter {name!r} has dtype {parameter.dtype}; only floating-point ones can be optimized")
    if not (parameter.is_leaf or parameter.retains_grad):
        raise ValueError(
            f"parameter {name!r} is not a leaf tensor and can't be optimized: pass the tensor that it was computed from"
        )
    _check_class(name, parameter)


_usable_classes: set[type] = {Tensor, nn.Parameter}


def _check_class(name: str, parameter: Tensor) -> None:
    """Raise if a parameter is of a tensor class that can't be updated, such as torchao's quantized weights.

    One parameter of each class is tried, by a step of size zero on a copy.
    """
    with torch.no_grad():
        tensor = local(parameter)
        if type(tensor) in _usable_classes:
            return
        try:
            clone = tensor.detach().clone()
            update = torch.zeros_like(clone, dtype=working_dtype(clone.dtype))
            Rule().apply({"lr": 0.0, "weight_decay": 0.1}, [clone], [update])
        except Exception as error:
            raise TypeError(
                f"parameter {name!r} is a {type(tensor).__name__}, which can't be updated ({type(error).__name__}: "
                f"{error}). Keep it a plain floating-point tensor, or freeze it and leave it out"
            ) from error
    _usable_classes.add(type(tensor))


def refuse_zero_redundancy(name: str) -> None:
    """Raise if ZeroRedundancyOptimizer builds the optimizer: it fails when a group is divided into several."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.optim.zero_redundancy_optimizer":
            raise RuntimeError(
                f"ZeroRedundancyOptimizer can't wrap {name}, which divides a group with matrices and other parameters "
                "into one per rule. Shard parameters and state with FSDP2 (fully_shard) instead, or under DDP build "
                "FSDPMuonOptimizer(ddp_model), which splits the work over the ranks."
            )
        frame = frame.f_back


def rules_of(routes: Iterable[Route]) -> list[Rule]:
    """Return the rules of some parameters, each once."""
    return [RULES[name] for name in dict.fromkeys(route.rule for route in routes)]
