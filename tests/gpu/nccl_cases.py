"""FSDP2 on NCCL ranks that share one GPU; run by tests/gpu/test_nccl.py."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muon_fsdp import FSDPMuonOptimizer
from muon_fsdp.comm.dtensors import local
from muon_fsdp.comm.recorder import CudaSegments
from muon_fsdp.comm.transfers import StageExchange
from muon_fsdp.declarations.settings import CudaGraph
from muon_fsdp.plan import outline
from muon_fsdp.plan.costs import StageLimits
from muon_fsdp.rules import RULES, MatrixBatch
from tests.fault_cases import error_of

_alive: list[object] = []


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int, num_blocks: int, vocabulary: int = 128) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def sharded_net(width: int = 128, num_blocks: int = 4, **options: Any) -> Net:
    torch.manual_seed(0)
    model = Net(width, num_blocks).cuda()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, **options)
    fully_shard(model, mesh=mesh, mp_policy=policy, **options)
    return model


def backward(model: nn.Module, step: int, siblings: int = 1) -> Tensor:
    """Run backward on this rank's part of a batch; `siblings` ranks in a row get the same part. Return the loss."""
    generator = torch.Generator().manual_seed(step)
    parts = torch.randint(0, 128, (64,), generator=generator).chunk(dist.get_world_size() // siblings)
    tokens = parts[dist.get_rank() // siblings].cuda()
    loss = nn.functional.cross_entropy(model(tokens).float(), (3 * tokens + 1) % 128)
    loss.backward()
    return loss.detach()


def curve(strategy: str, cuda_graph: CudaGraph = False) -> list[float]:
    model = sharded_net()
    optimizer = FSDPMuonOptimizer(model, adamw_lr=0.01, strategy=strategy, max_stage_bytes=2**17, cuda_graph=cuda_graph)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        loss = backward(model, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    planned = optimizer._current_plan()
    assert len(planned.plan.stages) > 2
    assert (planned.graph is not None) == bool(cuda_graph), planned.captured.status
    _alive.append(optimizer)  # the process group is destroyed while the graph is still there
    return losses


def offloaded(where: str, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train, save in the middle, and resume with a new optimizer.

    Args:
        where: what is on the host: "nothing", "state", or weights too, in "pinned" or in "pageable" memory.
        options: of the optimizer.

    Returns:
        The losses, and the weights of this rank.
    """
    policy = {}
    if where in ("pinned", "pageable"):
        policy = {"offload_policy": CPUOffloadPolicy(pin_memory=where == "pinned")}
    model = sharded_net(**policy)
    options = {"adamw_lr": 0.01, "max_stage_bytes": 2**17, "cuda_graph": False, **options}

    def build() -> FSDPMuonOptimizer:
        return FSDPMuonOptimizer(model, offload_state=where == "state", **options)

    optimizer, losses = build(), []
    for step in range(12):
        if step == 6:
            saved = get_optimizer_state_dict(model, optimizer)
            optimizer = build()
            set_optimizer_state_dict(model, optimizer, saved)
        optimizer.zero_grad()
        loss = backward(model, step)
        optimizer.clip_grad_norm_(10.0)
        optimizer.step()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    on_host = {local(p).device.type for p in model.parameters()}
    assert on_host == {"cpu" if policy else "cuda"}
    for record in optimizer._records():
        if record.part().numel():
            kept = local(optimizer.state[record.tensor]["momentum_buffer"])
            assert kept.device.type == ("cuda" if where == "nothing" else "cpu")
            assert kept.is_pinned() == (where != "nothing")
    return losses, {name: local(p).detach().cpu() for name, p in model.named_parameters()}


def once(cuda_graph: CudaGraph) -> tuple[list[float], int, dict[str, Tensor]]:
    """Train on a (2, 2) mesh of FSDP2 x tensor parallel, with two blocks that are not tensor-parallel.

    Returns:
        The losses, the number of matrices that this rank computes in a step, and the weights that siblings repeat.
    """
    torch.manual_seed(0)
    model = Net(128, 4).cuda()
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks[:2]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    optimizer = FSDPMuonOptimizer(
        model, adamw_lr=0.01, strategy="owner", replicate_mesh=mesh, max_stage_bytes=2**17, cuda_graph=cuda_graph
    )
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        loss = backward(model, step, siblings=2)
        optimizer.clip_grad_norm_(10.0)
        optimizer.step()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    planned = optimizer._current_plan()
    assert (planned.graph is not None) == bool(cuda_graph), planned.captured.status
    repeated = {
        name: p for name, p in model.named_parameters() if name.startswith(("blocks.2", "blocks.3")) and p.ndim > 1
    }
    weights = {name: p.full_tensor().detach().cpu() for name, p in repeated.items() if isinstance(p, DTensor)}
    assert len(weights) == 4, weights.keys()
    _alive.append(optimizer)
    return losses, sum(batch.count for stage in planned.plan.stages for batch in stage.batches), weights


def replicas_that_differ(what: str) -> str:
    """Make a matrix differ between the submeshes of a (1, 2) mesh by its last bit, or its gradient; return the text."""
    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    # More elements than are hashed at once, and a number that eight does not divide.
    layer = nn.Linear(2049, 2051, bias=False).cuda().bfloat16()
    fully_shard(layer, mesh=mesh["dp"])
    optimizer = FSDPMuonOptimizer(layer, replicate_mesh=mesh)
    layer(torch.randn(4, 2049, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
    assert isinstance(layer.weight, DTensor)
    changed = layer.weight if what == "values" else layer.weight.grad
    assert isinstance(changed, DTensor)
    with torch.no_grad():
        if dist.get_rank() == 1 and what == "values":
            changed.to_local().view(-1)[-1:].view(torch.int16).bitwise_xor_(1)
        elif dist.get_rank() == 1:
            changed.to_local().neg_()
    return error_of(optimizer.step)


def replicas(kind: str, options: dict[str, Any]) -> tuple[list[float], list[Tensor], int]:
    """Train replicas: under DDP, or under HSDP with two replicas.

    Returns:
        The losses, the weights of this rank, and the bytes of its state.
    """
    torch.manual_seed(0)
    model: nn.Module = Net(128, 4).cuda()
    if kind == "hsdp":
        mesh = init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = FSDPMuonOptimizer(model, adamw_lr=0.01, strategy="owner", max_stage_bytes=2**17, **options)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        loss = backward(model, step)
        optimizer.step()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    planned = optimizer._current_plan()
    assert (planned.graph is not None) == bool(options.get("cuda_graph")), planned.captured.status
    if dist.get_world_size() > 1 and not options.get("shard_state"):
        assert any(stage.exchange is not None and stage.exchange.forwards for stage in planned.plan.stages)
    _alive.append(optimizer)
    state = sum(local(v).nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
    weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return losses, [weight.detach().cpu() for weight in weights], state


def overlap() -> None:
    """Check that the gather of the next stage ends while a stage still computes."""
    model = sharded_net()
    optimizer = FSDPMuonOptimizer(model, strategy="owner", max_stage_bytes=2**18, cuda_graph=False)
    backward(model, 0)
    optimizer.step()
    torch.cuda.synchronize()
    dist.barrier()
    gathers: list[StageExchange] = []
    observed: list[tuple[bool, bool]] = []
    start_gather, rule = StageExchange.start_gather, type(RULES["muon"])
    directions = rule.directions

    def noted_gather(self: StageExchange) -> None:
        start_gather(self)
        gathers.append(self)

    def slow_directions(self: Any, batches: Sequence[MatrixBatch]) -> None:
        if not observed and len(gathers) >= 2:
            torch.cuda._sleep(6_000_000_000)  # seconds of work on the computing stream
            end = torch.cuda.Event()
            end.record()
            transfer = gathers[-1]._gather
            assert transfer is not None
            deadline = time.monotonic() + 20
            while not transfer.is_completed() and not end.query() and time.monotonic() < deadline:
                time.sleep(0.005)
            observed.append((transfer.is_completed(), not end.query()))
        directions(self, batches)

    StageExchange.start_gather, rule.directions = noted_gather, slow_directions  # type: ignore[method-assign]
    try:
        optimizer.step()
    finally:
        StageExchange.start_gather, rule.directions = start_gather, directions  # type: ignore[method-assign]
    torch.cuda.synchronize()
    gathered, still_computing = observed[0]
    assert gathered, "the next stage was not gathered while the device computed"
    assert still_computing, "the device had finished its stage before the gather of the next one ended"


def changed_on_one_rank(name: str, value: object, cuda_graph: bool) -> list[str]:
    """Change an option on rank 1 after some steps; return the errors of the next two."""
    model = sharded_net()
    optimizer = FSDPMuonOptimizer(model, cuda_graph=cuda_graph)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    if dist.get_rank() == 1:
        optimizer.param_groups[0][name] = value
    return [error_of(optimizer.step) for _ in range(2)]


@contextmanager
def failing_segment(number: int, invalidates: bool) -> Iterator[SimpleNamespace]:
    """Let the capture of one segment fail, and count the segments; none fails if the number is negative.

    With `invalidates`, the failure is a call that CUDA does not allow in a capture, which invalidates the capture.
    """
    seen = SimpleNamespace(count=0)
    end = CudaSegments.end

    def failing_end(self: CudaSegments) -> Any:
        seen.count += 1
        if seen.count - 1 == number:
            if invalidates:
                torch.cuda.current_stream().synchronize()
            raise RuntimeError(f"injected into segment {number}")
        return end(self)

    CudaSegments.end = failing_end  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        CudaSegments.end = end  # type: ignore[method-assign]


def failing_captures(rule: str) -> list[str]:
    """Let the capture of each segment fail on rank 1 alone; return how the results differ from those without a graph.

    Every second failure invalidates the capture.
    """
    model = sharded_net(64, 1)
    start = [p.to_local().detach().clone() for p in model.parameters()]
    differences: list[str] = []

    def train(number: int, cuda_graph: CudaGraph) -> tuple[list[Tensor], int, int]:
        """Return the weights after five steps, the number of segments, and the number of warnings."""
        with torch.no_grad():
            for p, before in zip(model.parameters(), start, strict=True):
                p.to_local().copy_(before)
        optimizer = FSDPMuonOptimizer(model, rule=rule, strategy="owner", max_stage_bytes=2**15, cuda_graph=cuda_graph)
        with failing_segment(number, number % 2 == 1) as segments, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(5):  # the first two of the spectral sphere are never captured
                optimizer.zero_grad()
                backward(model, step)
                optimizer.step()
        told = [str(each.message) for each in caught if "not captured as a CUDA graph" in str(each.message)]
        return [p.to_local().detach().clone() for p in model.parameters()], segments.count, len(told)

    expected, _, _ = train(-1, False)
    found, num_segments, _ = train(-1, True)
    if not all(map(torch.equal, found, expected)):
        differences.append("captured on both ranks")
    most = torch.tensor(num_segments, device="cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    if int(most) < 4:
        differences.append(f"only {int(most)} segments")
    for number in range(int(most)):
        found, _, num_warnings = train(number if dist.get_rank() == 1 else -1, True)
        if not all(map(torch.equal, found, expected)):
            differences.append(f"failure in segment {number}")
        if num_warnings != (dist.get_rank() == 1 and number < num_segments):
            differences.append(f"{num_warnings} warnings about segment {number}")
    return differences


def agreement_beside_backward() -> None:
    """Check that a step, its agreement included, is launched while the device is busy with earlier work."""
    model = sharded_net()
    optimizer = FSDPMuonOptimizer(model)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda._sleep(6_000_000_000)  # seconds of work on the computing stream
    end = torch.cuda.Event()
    end.record()
    optimizer.step()
    still_busy = not end.query()
    torch.cuda.synchronize()
    assert still_busy, "the host waited for the device before the step was launched"


def peak_in_flight(in_flight: int, width: int, num_blocks: int) -> dict[str, float]:
    """Measure as `peak_of_step` does, with stages of one matrix per rank and this many of them in flight."""
    with patch.object(outline, "choose_limits", lambda *_: StageLimits(1, in_flight)):
        return peak_of_step("muon", width, num_blocks, None)


def peak_of_step(kind: str, width: int, num_blocks: int, max_stage_bytes: int | None) -> dict[str, float]:
    """Measure bytes on this rank: shards of the weights, state, and the peak of a step above what was allocated.

    For Muon, "planned" is the upper bound that the plan gives for this peak.
    """
    model = sharded_net(width, num_blocks)
    if kind == "muon":
        optimizer: torch.optim.Optimizer = FSDPMuonOptimizer(model, strategy="owner", max_stage_bytes=max_stage_bytes)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=kind == "adamw fused", foreach=kind == "adamw")
    backward(model, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 1)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    torch.cuda.synchronize()
    weights = sum(p.to_local().nbytes for p in model.parameters())
    state = sum(
        (v.to_local() if hasattr(v, "to_local") else v).nbytes
        for s in optimizer.state.values()
        for v in s.values()
        if isinstance(v, Tensor)
    )
    peak = torch.cuda.max_memory_allocated() - before
    planned = optimizer.plan_report().scratch_bytes if isinstance(optimizer, FSDPMuonOptimizer) else 0
    return {"weights": weights, "state": state, "peak of step": peak, "planned": planned}
