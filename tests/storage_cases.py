"""Training with stored state and rounded weights, on one device and on ranks, for tests/test_storage.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from muon_fsdp import MuonOptimizer
from muon_fsdp.comm.dtensors import local
from muon_fsdp.declarations import encoding
from muon_fsdp.linalg import codes
from muon_fsdp.step.random_numbers import RandomNumbers
from tests.distributed_cases import OPTIONS, lay_out, make_model, replicas_of, sharded_state, train

BLOCK = 4  # instead of 256, so that shards of small matrices have several blocks and cut some


@contextmanager
def small_blocks() -> Iterator[None]:
    """Store the state of small parameters in short blocks."""
    with (
        patch.object(encoding, "LEAST_ELEMENTS", 1),
        patch.object(encoding, "LEAST_COLUMNS", 1),
        patch.object(codes, "STATE_BLOCK", BLOCK),
    ):
        yield


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def build(
    layout: str | None, dtype: torch.dtype, hidden: int = 31, **options: Any
) -> tuple[nn.Module, MuonOptimizer, int, int]:
    model: nn.Module = make_model(hidden=hidden).to(dtype)
    module, rank, size = (model, 0, 1) if layout is None else lay_out(model, layout)
    if layout is not None:
        replicas = replicas_of(module, "ddp" if layout == "ddp_sharded" else layout)
        options = {**replicas, **sharded_state(layout), **options}
    return module, MuonOptimizer(module.named_parameters(), **{**OPTIONS, **options}), rank, size


def curve(layout: str | None, dtype: torch.dtype, steps: int, options: dict[str, Any], hidden: int = 31) -> list[float]:
    """Train in a layout, where None is one device; check what the options promise on the way."""
    with small_blocks():
        module, optimizer, rank, size = build(layout, dtype, hidden, **options)
        losses = train(module, optimizer, range(steps), rank, size)
        for record in optimizer._records():
            state = optimizer.state[record.tensor]
            if record.part().numel() and options.get("state_dtype") == "int8":
                assert local(state["momentum_buffer"]).dtype == torch.int8
            if options.get("rounding") == "remainder":
                assert local(state["weight_remainder"]).dtype == torch.int8
                assert record.part().numel() == 0 or local(state["weight_remainder"]).any()
    return losses


def bits_of_elements(layout: str | None) -> dict[str, Tensor]:
    """Return the random bits of every parameter, put together from the shards of all ranks."""
    _, optimizer, *_ = build(layout, torch.bfloat16)
    random = RandomNumbers(optimizer._records())
    random.fill(0, dict(enumerate(optimizer.param_groups)))
    found = {}
    for record in optimizer._records():
        part, template = random.bits(record), record.state_template()
        is_sharded = isinstance(template, DTensor)
        name = record.name.replace("module.", "")
        found[name] = whole(DTensor.from_local(part, template.device_mesh, template.placements, run_check=False,
                                               shape=template.shape, stride=template.stride())
                            if is_sharded else part)  # fmt: skip
        if record.runs is not None:
            first, length, stride = record.runs
            index = torch.arange(part.numel())
            expected = first + index // length * stride + index % length
            assert torch.equal(expected.view(part.shape), record.element_numbers()), "kernels number elements otherwise"
    return found


def save(path: str, state_dtype: str, layout: str | None = "fsdp") -> None:
    """Train a little and save with torch.distributed.checkpoint."""
    with small_blocks():
        module, optimizer, rank, size = build(layout, torch.float32, state_dtype=state_dtype)
        train(module, optimizer, range(3), rank, size)
        dcp.save({"optimizer": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=path)


def load(path: str, state_dtype: str, layout: str | None = "fsdp") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load such a checkpoint on other ranks.

    Returns:
        The state in working precision and the largest scale of every parameter, by the name of the parameter.
    """
    with small_blocks():
        module, optimizer, *_ = build(layout, torch.float32, state_dtype=state_dtype)
        state_dict = {"optimizer": get_optimizer_state_dict(module, optimizer)}
        dcp.load(state_dict, checkpoint_id=path)
        set_optimizer_state_dict(module, optimizer, state_dict["optimizer"])
        assert {group["state_dtype"] for group in optimizer.param_groups} == {state_dtype}
        found = {key: whole(value) for key, value in state_of(module, optimizer).items()}
        scales = {
            record.name: optimizer.state[record.tensor]["momentum_buffer_scales"].amax()
            for record in optimizer._records()
            if state_dtype == "int8" and record.part().numel()
        }
        return found, scales


def state_of(module: nn.Module, optimizer: MuonOptimizer) -> dict[str, Tensor]:
    """Return the state of `state_dict()` by the name of the parameter and of the state."""
    states = optimizer.state_dict()["state"]
    return {
        f"{record.name} {key}": value
        for record in optimizer._records()
        for key, value in states[record.position].items()
    }


