"""Kernels that survey weights on spheres against float64, on a GPU where there is one and else in the interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from muon_fsdp import SpectralSphereOptimizer
from muon_fsdp.declarations.views import matrix_view
from muon_fsdp.linalg import sphere, tangent
from muon_fsdp.plan.layout import Box, Layout
from muon_fsdp.plan.matrix_sets import blocks_of
from muon_fsdp.statistics import shard_products, top_singular
from muon_fsdp.step import fused

pytest.importorskip("triton")

from muon_fsdp.kernels import launch, triton_spectral, triton_subspace

pytestmark = pytest.mark.no_cover  # coverage makes the interpreter of kernels more than twice as slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape):
    return torch.randn(shape, device=DEVICE)


VIEWS = [
    ((21, 70), {"kind": "matrix"}),
    ((20, 34), {"kind": "matrix", "transposed": True}),
    ((130, 9), {"kind": "matrix", "split_sizes": (2, 80, 48)}),
    ((12, 10), {"kind": "matrix", "transposed": True, "num_heads": 2}),
    ((3, 64, 80), {"kind": "stacked"}),
    ((3, 20, 34), {"kind": "stacked", "transposed": True}),
    ((6, 3, 2, 5), {"kind": "flatten"}),
    ((6, 20), {"kind": "attn"}),
    ((1, 1), {"kind": "matrix"}),
]


@pytest.mark.parametrize(("shape", "options"), VIEWS)
@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        *((how, torch.float32) for how in ("whole", "rows", "inner", "strided")),
        ("rows", torch.bfloat16),
        ("inner", torch.float16),
    ],
)
def test_products_with_parts_of_weights(monkeypatch, shape, options, how, dtype):
    if DEVICE == "cpu":
        monkeypatch.setattr(shard_products, "unusable", lambda device: None)
    monkeypatch.setattr(triton_spectral, "launch", noting_launch(launched := []))
    view = matrix_view(shape, name="it", **options)
    placement = Shard(len(shape) - 1) if how == "inner" else Shard(0)
    layout = Layout((0, 1), (2,), (placement,)) if how in ("rows", "inner") else Layout((0,), (1,), (Shard(0),))
    box = layout.boxes(shape)[0]
    whole = torch.randn(shape, device=DEVICE).to(dtype)
    shard = whole[box.within(Box((0,) * len(shape), shape))].clone()
    if how == "strided":  # as a slice of a larger tensor, with a step
        shard = torch.randn(*shape[:-1], 2 * shape[-1] + 1, device=DEVICE).to(dtype)[..., 1::2].copy_(shard)
    part = torch.zeros_like(whole, dtype=torch.float64)
    part[box.within(Box((0,) * len(shape), shape))] = shard.double()
    blocks = blocks_of(0, view, box, [(index, 0) for index in range(len(view.block_shapes))])
    multiply = shard_products.ShardProducts(view.block_shapes, blocks, {0: shard})
    for most in (1, 16):
        vectors = [random(count, min(most, rows, cols), cols) for count, rows, cols in view.block_shapes]
        lefts = [random(count, min(most, rows, cols), rows) for count, rows, cols in view.block_shapes]
        found = multiply.left(vectors), multiply.right(lefts)
        for matrices, x, y, left, right in zip(view.split(part), vectors, lefts, *found, strict=True):
            for result, factor, matrix in ((left, x.double(), matrices.mT), (right, y.double(), matrices)):
                expected = factor @ matrix
                assert result.shape == expected.shape
                # Rounding a factor to float16 costs 2^-11 of every term; the terms themselves may cancel.
                torch.testing.assert_close(
                    result.double(), expected, rtol=0, atol=float((factor.abs() @ matrix.abs()).max()) * 2**-10
                )
    assert "_along_columns_kernel" in launched or how == "strided"


def noting_launch(launched):
    return lambda kernel, *args, **options: (
        launched.append(kernel.fn.__name__) or launch.launch(kernel, *args, **options)
    )


def test_weights_are_rounded_where_norms_are_taken():
    """To the nearest number: tensor cores cut off, which makes every product smaller."""
    torch.manual_seed(0)
    weights, ones = 1 + torch.rand(16, 512, device=DEVICE), torch.ones(1, 1, 512, device=DEVICE)
    blocks = blocks_of(0, matrix_view((16, 512), name="it", kind="matrix"), Box((0, 0), (16, 512)), [(0, 0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_products, "unusable", lambda device: None)
        (found,) = shard_products.ShardProducts([(1, 16, 512)], blocks, {0: weights}).left([ones])
    expected = weights.double().sum(1)
    assert float((found[0, 0].double() / expected - 1).abs().max()) < 5e-5  # cutting off would be 3e-4
    values = torch.tensor([0.0, -0.0, 1 + 2**-11, 1 - 2**-13, -3.3, 1e30, torch.inf, -torch.inf, torch.nan])
    rounded = shard_products._rounded(values)
    torch.testing.assert_close(rounded, values, rtol=2**-11, atol=0, equal_nan=True)
    assert not (rounded.view(torch.int32)[:-1] & 0x1FFF).any()


def spaces(shapes):
    """Return the layouts of vectors along the columns and along the rows of matrices of these shapes."""
    each = [(1, min(16, rows, cols), rows, cols) for rows, cols in shapes]
    cols = triton_subspace.Space.of([(count, b, n) for count, b, _, n in each], torch.device(DEVICE))
    return cols, triton_subspace.Space.of([(count, b, m) for count, b, m, _ in each], torch.device(DEVICE))


def flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def test_orthonormal_vectors():
    space, _ = spaces([(40, 600), (7, 9), (30, 20)])
    known = triton_subspace.orthonormal(space, flat([random(1, b, n) for _, b, n in space.shapes]))
    vectors = [random(1, b, n) * 1e-3 for _, b, n in space.shapes]
    vectors[0][:, 3] = vectors[0][:, 1] - 2 * vectors[0][:, 2]
    vectors[0][:, 5] = 0
    vectors[2][:, 4] = 1e-20
    new = triton_subspace.orthonormal(space, flat(vectors), known)
    for part, before, after in zip(vectors, space.split(known), space.split(new), strict=True):
        part, before, after = part[0].double(), before[0].double(), after[0].double()
        norms = after.norm(dim=-1)
        kept = norms > 0
        together = torch.cat([before, after[kept]])
        assert (together @ together.T - torch.eye(len(together), device=DEVICE)).abs().max() < 1e-3  # TF32
        rest = part - part @ torch.linalg.pinv(together) @ together
        assert float(rest.norm()) < 2e-3 * float(part.norm())  # nothing is lost
        assert len(together) <= part.shape[1]
    assert [int(part.norm(dim=-1).gt(0).sum()) for part in space.split(new)] == [14, 2, 4]


def test_refined_subspaces():
    """The best of what is spanned, against a singular value decomposition within it."""
    shapes = [(40, 70), (5, 130), (9, 1), (6, 7), (30, 40)]
    matrices = [random(*shape) for shape in shapes]
    matrices[3].zero_()
    matrices[4] = torch.outer(random(30), random(40)) * 1e-18
    cols, rows = spaces(shapes)
    vectors = [random(1, b, n) for _, b, n in cols.shapes]

    def left(vectors):
        return flat([x @ w.T for x, w in zip(cols.split(vectors), matrices, strict=True)])

    def right(lefts):
        return flat([y @ w for y, w in zip(rows.split(lefts), matrices, strict=True)])

    found = triton_subspace.refine(left, right, lambda sums: sums, cols, rows, flat(vectors))
    norms = triton_subspace.make_unit(cols, rows, found.right, found.left)
    parts = (cols.split(found.right, single=True), rows.split(found.left, single=True), cols.split(found.subspace))
    for w, x, norm, v, u, better in zip(matrices, vectors, norms, *parts, strict=True):
        wide, x = w.double(), x[0].double()
        basis = torch.linalg.qr(torch.cat([x, x @ wide.T @ wide / (wide.norm() ** 2).clamp_min(1e-300)]).T)[0]
        expected = torch.linalg.matrix_norm(wide @ basis, 2)
        assert float(norm) == pytest.approx(float(expected), rel=1e-3, abs=1e-30)
        torch.testing.assert_close(wide @ v[0].double(), float(norm) * u[0].double(), rtol=0, atol=2e-3 * float(norm))
        assert float(v.norm()) == pytest.approx(1, abs=1e-5)
        assert float(u.norm()) == pytest.approx(1 if w.any() else 0, abs=1e-5)
        rows_of_better = better[0].double()
        assert (rows_of_better.norm(dim=-1) - 1).abs().max() < 1e-3
        if w.any():  # the next subspace has the best vector
            q = torch.linalg.qr(rows_of_better.T)[0]
            assert float((q.T @ v[0].double()).norm()) > 0.999


def test_vectors_to_start_from_and_nan():
    space, other = spaces([(40, 70), (5, 130)])
    vectors = [random(1, b, n) for _, b, n in space.shapes]
    vectors[0][0, 3], vectors[1][0, 0, 1:], vectors[1][0, 1] = 0, 0, 0
    vectors[1][0, 2] = torch.nan
    starts = [random(b, n) for _, b, n in space.shapes]
    filled = flat(vectors)
    triton_subspace.fill(space, filled, flat(starts))
    vectors[0][0, 3], vectors[1][0, 1] = starts[0][3], starts[1][1]
    torch.testing.assert_close(filled, flat(vectors), rtol=0, atol=0, equal_nan=True)
    orthonormal = space.split(triton_subspace.orthonormal(space, filled))
    assert orthonormal[0].isfinite().all()
    assert orthonormal[1].isnan().any()
    right, left = random(200), random(45)
    left[3] = torch.nan
    assert triton_subspace.make_unit(space, other, right, left).isnan().tolist() == [True, False]


def test_a_survey_by_kernels(monkeypatch):
    """From the first step on, with a matrix that has no norm at first, by kernels alone."""
    monkeypatch.setattr(top_singular, "COLD_ROUNDS", 1)  # all of them take the interpreter long
    for module in (fused, sphere, tangent, shard_products):
        monkeypatch.setattr(module, "unusable", lambda device: None)
    monkeypatch.setattr(triton_spectral, "launch", noting_launch(launched := []))
    monkeypatch.setattr(triton_subspace, "launch", noting_launch(launched))
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(6, 9).to(DEVICE)), nn.Parameter(torch.zeros(4, 5).to(DEVICE))]
    optimizer = SpectralSphereOptimizer(params, lambda_mode="projection")
    for step in range(3):
        for p in params:
            p.grad = torch.randn(p.shape).to(DEVICE)
        optimizer.step()
        for p in params[: 2 if step else 1]:
            norm = float(torch.linalg.matrix_norm(p.detach().double(), 2))
            assert norm == pytest.approx(math.sqrt(p.shape[0] / p.shape[1]), rel=0.03)
    kernels_of_a_survey = {
        "_along_columns_kernel",
        "_along_rows_kernel",
        "_fill_kernel",
        "_ritz_kernel",
        "_unit_kernel",
    }
    assert kernels_of_a_survey <= set(launched)
