"""Training with `overlap="step"` and `overlap="backward"` on ranks, for tests/test_overlap.py."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from muon_fsdp.comm.dtensors import local
from muon_fsdp.comm.process_groups import are_claimed, claim_groups
from muon_fsdp.comm.transfers import StageExchange
from muon_fsdp.rules import RULES, MatrixBatch
from muon_fsdp.step import metrics
from muon_fsdp.step.backward import PURPOSE, Round, RoundThread
from muon_fsdp.step.metrics import Samples
from muon_fsdp.step.overlap import BackwardOverlap
from tests.comparisons import assert_same
from tests.distributed_cases import OPTIONS, batch, lay_out, make_model, train
from tests.fault_cases import backward as backward_alone
from tests.fault_cases import error_of, net

THREAD = "muon_fsdp backward"
Case = Callable[[nn.Module, FSDPMuonOptimizer, int], None]  # one training step: model, optimizer, number


def counts(optimizer: MuonOptimizer) -> tuple[int, int]:
    """Return the stages that were used, and those that were discarded."""
    metrics = optimizer.metrics()
    return int(metrics["overlapped_stages"]), int(metrics["discarded_stages"])


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return this rank's part of all weights and state."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = local(p).detach().clone()
        found |= {f"{name} {key}": local(value).clone() for key, value in optimizer.state[p].items()}
    return found


def both(layout: str, options: dict[str, Any], model_options: dict[str, int], steps: int = 5) -> tuple[int, int, str]:
    """Train with both settings, and check that losses, weights and state are equal bit for bit.

    Returns:
        The stages that were used, those that were discarded, and what the report says.
    """
    found = []
    for overlap in ("step", "backward"):
        module, data_rank, data_size = lay_out(make_model(**model_options), layout)
        optimizer = FSDPMuonOptimizer(module, **{**OPTIONS, "max_stage_bytes": 600, "overlap": overlap, **options})
        losses = train(module, optimizer, range(steps), data_rank, data_size)
        found.append((losses, contents(module, optimizer)))
    (losses, expected), (overlapped, result) = found
    assert overlapped == losses
    assert_same(result, expected)
    return *counts(optimizer), optimizer.plan_report().overlap


def train_alone(setting: str, *, steps: int = 5, **options: Any) -> tuple[nn.Module, MuonOptimizer]:
    model = net()
    optimizer = MuonOptimizer(model, lr=0.1, nesterov=True, overlap=setting, **options)
    for step in range(steps):
        backward_alone(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def wait_for_stages(optimizer: MuonOptimizer) -> None:
    """Wait until the stages of this round have read everything, so that it does not depend on the thread's speed."""
    overlap = optimizer._planned.overlap
    if overlap is not None:
        overlap._round.wait()


def sharded_training(
    overlap: str, steps: int, case: Case, layout: str = "fsdp", **options: Any
) -> tuple[nn.Module, FSDPMuonOptimizer]:
    module, _, _ = lay_out(make_model(), layout)
    given = {**OPTIONS, "max_stage_bytes": 600, "overlap": overlap, **options}
    optimizer = FSDPMuonOptimizer(module, **given)
    for step in range(steps):
        case(module, optimizer, step)
    return module, optimizer


def backward(model: nn.Module, number: int) -> None:
    tokens, targets = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch(number))
    nn.functional.cross_entropy(model(tokens), targets).backward()


