"""Measure steps: on the matrices of a model, of the element-wise pair, and the first steps of a new process."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from muon_fsdp.benchmarks.contestants import FAST, FIXED_GRADIENTS, OURS, PAIR, MakeOptimizer, optimizers, ours
from muon_fsdp.benchmarks.machine import Setup, cool_down, free_memory
from muon_fsdp.benchmarks.orthogonalization import least_flops
from muon_fsdp.benchmarks.public_models import DECODERS, PUBLIC_MODELS, DecoderModel, GPT2Model, matrix_shapes
from muon_fsdp.text import plain_table
from muon_fsdp.timing import device_milliseconds, host_seconds, seconds, synchronize

Shapes = Sequence[tuple[int, ...]]

# Shapes of the matrices that are updated. The name before the comma is what `--models` accepts.
MODELS: dict[str, Shapes] = {
    "gpt2-124m": matrix_shapes(PUBLIC_MODELS["gpt2-124m"]),
    "1.3b": matrix_shapes(partial(GPT2Model, hidden=2048, layers=24)),
    "llama-8b, 8 of 32 layers": matrix_shapes(partial(DecoderModel, replace(DECODERS["llama-3-8b"], layers=8))),
}
CPU_MODELS = {"gpt2-124m, 1 layer": MODELS["gpt2-124m"][:4]}
PAIR_SIZES = {
    "1.2e9 in 96 tensors": 96 * [(12_500_000 // 5000, 5000)],
    "85M in 48 tensors": 48 * [(1_770_000 // 1000, 1000)],
}
CPU_PAIR_SIZES = {"1M in 8 tensors": 8 * [(250, 500)]}
# The fewest bytes that a step moves per float32 element. Muon reads the gradient, reads and writes the momentum, the
# staging buffer and the weight, and writes the result. Adam reads the gradient, and reads and writes the weight and two
# moments.
MUON_BYTES, ADAM_BYTES = 24, 28
# Steps before the first that is timed. On a GPU they compile kernels and capture a CUDA graph, also where the optimizer
# captures itself after a few steps. The first two steps of a spectral sphere compute the initial singular vectors.
WARM_UP = {"cuda": 6, "cpu": 2}
GRADIENT_RANK = 32
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")  # variables that name the folders of compiled kernels


# --------------------------------------------------------------------------------------------------- one optimizer


class Gradients:
    """Random gradients with a fixed part of low rank.

    The top singular vectors of the weights then change from step to step as in training, which some rules depend on.
    """

    def __init__(self, params: Sequence[nn.Parameter], generator: torch.Generator) -> None:
        self._generator = generator
        self._parts = [
            (p, self._normal(len(p), GRADIENT_RANK), self._normal(GRADIENT_RANK, p[0].numel())) for p in params
        ]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._generator.device, generator=self._generator)

    def renew(self) -> None:
        """Give every parameter a new gradient tensor, as `zero_grad` followed by another backward would.

        The order changes with every call, so that the caching allocator gives most gradients another address without
        reserving more memory.
        """
        for p, _, _ in self._parts:
            p.grad = None
        self._parts.reverse()
        for p, left, right in self._parts:
            p.grad = self._random(p, left, right)

    def renew_in_place(self) -> None:
        """Write new gradients in place, as `zero_grad(set_to_none=False)` followed by another backward would."""
        for p, left, right in self._parts:
            assert p.grad is not None
            p.grad.copy_(self._random(p, left, right))

    def _random(self, p: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self._normal(*p.shape).addmm_(left, right, alpha=0.3)


class PeakMemory:
    """The largest CUDA memory of watched calls beyond that at the start: allocated by tensors, and reserved for them.

    Memory that a captured graph keeps for itself is reserved all the time, and allocated only during the capture.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = 0
        self._before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def watch(self, run: Callable[[], float]) -> float:
        """Make a call and update the peaks. Allocations between watched calls, such as of gradients, do not count.

        Returns:
            The result of the call.
        """
        torch.cuda.reset_peak_memory_stats()
        result = run()
        self.allocated = max(self.allocated, torch.cuda.max_memory_allocated() - self._before[0])
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved() - self._before[1])
        return result


def random_parameters(shapes: Shapes, device: str) -> tuple[list[nn.Parameter], Gradients]:
    """Make parameters of these shapes with gradients, and what renews the gradients."""
    generator = torch.Generator(device).manual_seed(0)
    params = [nn.Parameter(torch.randn(s, device=device, generator=generator).mul_(0.02)) for s in shapes]
    gradients = Gradients(params, generator)
    gradients.renew()
    return params, gradients


