"""Measure one optimizer step on the matrices of a model, for our optimizers and others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from muon_fsdp.benchmarks.contestants import OURS, ours
from muon_fsdp.benchmarks.floor import floor_milliseconds, least_flops
from muon_fsdp.benchmarks.machine import Setup, cool_down
from muon_fsdp.benchmarks.one_optimizer import Shapes, measure_one
from muon_fsdp.benchmarks.peers import optimizers
from muon_fsdp.benchmarks.public_models import DECODERS, PUBLIC_MODELS, DecoderModel, GPT2Model, matrix_shapes
from muon_fsdp.text import plain_table

# Shapes of the matrices that are updated. The name before the comma is what `--models` accepts.
MODELS: dict[str, Shapes] = {
    "gpt2-124m": matrix_shapes(PUBLIC_MODELS["gpt2-124m"]),
    "1.3b": matrix_shapes(partial(GPT2Model, hidden=2048, layers=24)),
    "llama-8b, 8 of 32 layers": matrix_shapes(partial(DecoderModel, replace(DECODERS["llama-3-8b"], layers=8))),
}
CPU_MODELS = {"gpt2-124m, 1 layer": MODELS["gpt2-124m"][:4]}
# The fewest bytes that a step moves per float32 element: it reads the gradient, reads and writes the momentum, the
# staging buffer and the weight, and writes the result.
BYTES_PER_ELEMENT = 24


def models_on(device: str, only: Sequence[str] | None = None) -> dict[str, Shapes]:
    """Return the shapes of the models that are measured on a device, by the name that the table shows.

    Args:
        device: "cuda" or "cpu".
        only: short names of the models to return. Default: all models.
    """
    models = MODELS if device == "cuda" else CPU_MODELS
    return {name: shapes for name, shapes in models.items() if not only or name.split(",")[0] in only}


def measure(setup: Setup, models: Mapping[str, Shapes], rules: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Measure every optimizer on every model.

    Args:
        setup: what all tables share.
        models: shapes of matrices, by the name that the table shows.
        rules: further rules of ours to measure, as `contestants.parse_rule` reads them.

    Yields:
        One entry per model: its name, size and floor, the figures of each optimizer, and why optimizers of other
        libraries did not run. TFLOP/s are given where the optimizer does the work that the floor counts.
    """
    for number, (model, shapes) in enumerate(models.items(), start=1):
        setup.live.begin("step", number, len(models), model)
        yield _measure_model(setup, model, shapes, rules)


def _measure_model(setup: Setup, model: str, shapes: Shapes, rules: Sequence[str]) -> dict[str, Any]:
    """Measure every optimizer on one model and return its entry."""
    own, others = ours(setup.device, rules), optimizers(setup.device)
    other_rules = own.keys() - ours(setup.device).keys()
    elements, flops = sum(r * c for r, c in shapes), sum(least_flops(r, c) for r, c in shapes)
    figures: dict[str, dict[str, float]] = {}
    notes: dict[str, str] = {}
    for name, make in {**own, **others}.items():
        setup.live.running(name)
        try:
            one = measure_one(make, shapes, setup.device, setup.repeats)
        except Exception as error:  # another library may not support this machine; the others are still measured
            if name in own:
                raise
            notes[name] = f"{type(error).__name__}: {error}"
            setup.live.note(name, notes[name])
        else:
            if "Adam" not in name and name not in other_rules:
                one["tflops"] = flops / _device_milliseconds(one) / 1e9
            figures[name] = one
        cool_down(setup.device)
    return {
        "model": model,
        "parameters": elements,
        "floor_milliseconds": floor_milliseconds(setup.ceilings, flops, BYTES_PER_ELEMENT * elements),
        "optimizers": figures,
        "notes": notes,
    }


def show(results: list[dict[str, Any]]) -> str:
    """Return the results as one text table per model."""
    parts = []
    for entry in results:
        ours_alone = _device_milliseconds(entry["optimizers"][OURS])
        rows = [
            {"optimizer": name, **_cells(one, ours_alone, entry["floor_milliseconds"])}
            for name, one in entry["optimizers"].items()
        ]
        millions, floor = entry["parameters"] / 1e6, entry["floor_milliseconds"]
        parts.append(f"{entry['model']}: {millions:.0f}M parameters in matrices, floor {floor:.2f} ms")
        parts.append(plain_table(list(rows[0]), [list(row.values()) for row in rows]))
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


def _device_milliseconds(one: Mapping[str, float]) -> float:
    """Return the time of a step in a queue on a GPU, and of the whole call on a CPU."""
    return one.get("device_milliseconds", one["milliseconds"])
