"""Triton kernels against float64, on a GPU where there is one and else in Triton's interpreter."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muon_fsdp.comm.dtensors import local_gradient
from muon_fsdp.kernels import Addend, Choice, products
from muon_fsdp.linalg import newton_schulz, sphere
from muon_fsdp.linalg.newton_schulz import Shifted, orthogonalize, orthogonalize_shifted

pytest.importorskip("triton")

from muon_fsdp.kernels import schedule, tables, triton_norms, triton_products, triton_rows, triton_spectral
from muon_fsdp.kernels.launch import TileConfig
from tests.comparisons import assert_same
from tests.kernel_cases import DEVICE, error, kernels_fixture, poisoned, random, symmetric, unpacked  # noqa: F401

# The interpreter's bfloat16 dot is wrong.
pytestmark = pytest.mark.no_cover  # coverage makes the interpreter of kernels more than twice as slow

DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6}
TILES = [TileConfig(64, 64, 64, 4, 2, group=2), TileConfig(128, 128, 64, 8, 2, persistent=True, group=1)]


def assert_symmetric(out, side, within_tiles):
    """Check symmetry to the bit.

    Tiles of `side` beside the diagonal are mirrored, and the tensor cores of a GPU are symmetric. The interpreter
    computes tiles with a BLAS, which does not promise symmetry: the half-precision results of a tile on the
    diagonal may then be rounded to neighbours, unless the kernel makes them symmetric `within_tiles`.
    """
    if within_tiles or DEVICE == "cuda":
        assert_same(out, out.mT)
        return
    tile = torch.arange(out.shape[-1]) // side
    beside = tile[:, None] != tile
    assert_same(out[:, beside], out.mT[:, beside])
    torch.testing.assert_close(out, out.mT, rtol=2 * torch.finfo(out.dtype).eps, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "rows", "inner"), [(1, 1, 1), (3, 7, 50), (2, 50, 129), (2, 129, 7), (1, 300, 70), (2, 80, 48)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_symmetric_product(batch, rows, inner, dtype, transposed):
    for number, tiles in enumerate(TILES):
        x = random(batch, rows, inner, dtype=dtype)
        a = x.mT.contiguous() if transposed else x
        c, e = symmetric(batch, rows, dtype), symmetric(batch, rows, dtype)
        out = poisoned(batch, rows, rows, dtype=dtype)
        square = tiles._replace(cols=tiles.rows)
        b, addends = a if number else a.clone(), [Addend(c, 2.0), Addend(e, -1.0)]
        triton_products.symmetric_product(a, b, addends, out, square, alpha=0.5, transposed=transposed)
        expected = 0.5 * x.double() @ x.double().mT + 2 * c.double() - e.double()
        size = 0.5 * x.double().abs() @ x.double().abs().mT + 2 * c.double().abs() + e.double().abs()
        assert error(out, expected, size) < TOLERANCE[dtype]
        # Two matrices, and products in three parts, are made symmetric everywhere.
        assert_symmetric(out, square.rows, within_tiles=not number or dtype == torch.float32)
        plain = triton_products.symmetric_product(
            a, a, [], poisoned(*out.shape, dtype=dtype), square, transposed=transposed
        )
        assert error(plain, x.double() @ x.double().mT) < TOLERANCE[dtype]


def test_products_of_different_matrices_come_out_symmetric():
    x = symmetric(2, 100, torch.float32)
    y = x @ x + 1e-3 * random(2, 100, 100)  # commutes with x up to a small, asymmetric error
    out = poisoned(2, 100, 100, dtype=torch.float32)
    triton_products.symmetric_product(x, y, [], out, TileConfig(32, 32, 32, 4, 2))
    assert_same(out, out.mT)
    assert error(out, x.double() @ y.double().mT) < 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "rows", "inner", "cols"),
    [(1, 1, 1, 1), (3, 7, 50, 129), (2, 129, 7, 50), (1, 50, 129, 300), (1, 300, 50, 7), (2, 70, 48, 80)],
)
def test_multiply_add(batch, rows, inner, cols, dtype):
    for tiles in TILES:
        a, b = random(batch, rows, inner, dtype=dtype), random(batch, inner, cols, dtype=dtype)
        c, scale = random(batch, rows, cols), torch.rand(batch, device=DEVICE) + 0.5
        out = poisoned(batch, rows, cols, dtype=dtype)
        triton_products.multiply_add(a, b, Addend(c, 2.0), out, tiles, alpha=0.5, c_scale=scale)
        expected = 0.5 * a.double() @ b.double() + 2 * scale.double()[:, None, None] * c.double()
        size = 0.5 * a.double().abs() @ b.double().abs() + 2 * scale.double()[:, None, None] * c.double().abs()
        assert error(out, expected, size) < TOLERANCE[dtype]
        plain = triton_products.multiply_add(a, b, None, poisoned(batch, rows, cols, dtype=torch.float32), tiles)
        assert error(plain, a.double() @ b.double()) < (1e-5 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inner", "cols"), [(50, 50, 129), (70, 48, 80), (128, 64, 256)])
def test_multiply_add_replaces_its_addend(rows, inner, cols, dtype):
    """Elements of the addend are read where those of the result are written, in another type of the same size."""
    for tiles in TILES:
        a, b = random(2, rows, inner, dtype=torch.float16), random(2, inner, cols, dtype=torch.float16)
        c, scale = random(2, rows, cols, dtype=dtype), torch.rand(2, device=DEVICE) + 0.5
        apart = triton_products.multiply_add(
            a, b, Addend(c, 2.0), poisoned(2, rows, cols, dtype=torch.float16), tiles, alpha=0.5, c_scale=scale
        )
        triton_products.multiply_add(a, b, Addend(c, 2.0), c.view(torch.float16), tiles, alpha=0.5, c_scale=scale)
        assert torch.equal(c.view(torch.float16), apart)


@pytest.mark.parametrize("rows_of_tiles", [1, 2, 9])
def test_a_triangle_is_covered_once(rows_of_tiles):
    """Every tile of the lower triangle is written whatever the grouping: the output is NaN before."""
    x = random(1, 16 * rows_of_tiles - 3, 16)
    for group in (1, 3, 8):
        out = poisoned(1, x.shape[1], x.shape[1], dtype=torch.float32)
        triton_products.symmetric_product(x, x, [], out, TileConfig(16, 16, 16, 4, 2, group=group))
        assert error(out, x.double() @ x.double().mT) < 1e-5


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 25), st.sampled_from([1, 2, 7, 132]), st.booleans())
def test_a_schedule_has_every_tile_once(num_matrices, rows_of_tiles, programs, same):
    table = schedule.packed(schedule.schedule(num_matrices, rows_of_tiles, programs, same))
    assert len(table) == programs
    assert len({len(line) for line in table}) == 1
    tiles = [unpacked(line) for line in table]
    triangle = [(i, j) for i in range(rows_of_tiles) for j in range(i + 1)]
    expected = sorted((matrix, i, j) for matrix in range(num_matrices) for i, j in triangle)
    assert sorted(tile for each in tiles for tile in each) == expected
    # Nobody waits for a program with many more.
    assert max(map(len, tiles)) <= (1 if len(expected) <= programs else len(expected) / programs + 2)


@pytest.mark.parametrize("rows_of_tiles", [1, 2, 3, 16, 17, 1022])
def test_most_tasks_of_a_schedule_are_pairs(rows_of_tiles):
    tasks = [task for each in schedule.schedule(1, rows_of_tiles, 1, True) for task in each]
    assert len(tasks) == -(-rows_of_tiles * (rows_of_tiles + 1) // 4)
    assert sorted(tile for task in tasks for tile in task.tiles()) == [
        (0, i, j) for i in range(rows_of_tiles) for j in range(i + 1)
    ]


@pytest.mark.parametrize(
    ("rows", "inner", "cols", "aligned"),
    [(32, 48, 64, (True, True, True)), (20, 48, 64, (False, False, True)), (32, 40, 64, (False, True, False))],
)
def test_rows_that_are_aligned_are_marked_for_the_compiler(monkeypatch, rows, inner, cols, aligned):
    """Without the mark, GPUs that have no tensor descriptors load single elements."""
    marks, usual = [], triton_products.launch

    def launch(kernel, programs, arguments, constants, *rest, **options):
        marks.append(constants["ALIGNED"])
        usual(kernel, programs, arguments, constants, *rest, **options)

    monkeypatch.setattr(triton_products, "launch", launch)
    monkeypatch.setattr(triton_products, "_has_bulk_copies", lambda device: False)
    x, y, z = (random(1, *shape, dtype=torch.float16) for shape in [(rows, inner), (inner, rows), (inner, cols)])
    out = poisoned(1, rows, rows, dtype=torch.float16)
    triton_products.symmetric_product(x, x, [], out, TILES[0])
    triton_products.symmetric_product(y, y, [], out, TILES[0], transposed=True)
    triton_products.multiply_add(x, z, None, poisoned(1, rows, cols, dtype=torch.float16), TILES[0])
    assert tuple(marks) == aligned


def test_strided_operands(kernels_everywhere):
    x = random(2, 40, 60)[:, ::2, 1::2]
    c = random(2, 30, 20).mT
    gram = products.symmetric_product(x, x)
    assert error(gram, x.double() @ x.double().mT) < 1e-5
    result = products.multiply_add(gram, x, Addend(c, -1.0), alpha=2.0)
    assert error(result, 2 * gram.double() @ x.double() - c.double()) < 1e-5
    strided_out = torch.full((2, 20, 60), torch.nan, device=DEVICE)[:, :, ::2]
    products.multiply_add(gram, x, out=strided_out)
    assert error(strided_out, gram.double() @ x.double()) < 1e-5
    assert len(kernels_everywhere) == 3


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (3, 50, 129), (2, 129, 50), (70, 70)])
def test_orthogonalization_by_kernels(kernels_everywhere, shape):
    matrices = random(*shape)
    expected = orthogonalize(matrices.double().cpu(), form="standard").to(DEVICE)
    assert error(orthogonalize(matrices), expected) < (5e-3 if DEVICE == "cuda" else 1e-5)
    assert {"_symmetric_kernel", "_multiply_add_kernel", "_partials_kernel", "_scaled_cast_kernel"} <= set(
        kernels_everywhere
    )


TINY = [1e-34, 1e-36, 1e-37, 1e-38, 4e-39, 1e-40, 1e-43, 0.0]


def of_norm(size: float, *shape: int, dtype=torch.float32) -> torch.Tensor:
    """Return two matrices, the first with this norm, which may be subnormal, and the second with norm 1."""
    batch = torch.randn(2, *shape, dtype=torch.float64)
    batch /= torch.linalg.matrix_norm(batch, keepdim=True)
    batch[0] *= size
    return batch.to(DEVICE, dtype)


@pytest.fixture
def in_half_precision(monkeypatch):
    """Iterate in float16, as GPUs do, in the interpreter too; float64 references stay what they are."""
    usual = newton_schulz._iteration_dtype
    monkeypatch.setattr(
        newton_schulz,
        "_iteration_dtype",
        lambda batch: usual(batch) if batch.dtype == torch.float64 else torch.float16,
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(
    ("dtype", "by_library"), [(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)]
)
@pytest.mark.parametrize("size", TINY)
def test_tiny_matrices_in_half_precision(monkeypatch, kernels_everywhere, in_half_precision, size, dtype, by_library):
    """A norm of 1e-36 has an inverse that a further factor of 1024 makes infinite, and infinity times zero is NaN."""
    if by_library:
        monkeypatch.setattr(products, "select", lambda *_: Choice("torch", None, "test"))
    batch = of_norm(size, 20, 32, dtype=dtype)
    batch[0, 0, 0] = 0
    result = orthogonalize(batch, out=torch.empty(batch.shape, device=DEVICE))
    assert result.isfinite().all()
    expected = orthogonalize(batch.double().cpu(), form="standard").to(DEVICE)
    assert error(result[1], expected[1]) < 5e-3
    # Entries of bfloat16 have lost digits below, and the interpreter reads subnormal ones as other numbers.
    if size >= (1e-35 if dtype == torch.bfloat16 else 1e-38):
        assert error(result[0], expected[0]) < 5e-3
    assert "_scaled_cast_kernel" in kernels_everywhere


@pytest.mark.parametrize("num_rows", [1, 3])
def test_row_sparse_matrices_in_half_precision(kernels_everywhere, in_half_precision, num_rows):
    """The refresh adds q X to F X, which nearly cancel for so few directions; so the rounding of X weighs more."""
    batch = torch.zeros(1, 64, 320, dtype=torch.bfloat16, device=DEVICE)
    batch[0, :num_rows] = random(num_rows, 320, dtype=torch.bfloat16)
    result = orthogonalize(batch, out=torch.empty(batch.shape, device=DEVICE))
    expected = orthogonalize(batch.double().cpu(), form="standard").to(DEVICE)
    assert error(result, expected) < 3e-2  # as documented, instead of 5e-3
    assert "_scaled_cast_kernel" in kernels_everywhere


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("size", TINY)
def test_tiny_momentum_on_spheres_in_half_precision(kernels_everywhere, in_half_precision, size):
    batch = of_norm(size, 20, 32)
    left, right = (nn.functional.normalize(random(2, n), dim=-1) for n in (20, 32))
    out = torch.full((2, 20, 32), torch.nan, device=DEVICE)
    scales, shifts = triton_norms.inverse_norms(batch), torch.tensor([0.0, 0.1], device=DEVICE)
    orthogonalize_shifted(
        Shifted(batch, scales, left, right, shifts),
        torch.full((2,), 1.2, device=DEVICE),
        method="default",
        steps=5,
        out=out,
        active=torch.ones(2, dtype=torch.bool, device=DEVICE),
    )
    assert out.isfinite().all()
    if size >= 1e-38:
        expected = orthogonalize(batch[0].double().cpu(), form="standard").to(DEVICE)
        assert error(out[0], expected) < 2e-2


def test_the_fast_chain_by_kernels_in_half_precision(kernels_everywhere, in_half_precision):
    """On plain and on shifted matrices, singular values follow the polynomials in float64."""
    batch = random(2, 70, 100)
    left, right = (nn.functional.normalize(random(2, n), dim=-1) for n in (70, 100))
    scales, shifts = triton_norms.inverse_norms(batch), torch.tensor([0.0, 0.1], device=DEVICE)
    sums = scales[:, None, None] * batch + shifts[:, None, None] * left[:, :, None] * right[:, None, :]
    out = torch.full((2, 70, 100), torch.nan, device=DEVICE)
    orthogonalize_shifted(
        Shifted(batch, scales, left, right, shifts),
        torch.linalg.matrix_norm(sums),
        method="fast",
        steps=5,
        out=out,
        active=torch.ones(2, dtype=torch.bool, device=DEVICE),
    )
    for found, matrices in ((out, sums), (orthogonalize(batch, method="fast"), batch)):
        expected = orthogonalize(matrices.double().cpu(), method="fast").to(DEVICE)
        assert error(found, expected) < 2e-2
        assert torch.linalg.matrix_norm(found.double(), 2).max() < 1.35
    assert {"_symmetric_kernel", "_multiply_add_kernel", "_scaled_cast_kernel"} <= set(kernels_everywhere)


def test_a_factor_that_half_precision_can_not_hold():
    a, b, c = random(1, 4, 4, dtype=torch.float16), random(1, 4, 6, dtype=torch.float16), random(1, 4, 6)
    for factor in (1e-7, 1e6):
        out = torch.empty(1, 4, 6, device=DEVICE)
        products.multiply_add(a, b, Addend(c, 2.0), factor=factor, out=out)
        assert error(out, factor * (a.double() @ b.double() + 2 * c.double())) < 5e-3


class Wrapper(torch.Tensor):
    """As a collective under way: numbers, but no address."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args = [arg.inner if isinstance(arg, Wrapper) else arg for arg in args]
        return function(*args, **(kwargs or {}))


