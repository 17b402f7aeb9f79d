"""Batches whose updates are computed together: rules that change a batch before or after they ask for its direction."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.plan.stages import Batch, Member, _computed_together
from muon_fsdp.plan.staging import scratch_numel
from muon_fsdp.rules import RULES, MatrixBatch, Muon, register
from muon_fsdp.rules import muon as muon_module
from muon_fsdp.step.pipeline import _StageRun

SHAPES = [(24, 40), (40, 24), (24, 24), (16, 40), (24, 56)]  # four of them have the shorter side 24


class Usual(Muon):
    name = "usual"


class ChangesMatrices(Muon):
    """Orthogonalizes other matrices than it was given, in a tensor of its own."""

    name = "changes_matrices"

    def direction(self, batch: MatrixBatch) -> None:
        batch.matrices = batch.matrices * torch.arange(1.0, batch.matrices.shape[-1] + 1)
        super().direction(batch)


class ChangesInPlace(Muon):
    """Does what the documentation forbids."""

    name = "changes_in_place"

    def direction(self, batch: MatrixBatch) -> None:
        batch.matrices.mul_(torch.arange(1.0, batch.matrices.shape[-1] + 1))
        super().direction(batch)


class WritesFirst(Muon):
    """Uses the update as scratch memory before it asks for the direction."""

    name = "writes_first"

    def direction(self, batch: MatrixBatch) -> None:
        batch.update.zero_()
        super().direction(batch)


class AssignsFirst(Muon):
    """Assigns an update before it asks for the direction."""

    name = "assigns_first"

    def direction(self, batch: MatrixBatch) -> None:
        batch.update = batch.matrices
        super().direction(batch)


class ChangesOptions(Muon):
    """Asks for the direction with other options."""

    name = "changes_options"

    def direction(self, batch: MatrixBatch) -> None:
        batch.options = {**batch.options, "scale": 3.0}
        super().direction(batch)


class AsksTwice(Muon):
    """Adds the directions of two matrices."""

    name = "asks_twice"

    def direction(self, batch: MatrixBatch) -> None:
        super().direction(batch)
        first = batch.update.clone()
        batch.matrices = batch.matrices * torch.arange(1.0, batch.matrices.shape[-1] + 1)
        super().direction(batch)
        batch.update.add_(first)


class AsksSometimes(Muon):
    """Asks for the direction of wide matrices alone."""

    name = "asks_sometimes"

    def direction(self, batch: MatrixBatch) -> None:
        if batch.matrices.shape[-2] < batch.matrices.shape[-1]:
            super().direction(batch)
        else:
            batch.update = batch.matrices


class Raises(Muon):
    """Raises for the second batch, once."""

    name = "raises"
    left = 1

    def direction(self, batch: MatrixBatch) -> None:
        super().direction(batch)
        if Raises.left and batch.matrices.shape[-2:] == (40, 24):
            Raises.left -= 1
            raise ArithmeticError("once")


KINDS = (Usual, ChangesMatrices, ChangesInPlace, WritesFirst, AssignsFirst, ChangesOptions, AsksTwice, AsksSometimes)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    for kind in (*KINDS, Raises):
        register(kind)
    yield
    for kind in (*KINDS, Raises):
        RULES.pop(kind.name)


def train(rule: str, shapes=SHAPES, without: int | None = None, steps: int = 2, **options) -> list[Tensor]:
    """Return the weights after some steps; parameter `without` gets no gradient in the first one."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes for _ in range(2)]
    optimizer = MuonOptimizer(params, rule=rule, **options)
    for step in range(steps):
        for number, param in enumerate(params):
            param.grad = torch.randn(param.shape)
            if number == without and step == 0:
                param.grad = None
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.fixture
def one_by_one(monkeypatch):
    """Return a function that makes `train` compute every batch by itself."""
    together = _StageRun._direct_together

    def alone(run, numbers, units, results):
        for number in numbers:
            together(run, (number,), units, results)

    return lambda: monkeypatch.setattr(_StageRun, "_direct_together", alone)


@pytest.mark.parametrize("without", [None, 2])
@pytest.mark.parametrize("rule", [*(kind.name for kind in KINDS), "normuon", "spectral_sphere"])
def test_together_is_the_same_as_one_by_one(one_by_one, rule, without):
    found = train(rule, without=without)
    one_by_one()
    for a, b in zip(found, train(rule, without=without), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["zero", "projection"])
