"""The kernel that orthogonalizes small matrices at once, on a GPU: accuracy at the sizes of attention heads, graphs."""

from __future__ import annotations

import pytest
import torch

from tests.comparisons import assert_same
from tests.small_cases import CHAINS, MARGIN, errors, families, reference

CUDA = torch.device("cuda")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from muon_fsdp.kernels.triton_norms import inverse_norms
    from muon_fsdp.kernels.triton_small import orthogonalize_small

MAIN = CHAINS["17|17,9"]


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def run(batch, norms=None, dtype=torch.float32, chain=MAIN):
    out = torch.full(batch.shape, torch.nan, device=CUDA, dtype=dtype)
    orthogonalize_small(batch, *chain, MARGIN, 1.0, norms, out)
    return out


# A kernel takes up to 16 seconds to compile, so there are few combinations.
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((128, 128, 4096), torch.bfloat16),
        ((1024, 64, 4096), torch.bfloat16),
        ((1024, 64, 4096), torch.float32),
        ((128, 4096, 128), torch.bfloat16),
    ],
)
def test_batches_of_heads_follow_float64(shape, dtype):
    generator = torch.Generator(CUDA).manual_seed(0)
    batch = torch.randn(shape, device=CUDA, generator=generator).to(dtype)
    tolerance = 5e-4 if min(shape[1:]) == 64 else 1.5e-3
    for norms in (None, inverse_norms(batch)):
        result = run(batch, norms)
        for part, expected in zip(result.split(64), batch.split(64), strict=True):  # float64 of all needs much memory
            assert errors(part, reference(expected, MAIN[0])).max() < tolerance


@pytest.mark.parametrize(
    ("rows", "cols", "dtype"),
    [
        (128, 4096, torch.bfloat16),
        (768, 64, torch.float32),
        (64, 768, torch.float16),
    ],
)
def test_families_follow_float64(rows, cols, dtype):
    batch, kinds = families(rows, cols, CUDA)
    batch = (batch * (1e-2 if dtype == torch.float16 else 1.0)).to(dtype)  # the largest entry is 1e6
    found = errors(run(batch), reference(batch, MAIN[0]))
    assert found.max() < (2e-3 if min(rows, cols) <= 64 else 1e-2), dict(zip(kinds, found.tolist(), strict=True))


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("rows", [64, 128])
def test_every_degree_and_any_refreshes(name, rows):
    steps, refreshes = CHAINS[name]
    batch = torch.randn(8, rows, 512, device=CUDA)
    tolerance = 5e-3 if name == "33|33" else 2e-3  # its polynomials are steeper
    assert errors(run(batch, chain=(steps, refreshes)), reference(batch, steps)).max() < tolerance


@pytest.mark.parametrize("size", [1e-35, 1e-20, 1e20, 1e37])
def test_any_size(size):
    batch = torch.randn(8, 128, 256, device=CUDA) * size
    assert errors(run(batch), reference(batch, MAIN[0])).max() < 2e-3


def test_a_matrix_that_is_not_finite_spoils_no_other():
    batch = torch.randn(300, 128, 256, device=CUDA)
    alone = run(batch)
    batch[1, 3, 4] = torch.nan
    batch[299, 127, 255] = torch.inf
    result = run(batch)
    assert result[[1, 299]].isnan().all()
    others = [0, *range(2, 299)]
    assert_same(result[others], alone[others])


def test_graphs():
    batch = torch.randn(40, 128, 1024, device=CUDA, dtype=torch.bfloat16)
    expected = run(batch, dtype=torch.bfloat16)
    out = torch.empty_like(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        orthogonalize_small(batch, *MAIN, MARGIN, 1.0, None, out)
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert_same(out, expected)
