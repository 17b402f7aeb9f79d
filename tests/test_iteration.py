"""Chains of Newton-Schulz steps on batches of matrices: their memory, their powers of two, and merged batches."""

from __future__ import annotations

import itertools
import weakref
from typing import get_args

import pytest
import torch
from torch import Tensor

from experiments.chains import evaluate
from muon_fsdp.kernels import products
from muon_fsdp.kernels.launch import Addend
from muon_fsdp.linalg import iteration
from muon_fsdp.linalg.chains import FAST_CHAIN, SQUARE_CHAIN, STORED_CHAINS, WIDE_CHAIN, Chain, Step
from muon_fsdp.linalg.coefficients import DEFAULT_STEPS, WHOLE_SETS, coefficients
from muon_fsdp.linalg.iteration import Exact, Operand, iterate, scaled_steps, square_matrices, x_scale
from muon_fsdp.linalg.newton_schulz import (
    ORTHOGONALIZATIONS,
    Form,
    Request,
    _chain,
    orthogonalize,
    orthogonalize_together,
)
from muon_fsdp.plan.costs import scratch_numel

LARGEST_HALF = torch.finfo(torch.float16).max
NUM_PRODUCTS = {5: 1, 9: 2, 17: 3, 33: 4}  # by degree


def quintics(method: str, steps: int, refreshes: set[int]) -> Chain:
    chain = tuple(Step(5, ((c, b, 0.0),), a) for a, b, c in coefficients(method, steps))
    return Chain(chain, frozenset(refreshes))


def toy_step(degree: int) -> Step:
    """Return a step whose coefficients are of order one and all different."""
    numbers = [(0.3 + 0.1 * k, -0.4 + 0.15 * k, 0.2 * k) for k in range(NUM_PRODUCTS[degree])]
    return Step(degree, tuple(numbers), 0.9)


def polar_of(matrices: Tensor, chain: Chain) -> Tensor:
    """Return what the chain makes of the singular values, by an SVD."""
    u, values, vh = torch.linalg.svd(matrices, full_matrices=False)
    for step in chain.steps:
        values = evaluate(step, values)
    return u * values.unsqueeze(-2) @ vh


def run(matrices: Tensor, chain: Chain) -> Tensor:
    out = torch.empty_like(matrices)
    iterate([Operand(matrices, Exact(matrices), 1.0, out)], scaled_steps(chain, half=False))
    return out


def all_chains(most: int):
    for length in range(1, most + 1):
        for degrees in itertools.product(NUM_PRODUCTS, repeat=length):
            for flags in itertools.product((False, True), repeat=length - 1):
                refreshes = {number for number, flag in enumerate(flags, start=1) if flag}
                yield Chain(tuple(map(toy_step, degrees)), frozenset(refreshes))


