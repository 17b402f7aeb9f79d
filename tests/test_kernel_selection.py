"""Which kernel computes a product: the tables, the Gluon kernel on Hopper, and tiles that are timed and remembered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muon_fsdp import kernels
from muon_fsdp.kernels import Addend, Product, products
from muon_fsdp.kernels import select as select_function

pytest.importorskip("triton")

from muon_fsdp.kernels.launch import KernelError, TileConfig
from tests.kernel_cases import select_module, symmetric, unpacked


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
        ({"transposed": True}, None),
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


def test_what_the_gluon_kernel_is_given(monkeypatch):
    monkeypatch.setattr(products, "select", lambda *_: select_module.Choice("gluon", None, "test"))
    monkeypatch.setattr(products, "probe_gluon", lambda device: True)

    def compute(a, b, addends, out, *, alpha, transposed):
        assert not transposed
        (c, beta), (e, gamma) = addends
        assert [name for name, t in zip("abceo", (a, b, c, e, out), strict=True) if not t.is_contiguous()] == []
        return torch.add(alpha * a @ b.mT + beta * c, e, alpha=gamma, out=out)

    monkeypatch.setattr(kernels, "triton_hopper", SimpleNamespace(symmetric_product=compute), raising=False)
    x, y = symmetric(2, 12, torch.float32).mT, symmetric(2, 16, torch.float32)[:, 2:14, 2:14]
    result = products.symmetric_product(x, y, [Addend(y, 2.0), Addend(x, -1.0)], alpha=0.5)
    torch.testing.assert_close(result, 0.5 * x @ y.mT + 2 * y - x)


@pytest.fixture
def hopper_kernel(monkeypatch):
    """Give the module of the Gluon kernel on a device of 5 processors, with no schedule made yet."""
    from muon_fsdp.kernels import triton_hopper

    monkeypatch.setattr(triton_hopper, "num_processors", lambda device: 5)
    monkeypatch.setattr(triton_hopper, "_tables", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return triton_hopper


def test_the_gluon_kernel_computes_every_tile_by_a_schedule_that_is_made_once(monkeypatch, hopper_kernel):
    schedules = []

    def noted_launch(kernel, programs, args, *_, **__):
        table, tasks_per_program = args[5:7]
        assert table.shape[:2] == (programs, tasks_per_program)
        schedules.append(table)

    monkeypatch.setattr(hopper_kernel, "launch", noted_launch)
    a, c = torch.zeros(2, 304, 72, dtype=torch.float16), torch.zeros(2, 304, 304, dtype=torch.float16)
    for b in (a, a.clone()):
        for _ in range(2):
            hopper_kernel.symmetric_product(a, b, [Addend(c), Addend(c)], torch.empty_like(c))
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
        hopper_kernel.symmetric_product(a, a, [], out)


def test_a_failure_of_the_gluon_kernel_is_a_kernel_error(monkeypatch, hopper_kernel):
    monkeypatch.setattr(hopper_kernel, "launch", lambda *_, **__: {}["moved"])
    a, out = torch.zeros(1, 304, 72, dtype=torch.float16), torch.zeros(1, 304, 304, dtype=torch.float16)
    with pytest.raises(KernelError, match="KeyError: 'moved'"):
        hopper_kernel.symmetric_product(a, a, [], out)


@pytest.mark.filterwarnings("ignore:The Gluon kernel for Hopper")
def test_gluon_that_fails_is_not_tried_again(monkeypatch):
    hopper(monkeypatch)
    monkeypatch.setattr(select_module, "_gluon_failure", None)
    monkeypatch.setattr(select_module, "_is_gluon_probed", True)
    tried = []

    def by_gluon(out):
        tried.append("gluon")
        raise KernelError("CompilationError: no such function")

    def by_triton(out, tiles):
        tried.append(tiles)
        return out

    device = torch.device("cuda")
    for _ in range(2):
        assert products._compute(LARGE, device, torch.ones(1), by_triton, lambda out: None, by_gluon) == torch.ones(1)
    choice = select_module.select(LARGE, device)
    assert tried == ["gluon", choice.config, choice.config]
    assert "it failed with CompilationError: no such function" in choice.reason


def test_kernels_are_timed_on_memory_of_their_own(monkeypatch):
    """The result may replace the addend: a second run would read what the first has written."""
    a, b, c = torch.randn(1, 4, 4), torch.randn(1, 4, 6), torch.randn(1, 4, 6)
    expected = a @ b + 2 * c

    def tuned(product, device, run):
        for _ in range(3):
            run(None)
        return select_module.Choice("torch", None, "")

    monkeypatch.setattr(products, "select", lambda product, device: select_module.Choice(None, None, ""))
    monkeypatch.setattr(products, "tune", tuned)
    assert products.multiply_add(a, b, Addend(c, 2.0), out=c) is c
    torch.testing.assert_close(c, expected)


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


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
def test_nothing_is_timed_under_torch_distributed(monkeypatch, capability):
    """Ranks need not share shapes, so a timing that only some of them make would leave others with another kernel."""
    monkeypatch.setattr(select_module, "_capability", lambda device: capability)
    monkeypatch.setattr(select_module, "_is_distributed", lambda: True)
    device = torch.device("cuda")
    has_kernel = capability < (9, 0)
    for changes in ({}, {"rows": 2048, "cols": 2048, "inner": 8192}):
        choice = select_module.select(LARGE._replace(**changes), device)
        assert choice.path == ("triton" if has_kernel else "torch")
        assert "not timed" in choice.reason
    for changes in (
        {"operation": "multiply_add"},
        {"dtype": torch.float32},
        {"rows": 128, "cols": 128},
        {"rows": 1000, "cols": 1000},
        {"inner": 1000},
    ):
        assert select_module.select(LARGE._replace(**changes), device).path == "torch"


@pytest.mark.parametrize("distributed", [False, True])
def test_amd_gpus_multiply_float32_with_the_library(monkeypatch, tmp_path, distributed):
    """No AMD GPU compiles the TF32 product of three parts, and under torch.distributed nothing else would be tried."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(select_module, "_capability", lambda device: (9, 4))  # not a Hopper GPU, but an MI300
    monkeypatch.setattr(select_module, "_device_name", lambda device: "MI300X")
    monkeypatch.setattr(select_module, "_is_distributed", lambda: distributed)
    monkeypatch.setenv("MUON_FSDP_CACHE", str(tmp_path))
    device = torch.device("cuda")
    choice = select_module.select(LARGE._replace(dtype=torch.float32), device)
    assert choice == select_module.Choice("torch", None, "no float32 kernels for AMD GPUs")
    assert select_module.select(LARGE, device).path == ("torch" if distributed else None)  # or timed