def test_a_gradient_without_an_address():
    p, grad = nn.Parameter(torch.zeros(3, 4)), torch.randn(3, 4)
    plain = local_gradient(p, Wrapper(grad))
    assert type(plain) is torch.Tensor
    assert_same(plain, grad)
    assert local_gradient(p, grad) is grad


def test_kernels_leave_autograd_alone(kernels_everywhere):
    matrix = random(6, 9).requires_grad_()
    orthogonalize(matrix).square().sum().backward()
    assert matrix.grad is not None
    assert not kernels_everywhere


@pytest.mark.parametrize("factor", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 130, 129), (4, 16, 16)])
def test_norms(shape, factor):
    batch = random(*shape) * factor
    batch[0] = 0
    inverse = triton_norms.inverse_norms(batch)
    norms = torch.linalg.matrix_norm(batch.double())
    expected = torch.where(norms == 0, 1.0, 1 / norms)
    torch.testing.assert_close(inverse.double(), expected, rtol=1e-5, atol=0)
    cast = triton_norms.scaled_cast(batch, inverse, 0.5, torch.empty_like(batch, dtype=torch.float16))
    assert error(cast, 0.5 * expected[:, None, None] * batch.double()) < 1e-3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
def test_a_norm_of_nan_is_nan():
    batch = random(2, 20, 30)
    batch[0, 3, 4], batch[1, 2, 2] = torch.nan, torch.inf
    assert triton_norms.inverse_norms(batch)[0].isnan()
    assert not (triton_norms.inverse_norms(batch)[1] * batch[1]).isfinite().all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([1, 7, 16, 8192, 9000])), min_size=1, max_size=6))
