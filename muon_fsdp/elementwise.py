"""TritonMuon and TritonMuonW are NOT the orthogonalizing optimizer (that is `muon_fsdp.MuonOptimizer`).

They are a pair of fused element-wise optimizers with a momentum and a velocity:

    g = grad                    (+ weight_decay * W in TritonMuon: coupled)
    g = g / (||g||_2 + 1e-8)    with layerwise_norm: the norm of the whole tensor
    m = momentum * m + (1 - momentum) * g;   v = velocity * v + (1 - velocity) * g^2
    W = W * (1 - lr * weight_decay)          in TritonMuonW: decoupled
    W = W - lr / (sqrt(v) + 1e-8) * (m, or momentum * m + (1 - momentum) * g with nesterov)

CUDA tensors of a group are updated by one Triton launch (two with `layerwise_norm`), all others by foreach operations.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muon_fsdp.checkpoint import StateDict, own_hooks
from muon_fsdp.distributed import like, local, local_gradient, local_part
from muon_fsdp.fused import FUSED_DTYPES, lr_is_on_device, not_fusable, pinned, refuse_capture
from muon_fsdp.kernels import on_device
from muon_fsdp.rules.base import working_dtype

Params: TypeAlias = Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
EPSILON = 1e-8
_STATE = ("momentum", "velocity")


class _ElementwiseMuon(torch.optim.Optimizer):
    """What the two share; they differ in where decay is applied, and in its default."""

    coupled_decay: ClassVar[bool]
    _short_name: ClassVar[str]

    def __init__(
        self,
        params: Params,
        lr: float | Tensor,
        momentum: float,
        velocity: float,
        weight_decay: float,
        nesterov: bool,
        layerwise_norm: bool,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "velocity": velocity,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "layerwise_norm": layerwise_norm,
        }
        self._lists: dict[object, _FusedList] = {}
        super().__init__([params] if isinstance(params, Tensor) else params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
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
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients_of_groups = [self._gradients(group["params"]) for group in self.param_groups]  # or nothing is changed
        for index, (group, gradients) in enumerate(zip(self.param_groups, gradients_of_groups, strict=True)):
            for parameter in gradients:
                self._count(parameter)
            fused: dict[object, list[Tensor]] = defaultdict(list)
            single: list[Tensor] = []
            for parameter, grad in gradients.items():
                shard = local(parameter)
                moments = {name: self.state[parameter][name] for name in _STATE}
                if not_fusable(shard, moments) is None and grad.dtype in FUSED_DTYPES:
                    fused[(index, shard.device, shard.dtype, grad.dtype)].append(parameter)
                else:
                    single.append(parameter)
            for key, parameters in fused.items():
                with on_device(local(parameters[0]).device):
                    self._fused_list(key, parameters).step(self, group, parameters, gradients)
            if single:
                self._foreach_step(group, single, gradients)
        return loss

    def _gradients(self, parameters: Sequence[Tensor]) -> dict[Tensor, Tensor]:
        """The local gradients there are, contiguous where the parameter is."""
        gradients = {}
        for parameter in parameters:
            grad = parameter.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise RuntimeError(f"{self._short_name} does not support sparse gradients")
            grad = local_gradient(parameter, grad)
            gradients[parameter] = grad.contiguous() if local(parameter).is_contiguous() else grad
        return gradients

    def _count(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in _STATE:
                state[name] = torch.zeros_like(parameter, dtype=working_dtype(parameter.dtype))
        state["step"] += 1

    def _fused_list(self, key: object, parameters: Sequence[Tensor]) -> _FusedList:
        numels = tuple(local(parameter).numel() for parameter in parameters)
        known = self._lists.get(key)
        if known is None or known.numels != numels:
            known = self._lists[key] = _FusedList(numels, local(parameters[0]).device)
        return known

    def _foreach_step(
        self, group: Mapping[str, Any], parameters: Sequence[Tensor], gradients: Mapping[Tensor, Tensor]
    ) -> None:
        lr, beta1, beta2 = group["lr"], group["momentum"], group["velocity"]
        if isinstance(lr, Tensor):
            lr = lr.reshape(()) if lr_is_on_device(lr) else float(lr)
        decay = group["weight_decay"]
        shards = [local(parameter) for parameter in parameters]
        weights = [shard.to(working_dtype(shard.dtype)) for shard in shards]
        grads = [gradients[p].to(w.dtype) for p, w in zip(parameters, weights, strict=True)]
        first, second = ([local(self.state[p][name]) for p in parameters] for name in _STATE)
        if self.coupled_decay and decay != 0:
            grads = list(torch._foreach_add(grads, weights, alpha=decay))
        if group["layerwise_norm"]:
            sums = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in grads])
            _add_up_shards(parameters, sums)
            grads = [g / (norm + EPSILON).to(g) for g, norm in zip(grads, sums.sqrt().unbind(), strict=True)]
        torch._foreach_lerp_(first, grads, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1 - beta2)
        direction = first
        if group["nesterov"]:
            direction = list(torch._foreach_lerp(first, grads, 1 - beta1))
        denominators = torch._foreach_sqrt(second)
        torch._foreach_add_(denominators, EPSILON)
        if not self.coupled_decay and decay != 0:
            torch._foreach_mul_(weights, 1 - lr * decay)
        if isinstance(lr, Tensor):  # on the device: reading it would stall the host
            torch._foreach_div_(denominators, -lr)
            torch._foreach_addcdiv_(weights, direction, denominators)
        else:
            torch._foreach_addcdiv_(weights, direction, denominators, -lr)
        for shard, weight in zip(shards, weights, strict=True):
            if weight is not shard:
                shard.copy_(weight)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """As torch's, but momentum and velocity keep their precision and share no memory with `state_dict`."""
        incoming: StateDict = {}

        def before(_: torch.optim.Optimizer, given: StateDict) -> None:
            incoming.update(given)

        def after(_: torch.optim.Optimizer) -> None:
            for group, saved in zip(self.param_groups, incoming["param_groups"], strict=True):
                for parameter, key in zip(group["params"], saved["params"], strict=True):
                    values = incoming["state"].get(key, {})
                    for name in _STATE:
                        if name in values:
                            part = local_part(values[name].detach(), parameter)
                            part = part.to(parameter.device, working_dtype(parameter.dtype), copy=True)
                            self.state[parameter][name] = like(parameter, part)

        with own_hooks(self, before, after):
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_lists": {}}


