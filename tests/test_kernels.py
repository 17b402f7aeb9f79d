"""Triton kernels against float64, on a GPU where there is one and else in Triton's interpreter."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muon_fsdp import MuonOptimizer, SpectralSphereOptimizer, kernels
from muon_fsdp.kernels import Addend, Product, products
from muon_fsdp.kernels import select as select_function
from muon_fsdp.linalg import newton_schulz, tangent
from muon_fsdp.linalg.newton_schulz import orthogonalize
from muon_fsdp.step import fused
from muon_fsdp.step.gradients import local_gradient
from tests.conftest import unmeasured

pytest.importorskip("triton")

from muon_fsdp.kernels import (
    launch,
    schedule,
    tables,
    triton_elementwise,
    triton_norms,
    triton_products,
    triton_spectral,
)
from muon_fsdp.kernels.tiles import TileConfig
from tests.comparisons import assert_same

select_module = sys.modules["muon_fsdp.kernels.select"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's bfloat16 dot is wrong.
DTYPES = [torch.float16, torch.float32] + ([torch.bfloat16] if DEVICE == "cuda" else [])
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6}
TILES = [TileConfig(64, 64, 64, 4, 2, group=2), TileConfig(128, 128, 64, 8, 2, persistent=True, group=1)]


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def symmetric(batch, size, dtype):
    x = random(batch, size, size)
    return ((x + x.mT) / 2).to(dtype)


def poisoned(*shape, dtype):
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def error(result, expected, size=None):
    """Return the distance relative to the expected norm or, where terms may cancel, to the size of the terms."""
    size = expected if size is None else size
    return float((result.double() - expected).norm() / size.norm().clamp_min(1e-30))


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
    ("batch", "rows", "inner"), [(1, 1, 1), *unmeasured((3, 7, 50), (2, 50, 129), (2, 129, 7), (1, 300, 70))]
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
    [(1, 1, 1, 1), *unmeasured((3, 7, 50, 129), (2, 129, 7, 50), (1, 50, 129, 300), (1, 300, 50, 7))],
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


@pytest.mark.parametrize("rows_of_tiles", [1, 2, *unmeasured([9])])
def test_a_triangle_is_covered_once(rows_of_tiles):
    """Every tile of the lower triangle is written whatever the grouping: the output is NaN before."""
    x = random(1, 16 * rows_of_tiles - 3, 16)
    for group in (1, 3, 8):
        out = poisoned(1, x.shape[1], x.shape[1], dtype=torch.float32)
        triton_products.symmetric_product(x, x, [], out, TileConfig(16, 16, 16, 4, 2, group=group))
        assert error(out, x.double() @ x.double().mT) < 1e-5


def unpacked(line):
    """Return the tiles (matrix, row, column) of a program, decoded as the Hopper kernel decodes them."""
    (num_tasks, _), *tasks = line
    assert len(tasks) > num_tasks  # one more is read than there are
    tiles = []
    for matrix, word in tasks[:num_tasks]:
        assert 0 <= word < 2**31
        first, second, shared = (word >> shift & 1023 for shift in (0, 10, 20))
        indices = [index for index in (first, second) if index != 1023]
        tiles += [(matrix, shared, index) if word >> 30 else (matrix, index, shared) for index in indices]
    return tiles


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


@pytest.mark.parametrize("rows_of_tiles", [1, 2, 3, 16, 17, *unmeasured([1022])])
def test_most_tasks_of_a_schedule_are_pairs(rows_of_tiles):
    tasks = [task for each in schedule.schedule(1, rows_of_tiles, 1, True) for task in each]
    assert len(tasks) == -(-rows_of_tiles * (rows_of_tiles + 1) // 4)
    assert sorted(tile for task in tasks for tile in task.tiles()) == [
        (0, i, j) for i in range(rows_of_tiles) for j in range(i + 1)
    ]


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """Use kernels for all that they can compute, on the CPU too; give the names of those launched."""
    for module in (fused, newton_schulz):
        monkeypatch.setattr(module, "unusable", lambda device: None)
    if DEVICE == "cpu":
        choice = select_module.Choice("triton", TileConfig(64, 64, 64, 4, 2), "test")
        library = select_module.Choice("torch", None, "test")
        monkeypatch.setattr(
            products, "select", lambda product, _: library if product.dtype == torch.float64 else choice
        )
    launched = []
    for module in (triton_products, triton_norms, triton_elementwise):
        monkeypatch.setattr(
            module, "launch", lambda k, *a, **o: launched.append(k.fn.__name__) or launch.launch(k, *a, **o)
        )
    return launched


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


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), *unmeasured([(3, 50, 129)], [(2, 129, 50)], [(70, 70)])])
def test_orthogonalization_by_kernels(kernels_everywhere, shape):
    matrices = random(*shape)
    expected = orthogonalize(matrices.double().cpu(), form="standard").to(DEVICE)
    assert error(orthogonalize(matrices), expected) < (5e-3 if DEVICE == "cuda" else 1e-5)
    assert {"_symmetric_kernel", "_multiply_add_kernel", "_partials_kernel", "_scaled_cast_kernel"} <= set(
        kernels_everywhere
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize("size", [1e-38, 4e-39, 1e-42])
def test_tiny_matrices_stay_finite(kernels_everywhere, size):
    matrices = random(2, 9, 16) * size
    matrices[0, 0, 0] = 0
    assert orthogonalize(matrices).isfinite().all()


def test_a_factor_that_half_precision_can_not_hold():
    a, b, c = random(1, 4, 4, dtype=torch.float16), random(1, 4, 6, dtype=torch.float16), random(1, 4, 6)
    for alpha in (1e-7, 1e6):
        out = torch.empty(1, 4, 6, device=DEVICE)
        products.multiply_add(a, b, Addend(c, 2 * alpha), alpha=alpha, out=out)
        assert error(out, alpha * (a.double() @ b.double() + 2 * c.double())) < 5e-3


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
    cast = triton_norms.scaled_cast(batch, inverse, 0.5, torch.float16)
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


def test_kernels_compile_for_gpus_that_are_not_here():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_kernels"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(done.stdout.splitlines()) > 20


# ---------------------------------------------------------------------------------------------------- whole steps


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 8, 16) * 0.1)
        self.qkv = nn.Parameter(torch.randn(24, 8) * 0.1)
        self.odd = nn.Parameter(torch.randn(5, 7) * 0.1)
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.1)
        self.other = nn.Parameter(torch.randn(8, 8) * 0.1)
        self.bias = nn.Parameter(torch.randn(33) * 0.1)


def train(nesterov, dtype, accumulated=False):
    torch.manual_seed(0)
    model = Net().to(DEVICE, dtype)
    groups = [
        {"params": [model.qkv], "split_sizes": (8, 8, 8), "lr": 0.1},
        {"params": [model.weight, model.other, model.stack, model.odd, model.bias], "weight_decay": 0.1},
    ]
    optimizer = MuonOptimizer(
        groups,
        lr=torch.tensor(0.05, device=DEVICE),
        nesterov=nesterov,
        ns_steps=2,  # every product takes the interpreter long; all five have tests of their own
        adamw_lr=0.01,
        adamw_weight_decay=0.2,
        adamw_betas=(0.9, 0.99999),  # 1 - beta must not be rounded
    )
    generator = torch.Generator().manual_seed(1)
    optimizer._accumulation_steps = 2 if accumulated else 1
    for step in range(4 if accumulated else 3):
        for name, p in model.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(DEVICE, dtype)
            if step == 1 and name in ("other", "bias"):
                p.grad = None
            elif name == "weight":
                p.grad = p.grad.t().contiguous().t()  # not contiguous
        optimizer.step()
    states = [value.clone() for p in model.parameters() for value in optimizer.state[p].values()]
    return [p.detach().clone() for p in model.parameters()], states


@pytest.mark.parametrize(
    ("nesterov", "dtype", "accumulated"), [*unmeasured((False, torch.float32, False)), (True, torch.bfloat16, True)]
)
def test_a_step_by_kernels_is_the_step_without(request, monkeypatch, nesterov, dtype, accumulated):
    monkeypatch.setenv("MUON_FSDP_KERNELS", "torch")
    expected, expected_states = train(nesterov, dtype, accumulated)
    monkeypatch.delenv("MUON_FSDP_KERNELS")
    launched = request.getfixturevalue("kernels_everywhere")
    parameters, states = train(nesterov, dtype, accumulated)
    assert {"_muon_prepare_kernel", "_apply_kernel", "_adamw_count_kernel", "_adamw_kernel"} <= set(launched)
    # A bfloat16 weight may be rounded the other way, and on a GPU half-precision products differ.
    tolerance = 1e-5 if dtype == torch.float32 and DEVICE == "cpu" else 3e-2
    for result, reference in zip(parameters, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=tolerance, atol=tolerance * 0.1)
    for result, reference in zip(states, expected_states, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-6)


def test_norms_that_prepare_computes_are_those_of_the_matrices(kernels_everywhere):
    shapes = [(3, 40, 300), (20, 30), (20, 30), (2, 20, 30), (30, 20)]  # several batches, one of three parameters
    params = [nn.Parameter(random(*shape)) for shape in shapes]
    for number, p in enumerate(params):
        sizes = 10.0 ** (3 * torch.arange(len(p) if p.ndim == 3 else 1, device=DEVICE) - 4 * number)
        p.grad = random(*p.shape) * (sizes[:, None, None] if p.ndim == 3 else sizes)
    before = [p.detach().clone() for p in params]
    MuonOptimizer(params, lr=1.0, scale=1.0, ns_steps=2).step()
    for p, old in zip(params, before, strict=True):
        expected = orthogonalize(p.grad.double().cpu(), steps=2, form="standard").to(DEVICE)
        assert error(old - p.detach(), expected) < 2e-2
    assert "_partials_kernel" not in kernels_everywhere  # not computed a second time


def test_norms_of_matrices_with_many_chunks():
    partials = torch.rand(5000, 2, device=DEVICE) + 0.5
    first = torch.tensor([0, 3000, 3001, 5000], dtype=torch.int32, device=DEVICE)
    squares = partials[:, 0].double() ** 2 * partials[:, 1].double()
    expected = torch.stack([squares[a:b].sum() for a, b in pairwise(first)]).rsqrt()
    torch.testing.assert_close(
        triton_norms.inverse_norms_of_partials(partials, first).double(), expected, rtol=1e-5, atol=0
    )


# --------------------------------------------------------------------------------------------------------- select


def test_select_says_why():
    cpu, product = torch.device("cpu"), Product("symmetric", 4, 768, 768, 768, torch.float16)
    choice = select_function(product, cpu)
    assert (choice.path, choice.config) == ("torch", None)
    assert "cpu" in choice.reason


def test_select_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("MUON_FSDP_KERNELS", "torch")
    assert (
        "MUON_FSDP_KERNELS=torch"
        in select_function(Product("symmetric", 1, 8, 8, 8, torch.float16), torch.device("cuda")).reason
    )


def hopper(monkeypatch):
    monkeypatch.setattr(select_module, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(select_module, "num_processors", lambda device: 132)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["symmetric", "multiply_add"]),
    st.integers(1, 200),
    st.integers(1, 20000),
    st.integers(1, 20000),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.booleans(),
)
def test_the_table_has_tiles_for_every_shape(operation, batch, rows, cols, dtype, bulk):
    tiles = select_module._hopper_tiles(Product(operation, batch, rows, cols, cols, dtype, bulk), 132)
    stages_bytes = tiles.num_stages * tiles.inner * (tiles.rows + tiles.cols) * dtype.itemsize
    assert stages_bytes <= 200 * 1024
    assert operation == "multiply_add" or tiles.rows == tiles.cols


def test_the_table_is_used_on_hopper(monkeypatch):
    hopper(monkeypatch)
    choice = select_module.select(Product("multiply_add", 12, 768, 768, 768, torch.float16), torch.device("cuda"))
    assert choice.path == "triton"
    assert choice.reason == "measured on an H200"
    assert select_module.select(Product("symmetric", 1, 8, 8, 8, torch.float64), torch.device("cuda")).path == "torch"


LARGE = Product("symmetric", 24, 768, 768, 768, torch.float16)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"rows": 1000, "cols": 1000, "dtype": torch.bfloat16}, None),
        ({"dtype": torch.float32}, "torch.float32"),
        ({"transposed": True}, "transposed"),
        ({"uniform": False}, "differ in dtype or are not aligned to 16 bytes"),
        ({"bulk": False}, "16 bytes"),
        ({"rows": 1001, "cols": 1001}, "16 bytes"),
        ({"num_matrices": 13}, None),
        ({"num_matrices": 12}, "too few tiles"),
        ({"num_matrices": 4, "rows": 1024, "cols": 1024}, None),
        ({"num_matrices": 3, "rows": 1024, "cols": 1024}, "too few tiles"),
        ({"num_matrices": 999, "rows": 128, "cols": 128}, "too few tiles"),
        ({"rows": 1023 * 128, "cols": 1023 * 128}, "outside its range"),
        ({"inner": 0}, "outside its range"),
    ],
)
def test_what_the_gluon_kernel_computes_on_hopper(monkeypatch, changes, reason):
    hopper(monkeypatch)
    monkeypatch.setattr(select_module, "gluon_unusable", lambda: None)
    choice = select_module.select(LARGE._replace(**changes), torch.device("cuda"))
    if reason is None:
        assert choice == select_module.Choice("gluon", None, "measured on an H200")
    else:
        assert choice.path == "triton"
        assert choice.config is not None
        _, obstacle = choice.reason.split("not by the Gluon kernel: ")
        assert reason in obstacle


@pytest.fixture
def imported_anew():
    select_module._gluon_import_failure.cache_clear()
    yield
    select_module._gluon_import_failure.cache_clear()


@pytest.mark.parametrize("version", ["3.5.1", "3.6.0", "3.7.0+git1234", "3.8.0", "4.0"])
def test_gluon_is_used_in_versions_that_are_known(monkeypatch, imported_anew, version):
    hopper(monkeypatch)
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(select_module, "import_module", lambda name: None)
    choice = select_module.select(LARGE, torch.device("cuda"))
    if version.startswith(("3.6", "3.7")):
        assert choice.path == "gluon"
    else:
        assert choice.path == "triton"
        assert f"it was tested with Triton 3.6 and 3.7, and {version[:3]} is installed" in choice.reason


@pytest.mark.filterwarnings("ignore:The Gluon kernel for Hopper")
def test_gluon_that_can_not_be_imported_is_not_used(monkeypatch, imported_anew):
    hopper(monkeypatch)
    monkeypatch.setattr(select_module, "triton_version", lambda: "3.7")
    monkeypatch.setitem(sys.modules, "muon_fsdp.kernels.triton_hopper", None)  # an import of it fails
    choice = select_module.select(LARGE, torch.device("cuda"))
    assert choice.path == "triton"
    assert "import failed with ModuleNotFoundError" in choice.reason


def test_what_the_gluon_kernel_is_given(monkeypatch):
    monkeypatch.setattr(products, "select", lambda *_: select_module.Choice("gluon", None, "test"))

    def compute(a, b, c, e, out, *, alpha, beta, gamma):
        assert [name for name, t in zip("abceo", (a, b, c, e, out), strict=True) if not t.is_contiguous()] == []
        return torch.add(alpha * a @ b.mT + beta * c, e, alpha=gamma, out=out)

    monkeypatch.setattr(kernels, "triton_hopper", SimpleNamespace(symmetric_product=compute), raising=False)
    x, y = symmetric(2, 12, torch.float32).mT, symmetric(2, 16, torch.float32)[:, 2:14, 2:14]
    result = products.symmetric_product(x, y, [Addend(y, 2.0), Addend(x, -1.0)], alpha=0.5)
    torch.testing.assert_close(result, 0.5 * x @ y.mT + 2 * y - x)


@pytest.fixture
def hopper_kernel(monkeypatch):
    """Give the module of the Gluon kernel on a device of 5 processors, with no schedule made yet."""
    if select_module.triton_version() not in select_module.GLUON_VERSIONS:
        pytest.skip("Gluon of this version of Triton is not used")
    from muon_fsdp.kernels import triton_hopper

    monkeypatch.setattr(triton_hopper, "num_processors", lambda device: 5)
    monkeypatch.setattr(triton_hopper, "_tables", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return triton_hopper


def test_the_gluon_kernel_computes_every_tile_by_a_schedule_that_is_made_once(monkeypatch, hopper_kernel):
    schedules = []

    def noted_launch(kernel, programs, args, *_, **__):
        for arg in args:
            if isinstance(arg, launch.TiledTensor):
                arg.checked()  # raises where the tensor cannot be read in tiles
        table, tasks_per_program = args[5:7]
        assert table.shape[:2] == (programs, tasks_per_program)
        schedules.append(table)

    monkeypatch.setattr(hopper_kernel, "launch", noted_launch)
    a, c = torch.zeros(2, 304, 72, dtype=torch.float16), torch.zeros(2, 304, 304, dtype=torch.float16)
    for b in (a, a.clone()):
        for _ in range(2):
            hopper_kernel.symmetric_product(a, b, c, c, torch.empty_like(c))
    triangle = [(i, j) for i in range(3) for j in range(i + 1)]
    for table in schedules:
        found = sorted(tile for row in table.tolist() for tile in unpacked(row))
        assert found == [(matrix, i, j) for matrix in range(2) for i, j in triangle]
    # Captured graphs hold the address of a schedule.
    addresses = [table.data_ptr() for table in schedules]
    assert addresses[0] == addresses[1]
    assert addresses[2] == addresses[3]


def test_the_first_product_of_a_shape_by_gluon_can_not_be_captured(monkeypatch, hopper_kernel):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    a, out = torch.zeros(1, 304, 72, dtype=torch.float16), torch.zeros(1, 304, 304, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="can't be captured by its first call"):
        hopper_kernel.symmetric_product(a, a, None, None, out)


def test_a_failure_of_the_gluon_kernel_is_a_kernel_error(monkeypatch, hopper_kernel):
    monkeypatch.setattr(hopper_kernel, "launch", lambda *_, **__: {}["moved"])
    a, out = torch.zeros(1, 304, 72, dtype=torch.float16), torch.zeros(1, 304, 304, dtype=torch.float16)
    with pytest.raises(select_module.KernelError, match="KeyError: 'moved'"):
        hopper_kernel.symmetric_product(a, a, None, None, out)


@pytest.mark.filterwarnings("ignore:The Gluon kernel for Hopper")
def test_gluon_that_fails_is_not_tried_again(monkeypatch):
    hopper(monkeypatch)
    monkeypatch.setattr(select_module, "_gluon_import_failure", lambda: None)
    monkeypatch.setattr(select_module, "_gluon_failure", None)
    tried = []

    def by_gluon():
        tried.append("gluon")
        raise select_module.KernelError("CompilationError: no such function")

    def by_triton(tiles):
        tried.append(tiles)
        return torch.ones(1)

    device = torch.device("cuda")
    for _ in range(2):
        assert products._compute(LARGE, device, by_triton, lambda: None, False, by_gluon) == torch.ones(1)
    choice = select_module.select(LARGE, device)
    assert tried == ["gluon", choice.config, choice.config]
    assert "it failed with CompilationError: no such function" in choice.reason


def test_other_devices_are_timed_once_and_remembered_on_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(select_module, "_capability", lambda device: (8, 0))
    monkeypatch.setattr(select_module, "_device_name", lambda device: "Some GPU")
    monkeypatch.setenv("MUON_FSDP_CACHE", str(tmp_path / "cache"))
    select_module._tuned.cache_clear()
    device, product = torch.device("cuda"), Product("multiply_add", 4, 512, 512, 512, torch.float16)
    assert select_module.select(product, device).path is None
    times = {None: 3.0, TileConfig(64, 64, 64, 4, 3): 1.0}
    tried = []

    def run(tiles):
        tried.append(tiles)
        if tiles is not None and tiles.cols == 256:
            raise RuntimeError("out of shared memory")

    monkeypatch.setattr(select_module, "_time", lambda run: run() or times.get(tried[-1], 2.0))
    choice = select_module.tune(product, device, run)
    assert (choice.path, choice.config) == ("triton", TileConfig(64, 64, 64, 4, 3))
    assert None in tried
    select_module._tuned.cache_clear()  # as a new process
    assert select_module.select(product, device) == choice
    assert select_module.select(product._replace(num_matrices=3), device) == choice  # the same class
    assert select_module.select(product._replace(rows=2048), device).path is None
    select_module.cache_file("Some GPU").write_text("{ not json")
    select_module._tuned.cache_clear()
    assert select_module.select(product, device).path is None
    select_module._tuned.cache_clear()


@pytest.mark.skipif(DEVICE == "cuda", reason="about machines without a GPU")
def test_a_graph_is_refused_by_name_without_a_gpu():
    model = nn.Linear(4, 4)
    optimizer = MuonOptimizer(model, cuda_graph=True)
    model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"cuda_graph=True can't capture the step: parameter 'weight'.*'cpu'"):
        optimizer.step()
    with pytest.raises(TypeError, match="cuda_graph"):
        MuonOptimizer(model, cuda_graph=1)


def test_floor_of_the_benchmark():
    from muon_fsdp.benchmarks.orthogonalization import least_flops

    assert least_flops(100, 100) == pytest.approx(2e6 * 10)
    assert least_flops(400, 100) == pytest.approx(2e6 * 19)
    assert math.isclose(least_flops(100, 400), least_flops(400, 100))


# ---------------------------------------------------------------------------------------------------- on spheres


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
    scales, shifts = torch.rand(count, device=DEVICE), torch.randn(count, device=DEVICE)
    outer = shifts[:, None, None].double() * left[:, :, None].double() * right[:, None, :].double()
    expected = scales[:, None, None].double() * wide + outer
    out = poisoned(*shape, dtype=torch.float32)
    triton_spectral.shifted_cast(matrices, scales, left, right, shifts, out, active)
    torch.testing.assert_close(out[active == 1].double(), expected[active == 1], rtol=1e-5, atol=1e-5)
    assert torch.isnan(out[active == 0]).all()
    triton_spectral.shifted_cast(matrices, scales, left, right, shifts, matrices)  # in place
    torch.testing.assert_close(matrices.double(), expected, rtol=2e-3, atol=2e-3)


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


@pytest.mark.parametrize("mode", ["bracketed", "projection"])
@pytest.mark.parametrize("retract_mode", ["hard", *unmeasured(["dynamic"])])
def test_a_step_on_spheres(monkeypatch, mode, retract_mode):
    def trained():
        torch.manual_seed(0)
        model = Net().to(DEVICE)
        groups = [
            {"params": [model.qkv], "split_sizes": (8, 4, 12)},
            {"params": [model.weight, model.other, model.stack, model.odd, model.bias]},
        ]
        optimizer = SpectralSphereOptimizer(groups, lambda_mode=mode, retract_mode=retract_mode)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(DEVICE)
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()], optimizer.metrics()

    expected, expected_metrics = trained()
    for module in (fused, tangent):
        monkeypatch.setattr(module, "unusable", lambda device: None)
    found, metrics = trained()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=2e-3)
    assert metrics["lambda_fallbacks"] == pytest.approx(expected_metrics["lambda_fallbacks"], abs=2)