def test_chunks_cover_every_element_once_and_never_mix_matrices(tensors):
    numels, matrix_numels = [count * size for count, size in tensors], [size for _, size in tensors]
    firsts, total = [], 0
    for numel, size in zip(numels, matrix_numels, strict=True):
        firsts.append(total)
        total += tables.num_chunks(numel, size)
    chunks, aligned = tables.make_chunks(numels, matrix_numels, firsts, torch.device("cpu"))
    covered = [torch.zeros(numel, dtype=torch.int64) for numel in numels]
    for tensor, start, length, _ in chunks.tolist():
        covered[tensor][start : start + length] += 1
        assert start // matrix_numels[tensor] == (start + length - 1) // matrix_numels[tensor]
    for each in covered:
        assert_same(each, torch.ones_like(each), "how often each element is covered")
    assert chunks[:, 3].tolist() == list(range(total))
    assert aligned == all(row[1] % 16 == 0 and row[2] % 16 == 0 for row in chunks.tolist())


@pytest.mark.parametrize(
    "targets",
    [
        "sm_80",
        "sm_90",
        "gfx942",
        # Minutes for the first time. `make core` compiles for these too.
        pytest.param("sm_86 sm_89 sm_100 sm_120 gfx90a gfx950", marks=pytest.mark.slow),
    ],
    ids=lambda names: names,
)
def test_kernels_compile_for_gpus_that_are_not_here(targets):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compile_kernels", *targets.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(done.stdout.splitlines()) > 20
    assert "not compiled" not in done.stdout


