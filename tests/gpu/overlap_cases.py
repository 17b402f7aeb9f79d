"""Stages that start in backward, on NCCL ranks that share one GPU; run by tests/gpu/test_backward.py."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from muon_fsdp import FSDPMuonOptimizer
from muon_fsdp.comm.dtensors import local
from muon_fsdp.comm.transfers import StageExchange
from tests.comparisons import assert_same
from tests.gpu.nccl_cases import Net, backward, sharded_net


def wrapped_net(**options: Any) -> DistributedDataParallel:
    """Return a model in DDP, with about one bucket for every matrix."""
    torch.manual_seed(0)
    return DistributedDataParallel(Net(128, 4).cuda(), bucket_cap_mb=0.25, **options)


def train(
    overlap: str,
    clip_in_step: int | None,
    ddp: dict[str, Any] | None,
    options: dict[str, Any],
    steps: int = 8,
) -> tuple[FSDPMuonOptimizer, list[Tensor]]:
    """Train a sharded model, or one in DDP with these options.

    Returns:
        The optimizer, and this rank's weights and state.
    """
    model = sharded_net() if ddp is None else wrapped_net(**ddp)
    given = {"adamw_lr": 0.01, "max_stage_bytes": 2**17 if ddp is None else 2**19, **options}
    optimizer = FSDPMuonOptimizer(model, overlap=overlap, cuda_graph=False, **given)
    for step in range(steps):
        backward(model, step)
        if step == clip_in_step:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    found = [local(p).detach().clone() for p in model.parameters()]
    found += [local(value).clone() for p in model.parameters() for value in optimizer.state[p].values()]
    return optimizer, found


def same_bits(
    clip_in_step: int | None, ddp: dict[str, Any] | None = None, options: dict[str, Any] | None = None
) -> tuple[float, float]:
    """Check that both settings give the same weights and state.

    Returns:
        The stages that were used, and those that were discarded.
    """
    _, expected = train("step", clip_in_step, ddp, options or {})
    optimizer, found = train("backward", clip_in_step, ddp, options or {})
    assert_same(found, expected)
    metrics = optimizer.metrics()
    return metrics["overlapped_stages"], metrics["discarded_stages"]


def gathered_before_backward_ends(in_ddp: bool) -> tuple[bool, bool, set[str]]:
    """Gather stages while the device computes the gradients of the first block, or of the embedding, for seconds.

    Returns:
        Whether a gather ended on the device, whether backward had not ended then, and the threads that waited for one.
    """
    model = wrapped_net() if in_ddp else sharded_net()
    # Under DDP only sharded state has to be gathered.
    optimizer = FSDPMuonOptimizer(
        model, max_stage_bytes=2**17, strategy="owner", overlap="backward", shard_state=in_ddp
    )
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    gathered: list[torch.cuda.Event] = []
    threads: set[str] = set()
    finish_gather = StageExchange.finish_gather

    def noted(self: StageExchange) -> Tensor:
        units = finish_gather(self)
        event = torch.cuda.Event()
        event.record()
        gathered.append(event)
        threads.add(threading.current_thread().name)
        return units

    def slow(*_: Any) -> None:
        torch.cuda._sleep(6_000_000_000)  # seconds of work before the gradients of this block are reduced

    with patch.object(StageExchange, "finish_gather", noted):
        blocks = model.module.blocks if in_ddp else model.blocks
        handle = blocks[0].register_full_backward_hook(slow)
        backward(model, 3)
        handle.remove()
        end = torch.cuda.Event()
        end.record()
        deadline = time.monotonic() + 20
        while not (gathered and gathered[0].query()) and not end.query() and time.monotonic() < deadline:
            time.sleep(0.005)
        found = bool(gathered) and gathered[0].query(), not end.query()
        optimizer.step()
    torch.cuda.synchronize()
    return *found, threads
