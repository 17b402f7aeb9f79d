"""When a step is captured, replayed or run eagerly, and what a failed capture leaves behind. Stand-ins for the GPU."""

from __future__ import annotations

import gc
import warnings
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.comm.recorder import GraphRecorder, Recorder
from muon_fsdp.step.graph import CapturedStep, StepKey
from tests import graph_cases

DEVICE = torch.device("cpu")


class PretendedDevice:
    """Runs launches at once, or notes them in a segment while one is captured. It stands in for CUDA and CudaSegments.

    `fails_at` is the number of the segment whose capture fails, counted from 0.
    """

    def __init__(self, fails_at: int | None = None, error: Exception | None = None, num_bytes: int = 0) -> None:
        self.fails_at, self.num_bytes = fails_at, num_bytes
        self.error = error or RuntimeError("operation not permitted\nwhen stream is capturing")
        self.log: list[str] = []
        self.segment: list | None = None
        self.num_segments = 0

    def launch(self, work) -> None:
        if self.segment is None:
            work()
            return
        if self.num_segments - 1 == self.fails_at:
            raise self.error
        self.segment.append(work)

    @contextmanager
    def capturing(self):
        self.num_segments = 0
        try:
            yield
        except BaseException:
            self.log.append("abandoned")
            raise
        finally:
            self.segment = None

    def begin(self) -> None:
        assert self.segment is None
        self.segment, self.num_segments = [], self.num_segments + 1

    def end(self):
        works, self.segment = self.segment, None

        def replay() -> None:
            for work in works:
                work()

        return replay if works else None


class Training:
    """A step with momentum in three segments and a collective between each two, on a pretended device."""

    def __init__(self, mode, device: PretendedDevice | None = None) -> None:
        self.device = device or PretendedDevice()
        self.captured = CapturedStep(mode, lambda _: self.device)
        self.momentum, self.weight, self.received = 0.0, 1.0, 0.0
        self.calls: list[str] = []  # what ran: launches and collectives

    def step(self, recorder: Recorder) -> None:
        self.device.log.append("recorded" if isinstance(recorder, GraphRecorder) else "eager")

        def prepare() -> None:
            self.momentum = 0.9 * self.momentum + 1
            self.calls.append("prepare")

        def gather() -> None:
            self.received = self.momentum
            self.calls.append("gather")

        def compute() -> None:
            self.received *= 2
            self.calls.append("compute")

        def apply() -> None:
            self.weight -= 0.1 * self.received
            self.calls.append("apply")

        self.device.launch(prepare)
        recorder.host(gather)
        recorder.host(lambda: self.calls.append("wait"))
        self.device.launch(compute)
        recorder.host(lambda: self.calls.append("scatter"))
        self.device.launch(apply)

    def run(self, launches="a", addresses=0, eager=False) -> str:
        """Take a step. Return how it ran."""
        before = len(self.device.log)
        self.captured.run(StepKey(addresses, launches), self.step, lambda: DEVICE, eager=eager)
        return " ".join(self.device.log[before:]) or "replayed"


ONE_STEP = ["prepare", "gather", "wait", "compute", "scatter", "apply"]


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """Let a pretended allocator report these numbers one after the other, and then the last of them."""
    reserved = [1000]
    monkeypatch.setattr(
        torch.cuda, "memory_reserved", lambda device: reserved.pop(0) if len(reserved) > 1 else reserved[0]
    )
    return reserved


# ---------------------------------------------------------------------------------------------------------- recording


def test_recording_runs_nothing_and_a_replay_runs_everything_in_order():
    training = Training(True)
    recorder = GraphRecorder(training.device)
    recorder.record(training.step)
    assert training.calls == []
    assert (training.momentum, training.weight) == (0.0, 1.0)
    for times in (1, 2):
        recorder.replay()
        assert training.calls == times * ONE_STEP


