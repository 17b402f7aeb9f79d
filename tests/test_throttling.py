"""The clocks of a GPU during a benchmark: what nvidia-smi prints, what the report says, and what happens without it."""

from __future__ import annotations

import signal
import stat
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from muon_fsdp.benchmarks import run, throttling
from muon_fsdp.benchmarks.throttling import Sample, Watch, parse_sample

# A program that answers one query, and repeats its answer if it is asked to, as nvidia-smi does.
FAKE = """#!{python}
import sys, time
if not any({field!r} in argument for argument in sys.argv):
    sys.exit('Field "clocks_event_reasons.active" is not a valid field to query.')
for count in range(10**6):
    print("{line}", flush=True)
    if "-lms" not in sys.argv:
        break
    if count == 2:
        open(__file__ + ".sampled", "w").close()
    time.sleep(0.01)
"""


@pytest.fixture
def fake_smi(tmp_path, monkeypatch):
    """Put a program `nvidia-smi` on the path that prints this line and knows this field."""

    def install(line: str, field: str = "clocks_event_reasons.active") -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(FAKE.format(python=sys.executable, line=line, field=field))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path))

    return install


def watched(watch: Watch) -> dict[str, object]:
    """Return the summary of a body that lasts until there are samples, or for a moment if there will be none."""
    with watch.samples() as samples:
        end = time.monotonic() + (20 if watch.command else 0)
        while time.monotonic() < end and not Path(f"{watch.command[0]}.sampled").exists():
            time.sleep(0.01)
    return watch.summarize(samples)


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        ("1980, 412.50, 54, 0x0000000000000004", Sample(1980, 412.5, 54, 4)),
        ("1980, [N/A], 54, [Not Supported]", Sample(1980, None, 54, None)),
        ("[N/A], [N/A], [N/A], [N/A]", None),
        ("No devices were found", None),
        ("", None),
    ],
)
def test_a_line_is_parsed(line, sample):
    assert parse_sample(line) == sample


def test_a_summary_counts_what_a_busy_gpu_did():
    samples = [
        Sample(1980, 300.0, 50, 0x0),
        Sample(1500, 690.0, 61, 0x4),
        Sample(1410, 700.0, 63, 0x4 | 0x40),
        Sample(1700, 650.0, 62, 0x2),  # limited by a setting of the clocks, which is no throttling
        Sample(345, 80.0, 70, 0x1),  # idle
    ]
    summary = Watch(None).summarize(samples)
    assert summary == {
        "samples": 4,
        "min_clock_mhz": 1410,
        "median_clock_mhz": 1600,
        "max_power_watts": 700.0,
        "max_temperature_celsius": 63,
        "throttled": {"power cap": 0.5, "thermal": 0.25},
    }
    assert throttling.show(summary) == (
        "GPU: SM clock 1600 MHz (lowest 1410), at most 700 W, at most 63 C, "
        "throttled: power cap in 50% of samples, thermal in 25% of samples"
    )
    assert throttling.show(Watch(None).summarize(samples[:1])).endswith("throttled: none")
    assert throttling.show(Watch(None).summarize([Sample(1980, None, None, None)])) == (
        "GPU: SM clock 1980 MHz (lowest 1980), throttled: not known"
    )
    assert throttling.show(Watch(None).summarize(samples[4:])) == ("GPU clocks: not known (no samples of a busy GPU)")


@pytest.mark.parametrize("field", throttling.REASON_FIELDS)
def test_samples_come_from_nvidia_smi(fake_smi, field):
    fake_smi("1755, 699.90, 64, 0x0000000000000004", field)
    summary = watched(Watch.of_gpu())
    assert summary["samples"] >= 3
    assert summary["throttled"] == {"power cap": 1.0}


def test_without_nvidia_smi_the_clocks_are_not_known(fake_smi, tmp_path, monkeypatch):
    fake_smi("Unable to determine the device handle")
    watch = Watch.of_gpu()
    assert watched(watch) == {"unknown": "nvidia-smi answered 'Unable to determine the device handle'"}
    (tmp_path / "nvidia-smi").write_text("no program")
    assert "nvidia-smi failed" in watched(Watch.of_gpu())["unknown"]
    (tmp_path / "nvidia-smi").unlink()
    assert watched(Watch.of_gpu()) == {"unknown": "nvidia-smi was not found"}
    gone = Watch([str(tmp_path / "gone")])
    with gone.samples() as samples:
        pass
    assert "gone failed" in gone.summarize(samples)["unknown"]


class PretendedWatch(Watch):
    """A watch that takes one sample while the body runs."""

    @contextmanager
    def samples(self):
        yield [Sample(1755, 699.9, 64, 0)]


def test_every_part_of_a_report_has_its_clocks():
    saved = []
    report = run.Report(PretendedWatch(None), lambda figures: saved.append(dict(figures)))
    report.add("part", "title: ", iter([5]), str)
    report.note("the end")
    assert report.figures["part"] == [5]
    assert [figures["part"] for figures in saved] == [[5]] * len(saved)
    assert "gpu" in saved[-1]  # the last save has everything
    assert report.figures["gpu"]["part"]["max_power_watts"] == 699.9
    line = "GPU: SM clock 1755 MHz (lowest 1755), at most 700 W, at most 64 C, throttled: none"
    assert report.text() == f"title: [5]\n{line}\n\nthe end"


def test_the_program_ends_if_the_measurement_fails(fake_smi, monkeypatch):
    fake_smi("1755, 699.90, 64, 0x0000000000000000")
    started = []
    real = throttling.subprocess.Popen
    watch = Watch.of_gpu()
    monkeypatch.setattr(throttling.subprocess, "Popen", lambda *a, **k: started.append(real(*a, **k)) or started[-1])
    with pytest.raises(ZeroDivisionError), watch.samples():
        raise ZeroDivisionError
    assert [process.returncode for process in started] == [-signal.SIGKILL]  # it ran until then
