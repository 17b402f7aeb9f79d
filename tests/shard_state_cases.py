"""Steps of DDP replicas whose state is sharded, compared with whole state; run on gloo ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from muon_fsdp.comm.dtensors import local
from muon_fsdp.declarations.state import PerParameter
from tests.comparisons import assert_changed, assert_near, assert_same
from tests.distributed_cases import OPTIONS, full_state, lay_out, make_model, train
from tests.graph_cases import NotedSegments

STEPS = 4


def trained(shard_state: bool, **options: Any) -> tuple[nn.Module, MuonOptimizer]:
    """Train a model under DDP; return it and its optimizer."""
    module, data_rank, data_size = lay_out(make_model(), "ddp")
    optimizer = MuonOptimizer(module, shard_state=shard_state, **{**OPTIONS, **options})
    train(module, optimizer, range(STEPS), data_rank, data_size)
    return module, optimizer


def same_as_whole_state(options: dict[str, Any], atol: float) -> tuple[dict[str, Any], int, int]:
    """Check that sharded state gives the same weights and state, and that each rank has its rows only.

    The tolerance is for CPUs, which round the last elements of a tensor in another way than those in vectors.

    Returns:
        The weights of this rank, and the elements of its state, without per-matrix state, if whole and if sharded.
    """
    whole_model, whole = trained(False, **options)
    model, optimizer = trained(True, **options)
    rank, size = dist.get_rank(), dist.get_world_size()
    weights = full_state(model)
    expected = full_state(whole_model)
    for name, value in weights.items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=atol, err_msg=name)
    num_whole = num_sharded = 0
    for record, other in zip(optimizer._records(), whole._records(), strict=True):
        for spec in record.rule.all_state:
            if not (isinstance(spec, PerParameter) and spec.is_sharded):
                continue
            state, known = optimizer.state[record.tensor][spec.name], whole.state[other.tensor][spec.name]
            assert isinstance(state, DTensor)
            assert state.placements == (Shard(0),)
            assert not isinstance(known, DTensor)
            chunks = torch.chunk(known, size)
            rows = chunks[rank] if rank < len(chunks) else known[:0]
            assert_near(local(state), rows, f"{spec.name} of {record.name}", atol=atol)
            num_whole += known.numel()
            num_sharded += local(state).numel()
    return weights, num_whole, num_sharded


def counted_gather() -> tuple[int, int]:
    """Return the bytes of weights that this rank receives in a step, and those that the report predicts."""
    module, optimizer = trained(True, max_stage_bytes=700)
    received = 0
    all_gather = dist.all_gather_into_tensor

    def counted(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal received
        received += (output.numel() - input.numel()) * input.itemsize
        return all_gather(output, input, *args, **kwargs)

    for p in module.parameters():
        p.grad = torch.ones_like(p)
    with patch.object(dist, "all_gather_into_tensor", counted):
        optimizer.step()
    return received, optimizer.plan_report().traffic.weights


def missing_gradients() -> None:
    """Check that a parameter without a gradient and its state stay as they are, beside others that change."""
    module, optimizer = trained(True)
    parameters = {name.replace("module.", ""): p for name, p in module.named_parameters()}
    without = ("blocks.0.up.weight", "wte.weight")

    def snapshot(names: Any) -> dict[str, dict[str, Tensor]]:
        return {
            name: {"weight": parameters[name].detach().clone()}
            | {key: local(value).clone() for key, value in optimizer.state[parameters[name]].items()}
            for name in names
        }

    for name, p in parameters.items():
        p.grad = None if name in without else torch.ones_like(p)
    still, moving = snapshot(without), snapshot(["blocks.1.up.weight", "lm_head.weight"])
    optimizer.step()
    assert_same(snapshot(without), still)
    assert_changed(snapshot(moving), moving)


def replaced_data() -> None:
    """Check that a step updates the memory that a parameter has now, not that of an earlier step."""
    results = []
    for replaces in (False, True):
        module, optimizer = trained(True)
        for p in module.parameters():
            if replaces:
                p.data = p.data.clone()
            p.grad = torch.ones_like(p)
        optimizer.step()
        results.append({name: p.detach() for name, p in module.named_parameters()})
    assert_same(results[1], results[0])


def policies() -> tuple[float, float]:
    """Check accumulation, clipping and skipped steps against whole state; return the skipped steps of both."""
    results, skipped = [], []
    for shard_state in (False, True):
        module, data_rank, data_size = lay_out(make_model(), "ddp")
        optimizer = FSDPMuonOptimizer(
            module, shard_state=shard_state, nonfinite="skip", gradient_accumulation_steps=2, **OPTIONS
        )
        norms: list[Tensor] = []

        def clip(_: nn.Module, optimizer: Any = optimizer, norms: list[Tensor] = norms) -> None:
            norms.append(optimizer.clip_grad_norm_(0.5)["all"])

        train(module, optimizer, range(4), data_rank, data_size, after_backward=clip)
        next(module.parameters()).grad = torch.full_like(next(module.parameters()), torch.nan)
        for _ in range(2):
            optimizer.step()
        results.append([*norms, *(p.detach() for p in module.parameters())])
        skipped.append(optimizer.metrics()["skipped_steps"])
    assert_near(results[1], results[0], atol=1e-5)
    return skipped[0], skipped[1]


def captured() -> None:
    """Check that a recorded step gathers weights as an eager one does, and starts over if a weight moves."""
    from muon_fsdp.step import planned_step
    from muon_fsdp.step.fused import FusedStep

    results = []
    for cuda_graph in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in ((12, 8), (7, 5), (9,))]
        optimizer = MuonOptimizer(
            params, lr=0.05, shard_state=True, replicate_group=dist.group.WORLD, cuda_graph=cuda_graph
        )
        captured = optimizer._current_plan().captured
        captured._make_segments = lambda device: NotedSegments(-1)  # type: ignore[assignment]
        with (
            patch.object(planned_step, "capture_obstacle", lambda *_: None),
            patch.object(FusedStep, "device", torch.device("cpu")),
        ):
            for step in range(6):
                generator = torch.Generator().manual_seed(step)
                for p in params:
                    grad = torch.randn(p.shape, generator=generator)
                    p.grad = grad if p.grad is None else p.grad.copy_(grad)
                if step == 4:
                    params[0].data = params[0].data.clone()
                optimizer.step()
        assert (captured.graph is not None) == cuda_graph
        results.append([p.detach() for p in params])
    assert_same(results[1], results[0])
