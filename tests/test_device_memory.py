"""Memory of devices: every rank plans for the smallest one, whatever it has itself, and a difference can't hang."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from muon_fsdp import MuonOptimizer
from muon_fsdp.comm.device_memory import total_memory
from muon_fsdp.comm.dtensors import local
from muon_fsdp.plan import stage_limits
from muon_fsdp.plan.speeds import DEVICE_MEMORY
from muon_fsdp.step import shared_sets
from tests.fault_cases import LIMIT, error_of, give_gradients, sharded
from tests.pool import RankPool

LARGE, SMALL = 10**9, 4 * 10**6  # 5% of the small one hold two of the matrices below on a rank, not all
SIDE = 64


class Devices:
    """Gives ranks devices of some bytes each, without the least limit, which is larger than these tests need."""

    def __init__(self, *memories: int) -> None:
        self._memories = memories

    def __enter__(self) -> None:
        self._patches = ExitStack()
        mine = self._memories[dist.get_rank()]
        self._patches.enter_context(patch.object(shared_sets, "total_memory", lambda device: mine))
        self._patches.enter_context(patch.object(stage_limits, "LEAST_LIMIT", 1))

    def __exit__(self, *_: object) -> None:
        self._patches.close()


def matrices(mesh: DeviceMesh, count: int = 8, seed: int = 0) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(SIDE, SIDE, generator=generator) for _ in range(count)]
    return {f"{seed}.{index}": sharded(value, mesh) for index, value in enumerate(values)}


def take_step(optimizer: MuonOptimizer, parameters: dict[str, nn.Parameter]) -> int:
    """Take a step; return the number of stages of its plan."""
    give_gradients(list(parameters.values()))
    optimizer.step()
    assert optimizer._planned is not None
    return len(optimizer._planned.plan.stages)


def train(*memories: int) -> tuple[int, int, list[float]]:
    """Take two steps on devices of some bytes each; rank 0 alone asks for metrics first, which plans for its device.

    Returns:
        The number of stages, the number that the report has, and the sum of each weight of this rank.
    """
    parameters = matrices(init_device_mesh("cpu", (2,)))
    optimizer = MuonOptimizer(parameters.items(), strategy="owner")
    with Devices(*memories):
        if dist.get_rank() == 0:
            optimizer.metrics()
        stages = {take_step(optimizer, parameters) for _ in range(2)}
        optimizer.load_state_dict(optimizer.state_dict())  # as after a checkpoint
        stages.add(take_step(optimizer, parameters))
        (number,) = stages
        return number, optimizer.plan_report().num_stages, [float(local(p).detach().sum()) for p in parameters.values()]


@pytest.mark.parametrize("memories", [(LARGE, SMALL), (SMALL, LARGE)])
def test_ranks_plan_for_the_smallest_device(ranks: RankPool, memories):
    alike = ranks.run(2, train, LARGE, LARGE, timeout=LIMIT)
    assert [result[:2] for result in alike] == [(1, 1), (1, 1)]
    found = ranks.run(2, train, *memories, timeout=LIMIT)
    assert [result[:2] for result in found] == [(2, 2), (2, 2)]
    for (*_, sums), (*_, expected) in zip(found, alike, strict=True):
        torch.testing.assert_close(torch.tensor(sums), torch.tensor(expected))


def another_number() -> list[str]:
    """Let rank 1 plan for other bytes than were agreed on; return the errors of the next two steps."""
    parameters = matrices(init_device_mesh("cpu", (2,)))
    optimizer = MuonOptimizer(parameters.items(), strategy="owner")
    with Devices(LARGE, LARGE):
        take_step(optimizer, parameters)
        before = [local(p).clone() for p in parameters.values()]
        agreement: Any = optimizer._agreement._agreement
        if dist.get_rank() == 1:
            agreement.device_memory = {(0, 1): SMALL}
        texts = [error_of(lambda: take_step(optimizer, parameters)) for _ in range(2)]
        assert all(torch.equal(local(p), old) for p, old in zip(parameters.values(), before, strict=True))
    return texts


def test_ranks_that_plan_for_different_memory_raise(ranks: RankPool):
    """A plan of other stages would wait forever: the hash that ranks compare covers the number."""
    for texts in ranks.run(2, another_number, timeout=LIMIT):
        for text in texts:
            assert "Ranks disagree about what to optimize: the optimizer" in text
            assert f"rank 0 has device_memory={LARGE}, rank 1 has device_memory={SMALL}" in text


def failing_plan() -> str:
    """Let the second planning fail on rank 0, which knows of the small device only after ranks have met."""
    parameters = matrices(init_device_mesh("cpu", (2,)))
    optimizer = MuonOptimizer(parameters.items(), strategy="owner")
    original = shared_sets.SharedSets.__init__

    def fails(self: Any, *args: Any) -> None:
        if args[-1]:
            raise RuntimeError("no second plan")
        original(self, *args)

    with Devices(LARGE, SMALL), patch.object(shared_sets.SharedSets, "__init__", fails):
        return error_of(lambda: take_step(optimizer, parameters))


def test_an_error_of_the_second_plan_reaches_all_ranks(ranks: RankPool):
    first, second = ranks.run(2, failing_plan, timeout=LIMIT)
    assert first == "no second plan"
    assert second == "Rank 0 cannot take this step, so no rank does: no second plan"


def more_groups() -> list[dict[tuple[int, ...], int]]:
    """Add matrices on ranks 0 and 1 to an optimizer that has taken a step on three ranks.

    Returns:
        For both steps, the number of stages of each set of ranks.
    """
    everyone, pair = init_device_mesh("cpu", (3,)), DeviceMesh("cpu", [0, 1])
    parameters = matrices(everyone, 9)
    optimizer = MuonOptimizer(parameters.items(), strategy="owner")

    def stages() -> dict[tuple[int, ...], int]:
        take_step(optimizer, parameters)
        assert optimizer._planned is not None
        sets = [outline.ranks for outline in optimizer._planned.outlines]
        return {ranks: sets.count(ranks) for ranks in sets}

    with Devices(LARGE, LARGE, SMALL):
        found = [stages()]
        if dist.get_rank() < 2:
            parameters |= (more := matrices(pair, seed=1))
            optimizer.add_param_group({"params": list(more.items())})
        found.append(stages())
    return found


def test_groups_that_are_added_later_are_planned_alike(ranks: RankPool):
    """Rank 2 has the small device, and takes no part in the new set."""
    few = {(0, 1, 2): 3}
    both = {**few, (0, 1): 1}
    assert ranks.run(3, more_groups, timeout=LIMIT) == [[few, both], [few, both], [few, few]]


# ------------------------------------------------------------------------------------------------- what a rank has


def test_memory_of_a_rank(monkeypatch: pytest.MonkeyPatch):
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert total_memory(torch.device("cpu")) == host
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert total_memory(torch.device("cpu")) == host // 4
    assert total_memory(torch.device("meta")) == DEVICE_MEMORY
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(total_memory=7 + device.index))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert total_memory(torch.device("cuda", 2)) == 9
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    assert total_memory(torch.device("mps")) == host // 4


def test_a_plan_for_other_ranks_does_not_depend_on_this_machine(monkeypatch: pytest.MonkeyPatch):
    def unknown(device: torch.device) -> int:
        raise AssertionError

    monkeypatch.setattr(shared_sets, "total_memory", unknown)
    optimizer = MuonOptimizer([nn.Parameter(torch.empty(1024, 4096, device="meta")) for _ in range(64)])
    usual, small = (optimizer.plan_report(world_size=8, device_memory=memory) for memory in (None, 10**9))
    assert usual == optimizer.plan_report(world_size=8, device_memory=80 * 2**30)
    assert small.num_stages > usual.num_stages
    assert small.scratch_bytes <= 64 * 2**20 < usual.scratch_bytes <= 4 * 2**30
    with pytest.raises(ValueError, match="Invalid device_memory: 0"):
        optimizer.plan_report(world_size=8, device_memory=0)
