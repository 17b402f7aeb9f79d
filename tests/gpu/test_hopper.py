"""The Gluon kernel of the symmetric product against float64, and when it runs."""

from __future__ import annotations

import sys

import pytest
import torch

from muon_fsdp.kernels import Addend, Product, multiply_add, products, select
from muon_fsdp.linalg.newton_schulz import orthogonalize
from tests.comparisons import assert_same

CUDA = torch.device("cuda")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

if HOPPER:
    from muon_fsdp.kernels import triton_hopper, triton_products

select_module = sys.modules["muon_fsdp.kernels.select"]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 5e-3}
KINDS = {"gram": (1.0, 0.0, 0.0), "c": (1.5, -0.5, 0.0), "c and e": (0.5, -2.0, 0.25)}  # alpha, beta, gamma
GUARD = 64  # elements before and behind a result that nothing may be written to


@pytest.fixture(autouse=True)
def full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def operands(kind, batch, rows, inner, dtype):
    """Make a, b, c and e: any matrix, the square of a symmetric one, or two symmetric ones that commute."""
    generator = torch.Generator(CUDA).manual_seed(batch * rows + inner)
    a = torch.randn(batch, rows, inner, device=CUDA, generator=generator)
    if kind == "gram":
        a = a.to(dtype)
        return a, a, None, None
    x = (a + a.mT) / rows**0.5
    y = (x @ x).to(dtype)
    x = x.to(dtype)
    return (x, x, x, None) if kind == "c" else (x, y, x, y)


def guarded(batch, rows, dtype):
    memory = torch.full((batch * rows * rows + 2 * GUARD,), torch.nan, device=CUDA, dtype=dtype)
    return memory, memory[GUARD:-GUARD].view(batch, rows, rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("batch", "rows", "inner"),
    [
        (150, 128, 200),
        (1, 128, 8),
        (70, 136, 72),
        (3, 304, 1000),
        (45, 304, 40),
        (20, 768, 328),
        (5, 1000, 2056),
        (1, 2048, 1096),
        (3, 2048, 96),
    ],
)
def test_products(kind, batch, rows, inner, dtype):
    a, b, c, e = operands(kind, batch, rows, inner if kind == "gram" else rows, dtype)
    alpha, beta, gamma = KINDS[kind]
    memory, out = guarded(batch, rows, dtype)
    addends = [Addend(added, factor) for added, factor in ((c, beta), (e, gamma)) if added is not None]
    triton_hopper.symmetric_product(a, b, addends, out, alpha=alpha)
    expected = alpha * a.double() @ b.double().mT
    for added, factor in ((c, beta), (e, gamma)):
        if added is not None:
            expected += factor * added.double()
    errors = torch.linalg.matrix_norm(out.double() - expected) / torch.linalg.matrix_norm(expected)
    assert errors.max() < TOLERANCE[dtype]
    assert_same(out, out.mT)
    assert memory[:GUARD].isnan().all()
    assert memory[-GUARD:].isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("batch", "rows", "inner"), [(20, 768, 330), (5, 1000, 2056), (3, 2048, 8191)])
def test_transposed_operands(batch, rows, inner, dtype):
    a = torch.randn(batch, inner, rows, device=CUDA).to(dtype)
    memory, out = guarded(batch, rows, dtype)
    triton_hopper.symmetric_product(a, a, [], out, alpha=0.5, transposed=True)
    assert memory[:GUARD].isnan().all()
    assert memory[-GUARD:].isnan().all()
    tiles = triton_products.TileConfig(128, 128, 64, 8, 4, persistent=True)
    expected = triton_products.symmetric_product(a, a, [], torch.empty_like(out), tiles, alpha=0.5, transposed=True)
    assert_same(out, expected)
    exact = 0.5 * a.double().mT @ a.double()
    assert (out.double() - exact).norm() / exact.norm() < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_other_kernel_every_time(kind):
    """Ranks that run different kernels agree, and no race shows in a hundred runs."""
    a, b, c, e = operands(kind, 20, 1000, 1000, torch.float16)
    alpha, beta, gamma = KINDS[kind]
    tiles = triton_products.TileConfig(128, 128, 64, 8, 4, persistent=True)
    addends = [Addend(added, factor) for added, factor in ((c, beta), (e, gamma)) if added is not None]
    expected = triton_products.symmetric_product(a, b, addends, guarded(20, 1000, a.dtype)[1], tiles, alpha=alpha)
    for _ in range(100):
        out = triton_hopper.symmetric_product(a, b, addends, guarded(20, 1000, a.dtype)[1], alpha=alpha)
        assert_same(out, expected)


