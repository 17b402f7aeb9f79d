"""Measure what `overlap="backward"` is worth on gloo ranks: the time of a training step with both settings.

Run it in a network namespace with a throttled loopback device, which stands for a slow network:

    unshare -rn sh -c 'ip link set lo mtu 16384 up &&
        tc qdisc add dev lo root tbf rate 200mbit burst 64kb latency 20ms &&
        python -m experiments.overlap --ranks 2 --layout fsdp'

FSDP2 sends weights and gradients in bfloat16, and DDP has bfloat16 weights. The exchange of the optimizer is float32,
as on every CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from muon_fsdp import FSDPMuonOptimizer
from muon_fsdp.comm.dtensors import local
from muon_fsdp.comm.transfers import StageExchange

SETTINGS = ("step", "backward")


class Block(nn.Module):
    """Two square layers with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width, bias=False)
        self.second = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.nn.functional.gelu(self.first(x)))


class Waiting:
    """Adds up the time that this thread waits for transfers of the optimizer."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("finish_gather", "finish_scatter", "finish_forward"):
            setattr(StageExchange, name, self._timed(getattr(StageExchange, name), threading.get_ident()))

    def _timed(self, function: Callable[[StageExchange], Any], thread: int) -> Callable[[StageExchange], Any]:
        def timed(exchange: StageExchange) -> Any:
            start = time.perf_counter()
            result = function(exchange)
            if threading.get_ident() == thread:
                self.seconds += time.perf_counter() - start
            return result

        return timed


def make_model(options: argparse.Namespace) -> nn.Module:
    """Make the model in the layout that the options name."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(options.width) for _ in range(options.blocks)))
    if options.layout == "ddp":
        megabytes = 2 * options.width**2 * 2 / 2**20  # the matrices of one block
        return nn.parallel.DistributedDataParallel(model.bfloat16(), bucket_cap_mb=megabytes)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (options.ranks,))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def train(rank: int, options: argparse.Namespace, store: str, results: Any) -> None:
    """Train one model per setting, in turn, and send the times of all steps."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    # The matrices of one block in a stage: of FSDP2 a shard of them, of DDP all.
    stage = 2 * options.width**2 * 4 // (options.ranks if options.layout == "fsdp" else 1)
    trained = {}
    for setting in SETTINGS:
        model = make_model(options)
        trained[setting] = (
            model,
            FSDPMuonOptimizer(
                model, ns_steps=options.ns_steps, strategy="owner", max_stage_bytes=stage, overlap=setting
            ),
        )
    times: dict[str, list[tuple[float, float, float]]] = {setting: [] for setting in SETTINGS}
    waiting = Waiting()
    for number in range(options.steps + 3):
        for setting in SETTINGS if number % 2 else reversed(SETTINGS):
            model, optimizer = trained[setting]
            x = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(number))
            dist.barrier()
            waiting.seconds = 0.0
            start = time.perf_counter()
            model(x.bfloat16()).float().square().mean().backward()
            before = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            end = time.perf_counter()
            if number >= 3:  # stages start in backward from the third step on
                times[setting].append((end - start, end - before, waiting.seconds))
    weights = [[local(p).clone() for p in trained[setting][0].parameters()] for setting in SETTINGS]
    same = all(map(torch.equal, *weights))
    results.put((rank, times, trained["backward"][1].metrics(), same))
    dist.barrier()
    dist.destroy_process_group()


def _quartiles(seconds: Sequence[float]) -> str:
    """Return the median and the quartiles of some times, in milliseconds."""
    low, median, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
    return f"{median:.0f} ({low:.0f} to {high:.0f}) ms"


def main() -> None:
    """Parse the command line, run the ranks, and print medians over the steps of the slowest rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("width", 512), ("blocks", 8), ("batch", 512), ("steps", 20), ("ns-steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--layout", choices=("fsdp", "ddp"), default="fsdp")
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
        names = ("training step", "step()", "waiting for the exchange in step()")
        report[setting] = {
            name: _quartiles(column) for name, column in zip(names, zip(*slowest, strict=True), strict=True)
        }
    _, _, metrics, _ = found[0]
    report |= {name: metrics[name] for name in ("overlapped_stages", "discarded_stages")}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
