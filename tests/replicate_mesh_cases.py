"""Matrices on submeshes, repeated over the whole of it; run on gloo ranks by tests/test_replicate_mesh.py."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from muon_fsdp import MuonOptimizer
from muon_fsdp.rules import RULES
from tests.reference import ReferenceMuon, ReferenceNorMuon, ReferenceSphere, matrix_with_condition

REFERENCES: dict[str, Any] = {
    "muon": ReferenceMuon,
    "normuon": ReferenceNorMuon,
    "spectral_sphere": functools.partial(ReferenceSphere, mode="projection"),  # the search would take much longer
}
NUM_MATRICES = 1 + 1 + 3 + 1 + 1 + 1  # of `matrices_on`
NUM_STEPS = 3


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    names = ("dp", "tp") if len(shape) == 2 else ("replica", "shard", "tensor")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def matrices_on(mesh: DeviceMesh) -> dict[str, nn.Parameter]:
    """Return matrices on data-parallel submeshes of a mesh, on tensor-parallel ones, plain, and on all of it."""
    own = mesh["dp"] if mesh.ndim == 2 else mesh["replica", "shard"]
    before = [Replicate()] * (own.ndim - 1)
    places: dict[str, tuple[tuple[int, ...], DeviceMesh | None, list[Any]]] = {
        "rows": ((15, 16), own, [*before, Shard(0)]),  # uneven on two ranks
        "columns": ((12, 9), own, [*before, Shard(1)]),
        "stack": ((3, 10, 6), own, [*before, Shard(0)]),
        "repeated": ((9, 7), mesh["tp" if mesh.ndim == 2 else "tensor"], [Replicate()]),
        "plain": ((7, 12), None, []),
        "whole": ((16, 11), mesh, [*before, Shard(0), Shard(1)]),
    }
    rng = np.random.default_rng(0)
    found = {}
    for name, ((*count, rows, cols), on, placements) in places.items():
        # The largest singular value stands apart, so that an iteration finds it to many digits.
        matrices = [matrix_with_condition(rng, rows, cols, 20.0) for _ in range(math.prod(count))]
        value = torch.tensor(np.stack(matrices)).view(*count, rows, cols)
        found[name] = nn.Parameter(_placed(value, on, placements))
    return found


def _placed(value: Tensor, mesh: DeviceMesh | None, placements: Any) -> Tensor:
    return value if mesh is None else distribute_tensor(value, mesh, placements, src_data_rank=None)


def give_gradients(parameters: dict[str, nn.Parameter], seed: int, noise: float = 0.0) -> dict[str, Tensor]:
    """Set gradients that are equal on all ranks, up to relative `noise`; return them without it."""
    generator = torch.Generator().manual_seed(seed)
    wholes = {}
    for name, p in parameters.items():
        whole = wholes[name] = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        own = torch.Generator().manual_seed(dist.get_rank() % 2)  # of tensor-parallel siblings
        grad = whole * (1 + noise * torch.randn(p.shape, generator=own, dtype=torch.float64))
        p.grad = _placed(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
    return wholes


def whole(tensor: Tensor) -> np.ndarray:
    value = tensor.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).numpy().copy()


def follow_reference(shape: tuple[int, ...], rule: str, noise: float = 0.0) -> tuple[int, dict[str, np.ndarray]]:
    """Take steps with every matrix repeated over the mesh, and check the weights by the float64 reference.

    Args:
        shape: of the mesh, whose last axis is tensor-parallel.
        rule: of the matrices.
        noise: the relative difference of gradients between tensor-parallel siblings, such as rounding leaves.

    Returns:
        The number of matrices that this rank has orthogonalized, and the weights.
    """
    mesh = mesh_of(shape)
    parameters = matrices_on(mesh)
    options: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "nesterov": True}
    options |= {} if rule == "spectral_sphere" else {"weight_decay": 0.05}
    references = {
        name: [REFERENCES[rule](matrix, **options) for matrix in _stack(whole(p))] for name, p in parameters.items()
    }
    options |= {"lambda_mode": "projection", "power_iteration_steps": 50} if rule == "spectral_sphere" else {}
    optimizer = MuonOptimizer(
        list(parameters.items()),
        rule=rule,
        strategy="owner",
        replicate_mesh=mesh,
        replicate_group=mesh.get_group("dp") if mesh.ndim == 2 else None,  # a submesh: `replicate_mesh` adds the others
        orthogonalization="exact",
        **options,
    )
    computed, kind = 0, type(RULES[rule])
    directions = kind.directions

    def counted(self: Any, batches: Any) -> None:
        nonlocal computed
        computed += sum(len(batch.matrices) for batch in batches)
        directions(self, batches)

    kind.directions = counted
    try:
        for step in range(NUM_STEPS):
            for name, grad in give_gradients(parameters, step, noise).items():
                for reference, part in zip(references[name], _stack(grad.numpy()), strict=True):
                    reference.step(part)
            optimizer.step()
    finally:
        kind.directions = directions
    found = {name: whole(p) for name, p in parameters.items()}
    tolerance = 2e-4 if rule == "spectral_sphere" else max(1e-10, 10 * noise)
    for name, value in found.items():
        expected = np.stack([reference.w for reference in references[name]])
        np.testing.assert_allclose(_stack(value), expected, rtol=0, atol=tolerance, err_msg=name)
    for name, p in parameters.items():  # state lies where the parameter lies, so checkpoints do not change
        momentum = optimizer.state[p]["momentum_buffer"]
        assert getattr(momentum, "device_mesh", None) == getattr(p, "device_mesh", None), name
    return computed, found


def _stack(value: np.ndarray) -> np.ndarray:
    return value if value.ndim == 3 else value[None]
