"""Count the launches of a step beyond those of Muon, and check their order."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from muon_fsdp import MuonOptimizer
from muon_fsdp.linalg import scaling, sphere, tangent
from muon_fsdp.rules import RULES, spectral_sphere
from muon_fsdp.statistics import shard_products
from muon_fsdp.step import fused, matrix_state
from muon_fsdp.step.metrics import Samples

pytest.importorskip("triton")

import tests.toy_rules  # noqa: F401 (registers them)
from muon_fsdp.kernels import triton_elementwise, triton_norms, triton_rows, triton_spectral, triton_subspace
from tests.comparisons import assert_same
from tests.kernel_cases import kernels_fixture, random  # noqa: F401

KERNELS = (triton_elementwise, triton_norms, triton_rows, triton_spectral, triton_subspace)
SHAPES = [(32, 48), (48, 32), (64, 32), (32, 32)]
NO_WORK = {"empty", "empty_strided", "empty_like", "new_empty", "_local_scalar_dense", "_to_copy"}  # or on the host


class Counter(TorchDispatchMode):
    """Counts operations that would launch something on a GPU: neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NO_WORK:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def no_samples(monkeypatch):
    """Take no samples for `metrics()`, as in most steps on a GPU."""
    monkeypatch.setattr(Samples, "start", lambda self, device_type, **options: None)


def launches(monkeypatch, rule: str, **options) -> list[str]:
    """Return the names of what the third step launches, for three matrices of each of four shapes."""
    kernels: list[str] = []
    for module in (fused, scaling, sphere, tangent, shard_products):
        monkeypatch.setattr(module, "unusable", lambda device: None)
    for module in KERNELS:
        monkeypatch.setattr(module, "launch", lambda kernel, *args, **options: kernels.append(kernel.fn.__name__))
    monkeypatch.setattr(matrix_state, "COLD_STEPS", 0)
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in SHAPES for _ in range(3)]
    optimizer = MuonOptimizer(params, rule=rule, **options)
    for p in params:
        p.grad = torch.randn(p.shape)
    for _ in range(2):
        optimizer.step()
    kernels.clear()
    with Counter() as counter:
        optimizer.step()
    return counter.names + kernels


@pytest.mark.parametrize(
    ("rule", "options", "most_per_batch", "most_in_all"),
    [("normuon", {}, 3, 4), ("spectral_sphere", {"lambda_mode": "projection"}, 5, 30)],
)
def test_what_a_rule_launches_besides_muon(monkeypatch, rule, options, most_per_batch, most_in_all):
    usual = len(launches(monkeypatch, "muon"))
    found = launches(monkeypatch, rule, **options)
    assert len(found) - usual <= most_per_batch * len(SHAPES) + most_in_all, sorted(found)


BEGINS, WAITS = "statistics begin", "the step waits"


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        (
            "spectral_sphere",
            {"lambda_mode": "projection"},
            [BEGINS, "prepare", "directions", WAITS, "project", "project", "apply"],
        ),
        ("toy_scaled", {}, [BEGINS, "prepare", "directions", WAITS, "apply"]),
    ],
)
def test_a_step_waits_for_the_stream_of_its_statistics(monkeypatch, rule, options, expected):
    """The order of what a GPU would do: statistics are there before they are used, and before weights change."""
    events: list[str] = []

    class Stream:
        device = torch.device("cpu")

        def __init__(self, event: str) -> None:
            self.event = event

        def wait_stream(self, other: object) -> None:
            events.append(self.event)

    monkeypatch.setattr(matrix_state.MatrixStates, "_own_stream", lambda self, stages: Stream(BEGINS))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(WAITS))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    noted = [(RULES[rule], "prepare"), (RULES[rule], "directions"), (RULES[rule], "apply")]
    for owner, name in [*noted, (spectral_sphere, "project_out")]:
        original, event = getattr(owner, name), name.removesuffix("_out")
        monkeypatch.setattr(owner, name, lambda *args, f=original, e=event: events.append(e) or f(*args), raising=False)
    params = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4, 6))]
    optimizer = MuonOptimizer(params, rule=rule, **options)
    for p in params:
        p.grad = torch.randn(p.shape)
    optimizer.step()
    assert events == expected


@pytest.mark.parametrize("rule", ["normuon", "toy_sphere"])
def test_matrices_without_a_gradient_keep_their_state_in_fused_launches(request, rule):
    """Kernels compute the batch with all its matrices, whether they are updated or not."""
    launched = request.getfixturevalue("kernels_everywhere")
    params = [nn.Parameter(random(6, 4)), nn.Parameter(random(6, 4))]
    optimizer = MuonOptimizer(params, rule=rule, ns_steps=1)
    for p in params:
        p.grad = random(6, 4)
    optimizer.step()
    kept, other = params
    before = {name: value.clone() for name, value in optimizer.state[kept].items()}
    moved = {name: value.clone() for name, value in optimizer.state[other].items()}
    kept.grad, other.grad = None, random(6, 4)
    optimizer.step()
    assert "_muon_prepare_kernel" in launched
    for name, value in before.items():
        assert_same(optimizer.state[kept][name], value, name)
    moments = [name for name in moved if "moment" in name]
    assert moments
    for name in moments:
        assert not torch.equal(optimizer.state[other][name], moved[name]), name