class TritonMuon(_ElementwiseMuon):
    """Fused element-wise optimizer with coupled decay; not orthogonalizing, see the module's description.

    Args:
        params: one tensor, tensors, named tensors, or groups.
        lr: learning rate, a float or a one-element tensor.
        momentum: decay of the first moment.
        velocity: decay of the second moment.
        weight_decay: added to the gradient times the weight.
        nesterov: look ahead by one step of momentum.
        layerwise_norm: divide the gradient of every tensor by its norm, over all shards of it.
    """

    coupled_decay = True
    _short_name = "Muon"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        velocity: float = 0.999,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        layerwise_norm: bool = False,
    ) -> None:
        super().__init__(params, lr, momentum, velocity, weight_decay, nesterov, layerwise_norm)


class TritonMuonW(_ElementwiseMuon):
    """`TritonMuon` with decoupled decay: weights shrink by lr * weight_decay, and moments don't see it."""

    coupled_decay = False
    _short_name = "MuonW"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        velocity: float = 0.999,
        weight_decay: float = 1e-2,
        nesterov: bool = False,
        layerwise_norm: bool = False,
    ) -> None:
        super().__init__(params, lr, momentum, velocity, weight_decay, nesterov, layerwise_norm)


class _FusedList:
    """Tensors of one group that one launch updates, and its tables."""

    def __init__(self, numels: tuple[int, ...], device: torch.device) -> None:
        from muon_fsdp.kernels.triton_elementwise import MAX_SCALARS, make_chunks, num_chunks

        self.numels = numels
        first = [0]
        for numel in numels:
            first.append(first[-1] + num_chunks(numel, numel))
        self.chunks, self.aligned_chunks = make_chunks(numels, numels, first[:-1], device)
        self.first_chunk = torch.tensor(first, dtype=torch.int32, device=device)
        self.counters = torch.zeros(len(numels), dtype=torch.int32, device=device)
        self.addresses = torch.zeros(4, len(numels), dtype=torch.int64, device=device)
        self.scalars = torch.zeros(MAX_SCALARS, dtype=torch.float32, device=device)

    def step(
        self,
        optimizer: _ElementwiseMuon,
        group: Mapping[str, Any],
        parameters: Sequence[Tensor],
        gradients: Mapping[Tensor, Tensor],
    ) -> None:
        from muon_fsdp.kernels import triton_pair
        from muon_fsdp.kernels.triton_elementwise import TensorList

        device, lr = self.scalars.device, group["lr"]
        refuse_capture(device)
        grads = [gradients[p] for p in parameters]
        shards = [local(p) for p in parameters]
        moments = [[local(optimizer.state[p][name]) for p in parameters] for name in _STATE]
        rows = [[tensor.data_ptr() for tensor in tensors] for tensors in (grads, shards, *moments)]
        aligned = self.aligned_chunks and not any(address % 16 for row in rows for address in row)
        self.addresses.copy_(pinned(rows, torch.int64, device), non_blocking=True)
        beta1, beta2 = group["momentum"], group["velocity"]
        numbers = [
            0.0 if lr_is_on_device(lr) else float(lr),
            group["weight_decay"],
            1.0,
            beta1,
            beta2,
            1 - beta1,
            1 - beta2,
        ]
        numbers += [0.0] * (len(self.scalars) - len(numbers))
        self.scalars.copy_(pinned(numbers, torch.float32, device), non_blocking=True)
        if lr_is_on_device(lr):
            self.scalars[:1].copy_(lr.reshape(1))
        tensors = TensorList(
            num_tensors=len(parameters),
            parameter_dtype=shards[0].dtype,
            gradient_dtype=grads[0].dtype,
            chunks=self.chunks,
            aligned_chunks=self.aligned_chunks,
            addresses=self.addresses,
            scalars=self.scalars,
            aligned=aligned,
        )
        coupled = optimizer.coupled_decay
        sums = None
        if group["layerwise_norm"]:
            sums = triton_pair.sums_of_squares(tensors, self.first_chunk, self.counters, coupled=coupled)
            _add_up_shards(parameters, sums)
        triton_pair.update(tensors, sums, coupled=coupled, nesterov=group["nesterov"])