def test_a_failed_recording_keeps_nothing():
    training = Training(True, PretendedDevice(fails_at=3))
    recorder = GraphRecorder(training.device)
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder.record(training.step)
    recorder.replay()
    assert training.calls == []
    assert training.device.segment is None


def test_buffers_stay_at_one_address_until_they_grow():
    recorder = GraphRecorder(PretendedDevice())
    first = recorder.buffer("a", 8, torch.float32, DEVICE)
    assert recorder.buffer("a", 16, torch.bfloat16, DEVICE).data_ptr() == first.data_ptr()
    assert recorder.buffer("b", 8, torch.float32, DEVICE).data_ptr() != first.data_ptr()
    assert recorder.buffer("a", 9, torch.float32, DEVICE).numel() == 9


# ------------------------------------------------------------------------------------------------- when to capture


def test_auto_captures_after_three_equal_steps():
    training = Training("auto")
    assert [training.run() for _ in range(6)] == ["eager"] * 3 + ["recorded"] + ["replayed"] * 2
    assert training.calls == 6 * ONE_STEP
    assert training.captured.status == "captured"


def test_true_captures_the_second_step():
    training = Training(True)
    with pytest.raises(TypeError):  # a step that failed does not count, because it may not have compiled all kernels
        training.captured.run(StepKey(0, "a"), lambda: None, lambda: DEVICE, eager=False)
    assert [training.run() for _ in range(3)] == ["eager", "recorded", "replayed"]
    assert training.calls == 3 * ONE_STEP


def test_false_never_captures():
    training = Training(False)
    assert {training.run() for _ in range(6)} == {"eager"}
    assert training.captured.status == "off: cuda_graph=False"
    assert not training.captured.is_due


def test_a_step_with_other_launches_runs_eagerly_and_the_graph_is_kept():
    training = Training("auto")
    for _ in range(4):
        training.run("a")
    assert [training.run(kind) for kind in "babba"] == ["eager", "replayed", "eager", "eager", "replayed"]
    training.run("b")
    assert training.captured.status == "captured; the last step was another one and ran eagerly"
    assert len(training.calls) == 10 * len(ONE_STEP)


def test_launches_that_stay_different_are_captured_anew_and_ever_later():
    training = Training("auto")
    found = [training.run(kind) for kind in "aaaa" + "bbbb" + "aaaaaaa" + "bbbb"]
    assert found[4:8] == ["eager"] * 3 + ["recorded"]
    assert found[8:15] == ["eager"] * 6 + ["recorded"]
    assert found[15:] == ["eager"] * 4


def test_a_graph_whose_tensors_were_replaced_is_dropped_at_once():
    training = Training("auto")
    for _ in range(4):
        training.run(addresses=1)
    known = weakref.ref(training.captured.graph)
    assert training.run(addresses=2) == "eager"
    gc.collect()
    assert training.captured.graph is None
    assert known() is None
    # The old addresses may belong to other tensors by now.
    assert training.run(addresses=1) == "eager"


def test_steps_that_must_run_eagerly_keep_the_graph_and_count():
    training = Training("auto")
    assert {training.run(eager=True) for _ in range(5)} == {"eager"}
    assert training.captured.is_due
    assert training.run() == "recorded"
    assert [training.run(eager=True), training.run()] == ["eager", "replayed"]


def test_status_counts_down():
    training = Training("auto")
    found = [training.captured.status]
    for _ in range(4):
        training.run()
        found.append(training.captured.status)
    assert found == [
        "not captured: there was no step yet",
        "not captured yet: 2 more equal step(s) come first",
        "not captured yet: 1 more equal step(s) come first",
        "captured at the next step",
        "captured",
    ]


