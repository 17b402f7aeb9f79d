"""Make what is compared: our optimizers with any rule and options, PyTorch's, and those of other libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from muon_fsdp.optimizers.elementwise import TritonMuon, TritonMuonW
from muon_fsdp.training.config import read_value

Orthogonalizer = Callable[[Tensor], Tensor]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
# Makes the optimizers that together update all parameters of a model on a mesh.
MakeOptimizers = Callable[[nn.Module, DeviceMesh], list[torch.optim.Optimizer]]

OURS = "muon_fsdp"
FAST = f"{OURS}, fast"
OVERLAPPED = f'{OURS}, overlap="backward"'
DEFAULT_RULES = ("normuon", "spectral_sphere:lambda_mode=projection")
DION_CAPTURED = "dion Muon (Gram), captured"
DION_GRAM: Mapping[str, Any] = {"use_gram_newton_schulz": True, "use_triton": True}  # without the latter, no kernels
# These replay a CUDA graph that reads gradients where they were when it was captured.
FIXED_GRADIENTS = frozenset({DION_CAPTURED})
LR, OTHER_LR = 0.02, 3e-4

# The element-wise pair, and what it is compared with.
PAIR: Mapping[str, MakeOptimizer] = {
    "TritonMuon": partial(TritonMuon, weight_decay=0.01),
    "TritonMuonW": TritonMuonW,
    "TritonMuon(layerwise_norm)": partial(TritonMuon, layerwise_norm=True),
    "torch.optim.Adam": torch.optim.Adam,
    "torch.optim.Adam(fused)": partial(torch.optim.Adam, fused=True),
}


def parse_rule(text: str) -> dict[str, Any]:
    """Parse a rule with options, such as "spectral_sphere:lambda_mode=zero:momentum=0.9".

    Returns:
        The keyword arguments of MuonOptimizer.

    Raises:
        ValueError: the text has another form, or MuonOptimizer does not accept the rule or an option.
    """
    name, *options = text.split(":")
    arguments: dict[str, Any] = {"rule": name}
    for option in options:
        key, equals, value = option.partition("=")
        if not (key.isidentifier() and equals):
            raise ValueError(f"{text!r} is not RULE or RULE:OPTION=VALUE, for example {DEFAULT_RULES[-1]}")
        arguments[key] = read_value(value)
    try:
        MuonOptimizer([nn.Parameter(torch.zeros(2, 2))], **arguments)
    except TypeError as error:  # an option that no rule has
        raise ValueError(str(error)) from error
    return arguments


def ours(device: str, rules: Sequence[str] = ()) -> dict[str, MakeOptimizer]:
    """Return what makes each of our optimizers, by the name that the table shows.

    Args:
        device: "cuda" or "cpu".
        rules: further rules to measure, as `parse_rule` reads them.
    """
    muon = partial(MuonOptimizer, nesterov=True)  # as in the optimizers of other libraries
    found: dict[str, MakeOptimizer] = {OURS: muon, FAST: partial(muon, orthogonalization="fast")}
    if device == "cuda":
        found[f"{OURS}, cuda_graph=False"] = partial(muon, cuda_graph=False)
        found[f"{OURS}, cuda_graph=True"] = partial(muon, cuda_graph=True)
    for rule in rules:
        found[f"{OURS}, {rule}"] = partial(MuonOptimizer, **parse_rule(rule))
    return found


def plain_newton_schulz(matrices: Tensor) -> Tensor:
    """Orthogonalize with the five published Newton-Schulz steps, in bfloat16 and with PyTorch's matrix products."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, polynomial, x, beta=3.4445)
    return x.mT if tall else x


def orthogonalizers(device: str) -> dict[str, Orthogonalizer]:
    """Return the other orthogonalizations that run on a device, by the name that the table shows."""
    found: dict[str, Orthogonalizer] = {"plain NS5, torch": plain_newton_schulz}
    if device != "cuda":
        return found
    with suppress(ImportError):
        from dion.newton_schulz_triton import newton_schulz_triton

        found["dion Triton"] = newton_schulz_triton
    with suppress(ImportError):
        from gram_newton_schulz import POLAR_EXPRESS_COEFFICIENTS, GramNewtonSchulz

        found["gram-newton-schulz"] = GramNewtonSchulz(
            ns_coefficients=POLAR_EXPRESS_COEFFICIENTS, gram_newton_schulz_reset_iterations=[2]
        )
    return found


def optimizers(device: str) -> dict[str, MakeOptimizer]:
    """Return what makes each of the other optimizers that run on a device, by the name that the table shows."""
    found: dict[str, MakeOptimizer] = {
        "torch.optim.AdamW(fused)": partial(torch.optim.AdamW, fused=True),
        "torch.optim.Muon": partial(torch.optim.Muon, lr=LR, weight_decay=0.0),
    }
    if device != "cuda":
        return found
    with suppress(ImportError):
        from dion import Muon

        found["dion Muon (Triton)"] = partial(Muon, lr=LR, use_triton=True)
        found["dion Muon (Gram)"] = partial(Muon, lr=LR, **DION_GRAM)
        found[DION_CAPTURED] = _captured_dion
    with suppress(ImportError):
        from gram_newton_schulz import Muon as GramMuon

        found["gram-newton-schulz Muon"] = partial(GramMuon, lr=LR)
    return found


def _captured_dion(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    from dion import Muon
    from dion.cuda_graph import CudaGraphOptimizer

    captured: torch.optim.Optimizer = CudaGraphOptimizer(Muon(params, lr=LR, **DION_GRAM), warmup_steps=3)
    return captured


def sharded_optimizers(device: str) -> dict[str, MakeOptimizers]:
    """Return what makes the optimizers of a model sharded by FSDP2 on a device, by the name that the table shows."""
    found: dict[str, MakeOptimizers] = {
        OURS: _ours,
        OVERLAPPED: partial(_ours, overlap="backward"),
        "torch.optim.AdamW(fused)": lambda model, mesh: [_adamw(model.parameters())],
        "torch.optim.Muon": _torch_muon,
    }
    if device == "cuda" and importlib.util.find_spec("dion"):
        found["dion Muon (Triton)"] = _dion
    return found


_adamw = partial(torch.optim.AdamW, lr=OTHER_LR, fused=True)


def _ours(model: nn.Module, mesh: DeviceMesh, **options: Any) -> list[torch.optim.Optimizer]:
    return [FSDPMuonOptimizer(model, lr=LR, adamw_lr=OTHER_LR, nesterov=True, **options)]


def _torch_muon(model: nn.Module, mesh: DeviceMesh) -> list[torch.optim.Optimizer]:
    matrices, others = _divide(model)
    return [torch.optim.Muon(matrices, lr=LR), _adamw(others)]


def _dion(model: nn.Module, mesh: DeviceMesh) -> list[torch.optim.Optimizer]:
    muon: Any = importlib.import_module("dion").Muon
    matrices, others = _divide(model)
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw", "lr": OTHER_LR}]
    return [muon(groups, distributed_mesh=mesh, lr=LR, nesterov=True, use_triton=True)]


def _divide(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices in the blocks of a model, and all other parameters."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if name.startswith("blocks.") and p.ndim == 2]
    chosen = set(matrices)
    return matrices, [p for _, p in named if p not in chosen]
