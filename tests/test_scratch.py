"""The scratch that the plan counts for a GPU, beside what the engine allocates: on a CPU, with a GPU's precisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from muon_fsdp import MuonOptimizer
from muon_fsdp.comm.agreement import PRECISION
from muon_fsdp.linalg import iteration, newton_schulz
from muon_fsdp.linalg.iteration import Exact
from muon_fsdp.rules import muon
from muon_fsdp.step import pipeline, planned_step
from muon_fsdp.step.pipeline import _StageRun
from muon_fsdp.step.shared_sets import _line

SMALL = 2**17  # bytes of norms, moments of rows and the like


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterate in float16 by products that allocate nothing but their result, as the kernels do."""

    def normalize(batch: Tensor, margin: float, dtype: torch.dtype, known: Tensor | None, out: Tensor | None) -> Any:
        scales = torch.ones(len(batch)) if known is None else known
        x = torch.empty_like(batch, dtype=dtype) if out is None else out
        return x.zero_(), Exact(batch, scales, 1 / margin), scales

    def symmetric(
        a: Tensor, b: Tensor, *_: Any, transposed: bool = False, out: Tensor | None = None, **__: Any
    ) -> Tensor:
        rows = a.shape[2] if transposed else a.shape[1]
        return (a.new_empty(len(a), rows, rows) if out is None else out).zero_()

    def multiply_add(a: Tensor, b: Tensor, *_: Any, out: Tensor | None = None, **__: Any) -> Tensor:
        return (a.new_empty(len(a), a.shape[1], b.shape[2]) if out is None else out).zero_()

    gpu = torch.device("meta")
    update_dtype = planned_step._update_dtype
    monkeypatch.setattr(newton_schulz, "normalize", normalize)
    monkeypatch.setattr(
        newton_schulz,
        "_iteration_dtype",
        lambda batch: torch.float16 if min(batch.shape[-2:]) > newton_schulz.TINY_ROWS else torch.float32,
    )
    monkeypatch.setattr(iteration, "symmetric_product", symmetric)
    monkeypatch.setattr(iteration, "multiply_add", multiply_add)
    monkeypatch.setattr(muon, "damp", lambda *_: None)
    monkeypatch.setattr(_StageRun, "_check_values", lambda run, part: None)
    monkeypatch.setattr(pipeline, "finite_matrices", lambda batch: None)
    monkeypatch.setattr(
        planned_step,
        "_update_dtype",
        lambda record, *rest: update_dtype(SimpleNamespace(rule=record.rule, view=record.view, device=gpu), *rest),
    )


def peak_of(work: Callable[[], object]) -> int:
    """Return the most bytes that are allocated at a time beyond those at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def group(*shapes: tuple[int, int], **options: Any) -> dict[str, Any]:
    return {"params": [nn.Parameter(torch.randn(shape)) for shape in shapes], **options}


GROUPS: dict[str, Callable[[], Sequence[dict[str, Any]]]] = {
    "square": lambda: [group(*8 * [(256, 256)])],
    "wide and tall": lambda: [group(*4 * [(256, 1024)], *4 * [(1024, 256)])],
    "very wide": lambda: [group(*2 * [(320, 2048)])],
    "few rows": lambda: [group(*4 * [(32, 2048)])],
    "transposed": lambda: [group(*8 * [(256, 1024)], transposed=True)],
    "fused": lambda: [group(*8 * [(768, 256)], split_sizes=(256, 256, 256))],
    "fused, of two heights": lambda: [group(*4 * [(1536, 256)], split_sizes=(1024, 512))],
    "one of each shape": lambda: [group((256, 1024), (1024, 256), (256, 1536), (256, 2048), (256, 1280))],
    "large updates": lambda: [group(*8 * [(256, 1024)], ns_stepsize=1000.0)],
    "some large updates": lambda: [group(*8 * [(256, 1024)]), group((256, 256), ns_stepsize=1000.0)],
}


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the peaks of the directions that are computed together in a step."""
    found: list[int] = []
    together = _StageRun._direct_together

    def watched(run: _StageRun, *args: Any) -> None:
        found.append(peak_of(lambda: together(run, *args)))

    monkeypatch.setattr(_StageRun, "_direct_together", watched)
    return found


@pytest.mark.parametrize("orthogonalization", ["default", "fast", "keller"])
@pytest.mark.parametrize("kind", GROUPS)
def test_the_plan_counts_what_directions_allocate(kind, orthogonalization, peaks):
    groups = GROUPS[kind]()
    optimizer = MuonOptimizer(groups, orthogonalization=orthogonalization, comm_dtype=torch.bfloat16)
    used = []
    for _ in range(2):
        for parameter in (p for given in groups for p in given["params"]):
            parameter.grad = torch.ones_like(parameter)
        peaks.clear()
        optimizer.step()
        used.append(max(peaks))
    counted = max(stage.scratch for stage in optimizer.plan_report().stages)
    sampled, usual = used
    assert usual <= counted + SMALL
    # The residual of a sample is computed in float64, in pieces.
    assert sampled <= counted + 8 * 320 * 2048 + SMALL
    copies = 5 if kind == "one of each shape" else 2
    assert counted <= copies * usual + SMALL


def test_large_updates_do_not_make_others_float32():
    optimizer = MuonOptimizer(GROUPS["some large updates"](), orthogonalization="fast", comm_dtype=torch.bfloat16)
    for parameter in (p for given in optimizer.param_groups for p in given["params"]):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer._planned is not None
    planned = optimizer._planned
    found = {stage.update_dtype: len(stage.positions) for stage in planned.plan.stages}
    assert found == {torch.float16: 8, torch.float32: 1}
    # Ranks that disagreed about it would have other stages.
    properties = [_line(record, spec)[1] for record, spec in zip(planned.records, planned._specs, strict=True)]
    assert {each[PRECISION] for each in properties} == {"torch.float16", "torch.float32"}
