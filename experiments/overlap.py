"""Measure what `overlap="backward"` is worth on gloo ranks: the time of a training step with both settings.

Run it in a network namespace with a throttled loopback device, which stands for a slow network:

    unshare -rn sh -c 'ip link set lo mtu 16384 up && tc qdisc add dev lo root tbf rate 1gbit burst 64kb latency 20ms &&
        python -m experiments.overlap --ranks 2'
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from muon_fsdp import FSDPMuonOptimizer

SETTINGS = ("step", "backward")


class Block(nn.Module):
    """Two square layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(x)))


def train(rank: int, options: argparse.Namespace, store: str, results: Any) -> None:
    """Train one model per setting, in turn, and send the times of all steps."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    mesh = init_device_mesh("cpu", (options.ranks,))
    trained = {}
    for setting in SETTINGS:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(options.width) for _ in range(options.blocks)))
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        stage = 2 * options.width**2 * 4 // options.ranks  # bytes: the matrices of one block, on one rank
        trained[setting] = (
            model,
            FSDPMuonOptimizer(
                model, ns_steps=options.ns_steps, strategy="owner", max_stage_bytes=stage, overlap=setting
            ),
        )
    times: dict[str, list[tuple[float, float]]] = {setting: [] for setting in SETTINGS}
    for number in range(options.steps + 3):
        for setting in SETTINGS if number % 2 else reversed(SETTINGS):
            model, optimizer = trained[setting]
            x = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(number))
            dist.barrier()
            start = time.perf_counter()
            model(x).square().mean().backward()
            before = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            end = time.perf_counter()
            if number >= 3:  # stages start in backward from the third step on
                times[setting].append((end - start, end - before))
    weights = [[p.to_local().clone() for p in trained[setting][0].parameters()] for setting in SETTINGS]
    same = all(map(torch.equal, *weights))
    results.put((rank, times, trained["backward"][1].metrics(), same))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Parse the command line, run the ranks, and print medians over the steps of the slowest rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("width", 512), ("blocks", 8), ("batch", 512), ("steps", 20), ("ns-steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=train, args=(rank, options, os.path.join(folder, "store"), results))
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        found = [results.get() for _ in ranks]
        for process in ranks:
            process.join()
    report: dict[str, Any] = vars(options) | {"same bits": all(same for *_, same in found)}
    for setting in SETTINGS:
        of_ranks = [times[setting] for _, times, _, _ in found]
        slowest = [tuple(max(column) for column in zip(*step, strict=True)) for step in zip(*of_ranks, strict=True)]
        report[setting] = {
            "training step, ms": round(1e3 * statistics.median(whole for whole, _ in slowest), 1),
            "step(), ms": round(1e3 * statistics.median(own for _, own in slowest), 1),
        }
    _, _, metrics, _ = found[0]
    report |= {name: metrics[name] for name in ("overlapped_stages", "discarded_stages")}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
