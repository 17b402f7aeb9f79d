"""Kernels do not fail silently: a cache on disk, a kernel that does not load, a model on two devices."""

from __future__ import annotations

import json
import sys
from importlib import import_module

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.cli import checks
from muon_fsdp.kernels.launch import TileConfig
from muon_fsdp.kernels.select import Choice, Product
from muon_fsdp.optimizers import muon

pytest.importorskip("triton")

select_module = import_module("muon_fsdp.kernels.select")  # the package has a function of this name

CUDA = torch.device("cuda")
PRODUCT = Product("multiply_add", 4, 512, 512, 512, torch.float16)
LARGE = Product("symmetric", 4, 4096, 4096, 4096, torch.float16, uniform=True)
FASTEST = TileConfig(64, 64, 64, 4, 3)


@pytest.fixture
def ampere(monkeypatch, tmp_path):
    """Pretend to have a GPU whose kernels are timed, and an empty cache; yield what a new process would forget."""
    monkeypatch.setattr(select_module, "_capability", lambda device: (8, 0))
    monkeypatch.setattr(select_module, "_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(select_module, "_time", lambda run: run() or 2.0)
    monkeypatch.setenv("MUON_FSDP_CACHE", str(tmp_path))

    def new_process() -> None:
        select_module._tuned.cache_clear()
        select_module._kernels_version.cache_clear()

    new_process()
    yield new_process
    new_process()


@pytest.fixture
def hopper(monkeypatch):
    """Pretend to have a Hopper GPU, on which nothing has been tried yet."""
    monkeypatch.setattr(select_module, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(select_module, "num_processors", lambda device: 132)
    monkeypatch.setattr(select_module, "_gluon_failure", None)
    monkeypatch.setattr(select_module, "_is_gluon_probed", False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def timed() -> Choice:
    """Time the candidates for the product; only one of them works."""

    def run(tiles: TileConfig | None) -> None:
        if tiles != FASTEST and tiles is not None:
            raise RuntimeError("out of shared memory")

    return select_module.tune(PRODUCT, CUDA, run)


def test_a_new_process_uses_the_timings_on_disk(ampere):
    choice = timed()
    ampere()
    assert select_module.select(PRODUCT, CUDA) == choice


@pytest.mark.parametrize(
    "entry",
    [
        {"config": [64, 64], "times": "short"},
        {"config": [64, 64, 64, 4, 3, False, 8, 1], "times": "long"},
        {"config": [64, 64, "64", 4, 3, False, 8], "times": "text"},
        {"config": [64, 64, -64, 4, 3, False, 8], "times": "negative"},
        {"config": [64, 64, 64, 4, 3, 1, 8], "times": "a number for a flag"},
        {"config": {"rows": 64}, "times": "a dict"},
        {"config": None, "times": None},
        {"times": "none"},
        "text",
        None,
    ],
)
def test_a_malformed_entry_is_timed_again(ampere, entry):
    choice = timed()
    file = select_module.cache_file("Some GPU")
    content = json.loads(file.read_text())
    content["timings"][PRODUCT.shape_class] = entry
    file.write_text(json.dumps(content))
    ampere()
    assert select_module.select(PRODUCT, CUDA).path is None
    assert timed() == choice
    ampere()
    assert select_module.select(PRODUCT, CUDA) == choice


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"timings": {}}', '{"made_by": "x", "timings": 3}', "\x00"])
def test_a_malformed_file_is_written_anew(ampere, text):
    choice = timed()
    select_module.cache_file("Some GPU").write_text(text)
    ampere()
    assert select_module.select(PRODUCT, CUDA).path is None
    timed()
    ampere()
    assert select_module.select(PRODUCT, CUDA) == choice


def test_timings_of_another_version_are_not_used(ampere, monkeypatch):
    timed()
    monkeypatch.setattr(sys.modules["muon_fsdp"], "__version__", "99.0")
    ampere()
    assert select_module.select(PRODUCT, CUDA).path is None


def test_a_kernel_that_fails_is_given_up_with_a_warning(hopper):
    assert select_module.select(LARGE, CUDA).path == "gluon"
    with pytest.warns(RuntimeWarning, match="Gluon kernel for Hopper GPUs is not used: no such layout"):
        select_module.give_up_gluon("no such layout")
    choice = select_module.select(LARGE, CUDA)
    assert choice.path == "triton"
    assert "no such layout" in choice.reason


class Products:
    """Stands in for the module of the Gluon kernel: computes by the library, with a relative error."""

    def __init__(self, error: float = 0.0) -> None:
        self.error, self.calls = error, 0

    def symmetric_product(self, a, b, addends, out, *, alpha=1.0, transposed=False):
        self.calls += 1
        product = alpha * a.double() @ b.double().mT
        for matrices, factor in addends:
            product += factor * matrices.double()
        return out.copy_(product * (1 + self.error))


class Fails:
    def symmetric_product(self, *args, **options):
        raise TypeError("make_tensordesc_arg() missing 1 required positional argument")


def use(monkeypatch, module) -> None:
    """Import this object as the module of the Gluon kernel."""
    monkeypatch.setitem(sys.modules, "muon_fsdp.kernels.triton_hopper", module)
    monkeypatch.setattr(import_module("muon_fsdp.kernels"), "triton_hopper", module, raising=False)


CPU = torch.device("cpu")


def test_a_kernel_that_computes_the_products_of_the_library_is_used(hopper, monkeypatch, recwarn):
    use(monkeypatch, module := Products(1e-3))
    assert all(select_module.probe_gluon(CPU) for _ in range(3))
    assert module.calls == 2  # the two products of one probe
    assert select_module.select(LARGE, CUDA).path == "gluon"
    assert not recwarn.list


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Products(0.05), "its products are wrong by 0.0"),
        (Products(torch.nan), "its products are wrong by nan"),
        (Fails(), "it failed with TypeError: make_tensordesc_arg"),
        (None, "it failed with ModuleNotFoundError"),
    ],
    ids=["wrong", "nan", "other interface", "no import"],
)
def test_a_kernel_that_another_triton_breaks_is_given_up_with_one_warning(hopper, monkeypatch, recwarn, module, reason):
    use(monkeypatch, module)
    if module is None:
        monkeypatch.delattr(import_module("muon_fsdp.kernels"), "triton_hopper")
    assert not any(select_module.probe_gluon(CPU) for _ in range(3))
    assert [reason in str(warning.message) for warning in recwarn] == [True]
    choice = select_module.select(LARGE, CUDA)
    assert choice.path == "triton"
    assert reason in choice.reason


