"""Plan the memory of a step for ways to store state and weights, and draw it as bytes per parameter.

python -m experiments.memory

Prints a table and writes docs/experiments/memory_llama.csv and its plot. Nothing is trained: the figures are those of
`muon-fsdp plan` for one device. `python -m tests.gpu.storage_table` measures them on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.plots import draw_bars
from muon_fsdp import MuonOptimizer
from muon_fsdp.benchmarks.public_models import PUBLIC_MODELS

MODEL, TITLE = "llama-3-8b", "Device memory of a step, Llama-3 8B on one GPU"
PARTS = ("weights", "gradients", "state", "scratch")
HALF: dict[str, Any] = {"dtype": torch.bfloat16}
# The label of each mode; the dtype of weights and gradients, and options of the optimizer.
MODES: dict[str, dict[str, Any]] = {
    "AdamW, float32": {"rule": "adamw"},
    "Muon, float32": {},
    "float32 weights, int8 state": {"state_dtype": "int8"},
    "bf16 weights, float32 state": HALF,
    "bf16 + remainder, int8 state": {**HALF, "state_dtype": "int8", "rounding": "remainder"},
    "bf16 stochastic, int8 state": {**HALF, "state_dtype": "int8", "rounding": "stochastic"},
    "the same, state on the host": {
        **HALF, "state_dtype": "int8", "rounding": "stochastic", "offload_state": True
    },
}  # fmt: skip


def bytes_per_parameter(dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, float]:
    """Return the bytes that each part takes on the device, divided by the number of parameters."""
    with torch.device("meta"):
        model = PUBLIC_MODELS[MODEL]().to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about rounding to the nearest, which is what some modes show
        report = MuonOptimizer(model, **options).plan_report()
    numel = sum(parameter.numel() for parameter in model.parameters())
    sizes = (numel * dtype.itemsize, numel * dtype.itemsize, report.device_state_bytes, report.scratch_bytes)
    return {part: size / numel for part, size in zip(PARTS, sizes, strict=True)}


def read(path: Path) -> dict[str, dict[str, float]]:
    """Read the parts of every mode."""
    with path.open(newline="") as file:
        return {row["mode"]: {part: float(row[part]) for part in PARTS} for row in csv.DictReader(file)}


def write_plot(bars: dict[str, dict[str, float]], path_stem: Path) -> list[Path]:
    """Draw the bars."""
    return draw_bars(path_stem, bars, title=TITLE, x_label="bytes per parameter")


def main(argv: Sequence[str] | None = None) -> None:
    """Plan every mode, print the table, and write it and its plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path("docs/experiments/memory_llama.csv"), help="file to write")
    path: Path = parser.parse_args(argv).csv
    bars = {mode: bytes_per_parameter(**options) for mode, options in MODES.items()}
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("mode", *PARTS))
        writer.writerows((mode, *(f"{size:.4f}" for size in parts.values())) for mode, parts in bars.items())
    for mode, parts in bars.items():
        print(f"{mode:30}", *(f"{part} {size:5.2f}" for part, size in parts.items()), f"all {sum(parts.values()):5.2f}")
    write_plot(read(path), path.with_suffix(""))


if __name__ == "__main__":
    main()
