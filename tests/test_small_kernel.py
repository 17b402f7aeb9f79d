"""The kernel that orthogonalizes small matrices at once, against float64: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from muon_fsdp.kernels import triton_norms, triton_small
from muon_fsdp.kernels.triton_small import MAX_ROWS, orthogonalize_small
from tests.comparisons import assert_same
from tests.kernel_cases import DEVICE
from tests.small_cases import CHAINS, MARGIN, errors, families, reference

# The kernel overflows on purpose where its estimate of a size is wrong, and NumPy warns of that in the interpreter.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.no_cover,  # coverage makes the interpreter of kernels more than twice as slow
]
GUARD = 64  # elements before and behind a result that nothing may be written to
MAIN = CHAINS["17|17,9"]
# Up to 64 rows everything is computed to 22 bits. Above, iterates and their factors are rounded to float16.
EXACT, ROUNDED = 3e-4, 6e-3


def run(batch, chain=MAIN, *, factor=1.0, inverse_norms=None, dtype=torch.float32, config=None):
    memory = torch.full((batch.numel() + 2 * GUARD,), torch.nan, device=DEVICE, dtype=dtype)
    out = memory[GUARD:-GUARD].view(batch.shape)
    norms = orthogonalize_small(batch, *chain, MARGIN, factor, inverse_norms, out, config)
    if inverse_norms is None:
        expected = 1 / torch.linalg.matrix_norm(batch.double())
        finite = expected.isfinite() & (expected < 1e38) & (expected > 0)
        torch.testing.assert_close(norms[finite].double(), expected[finite], rtol=2e-3, atol=0)
    else:
        assert norms is inverse_norms
    assert memory[:GUARD].isnan().all()
    assert memory[-GUARD:].isnan().all()
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("rows", "cols"),
    [(7, 30), (50, 200), (64, 333), (100, 200), (128, 333), (200, 64), (129, 99), (1, 9)],
)
def test_families_follow_float64(rows, cols, dtype):
    batch, kinds = families(rows, cols, DEVICE)
    batch = batch.to(dtype)
    found = errors(run(batch), reference(batch, MAIN[0]))
    tolerance = EXACT if min(rows, cols) <= 64 else ROUNDED
    assert found.max() < tolerance, dict(zip(kinds, found.tolist(), strict=True))


@pytest.mark.parametrize("name", list(CHAINS))
@pytest.mark.parametrize("rows", [33, 90])
def test_every_degree_and_any_refreshes(name, rows):
    steps, refreshes = CHAINS[name]
    batch = torch.randn(2, rows, 150, device=DEVICE)
    rounded = 3e-3 if name == "33|33" else 1e-3  # its polynomials are steeper
    assert errors(run(batch, (steps, refreshes)), reference(batch, steps)).max() < (EXACT if rows <= 64 else rounded)


@pytest.mark.parametrize("rows", [64, 128])
def test_the_fast_chain_leaves_its_band(rows):
    batch, kinds = families(rows, 200, DEVICE)
    found = run(batch, CHAINS["33|33"]).double()
    u, values, vh = torch.linalg.svd(batch.double(), full_matrices=False)
    for kind, left, s, right, result in zip(kinds, u, values, vh, found, strict=True):
        assert torch.linalg.matrix_norm(result, 2) < 1.36, kind
        large = s > 4.1e-3 * s.norm()
        if kind != "zero":
            assert torch.linalg.svdvals(left[:, large].mT @ result @ right[large].mT).min() > 0.64, kind


@pytest.mark.parametrize("size", [1e-35, 1e-20, 1e20, 1e37])
def test_any_size(size):
    batch = torch.randn(2, 20, 40, device=DEVICE) * size
    expected = reference(batch, MAIN[0])
    assert errors(run(batch), expected).max() < EXACT
    inverse = (1 / torch.linalg.matrix_norm(batch.double())).float()
    assert errors(run(batch, inverse_norms=inverse), expected).max() < EXACT


@pytest.mark.parametrize("size", [1e-37, 4e-39, 1e-41, 0.0])
def test_tiny_matrices_stay_finite(size):
    batch = torch.randn(2, 20, 40, device=DEVICE) * size
    for inverse in (None, triton_norms.inverse_norms(batch)):
        result = run(batch, inverse_norms=inverse)
        assert result.isfinite().all()
        assert float(torch.linalg.matrix_norm(result, 2).max()) < 1.01


def test_norms_that_the_caller_gives_are_used():
    batch = torch.randn(3, 20, 40, device=DEVICE)
    inverse = 1 / torch.linalg.matrix_norm(batch)
    assert errors(run(batch, inverse_norms=inverse), reference(batch, MAIN[0])).max() < EXACT
    halved = run(batch, inverse_norms=inverse / 2)
    assert errors(halved, reference(batch, MAIN[0], 2 * MARGIN)).max() < EXACT


def test_a_matrix_that_is_not_finite_spoils_no_other():
    batch = torch.randn(4, 20, 30, device=DEVICE)
    alone = run(batch)
    batch[1, 3, 4] = torch.nan
    batch[2, 19, 29] = torch.inf
    for inverse_norms in (None, 1 / torch.linalg.matrix_norm(batch)):
        result = run(batch, inverse_norms=inverse_norms)
        assert result[1:3].isnan().all()
        assert errors(result[::3], alone[::3].double()).max() < EXACT


def test_a_single_entry_decides_a_singular_value():
    """Two rows differ by 1% in one entry, so their difference is 1e-3 of the Frobenius norm."""
    batch = torch.ones(1, 2, 40, device=DEVICE)
    batch[0, 1, 7] += 1e-2
    result = run(batch)
    assert errors(result, reference(batch, MAIN[0])).max() < 5e-3
    assert torch.linalg.svdvals(result)[0, 1] > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_factor_and_dtype_of_the_result(dtype):
    batch = torch.randn(2, 40, 20, device=DEVICE).to(torch.float16)
    result = run(batch, factor=-0.25, dtype=dtype)
    assert errors(result, -0.25 * reference(batch, MAIN[0])).max() < 2 * torch.finfo(dtype).eps + EXACT


@pytest.mark.parametrize("split_from", [0, 1, 3])
def test_split_products_are_more_accurate(split_from):
    batch = torch.randn(1, 100, 160, device=DEVICE)
    config = triton_small.SmallConfig(32, 8, 2, split_from)
    error = float(errors(run(batch, config=config), reference(batch, MAIN[0])))
    assert (error < 4e-4) == (split_from < 3)


def test_one_launch_and_no_other_operation(monkeypatch):
    launched = []
    launch = triton_small.launch
    monkeypatch.setattr(triton_small, "launch", lambda k, *a, **o: launched.append(k.fn.__name__) or launch(k, *a, **o))
    batch = torch.randn(5, 8, 16, device=DEVICE)
    first = run(batch)
    assert launched == ["_small_kernel"]
    assert_same(run(batch), first)


def test_when_it_is_faster(monkeypatch):
    monkeypatch.setattr(triton_small, "num_processors", lambda device: 132)
    device = torch.device(DEVICE)
    assert triton_small.is_faster(128, 128, 4096, device)
    assert triton_small.is_faster(1024, 4096, 64, device)
    assert not triton_small.is_faster(1000, MAX_ROWS + 1, 4096, device)
    assert not triton_small.is_faster(4, 128, 4096, device)