def test_norms_of_matrices_with_many_chunks():
    partials = torch.rand(5000, 2, device=DEVICE) + 0.5
    first = torch.tensor([0, 3000, 3001, 5000], dtype=torch.int32, device=DEVICE)
    squares = partials[:, 0].double() ** 2 * partials[:, 1].double()
    expected = torch.stack([squares[a:b].sum() for a, b in pairwise(first)]).rsqrt()
    torch.testing.assert_close(
        triton_norms.inverse_norms_of_partials(partials, first).double(), expected, rtol=1e-5, atol=0
    )


def test_floor_of_the_benchmark():
    from muon_fsdp.benchmarks.orthogonalization import least_flops

    assert least_flops(1000, 1000) == pytest.approx(2e9 * 8.5)
    assert least_flops(4000, 1000) == pytest.approx(2e9 * 18.5)  # 3 * 4 + 6.5
    assert least_flops(400, 100) == pytest.approx(2e6 * 22)  # few rows: 4.5 * 4 + 4
    assert math.isclose(least_flops(100, 400), least_flops(400, 100))


@pytest.mark.parametrize("shape", [(3, 16, 32), (1, 7, 50), (2, 129, 1), (2, 1, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bilinear_and_shifted_cast(shape, dtype):
    count, rows, cols = shape
    matrices = torch.randn(shape, device=DEVICE).to(dtype)
    left, right = torch.randn(count, rows, device=DEVICE), torch.randn(count, cols, device=DEVICE)
    active = torch.arange(count, device=DEVICE, dtype=torch.int32) % 2
    wide = matrices.double()
    expected = torch.einsum("bi,bij,bj->b", left.double(), wide, right.double())
    found = triton_spectral.bilinear(left, matrices, right)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    masked = triton_spectral.bilinear(left, matrices, right, active)
    torch.testing.assert_close(masked[active == 1].double(), expected[active == 1], rtol=1e-4, atol=1e-4)
    scales, shifts, factors = torch.rand(count, device=DEVICE), *torch.randn(2, count, device=DEVICE)
    outer = shifts[:, None, None].double() * left[:, :, None].double() * right[:, None, :].double()
    expected = factors[:, None, None].double() * (scales[:, None, None].double() * wide + outer)
    out = poisoned(*shape, dtype=torch.float32)
    triton_spectral.shifted_cast(matrices, scales, left, right, shifts, factors, out, active)
    torch.testing.assert_close(out[active == 1].double(), expected[active == 1], rtol=1e-5, atol=1e-5)
    assert torch.isnan(out[active == 0]).all()
    triton_spectral.shifted_cast(matrices, scales, left, right, shifts, factors, matrices)  # in place
    torch.testing.assert_close(matrices.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("shape", [(3, 16, 32), (2, 131, 5), (2, 1, 600)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_projections_leave_out_matrices_without_a_norm(shape, dtype):
    matrices = random(*shape, dtype=dtype)
    left, right = (nn.functional.normalize(random(shape[0], n), dim=-1) for n in shape[1:])
    norms = torch.ones(shape[0], device=DEVICE)
    norms[-1] = 1e-13
    before = matrices.clone()
    outer = left.double()[:, :, None] * right.double()[:, None, :]
    along = (before.double() * outer).sum((-2, -1), keepdim=True)
    triton_spectral.project_out(matrices, left, right, norms, 1e-12)
    expected = before.double() - along * outer
    torch.testing.assert_close(
        matrices[:-1].double(), expected[:-1], rtol=2e-3, atol=1e-3 if dtype.itemsize == 2 else 1e-5
    )
    assert_same(matrices[-1], before[-1])


@pytest.mark.parametrize("radius_mode", ["spectral_mup", "initialize"])
@pytest.mark.parametrize("retract_mode", ["hard", "dynamic"])
def test_retraction_by_a_kernel(monkeypatch, radius_mode, retract_mode):
    """Every combination of a norm, a saved radius and a learning rate, against the same in float64 without kernels."""
    norms, saved, rates = (0.0, 1e-13, 0.5, 2.0, 3.0), (0.0, 2.0), (0.0, 0.1)
    rows = torch.tensor([(n, s, lr, 0.2) for n in norms for s in saved for lr in rates], dtype=torch.float64)
    norm, radius, lr, decay = rows.unbind(1)
    modes = radius_mode, retract_mode
    expected = sphere.retraction_of_step(norm, radius, 2.0, lr, decay, 0.05, modes)
    monkeypatch.setattr(sphere, "unusable", lambda device: None)
    args = norm.float().to(DEVICE), radius.float().to(DEVICE), 2.0, lr.to(DEVICE), decay.to(DEVICE), 0.05, modes
    for name, value, wanted in zip(expected._fields, sphere.retraction_of_step(*args), expected, strict=True):
        torch.testing.assert_close(
            value.double().cpu(), wanted.double(), rtol=1e-6, atol=0, equal_nan=True, msg=lambda m, name=name: name + m
        )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 16, 32), torch.float32),
        ((2, 1030, 3), torch.float16),
        ((2, 21, 600), torch.bfloat16),
        ((2, 9, 512), torch.float16),
    ],
)
def test_rows_are_rescaled_by_running_second_moments(shape, dtype):
    count, rows, _ = shape
    factor, beta2, eps = 2.0**10, 0.9, 1e-3
    matrices = (factor * random(*shape) * torch.logspace(-2, 0, rows, device=DEVICE)[:, None]).to(dtype)
    matrices[-1] = 0
    moments = torch.rand(count, rows, device=DEVICE)
    unit = matrices.double() / factor
    expected_moments = beta2 * moments.double() + (1 - beta2) * unit.square().mean(-1)
    expected = unit / (expected_moments.sqrt() + eps)[:, :, None]
    norms = torch.linalg.matrix_norm(expected)
    ratios = torch.where(norms > 0, torch.linalg.matrix_norm(unit) / norms, 0)
    again, moments_again = matrices.clone(), moments.clone()
    triton_rows.rescale_rows(matrices, moments, factor, beta2, eps)
    torch.testing.assert_close(moments.double(), expected_moments, rtol=1e-6, atol=0)
    precision = 2 * torch.finfo(dtype).eps + 1e-6
    expected *= factor * ratios[:, None, None]
    torch.testing.assert_close(matrices.double(), expected, rtol=precision, atol=2e-7)
    assert not matrices[-1].any()
    triton_rows.rescale_rows(again, moments_again, factor, beta2, eps)
    assert_same(again, matrices)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
def test_rows_with_nan_do_not_reach_other_matrices():
    matrices, moments = random(2, 5, 40), torch.ones(2, 5, device=DEVICE)
    matrices[0, 2, 3] = torch.nan
    triton_rows.rescale_rows(matrices, moments, 1.0, 0.9, 1e-8)
    assert matrices[0, 2].isnan().all()
    assert moments[0].isnan().tolist() == [False, False, True, False, False]
    assert matrices[1].isfinite().all()
    assert moments[1].isfinite().all()


def test_products_leave_out_what_is_not_active(kernels_everywhere):
    a = torch.randn(4, 40, 24, device=DEVICE)
    active = torch.tensor([1, 0, 0, 1], dtype=torch.int32, device=DEVICE)
    where = active == 1
    gram = products.symmetric_product(a, a, active=active)
    torch.testing.assert_close(gram[where], (a @ a.mT)[where], rtol=1e-3, atol=1e-3)
    out = poisoned(4, 40, 24, dtype=torch.float32)
    products.multiply_add(gram, a, Addend(a, 2.0), out=out, active=active)
    torch.testing.assert_close(out[where], (a @ a.mT @ a + 2 * a)[where], rtol=1e-3, atol=1e-2)
    assert torch.isnan(out[~where]).all()