def by_hand(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
    for micro in range(3):
        backward(model, 3 * step + micro)
    optimizer.step()
    optimizer.zero_grad()


def without_reductions(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        backward(model, 3 * step + micro)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def by_the_optimizer(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
    for micro in range(3):
        backward(model, 3 * step + micro)
        optimizer.step()
        optimizer.zero_grad()


def one_more_in_step_3(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
    for micro in range(2 if step == 3 else 1):
        backward(model, step + 100 * micro)
    optimizer.step()
    optimizer.zero_grad()


def one_less_in_step_3(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
    for micro in range(1 if step == 3 else 2):
        backward(model, step + 100 * micro)
    optimizer.step()
    optimizer.zero_grad()


def dropped_in_step_3(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
    backward(model, step)
    if step != 3:
        optimizer.step()
    optimizer.zero_grad()


def unsharded_before_backward(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
    if step >= 3:
        with optimizer.unshard_params():
            pass
    _one_backward(model, optimizer, step)


def failed_before_backward(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
    """Call step() in step 3 before backward, with an lr that differs between ranks."""
    if step == 3:
        group = optimizer.param_groups[0]
        lr, group["lr"] = group["lr"], 1.0 + dist.get_rank()
        assert "lr" in error_of(optimizer.step)
        group["lr"] = lr
        wait_for_stages(optimizer)
    _one_backward(model, optimizer, step)


def cleared_before_backward(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
    _cleared_in_step_3(model, optimizer, step, ranks=range(dist.get_world_size()))


def cleared_before_backward_on_rank_1(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
    _cleared_in_step_3(model, optimizer, step, ranks=[1])


def _cleared_in_step_3(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int, ranks: Sequence[int]) -> None:
    if step == 3 and dist.get_rank() in ranks:
        _clear(model, optimizer)
    backward(model, step)
    if step == 3:  # a stage that starts later, during step(), may find state that was created anew and use it
        wait_for_stages(optimizer)
    optimizer.step()
    optimizer.zero_grad()


def _one_backward(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
    backward(model, step)
    optimizer.step()
    optimizer.zero_grad()


def changed_in_step_3(change: str) -> Case:
    def case(model: nn.Module, optimizer: FSDPMuonOptimizer, step: int) -> None:
        backward(model, step)
        if step == 3:
            wait_for_stages(optimizer)
            CHANGES[change](getattr(model, "module", model), optimizer)  # DDP wraps it
        optimizer.step()
        optimizer.zero_grad()

    return case


def _clip(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _clip_by_optimizer(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    optimizer.clip_grad_norm_(1e-3)


def _clip_others(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    optimizer.clip_grad_norm_(1e-3, rules=("adamw",))


def _double_one(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    model.blocks[0].up.weight.grad.mul_(2)


def _double_one_through_data(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    model.blocks[0].up.weight.grad.data.mul_(2)


def _average_one_by_hand(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    dist.all_reduce(model.blocks[0].down.weight.grad.to_local())  # whose shards are equally large


def _double_one_on_rank_1(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    if dist.get_rank() == 1:
        local(model.blocks[0].up.weight.grad).mul_(2)


def _replace_one(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    weight = model.blocks[0].up.weight
    weight.grad = 2 * weight.grad


def _remove_one(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    model.blocks[0].up.weight.grad = None


def _remove_one_on_rank_1(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    if dist.get_rank() == 1:
        model.blocks[0].up.weight.grad = None


def _change_momentum_buffer(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p]["momentum_buffer"].zero_()


def _change_state_by_foreach(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    torch._foreach_mul_([optimizer.state[p]["momentum_buffer"] for p in optimizer.param_groups[0]["params"]], 0.5)


def _change_state_through_data(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        for value in optimizer.state[p].values():  # per-matrix state too
            value.data.mul_(0.5)


def _clear(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        optimizer.state[p].clear()


def _drop_all_state(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    optimizer.state.clear()


def _load(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    state = optimizer.state_dict()
    for value in state["state"].values():
        value["momentum_buffer"] = 0.5 * value["momentum_buffer"]
    optimizer.load_state_dict(state)


def _set_momentum(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    optimizer.param_groups[0]["momentum"] = 0.5


def _set_lr(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.5 * group["lr"]


def _plan_anew(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    optimizer.param_groups[0]["ns_steps"] = 4


def _nothing(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    """Look at everything, and change nothing."""
    optimizer.state_dict()
    optimizer.metrics()
    with optimizer.unshard_params():
        pass


CHANGES: dict[str, Callable[[nn.Module, FSDPMuonOptimizer], None]] = {
    "clip": _clip,
    "clip by optimizer": _clip_by_optimizer,
    "clip others": _clip_others,
    "double one": _double_one,
    "double one through data": _double_one_through_data,
    "average one by hand": _average_one_by_hand,
    "double one on rank 1": _double_one_on_rank_1,
    "replace one": _replace_one,
    "remove one": _remove_one,
    "remove one on rank 1": _remove_one_on_rank_1,
    "momentum buffer": _change_momentum_buffer,
    "state by foreach": _change_state_by_foreach,
    "state through data": _change_state_through_data,
    "clear": _clear,
    "drop all state": _drop_all_state,
    "load": _load,
    "momentum": _set_momentum,
    "lr": _set_lr,
    "plan": _plan_anew,
    "nothing": _nothing,
}
CASES: dict[str, Case] = {
    "by hand": by_hand,
    "without reductions": without_reductions,
    "by the optimizer": by_the_optimizer,
    "one more in step 3": one_more_in_step_3,
    "one less in step 3": one_less_in_step_3,
    "dropped in step 3": dropped_in_step_3,
    "unsharded before backward": unsharded_before_backward,
    "failed before backward": failed_before_backward,
    "cleared before backward": cleared_before_backward,
    "cleared before backward on rank 1": cleared_before_backward_on_rank_1,
}


def same_in(name: str, steps: int = 6, **options: Any) -> tuple[int, int, int]:
    """Run a case with both settings, and check that weights and state are equal bit for bit.

    Returns:
        The stages that were used, those that were discarded, and the number of stages of a step.
    """
    case = CASES[name] if name in CASES else changed_in_step_3(name)
    expected = contents(*sharded_training("step", steps, case, **options))
    model, optimizer = sharded_training("backward", steps, case, **options)
    assert_same(contents(model, optimizer), expected)
    planned = optimizer._current_plan()
    return *counts(optimizer), sum(RULES[stage.rule].needs_matrices for stage in planned.plan.stages)


def same_in_all(names: list[str], options: dict[str, Any] | None = None) -> dict[str, tuple[int, int, int]]:
    """Run several cases, because a process group for each takes time; `options` may name a layout too."""
    found = {name: same_in(name, **(options or {})) for name in names if name != "by the optimizer"}
    if "by the optimizer" in names:
        found["by the optimizer"] = same_in("by the optimizer", gradient_accumulation_steps=3)
    return found


def initialized_anew(folder: str) -> tuple[int, int]:
    """Make a new default process group while the thread waits for a gradient, and train on one rank."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])
    optimizer = MuonOptimizer(layers, lr=0.1, max_stage_bytes=200, overlap="backward")
    for step in range(8):
        used = layers[1:] if step == 3 else layers
        sum(layer(torch.randn(4, 8)).square().mean() for layer in used).backward()
        if step == 3:
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        optimizer.step()
        optimizer.zero_grad()
    return counts(optimizer)


def two_optimizers(layout: str, steps: int = 8) -> tuple[tuple[int, int], tuple[int, int], str]:
    """Train with an optimizer for every other parameter, while stages take random times on each rank.

    Returns:
        The stages that were used and discarded of each optimizer, and what the report of the second says.
    """
    found = []
    delays, directions = random.Random(dist.get_rank()), type(RULES["muon"]).directions

    def slow_directions(self: Any, batches: Sequence[MatrixBatch]) -> None:
        time.sleep(delays.choice([0, 0, 0.005, 0.01]))
        directions(self, batches)

    for overlap in ("step", "backward"):
        module, _, _ = lay_out(make_model(), layout)
        named = list(module.named_parameters())
        options = {**OPTIONS, "max_stage_bytes": 600, "overlap": overlap}
        if layout == "ddp":
            options |= {"replicate_group": dist.group.WORLD, "shard_state": True}
        optimizers = [MuonOptimizer(named[first::2], **options) for first in range(2)]
        with patch.object(type(RULES["muon"]), "directions", slow_directions):
            for step in range(steps):
                backward(module, step)
                for optimizer in optimizers:
                    optimizer.step()
                module.zero_grad()
        found.append({name: local(p).detach().clone() for name, p in named})
    assert_same(found[1], found[0])
    first, second = optimizers
    return counts(first), counts(second), second.plan_report().overlap


class Tower(nn.Module):
    """Matrices of which each rank may leave out some, distributed without FSDP2."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        weights = [torch.randn(6, 6, generator=generator) for _ in range(depth)]
        self.weights = nn.ParameterList(
            [nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])) for weight in weights]
        )

    def forward(self, skipped: set[int]) -> Tensor:
        used = [weight.to_local() * (1 + i) for i, weight in enumerate(self.weights) if i not in skipped]
        return sum((part.square().sum() for part in used), torch.zeros((), requires_grad=True))


def missing_on_some_ranks(overlap: str) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """Train while ranks leave out different matrices in different steps."""
    model = Tower()
    optimizer = MuonOptimizer(model.named_parameters(), lr=0.1, max_stage_bytes=60, overlap=overlap)
    skipped = {3: {0: {1}, 1: set()}, 4: {0: {0}, 1: {2}}, 6: {0: {0, 1, 2, 3}, 1: {0}}, 8: {0: {2}, 1: {2}}}
    for step in range(11):
        model(skipped.get(step, {}).get(dist.get_rank(), set())).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = contents(model, optimizer)
    return found, counts(optimizer) if overlap == "backward" else (0, 0)


def missing_gradients() -> tuple[int, int]:
    expected, _ = missing_on_some_ranks("step")
    found, used = missing_on_some_ranks("backward")
    assert_same(found, expected)
    return used


def random_delays(seeds: range) -> int:
    """Train while gradients arrive after random delays and stages take random times, and compare with "step"."""
    expected = contents(*sharded_training("step", 5, changed_in_step_3("nothing")))
    arrived, directions = BackwardOverlap.arrived, type(RULES["muon"]).directions
    used = 0
    for seed in seeds:
        delays = random.Random(1000 * seed + dist.get_rank())

        def slow_arrival(self: BackwardOverlap, position: int, parameter: Tensor) -> None:
            time.sleep(delays.choice([0, 0, 0.003]))  # noqa: B023
            arrived(self, position, parameter)

        def slow_directions(self: Any, batches: Sequence[MatrixBatch]) -> None:
            time.sleep(delays.choice([0, 0, 0.003]))  # noqa: B023
            directions(self, batches)

        with (
            patch.object(BackwardOverlap, "arrived", slow_arrival),
            patch.object(type(RULES["muon"]), "directions", slow_directions),
        ):
            model, optimizer = sharded_training("backward", 5, changed_in_step_3("nothing"))
        assert_same(contents(model, optimizer), expected, f"seed {seed}")
        used += counts(optimizer)[0]
    return used


def gathered_before_backward_ends() -> tuple[bool, list[str]]:
    """Return whether a stage was gathered while backward still ran, and the threads in which stages were."""
    model, optimizer = sharded_training("backward", 3, changed_in_step_3("nothing"))
    gathered, threads, in_time = threading.Event(), [], []
    finish_gather = StageExchange.finish_gather

    def noted(self: StageExchange) -> Tensor:
        units = finish_gather(self)
        threads.append(threading.current_thread().name)
        gathered.set()
        return units

    with patch.object(StageExchange, "finish_gather", noted):
        # Called before the gradients of this block are reduced.
        handle = model.blocks[0].register_full_backward_hook(lambda *_: in_time.append(gathered.wait(20)))
        backward(model, 3)
        handle.remove()
        optimizer.step()
    return in_time == [True], threads


def dropped_before_step(layout: str) -> tuple[bool, tuple[int, int]]:
    """Replace the optimizer between backward and step(), while ranks are at different stages.

    Returns:
        Whether the thread of the first optimizer has ended, and the stages of the second that were used and discarded.
    """
    found = []
    for overlap in ("step", "backward"):
        model, optimizer = sharded_training(overlap, 3, _one_backward, layout, strategy="owner")
        threads = [thread for thread in threading.enumerate() if thread.name == THREAD and thread.is_alive()]
        is_dropped, start_gather = threading.Event(), StageExchange.start_gather

        def late(self: StageExchange) -> None:
            if threading.current_thread().name == THREAD and dist.get_rank() == 1:
                is_dropped.wait(20)  # noqa: B023
            start_gather(self)  # noqa: B023

        with patch.object(StageExchange, "start_gather", late):
            backward(model, 3)
            time.sleep(0.3)  # other ranks start more stages than rank 1
            del optimizer
            gc.collect()
            is_dropped.set()
            for thread in threads:
                thread.join(20)
        model.zero_grad()
        optimizer = FSDPMuonOptimizer(model, **{**OPTIONS, "max_stage_bytes": 600, "overlap": overlap})
        for step in range(4, 9):
            _one_backward(model, optimizer, step)
        found.append(contents(model, optimizer))
    assert_same(*found)
    return not any(thread.is_alive() for thread in threads), counts(optimizer)


def samples_after_step() -> dict[str, float]:
    """Call step() without gradients, and let stages that are discarded take samples while it ends."""
    _, optimizer = sharded_training("backward", 3, _one_backward)
    before = optimizer.metrics()  # asks for samples
    round_, is_ending, taken = optimizer._planned.overlap._round, threading.Event(), threading.Event()
    directions, end_step, kept = type(RULES["muon"]).directions, Samples.end_step, metrics._kept

    def late(self: Any, batches: Sequence[MatrixBatch]) -> None:
        if taken.is_set():
            is_ending.wait(20)
        directions(self, batches)
        taken.set()

    def slow_end(self: Samples, *args: Any, **options: Any) -> None:
        taken.wait(20)
        time.sleep(0.1)
        end_step(self, *args, **options)
        is_ending.set()

    def slow_kept(lr: Any) -> Any:
        is_ending.set()
        round_.wait()
        return kept(lr)

    with (
        patch.object(type(RULES["muon"]), "directions", late),
        patch.object(Samples, "end_step", slow_end),
        patch.object(metrics, "_kept", slow_kept),
    ):
        optimizer.step()
        round_.wait()
    after = optimizer.metrics()
    return {name: after[name] - before[name] for name in ("update_rms", "orthogonality_residual")}


def broken_claim() -> list[bool]:
    """Return whether process groups stay claimed after a round that has ended, and after one that has failed."""

    class Ended(Round):
        def run(self) -> bool:
            return True

    class Failed(Round):
        def run(self) -> bool:
            return False

    found = []
    for kind in (Ended, Failed):
        thread = RoundThread()
        thread.claim = claim_groups(PURPOSE)
        thread.begin(kind([SimpleNamespace(number=0, positions=frozenset())]))
        thread.start()
        thread.claim = None
        thread.leave()
        thread.join(20)
        found.append(are_claimed(PURPOSE))
    return found


def dies(when: str) -> str:
    """Return the error of rank 0 after rank 1 has died, before it agrees on the step or while it exchanges matrices."""
    dist.distributed_c10d._get_default_store().add("left", int(dist.get_rank() == 1))  # rank 0 need not wait for it
    model, optimizer = sharded_training("backward", 3, changed_in_step_3("nothing"))
    directions = type(RULES["muon"]).directions

    def stuck(self: Any, batches: Sequence[MatrixBatch]) -> None:
        if threading.current_thread().name == THREAD:
            time.sleep(100)
        directions(self, batches)

    def die(*_: object) -> None:
        os._exit(1)

    if dist.get_rank() == 1:
        method = {"before it agrees": "objections", "in an exchange": "settle"}[when]
        with patch.object(BackwardOverlap, method, die), patch.object(type(RULES["muon"]), "directions", stuck):
            backward(model, 3)
            optimizer.step()
    backward(model, 3)
    return error_of(optimizer.step)
