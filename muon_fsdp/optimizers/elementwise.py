"""Define two element-wise optimizers, which do not orthogonalize; `muon_fsdp.elementwise` describes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, TypeAlias, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from muon_fsdp.comm.dtensors import local, local_gradient
from muon_fsdp.comm.transfers import sum_over_axis
from muon_fsdp.declarations.option import Option, UnknownOptionError, flag, fraction, meant_name, number, suggestion
from muon_fsdp.declarations.settings import FOREIGN_KEYS
from muon_fsdp.declarations.state import PerParameter, working_dtype
from muon_fsdp.kernels import on_device
from muon_fsdp.kernels.tables import (
    FUSED_DTYPES,
    PAIR_LAYOUT,
    Tables,
    TensorList,
    is_on_device,
    make_chunks,
    num_chunks,
    refuse_capture,
)
from muon_fsdp.parameters.state_dict import StateDict, fit_state, loading_hooks
from muon_fsdp.step.fused import not_fusable

Params: TypeAlias = Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
EPSILON = 1e-8
_STATE = tuple(PerParameter(name) for name in PAIR_LAYOUT.states)
_OPTIONS = (
    Option("lr", 1e-3, "learning rate", check=number, label="learning rate"),
    Option("momentum", 0.9, "decay of the first moment", check=fraction, label="momentum parameter"),
    Option("velocity", 0.999, "decay of the second moment", check=fraction, label="velocity parameter"),
    Option("weight_decay", 0.0, "weight decay", check=number, label="weight_decay value"),
    Option("nesterov", False, "look ahead by one step of momentum", check=flag),
    Option("layerwise_norm", False, "divide the gradient of every tensor by its norm", check=flag),
)


class _ElementwiseMuon(torch.optim.Optimizer):
    """The common base of both optimizers, which differ in where weight decay is applied and in its default."""

    coupled_decay: ClassVar[bool]
    _short_name: ClassVar[str]

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.9,
        velocity: float = 0.999,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        layerwise_norm: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "velocity": velocity,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "layerwise_norm": layerwise_norm,
        }
        self._fused: dict[object, _FusedPart] = {}
        super().__init__([params] if isinstance(params, Tensor) else params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; an unknown option raises an error."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        _check({**self.defaults, **param_group})
        if isinstance(param_group.get("params"), Tensor):
            param_group = {**param_group, "params": [param_group["params"]]}
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not parameter.is_floating_point():
                self.param_groups.pop()
                raise TypeError(f"{type(self).__name__} needs real floating-point parameters, got {parameter.dtype}")

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; call `closure` first, if one is given, and return its result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # For all groups first, so that an error leaves every parameter unchanged.
        gradients = [self._gradients(group["params"]) for group in self.param_groups]
        for index, (group, gradients_of_group) in enumerate(zip(self.param_groups, gradients, strict=True)):
            parts = self._parts(index, group, gradients_of_group)
            sums: list[Tensor | None] = [None] * len(parts)
            if group["layerwise_norm"]:
                own = [part.sums_of_squares() for part in parts]
                _add_up_shards(group["params"], [part.parameters for part in parts], own)
                sums = [*own]
            for part, sums_of_part in zip(parts, sums, strict=True):
                part.update(sums_of_part)
        return loss

    def _gradients(self, parameters: Sequence[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Collect the parameters that have a gradient.

        Returns:
            For each of them the parameter, its shard, and the gradient of the shard, contiguous if the shard is.
        """
        found = []
        for parameter in parameters:
            grad = parameter.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise RuntimeError(f"{self._short_name} does not support sparse gradients")
            shard, grad = local(parameter), local_gradient(parameter, grad)
            found.append((parameter, shard, grad.contiguous() if shard.is_contiguous() else grad))
        for device in {shard.device for _, shard, _ in found}:
            refuse_capture(device)
        return found

    def _parts(
        self, index: int, group: Mapping[str, Any], gradients: Sequence[tuple[Tensor, Tensor, Tensor]]
    ) -> list[_ForeachPart | _FusedPart]:
        """Increase the step counter of every parameter of a group, and divide them into those updated together."""
        fused: dict[object, list[_Item]] = defaultdict(list)
        single: list[_Item] = []
        for parameter, shard, grad in gradients:
            state = self._state_of(parameter)
            state["step"] += 1
            item = _Item(parameter, shard, grad, *[local(state[spec.name]) for spec in _STATE])
            if (
                not_fusable(shard, [(m, torch.float32) for m in (item.first, item.second)]) is None
                and grad.dtype in FUSED_DTYPES
            ):
                fused[(index, shard.device, shard.dtype, grad.dtype)].append(item)
            else:
                single.append(item)
        parts: list[_ForeachPart | _FusedPart] = []
        for key, items in fused.items():
            part = self._fused.get(key)
            if part is None or part.numels != [item.shard.numel() for item in items]:
                part = self._fused[key] = _FusedPart(self.coupled_decay, items)
            part.fill(group, items)
            parts.append(part)
        if single:
            parts.append(_ForeachPart(self.coupled_decay, group, single))
        return parts

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the state of a parameter; the first call creates it."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = 0
            state.update({spec.name: spec.create(parameter, None) for spec in _STATE})
        return state

    def state_dict(self) -> StateDict:
        """Return the state as `torch.optim.Optimizer` does.

        If there are gradients before the first step, state is created first: `torch.distributed.checkpoint` loads only
        into state that exists.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if not self.state and any(parameter.grad is not None for parameter in parameters):
            for parameter in parameters:
                self._state_of(parameter)
        return super().state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state as `torch.optim.Optimizer` does, but copy momentum and velocity in their own precision."""
        incoming: StateDict = {}

        def before(_: torch.optim.Optimizer, given: StateDict) -> None:
            incoming.update(given)

        def after(_: torch.optim.Optimizer) -> None:
            for group, saved in zip(self.param_groups, incoming["param_groups"], strict=True):
                for parameter, key in zip(group["params"], saved["params"], strict=True):
                    values = incoming["state"].get(key, {})
                    for spec in _STATE:
                        if spec.name in values:
                            value = values[spec.name].detach()
                            self.state[parameter][spec.name] = fit_state(value, spec, parameter, parameter.device)

        with loading_hooks(self, before, after):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fused": {}}


