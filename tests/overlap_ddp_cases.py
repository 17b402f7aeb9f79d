"""Training under DDP with `overlap="step"` and `overlap="backward"`, for tests/test_overlap_ddp.py."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from muon_fsdp.comm.bucket_hook import listen
from muon_fsdp.comm.transfers import StageExchange
from muon_fsdp.step.changes import Arrival, _stamp
from tests.comparisons import assert_same
from tests.distributed_cases import OPTIONS, make_model
from tests.overlap_cases import CASES, Case, backward, changed_in_step_3, contents, counts

BUCKET_MB = 0.001  # so small that every layer has a bucket of its own


def wrapped(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(make_model(), bucket_cap_mb=BUCKET_MB, **options)


def training(
    overlap: str, case: Case, ddp: dict[str, Any], options: dict[str, Any], steps: int = 5
) -> tuple[nn.Module, FSDPMuonOptimizer]:
    model = wrapped(**ddp)
    optimizer = FSDPMuonOptimizer(model, **{**OPTIONS, "max_stage_bytes": 2000, "overlap": overlap, **options})
    for step in range(steps):
        case(model, optimizer, step)
    return model, optimizer


def one_backward(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
    backward(model, step)
    optimizer.step()
    optimizer.zero_grad()


def zeroed(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
    """Keep the tensors of gradients, so that with `gradient_as_bucket_view` they stay in the buckets."""
    backward(model, step)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def without_reductions(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
    for micro in range(3):
        with model.no_sync() if micro < 2 else nullcontext():
            backward(model, 3 * step + micro)
    optimizer.step()
    optimizer.zero_grad()


DDP_CASES: dict[str, tuple[Case, dict[str, Any], dict[str, Any]]] = {  # a training step, options of DDP, of ours
    "owners": (one_backward, {}, {"strategy": "owner"}),
    "no_sync": (without_reductions, {}, {"strategy": "replicate"}),
    "by hand": (CASES["by hand"], {}, {}),
    "static graph": (one_backward, {"static_graph": True}, {}),
    "bucket views": (one_backward, {"gradient_as_bucket_view": True}, {}),
    "bucket views, zeroed": (zeroed, {"gradient_as_bucket_view": True}, {}),
    "sharded state": (one_backward, {}, {"shard_state": True}),
}
UNEXPECTED: dict[str, tuple[Case, dict[str, Any], dict[str, Any]]] = {
    name: (CASES[name], {}, {}) for name in ("one more in step 3", "one less in step 3", "dropped in step 3")
}


def same_in(name: str) -> tuple[int, int, int]:
    """Run a case with both settings, and check that weights and state are equal bit for bit.

    Returns:
        The stages that were used, those that were discarded, and the number of stages of a step.
    """
    case, ddp, options = (DDP_CASES | UNEXPECTED).get(name) or (changed_in_step_3(name), {}, {})
    expected = contents(*training("step", case, ddp, options))
    model, optimizer = training("backward", case, ddp, options)
    assert_same(contents(model, optimizer), expected, name)
    num_stages = int(optimizer.plan_report().overlap.split()[0])
    return *counts(optimizer), num_stages


def same_in_all(names: Sequence[str]) -> dict[str, tuple[int, int, int]]:
    return {name: same_in(name) for name in names}


def counted_only() -> tuple[int, int, int]:
    """Run one backward more than expected in step 3, while changes of gradients are only counted, as on a GPU."""

    def is_unchanged(self: Arrival, grad: Tensor | None) -> bool:
        return grad is not None and grad is self._grad and _stamp(grad) == self._stamp

    with patch.object(Arrival, "is_unchanged", is_unchanged):
        return same_in("one more in step 3")


class Layers(nn.Module):
    """Matrices of which each rank may leave out some."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(depth)])

    def forward(self, x: Tensor, skipped: set[int]) -> Tensor:
        used = [layer(x) for number, layer in enumerate(self.layers) if number not in skipped]
        return sum(((1 + number) * y.square().mean() for number, y in enumerate(used)), x.new_zeros(()))


