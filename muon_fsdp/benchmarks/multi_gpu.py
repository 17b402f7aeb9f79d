"""Compare optimizers on a transformer that FSDP2 shards over all ranks: `torchrun ... bench --multi-gpu`."""

from __future__ import annotations

import importlib.metadata
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from muon_fsdp.benchmarks.contestants import OURS, OVERLAPPED, sharded_optimizers
from muon_fsdp.benchmarks.live import LiveLine
from muon_fsdp.benchmarks.machine import best_device, describe, free_memory, topology, without_home
from muon_fsdp.benchmarks.ranks import Ranks, RanksError
from muon_fsdp.benchmarks.run import Save, Show
from muon_fsdp.benchmarks.steps import WARM_UP
from muon_fsdp.text import plain_table
from muon_fsdp.timing import repeated, seconds
from muon_fsdp.training.model import GPT, PRESETS, GPTConfig
from muon_fsdp.training.parallel import shard

BLOCKS = 3  # series of training steps that are timed; the result is their median
NETWORK_BYTES = {"cuda": 2**28, "cpu": 2**20}  # that a rank exchanges to measure the network
SHARED_GPU = "Ranks share a GPU and exchange data over sockets: the figures show that it runs, not how fast it is."
TIME_LIMIT = 600.0  # seconds for one optimizer on one model, the compilation of its kernels included
TEMPLATE = "Figures from several GPUs"  # the name in .github/ISSUE_TEMPLATE/multi_gpu.yml


@dataclass(frozen=True)
class Workload:
    """A model, and the sequences that every rank has in a batch."""

    config: GPTConfig
    sequences: int


# The name before the comma is what `--models` accepts.
WORKLOADS = {
    "gpt2-124m": Workload(PRESETS["gpt2"], 8),
    "1.3b": Workload(GPTConfig(24, 16, 2048, 1024, vocab_size=50304, tie_embeddings=True), 4),
    "llama-8b, width of Llama-3 8B, 8 layers": Workload(GPTConfig(8, 32, 4096, 1024, vocab_size=128256), 2),
}
CPU_WORKLOADS = {"tiny": Workload(GPTConfig(1, 2, 16, 16, vocab_size=48), 2)}


def workloads_on(device: str) -> dict[str, Workload]:
    """Return the models that are measured on a device, by the name that the table shows."""
    return WORKLOADS if device == "cuda" else CPU_WORKLOADS


# --------------------------------------------------------------------------------------------------------- one rank