def test_an_obstacle_is_an_error_with_true_and_a_reason_with_auto():
    training = Training("auto")
    training.captured.start_over("parameter 'w': it is special")
    assert {training.run() for _ in range(5)} == {"eager"}
    assert training.captured.status == "not captured: parameter 'w': it is special"
    training = Training(True)
    training.captured.start_over("parameter 'w': it is special")
    for eager in (False, True):
        with pytest.raises(RuntimeError, match="cuda_graph=True can't capture the step: parameter 'w': it is special"):
            training.run(eager=eager)
    assert training.calls == []


def test_new_tables_drop_the_graph_and_start_the_count_anew():
    training = Training("auto")
    for _ in range(5):
        training.run()
    training.captured.start_over(None)
    assert [training.run() for _ in range(4)] == ["eager"] * 3 + ["recorded"]


# --------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("mode", ["auto", True])
@pytest.mark.parametrize("segment", [0, 2, 3])  # segment 1 is empty: two host calls follow each other
@pytest.mark.parametrize("error", [RuntimeError("no"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_failure_in_any_segment_leaves_no_trace(mode, segment, error):
    expected, training = Training(False), Training(mode, PretendedDevice(segment, error))
    failed = []
    for _ in range(8):
        expected.run()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            how = training.run()
        failed += [str(warning.message) for warning in caught]
        assert (training.momentum, training.weight) == (expected.momentum, expected.weight)
        assert training.calls == expected.calls  # the same collectives in the same order
        assert ("recorded abandoned eager" in how) == (len(caught) > 0)
    assert len(failed) == 1
    assert str(error) in failed[0]
    assert str(error) in training.captured.status
    assert not training.captured.is_due


def test_a_failure_is_warned_of_after_the_step():
    training = Training("auto", PretendedDevice(fails_at=2))
    for _ in range(3):
        training.run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match=r"operation not permitted\. It runs eagerly, with the same results"):
            training.run()
    assert training.calls == 4 * ONE_STEP  # other ranks wait for the collectives


def test_an_interrupted_capture_changes_nothing():
    training = Training("auto", PretendedDevice(fails_at=2, error=KeyboardInterrupt()))
    for _ in range(3):
        training.run()
    with pytest.raises(KeyboardInterrupt):
        training.run()
    assert training.calls == 3 * ONE_STEP
    assert training.captured.graph is None


# ------------------------------------------------------------------------------------------------------------ memory


def test_a_graph_that_needs_too_much_memory_is_dropped_without_a_warning(memory):
    memory[:] = [10 * 2**30]
    training = Training("auto", PretendedDevice(num_bytes=2 * 2**30))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [training.run() for _ in range(6)]
    assert found == ["eager"] * 3 + ["recorded eager"] + ["eager"] * 2
    assert training.calls == 6 * ONE_STEP
    assert "2.147 GB reserved" in training.captured.status
    assert "10.74 GB to 12.88 GB" in training.captured.status
    accepting = Training(True, PretendedDevice(num_bytes=2 * 2**30))
    assert [accepting.run() for _ in range(3)] == ["eager", "recorded", "replayed"]


@pytest.mark.parametrize(
    ("passes", "eager", "pool", "fits"),
    [
        (10, 10, 1, True),
        (10, 10, 1.2, False),
        (5, 10, 5.9, True),  # the passes leave the memory that the step needs unused
        (5, 10, 6.1, False),
        (0.01, 0.01, 0.06, True),  # blocks of the allocator
        (0.01, 0.01, 0.07, False),
    ],
)
def test_memory_is_that_of_the_passes_and_of_the_pool(memory, passes, eager, pool, fits):
    memory[:] = [int(passes * 2**30), int(eager * 2**30)]
    training = Training("auto", PretendedDevice(num_bytes=int(pool * 2**30)))
    for _ in range(4):
        training.run()
    assert (training.captured.status == "captured") == fits


def test_memory_is_measured_in_the_last_step_before_a_capture(monkeypatch):
    training = Training("auto")
    log = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: log.append(len(training.calls)) or 1000)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("emptied"))
    for _ in range(6):
        training.run()
    assert log == ["emptied", 2 * len(ONE_STEP), 3 * len(ONE_STEP)]
    log.clear()
    for kind in "bbbb":  # beside a graph, whose memory would count; the old graph is dropped
        training.run(kind)
    assert log == ["emptied"]
    training = Training(True)
    log.clear()
    for _ in range(3):
        training.run()
    assert log == []


