"""Timers: what they time, how often and in which order, with a clock that only the timed calls advance."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from muon_fsdp import timing


class Clock:
    """A clock that stands still until a call takes time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def call(self, name: str, *durations: float):
        """Return a call that takes these durations in turn, and the last of them from then on."""
        left = list(durations)

        def run() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def test_short_calls_are_timed_as_a_series(clock):
    series = timing.Series(clock.call("short", 9.0, 0.004), "cpu")
    assert len(clock.calls) == 2
    assert series.milliseconds() == pytest.approx(4)
    assert len(clock.calls) == 2 + 5
    assert timing.milliseconds(clock.call("long", 9.0, 3.0, 1.0, 2.0, 7.0), "cpu", 3) == pytest.approx(2000)


def test_calls_are_timed_in_turn_and_in_both_orders(clock):
    durations = {"a": (9.0, 1.0, 9.0, 1.0, 2.0, 6.0), "b": (9.0, 1.0, 9.0, 5.0, 4.0, 5.0)}
    all_series = {name: timing.Series(clock.call(name, *times), "cpu") for name, times in durations.items()}
    clock.calls.clear()
    shown = []
    assert timing.medians_in_turn(all_series, 3, shown.append) == pytest.approx({"a": 2000, "b": 5000})
    assert shown == clock.calls == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_a_sustained_time_is_that_of_the_second_half(clock):
    # The first call says how many fill half of the load. Then ten calls heat the device and ten slower ones count.
    run = clock.call("product", 0.1, *(10 * [0.1]), 0.2)
    assert timing.sustained_seconds(run, "cpu", load=2.0) == pytest.approx(0.2)
    assert len(clock.calls) == 21