@pytest.fixture
def launched(monkeypatch):
    select_module.probe_gluon(CUDA)  # its products are not counted
    names = []
    for module in (triton_hopper, triton_products):
        launch = module.launch
        monkeypatch.setattr(
            module, "launch", lambda kernel, *a, _=launch, **o: names.append(kernel.fn.__name__) or _(kernel, *a, **o)
        )
    return names


def test_large_products_take_it_and_others_do_not(launched):
    large = torch.randn(8, 1024, 1024, device=CUDA, dtype=torch.float16)
    assert select(Product("symmetric", 8, 1024, 1024, 1024, torch.float16), CUDA).path == "gluon"
    square = products.symmetric_product(large, large)
    products.symmetric_product(square, square, [Addend(square.mT, 2.0)], alpha=0.5)  # any strides
    products.symmetric_product(large, large, transposed=True)
    assert launched == 3 * ["_symmetric_hopper_kernel"]
    launched.clear()
    unaligned = torch.randn(8 * 1024 * 1024 + 1, device=CUDA, dtype=torch.float16)[1:].view(8, 1024, 1024)
    for a in (
        large[:1, :512],  # few tiles
        large.float(),
        large[:, :, :1023].contiguous(),  # rows that no descriptor can address
        unaligned,
    ):
        result = products.symmetric_product(a, a)
        expected = a.double() @ a.double().mT
        assert (result - expected).norm() < 1e-3 * expected.norm()
    x = torch.randn(24, 768, 768, device=CUDA, dtype=torch.float16)
    products.symmetric_product(x, x, [Addend(torch.ones(24, 768, 768, device=CUDA))])  # of another precision
    multiply_add(large, large)
    assert launched == 5 * ["_symmetric_kernel"] + ["_multiply_add_kernel"]


def test_it_is_switched_off_with_the_others(monkeypatch, launched):
    monkeypatch.setenv("MUON_FSDP_KERNELS", "torch")
    large = torch.randn(8, 1024, 1024, device=CUDA, dtype=torch.float16)
    assert select(Product("symmetric", 8, 1024, 1024, 1024, torch.float16), CUDA).path == "torch"
    products.symmetric_product(large, large)
    assert not launched


def test_a_kernel_whose_products_are_wrong_is_replaced(monkeypatch, launched):
    large = torch.randn(8, 1024, 1024, device=CUDA, dtype=torch.float16)
    expected = products.symmetric_product(large, large)
    monkeypatch.setattr(select_module, "_gluon_failure", None)
    monkeypatch.setattr(select_module, "_is_gluon_probed", False)
    right = triton_hopper.symmetric_product
    monkeypatch.setattr(triton_hopper, "symmetric_product", lambda *a, **o: right(*a, **o).mul_(1.1))
    launched.clear()
    with pytest.warns(RuntimeWarning, match="is not used: its products are wrong"):
        assert_same(products.symmetric_product(large, large), expected)
    assert launched == ["_symmetric_hopper_kernel", "_symmetric_hopper_kernel", "_symmetric_kernel"]


def test_the_kernel_passes_its_probe(monkeypatch):
    monkeypatch.setattr(select_module, "_gluon_failure", None)
    monkeypatch.setattr(select_module, "_is_gluon_probed", False)
    assert select_module._error_of_gluon(CUDA) < 2e-3
    assert select_module.probe_gluon(CUDA)


def test_a_kernel_that_fails_is_replaced(monkeypatch):
    large = torch.randn(8, 1024, 1024, device=CUDA, dtype=torch.float16)
    expected = products.symmetric_product(large, large)
    monkeypatch.setattr(select_module, "_gluon_failure", None)
    monkeypatch.setattr(triton_hopper, "_symmetric_hopper_kernel", None)  # not launchable
    with pytest.warns(RuntimeWarning, match="The Gluon kernel for Hopper GPUs is not used: it failed with TypeError"):
        assert_same(products.symmetric_product(large, large), expected)
    assert "failed with TypeError" in select(Product("symmetric", 8, 1024, 1024, 1024, torch.float16), CUDA).reason


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_graphs():
    matrices = torch.randn(9, 1024, 1032, device=CUDA)
    with pytest.raises(RuntimeError, match="first call"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        triton_hopper._table(12345, 1, True, CUDA)
    expected = orthogonalize(matrices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = orthogonalize(matrices)
    for _ in range(3):
        result.fill_(torch.nan)
        graph.replay()
        assert_same(result, expected)
    assert any(key[0] == 9 for key in triton_hopper._tables)  # so it took part
