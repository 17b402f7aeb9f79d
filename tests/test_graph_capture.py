"""A captured step: run eagerly once, captured, replayed while nothing changes. With a stand-in for CUDA graphs."""

from __future__ import annotations

import pytest
import torch

from muon_fsdp.kernels.recorder import Recorder
from muon_fsdp.step import graph


class PretendedGraph(Recorder):
    """Records like GraphRecorder, without a device: it notes what it is asked to do."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.replays = device, 0

    def record(self, work) -> None:
        work()

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def captured(monkeypatch) -> graph.CapturedStep:
    monkeypatch.setattr(graph, "GraphRecorder", PretendedGraph)
    return graph.CapturedStep()


def run(captured: graph.CapturedStep, key: object, log: list[str], step=None, check=None) -> None:
    """Run one step, and note whether it ran eagerly or as a capture."""

    def note(recorder: Recorder) -> None:
        log.append(f"{'captured' if isinstance(recorder, PretendedGraph) else 'eager'} {key}")

    device = torch.device("cpu")
    captured.run(key, step or note, lambda: device, check or (lambda: log.append("checked")), ["muon", "adamw", "muon"])


def test_a_step_runs_eagerly_is_captured_and_then_replayed(captured):
    log: list[str] = []
    for _ in range(4):
        run(captured, "a", log)
    assert log == ["checked", "eager a", "captured a"]
    assert captured.graph.replays == 2


def test_a_new_key_starts_over(captured):
    log: list[str] = []
    for key in "aabba":
        run(captured, key, log)
    assert log == ["checked", "eager a", "captured a", "checked", "eager b", "captured b", "checked", "eager a"]
    assert captured.graph is None


def test_a_key_that_equals_nothing_is_never_captured(captured):
    log: list[str] = []
    for _ in range(3):
        run(captured, object(), log)
    assert [line.split()[0] for line in log] == ["checked", "eager"] * 3


def test_a_forgotten_graph_is_captured_again(captured):
    log: list[str] = []
    run(captured, "a", log)
    run(captured, "a", log)
    captured.forget()
    assert captured.graph is None
    run(captured, "a", log)
    run(captured, "a", log)
    assert log == ["checked", "eager a", "captured a"] * 2


def test_a_step_that_cannot_be_captured_names_its_rules_and_is_not_kept(captured):
    log: list[str] = []

    def synchronizes(recorder: Recorder) -> None:
        if isinstance(recorder, PretendedGraph):
            raise RuntimeError("operation not permitted\nwhen stream is capturing")

    run(captured, "a", log, step=synchronizes)
    with pytest.raises(RuntimeError, match=r"rules 'adamw', 'muon' can't be captured \(operation not permitted\)"):
        run(captured, "a", log, step=synchronizes)
    assert captured.graph is None


def test_parameters_are_checked_before_the_first_step(captured):
    def refuse() -> None:
        raise RuntimeError("parameter 'w' can't be captured")

    log: list[str] = []
    with pytest.raises(RuntimeError, match="parameter 'w'"):
        run(captured, "a", log, check=refuse)
    assert log == []
