"""Stages that start in backward: the same results in every layout, whatever happens between backward and step()."""

from __future__ import annotations

import copy
import gc
import random
import threading
import time
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.step import backward as backward_module
from muon_fsdp.step import overlap
from muon_fsdp.step.backward import Round
from muon_fsdp.step.changes import Arrival, NotedOptions
from tests import overlap_cases as cases
from tests.comparisons import assert_same
from tests.fault_cases import LIMIT, backward
from tests.kernel_cases import DEVICE, kernels_fixture  # noqa: F401
from tests.pool import RankPool
from tests.toy_rules import EarlyCounter

LAYOUTS = [
    ("fsdp", 2, {}),
    ("fsdp", 3, {"strategy": "replicate"}),
    ("hsdp", 4, {"strategy": "owner"}),
    ("fsdp_tp", 4, {}),
    ("two_meshes", 4, {"comm_dtype": torch.bfloat16}),
    ("fsdp", 2, {"rule": "normuon"}),
    ("hsdp", 4, {"rule": "normuon", "strategy": "replicate"}),
    ("ddp", 2, {"rule": "normuon"}),
]


@pytest.mark.parametrize(("layout", "world_size", "options"), LAYOUTS)
def test_same_bits_in_every_layout(ranks: RankPool, layout, world_size, options):
    model_options = {"hidden": 32} if "tp" in layout else {}
    for used, discarded, report in ranks.run(world_size, cases.both, layout, options, model_options, timeout=LIMIT):
        assert used > 5
        assert discarded == 0
        first, _, rest = report.partition(" of ")
        assert rest == f"{first} stage(s) start in the next backward"


def test_rules_that_need_weights_only_gather_in_backward(ranks: RankPool):
    reason = "rule 'spectral_sphere' needs statistics or factors of the weights, which step() computes"
    for used, discarded, report in ranks.run(2, cases.both, "fsdp", {"rule": "spectral_sphere"}, {}, 4, timeout=LIMIT):
        assert (used, discarded) == (2 * 5, 0)  # experts are whole on a rank
        assert report == (
            f"5 of 6 stage(s) start in the next backward; 5 only gather: {reason}; "
            f"1 not: {reason}, and there is nothing to gather before"
        )
    for used, discarded, report in ranks.run(2, cases.both, "ddp", {"rule": "spectral_sphere"}, {}, 3, timeout=LIMIT):
        assert (used, discarded) == (0, 0)
        assert f"{reason}, and there is nothing to gather before" in report


def test_state_and_options_that_prepare_reads_count(ranks: RankPool):
    names = ["momentum buffer", "load", "momentum", "plan", "lr", "clip others", "nothing"]
    for found in ranks.run(2, cases.same_in_all, names, timeout=LIMIT):
        for name, (used, discarded, stages) in found.items():
            expected = 0 if name in ("lr", "clip others", "nothing") else stages
            assert discarded == expected, name
            missed = stages if name == "plan" else 0  # a new plan finds out first what comes
            assert used == 4 * stages - expected - missed, name


# ------------------------------------------------------------------------------------------------------------- order


def fake_stages(generator: random.Random) -> list[SimpleNamespace]:
    """Return stages of random sizes, with positions that no other stage has."""
    positions = list(range(12))
    generator.shuffle(positions)
    cuts = sorted(generator.sample(range(1, 12), generator.randint(1, 5)))
    parts = [positions[a:b] for a, b in zip([0, *cuts], [*cuts, 12], strict=True)]
    return [
        SimpleNamespace(number=number, positions=frozenset(part), exchange=None) for number, part in enumerate(parts)
    ]


def started_by_a_rank(stages: list[SimpleNamespace], generator: random.Random) -> list[int]:
    """Return the order in which a rank starts stages whose gradients arrive in a random order, and some never."""
    round_ = Round(stages)
    round_._source = SimpleNamespace(started=set())
    started: list[int] = []
    arrived: set[int] = set()
    completed = threading.Event()

    def consume() -> None:
        for stage in round_._when_due():
            started.append(stage.number)
            round_._source.started.add(stage.number)
            assert completed.is_set() or stage.positions <= arrived

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    for position in generator.sample(range(12), generator.randint(0, 12)):
        arrived.add(position)
        round_.arrive(position, SimpleNamespace())
    completed.set()
    round_.complete()
    thread.join(20)
    assert not thread.is_alive()
    return started


def test_stages_start_in_the_same_order_on_all_ranks_whatever_arrives_when():
    for seed in range(200):
        stages = fake_stages(random.Random(seed))
        orders = [started_by_a_rank(stages, random.Random(1000 * seed + rank)) for rank in range(3)]
        assert orders[0] == orders[1] == orders[2] == [stage.number for stage in stages]


