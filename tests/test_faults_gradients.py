"""Gradients of sharded parameters."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from muon_fsdp import MuonOptimizer
from tests.comparisons import assert_near
from tests.fault_cases import LIMIT, error_of, give_gradients, sharded
from tests.pool import RankPool
from tests.promises import promise


def sparse_gradient() -> list[str]:
    """Give rank 1 a sparse gradient at the first step, and at a later one; return both errors."""
    texts = []
    for steps_before in (0, 1):
        weight = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
        optimizer = MuonOptimizer([("weight", weight)], replicate_group=dist.group.WORLD)
        for _ in range(steps_before):
            weight.grad = torch.ones(6, 4)
            optimizer.step()
        weight.grad = torch.ones(6, 4).to_sparse() if dist.get_rank() == 1 else torch.ones(6, 4)
        texts.append(error_of(optimizer.step))
        weight.grad = torch.ones(6, 4)
        optimizer.step()
    return texts


@promise("One rank has a sparse gradient for a matrix", "All ranks raise, and name the rank and the parameter")
def test_a_sparse_gradient_on_one_rank(ranks: RankPool):
    results = ranks.run(2, sparse_gradient, timeout=LIMIT)
    for text in results[1]:
        assert text.startswith("Sparse gradients are not supported")
    for text in results[0]:
        assert text.startswith("Rank 1 cannot take this step")
        assert "'weight'" in text


def partial_on_one_rank(placements: Any) -> None:
    """Give rank 1 a gradient that is laid out unlike its parameter, and rank 0 none; compare with one device."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(6, 4, generator=generator) for _ in range(2))
    parameter, alone = sharded(start, mesh), nn.Parameter(start.clone())
    # Rank 0 stands for zeros: as a summand, as rows or as columns.
    value = {"Partial": grad, "Shard": grad[:, 2:]}[type(placements[0]).__name__]
    if dist.get_rank() == 1:
        parameter.grad = DTensor.from_local(value.clone(), mesh, placements, shape=(6, 4), stride=(4, 1))
    alone.grad = grad if isinstance(placements[0], Partial) else torch.cat([torch.zeros(6, 2), grad[:, 2:]], 1)
    MuonOptimizer([("weight", parameter)]).step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        MuonOptimizer([("weight", alone)]).step()
    assert_near(parameter.full_tensor(), alone, atol=1e-6)


@promise(
    "A gradient of partial sums, or laid out otherwise than its parameter, is missing on some ranks",
    "It counts as zero there, as a gradient in the parameter's own layout does",
)
@pytest.mark.parametrize("placements", [(Partial(),), (Shard(1),)])
def test_partial_gradients_that_are_missing_on_some_ranks(ranks: RankPool, placements):
    ranks.run(2, partial_on_one_rank, placements, timeout=LIMIT)


def mixed_gradients() -> str:
    mesh = init_device_mesh("cpu", (2,))
    parameter = sharded(torch.ones(6, 4), mesh)
    placement = Partial() if dist.get_rank() == 1 else Shard(0)
    part = torch.ones(6, 4) if dist.get_rank() == 1 else torch.ones(3, 4)
    parameter.grad = DTensor.from_local(part, mesh, [placement], run_check=False, shape=(6, 4), stride=(4, 1))
    return error_of(MuonOptimizer([("weight", parameter)]).step)


@promise("Gradients of one parameter are laid out differently on its ranks", "All ranks raise, and name it")
def test_gradients_that_lie_differently(ranks: RankPool):
    for text in ranks.run(2, mixed_gradients, timeout=LIMIT):
        assert "gradients of parameter 'weight' of shape (6, 4) are laid out differently on its ranks [0, 1]" in text


def mixed_gradients_of_others() -> str:
    """Give ranks 0 and 1 gradients of different layouts, where rank 2 shares a parameter with rank 1 only.

    Returns:
        The error on this rank.
    """
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    named = [(f"p{i}", sharded(torch.ones(6, 4), mesh)) for i, mesh in enumerate(meshes) if mesh.get_coordinate()]
    give_gradients([p for _, p in named])
    if dist.get_rank() == 1:
        first = named[0][1]
        first.grad = None
        first.grad = DTensor.from_local(torch.ones(6, 4), meshes[0], [Partial()], run_check=False)
    return error_of(MuonOptimizer(named).step)


def test_gradients_that_lie_differently_are_told_to_ranks_that_do_not_hold_them(ranks: RankPool):
    for text in ranks.run(3, mixed_gradients_of_others, timeout=LIMIT):
        assert "are laid out differently on its ranks [0, 1]" in text


def large_partial_sums() -> float:
    """Take a step with partial sums whose sum overflows float16, and check that the weight stays finite.

    Returns:
        The number of skipped steps.
    """
    mesh = init_device_mesh("cpu", (2,))
    parameter = sharded(torch.ones(6, 4, dtype=torch.float16), mesh)
    parameter.grad = DTensor.from_local(torch.full((6, 4), 6e4, dtype=torch.float16), mesh, [Partial()])
    optimizer = MuonOptimizer([("weight", parameter)], nonfinite="skip")
    optimizer.step()
    assert parameter.to_local().isfinite().all(), parameter.to_local()
    return optimizer.metrics()["skipped_steps"]


@promise("Partial sums in half precision add up to more than it holds", "They are added in single precision")
def test_partial_sums_do_not_overflow(ranks: RankPool):
    assert ranks.run(2, large_partial_sums, timeout=LIMIT) == [0.0, 0.0]


def plain_gradient() -> str:
    parameter = sharded(torch.ones(6, 4), init_device_mesh("cpu", (2,)))
    parameter.grad = torch.ones(6, 4)
    return error_of(MuonOptimizer([("weight", parameter)]).step)


@promise("A DTensor is given a plain, whole gradient", "An error that names it and `distribute_tensor`")
def test_a_plain_gradient_of_a_dtensor_is_named(ranks: RankPool):
    for text in ranks.run(2, plain_gradient, timeout=LIMIT):
        assert "gradient of parameter 'weight' is a plain tensor of shape (6, 4)" in text
        assert "distribute_tensor" in text