class TritonMuon(_ElementwiseMuon):
    """Fused element-wise optimizer with coupled weight decay; it does not orthogonalize, see `muon_fsdp.elementwise`.

    Args:
        params: one tensor, several tensors, named tensors, or parameter groups.
        lr: learning rate, a float or a one-element tensor.
        momentum: decay of the first moment, in [0, 1).
        velocity: decay of the second moment, in [0, 1).
        weight_decay: coupled weight decay: weight_decay * W is added to the gradient.
        nesterov: look ahead by one step of momentum.
        layerwise_norm: divide the gradient of every parameter by its norm over all shards.
    """

    coupled_decay = True
    _short_name = "Muon"


class TritonMuonW(_ElementwiseMuon):
    """`TritonMuon` with decoupled weight decay: weights shrink by lr * weight_decay, outside of the moments.

    Args:
        params: one tensor, several tensors, named tensors, or parameter groups.
        lr: learning rate, a float or a one-element tensor.
        momentum: decay of the first moment, in [0, 1).
        velocity: decay of the second moment, in [0, 1).
        weight_decay: decoupled weight decay: W is multiplied by 1 - lr * weight_decay.
        nesterov: look ahead by one step of momentum.
        layerwise_norm: divide the gradient of every parameter by its norm over all shards.
    """

    coupled_decay = False
    _short_name = "MuonW"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.9,
        velocity: float = 0.999,
        weight_decay: float = 1e-2,
        nesterov: bool = False,
        layerwise_norm: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum=momentum,
            velocity=velocity,
            weight_decay=weight_decay,
            nesterov=nesterov,
            layerwise_norm=layerwise_norm,
        )


class _Item(NamedTuple):
    """One parameter and the local tensors of its update."""

    parameter: Tensor
    shard: Tensor
    grad: Tensor
    first: Tensor
    second: Tensor


class _ForeachPart:
    """Parameters of one group, on any device, that foreach operations update together."""

    def __init__(self, coupled: bool, group: Mapping[str, Any], items: Sequence[_Item]) -> None:
        self.coupled, self.group = coupled, group
        self.parameters, self.shards, grads, self.first, self.second = (
            list(column) for column in zip(*items, strict=True)
        )
        self.weights = [shard.to(working_dtype(shard.dtype)) for shard in self.shards]
        self.grads = [grad.to(weight.dtype) for grad, weight in zip(grads, self.weights, strict=True)]
        if coupled and group["weight_decay"] != 0:
            self.grads = list(torch._foreach_add(self.grads, self.weights, alpha=group["weight_decay"]))

    def sums_of_squares(self) -> Tensor:
        """Return the sum of squares of every local gradient, with coupled weight decay added, as float64."""
        return torch.stack([torch.linalg.vector_norm(grad, dtype=torch.float64).square() for grad in self.grads])

    def update(self, sums: Tensor | None) -> None:
        """Update the parameters; `sums` are the sums of squares over whole gradients, None without `layerwise_norm`."""
        lr, beta1, beta2 = self.group["lr"], self.group["momentum"], self.group["velocity"]
        lr = lr.reshape(()) if is_on_device(lr) else float(lr)
        decay, grads = self.group["weight_decay"], self.grads
        if sums is not None:
            grads = [g / (norm + EPSILON).to(g) for g, norm in zip(grads, sums.sqrt().unbind(), strict=True)]
        torch._foreach_lerp_(self.first, grads, 1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, grads, grads, 1 - beta2)
        direction = self.first
        if self.group["nesterov"]:
            direction = list(torch._foreach_lerp(self.first, grads, 1 - beta1))
        denominators = torch._foreach_sqrt(self.second)
        torch._foreach_add_(denominators, EPSILON)
        if not self.coupled and decay != 0:
            torch._foreach_mul_(self.weights, 1 - lr * decay)
        if isinstance(lr, Tensor):  # it stays on the device: reading it would make the host wait
            torch._foreach_div_(denominators, -lr)
            torch._foreach_addcdiv_(self.weights, direction, denominators)
        else:
            torch._foreach_addcdiv_(self.weights, direction, denominators, -lr)
        for shard, weight in zip(self.shards, self.weights, strict=True):
            if weight is not shard:
                shard.copy_(weight)


