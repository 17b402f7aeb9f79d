"""Cost of a step on this CPU as ranks grow: `python -m benchmarks.ranks`. Ranks share the cores, one thread each."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from muon_fsdp import MuonOptimizer
from muon_fsdp.benchmarks.steps import MODELS
from tests.pool import RankPool


def seconds(strategy: str) -> float:
    """Median of a step on four layers of GPT-2 small, sharded by FSDP2 over all ranks."""
    model = nn.Sequential(*[nn.Linear(cols, rows, bias=False) for rows, cols in MODELS["gpt2-124m"][:16]])
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = MuonOptimizer(model.parameters(), strategy=strategy)
    for p in model.parameters():
        p.grad = distribute_tensor(torch.randn(p.shape), p.device_mesh, p.placements)
    times = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    from benchmarks import ranks

    pool = RankPool()
    print(f"{'ranks':>5} {'owner s':>9} {'replicate s':>12}")
    for world_size in (1, 2, 4):
        figures = [pool.run(world_size, ranks.seconds, strategy, timeout=300)[0] for strategy in ("owner", "replicate")]
        print(f"{world_size:5d} {figures[0]:9.2f} {figures[1]:12.2f}", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