def test_stages_are_reordered_by_the_arrival_of_gradients_within_a_set_of_ranks():
    exchange = [SimpleNamespace(ranks=(0, 1)), SimpleNamespace(ranks=(0, 1, 2, 3))]
    stages = [SimpleNamespace(number=number, exchange=exchange[number > 2]) for number in range(5)]
    completed = {0: 7, 1: 2, 2: 2, 3: 5, 4: 0}
    assert [stage.number for stage in overlap.early_order(stages, completed)] == [1, 2, 0, 4, 3]


def test_same_bits_whatever_ranks_wait_for(ranks: RankPool):
    for used in ranks.run(2, cases.random_delays, range(3), timeout=LIMIT):
        assert used > 20


def test_a_stage_runs_before_backward_has_ended(ranks: RankPool):
    for in_time, threads in ranks.run(2, cases.gathered_before_backward_ends, timeout=LIMIT):
        assert in_time
        assert threads == 6 * [cases.THREAD]


# -------------------------------------------------------------------------------------------------------- one process


def test_same_bits_in_one_process():
    expected = cases.contents(*cases.train_alone("step"))
    model, optimizer = cases.train_alone("backward")
    assert_same(cases.contents(model, optimizer), expected)
    assert cases.counts(optimizer) == (3, 0)  # one stage, from the third step on
    assert optimizer.plan_report().overlap == "1 of 1 stage(s) start in the next backward"
    assert "Overlap with backward: 1 of 1" in str(optimizer.plan_report())
    assert optimizer.plan_report().cuda_graph == "not captured: overlap='backward' runs a part of the step in backward"


def test_same_bits_with_any_number_of_threads():
    """A new thread does not inherit what `torch.set_num_threads` has set, and with it the order of sums."""
    found = []
    torch.set_num_threads(2)  # a fixture sets it back
    for setting in ("step", "backward"):
        torch.manual_seed(0)
        model = nn.Linear(64, 9, bias=False)
        optimizer = MuonOptimizer(model, lr=0.1, overlap=setting)
        for step in range(3):
            model(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(cases.contents(model, optimizer))
    assert cases.counts(optimizer)[0] > 0
    assert_same(*found)


def test_same_bits_by_kernels(kernels_everywhere):
    """Kernels read the copies of the state through tables of their own, and leave the norms of matrices."""
    found, launched = [], []
    for setting in ("step", "backward"):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in ((8, 16), (5, 7), (3,))]
        optimizer = MuonOptimizer(params, lr=0.05, ns_steps=1, overlap=setting, cuda_graph=False)
        for _ in range(3):
            sum((p * (1 + i)).square().sum() for i, p in enumerate(params)).backward()
            if optimizer._planned is not None and optimizer._planned.overlap is not None:
                optimizer._planned.overlap._round.wait()  # Triton's interpreter runs one kernel at a time
            optimizer.step()
            optimizer.zero_grad()
        found.append(params + [value for p in params for value in optimizer.state[p].values()])
        launched.append(kernels_everywhere.count("_muon_prepare_kernel"))
    assert_same(*found)
    assert cases.counts(optimizer) == (1, 0)
    # Two lists, because 35 elements are no multiple of 16; and once more for the stage that ran in backward.
    assert launched == [2 * 3, 2 * (3 + 4)]


@pytest.mark.parametrize("rule", ["normuon", EarlyCounter.name])
@pytest.mark.parametrize("changes", [False, True])
def test_per_matrix_state_is_stored_by_step_alone(rule, changes):
    """`direction` changes copies in backward. If the state changes before step(), it is called again."""
    name = {"normuon": "second_moment", EarlyCounter.name: "steps"}[rule]
    found = []
    for setting in ("step", "backward"):
        torch.manual_seed(0)
        named = [(f"p{i}", nn.Parameter(torch.randn(shape))) for i, shape in enumerate(((8, 16), (12, 6), (3, 8, 16)))]
        params = [p for _, p in named]
        options = {"p1": {"split_sizes": (4, 8)}}
        optimizer = MuonOptimizer(named, lr=0.05, rule=rule, overlap=setting, overrides=options, max_stage_bytes=1000)
        for step in range(5):
            sum((p * (1 + i)).square().sum() for i, p in enumerate(params)).backward()
            if setting == "backward" and step > 0:
                before = [optimizer.state[p][name].clone() for p in params]
                round_ = optimizer._planned.overlap._round
                round_.wait()
                assert not (round_.stages and round_._source._of_matrices)  # copies end with their batches
                assert_same([optimizer.state[p][name] for p in params], before)
            if changes and step == 3:
                optimizer.state[params[1]][name].mul_(2)
            optimizer.step()
            optimizer.zero_grad()
        found.append(params + [value for p in params for value in optimizer.state[p].values()])
        numbers = optimizer.metrics()
    assert_same(*found)
    assert numbers["overlapped_stages"] > 3
    assert numbers["discarded_stages"] == changes
    if rule == EarlyCounter.name:
        assert numbers["largest"] == (8.0 if changes else 5.0)  # of five steps, the first three may be doubled


