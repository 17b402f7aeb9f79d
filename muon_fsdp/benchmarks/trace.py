"""Draw a timeline of one step on two NCCL ranks that share a GPU: `python -m muon_fsdp.benchmarks.trace OUT.png`.

The picture shows order and overlap, not speed, because both ranks compute on the same GPU.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from muon_fsdp import FSDPMuonOptimizer
from muon_fsdp.benchmarks.processes import run_on_ranks

Event = tuple[str, str, float, float]  # lane, name, start and duration in milliseconds

ANNOTATIONS = ("muon_fsdp.", "Optimizer.", "nccl:")  # ranges that the profiler repeats on the GPU's lanes
LANES = ("GPU, NCCL stream", "GPU, computing stream", "host")
PHASES = ("prepare", "gather", "orthogonalize", "scatter", "apply")
WIDTH = 2048
NUM_BLOCKS = 6
VOCABULARY = 128


class Block(nn.Module):
    """One residual MLP block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the MLP to its input."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def sharded_model() -> nn.Sequential:
    """Build an embedding, blocks and an output head on the GPU, and shard them over all ranks with FSDP2."""
    blocks = {f"block{number}": Block(WIDTH) for number in range(NUM_BLOCKS)}
    embedding, head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
    model = nn.Sequential(OrderedDict[str, nn.Module](wte=embedding, **blocks, lm_head=head)).cuda()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def record() -> list[Event]:
    """Profile one step on this rank, after three steps that are not recorded.

    Returns:
        What ran on the host and on the two streams of the GPU.
    """
    model = sharded_model()
    optimizer = FSDPMuonOptimizer(model, strategy="owner", max_stage_bytes=2**20)

    def backward() -> None:
        optimizer.zero_grad()
        tokens = torch.randint(0, VOCABULARY, (32,), device="cuda")
        loss = nn.functional.cross_entropy(model(tokens).float(), (3 * tokens + 1) % VOCABULARY)
        loss.backward()  # type: ignore[no-untyped-call]

    for _ in range(3):
        backward()
        optimizer.step()
    backward()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profiler:
        optimizer.step()
        torch.cuda.synchronize()
    events: list[Event] = []
    for event in profiler.profiler.kineto_results.events():
        name, start, duration = event.name(), event.start_ns() / 1e6, event.duration_ns() / 1e6
        if event.device_type() == DeviceType.CPU and name.startswith("muon_fsdp."):
            events.append(("host", name.removeprefix("muon_fsdp."), start, duration))
        elif event.device_type() == DeviceType.CUDA and not name.startswith(ANNOTATIONS):
            lane = "GPU, NCCL stream" if "nccl" in name.lower() else "GPU, computing stream"
            events.append((lane, name, start, duration))
    return events


def draw(events: list[Event], path: str) -> None:
    """Draw the events as bars, one row per lane, and save the picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    begin = min(start for _, _, start, _ in events)
    lanes: dict[str, list[Any]] = defaultdict(list)
    for lane, name, start, duration in events:
        lanes[lane].append((name, start - begin, duration))
    colors = dict(zip(PHASES, matplotlib.color_sequences["tab10"], strict=False))
    figure, axes = plt.subplots(figsize=(12, 3.6))
    for row, lane in enumerate(LANES):
        for name, start, duration in lanes[lane]:
            phase = name.split()[0].replace("gathered", "gather").replace("scattered", "scatter")
            color = colors[phase] if lane == "host" else "tab:gray" if "NCCL" in lane else "tab:olive"
            axes.barh(row, duration, left=start, height=0.6, color=color)
    axes.set_yticks(range(len(LANES)), LANES)
    axes.set_xlabel("milliseconds since the step began (two ranks share the GPU: order and overlap, not speed)")
    axes.set_title("One step of FSDPMuonOptimizer, rank 0 of 2: stages are gathered and scattered while others compute")
    handles = [Rectangle((0, 0), 1, 1, color=colors[phase]) for phase in PHASES]
    axes.legend(
        handles, [f"host: {phase}" for phase in PHASES], ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.22)
    )
    figure.savefig(path, dpi=130, bbox_inches="tight")


def main() -> None:
    """Record a step on two ranks and draw that of the first."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m muon_fsdp.benchmarks.trace OUT.png")
    draw(run_on_ranks(2, record, backend="nccl")[0], sys.argv[1])


if __name__ == "__main__":
    main()
