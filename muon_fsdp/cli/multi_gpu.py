"""`muon-fsdp bench --multi-gpu`: compare optimizers on the ranks that torchrun started, for a file to send back."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from typing import Any

import torch
import typer

from muon_fsdp.benchmarks.multi_gpu import SHARED_GPU, MultiGpu
from muon_fsdp.benchmarks.ranks import Place, Ranks
from muon_fsdp.cli import facts
from muon_fsdp.cli.output import fail, print_json

TIME_LIMIT = 600.0  # seconds for one optimizer on one model, the compilation of its kernels included
TEMPLATE = "Figures from several GPUs"  # the name in .github/ISSUE_TEMPLATE/multi_gpu.yml
# Variables that change how NCCL sends, and have no addresses in them.
NCCL_VARIABLES = (
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_SOCKET_NTHREADS",
)


def run(models: Sequence[str], repeats: int, json: str | None, save: Callable[[Mapping[str, Any]], None]) -> None:
    """Compare optimizers on all ranks; the first rank prints the tables and saves the figures.

    Args:
        models: short names of the models to measure; none stands for all.
        repeats: how many steps are timed for each figure.
        json: the file of the figures; "-" prints them and nothing else.
        save: writes figures to that file.
    """
    place = Place.of_torchrun()
    if place is None:
        count = torch.cuda.device_count() or 2
        fail(
            "--multi-gpu measures the ranks of a job, and no launcher has started one. Run: torchrun --standalone "
            f"--nproc-per-node {count} -m muon_fsdp.cli bench --multi-gpu --json multi_gpu.json"
        )
    is_first = place.rank == 0
    show = print if is_first and json != "-" else _ignore
    machine = _machine(place) if is_first else {}
    bench = MultiGpu(
        Ranks(place, TIME_LIMIT),
        "cuda" if torch.cuda.is_available() else "cpu",
        models,
        repeats,
        save if is_first else _ignore,
        lambda text: show(f"{text}\n"),
    )
    bench.figures.update(machine)
    if is_first:
        show(f"{machine['date']}, {place.size} ranks, {machine['devices'][-1]}, torch {torch.__version__}")
        show(f"{SHARED_GPU}\n" if place.shares_gpu else "")
    bench.run()
    if is_first and json == "-":
        print_json(bench.figures)
    show(_closing_line(json))
    if bench.ours_failed:
        raise typer.Exit(1)


def _ignore(_: object) -> None:
    """Do nothing: ranks other than the first print and save nothing."""


def _machine(place: Place) -> dict[str, Any]:
    """Return the facts of `muon-fsdp doctor` about this machine, and how its GPUs are connected."""
    environment = {name: os.environ[name] for name in NCCL_VARIABLES if name in os.environ}
    found: dict[str, Any] = facts.without_home(
        {
            "date": date.today().isoformat(),
            "versions": facts.versions(),
            "devices": facts.devices(),
            "backends": facts.backends(),
            "environment": facts.environment() | environment,
            "ranks_per_machine": place.local_size,
            "shares_gpu": place.shares_gpu,
            "topology": _topology(),
        }
    )
    return found


def _topology() -> list[str]:
    """Return the lines of `nvidia-smi topo -m`, which show NVLink and PCIe connections; none without the command."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        done = subprocess.run([command, "topo", "-m"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


def _closing_line(json: str | None) -> str:
    """Return where to send the figures: the form for them among the issues of this project."""
    what = "Add --json FILE to get a file that you can send" if json is None else f"To send {json}"
    return f'{what}: open an issue with the form "{TEMPLATE}", {_issues()}.'


def _issues() -> str:
    """Return the address of the issues as the installed package gives it, or where the form lies in the repository."""
    try:
        urls = importlib.metadata.metadata("muon_fsdp").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        urls = []
    found = [url.partition(", ")[2] for url in urls if url.startswith("Issues, ")]
    return found[0] if found else ".github/ISSUE_TEMPLATE/multi_gpu.yml in the repository"
