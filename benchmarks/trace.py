"""Draws where the time of a step goes on two NCCL ranks that share one GPU: `python -m benchmarks.trace OUT.png`.

The picture shows order and overlap, not speed: both ranks compute on the same GPU.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import matplotlib
import torch

from muon_fsdp import FSDPMuonOptimizer
from tests.gpu import nccl_cases
from tests.pool import RankPool

ANNOTATIONS = ("muon_fsdp.", "Optimizer.", "nccl:")  # ranges that the profiler repeats on the GPU's lanes
PHASES = ("prepare", "gather", "orthogonalize", "scatter", "apply")


def record() -> list[tuple[str, str, float, float]]:
    """(lane, name, start, duration) in milliseconds of one step on this rank."""
    model = nccl_cases.sharded_net(2048, 6)
    optimizer = FSDPMuonOptimizer(model, strategy="owner", max_stage_bytes=2**20)
    for step in range(3):
        optimizer.zero_grad()
        nccl_cases.backward(model, step)
        optimizer.step()
    optimizer.zero_grad()
    nccl_cases.backward(model, 3)
    torch.cuda.synchronize()
    with torch.profiler.profile() as profiler:
        optimizer.step()
        torch.cuda.synchronize()
    events: list[tuple[str, str, float, float]] = []
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        name, start, duration = event.name(), event.start_ns() / 1e6, event.duration_ns() / 1e6
        if event.device_type() == torch.autograd.DeviceType.CPU and name.startswith("muon_fsdp."):
            events.append(("host", name.removeprefix("muon_fsdp."), start, duration))
        elif event.device_type() == torch.autograd.DeviceType.CUDA and not name.startswith(ANNOTATIONS):
            lane = "GPU, NCCL stream" if "nccl" in name.lower() else "GPU, computing stream"
            events.append((lane, name, start, duration))
    return events


def draw(events: list[tuple[str, str, float, float]], path: str) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    begin = min(start for _, _, start, _ in events)
    lanes: dict[str, list[Any]] = defaultdict(list)
    for lane, name, start, duration in events:
        lanes[lane].append((name, start - begin, duration))
    colors = dict(zip(PHASES, plt.get_cmap("tab10").colors, strict=False))
    figure, axes = plt.subplots(figsize=(12, 3.6))
    order = ["GPU, NCCL stream", "GPU, computing stream", "host"]
    for row, lane in enumerate(order):
        for name, start, duration in lanes[lane]:
            phase = name.split()[0].replace("gathered", "gather").replace("scattered", "scatter")
            color = colors[phase] if lane == "host" else "tab:gray" if "NCCL" in lane else "tab:olive"
            axes.barh(row, duration, left=start, height=0.6, color=color)
    axes.set_yticks(range(len(order)), order)
    axes.set_xlabel("milliseconds since the step began (two ranks share the GPU: order and overlap, not speed)")
    axes.set_title("One step of FSDPMuonOptimizer, rank 0 of 2: stages are gathered and scattered while others compute")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colors[phase]) for phase in PHASES]
    axes.legend(
        handles, [f"host: {phase}" for phase in PHASES], ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.22)
    )
    figure.savefig(path, dpi=130, bbox_inches="tight")


def main() -> None:
    pool = RankPool("nccl")
    from benchmarks import trace

    draw(pool.run(2, trace.record)[0], sys.argv[1])
    pool.close()


if __name__ == "__main__":
    main()
