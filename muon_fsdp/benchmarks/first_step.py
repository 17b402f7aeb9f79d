"""Measure the first step of a new process, with an empty cache of compiled kernels and with a full one.

This module is also the program of that process: it reads what to measure from stdin and prints the times as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from muon_fsdp.benchmarks.contestants import OURS, ours
from muon_fsdp.benchmarks.machine import Setup, free_memory
from muon_fsdp.benchmarks.one_optimizer import WARM_UP, Shapes, random_parameters
from muon_fsdp.text import plain_table
from muon_fsdp.timing import seconds, synchronize

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # variables that name the folders of compiled kernels


def measure(setup: Setup, models: Mapping[str, Shapes]) -> Iterator[dict[str, Any]]:
    """Measure the first step of our default optimizer on every model, in two new processes that share an empty cache.

    Yields:
        One entry per model: its name, and the times of the first process ("cold") and of the second ("warm").
    """
    for number, (model, shapes) in enumerate(models.items(), start=1):
        setup.live.begin("first step", number, len(models), model)
        free_memory(setup.device)
        entry: dict[str, Any] = {"model": model}
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                setup.live.running(f"{state} cache")
                entry[state] = in_new_process(setup.device, shapes, cache)
        yield entry


def in_new_process(device: str, shapes: Shapes, cache: str) -> dict[str, float]:
    """Take the first steps in a new process that keeps its compiled kernels in the folder `cache`.

    Returns:
        The seconds of the first step, and of all steps up to the first that the table of steps would time.
    """
    environment = {**os.environ, **{variable: os.path.join(cache, variable) for variable in CACHES}}
    done = subprocess.run(
        [sys.executable, "-m", "muon_fsdp.benchmarks.first_step"],
        input=json.dumps([device, shapes, torch.get_num_threads()]),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the process that takes the first step exited with {done.returncode}:\n{done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Take the first steps on the device and shapes that stdin names, and print their times."""
    device, shapes, threads = json.load(sys.stdin)
    torch.set_num_threads(threads)
    params, gradients = random_parameters(shapes, device)
    synchronize(device)
    optimizer = ours(device)[OURS](params)
    times = []
    for _ in range(WARM_UP[device]):
        times.append(seconds(optimizer.step, device))
        gradients.renew()
    print(json.dumps({"first_step_seconds": times[0], "warm_up_seconds": sum(times)}))


def show(results: list[dict[str, Any]]) -> str:
    """Return the results as a text table."""
    count = WARM_UP["cuda"]
    header = ["model", "cold cache s", "warm cache s", f"first {count} steps, cold s", f"first {count} steps, warm s"]
    rows = [
        [
            entry["model"],
            *(
                f"{entry[state][key]:.2f}"
                for key in ("first_step_seconds", "warm_up_seconds")
                for state in ("cold", "warm")
            ),
        ]
        for entry in results
    ]
    return plain_table(header, rows)


if __name__ == "__main__":
    main()
