"""FSDPMuonOptimizer: the engine of MuonOptimizer, built from a model that `fully_shard` or DDP may have wrapped."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from muon_fsdp.distributed import gather_full, scatter_full
from muon_fsdp.groups import Params
from muon_fsdp.optimizer import MuonOptimizer
from muon_fsdp.options import check_count
from muon_fsdp.routing import Route


class FSDPMuonOptimizer(MuonOptimizer):
    """Muon for a model, wherever its parameters lie: FSDP2 in any layout, tensor parallel, DDP, or one device.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = FSDPMuonOptimizer(model, lr=0.02)

    Parameters are routed by module; the layout is read from the parameters, so there is no mesh to pass. Matrices are
    updated as by `MuonOptimizer`; AdamW takes the rest with betas (0.9, beta2). `weight_decay` applies to matrices,
    embeddings and heads, not to vectors.

    Args:
        model: the model, wrapped or not, before or after its first forward.
        params: what to optimize, in any form that `MuonOptimizer` takes; None for all trainable parameters.
        lr: learning rate of the matrices.
        weight_decay: decoupled decay of matrices, embeddings and heads.
        momentum: decay of the momentum buffer.
        nesterov: look ahead by one step of momentum.
        ns_steps: steps of the orthogonalizing iteration.
        ns_stepsize: further factor of the orthogonalized update.
        beta2: decay of the second moment of AdamW and of rule "normuon"; `adamw_betas` takes its place.
        eps: added to the root of that moment; `adamw_eps` takes its place.
        gradient_accumulation_steps: N > 1 makes `step()` and `zero_grad()` do nothing on N - 1 of N calls while
            gradients add up in `p.grad`; the N-th uses their mean. Unscaling and clipping belong on the N-th.
            `model.zero_grad()` does clear gradients: use the optimizer's.
        options: all others of `MuonOptimizer`.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Params | None = None,
        lr: float | Tensor = 0.02,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_stepsize: float = 1.0,
        beta2: float = 0.99,
        eps: float = 1e-8,
        gradient_accumulation_steps: int = 1,
        **options: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"FSDPMuonOptimizer needs the model itself, got {type(model).__name__}")
        check_count("gradient_accumulation_steps", gradient_accumulation_steps)
        _refuse_unsupported(model)
        self._model: nn.Module | None = model
        if isinstance(model, nn.parallel.DistributedDataParallel):
            options.setdefault("replicate_group", model.process_group)
        options.setdefault("adamw_betas", (0.9, beta2))
        options.setdefault("adamw_eps", eps)
        options.setdefault("adamw_weight_decay", weight_decay)
        super().__init__(
            model if params is None else params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
            ns_steps=ns_steps,
            ns_stepsize=ns_stepsize,
            **options,
        )
        self._accumulation_steps = gradient_accumulation_steps
        self._graph_is_alive = False  # whether the last forward was one that a backward may follow
        model.register_forward_hook(_ForwardNote(self))

    def _model_to_route_by(self) -> nn.Module | None:
        return self._model

    def _route(self, parameters: list[Tensor], named: list[str] | None, given: Mapping[str, Any]) -> list[Route]:
        routes = super()._route(parameters, named, given)
        decays = {"weight_decay", "adamw_weight_decay"}
        return [
            route
            if parameter.ndim > 1 or decays & {*given, *dict(route.options)}  # the user's own word counts
            else replace(route, options=(*route.options, ("adamw_weight_decay", 0.0)))
            for parameter, route in zip(parameters, routes, strict=True)
        ]

    @contextmanager
    def unshard_params(self) -> Iterator[None]:
        """Inside, `model.parameters()` are whole plain tensors in the precision of the shards, on every rank.

        On exit every rank copies its own part back, and the parameters are shards again. All ranks must enter. Not
        for running the model: FSDP's hooks expect shards.
        """
        if self._model is None:
            raise RuntimeError("a copied optimizer does not know its model: use the one that was built from it")
        self._reshard_or_raise(self._model)
        holders: list[tuple[nn.Module, str, nn.Parameter]] = [
            (module, name, parameter)
            for module in self._model.modules()
            # Not named_parameters, which leaves out repetitions.
            for name, parameter in module._parameters.items()
            if parameter is not None and isinstance(parameter, DTensor)
        ]
        with torch.no_grad():
            sharded = {id(parameter): parameter for _, _, parameter in holders}
            whole = {key: nn.Parameter(gather_full(p), requires_grad=p.requires_grad) for key, p in sharded.items()}
        for module, name, parameter in holders:
            module._parameters[name] = whole[id(parameter)]
        try:
            yield
        finally:
            for module, name, parameter in holders:
                module._parameters[name] = parameter
            with torch.no_grad():
                for key, parameter in sharded.items():
                    scatter_full(parameter, whole[key])

    def _reshard_or_raise(self, model: nn.Module) -> None:
        present = {id(parameter) for parameter in model.parameters()}
        unsharded = [p for p in self._parameters() if isinstance(p, DTensor) and id(p) not in present]
        if unsharded and self._graph_is_alive:
            raise RuntimeError(
                "unshard_params() can't be entered between forward and backward: some parameters are unsharded for "
                "the backward. Run it first, or call reshard() on the FSDP modules if there will be none."
            )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_model": None, "_graph_is_alive": False}


class _ForwardNote:
    """A forward hook that tells the optimizer whether a backward may follow; neither keeps it alive nor is copied."""

    def __init__(self, optimizer: FSDPMuonOptimizer | None = None) -> None:
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else None

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is not None:
            optimizer._graph_is_alive = torch.is_grad_enabled()

    def __reduce__(self) -> tuple[type[_ForwardNote], tuple[()]]:
        return (_ForwardNote, ())


def _refuse_unsupported(model: nn.Module) -> None:
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, FullyShardedDataParallel):
            raise RuntimeError(f"FSDP1 is not supported: {where} is wrapped by it. Use fully_shard (FSDP2).")
        if isinstance(module, FSDPModule) and _offloads_to_cpu(module):
            raise RuntimeError(
                f"CPU offload is not supported: {where} has an offload policy. Leave out offload_policy in "
                "fully_shard; training wholly on the CPU is fine."
            )


def _offloads_to_cpu(module: FSDPModule) -> bool:
    """Private state of FSDP2, the only place where an offload policy can be seen; tests/test_fsdp.py guards it."""
    state = module._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return any(parameter.offload_to_cpu for group in groups if group is not None for parameter in group.fsdp_params)