def _add_up_shards(parameters: Sequence[Tensor], sums: Tensor) -> None:
    """Make sums over local parts those over whole tensors: one all-reduce per mesh axis over which some are sharded."""
    by_axis: dict[tuple[object, int], list[int]] = defaultdict(list)
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                if not placement.is_replicate():
                    by_axis[(parameter.device_mesh, axis)].append(index)
    for (mesh, axis), indices in by_axis.items():
        where = torch.tensor(indices, device=sums.device)
        part = sums[where]
        dist.all_reduce(part, group=mesh.get_group(axis))  # type: ignore[attr-defined]
        sums[where] = part


def _check(options: Mapping[str, Any]) -> None:
    lr, momentum, velocity, decay = (options[name] for name in ("lr", "momentum", "velocity", "weight_decay"))
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Invalid learning rate: a tensor must hold one number, got shape {tuple(lr.shape)}")
    if not float(lr) >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"Invalid momentum parameter: {momentum}")
    if not 0.0 <= velocity < 1.0:
        raise ValueError(f"Invalid velocity parameter: {velocity}")
    if not decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {decay}")


def benchmark_muon_optimizers(model_size: int = 1000, num_steps: int = 100, lr: float = 1e-3) -> dict[str, float]:
    """Seconds for `num_steps` steps on `nn.Linear(model_size, model_size)`, beside torch's Adam and SGD.

    On the GPU if there is one. Every optimizer warms up first, and clocks are read when the device has finished; of
    three runs the median counts.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "triton_muon_time": lambda params: TritonMuon(params, lr=lr),
        "triton_muonw_time": lambda params: TritonMuonW(params, lr=lr),
        "torch_adam_time": lambda params: torch.optim.Adam(params, lr=lr),
        "torch_sgd_time": lambda params: torch.optim.SGD(params, lr=lr),
    }
    seconds = {name: _seconds(make, model_size, num_steps, device) for name, make in makers.items()}
    return {
        **seconds,
        "muon_vs_adam_speedup": seconds["torch_adam_time"] / seconds["triton_muon_time"],
        "muonw_vs_adam_speedup": seconds["torch_adam_time"] / seconds["triton_muonw_time"],
        "muon_vs_sgd_speedup": seconds["torch_sgd_time"] / seconds["triton_muon_time"],
        "model_size": model_size,
        "num_steps": num_steps,
        "parameters": model_size * model_size + model_size,
    }


def _seconds(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], model_size: int, num_steps: int, device: str
) -> float:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(model_size, model_size, device=device)
    optimizer = make(list(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
    times = []
    for number in range(4):  # the first is a warm-up
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(num_steps if number else min(num_steps, 3)):
            optimizer.step()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