def measure(workload: Workload, name: str, repeats: int) -> dict[str, Any]:
    """Measure the contestant of this name on this rank; `repeats` steps are timed. Every rank calls this.

    A step alone is timed on the gradients of one backward. A contestant that overlaps its step with backward has no
    step alone.

    Returns:
        Milliseconds of each step alone; milliseconds of a training step, and of forward and backward without a step,
        for each block of steps; seconds of the first step; on a GPU the peaks of memory in training, in GB.
    """
    device = best_device().type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = sharded_model(workload.config, mesh)
    shape = (workload.sequences, workload.config.sequence_length + 1)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    tokens = torch.randint(workload.config.vocab_size, shape, device=device, generator=generator)
    optimizers = sharded_optimizers(device)[name](model, mesh)

    def backward() -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def train() -> None:
        backward()
        step()

    backward()
    found: dict[str, Any] = {"first_step_seconds": _together(step, device)}
    for _ in range(WARM_UP[device] - 1):
        train()
    if name != OVERLAPPED:
        backward()
        found["step_milliseconds"] = [1e3 * _together(step, device) for _ in range(repeats)]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found["training_milliseconds"] = _blocks(train, device, repeats)
    if device == "cuda":
        found["peak_allocated_gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
        found["peak_reserved_gigabytes"] = torch.cuda.max_memory_reserved() / 1e9
    found["backward_milliseconds"] = _blocks(backward, device, repeats)
    return found


def sharded_model(config: GPTConfig, mesh: DeviceMesh) -> GPT:
    """Build a model on the device of this rank and shard it with FSDP2, in bfloat16 on a GPU."""
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        model = GPT(config)
    shard(model, mesh, torch.bfloat16 if mesh.device_type == "cuda" else torch.float32)
    free_memory(mesh.device_type)  # of the whole weights
    return model


def measure_network(num_bytes: int) -> float | None:
    """Measure the GB/s that a rank sends in an all-to-all of this many bytes per rank; None if there is one rank."""
    if dist.get_world_size() == 1:
        return None
    device = best_device().type
    each = num_bytes // dist.get_world_size()
    sent = torch.zeros(each * dist.get_world_size(), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def exchange() -> None:
        dist.all_to_all_single(received, sent)

    times = [_together(exchange, device) for _ in range(7)]
    return each * (dist.get_world_size() - 1) / statistics.median(times[2:]) / 1e9


def _together(run: Callable[[], object], device: str) -> float:
    """Return the seconds of a call on this rank that all ranks begin together."""
    dist.barrier()
    return seconds(run, device)


def _blocks(run: Callable[[], object], device: str, repeats: int) -> list[float]:
    """Return the milliseconds of a call in each of several series of calls back to back."""
    return [1e3 * _together(repeated(run, repeats), device) / repeats for _ in range(BLOCKS)]


# ------------------------------------------------------------------------------------------------------- all ranks


def run(ranks: Ranks, device: str, models: Sequence[str], repeats: int, save: Save, show: Show) -> dict[str, Any]:
    """Measure the network and every contestant on every model. Every rank calls this; only the first saves and shows.

    Args:
        ranks: all ranks of the job.
        device: "cuda" or "cpu".
        models: short names of the models to measure; none stands for all.
        repeats: how many steps are timed for each figure.
        save: called with all figures so far whenever there is a new one.
        show: called with a text whenever a part has been measured.

    Returns:
        The figures, ready for JSON; on the first rank with a description of its machine.
    """
    place = ranks.place
    figures: dict[str, Any] = {"world_size": place.size, "repeats": repeats}
    if place.rank:
        live, save, show = LiveLine(io.StringIO()), lambda figures: None, lambda text: None
    else:
        live = LiveLine()
        figures |= {"date": date.today().isoformat(), **without_home(describe())}
        figures |= {"ranks_per_machine": place.local_size, "shares_gpu": place.shares_gpu, "topology": topology()}
        show(f"{figures['date']}, {place.size} ranks, {figures['devices'][-1]}, torch {torch.__version__}")
        show(f"{SHARED_GPU}\n" if place.shares_gpu else "")
    names: list[str] = ranks.from_first(list(sharded_optimizers(device)))
    live.show("network ...")
    try:
        speeds = ranks.run(measure_network, NETWORK_BYTES[device])
    except RanksError as failure:
        figures["network_note"] = f"fails: {failure}"
        show(f"The network could not be measured: {failure}\n")
    else:
        if None not in speeds:
            figures["network_gigabytes_per_second"] = min(speeds)
            show(f"network: the slowest rank sends {min(speeds):.3g} GB/s in an all-to-all\n")
    save(figures)
    entries = figures["models"] = []
    workloads = {name: it for name, it in workloads_on(device).items() if not models or name.split(",")[0] in models}
    for model, workload in live.each("multi-gpu", workloads.items()):
        entry: dict[str, Any] = {"model": model, "optimizers": {}, "notes": {}}
        entries.append(entry)
        for name in names:
            live.running(name)
            try:
                by_rank = ranks.run(measure, workload, name, repeats)
            except RanksError as failure:  # the others are still measured
                entry["notes"][name] = f"fails: {failure}"
            else:
                entry["optimizers"][name] = combine(by_rank, workload)
            save(figures)
        live.clear()
        show(f"{table(entry)}\n")
    return figures


def ours_failed(figures: Mapping[str, Any]) -> bool:
    """Return whether one of our own optimizers failed on some model."""
    return any(name.startswith(OURS) for entry in figures["models"] for name in entry["notes"])


def combine(by_rank: Sequence[Mapping[str, Any]], workload: Workload) -> dict[str, Any]:
    """Combine the results of `measure`. The slowest rank decides about times, and the fullest one about memory."""
    training = _slowest(by_rank, "training_milliseconds")
    without = _slowest(by_rank, "backward_milliseconds")
    tokens = len(by_rank) * workload.sequences * workload.config.sequence_length
    found: dict[str, Any] = {
        "training_milliseconds": training,
        "tokens_per_second": 1e3 * tokens / training,
        "optimizer_share": max(0.0, 1 - without / training),
        "first_step_seconds": max(one["first_step_seconds"] for one in by_rank),
    }
    if "step_milliseconds" in by_rank[0]:
        found["step_milliseconds"] = _slowest(by_rank, "step_milliseconds")
        found["step_milliseconds_by_rank"] = [statistics.median(one["step_milliseconds"]) for one in by_rank]
    for name in ("peak_allocated_gigabytes", "peak_reserved_gigabytes"):
        if name in by_rank[0]:
            found[name] = max(one[name] for one in by_rank)
    return found


def _slowest(by_rank: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the median of a time over repetitions, each of which takes as long as its slowest rank."""
    slowest: list[float] = [max(times) for times in zip(*(one[name] for one in by_rank), strict=True)]
    return statistics.median(slowest)


def table(entry: Mapping[str, Any]) -> str:
    """Return the figures of one model as a text table, with a line for each contestant that failed."""
    header = ["optimizer", "step ms", "ranks, ms", "training ms", "tokens/s", "optimizer %", "peak GB", "first s"]
    rows = []
    for name, one in entry["optimizers"].items():
        by_rank = one.get("step_milliseconds_by_rank")
        peak = one.get("peak_allocated_gigabytes")
        rows.append(
            [
                name,
                f"{one['step_milliseconds']:.2f}" if by_rank else "-",
                f"{min(by_rank):.2f} to {max(by_rank):.2f}" if by_rank else "-",
                f"{one['training_milliseconds']:.1f}",
                f"{one['tokens_per_second']:,.0f}",
                f"{100 * one['optimizer_share']:.1f}",
                "-" if peak is None else f"{peak:.2f}",
                f"{one['first_step_seconds']:.2f}",
            ]
        )
    notes = [f"{name}: {note}" for name, note in entry["notes"].items()]
    return "\n".join([entry["model"], plain_table(header, rows), *notes])


def closing_line(json: str | None) -> str:
    """Return where to send the figures: the issues of this project, by the address that the installed package gives."""
    try:
        urls = importlib.metadata.metadata("muon_fsdp").get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        urls = []
    found = [url.partition(", ")[2] for url in urls if url.startswith("Issues, ")]
    where = found[0] if found else ".github/ISSUE_TEMPLATE/multi_gpu.yml in the repository"
    what = "Add --json FILE to get a file that you can send" if json is None else f"To send {json}"
    return f'{what}: open an issue with the form "{TEMPLATE}", {where}.'
