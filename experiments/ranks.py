"""Measure how a step on this CPU slows down as ranks are added: `python -m experiments.ranks`.

The ranks share the cores of the machine and compute with one thread each.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from muon_fsdp import MuonOptimizer
from muon_fsdp.benchmarks.ranks import on_this_machine
from muon_fsdp.benchmarks.steps import MODELS, Shapes
from muon_fsdp.text import plain_table
from muon_fsdp.timing import seconds

Strategy = Literal["owner", "replicate"]

STRATEGIES: tuple[Strategy, ...] = ("owner", "replicate")
FOUR_LAYERS = MODELS["gpt2-124m"][:16]


def seconds_per_step(strategy: Strategy, shapes: Shapes) -> float:
    """Return the median seconds of a step on matrices that FSDP2 shards over all ranks. Every rank calls it."""
    model = nn.Sequential(*[nn.Linear(cols, rows, bias=False) for rows, cols in shapes])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    optimizer = MuonOptimizer(model.parameters(), strategy=strategy)
    for p in model.parameters():
        assert isinstance(p, DTensor)
        p.grad = distribute_tensor(torch.randn(p.shape), p.device_mesh, p.placements)

    def step_of_all_ranks() -> None:
        optimizer.step()
        dist.barrier()

    times = []
    for _ in range(4):
        dist.barrier()
        times.append(seconds(step_of_all_ranks, "cpu"))
    return statistics.median(times[1:])  # the first step makes the plan and the process groups


def main(world_sizes: Sequence[int] = (1, 2, 4), shapes: Shapes = FOUR_LAYERS) -> None:
    """Print the seconds of a step on four layers of GPT-2 small, by number of ranks and strategy."""
    rows = []
    for world_size in world_sizes:
        by_rank = on_this_machine(
            world_size,
            lambda ranks: [ranks.run(seconds_per_step, strategy, shapes)[0] for strategy in STRATEGIES],
            backend="gloo",
        )
        rows.append([str(world_size), *(f"{time:.2f}" for time in by_rank[0])])
    print(plain_table(["ranks", *(f"{strategy} s" for strategy in STRATEGIES)], rows, left=0))


if __name__ == "__main__":
    main()
