"""Kernels do not fail silently: a cache on disk, a kernel that does not load, a model on two devices."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.cli import checks
from muon_fsdp.kernels.select import Choice, Product
from muon_fsdp.kernels.tiles import KernelError, TileConfig
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
    select_module._gluon_import_failure.cache_clear()
    yield
    select_module._gluon_import_failure.cache_clear()


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


def test_a_kernel_that_fails_is_given_up_with_a_warning(hopper, monkeypatch):
    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setattr(select_module, "import_module", lambda name: None)
    assert select_module.select(LARGE, CUDA).path == "gluon"
    with pytest.warns(
        RuntimeWarning, match="Gluon kernel for Hopper GPUs is not used: it failed with CompilationError"
    ):
        select_module.give_up_gluon(KernelError("CompilationError: no such layout"))
    choice = select_module.select(LARGE, CUDA)
    assert choice.path == "triton"
    assert "CompilationError: no such layout" in choice.reason


def test_a_kernel_that_cannot_be_imported_warns_once(hopper, monkeypatch, recwarn):
    def no_module(name: str) -> None:
        raise ImportError("no module named gluon")

    monkeypatch.setattr("triton.__version__", "3.6.0")
    monkeypatch.setattr(select_module, "import_module", no_module)
    for _ in range(3):
        assert "import failed with ImportError: no module named gluon" in select_module.select(LARGE, CUDA).reason
    assert [str(warning.message)[:40] for warning in recwarn] == ["The Gluon kernel for Hopper GPUs is not u"[:40]]


@pytest.mark.parametrize(("version", "status"), [("3.6.1", "ok"), ("3.9.0", "warning")])
def test_doctor_says_whether_the_hopper_kernel_is_used(hopper, monkeypatch, version, status):
    monkeypatch.setattr("triton.__version__", version)
    monkeypatch.setattr(select_module, "import_module", lambda name: None)
    (finding,) = checks.check_hopper_kernel(CUDA)
    assert finding.status == status
    if status == "warning":
        assert finding.detail == "not used: it was tested with Triton 3.6 and 3.7, and 3.9 is installed"
        assert finding.advice.startswith("Install Triton 3.6 or 3.7.")


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


class Compiled:
    """A compiled kernel that notes how it was launched; `run` is what Triton does not document."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, run) -> None:
        self.calls: list[tuple] = []
        if run is not None:
            self.run = lambda *args: self.calls.append(("run", *run(*args)))

    def __getitem__(self, grid):
        return lambda *args: self.calls.append(("documented", grid, *args))


def as_now(x, y, z, stream, *others):
    assert (y, z, *others[:5]) == (1, 1, "function", "metadata", None, None, None)
    return (x, stream, *others[5:])


@pytest.fixture
def launching(monkeypatch):
    launch = import_module("muon_fsdp.kernels.launch")
    active = SimpleNamespace(get_current_device=lambda: 3, get_current_stream=lambda device: 7 + device)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "_run_is_usable", True)
    return launch


def test_a_launch_takes_the_short_way(launching):
    compiled = Compiled(as_now)
    launching._run(compiled, 5, ("a", "b"))
    assert compiled.calls == [("run", 5, 10, "a", "b")]


@pytest.mark.parametrize("run", [None, lambda grid: (grid,)], ids=["no such method", "another signature"])
def test_a_launch_falls_back_to_the_documented_way(launching, run):
    compiled = Compiled(run)
    for _ in range(2):
        launching._run(compiled, 5, ("a",))
    assert compiled.calls == [("documented", (5, 1, 1), "a")] * 2
    assert not launching._run_is_usable
    later = Compiled(as_now)  # the short way is not tried again
    launching._run(later, 5, ())
    assert later.calls == [("documented", (5, 1, 1))]


def test_an_error_of_a_launch_is_not_hidden(launching):
    def fail(*args):
        raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        launching._run(Compiled(fail), 5, ())
    assert launching._run_is_usable


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_is_called_around_launches(launching, monkeypatch, name):
    hook = SimpleNamespace(calls=[print])
    nothing = SimpleNamespace(calls=[])
    runtime = SimpleNamespace(**{"launch_enter_hook": nothing, "launch_exit_hook": nothing, name: hook})
    monkeypatch.setattr(launching, "knobs", SimpleNamespace(runtime=runtime))
    compiled = Compiled(as_now)
    launching._run(compiled, 5, ("a",))
    hook.calls.clear()
    launching._run(compiled, 5, ("a",))
    setattr(runtime, name, None)  # as in older versions of Triton
    launching._run(compiled, 5, ("a",))
    assert [call[0] for call in compiled.calls] == ["documented", "run", "run"]
