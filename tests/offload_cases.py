"""Training with state on the host and on the device, on one device and on ranks, for tests/test_offload.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from muon_fsdp import MuonOptimizer
from muon_fsdp.comm.dtensors import from_local, like, local
from muon_fsdp.optimizers import grouped
from muon_fsdp.parameters import records
from muon_fsdp.plan.costs import NUM_SLOTS
from muon_fsdp.step import planned_step, streaming
from muon_fsdp.step.sources import ListedShard
from tests.comparisons import assert_same
from tests.distributed_cases import train
from tests.storage_cases import build, small_blocks

PIECE = 500  # bytes of state that a stage of an element-wise rule may have, so that several update one parameter
NUM_STEPS = 6


class WatchedStore(streaming.StreamedStore):
    """Makes what is in a slot useless where it must not be read, and counts what is in use."""

    made: list[WatchedStore]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.most = 0  # stages with state on the device at a time
        self.pieces = sum(bool(stage.rows) for stage in self._stages.values())
        WatchedStore.made.append(self)

    def begin(self, *args: Any) -> None:
        for slot in self._slots.values():
            slot.memory.fill_(0xFF)  # NaN
        super().begin(*args)

    def lend(self, stage: Any, *args: Any) -> Any:
        found = super().lend(stage, *args)
        self.most = max(self.most, sum(slot.holds is not None for slot in self._slots.values()))
        assert len(self._seen) == 1, "a slot could be filled while another stage works on it"
        return found

    def take_back(self, stage: Any, *args: Any) -> None:
        super().take_back(stage, *args)
        slot = self._slot(stage.number)
        if slot is not None:
            slot.memory.fill_(0xFF)
            slot.holds = None


@contextmanager
def watched() -> Iterator[None]:
    """Store the state of small parameters in short blocks, cut stages into pieces, and watch slots."""
    WatchedStore.made = []
    with (
        small_blocks(),
        patch.object(planned_step, "STREAMED_BYTES", PIECE),
        patch.object(planned_step, "StreamedStore", WatchedStore),
    ):
        yield


def run(layout: str | None, dtype: torch.dtype, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train in a layout, where None is one device.

    Returns:
        The losses; weights and state, by name.
    """
    if options["rule"] in ("spectral_sphere", "hyperball"):
        options = {**options, "weight_decay": 0.0}
    options = {**options, "max_stage_bytes": 2000, "overrides": {"*up.weight": "adamw"}}
    module, optimizer, rank, size = build(layout, dtype, 32, **options)
    losses = train(module, optimizer, range(NUM_STEPS), rank, size)
    found = {name: local(p).detach().clone() for name, p in module.named_parameters()}
    for record in optimizer._records():
        for name, value in optimizer.state_dict()["state"][record.position].items():
            found[f"{record.name} {name}"] = local(value).clone()
    return losses, found


def check_same(layout: str | None, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Check that state on the host gives the bits of state on the device."""
    with watched():
        losses, expected = run(layout, dtype, options)
        assert not WatchedStore.made
        same_losses, found = run(layout, dtype, {**options, "offload_state": True})
        assert same_losses == losses
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        (store,) = WatchedStore.made
        assert store.pieces > 1
        assert 1 <= store.most <= NUM_SLOTS
    assert len(set(losses)) > 1


@contextmanager
def weights_elsewhere() -> Iterator[None]:
    """Treat the CPU as a device that is not the host: what moves between the two is a copy."""
    make = records.make_records

    def made(*args: Any, offloads_state: bool) -> list[records.ParameterRecord]:
        return make(*args, offloads_state=True)

    with (
        patch.object(grouped, "make_records", made),
        patch.object(records.ParameterRecord, "is_on_host", True),
        patch.object(ListedShard, "on_device", lambda self, tensor: tensor.clone()),
    ):
        yield


def check_weights_on_host(layout: str | None, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Check that weights and gradients on the host, as FSDP2's `CPUOffloadPolicy` leaves them, give the same bits."""
    with watched():
        losses, expected = run(layout, dtype, options)
        with weights_elsewhere():
            same_losses, found = run(layout, dtype, options)
        assert WatchedStore.made
        assert same_losses == losses
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


def save_and_load(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Check that a checkpoint goes on elsewhere, with state on the host or on the device, bit for bit."""
    with watched():
        curves = []
        for options in (first, second):
            module, optimizer, rank, size = build("fsdp", torch.float32, 32, **first)
            losses = train(module, optimizer, range(3), rank, size)
            state = get_optimizer_state_dict(module, optimizer)
            weights = [local(p).detach().clone() for p in module.parameters()]
            other, resumed, *_ = build("fsdp", torch.float32, 32, **options)
            with torch.no_grad():
                for p, value in zip(other.parameters(), weights, strict=True):
                    local(p).copy_(value)
            set_optimizer_state_dict(other, resumed, state)
            curves.append(losses + train(other, resumed, range(3, 6), rank, size))
        assert curves[0] == curves[1]
        dist.barrier()


def copy_state() -> None:
    """Check that copy.deepcopy can keep the state of shards for a rollback, without what lies beside it in memory."""
    module, optimizer, rank, size = build("fsdp", torch.float32, 32, rule="muon", offload_state=True)
    train(module, optimizer, range(2), rank, size)
    state = optimizer.state_dict()["state"]
    copied = copy.deepcopy(state)
    for position, values in state.items():
        assert_same(copied[position], values)
        for value in map(local, values.values()):
            assert value.untyped_storage().nbytes() == value.numel() * value.itemsize


def embedding_and_vectors() -> tuple[list[nn.Parameter], MuonOptimizer]:
    torch.manual_seed(0)
    shapes = [(50, 16), (300,), (7,), (), (0, 4), (3, 5, 16)]
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    return parameters, MuonOptimizer(parameters, rule="adamw", adamw_lr=0.1, offload_state=True)


def check_like_on_the_host() -> None:
    """Check that a DTensor on a mesh of GPUs can be made of a tensor on the host; the mesh needs no GPU for that."""
    mesh = DeviceMesh("cuda", torch.arange(dist.get_world_size()), _init_backend=False)
    parameter = from_local(torch.zeros(3, 5), mesh, (Shard(0),), torch.Size((3 * mesh.size(), 5)), (5, 1))
    state = like(parameter, torch.ones(3, 5, dtype=torch.int8))
    assert (state.shape, state.dtype, state.placements) == (parameter.shape, torch.int8, parameter.placements)
    assert state.device == local(state).device == torch.device("cpu")
    memory = local(state)
    state.add_(1)
    assert torch.equal(memory, torch.full_like(memory, 2))
