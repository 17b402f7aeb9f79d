"""FSDPMuonOptimizer: MuonOptimizer for a model, which `fully_shard` or DDP may have wrapped."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from muon_fsdp.comm.transfers import gather_full, scatter_full
from muon_fsdp.declarations.option import Option, integer
from muon_fsdp.declarations.views import vectors_in
from muon_fsdp.optimizers.muon import MuonOptimizer
from muon_fsdp.optimizers.signature import UNSET, show_options
from muon_fsdp.parameters.groups import Params, refuse_zero_redundancy, rules_of
from muon_fsdp.parameters.routing import Route
from muon_fsdp.parameters.wrappers import replicate_group_of, reshard
from muon_fsdp.rules import BUILT_IN, DEFAULT_RULE, RULES, Rule

# Defaults of this class that differ from the rules' own.
WEIGHT_DECAY, NESTEROV, BETA2, EPS = 0.01, True, 0.99, 1e-8
_ACCUMULATION = Option("gradient_accumulation_steps", 1, "calls of step() per update", check=integer)


@show_options(
    DEFAULT_RULE,
    others={"betas": (0.9, BETA2), "weight_decay": WEIGHT_DECAY},
    weight_decay=WEIGHT_DECAY,
    nesterov=NESTEROV,
    beta2=BETA2,
    eps=EPS,
)
class FSDPMuonOptimizer(MuonOptimizer):
    """Muon for a model, however its parameters are distributed: FSDP2 in any layout, tensor parallel, DDP, one device.

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = FSDPMuonOptimizer(model, lr=0.02)

    Parameters are routed by module. The layout is read from the parameters, so there is no mesh to pass. Matrices are
    updated as by `MuonOptimizer`; all other parameters use AdamW with betas (0.9, beta2). `weight_decay` applies to
    matrices, embeddings and heads, not to vectors.

    Args:
        model: the model, wrapped or not, before or after its first forward.
        params: what to optimize, in any form that `MuonOptimizer` accepts; None for all trainable parameters.
        lr: learning rate of the matrices.
        {options}
        beta2: decay of the second moment, for rules that have one: "adamw" and "normuon".
        eps: added to the square root of that moment.
        gradient_accumulation_steps: with N > 1, `step()` and `zero_grad()` do nothing on N - 1 of N calls while
            gradients add up in `p.grad`; the N-th call uses their mean. Unscale and clip before the N-th call only.
            `model.zero_grad()` does clear gradients: call the optimizer's instead.
        options: all other options of `MuonOptimizer`.
    """

    _graph_is_alive = False  # whether a backward may follow the last forward

    def __init__(
        self,
        model: nn.Module,
        params: Params | None = None,
        lr: float | Tensor = UNSET,
        *,
        beta2: float = UNSET,
        eps: float = UNSET,
        gradient_accumulation_steps: int = 1,
        **options: Any,
    ) -> None:
        refuse_zero_redundancy("FSDPMuonOptimizer")
        if not isinstance(model, nn.Module):
            raise TypeError(f"FSDPMuonOptimizer needs the model itself, got {type(model).__name__}")
        _ACCUMULATION.validate(gradient_accumulation_steps)
        _refuse_unsupported(model)
        self._model = model
        options.setdefault("replicate_group", replicate_group_of(model))
        moments = {"beta2": beta2, "eps": eps}
        self._moments = {name: value for name, value in moments.items() if value is not UNSET}
        self._decay = options.get("weight_decay", WEIGHT_DECAY)
        super().__init__(model if params is None else params, lr=lr, **options)
        self._check_use_of_moments()
        self._accumulation_steps = gradient_accumulation_steps
        if any(isinstance(module, FSDPModule) for module in model.modules()):  # for unshard_params
            hook = model.register_forward_hook(_ForwardNote(self))
            weakref.finalize(self, hook.remove)  # otherwise every optimizer leaves a hook on the model

    def _class_defaults(self, rule: Rule) -> dict[str, Any]:
        own: dict[str, Any] = {"weight_decay": WEIGHT_DECAY, "nesterov": NESTEROV, "beta2": BETA2}
        given: dict[str, Any] = dict(self._moments)
        if not rule.needs_matrices:
            own["weight_decay"] = self._decay
            self._given.taken |= {"weight_decay"} & self._given.options.keys()
        betas = rule.all_options["betas"].default if "betas" in rule.all_options else None
        if isinstance(betas, tuple) and len(betas) == 2:
            own["betas"] = (betas[0], BETA2)
            given |= {"betas": (betas[0], given["beta2"])} if "beta2" in given else {}
        # A registered rule that declares such an option itself keeps its own default.
        shipped = [option for built_in in BUILT_IN for option in RULES[built_in.name].all_options.values()]
        defaults = {name: value for name, value in own.items() if rule.all_options.get(name) in shipped} | given
        for name, value in defaults.items():
            if name in rule.all_options:
                rule.all_options[name].validate(value, "beta2" if name == "betas" else name)
        return defaults

    def _parameter_defaults(self, parameter: Tensor, route: Route) -> dict[str, Any]:
        is_vector = not RULES[route.rule].needs_matrices and vectors_in(tuple(parameter.shape), route.view)
        return {"weight_decay": 0.0} if is_vector else {}

    def _check_use_of_moments(self) -> None:
        names = {option for rule in (*rules_of(self._all_routes()), self._other_rule) for option in rule.all_options}
        for name in self._moments:
            if name not in names and not (name == "beta2" and "betas" in names):
                raise ValueError(
                    f"FSDPMuonOptimizer: option {name!r} has no effect: no rule in use has a second moment"
                )

    @contextmanager
    def unshard_params(self) -> Iterator[None]:
        """Make `model.parameters()` whole plain tensors inside the block, on every rank, in the shards' precision.

        On exit every rank copies its own part back, and the parameters are shards again. All ranks must enter the
        block. Do not run the model inside: FSDP2's hooks expect shards.
        """
        if self._model is None:
            raise RuntimeError("a copied optimizer does not know its model: call this on the one built from the model")
        present = {id(parameter) for parameter in self._model.parameters()}
        if self._graph_is_alive and any(isinstance(p, DTensor) and id(p) not in present for p in self._parameters()):
            raise RuntimeError(
                "unshard_params() can't be entered between forward and backward: FSDP2 has unsharded parameters for "
                "backward. Run backward first, or call reshard() on the FSDP modules if there will be none."
            )
        reshard(self._model.modules())
        holders: list[tuple[nn.Module, str, nn.Parameter]] = [
            (module, name, parameter)
            for module in self._model.modules()
            # named_parameters would leave out tied parameters.
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

    def __getstate__(self) -> dict[str, Any]:
        own = {"_moments": self._moments, "_decay": self._decay}
        return {**super().__getstate__(), **own}


class _ForwardNote:
    """A forward hook that notes whether a backward may follow. It holds the optimizer weakly and is not copied."""

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