def measure_one(
    make: MakeOptimizer, shapes: Shapes, device: str, repeats: int, fixed_gradients: bool = False
) -> dict[str, float]:
    """Measure the steps of one optimizer on parameters of these shapes.

    With `fixed_gradients` new gradients are written where the old ones were.

    Returns:
        The median time of a step until the device has finished and of `step()` on the host, and the time of the first
        step; on a GPU also the time of a step in a queue of them, and the memory beyond weights and gradients.
    """
    free_memory(device)  # else the optimizer would use memory that the last one reserved
    params, gradients = random_parameters(shapes, device)
    renew = gradients.renew_in_place if fixed_gradients else gradients.renew
    synchronize(device)
    memory = PeakMemory() if device == "cuda" else None

    def timed(clock: Callable[[], float]) -> float:
        return memory.watch(clock) if memory else clock()

    optimizer = make(params)
    first = timed(lambda: seconds(optimizer.step, device))
    for _ in range(WARM_UP[device] - 1):
        renew()
        timed(lambda: seconds(optimizer.step, device))
    total, host = [], []
    for _ in range(repeats):
        renew()
        total.append(timed(lambda: seconds(optimizer.step, device)))
    for _ in range(repeats):  # without waiting: in training too, the device is still busy when the host calls step()
        renew()
        host.append(timed(lambda: host_seconds(optimizer.step)))
    result = {
        "milliseconds": 1e3 * statistics.median(total),
        "host_milliseconds": 1e3 * statistics.median(host),
        "first_step_seconds": first,
    }
    if memory is not None:
        result["device_milliseconds"] = device_milliseconds(optimizer.step, repeats, calls=4)
        result["extra_allocated_gigabytes"] = memory.allocated / 1e9
        result["extra_reserved_gigabytes"] = memory.reserved / 1e9
    return result


def _measure_each(
    setup: Setup,
    contestants: Mapping[str, MakeOptimizer],
    shapes: Shapes,
    entry: dict[str, Any],
    may_fail: Sequence[str] = (),
) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure every contestant on parameters of these shapes; those that may fail do not stop the others.

    The figures of each optimizer are added to `entry["optimizers"]`, or why it did not run to `entry["notes"]`.

    Yields:
        Each optimizer that has run: its name and figures.
    """
    entry |= {"optimizers": {}, "notes": {}}
    for name, make in contestants.items():
        setup.live.running(name)
        try:
            one = measure_one(make, shapes, setup.device, setup.repeats, name in FIXED_GRADIENTS)
        except Exception as error:
            if name not in may_fail:
                raise
            entry["notes"][name] = f"{type(error).__name__}: {error}"
            setup.live.note(name, entry["notes"][name])
        else:
            entry["optimizers"][name] = one
            yield name, one
        cool_down(setup.device)


def _device_milliseconds(one: Mapping[str, float]) -> float:
    """Return the time of a step in a queue on a GPU, and of the whole call on a CPU."""
    return one.get("device_milliseconds", one["milliseconds"])


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as a text table; each row has its cells by the names of the columns."""
    return plain_table(list(rows[0]), [list(row.values()) for row in rows])


# ----------------------------------------------------------------------------------------------------- whole steps


def models_on(device: str, only: Sequence[str] = ()) -> dict[str, Shapes]:
    """Return the shapes of the models that are measured on a device, or of those with these short names, by name."""
    models = MODELS if device == "cuda" else CPU_MODELS
    return {name: shapes for name, shapes in models.items() if not only or name.split(",")[0] in only}