def resume(state_dtype: str, rounding: str, layout: str | None = None, into: str = "new") -> None:
    """Check that a resumed run has the weights of one that was not interrupted, bit for bit.

    Args:
        state_dtype: how state is stored.
        rounding: how weights are rounded.
        layout: as in `build`.
        into: what loads: a "new" optimizer, one that "stepped" and so has a plan, or a new one through "dcp", which
            takes a step to make state.
    """
    with small_blocks():
        options = {"state_dtype": state_dtype, "rounding": rounding, "rounding_seed": 7}
        module, optimizer, rank, size = build(layout, torch.bfloat16, **options)
        train(module, optimizer, range(3), rank, size)
        by_dcp = into == "dcp"
        saved = copy.deepcopy(get_optimizer_state_dict(module, optimizer) if by_dcp else optimizer.state_dict())
        stored = [
            {name: local(value).clone() for name, value in optimizer.state[p].items()} for p in module.parameters()
        ]
        weights = [local(p).detach().clone() for p in module.parameters()]
        train(module, optimizer, range(3, 6), rank, size)
        other, second, *_ = build(layout, torch.bfloat16, **{**options, "rounding_seed": 0})
        if into == "stepped":
            train(other, second, range(2), rank, size)
        with torch.no_grad():
            for p, value in zip(other.parameters(), weights, strict=True):
                local(p).copy_(value)
        if by_dcp:
            set_optimizer_state_dict(other, second, saved)
        else:
            second.load_state_dict(saved)
        for p, expected in zip(other.parameters(), stored, strict=True):
            assert expected.keys() == second.state[p].keys()
            for name, value in expected.items():
                assert torch.equal(local(second.state[p][name]), value), name
        if layout == "ddp_sharded":  # DDP sums the gradients of its first backward in another order
            return
        train(other, second, range(3, 6), rank, size)
        for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(local(p), local(q)), name


def gathered_beside_short_rows(rule: str, rounding: str) -> tuple[list[str], dict[str, Tensor]]:
    """Step with a weight of which rank 0 holds 64 columns, stored in 8 bits, and rank 1 63, stored in float32.

    Returns:
        The keys of its state on this rank, and its state gathered by torch.distributed.checkpoint.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(127, 100, bias=False)).bfloat16()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": RowwiseParallel()})
    weight = model[0].weight
    optimizer = MuonOptimizer(model.named_parameters(), rule=rule, state_dtype="int8", rounding=rounding)
    weight.grad = distribute_tensor(torch.randn(100, 127).bfloat16(), weight.device_mesh, weight.placements)
    optimizer.step()
    stored = local(optimizer.state[weight]["momentum_buffer"])
    assert stored.dtype == (torch.int8 if stored.shape[1] == 64 else torch.float32)
    keys = list(optimizer.state_dict()["state"][0])
    if dist.get_rank() == 1:  # in any other order, too
        state = optimizer.state[weight]
        optimizer.state[weight] = dict(reversed(state.items()))
        assert list(optimizer.state_dict()["state"][0]) == keys
    options = StateDictOptions(full_state_dict=True)
    return keys, get_optimizer_state_dict(model, optimizer, options=options)["state"].get("0.weight", {})


def state_of_the_whole_shape(state_dtype: str, offload_state: bool) -> str:
    """Write state of the whole parameter, plain, where it is sharded; return the error."""
    with small_blocks():
        options = {"state_dtype": state_dtype, "offload_state": offload_state}
        module, optimizer, rank, size = build("ddp_sharded", torch.float32, **options)
        train(module, optimizer, range(1), rank, size)
        weight = module.get_parameter("module.blocks.0.up.weight")
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
        try:
            train(module, optimizer, range(1, 2), rank, size)
        except RuntimeError as error:
            return str(error)
    return ""


def raw_checkpoint(path: str) -> None:
    """Check that `dcp.load` into `optimizer.state_dict()` works although boxes of rank 0 come with it."""
    with small_blocks():
        module, optimizer, rank, size = build("fsdp", torch.float32, state_dtype="int8")
        train(module, optimizer, range(2), rank, size)
        expected = {key: local(value).clone() for key, value in state_of(module, optimizer).items()}
        dcp.save(optimizer.state_dict(), checkpoint_id=path)
        train(module, optimizer, range(2, 4), rank, size)
        state_dict = optimizer.state_dict()
        dcp.load(state_dict, checkpoint_id=path)
        optimizer.load_state_dict(state_dict)
        for key, value in state_of(module, optimizer).items():
            assert torch.equal(local(value), expected[key]), key
        dist.barrier()


def without_remainders(path: str, layout: str) -> None:
    """Check that DCP loads what was saved with another rounding as `docs/guides/checkpoints.md` says, and only so."""
    module, optimizer, rank, size = build(layout, torch.bfloat16)
    train(module, optimizer, range(2), rank, size)
    dcp.save({"optimizer": get_optimizer_state_dict(module, optimizer)}, checkpoint_id=path)
    expected = {key: whole(value) for key, value in state_of(module, optimizer).items()}
    second = MuonOptimizer(module.named_parameters(), **OPTIONS, rounding="remainder")
    module.zero_grad()
    state = {"optimizer": get_optimizer_state_dict(module, second)}
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: .*\.weight_remainder"):
        dcp.load(state, checkpoint_id=path)
    dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_optimizer_state_dict(module, second, state["optimizer"])
    for key, value in state_of(module, second).items():
        if key.endswith("weight_remainder"):
            assert not local(value).any(), key
        else:
            assert torch.equal(whole(value), expected[key]), key
    train(module, second, range(2, 4), rank, size)
    assert any(local(second.state[p]["weight_remainder"]).any() for p in module.parameters())
