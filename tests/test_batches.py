"""Batches whose updates are computed together, and rules that override `direction`, which are computed one by one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.plan.costs import scratch_numel
from muon_fsdp.plan.stages import Batch, Member, _computed_together
from muon_fsdp.rules import RULES, MatrixBatch, Muon, NorMuon, register
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


class RescalesFirst(NorMuon):
    """Rescales matrices before it asks for the direction, which a rule below Muon has defined together for batches."""

    name = "rescales_first"

    def direction(self, batch: MatrixBatch) -> None:
        batch.matrices = batch.matrices / batch.matrices.abs().sum(-1, keepdim=True)
        super().direction(batch)


class Together(Muon):
    """Defines `directions` alone."""

    name = "together"

    def directions(self, batches: Sequence[MatrixBatch]) -> None:
        for batch in batches:
            batch.update = batch.matrices * len(batches)


class AsksSometimes(Muon):
    """Asks for the direction of wide matrices alone."""

    name = "asks_sometimes"

    def direction(self, batch: MatrixBatch) -> None:
        if batch.matrices.shape[-2] < batch.matrices.shape[-1]:
            super().direction(batch)
        else:
            batch.update = batch.matrices


class ReadsAfterwards(Muon):
    """Adds the matrices to their directions."""

    name = "reads_afterwards"

    def direction(self, batch: MatrixBatch) -> None:
        super().direction(batch)
        batch.update.add_(batch.matrices)


class Raises(Muon):
    """Raises for the second batch, once."""

    name = "raises"
    left = 1

    def direction(self, batch: MatrixBatch) -> None:
        super().direction(batch)
        if Raises.left and batch.matrices.shape[-2:] == (40, 24):
            Raises.left -= 1
            raise ArithmeticError("once")


KINDS = (
    Usual,
    ChangesMatrices,
    ChangesInPlace,
    WritesFirst,
    AssignsFirst,
    ChangesOptions,
    AsksTwice,
    RescalesFirst,
    AsksSometimes,
)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    for kind in (*KINDS, Together, ReadsAfterwards, Raises):
        register(kind)
    yield
    for kind in (*KINDS, Together, ReadsAfterwards, Raises):
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
    ("rule", "calls"),
    [("usual", [4, 1]), ("normuon", [4, 1]), ("rescales_first", [1] * 5), ("asks_twice", [1] * 10)],
)
def test_batches_are_orthogonalized_together_unless_a_rule_overrides_direction(monkeypatch, rule, calls):
    found: list[int] = []
    usual = muon_module.orthogonalize_together

    def counted(requests, **options):
        found.append(len(requests))
        return usual(requests, **options)

    monkeypatch.setattr(muon_module, "orthogonalize_together", counted)
    monkeypatch.setattr(Muon, "residual", lambda self, batch: None)  # orthogonalizes a matrix of each batch again
    train(rule, steps=1)
    assert found == calls


def test_a_rule_may_define_directions_alone():
    options = {"momentum": 0.0, "nesterov": False}
    found, gradients = train("together", steps=1, **options), train("together", steps=1, lr=0.0, **options)
    assert RULES["together"].needs_matrices
    torch.manual_seed(0)
    before = [torch.randn(shape) for shape in SHAPES for _ in range(2)]
    for number, (after, was) in enumerate(zip(found, before, strict=True)):
        count = 1 if number in (6, 7) else 4  # batches with the same shorter side
        torch.testing.assert_close(after, was - 0.02 * count * torch.randn(was.shape))
        torch.testing.assert_close(gradients[number], was)


def test_matrices_are_kept_for_rules_that_may_read_them_afterwards():
    class Declares(ChangesMatrices):
        overwrites_matrices = True

    class Extends(Declares):
        def directions(self, batches: Sequence[MatrixBatch]) -> None:
            super().directions(batches)

    given = {
        rule: rule().may_overwrite for rule in (Usual, ChangesMatrices, RescalesFirst, Together, Declares, Extends)
    }
    assert [rule for rule, may in given.items() if may] == [Usual, Declares]
    assert {name for name, rule in RULES.items() if rule.may_overwrite} >= {"muon", "normuon", "hyperball"}
    assert not RULES["spectral_sphere"].may_overwrite

    class Measures(Muon):
        def residual(self, batch: MatrixBatch) -> Tensor | None:
            return super().residual(batch)

    overwrites = {rule: rule().residual_overwrites for rule in (Muon, NorMuon, Usual, ChangesMatrices, Measures)}
    assert [rule for rule, may in overwrites.items() if may] == [Muon, NorMuon, Usual]
    assert Measures().may_overwrite
    options = {"momentum": 0.0, "orthogonalization": "fast", "momentum_eps": 0.0}
    alone, both = train("usual", steps=1, **options), train("reads_afterwards", steps=1, **options)
    torch.manual_seed(0)
    _ = [torch.randn(shape) for shape in SHAPES for _ in range(2)]
    for a, b in zip(alone, both, strict=True):
        torch.testing.assert_close(a - b, 0.02 * torch.randn(a.shape))


@pytest.mark.parametrize("rule", ["muon", "normuon", "hyperball"])
@pytest.mark.parametrize("gradients", ["finite", "not finite"])
def test_matrices_that_are_overwritten_change_nothing_else(rule, gradients, monkeypatch):
    """Nor do samples of updates, which are orthogonalized again, and the checks that updates are finite."""
    overwritten = []
    usual = muon_module.orthogonalize_together

    def watched(requests, **options):
        before = [request.matrices.clone() for request in requests]
        result = usual(requests, **options)
        overwritten.extend(
            not torch.equal(request.matrices, was) for request, was in zip(requests, before, strict=True)
        )
        return result

    def run(**settings) -> tuple[list[Tensor], list[dict[str, float]]]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES for _ in range(2)]
        optimizer = MuonOptimizer(params, rule=rule, orthogonalization="fast", **settings)
        found = []
        for step in range(3):
            for param in params:
                param.grad = torch.randn(param.shape)
            if step == 0 and gradients == "not finite" and not settings:
                assert params[3].grad is not None
                params[3].grad[0, 0] = torch.inf
            optimizer.step()
            found.append(optimizer.metrics())
        return [param.detach() for param in params], found

    monkeypatch.setattr(muon_module, "orthogonalize_together", watched)
    weights, metrics = run()
    assert all(overwritten)
    raising, _ = run(nonfinite="raise")
    monkeypatch.setattr(type(RULES[rule]), "overwrites_matrices", False)
    monkeypatch.setitem(vars(RULES[rule]), "may_overwrite", False)
    overwritten.clear()
    for (expected, numbers), found in ((run(), weights), (run(nonfinite="raise"), raising)):
        assert not any(overwritten)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b) or (a.isnan() == b.isnan()).all()
        if found is weights:
            torch.testing.assert_close(metrics, numbers, rtol=0, atol=0, equal_nan=True)


def test_options_may_differ_between_batches_that_are_computed_together():
    """Each batch is iterated as its own group says."""
    torch.manual_seed(0)
    weights = [torch.randn(24, 24) for _ in range(2)]
    gradient = torch.randn(24, 24)

    def after(*groups: dict) -> list[Tensor]:
        params = [nn.Parameter(weight.clone()) for weight in weights]
        for param in params:
            param.grad = gradient.clone()
        pairs = [{"params": [param], **group} for param, group in zip(params, groups, strict=True)]
        MuonOptimizer(pairs, momentum=0.0).step()
        return [param.detach() for param in params]

    few, many = {"orthogonalization": "keller", "ns_steps": 3}, {"orthogonalization": "exact"}
    mixed = after(few, many)
    torch.testing.assert_close(mixed[0], after(few, few)[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(mixed[1], after(many, many)[1], rtol=0, atol=1e-6)
    assert not torch.allclose(mixed[0] - weights[0], mixed[1] - weights[1], atol=1e-3)


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
    directions = Muon.directions

    def noted(self, batches):
        seen.extend(map(weakref.ref, batches))
        directions(self, batches)

    monkeypatch.setattr(Muon, "directions", noted)
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