def missing_on_some_ranks(overlap: str) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Train while ranks leave out different matrices in different steps; in steps 6 and 8 no rank uses one of them."""
    model = DistributedDataParallel(Layers(), bucket_cap_mb=0.0001, find_unused_parameters=True)
    optimizer = MuonOptimizer(model, lr=0.1, max_stage_bytes=200, overlap=overlap)
    skipped = {3: {0: {1}, 1: set()}, 4: {0: {0}, 1: {2}}, 6: {0: {0, 1, 2}, 1: {0}}, 8: {0: {2}, 1: {2}}}
    for step in range(11):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        model(x, skipped.get(step, {}).get(dist.get_rank(), set())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return contents(model, optimizer), counts(optimizer) if overlap == "backward" else (0, 0)


def missing_gradients() -> tuple[int, int]:
    expected, _ = missing_on_some_ranks("step")
    found, used = missing_on_some_ranks("backward")
    assert_same(found, expected)
    return used


def in_two_wrappers() -> tuple[int, int]:
    """Train a model whose halves DDP wraps separately, so that one is written before the other."""
    found = []
    for overlap in ("step", "backward"):
        torch.manual_seed(0)
        halves = [nn.Linear(6, 6), nn.Linear(6, 6)]
        model = nn.Sequential(*(DistributedDataParallel(half) for half in halves))
        optimizer = MuonOptimizer(model, lr=0.1, max_stage_bytes=200, overlap=overlap)
        for step in range(5):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(contents(model, optimizer))
    assert_same(*found)
    return counts(optimizer)


def gathered_before_backward_ends() -> tuple[bool, set[str]]:
    """Return whether a stage was gathered while backward still ran, and the threads in which stages were."""
    model, optimizer = training("backward", one_backward, {}, {"shard_state": True}, steps=3)
    gathered, threads, in_time = threading.Event(), set(), []
    finish_gather = StageExchange.finish_gather

    def noted(self: StageExchange) -> Tensor:
        units = finish_gather(self)
        threads.add(threading.current_thread().name)
        gathered.set()
        return units

    with patch.object(StageExchange, "finish_gather", noted):
        # Called before the gradients of this block are known.
        handle = model.module.blocks[0].register_full_backward_hook(lambda *_: in_time.append(gathered.wait(20)))
        backward(model, 3)
        handle.remove()
        optimizer.step()
    return in_time == [True], threads


def reports() -> dict[str, str]:
    """Return what the report says under wrappers whose gradients can't be used in backward."""
    found = {}
    with_hook = wrapped()
    with_hook.register_comm_hook(None, default_hooks.allreduce_hook)
    with_builtin = wrapped()
    with_builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        compiled = wrapped()
    wrappers = {"hook": with_hook, "built-in": with_builtin, "compiled": compiled}
    wrappers |= {"views": wrapped(gradient_as_bucket_view=True), "none": make_model()}
    for name, model in wrappers.items():
        optimizer = FSDPMuonOptimizer(model, overlap="backward", replicate_group=dist.group.WORLD)
        found[name] = optimizer._current_plan().overlap.status
    return found


class Noting:
    """A listener that compares what DDP has written to `p.grad` with what was reduced."""

    def __init__(self) -> None:
        self.found: dict[Tensor, Tensor] = {}
        self.too_early: list[bool] = []
        self.equal: list[bool] = []

    def reduced(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        for parameter, grad in gradients:
            self.found[parameter] = grad.clone()
            self.too_early.append(torch.equal(grad, parameter.grad))

    def written(self, parameters: Sequence[Tensor]) -> None:
        self.equal += [torch.equal(parameter.grad, self.found[parameter]) for parameter in parameters]


def what_listeners_hear(steps: int = 3) -> tuple[int, list[bool], bool]:
    """Return how many gradients a listener has heard of, whether each was right, and whether some came early."""
    model, listener = wrapped(), Noting()
    assert listen(model, listener) is None
    for step in range(steps):
        backward(model, step)
        model.zero_grad()
    return len(list(model.parameters())), listener.equal, not any(listener.too_early)


def copied() -> bool:
    """Return whether a copy of a wrapper trains like the wrapper, whose hook stays after its optimizer."""
    model, optimizer = training("backward", one_backward, {}, {}, steps=3)
    del optimizer
    twin = copy.deepcopy(model)
    for each in (model, twin):
        backward(each, 3)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return all(torch.equal(p.grad, q.grad) for p, q in pairs)