def test_an_allocator_without_statistics_is_a_reason(monkeypatch):
    def unknown(device):
        raise RuntimeError("the pluggable allocator has no statistics\nreally")

    monkeypatch.setattr(torch.cuda, "memory_reserved", unknown)
    training = Training("auto")
    assert {training.run() for _ in range(6)} == {"eager"}
    assert training.captured.status == (
        "not captured: reserved memory is not known: the pluggable allocator has no statistics"
    )


# -------------------------------------------------------------------------------------------------------- optimizers


def test_the_report_says_why_a_step_is_not_captured():
    model = nn.Linear(8, 8)
    optimizer = MuonOptimizer(model)
    assert optimizer.plan_report().cuda_graph == "not captured: there was no step yet"
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert str(optimizer.plan_report()).endswith(
        "\nCUDA graph: not captured: parameter 'weight': no kernels for device type 'cpu'"
    )
    assert "CUDA graph" not in str(optimizer.plan_report(world_size=2))
    assert MuonOptimizer(model, cuda_graph=False).plan_report().cuda_graph == "off: cuda_graph=False"


@pytest.mark.parametrize(("value", "kind"), [(1, TypeError), (None, TypeError), ("fast", ValueError)])
def test_other_values_are_refused(value, kind):
    with pytest.raises(kind, match=r'cuda_graph.*must be True, False or "auto"'):
        MuonOptimizer(nn.Linear(4, 4), cuda_graph=value)


def replaced(optimizer, move):
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = move(value)


def reassigned(optimizer, move):
    for state in optimizer.state.values():
        for value in state.values():
            value.data = move(value.data)


@pytest.mark.parametrize("how", [replaced, reassigned])
@pytest.mark.parametrize("rule", ["muon", "normuon", "spectral_sphere"])
def test_state_may_move_between_steps(rule, how):
    def train(move):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 6))
        optimizer = MuonOptimizer(model, rule=rule, lr=0.05)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 12, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            if move and step == 3:
                how(optimizer, torch.clone)
            optimizer.step()
        return [value.detach() for p in model.parameters() for value in (p, *optimizer.state[p].values())]

    torch.testing.assert_close(train(True), train(False), rtol=1e-4, atol=1e-5)


def test_state_on_another_device_is_an_error_that_names_it():
    model = nn.Linear(8, 8, bias=False)
    optimizer = MuonOptimizer(model)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    replaced(optimizer, lambda value: value.to("meta"))
    optimizer.clip_grad_norm_(1.0)  # needs no state
    with pytest.raises(
        RuntimeError, match="state 'momentum_buffer' of parameter 'weight' is on meta and the parameter"
    ):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_state_that_is_moved_away_frees_its_memory():
    model = nn.Linear(8, 8)
    optimizer = MuonOptimizer(model)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    old = [weakref.ref(value) for state in optimizer.state.values() for value in state.values()]
    replaced(optimizer, torch.clone)
    assert not any(value() is not None for value in old)


# ------------------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("rule", ["muon", "spectral_sphere"])
def test_one_of_two_ranks_fails_to_capture(ranks, rule):
    for num_segments in ranks.run(2, graph_cases.failing_captures, rule, timeout=120):
        assert num_segments > 6


def test_steps_that_are_measured_run_eagerly_on_all_ranks_and_the_graph_is_kept(ranks):
    """One rank asks, and waits some steps. Numbers that are passed per matrix reach a replayed step in place."""
    for measured in ranks.run(2, graph_cases.measured_between_replays, timeout=60):
        assert measured == [False, False, True, False, True]