def test_a_product_is_right_where_the_kernel_is_wrong(hopper, monkeypatch):
    """The first product of a process probes the kernel and then takes another one."""
    use(monkeypatch, Products(0.05))
    products = import_module("muon_fsdp.kernels.products")
    gluon, library = (Choice(path, None, "test") for path in ("gluon", "torch"))
    monkeypatch.setattr(products, "select", lambda *_: gluon if select_module._gluon_failure is None else library)
    x = torch.randn(2, 40, 24)
    with pytest.warns(RuntimeWarning, match="is not used: its products are wrong"):
        found = products.symmetric_product(x, x)
    torch.testing.assert_close(found, x @ x.mT)


def test_nothing_is_probed_while_a_graph_is_captured(hopper, monkeypatch):
    use(monkeypatch, Fails())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert select_module.probe_gluon(CPU)
    assert select_module.gluon_unusable() is None


@pytest.mark.parametrize(("module", "status"), [(Products(), "ok"), (Fails(), "warning")])
@pytest.mark.filterwarnings("ignore:The Gluon kernel for Hopper")
def test_doctor_says_whether_the_hopper_kernel_is_used(hopper, monkeypatch, module, status):
    use(monkeypatch, module)
    monkeypatch.setattr(checks, "probe_gluon", lambda device: select_module.probe_gluon(CPU))
    (finding,) = checks.check_hopper_kernel(CUDA)
    assert finding.status == status
    if status == "warning":
        assert finding.detail.startswith("not used: it failed with TypeError")
        assert finding.advice.startswith("Results are right without it")


def test_doctor_is_silent_on_other_gpus(ampere):
    assert checks.check_hopper_kernel(CUDA) == []


def test_kernels_launch_on_the_device_of_a_model_whose_first_parameter_is_elsewhere(monkeypatch):
    chosen = []

    def noting_device(device: torch.device):
        chosen.append(device.type)
        return original(device)

    original = muon.on_device
    monkeypatch.setattr(muon, "on_device", noting_device)
    parameters = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4, device="meta"))]
    optimizer = MuonOptimizer(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert chosen == ["meta"]


class Kernel:
    """A kernel that is compiled at its first launch, and notes how it is launched."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **options):
            self.calls.append(("compiled", grid, *args, options))
            return {(5, 1, 1): lambda *again: self.calls.append(("launched", *again))}

        return compile_and_launch


def test_a_kernel_is_compiled_once_and_then_launched_by_documented_means(monkeypatch):
    """No attribute of a compiled kernel is read: another version of Triton may not have it."""
    launch = import_module("muon_fsdp.kernels.launch")
    monkeypatch.setattr(launch, "_compiled", {})
    kernel = Kernel()
    for number in (1, 2):
        launch.launch(kernel, 5, ("a", number), {"BLOCK": 16}, "kind")
    options = {"BLOCK": 16, "num_warps": 4, "num_stages": 3}
    assert kernel.calls == [("compiled", (5,), "a", 1, options), ("launched", "a", 2, 16)]