def test_metrics_sample_what_was_computed_in_backward():
    found = {}
    for setting in ("step", "backward"):
        model, optimizer = cases.train_alone(setting)
        optimizer.metrics()
        backward(model, 5)
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        optimizer.step()
        found[setting] = optimizer.metrics()
    assert found["backward"]["update_rms"] == found["step"]["update_rms"]


def test_a_gradient_in_a_precision_that_kernels_cannot_read_will_not_be_read():
    """The stage has not started when step() asks, and sends zeros afterwards."""
    kinds = (torch.float32, torch.float32)
    stage = SimpleNamespace(number=0, positions=frozenset({0}), exchange=None)
    context = SimpleNamespace(records=(), settings=None, stream=None, fused=SimpleNamespace(signature=[kinds]))
    for dtype in (torch.float32, torch.float16):
        round_, grad = Round([stage], context), torch.ones(2, 3, dtype=dtype)
        arrival = Arrival(grad)
        arrival.write(grad)
        round_.arrive(0, arrival)
        assert round_.has_read(0, grad) == (dtype is torch.float32)


def test_options_count_by_their_values():
    group = {"momentum": torch.tensor(0.9), "lr": 0.1}
    options = NotedOptions(group)
    assert options["momentum"] == 0.9
    group["lr"] = 0.2  # nobody has read it
    assert options.is_current(group)
    assert not options.is_current(dict(group))
    group["momentum"].data.fill_(0.8)  # PyTorch does not count this
    assert not options.is_current(group)


def test_a_step_that_failed_before_backward_leaves_neither_zeros_nor_a_warning(monkeypatch):
    def broken():
        raise ArithmeticError("no plan")

    found = []
    for setting in ("step", "backward"):
        model, optimizer = cases.train_alone(setting)
        with monkeypatch.context() as patch:
            patch.setattr(optimizer, "_prepare", broken)
            with pytest.raises(ArithmeticError, match="no plan"):
                optimizer.step()
        cases.wait_for_stages(optimizer)
        backward(model, 5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        found.append(cases.contents(model, optimizer))
    assert_same(*found)
    assert cases.counts(optimizer) == (3, 1)


def test_a_round_and_its_gradients_are_freed_at_once():
    """Python looks for cycles too rarely: GPU memory does not count there."""
    model, optimizer = cases.train_alone("backward")
    gc.collect()
    gc.disable()
    try:
        known = []
        for step in range(5, 8):
            backward(model, step)
            known.append([weakref.ref(optimizer._planned.overlap._round), weakref.ref(model[0].weight.grad)])
            optimizer.step()
            optimizer.zero_grad()
        deadline = time.monotonic() + 20  # the thread drops a round when it has ended
        while any(each() is not None for pair in known for each in pair) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [[each() for each in pair] for pair in known] == [[None, None]] * 3
    finally:
        gc.enable()


def test_hooks_and_thread_end_with_the_optimizer():
    model, optimizer = cases.train_alone("backward")
    backward(model, 5)
    alive = weakref.ref(optimizer._planned.overlap)
    twin = copy.deepcopy(optimizer)  # a copy has nothing under way
    twin.step()
    del optimizer, twin
    gc.collect()
    assert alive() is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    backward(model, 6)


def test_a_program_that_ends_leaves_threads_of_gloo_time_to_free_tensors(monkeypatch):
    """They can't be joined, need Python's lock for it, and abort the process if Python is shutting down."""
    calls = []
    thread = SimpleNamespace(
        is_alive=lambda: True, cancel=lambda: calls.append("cancel"), join=lambda seconds: calls.append("join")
    )
    monkeypatch.setattr(backward_module, "sleep", lambda seconds: calls.append(f"sleep {seconds}"))
    for threads, expected in (([], []), ([thread], ["cancel", "join", "sleep 0.1"])):
        monkeypatch.setattr(backward_module, "_threads", threads)
        backward_module._end_threads()
        assert calls == expected


def test_an_error_of_a_rule_in_backward_is_raised_by_step(monkeypatch):
    model, optimizer = cases.train_alone("backward")

    def broken(self, batches):
        raise ArithmeticError("no direction")

    monkeypatch.setattr(type(cases.RULES["muon"]), "directions", broken)
    backward(model, 5)
    with pytest.raises(ArithmeticError, match="no direction"):
        optimizer.step()