def measure(setup: Setup, models: Mapping[str, Shapes], rules: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Measure every optimizer on every model.

    Args:
        setup: what all tables share.
        models: shapes of matrices, by the name that the table shows.
        rules: further rules of ours to measure, as `contestants.parse_rule` reads them.

    Yields:
        One entry per model, again after each optimizer: its name, size and floor, the figures of each optimizer, and
        why optimizers of other libraries did not run. TFLOP/s are given where the optimizer does the work that the
        floor counts.
    """
    own, others = ours(setup.device, rules), optimizers(setup.device)
    other_work = {FAST} | own.keys() - ours(setup.device).keys()
    for model, shapes in setup.live.each("step", models.items()):
        elements, flops = sum(r * c for r, c in shapes), sum(least_flops(r, c) for r, c in shapes)
        floor = setup.ceilings.floor_milliseconds(flops, MUON_BYTES * elements)
        entry: dict[str, Any] = {"model": model, "parameters": elements, "floor_milliseconds": floor}
        for name, one in _measure_each(setup, {**own, **others}, shapes, entry, may_fail=list(others)):
            if "Adam" not in name and name not in other_work:
                one["tflops"] = flops / _device_milliseconds(one) / 1e9
            yield entry


def show(results: list[dict[str, Any]]) -> str:
    """Return the results as one text table per model."""
    parts = []
    for entry in results:
        millions, floor = entry["parameters"] / 1e6, entry["floor_milliseconds"]
        ours_alone = _device_milliseconds(entry["optimizers"][OURS])
        rows = [{"optimizer": name, **_cells(one, ours_alone, floor)} for name, one in entry["optimizers"].items()]
        parts.append(f"{entry['model']}: {millions:.0f}M parameters in matrices, floor {floor:.2f} ms")
        parts.append(_table(rows))
        parts += [f"{name}: {note}" for name, note in entry["notes"].items()]
        parts.append("")
    return "\n".join(parts)


def _cells(one: Mapping[str, float], ours_alone: float, floor: float) -> dict[str, str]:
    """Return the cells of one optimizer by the names of their columns. A CPU has no queue and no counters of memory."""
    device = _device_milliseconds(one)
    cells = {"step ms": f"{one['milliseconds']:.2f}"}
    if "device_milliseconds" in one:
        cells["device ms"] = f"{device:.2f}"
    cells["host ms"] = f"{one['host_milliseconds']:.2f}"
    cells[f"/ {OURS}"] = f"{device / ours_alone:.2f}"
    cells["first s"] = f"{one['first_step_seconds']:.2f}"
    if "extra_allocated_gigabytes" in one:
        cells["extra GB"] = f"{one['extra_allocated_gigabytes']:.2f}"
        cells["reserved GB"] = f"{one['extra_reserved_gigabytes']:.2f}"
    cells["TFLOP/s"] = f"{one['tflops']:.3g}" if "tflops" in one else "-"
    cells["% of floor"] = f"{100 * floor / device:.0f}" if "tflops" in one else "-"
    return cells


# -------------------------------------------------------------------------------------------- the element-wise pair


def measure_pair(setup: Setup) -> Iterator[dict[str, Any]]:
    """Measure TritonMuon and TritonMuonW beside torch.optim.Adam, on every set of tensors.

    Yields:
        One entry per set of tensors, again after each optimizer: its name and size, and the figures of each optimizer,
        with its speed relative to a copy of the bytes that a step has to move.
    """
    sizes = PAIR_SIZES if setup.device == "cuda" else CPU_PAIR_SIZES
    for name, shapes in setup.live.each("pair", sizes.items()):
        parameters = sum(rows * cols for rows, cols in shapes)
        entry: dict[str, Any] = {"size": name, "parameters": parameters}
        for _, one in _measure_each(setup, PAIR, shapes, entry):
            bytes_per_second = ADAM_BYTES * parameters / (1e-3 * _device_milliseconds(one))
            one["of_copy"] = bytes_per_second / setup.ceilings.bytes
            yield entry


def show_pair(results: list[dict[str, Any]]) -> str:
    """Return the results as one text table per set of tensors."""
    parts = []
    for entry in results:
        times = {name: _device_milliseconds(one) for name, one in entry["optimizers"].items()}
        rows = [
            {
                "optimizer": name,
                "device ms": f"{times[name]:.3f}",
                "host ms": f"{one['host_milliseconds']:.2f}",
                "% of a copy": f"{100 * one['of_copy']:.0f}",
                "Adam / this": f"{times['torch.optim.Adam'] / times[name]:.2f}",
            }
            for name, one in entry["optimizers"].items()
        ]
        parts.append(f"{entry['size']}\n{_table(rows)}\n")
    return "\n".join(parts)


# -------------------------------------------------------------------------------------- first steps of new processes


def measure_first(setup: Setup, models: Mapping[str, Shapes]) -> Iterator[dict[str, Any]]:
    """Measure the first step of our default optimizer on every model, in two new processes that share an empty cache.

    Yields:
        One entry per model: its name, and the times of the first process ("cold") and of the second ("warm").
    """
    for model, shapes in setup.live.each("first step", models.items()):
        free_memory(setup.device)
        entry: dict[str, Any] = {"model": model}
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                setup.live.running(f"{state} cache")
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as new_process:
                    work = new_process.submit(first_steps, setup.device, shapes, cache, torch.get_num_threads())
                    entry[state] = work.result()
        yield entry


def first_steps(device: str, shapes: Shapes, cache: str, threads: int) -> dict[str, float]:
    """Take the first steps of this process, which keeps its compiled kernels in the folder `cache`.

    Returns:
        The seconds of the first step, and of all steps up to the first that the table of steps would time.
    """
    os.environ.update({variable: os.path.join(cache, variable) for variable in CACHES})
    torch.set_num_threads(threads)
    params, gradients = random_parameters(shapes, device)
    synchronize(device)
    optimizer = ours(device)[OURS](params)
    times = []
    for _ in range(WARM_UP[device]):
        times.append(seconds(optimizer.step, device))
        gradients.renew()
    return {"first_step_seconds": times[0], "warm_up_seconds": sum(times)}


def show_first(results: list[dict[str, Any]]) -> str:
    """Return the results as a text table."""
    count = WARM_UP["cuda"]
    return _table(
        [
            {
                "model": entry["model"],
                "cold cache s": f"{entry['cold']['first_step_seconds']:.2f}",
                "warm cache s": f"{entry['warm']['first_step_seconds']:.2f}",
                f"first {count} steps, cold s": f"{entry['cold']['warm_up_seconds']:.2f}",
                f"first {count} steps, warm s": f"{entry['warm']['warm_up_seconds']:.2f}",
            }
            for entry in results
        ]
    )
