"""Orthogonalization on a GPU is as accurate as promised, in half precision, for spectra and sizes of all kinds."""

from __future__ import annotations

import pytest
import torch

from muon_fsdp.benchmarks.accuracy import make_probe, measure_accuracy
from muon_fsdp.linalg.newton_schulz import GRAM_ASPECT_RATIO, orthogonalize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(128, 128), (128, 640), (640, 128), (256, 1024), (512, 512), (512, 1536), (768, 3072), (1024, 1024)]
LARGE_SHAPES = [(4096, 1024), (2048, 8192), (4096, 4096)]


def make_matrix(kind, rows, cols):
    """Return a float32 matrix with rows <= cols and a spectrum of this kind."""
    generator = torch.Generator("cuda").manual_seed(rows + cols)

    def gaussian(*size):
        return torch.randn(*size, device="cuda", generator=generator)

    if kind == "gaussian":
        return gaussian(rows, cols)
    if kind == "low rank":
        return gaussian(rows, 16) @ gaussian(16, cols) / 4 + 0.01 * gaussian(rows, cols)
    if kind == "rank 1":
        return gaussian(rows, 1) @ gaussian(1, cols)
    u, v = torch.linalg.qr(gaussian(rows, rows))[0], torch.linalg.qr(gaussian(cols, rows))[0]
    numbers = torch.arange(1, rows + 1, device="cuda")
    values = 1 / numbers if kind == "1/k" else torch.logspace(0, -4, rows, device="cuda")
    return (u * values) @ v.mT


@pytest.mark.parametrize("shape", SHAPES + LARGE_SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gaussian", "low rank", "rank 1", "log-uniform", "1/k"])
def test_accuracy(shape, dtype, kind):
    rows, cols = min(shape), max(shape)
    matrix = make_matrix(kind, rows, cols)
    matrix = (matrix if rows == shape[0] else matrix.mT).to(dtype).contiguous()
    out = torch.full(shape, torch.nan, device="cuda", dtype=torch.float32)
    orthogonalize(matrix, out=out)
    expected = orthogonalize(matrix.double(), form="standard")
    # Rounding matters most at rank 1, where it makes all directions but one.
    assert (out - expected).norm() / expected.norm() < (1.2e-2 if kind == "rank 1" else 5e-3)
    if rows > 1024:
        return  # an SVD in float64 takes too long
    # Singular values that are large enough come out at 1, in their own directions.
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    large = s > 4.1e-3 * s.norm()
    assert large.any()
    values = torch.einsum("ik,ij,kj->k", u[:, large], out.double(), vh[large])
    assert (values - 1).abs().max() < (2.5e-3 if cols < GRAM_ASPECT_RATIO * rows else 4e-3)


@pytest.mark.parametrize("shape", [(65, 65), *SHAPES, (2048, 8192), (4096, 4096)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gaussian", "low rank", "rank 1", "log-uniform", "1/k"])
def test_the_fast_chain_stays_in_its_band(shape, dtype, kind):
    matrix = make_matrix(kind, min(shape), max(shape))
    matrix = (matrix if shape[0] <= shape[1] else matrix.mT).to(dtype).contiguous()
    result = orthogonalize(matrix, method="fast", out=torch.empty(shape, device="cuda")).double()
    assert torch.linalg.matrix_norm(result, 2) < 1.36
    if min(shape) > 1024:
        return  # an SVD in float64 takes too long
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    large = s > 4.1e-3 * s.norm()
    assert torch.linalg.svdvals(u[:, large].mT @ result @ vh[large].mT).min() > 0.64


@pytest.mark.parametrize("method", ["accurate", "fast"])
@pytest.mark.parametrize("shape", [(65, 65), (128, 4096), (512, 512), (768, 3072)])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_band_slope_and_a_neighbour_that_is_nan(shape, method, size):
    probe = make_probe(*shape, "cuda", torch.float32)
    batch = (probe.matrices * size).repeat(3, 1, 1)
    batch[1, 0, 0] = torch.nan
    found = orthogonalize(batch, method=method)
    assert found[1].isnan().all()
    low, high = (0.65, 1.35) if method == "fast" else (0.995, 1.005)
    for result in found[::2]:
        accuracy = measure_accuracy(lambda _, result=result: result[None], probe)
        assert low < accuracy["low"] <= accuracy["high"] < high
        assert accuracy["slope"] == pytest.approx(
            650 if method == "fast" else 512, rel=0.02 if method == "fast" else 0.08
        )


@pytest.mark.parametrize("shape", [(128, 128), (256, 256), (768, 3072)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_row_sparse_input(shape, dtype, num_rows):
    """With so few directions, the rounding of X weighs more than in all other matrices."""
    matrix = torch.zeros(shape, device="cuda", dtype=dtype)
    matrix[:num_rows] = make_matrix("gaussian", num_rows, shape[1])
    out = orthogonalize(matrix, out=torch.empty(shape, device="cuda"))
    expected = orthogonalize(matrix.double(), form="standard")
    assert (out - expected).norm() / expected.norm() < 3e-2


def test_the_largest_matrix():
    """Entries of X and of its Gram matrix would be below the normal numbers of float16 without powers of two."""
    matrix = torch.randn(16384, 53248, device="cuda", dtype=torch.bfloat16)
    out = orthogonalize(matrix, out=torch.empty_like(matrix, dtype=torch.float16))
    gram = out @ out.mT
    assert (gram.diagonal() - 1).abs().max() < 8e-3
    gram.diagonal().zero_()
    assert gram.float().norm() / 16384**0.5 < 8e-3


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_scaled_input(scale):
    matrix = make_matrix("log-uniform", 512, 2048)
    expected = orthogonalize(matrix.double() * scale)
    assert (orthogonalize(matrix * scale) - expected).norm() / expected.norm() < 5e-3
