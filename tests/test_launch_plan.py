"""Launch plans repeat the launches of a computation for other tensors, without Python code in between."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime import driver

from muon_fsdp.kernels import launch as launch_module
from muon_fsdp.kernels import launch_plan
from muon_fsdp.kernels.launch import DirectLauncher, TiledTensor, launch, mark_unrepeatable

SIGNATURE = {0: "tensordesc<fp32[1, 2, 2]>", 1: "*fp32", 2: "i32", 3: "fp32"}
TILES = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [1, 2, 2], "fp4_padded": False}


def floats(address: int, count: int) -> ctypes.Array:
    return (ctypes.c_float * count).from_address(address)


class Kernel:
    """Computes out = factor * source, as a compiled kernel of Triton 3.6 or 3.7 would be launched.

    The source is a tiled tensor, and the descriptor of a tiled tensor is ("map", address).
    """

    function, packed_metadata = 77, (4, 1, 0)
    metadata = SimpleNamespace(tensordesc_meta=[TILES])

    def __init__(self, has_signature: bool) -> None:
        self.launches = 0
        from triton.backends.nvidia.driver import wrap_handle_tensordesc

        lowest = self.launch_listed if has_signature else self.launch_flat
        self.run = SimpleNamespace(
            launch=wrap_handle_tensordesc(lowest, SIGNATURE, [TILES]),
            global_scratch_size=0,
            profile_scratch_size=0,
            launch_cooperative_grid=False,
            launch_pdl=True,
        )
        if has_signature:
            self.run.arg_annotations, self.run.kernel_signature = "annotations", "signature"

    def launch_flat(self, *args: object) -> None:
        programs, one, other, stream, function, cooperative, pdl, scratch, profile, metadata, *rest = args
        assert (one, other, stream, function, cooperative, pdl) == (1, 1, 9, 77, False, True)
        assert (scratch, profile, metadata, rest[:3]) == (None, None, (4, 1, 0), [None] * 3)
        self.compute(programs, rest[3:])

    def launch_listed(self, *args: object) -> None:
        programs, one, other, stream, function, cooperative, pdl, metadata, *rest = args
        assert (one, other, stream, function, cooperative, pdl) == (1, 1, 9, 77, False, True)
        assert (metadata, rest[:7]) == ((4, 1, 0), [*[None] * 5, "annotations", "signature"])
        self.compute(programs, rest[7])

    def compute(self, programs: object, args: list) -> None:
        self.launches += 1
        (name, address), *shape_and_strides, out, count, factor = args
        assert name == "map"
        assert len(shape_and_strides) == 6
        source = list(floats(address, count))
        floats(out, count)[:] = [factor * value for value in source]

    def __getitem__(self, grid: tuple[int, int, int]) -> object:
        """Launch it as `launch` does where no plan is used."""
        return lambda tiled, out, count, factor: self.compute(
            grid[0], [("map", tiled.base.data_ptr()), *tiled.shape, *tiled.strides, out.data_ptr(), count, factor]
        )


@pytest.fixture
def descriptors(monkeypatch):
    """Let Triton describe a tiled tensor as ("map", address), without a GPU."""
    utils = SimpleNamespace()
    for name in ("fill_tma_descriptor", "fill_tma_descriptor_tiled"):  # of Triton 3.6, and of 3.7
        setattr(utils, name, lambda address, *_: ("map", address))
    monkeypatch.setattr(driver, "_active", SimpleNamespace(utils=utils), raising=False)


@pytest.fixture(params=[False, True], ids=["as in Triton 3.6", "as in Triton 3.7"])
def kernel(request, monkeypatch, descriptors):
    made = Kernel(request.param)
    monkeypatch.setattr(launch_module, "_run_is_usable", False)
    monkeypatch.setattr(launch_module, "_compiled", {})
    monkeypatch.setattr(launch_plan, "_plans", {})
    monkeypatch.setattr(launch_plan, "_permanent", {})
    monkeypatch.setattr(launch_plan, "_is_usable", True)
    monkeypatch.setattr(launch_plan, "current_stream", lambda: 9)
    return made


def multiply(kernel: Kernel, source: Tensor, out: Tensor, factor: float) -> None:
    """Launch the kernel through `launch`, compiled already."""
    key = (id(kernel), "kind", (factor,), 4, 3, None)
    launch_module._compiled.setdefault(key, (kernel, kernel))
    launch(kernel, 5, (TiledTensor(source, (2, 2)), out, source.numel()), {"FACTOR": factor}, "kind")


def fourfold(kernel: Kernel, source: Tensor, out: Tensor) -> None:
    """Compute out = 4 * source in two launches, with a temporary tensor between and one that is freed."""
    first = torch.empty_like(source)
    multiply(kernel, source, first, 8.0)
    del first
    between = torch.empty_like(source)
    multiply(kernel, source, between, 2.0)
    multiply(kernel, between, out, 2.0)


def planned(kernel: Kernel, source: Tensor, key: str = "fourfold") -> tuple[Tensor, bool]:
    """Return four times the source, and whether Python code ran for it."""
    out, ran = torch.full_like(source, torch.nan), []
    compute = lambda: (ran.append(True), fourfold(kernel, source, out))[0]  # noqa: E731
    launch_plan.run_planned(key, [source, out, None], compute)
    return out, bool(ran)


def test_launches_are_repeated_for_tensors_at_other_addresses(kernel):
    kept = []
    for number in range(6):
        source = torch.randn(2, 3, 4)
        out, ran = planned(kernel, source)
        assert torch.equal(out, 4 * source)
        assert ran == (number == 0)
        kept += [source, out] if number % 2 else []  # so that some addresses return and others do not
    assert kernel.launches == 18


def test_other_shapes_keys_and_alignment_have_plans_of_their_own(kernel):
    memory = torch.randn(30)
    for source, key in [
        (torch.randn(2, 3, 4), "a"),
        (torch.randn(2, 4, 3), "a"),
        (torch.randn(2, 3, 4), "b"),
        (memory[1:25].view(2, 3, 4), "a"),
    ]:
        for number in range(2):
            out, ran = planned(kernel, source, key)
            assert torch.equal(out, 4 * source)
            assert ran == (number == 0)


def test_a_call_that_does_more_than_launch_is_not_planned(kernel):
    attempts = []

    def compute(source: Tensor, out: Tensor) -> None:
        attempts.append(launch_module.is_recording())
        multiply(kernel, source, out, 2.0)
        out.add_(1)

    for _ in range(8):
        source, out = torch.randn(1, 2, 2), torch.zeros(1, 2, 2)
        launch_plan.run_planned("adds", [source, out], lambda source=source, out=out: compute(source, out))
        assert torch.equal(out, 2 * source + 1)
    assert attempts == [True] * launch_plan.MOST_ATTEMPTS + [False] * (8 - launch_plan.MOST_ATTEMPTS)


def test_a_call_that_times_kernels_is_planned_the_next_time(kernel):
    ran = []

    def compute(source: Tensor, out: Tensor) -> None:
        ran.append(True)
        if len(ran) == 1:
            multiply(kernel, source, out, 5.0)
            mark_unrepeatable()
        multiply(kernel, source, out, 2.0)

    for _ in range(4):
        source, out = torch.randn(1, 2, 2), torch.zeros(1, 2, 2)
        launch_plan.run_planned("timed", [source, out], lambda source=source, out=out: compute(source, out))
        assert torch.equal(out, 2 * source)
    assert len(ran) == 2


def test_memory_of_nobody_is_not_planned_unless_it_is_kept_forever(kernel):
    table = torch.ones(1, 2, 2)

    def compute(out: Tensor) -> None:
        multiply(kernel, out, out, 1.0)
        launch(kernel, 5, (TiledTensor(out, (2, 2)), table, 4), {"FACTOR": 1.0}, "kind")

    for number in range(3):
        out = torch.randn(1, 2, 2)
        launch_plan.run_planned("table", [out], lambda out=out: compute(out))
        assert torch.equal(table, out)
        assert any(isinstance(plan, launch_plan.LaunchPlan) for plan in launch_plan._plans.values()) == (number > 1)
        if number == 1:
            launch_plan.keep_forever(table)


def test_tensors_that_share_memory_are_not_planned(kernel):
    for _ in range(3):
        memory = torch.randn(1, 2, 2)
        expected = 4 * memory
        launch_plan.run_planned("in place", [memory, memory], lambda memory=memory: fourfold(kernel, memory, memory))
        assert torch.equal(memory, expected)
    assert not any(isinstance(plan, launch_plan.LaunchPlan) for plan in launch_plan._plans.values())


def test_a_plan_uses_as_much_memory_as_the_computation(kernel):
    regions = launch_plan._Regions([torch.zeros(4), None], [(1000, 1100), (1050, 1200), (1200, 1300), (100, 200)])
    assert regions.sizes == [100, 200, 100]
    assert regions.find(1199) == (3, 199)
    assert regions.find(1200) == (4, 0)
    assert regions.find(1300) is None
    assert regions.find(50) is None


def test_two_threads_do_not_share_the_arguments_of_a_plan(kernel):
    """While one thread uses a plan, another one runs the computation itself."""
    source = torch.randn(1, 2, 2)
    planned(kernel, source)
    (plan,) = launch_plan._plans.values()
    found = []
    with plan._lock:
        thread = threading.Thread(target=lambda: found.append(planned(kernel, source)))
        thread.start()
        thread.join()
    ((out, ran),) = found
    assert ran
    assert torch.equal(out, 4 * source)


def test_an_unknown_version_of_triton_runs_the_computation(kernel):
    source = torch.randn(1, 2, 2)
    planned(kernel, source)
    (plan,) = launch_plan._plans.values()

    def refuse(stream: int, args: list) -> None:
        raise TypeError("function takes exactly 3 arguments")

    plan._calls[1] = refuse, []
    for _ in range(2):
        out, ran = planned(kernel, source)
        assert ran
        assert torch.equal(out, 4 * source)
    assert not launch_plan._is_usable
    del kernel.run.launch_pdl
    with pytest.raises(AttributeError):
        DirectLauncher(kernel)


def test_direct_launches_pass_what_triton_passes(descriptors):
    """Triton's own launcher and ours end in the same call of the function below, in the installed version."""
    from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc

    calls = []
    launcher = object.__new__(CudaLauncher)
    launcher.launch = wrap_handle_tensordesc(lambda *args: calls.append(_plain(args)), SIGNATURE, [TILES])
    for name in ("global_scratch", "profile_scratch"):
        setattr(launcher, f"{name}_size", 0)
        setattr(launcher, f"{name}_align", 1)
    launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, False, True
    if "kernel_signature" in CudaLauncher.__init__.__code__.co_names:
        launcher.arg_annotations, launcher.kernel_signature = "annotations", "signature"
    tiled = TiledTensor(torch.randn(1, 2, 2), (2, 2))
    launcher(5, 1, 1, 9, 77, (4, 1, 0), None, None, None, tiled, 1234, 4, 2.0)
    compiled = SimpleNamespace(
        run=launcher, function=77, packed_metadata=(4, 1, 0), metadata=SimpleNamespace(tensordesc_meta=[TILES])
    )
    direct = DirectLauncher(compiled)
    direct.call(5)(9, [*direct.describe(tiled, 0), 1234, 4, 2.0])
    assert len(calls) == 2
    assert calls[0] == calls[1]


def _plain(args: tuple) -> list:
    return [list(arg) if isinstance(arg, (list, tuple)) else arg for arg in args]
