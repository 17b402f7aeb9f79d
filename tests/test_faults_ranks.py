"""Ranks and process groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from tests.comparisons import assert_changed, assert_near
from tests.distributed_cases import lay_out, make_model, train
from tests.fault_cases import LIMIT, backward, error_of, give_gradients, net, sharded
from tests.pool import RankPool
from tests.promises import promise


def groups_with_a_history() -> None:
    """Train two stages of 2 x 2 ranks each, after ranks 0 and 4 have made a group that the others know nothing of.

    Check that the weights are those of one device.
    """
    if dist.get_rank() in (0, 4):
        dist.new_group([0, 4], use_local_synchronization=True)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "replicate", "shard"))
    model = net()
    fully_shard(model, mesh=mesh["replicate", "shard"])
    alone = net()
    for module in (model, alone):
        optimizer = MuonOptimizer(module.named_parameters(), lr=0.1, orthogonalization="exact")
        for step in range(2):
            optimizer.zero_grad()
            backward(module, step)
            optimizer.step()
    found = {name: p.full_tensor() for name, p in model.named_parameters()}
    assert_near(found, dict(alone.named_parameters()), atol=1e-5)


@promise(
    "Some ranks have made process groups that others know nothing of",
    "No effect: groups are named by their ranks, and found through the store",
)
def test_the_history_of_process_groups_does_not_matter(ranks: RankPool):
    ranks.run(8, groups_with_a_history, timeout=LIMIT)


def groups_in_use() -> tuple[int, int]:
    """Count the collectives of a step, after rank 0 alone has asked for a plan.

    Returns:
        The number of collectives on process groups of FSDP2 or torch, and the number on other groups.
    """
    module, data_rank, data_size = lay_out(make_model(), "hsdp")
    optimizer = FSDPMuonOptimizer(module)
    if dist.get_rank() == 0:
        optimizer.plan_report()
    mesh = module.lm_head.weight.device_mesh
    foreign = {dist.group.WORLD, *(mesh.get_group(axis) for axis in range(mesh.ndim))}
    seen: list[bool] = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single")}

    def spy(name: str) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, **options: Any) -> Any:
            seen.append(group is None or group in foreign)
            return originals[name](*args, group=group, **options)

        return call

    train(module, optimizer, range(1), data_rank, data_size)
    with (
        patch.object(dist, "all_reduce", spy("all_reduce")),
        patch.object(dist, "all_to_all_single", spy("all_to_all_single")),
    ):
        optimizer.step()
    return sum(seen), len(seen) - sum(seen)


@promise("FSDP2 uses its communicators while a step runs", "No effect: ours are our own")
def test_no_group_of_torch_is_borrowed(ranks: RankPool):
    for foreign, own in ranks.run(4, groups_in_use):
        assert foreign == 0
        assert own > 0


def second_world() -> None:
    """Train, shut torch.distributed down, start it again, and check that a new optimizer updates the model."""
    import tempfile

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model = net()
    optimizer = MuonOptimizer(model.named_parameters(), replicate_group=dist.group.WORLD)
    backward(model)
    optimizer.step()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder[0]}/store", rank=rank, world_size=size)
    again = MuonOptimizer(model.named_parameters(), replicate_group=dist.group.WORLD)
    before = model[0].weight.detach().clone()
    again.step()
    assert_changed(model[0].weight, before, "0.weight")


@promise("torch.distributed is shut down and started again", "An optimizer that is built then makes new groups")
def test_another_initialization_of_torch_distributed(ranks: RankPool):
    ranks.run(2, second_world, timeout=LIMIT)


def in_a_pretended_world(siblings: int) -> tuple[int, ...]:
    """Take a step on rank 3 of 64 that do not exist; return the shape of this rank's momentum.

    Args:
        siblings: how many ranks hold the same shards, which `replicate_mesh` says.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    mesh = init_device_mesh("cpu", (64 // siblings, siblings), mesh_dim_names=("data", "siblings"))
    fully_shard(model, mesh=mesh["data"])
    optimizer = FSDPMuonOptimizer(model, strategy="replicate", replicate_mesh=mesh)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return tuple(optimizer.state[model[0].weight]["momentum_buffer"].to_local().shape)


@promise(
    'A program is tried out under the "fake" backend of torch.distributed', "A step runs, with ranks that do not exist"
)
@pytest.mark.parametrize(("siblings", "rows"), [(1, 2), (2, 4)])
def test_a_pretended_world(ranks: RankPool, siblings, rows):
    assert ranks.run(1, in_a_pretended_world, siblings, timeout=LIMIT) == [(rows, 64)]


def late_rank() -> str:
    """Let rank 0 call `step()` and rank 1 never; return rank 0's error."""
    import tempfile

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    init = f"file://{folder[0]}/store"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=timedelta(seconds=5))
    parameter = sharded(torch.ones(6, 4), init_device_mesh("cpu", (2,)))
    give_gradients([parameter])
    optimizer = MuonOptimizer([("weight", parameter)])
    return error_of(optimizer.step) if rank == 0 else ""


@promise(
    "A rank never calls `step()`",
    "The others raise after the time limit of `init_process_group`, at the first step with its number",
)
def test_ranks_that_do_not_come_are_named(ranks: RankPool):
    text, _ = ranks.run(2, late_rank, timeout=LIMIT)
    assert text.startswith(
        "Rank 0 has waited 0:00:05 for ranks [1]: all ranks that hold a part of a parameter must call"
    )


def metrics_of_shards(rule: str) -> dict[str, Any]:
    """Collect the metrics of a sharded model at two steps, and the RMS of the update of each matrix at the last."""
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = FSDPMuonOptimizer(model, lr=0.1, weight_decay=0.0, rule=rule)
    found: dict[str, Any] = {"before": optimizer.metrics()}
    sizes: list[float] = []
    for step in range(2):
        before = [p.full_tensor().detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        model(torch.randn(64, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        after = [p.full_tensor().detach() for p in model.parameters()]
        sizes = [float((a - b).square().mean().sqrt()) for a, b in zip(before, after, strict=True)]
        found[f"step {step}"] = optimizer.metrics()
    for group in optimizer.param_groups:
        group["lr"] = 0.001
    return {**found, "sizes": sizes, "with another lr": optimizer.metrics()}


@promise(
    "Metrics are asked for where all matrices are sharded",
    "`update_rms` and the residual are there too, on ranks that compute a matrix",
)
@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_metrics_of_sharded_matrices(ranks: RankPool, rule):
    results = ranks.run(2, metrics_of_shards, rule)
    for result in results:
        assert "update_rms" not in result["before"]
        # One matrix each: what it reports is the size of one of the updates.
        last = result["step 1"]
        assert min(abs(last["update_rms"] - size) for size in result["sizes"]) < 1e-5
        assert result["with another lr"]["update_rms"] == last["update_rms"]  # that of the step that was sampled
        assert 0 <= last["orthogonality_residual"] < 0.5
        assert "update_rms" in result["step 0"]
