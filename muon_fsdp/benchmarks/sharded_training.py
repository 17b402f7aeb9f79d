"""Measure an optimizer on a transformer that FSDP2 shards over all ranks: its step, training with it, and memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from muon_fsdp.benchmarks.machine import free_memory
from muon_fsdp.benchmarks.one_optimizer import WARM_UP
from muon_fsdp.benchmarks.sharded_contestants import OVERLAPPED, contestants
from muon_fsdp.timing import seconds
from muon_fsdp.training.model import GPT, PRESETS, GPTConfig

BLOCKS = 3  # series of training steps that are timed; the result is their median


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


def measure(workload: Workload, name: str, repeats: int) -> dict[str, Any]:
    """Measure one contestant on this rank. Every rank calls this.

    A step alone is timed on the gradients of one backward. A contestant that overlaps its step with backward has no
    step alone.

    Args:
        workload: the model and its batch.
        name: the contestant.
        repeats: how many steps are timed.

    Returns:
        Milliseconds of each step alone; milliseconds of a training step, and of forward and backward without a step,
        for each block of steps; seconds of the first step; on a GPU the peaks of memory in training, in GB.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = sharded_model(workload.config, mesh)
    shape = (workload.sequences, workload.config.sequence_length + 1)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    tokens = torch.randint(workload.config.vocab_size, shape, device=device, generator=generator)
    optimizers = contestants(device)[name](model, mesh)

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
    first = _together(step, device)
    for _ in range(WARM_UP[device] - 1):
        train()
    found: dict[str, Any] = {"first_step_seconds": first}
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
    policy = MixedPrecisionPolicy()
    if mesh.device_type == "cuda":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    free_memory(mesh.device_type)  # of the whole weights
    return model


def measure_network(num_bytes: int) -> float | None:
    """Measure the GB/s that a rank sends in an all-to-all of this many bytes per rank; None if there is one rank."""
    if dist.get_world_size() == 1:
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
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

    def series() -> None:
        for _ in range(repeats):
            run()

    return [1e3 * _together(series, device) / repeats for _ in range(BLOCKS)]