def test_sso_with_one_orthogonalization(one_by_one, mode):
    found = train("spectral_sphere", lambda_mode=mode)
    one_by_one()
    for a, b in zip(found, train("spectral_sphere", lambda_mode=mode), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "most"), [(Usual, 1), (ChangesMatrices, 2), (WritesFirst, 2), (AsksTwice, 2), (AsksSometimes, 1)]
)
def test_no_rule_orthogonalizes_a_batch_often(monkeypatch, kind, most):
    """A rule that makes the results of merged batches useless must not make every batch compute all later ones."""
    counts: dict[int, int] = {}
    usual = muon_module.orthogonalize_together

    def counted(requests, **options):
        for request in requests:
            counts[request.out.data_ptr()] = counts.get(request.out.data_ptr(), 0) + 1
        return usual(requests, **options)

    monkeypatch.setattr(muon_module, "orthogonalize_together", counted)
    train(kind.name, steps=1)
    assert len(counts) == len(SHAPES)
    assert max(counts.values()) <= most


def test_a_rule_that_raises_leaves_nothing_behind():
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = MuonOptimizer(params, rule="raises", momentum=0.0)
    Raises.left = 1
    before = [param.detach().clone() for param in params]
    for param in params:
        param.grad = torch.randn(param.shape)
    with pytest.raises(ArithmeticError, match="once"):
        optimizer.step()
    assert all(torch.equal(param, was) for param, was in zip(params, before, strict=True))
    optimizer.step()
    twin = [nn.Parameter(was.clone()) for was in before]
    for param, other in zip(params, twin, strict=True):
        other.grad = param.grad
    MuonOptimizer(twin, rule="usual", momentum=0.0).step()
    for param, other in zip(params, twin, strict=True):
        torch.testing.assert_close(param, other)


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_steps_in_inference_mode(mode):
    """Tensors that are made in inference mode have no version counter."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = MuonOptimizer(params)
    for param in params:
        param.grad = torch.ones_like(param).cumsum(0)
    before = [param.detach().clone() for param in params]
    with mode():
        optimizer.step()
    assert not any(torch.equal(param, was) for param, was in zip(params, before, strict=True))


def test_batches_are_freed_without_the_garbage_collector(monkeypatch):
    """A cycle would keep the memory of a step until Python happens to collect it."""
    seen: list[weakref.ref[MatrixBatch]] = []
    direction = Muon.direction

    def noted(self, batch):
        seen.append(weakref.ref(batch))
        direction(self, batch)

    monkeypatch.setattr(Muon, "direction", noted)
    gc.collect()
    gc.disable()
    try:
        train("muon", steps=1)
    finally:
        gc.enable()
    assert len(seen) == len(SHAPES)
    assert all(batch() is None for batch in seen)


def test_which_batches_are_computed_together():
    def batch(rows: int, cols: int, count: int) -> Batch:
        return Batch(None, rows, cols, (Member(0, 0, 0, count),))

    batches = [batch(8, 16, 1), batch(4, 4, 2), batch(32, 8, 1), batch(8, 8, 3), batch(4, 64, 1)]
    assert _computed_together(batches, 4, 2**20) == ((0, 2, 3), (1, 4))
    fits_two = (scratch_numel(8, 16) + scratch_numel(32, 8)) * 4 / 4  # four bytes, and four stages of scratch
    assert _computed_together(batches, 4, int(fits_two)) == ((0, 2), (1, 4), (3,))
    assert _computed_together(batches, 4, 1) == ((0,), (1,), (2,), (3,), (4,))
    assert _computed_together((), 4, 1) == ()


@pytest.mark.parametrize("max_stage_bytes", [2**12, 2**14, 2**26])
def test_the_plan_counts_the_scratch_of_batches_that_are_computed_together(max_stage_bytes):
    params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES for _ in range(3)]
    optimizer = MuonOptimizer(params, max_stage_bytes=max_stage_bytes)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer._planned is not None
    needed = [
        max(
            sum(
                each.count * scratch_numel(each.rows, each.cols) * 4 for each in map(stage.batches.__getitem__, numbers)
            )
            for numbers in stage.together
        )
        for stage in optimizer._planned.plan.stages
    ]
    reported = [stage.scratch for stage in optimizer.plan_report().stages]
    assert all(a >= b for a, b in zip(reported, needed, strict=True))
    assert max_stage_bytes < 2**26 or reported == needed
