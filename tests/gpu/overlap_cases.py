"""Stages that start in backward, on NCCL ranks that share one GPU; run by tests/gpu/test_backward.py."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from muon_fsdp import FSDPMuonOptimizer
from muon_fsdp.comm.transfers import StageExchange, local
from tests.comparisons import assert_same
from tests.gpu.nccl_cases import backward, sharded_net


def train(overlap: str, clip_in_step: int | None = None, steps: int = 8) -> tuple[FSDPMuonOptimizer, list[Tensor]]:
    """Train a sharded model; return the optimizer, and this rank's weights and state."""
    model = sharded_net()
    optimizer = FSDPMuonOptimizer(model, adamw_lr=0.01, max_stage_bytes=2**17, overlap=overlap, cuda_graph=False)
    for step in range(steps):
        backward(model, step)
        if step == clip_in_step:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        optimizer.zero_grad()
    found = [local(p).detach().clone() for p in model.parameters()]
    found += [local(value).clone() for p in model.parameters() for value in optimizer.state[p].values()]
    return optimizer, found


def same_bits(clip_in_step: int | None) -> tuple[float, float]:
    """Check that both settings give the same weights and state.

    Returns:
        The stages that were used, and those that were discarded.
    """
    _, expected = train("step", clip_in_step)
    optimizer, found = train("backward", clip_in_step)
    assert_same(found, expected)
    metrics = optimizer.metrics()
    return metrics["overlapped_stages"], metrics["discarded_stages"]


def gathered_before_backward_ends() -> tuple[bool, bool, set[str]]:
    """Gather stages while the device computes the gradients of the first block for seconds.

    Returns:
        Whether a gather ended on the device, whether backward had not ended then, and the threads that waited for one.
    """
    model = sharded_net()
    optimizer = FSDPMuonOptimizer(model, max_stage_bytes=2**17, strategy="owner", overlap="backward")
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
        handle = model.blocks[0].register_full_backward_hook(slow)
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
