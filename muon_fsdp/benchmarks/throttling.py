"""Watch the clock, the power and the temperature of a GPU during a measurement, and tell whether it was throttled.

`nvidia-smi` takes the samples in a process of its own, because the packages that read them in Python may be missing.
No fault of it ever fails a benchmark: the report then says that the clocks are not known.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

MILLISECONDS_BETWEEN_SAMPLES = 200
# Drivers before R535 know the reasons by the second name only.
REASON_FIELDS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Bits of the reasons, as NVML defines them (group nvmlClocksEventReasons of its documentation).
IDLE = 0x1
THROTTLED = {"power cap": 0x4, "power brake": 0x80, "thermal": 0x20 | 0x40, "hardware slowdown": 0x8}


class Sample(NamedTuple):
    """The state of a GPU at one moment; None where the driver does not report a value."""

    clock: float | None  # of the multiprocessors, MHz
    power: float | None  # watts
    temperature: float | None  # degrees Celsius
    reasons: int | None  # bits: why the clock is not higher


def parse_sample(line: str) -> Sample | None:
    """Parse a line of `nvidia-smi` such as "1980, 412.50, 54, 0x0000000000000004"; return None for any other text."""
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 4:
        return None
    clock, power, temperature = map(_number, cells[:3])
    reasons = re.fullmatch(r"0x[0-9a-fA-F]+", cells[3])
    sample = Sample(clock, power, temperature, int(reasons[0], 16) if reasons else None)
    return None if sample == (None, None, None, None) else sample


def _number(text: str) -> float | None:
    """Return a number, or None for a text such as "[N/A]"."""
    try:
        return float(text)
    except ValueError:
        return None


class Watch:
    """A command that prints samples until it is stopped, or the reason why there is none."""

    def __init__(self, command: Sequence[str] | None, unknown: str = "") -> None:
        self.command = command
        self.unknown = unknown

    @classmethod
    def of_gpu(cls) -> Watch:
        """Find out how `nvidia-smi` reports the current CUDA device, by asking it once."""
        program = shutil.which("nvidia-smi")
        if program is None:
            return cls(None, "nvidia-smi was not found")
        answer = ""
        for field in REASON_FIELDS:
            query = f"--query-gpu=clocks.sm,power.draw,temperature.gpu,{field}"
            command = [program, *_select_device(), query, "--format=csv,noheader,nounits"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            except (OSError, subprocess.SubprocessError) as error:
                return cls(None, f"nvidia-smi failed: {error}")
            if done.returncode == 0 and any(map(parse_sample, done.stdout.splitlines())):
                return cls([*command, "-lms", str(MILLISECONDS_BETWEEN_SAMPLES)])
            answer = answer or " ".join((done.stdout + done.stderr).split())
        return cls(None, f"nvidia-smi answered {answer[:120]!r}")

    @contextmanager
    def samples(self) -> Iterator[list[Sample]]:
        """Yield a list that has all samples once the body has ended.

        The command writes to a file, which is read at the end: a thread that reads would take time from the host while
        something is timed.
        """
        found: list[Sample] = []
        if self.command is None:
            yield found
            return
        with tempfile.TemporaryFile("w+") as output:
            process = None
            try:
                process = subprocess.Popen(self.command, stdout=output, stderr=subprocess.DEVNULL)
            except OSError as error:
                self.unknown = f"{self.command[0]} failed: {error}"
            try:
                yield found
            finally:
                if process is not None:
                    process.kill()
                    process.wait()
                output.seek(0)
                whole_lines = [line for line in output if line.endswith("\n")]
                found += filter(None, map(parse_sample, whole_lines))

    def summarize(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the clocks, the power, the temperature and the reasons for throttling in all samples.

        Samples of an idle GPU do not count: its clock is low because nothing runs.

        Returns:
            A dictionary for JSON. "throttled" has the share of samples by reason. If nothing is known, the dictionary
            has only the key "unknown", with the reason.
        """
        busy = [sample for sample in samples if sample.reasons is None or not sample.reasons & IDLE]
        if not busy:
            return {"unknown": self.unknown or "no samples of a busy GPU"}
        clocks, power, temperature, reasons = (
            [value for value in values if value is not None] for values in zip(*busy, strict=True)
        )
        result: dict[str, Any] = {"samples": len(busy)}
        if clocks:
            result.update(min_clock_mhz=min(clocks), median_clock_mhz=statistics.median(clocks))
        if power:
            result["max_power_watts"] = max(power)
        if temperature:
            result["max_temperature_celsius"] = max(temperature)
        if reasons:
            shares = {
                name: sum(1 for bits in reasons if bits & mask) / len(reasons) for name, mask in THROTTLED.items()
            }
            result["throttled"] = {name: share for name, share in shares.items() if share}
        return result


def show(summary: dict[str, Any]) -> str:
    """Return what `summarize` found as one line of text."""
    if "unknown" in summary:
        return f"GPU clocks: not known ({summary['unknown']})"
    parts = []
    if "min_clock_mhz" in summary:
        parts.append(f"SM clock {summary['median_clock_mhz']:.0f} MHz (lowest {summary['min_clock_mhz']:.0f})")
    if "max_power_watts" in summary:
        parts.append(f"at most {summary['max_power_watts']:.0f} W")
    if "max_temperature_celsius" in summary:
        parts.append(f"at most {summary['max_temperature_celsius']:.0f} C")
    throttled = summary.get("throttled")
    reasons = [f"{name} in {share:.0%} of samples" for name, share in (throttled or {}).items()]
    parts.append(f"throttled: {'not known' if throttled is None else ', '.join(reasons) or 'none'}")
    return f"GPU: {', '.join(parts)}"


def _select_device() -> list[str]:
    """Return the argument of `nvidia-smi` that selects the current CUDA device, whose number may differ from ours."""
    if not torch.cuda.is_available():
        return []
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return [f"--id=GPU-{properties.uuid}"] if hasattr(properties, "uuid") else []
