"""Band and slope of the stored chains in emulated half precision: ranks, shapes, norms and a neighbour that is NaN."""

from __future__ import annotations

import pytest
import torch

from experiments.emulation import kernels_in_half_precision
from muon_fsdp.benchmarks.accuracy import make_probe, measure_accuracy
from muon_fsdp.linalg import chains
from muon_fsdp.linalg.chains import Chain, Step, StoredChains
from muon_fsdp.linalg.newton_schulz import _chain, orthogonalize
from tests.comparisons import assert_same

# Where singular values from 4e-3 of the norm end, and the slope at zero relative to the norm: for square and wide.
BANDS = {"accurate": (0.9955, 1.0045), "fast": (0.65, 1.35)}
SLOPES = {"accurate": (481.0, 543.0), "fast": (650.0, 650.0)}
SHAPES = [(65, 65), (65, 1024), (300, 70), (128, 128), (256, 1000), (400, 300), (320, 768), (768, 300)]


def in_half(matrices: torch.Tensor, method: str) -> torch.Tensor:
    with kernels_in_half_precision():
        return orthogonalize(matrices, method=method)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def check_probe(method: str, shape: tuple[int, int]) -> None:
    rows, cols = min(shape), max(shape)
    found = measure_accuracy(lambda matrices: in_half(matrices, method), make_probe(*shape, "cpu", torch.float32))
    low, high = BANDS[method]
    assert low < found["low"] <= found["high"] < high
    is_wide = rows > 256 and cols >= 5 / 3 * rows
    assert found["slope"] == pytest.approx(SLOPES[method][is_wide], rel=0.02)


@pytest.mark.parametrize("method", BANDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_band_and_slope(shape, method):
    check_probe(method, shape)


@pytest.mark.parametrize("method", BANDS)
@pytest.mark.parametrize("rank", [1, 2, 16, 64])
@pytest.mark.parametrize("shape", [(65, 200), (256, 256), (300, 640)])
def test_ranks(shape, rank, method):
    matrix = random(shape[0], rank) @ random(rank, shape[1])
    u, values, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    large = values > 4.1e-3 * values.norm()
    result = in_half(matrix, method).double()
    inner = torch.linalg.svdvals(u[:, large].mT @ result @ vh[large].mT)
    low, high = BANDS[method]
    assert low < inner.min()
    assert torch.linalg.matrix_norm(result, 2) < high  # rounding makes no direction larger than these


@pytest.mark.parametrize("method", BANDS)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8])
def test_few_rows_that_are_not_zero(num_rows, method):
    matrix = torch.zeros(128, 300)
    matrix[5 : 5 + num_rows] = random(num_rows, 300)
    values = torch.linalg.svdvals(in_half(matrix, method).double())
    low, high = (0.97, 1.03) if method == "accurate" else BANDS[method]  # the rounding of X weighs more here
    assert low < values[:num_rows].min()
    assert values.max() < high
    assert values[num_rows:].max() < 1e-12


@pytest.mark.parametrize("method", BANDS)
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_norms(size, method):
    matrices = random(2, 70, 90)
    difference = in_half(matrices * size, method) - in_half(matrices, method)
    assert torch.linalg.matrix_norm(difference, 2).max() < (1e-2 if method == "accurate" else 0.05)


@pytest.mark.parametrize("method", BANDS)
@pytest.mark.parametrize("shape", [(70, 70), (300, 640)])
def test_a_matrix_that_is_nan_leaves_the_others_untouched(shape, method):
    matrices = random(3, *shape)
    expected = in_half(matrices, method)
    matrices[1, 3, 4] = torch.nan
    result = in_half(matrices, method)
    assert result[1].isnan().all()
    assert_same(result[::2], expected[::2])


@pytest.mark.parametrize("product", range(4))
@pytest.mark.parametrize("number", [0, 1])
def test_a_wrong_coefficient_is_seen(monkeypatch, number, product):
    """A change of 10% in any leading coefficient leaves the band or changes the slope."""
    steps = list(chains.FAST_CHAIN.steps)
    products = list(steps[number].products)
    alpha, beta, gamma = products[product]
    products[product] = (1.1 * alpha, beta, gamma)
    steps[number] = Step(33, tuple(products), steps[number].identity)
    broken = Chain(tuple(steps), chains.FAST_CHAIN.refreshes)
    monkeypatch.setitem(chains.STORED_CHAINS, "fast", StoredChains(broken, broken))
    _chain.cache_clear()
    try:
        with pytest.raises((AssertionError, torch.linalg.LinAlgError)):  # the latter if it diverges
            check_probe("fast", (128, 128))
    finally:
        _chain.cache_clear()
