"""Run one of the two ranks of `doctor` and print its error: `python -m muon_fsdp.cli.two_ranks RANK STORE`."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muon_fsdp import MuonOptimizer
from muon_fsdp.training.ending import end_process

PREFIX = "difference: "  # of the line with the result, because gloo in torch 2.10 prints lines of its own


def main(rank: int, store: str, world_size: int = 2) -> float:
    """Compare two sharded steps with the same steps on one device. Every rank calls this function.

    Args:
        rank: the number of this rank.
        store: the path of a new file through which the ranks find each other.
        world_size: the number of ranks.

    Returns:
        The largest difference between the weights.
    """
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=150)
    )
    try:
        mesh = init_device_mesh("cpu", (world_size,))
        generator = torch.Generator().manual_seed(0)
        shapes = ((9, 16), (16, 8), (8, 8))
        whole = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        sharded = [nn.Parameter(distribute_tensor(weight.detach().clone(), mesh, [Shard(0)])) for weight in whole]
        optimizers = [MuonOptimizer(weights, strategy="owner", nesterov=True) for weights in (whole, sharded)]
        for _ in range(2):
            for weight, shard in zip(whole, sharded, strict=True):
                weight.grad = torch.randn(weight.shape, generator=generator)
                shard.grad = distribute_tensor(weight.grad, mesh, [Shard(0)])
            for optimizer in optimizers:
                optimizer.step()
        worst = 0.0
        for weight, shard in zip(whole, sharded, strict=True):
            assert isinstance(shard.data, DTensor)
            worst = max(worst, float((shard.data.full_tensor() - weight.detach()).abs().max()))
        return worst
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{PREFIX}{main(int(sys.argv[1]), sys.argv[2])}")
    end_process(0)
