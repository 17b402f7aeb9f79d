"""Replicas that are not equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from muon_fsdp.comm.dtensors import local
from muon_fsdp.step import planned_step
from tests.comparisons import assert_changed, assert_same
from tests.fault_cases import LIMIT, backward, error_of, net, sharded
from tests.pool import RankPool
from tests.promises import promise


def reduced(model: nn.Module) -> None:
    """Average the gradients of all ranks."""
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def other_weights(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * dist.get_rank())
    return model


def hsdp(model: nn.Module) -> nn.Module:
    world = dist.get_world_size()
    fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replica", "shard")))
    return model


def build(kind: str) -> tuple[nn.Module, MuonOptimizer]:
    """Build a model and its optimizer, and give it gradients; something in them differs between replicas."""
    own = dist.get_rank()
    options: dict[str, Any] = {"replicate_group": dist.group.WORLD}
    if kind.startswith("hsdp"):
        model = hsdp(net() if kind == "hsdp gradients" else other_weights(net()))
        backward(model, own)
        if kind == "hsdp gradients":  # as a hook would that adds something of its own on every rank
            for p in model.parameters():
                local(p.grad).add_(torch.randn(local(p.grad).shape, generator=torch.Generator().manual_seed(own)))
        return model, MuonOptimizer(model)
    if kind.startswith("ddp"):
        model = DistributedDataParallel(net())
        with model.no_sync():
            backward(model, own)
        return model, MuonOptimizer(model, shard_state=kind == "ddp sharded")
    model = other_weights(net()) if kind == "weights" else net()
    backward(model, own)
    if kind == "weights":
        reduced(model)
    if kind in ("vector", "vector beside infinity"):  # an element-wise rule: each rank applies its own update
        with torch.no_grad():
            model[2].bias.mul_(1 + 0.01 * own)
            if own == 0 and kind == "vector beside infinity":  # must not hide the difference of the other two
                model[2].bias.fill_(torch.inf)
        reduced(model)
    return model, MuonOptimizer(model, **options, shard_state=kind == "sharded")


def difference(kind: str) -> list[str]:
    """Return the errors of two steps, and check that they change nothing."""
    model, optimizer = build(kind)
    before = {name: local(p).detach().clone() for name, p in model.named_parameters()}
    errors = [error_of(optimizer.step) for _ in range(2)]
    assert_same({name: local(p) for name, p in model.named_parameters()}, before)
    return errors


BROADCAST, REDUCE = "Broadcast the weights from one rank", "All-reduce the gradients over these ranks"


@promise(
    "Replicas have other weights: HSDP with another seed per rank, or `replicate_group` without a broadcast",
    "All ranks raise before the first update, and after loading. The error names a parameter and says to broadcast",
)
@pytest.mark.parametrize(
    ("kind", "world_size", "name"),
    [
        ("hsdp", 4, "0.weight"),
        ("weights", 2, "0.weight"),
        ("vector", 2, "2.bias"),
        ("vector beside infinity", 3, "2.bias"),
    ],
)
def test_replicas_with_other_weights_are_told(ranks: RankPool, kind, world_size, name):
    for texts in ranks.run(world_size, difference, kind, timeout=LIMIT):
        for text in texts:
            assert f"hold the same parameter {name!r}" in text
            assert "but they differ in its values. Nothing was changed" in text
            assert BROADCAST in text


@promise(
    "Nobody has reduced the gradients of replicas: `no_sync()`, or a forgotten all-reduce",
    "All ranks raise before the first update. The error names a parameter and says to all-reduce",
)
@pytest.mark.parametrize(
    ("kind", "world_size"), [("hsdp gradients", 4), ("plain", 2), ("sharded", 2), ("ddp", 2), ("ddp sharded", 2)]
)
def test_gradients_that_nobody_reduced_are_told(ranks: RankPool, kind, world_size):
    for texts in ranks.run(world_size, difference, kind, timeout=LIMIT):
        for text in texts:
            assert "hold the same parameter" in text
            assert "but they differ in its gradients. Nothing was changed" in text
            assert REDUCE in text
            assert ("no_sync()" in text) == (kind != "hsdp gradients")


def one_bit(where: str) -> str:
    """Let one bit of the last row of a matrix, or of its gradient, differ on rank 3 of a mesh of 2 x 2."""
    mesh = init_device_mesh("cpu", (2, 2))
    weight = sharded(torch.ones(7, 5), mesh, (Replicate(), Shard(0)))
    weight.grad = torch.ones_like(weight)
    if dist.get_rank() == 3:
        with torch.no_grad():
            local(weight if where == "values" else weight.grad)[-1, -1].view(torch.int32).bitwise_xor_(1)
    return error_of(MuonOptimizer([("w", weight)]).step)


def test_matrices_are_compared_bit_by_bit_and_gradients_up_to_rounding(ranks: RankPool):
    texts = ranks.run(4, one_bit, "values", timeout=LIMIT)
    assert all("Ranks 1 and 3 hold the same parameter 'w'" in text for text in texts)
    assert [text.startswith("Rank 3 cannot take this step, so no rank does: ") for text in texts] == [1, 0, 1, 0]
    assert ranks.run(4, one_bit, "gradients", timeout=LIMIT) == [""] * 4


def noisy(p: Tensor, relative: float) -> Tensor:
    own = torch.Generator().manual_seed(dist.get_rank())
    return p * (1 + relative * torch.randn(p.shape, generator=own))


def legitimate(kind: str) -> None:
    """Take two steps with replicas that differ in what they may differ in."""
    mesh, own = init_device_mesh("cpu", (2,)), dist.get_rank()
    values = {"weight": torch.randn(6, 5), "bias": torch.randn(70), "empty": torch.zeros(0, 3)}
    grads = {name: torch.randn(value.shape) for name, value in values.items()}
    if kind == "rounding":  # an element-wise rule lets weights drift apart; bfloat16 has 8 bits
        values["bias"] = noisy(values["bias"], 1e-5)
        grads = {name: noisy(grad, 2**-8) for name, grad in grads.items()}
    if kind == "zero":
        grads = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    if kind in ("nan", "infinite") and own == 1:
        grads["weight"][0, 0] = torch.nan if kind == "nan" else torch.inf
    parameters = {name: sharded(value, mesh, (Replicate(),)) for name, value in values.items()}
    optimizer = MuonOptimizer(list(parameters.items()))
    for _ in range(2):
        for name, p in parameters.items():
            grad = grads[name]
            p.grad = DTensor.from_local(grad, mesh, (Replicate(),), run_check=False)
            if kind == "partial":  # what counts is the sum
                p.grad = DTensor.from_local((own + 1) * grad, mesh, (Partial(),), run_check=False)
            if kind in ("missing", "partial") and own == 1 and name != "bias":
                p.grad = None
        before = {name: local(p).detach().clone() for name, p in parameters.items() if name != "empty"}
        optimizer.step()
        if kind != "zero":
            assert_changed({name: local(parameters[name]) for name in before}, before)


@promise(
    "Gradients of replicas differ by rounding, are missing on some ranks, not finite, or partial sums",
    "They are no error: None counts as zero, `nonfinite` decides about NaN, partial sums are added first",
)
@pytest.mark.parametrize("kind", ["equal", "rounding", "zero", "missing", "partial", "nan", "infinite"])
def test_differences_that_are_no_mistake(ranks: RankPool, kind):
    ranks.run(2, legitimate, kind, timeout=LIMIT)


def comparisons(act: Callable[[], object]) -> int:
    """Return how often an act compared replicas."""
    with patch.object(planned_step, "compare_replicas", wraps=planned_step.compare_replicas) as compare:
        act()
    return compare.call_count


def in_every_phase() -> dict[str, int]:
    """Accumulate gradients under DDP, of which the first are never reduced; return the number of comparisons."""
    model = DistributedDataParallel(net())
    optimizer = FSDPMuonOptimizer(model, gradient_accumulation_steps=2)

    def first_half() -> None:
        with model.no_sync():
            backward(model, dist.get_rank())
        optimizer.step()

    def second_half() -> None:
        backward(model, dist.get_rank())
        optimizer.step()
        optimizer.zero_grad()

    found = {"not reduced yet": comparisons(first_half), "first update": comparisons(second_half)}
    found["second update"] = comparisons(first_half) + comparisons(second_half)
    optimizer.param_groups[0]["nesterov"] = not optimizer.param_groups[0]["nesterov"]
    found["other plan"] = comparisons(first_half) + comparisons(second_half)
    optimizer.load_state_dict(optimizer.state_dict())
    found["loaded"] = comparisons(first_half) + comparisons(second_half)
    return found


def without_an_update() -> dict[str, int]:
    """Take steps that update nothing; return the number of comparisons."""
    model = net()
    optimizer = MuonOptimizer(model, nonfinite="skip", replicate_group=dist.group.WORLD)
    found = {"no gradients": comparisons(optimizer.step)}
    backward(model, dist.get_rank())  # not reduced
    if dist.get_rank() == 1:
        model[0].weight.grad[0, 0] = torch.nan
    found["skipped"] = comparisons(optimizer.step)
    assert optimizer.metrics()["skipped_steps"] == 1
    return found


def test_replicas_are_compared_before_the_first_update_and_after_loading_only(ranks: RankPool):
    expected = {"not reduced yet": 0, "first update": 1, "second update": 0, "other plan": 0, "loaded": 1}
    assert ranks.run(2, in_every_phase, timeout=LIMIT) == [expected] * 2
    assert ranks.run(2, without_an_update, timeout=LIMIT) == [{"no gradients": 0, "skipped": 0}] * 2


def changed_before_loading(overlap: str) -> str:
    """Train, change the weights of one replica, load state, and return the error of the next step."""
    model = DistributedDataParallel(net())
    optimizer = MuonOptimizer(model, overlap=overlap)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, 10 * step + dist.get_rank())
        optimizer.step()
    with torch.no_grad():
        model.module[2].weight.mul_(1 + dist.get_rank())
    optimizer.load_state_dict(optimizer.state_dict())
    backward(model, dist.get_rank())
    return error_of(optimizer.step)


@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_replicas_that_differ_after_loading_are_told(ranks: RankPool, overlap):
    for text in ranks.run(2, changed_before_loading, overlap, timeout=LIMIT):
        assert "Ranks 0 and 1 hold the same parameter '2.weight'" in text
        assert "differ in its values" in text