def test_no_matrix_is_overwritten_while_it_is_needed():
    torch.manual_seed(0)
    matrices = torch.randn(1, 2, 3, dtype=torch.float64)
    matrices /= torch.linalg.matrix_norm(matrices)
    long = [Chain((toy_step(17),) * 13, frozenset()), Chain((toy_step(9), toy_step(17)) * 6, frozenset())]
    long.append(quintics("default", 12, set()))
    for chain in (*all_chains(3), *long):
        torch.testing.assert_close(run(matrices, chain), polar_of(matrices, chain), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", [name for name in ORTHOGONALIZATIONS if name != "exact"])
def test_the_plan_knows_the_scratch_of_every_chain(method, monkeypatch):
    """`scratch_numel` has four Gram matrices. Where X is refreshed after every step, three are enough."""
    used: dict[int, Tensor] = {}  # by address; none is released, so that no two have the same one
    take = iteration._SquareMatrices.take

    def noted(pool):
        result = take(pool)
        used[result.data_ptr()] = result
        return result

    monkeypatch.setattr(iteration._SquareMatrices, "take", noted)
    shapes, forms = [(64, 64), (384, 384), (384, 1024), (1024, 4096)], get_args(Form)
    most = 0
    for (rows, cols), form, half, steps in itertools.product(shapes, forms, (False, True), range(1, 9)):
        if steps != DEFAULT_STEPS and (method in STORED_CHAINS or method in WHOLE_SETS):
            continue
        chain = _chain(method, steps, rows, cols, form, half)
        used.clear()
        run(torch.eye(3, 5).expand(2, 3, 5) / 3, chain)
        assert len(used) == square_matrices(chain)
        most = max(most, len(used))
        if chain.refreshes.issuperset(range(1, len(chain.steps))):
            assert len(used) <= 3
    assert most <= (scratch_numel(7, 9) - 2 * 7 * 9) / 7**2


@pytest.mark.parametrize("method", ["default", "fast", "keller"])
def test_an_iterate_is_released_when_the_next_one_is_there(method, monkeypatch):
    """So a step needs room for all batches and one more; batches of another size are normalized after these."""
    seen: dict[int, weakref.ref[Tensor]] = {}  # iterates, by address
    alive: list[int] = []
    multiply = iteration.multiply_add

    def noted(left, right, addend, **options):
        x = left if left.shape[-2] > left.shape[-1] else right
        result = multiply(left, right, addend, **options)
        for each in (x, result) if options["out"] is None else (x,):
            seen[each.data_ptr()] = weakref.ref(each)
        alive.append(sum(each() is not None for each in seen.values()))
        return result

    monkeypatch.setattr(iteration, "multiply_add", noted)
    batches = [torch.randn(shape) for shape in [(2, 8, 24), (2, 24, 8), (2, 8, 24), (3, 10, 12), (1, 12, 10)]]
    outs = [torch.empty_like(batch, dtype=torch.bfloat16) for batch in batches]  # they can't hold iterates
    orthogonalize_together([Request(*each) for each in zip(batches, outs, strict=True)], method=method)
    assert len(alive) > len(batches)
    assert max(alive) == 3 + 1


@pytest.mark.parametrize("form", ["auto", "standard", "gram"])
@pytest.mark.parametrize(("method", "steps"), [("default", 5), ("default", 1), ("keller", 12), ("polar_express", 8)])
def test_together_is_the_same_as_one_by_one(method, steps, form):
    torch.manual_seed(1)
    batches = [torch.randn(shape) for shape in [(2, 24, 24), (1, 24, 40), (3, 60, 24), (1, 24, 25), (2, 8, 24)]]
    norms = 1 / torch.linalg.matrix_norm(batches[0])
    outs = [torch.empty_like(batch) for batch in batches]
    requests = [
        Request(batch, out, 1.0 + number, norms if number == 0 else None)
        for number, (batch, out) in enumerate(zip(batches, outs, strict=True))
    ]
    orthogonalize_together(requests, method=method, steps=steps, form=form)
    for number, (batch, out) in enumerate(zip(batches, outs, strict=True)):
        alone = orthogonalize(batch, method=method, steps=steps, form=form, factor=1.0 + number)
        assert torch.equal(out, alone), (number, (out - alone).abs().max())


@pytest.mark.parametrize("steps", range(1, 8))
@pytest.mark.parametrize("form", ["auto", "standard", "gram"])
def test_where_the_result_is_written_does_not_change_it(form, steps):
    torch.manual_seed(2)
    matrices = torch.randn(2, 12, 30)
    expected = orthogonalize(matrices, steps=steps, form=form)
    strided = torch.empty(2, 30, 12).mT
    part = torch.empty(3, 12, 30)[1:]
    for out in (torch.empty_like(matrices), strided, part):
        assert torch.equal(orthogonalize(matrices, steps=steps, form=form, out=out), expected)
    wide = orthogonalize(matrices, steps=steps, form=form, out=torch.empty_like(matrices, dtype=torch.float64))
    torch.testing.assert_close(wide, expected.double(), rtol=1e-6, atol=1e-7)
    before = matrices.clone()
    recorded = orthogonalize(matrices.clone().requires_grad_(), steps=steps, form=form)
    torch.testing.assert_close(recorded.detach(), expected)
    assert torch.equal(matrices, before)
    assert torch.equal(orthogonalize(matrices, steps=steps, form=form, out=matrices), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["default", "fast", "keller", "polar_express", "deepseek_v4"])
def test_iterates_may_lie_in_the_memory_of_the_matrices(method, dtype):
    """The first refresh reads the matrices where it writes. With an odd number of refreshes this saves nothing."""
    torch.manual_seed(4)
    used = []
    for shape in [(2, 24, 24), (2, 24, 70), (1, 70, 24), (1, 300, 640), (1, 640, 300), (3, 1, 7)]:
        matrices, out = torch.randn(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        expected, before = orthogonalize(matrices, method=method, factor=0.5), matrices.clone()
        orthogonalize_together([Request(matrices, out, 0.5)], method=method)
        assert torch.equal(out, expected)
        assert torch.equal(matrices, before)
        out = torch.full_like(out, torch.nan)
        orthogonalize_together([Request(matrices, out, 0.5, overwrites=True)], method=method)
        assert torch.equal(out, expected)
        used.append(not torch.equal(matrices, before))
        strided = before.mT.contiguous().mT  # what is iterated is a copy
        assert torch.equal(orthogonalize(strided, method=method, factor=0.5), expected)
        assert torch.equal(strided, before)
    assert {"default": used[3:5] == [True, True] and not any(used[:3]), "fast": all(used)}.get(method, any(used))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_matrices_of_another_precision_are_never_overwritten(dtype):
    torch.manual_seed(5)
    matrices = torch.randn(2, 24, 70).to(dtype)
    before, out = matrices.clone(), torch.empty(2, 24, 70)
    expected = orthogonalize(matrices, method="fast", out=torch.empty_like(out))
    orthogonalize_together([Request(matrices, out, overwrites=True)], method="fast")
    assert torch.equal(out, expected)
    assert torch.equal(matrices, before)
    recorded = matrices.float().requires_grad_()
    orthogonalize_together([Request(recorded, out := torch.empty(2, 24, 70), overwrites=True)], method="fast")
    assert torch.equal(recorded, before.float())
    assert out.requires_grad


def test_empty_batches_are_left_out():
    torch.manual_seed(3)
    matrices, out = torch.randn(2, 4, 6), torch.empty(2, 4, 6)
    nothing = torch.empty(0, 4, 6)
    orthogonalize_together([Request(nothing, nothing.clone()), Request(matrices, out)])
    assert torch.equal(out, orthogonalize(matrices))
    assert orthogonalize(torch.empty(3, 0, 6)).shape == (3, 0, 6)


# ------------------------------------------------------------------------------------------------------ half precision


def rounded(x: Tensor) -> Tensor:
    """Return numbers as float16 stores them, and check that it can."""
    assert x.abs().max() < LARGEST_HALF / 2  # a symmetrized matrix is half the sum of two
    return x.to(torch.float16).to(torch.float64)


def emulated_symmetric(a, b, addends=(), *, alpha=1.0, transposed=False, active=None, out=None):
    product = alpha * (a.mT @ b if transposed else a @ b.mT)
    for matrices, factor in addends:
        product = rounded(product + factor * matrices)  # after every addend, as PyTorch's library
    product = rounded(product)
    return out.copy_(product if a is b else rounded((product + product.mT) / 2))


def emulated_multiply_add(a, b, c, *, alpha, c_scale=None, factor=1.0, out=None, active=None):
    result = factor * rounded(alpha * a @ b + c.factor * c.matrices)
    return result if out is None else out.copy_(result)


HALF_CHAINS = {
    "square": SQUARE_CHAIN,
    "wide": WIDE_CHAIN,
    "fast": FAST_CHAIN,
    "wide in the standard form": Chain(WIDE_CHAIN.steps, frozenset(range(1, 5))),
    "square with one refresh": Chain(SQUARE_CHAIN.steps, frozenset({2})),
    **{
        f"{method} {steps} {between}": quintics(method, steps, set(range(between, steps, between)))
        for method in ("default", "keller", "polar_express", "quintic")
        for steps in (1, 4, 12)
        for between in (1, 3)
    },
}


@pytest.mark.parametrize("name", HALF_CHAINS)
def test_float16_never_overflows(monkeypatch, name):
    """Matrices of rank one have the largest entries, and a diagonal one reaches the bound of every Gram matrix."""
    monkeypatch.setattr(iteration, "symmetric_product", emulated_symmetric)
    monkeypatch.setattr(iteration, "multiply_add", emulated_multiply_add)
    torch.manual_seed(4)
    single = torch.zeros(16, 20, dtype=torch.float64)
    single[3, 5] = 1
    outer = torch.ones(16, 20, dtype=torch.float64)
    spread = torch.diag_embed(torch.logspace(0, -5, 16, dtype=torch.float64)) @ torch.eye(16, 20, dtype=torch.float64)
    batch = torch.stack([single, outer, spread, torch.randn(16, 20, dtype=torch.float64)])
    exact = batch * (x_scale(True) / torch.linalg.matrix_norm(batch, keepdim=True))
    x, out = rounded(exact), torch.empty_like(exact)
    iterate([Operand(x, Exact(exact), 1.0, out)], scaled_steps(HALF_CHAINS[name], half=True))
    expected = polar_of(exact / x_scale(True), HALF_CHAINS[name])
    assert out.isfinite().all()
    # The polynomials of the fast chain oscillate, so rounding moves values within its band.
    bound = 0.25 if name == "fast" else 0.1
    assert torch.linalg.matrix_norm(out[0] - expected[0], ord=2) < bound
    assert torch.linalg.matrix_norm(out[1] - expected[1], ord=2) < bound


def test_the_library_in_half_precision_follows_float64():
    """Entries of a normalized matrix may be below the normal numbers of float16, and must not be rounded there."""
    torch.manual_seed(5)
    a, b = (torch.randn(2, 16, 16).half() / 16 for _ in range(2))
    c = torch.randn(2, 16, 16) * 1e3
    c_scale = torch.tensor([3e-9, 2e-9])  # so that the entries are near 3e-6
    beta = 2.0**10
    found = products.multiply_add(a, b, Addend(c, beta), alpha=2.0**-16, c_scale=c_scale)
    expected = 2.0**-16 * a.double() @ b.double() + beta * c_scale.double()[:, None, None] * c.double()
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-6)

    large = 2.0**11 * torch.eye(16).half().expand(2, 16, 16).contiguous()
    gram = products.symmetric_product(large, large, alpha=2.0**-8)  # without alpha it would overflow
    torch.testing.assert_close(gram.double(), 2.0**14 * torch.eye(16).double().expand(2, 16, 16))
    other = torch.full((2, 16, 16), 2.0**-4).half()
    mixed = products.symmetric_product(gram, other, [Addend(gram, 0.5), Addend(other, 4.0)], alpha=2.0**-6)
    reference = 2.0**-6 * gram.double() @ other.double() + 0.5 * gram.double() + 4 * other.double()
    torch.testing.assert_close(mixed.double(), reference, rtol=2e-3, atol=0)
    assert torch.equal(mixed, mixed.mT)


def test_iterates_in_half_precision_by_the_library():
    """The whole iteration, as GPUs without our kernels compute it."""
    torch.manual_seed(6)
    batch = torch.randn(2, 96, 200)
    exact = batch * (x_scale(True) / 1.01 / torch.linalg.matrix_norm(batch, keepdim=True))
    out = torch.empty_like(batch)
    iterate([Operand(exact.half(), Exact(exact), 1.0, out)], scaled_steps(WIDE_CHAIN, half=True))
    u, _, vh = torch.linalg.svd(batch.double(), full_matrices=False)
    assert (out - u @ vh).abs().max() < 5e-3


@pytest.mark.parametrize("half", [False, True])
def test_factors_of_a_divergent_chain_are_finite_numbers_or_raise_nothing(half):
    step = Step(5, ((1e80, 1e80, 0.0),), 1e80)
    scaled_steps(Chain((step,) * 8, frozenset()), half)  # the grid overflows, and no power of two fits