class _FusedPart:
    """CUDA parameters of one group and precision that one Triton launch updates; made anew when their sizes change."""

    def __init__(self, coupled: bool, items: Sequence[_Item]) -> None:
        shard, numels = items[0].shard, [item.shard.numel() for item in items]
        self.coupled, self.numels, self.device = coupled, numels, shard.device
        first = list(accumulate((num_chunks(numel, numel) for numel in numels), initial=0))
        chunks, aligned = make_chunks(numels, numels, first[:-1], self.device)
        first_partials = torch.tensor(first, dtype=torch.int32, device=self.device)
        self.counters = torch.zeros(len(numels), dtype=torch.int32, device=self.device)
        tensors = TensorList(
            layout=PAIR_LAYOUT,
            group=0,
            positions=range(len(numels)),
            parameter_dtype=shard.dtype,
            gradient_dtype=items[0].grad.dtype,
            chunks=chunks,
            aligned_chunks=aligned,
            first_partials=first_partials,
        )
        self.tables = Tables([tensors])
        (self.tensors,) = self.tables.lists

    def fill(self, group: Mapping[str, Any], items: Sequence[_Item]) -> None:
        """Write what a step reads to the tables. Gradients are not kept: that would keep their memory."""
        self.parameters, self.nesterov = [item.parameter for item in items], group["nesterov"]
        momentum, velocity = group["momentum"], group["velocity"]
        scalars = {
            "lr": group["lr"],
            "weight_decay": group["weight_decay"],
            "gradient_factor": 1.0,
            "momentum": momentum,
            "velocity": velocity,
            "one_minus_momentum": 1 - momentum,
            "one_minus_velocity": 1 - velocity,
        }
        shards = [item.shard for item in items]
        gradients = {position: item.grad for position, item in enumerate(items)}
        states = [(item.first, item.second) for item in items]
        with on_device(self.device):
            self.tables.fill(shards, gradients, [states], gradients, {0: scalars})

    def sums_of_squares(self) -> Tensor:
        from muon_fsdp.kernels import triton_pair

        with on_device(self.device):
            return triton_pair.sums_of_squares(self.tensors, self.counters, coupled=self.coupled)

    def update(self, sums: Tensor | None) -> None:
        from muon_fsdp.kernels import triton_pair

        with on_device(self.device):
            triton_pair.update(self.tensors, sums, coupled=self.coupled, nesterov=self.nesterov)


def _add_up_shards(group: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], sums: Sequence[Tensor]) -> None:
    """Add up, in place, sums over local gradients to sums over whole gradients.

    This takes one all-reduce per mesh axis that shards a parameter. Every parameter of the group takes part, because a
    parameter without a gradient here may have one on another rank.

    Args:
        group: all parameters of the group.
        parts: the parameters with a gradient, by part.
        sums: the sums of each part, which are overwritten.
    """
    by_axis: dict[tuple[DeviceMesh, int], list[int]] = defaultdict(list)
    for index, parameter in enumerate(group):
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    by_axis[(parameter.device_mesh, axis)].append(index)
    if not by_axis:
        return
    position = {parameter: index for index, parameter in enumerate(group)}
    device = local(group[next(iter(by_axis.values()))[0]]).device
    totals = torch.zeros(len(group), dtype=torch.float64, device=device)
    places = [torch.tensor([position[p] for p in parameters], device=device) for parameters in parts]
    for place, own in zip(places, sums, strict=True):
        totals[place] = own.to(device)
    for (mesh, axis), indices in by_axis.items():
        place = torch.tensor(indices, device=device)
        part = totals[place]
        sum_over_axis(part, mesh, axis)
        totals[place] = part
    for place, own in zip(places, sums, strict=True):
        own.copy_(totals[place])


def _check(options: Mapping[str, Any]) -> None:
    """Raise an error for a value that an option does not accept, and for a key that resembles an option."""
    by_name = {option.name: option for option in _OPTIONS}
    for name, value in options.items():
        if name in by_name:
            by_name[name].check_value(value, name)
        elif name not in FOREIGN_KEYS and isinstance(name, str) and meant_name(name, by_name) is not None:
            raise UnknownOptionError(f"Unknown option {name!r} in a parameter group{suggestion(name, by_name)}")
