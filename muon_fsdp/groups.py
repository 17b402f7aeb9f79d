"""Parameter groups as users give them, and the options that a group of one rule ends up with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from muon_fsdp.options import ADAMW_OPTIONS, SCHEDULED_LRS, canonical
from muon_fsdp.routing import Route, clean_name
from muon_fsdp.rules import RULES

Params: TypeAlias = nn.Module | Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
Group: TypeAlias = dict[str, Any]


def options_of(
    route: Route,
    given: Mapping[str, Any],
    all_routes: Sequence[Route],
    defaults: Mapping[str, Any],
    adamw_defaults: Mapping[str, Any],
) -> Group:
    """The options of a new group, from the least to the most specific source."""
    override = dict(route.options)
    if RULES[route.rule].orthogonalizes:
        # betas and eps too, though Muon has no use for them: every group has every key, as checkpoints need.
        sources = [adamw_defaults, defaults, given, override]
    else:
        same_override = [other for other in all_routes if other.options == route.options]
        sources = [
            defaults,
            adamw_defaults,
            _of_adamw(given, beside_matrices=any_orthogonalizes(all_routes)),
            _of_adamw(override, beside_matrices=any_orthogonalizes(same_override)),
        ]
    options: Group = {}
    for source in sources:
        options.update({key: value for key, value in source.items() if key not in ADAMW_OPTIONS})
    options["rule"] = route.rule
    options["micro_step"] = 0  # calls of step() since the last that updated; saved with the group
    return canonical(options)


def as_torch_params(params: Params) -> Any:
    if isinstance(params, nn.Module):
        return [(clean_name(name), p) for name, p in params.named_parameters() if p.requires_grad]
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, (dict, str, set)) or not isinstance(params, Iterable):
        raise TypeError(
            f"params must be a model, tensors, (name, tensor) pairs or a list of groups, got {type(params).__name__}"
        )
    return params


def names_and_parameters(param_group: Group) -> tuple[list[str] | None, list[Tensor]]:
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
        raise ValueError("either all parameters of a group have names or none")
    if not all(len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise TypeError("named parameters must be (name, tensor) pairs, as model.named_parameters() gives")
    return [name for name, _ in pairs], [parameter for _, parameter in pairs]


def check_parameter(name: str, parameter: object) -> None:
    if not isinstance(parameter, Tensor):
        raise TypeError(f"parameter {name!r} is not a tensor but a {type(parameter).__name__}")
    if getattr(parameter, "_is_flat_param", False):
        raise RuntimeError(f"FSDP1 is not supported: {name!r} is a flat parameter. Use fully_shard (FSDP2).")
    if parameter.is_complex():
        raise ValueError(
            f"parameter {name!r} is complex, which is not supported; optimize torch.view_as_real(parameter) instead"
        )
    if not parameter.is_floating_point():
        raise ValueError(f"parameter {name!r} has dtype {parameter.dtype}; only floating-point ones can be optimized")
    if not (parameter.is_leaf or parameter.retains_grad):
        raise ValueError(f"parameter {name!r} is not a leaf tensor and can't be optimized")


def adamw_options(options: Mapping[str, Any]) -> Group:
    return {ADAMW_OPTIONS[key]: value for key, value in options.items() if key in ADAMW_OPTIONS}


def _of_adamw(options: Mapping[str, Any], *, beside_matrices: bool) -> Group:
    """What the options of a group mean for its AdamW parameters: lr and weight_decay are those of the matrices."""
    of_matrices = ("lr", "weight_decay", *SCHEDULED_LRS) if beside_matrices else ()
    own = {key: value for key, value in options.items() if key not in of_matrices}
    own.update(adamw_options(options))
    return own


def any_orthogonalizes(routes: Iterable[Route]) -> bool:
    return any(RULES[route.rule].orthogonalizes for route in routes)
