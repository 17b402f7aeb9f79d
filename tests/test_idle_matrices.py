"""Matrices whose momentum has nearly vanished stop, and all other matrices keep every bit (option `momentum_eps`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.linalg import tangent
from muon_fsdp.linalg.newton_schulz import inverse_norms
from muon_fsdp.linalg.scaling import damp
from tests import distributed_cases as cases
from tests.comparisons import assert_same
from tests.kernel_cases import DEVICE, kernels_fixture, random  # noqa: F401
from tests.pool import RankPool
from tests.reference import ReferenceMuon, ReferenceNorMuon, ReferenceSphere, matrix_with_condition

EPS = 1e-7
RULES = [
    ("muon", {}),
    ("normuon", {}),
    ("spectral_sphere", {"lambda_mode": "bracketed"}),
    ("spectral_sphere", {"lambda_mode": "projection"}),
    ("spectral_sphere", {"lambda_mode": "zero", "retract_mode": "dynamic"}),
]
IDS = ["muon", "normuon", "bracketed", "projection", "zero"]


def of_norms(norms: list[float], *shape: int) -> Tensor:
    """Return a batch of well-conditioned matrices with these Frobenius norms, in float64."""
    rng = np.random.default_rng(0)
    matrices = [matrix_with_condition(rng, *shape, 3.0) for _ in norms]
    return torch.tensor(np.stack([norm * m / np.linalg.norm(m) for norm, m in zip(norms, matrices, strict=True)]))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("rule", "reference"), [("muon", ReferenceMuon), ("normuon", ReferenceNorMuon)])
@pytest.mark.parametrize("options", [{}, {"momentum_eps": 1e-3}, {"momentum_eps": 0.0}], ids=str)
def test_a_matrix_without_gradients_follows_the_reference(rule, reference, nesterov, options):
    """One matrix of a fused weight has gradients and the other one does not, for longer than its momentum lasts."""
    rng = np.random.default_rng(0)
    p = nn.Parameter(torch.tensor(rng.standard_normal((10, 8))))
    optimizer = MuonOptimizer(
        [p], momentum=0.5, nesterov=nesterov, rule=rule, orthogonalization="exact", split_sizes=(6, 4), **options
    )
    expected = reference(p.detach().numpy(), momentum=0.5, nesterov=nesterov, blocks=[6, 4], **options)
    for step in range(40):
        grad = rng.standard_normal((10, 8))
        if step > 3:
            grad[6:] = 0
        p.grad = torch.tensor(grad)
        optimizer.step()
        expected.step(grad)
    np.testing.assert_allclose(p.detach().numpy(), expected.w, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mode", ["bracketed", "projection", "zero"])
def test_sso_follows_the_reference(mode):
    rng = np.random.default_rng(0)
    start = matrix_with_condition(rng, 12, 20, 20.0)
    expected = ReferenceSphere(start, momentum=0.5, mode="exact" if mode == "bracketed" else mode, momentum_eps=1e-2)
    p = nn.Parameter(torch.tensor(start))
    optimizer = MuonOptimizer(
        [p], rule="spectral_sphere", momentum=0.5, lambda_mode=mode, orthogonalization="exact", momentum_eps=1e-2,
        power_iteration_steps=50,
    )  # fmt: skip
    for step in range(20):
        grad = matrix_with_condition(rng, 12, 20, 5.0) if step < 3 else np.zeros((12, 20))
        p.grad = torch.tensor(grad)
        optimizer.step()
        expected.step(grad)
        np.testing.assert_allclose(p.detach().numpy(), expected.w, atol=2e-4)


@pytest.mark.parametrize(("rule", "options"), RULES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_with_gradients_keep_every_bit(rule, options, dtype):
    def train(**more: Any) -> list[Tensor]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in [(12, 20), (20, 12), (3, 8, 8), (12, 20)]]
        optimizer = MuonOptimizer(params, rule=rule, **options, **more)
        for _ in range(3):
            for p in params[:3]:
                p.grad = torch.randn_like(p)
            params[3].grad = 1e-10 * torch.randn_like(params[3])  # in a batch with another one
            optimizer.step()
        return [p.detach() for p in params]

    usual, without = train(), train(momentum_eps=0.0)
    assert all(map(torch.equal, usual[:3], without[:3]))
    assert not torch.equal(usual[3], without[3])


def stops_after(momentum: float, norm: float) -> int:
    """Return the number of steps without a gradient in which a momentum of this norm gives full updates."""
    return math.ceil(math.log(EPS / norm) / math.log(momentum))


def test_an_idle_matrix_stops_when_the_documentation_says():
    """Docs say: with momentum 0.95, a norm of 1 gives full updates for 315 steps, and 20 more in all after that."""
    assert stops_after(0.95, 1.0) == 315
    p = nn.Parameter(torch.zeros(4, 6))
    optimizer = MuonOptimizer([p], lr=1.0)
    p.grad = of_norms([1.0], 4, 6)[0].float()
    sizes = []
    for _ in range(500):
        before = p.detach().clone()
        optimizer.step()
        p.grad = torch.zeros_like(p)
        sizes.append(float((p.detach() - before).norm()))
    assert sizes[:315] == pytest.approx([2.0] * 315, rel=2e-3)
    assert sizes[315] < sizes[314]
    assert sum(sizes[315:]) == pytest.approx(2.0 * 20, rel=0.05)
    assert sizes[-1] < 1e-3


@pytest.mark.parametrize("retract_mode", ["hard", "dynamic"])
@pytest.mark.parametrize("mode", ["bracketed", "projection"])
def test_an_idle_matrix_stays_where_it_is_on_its_sphere(mode, retract_mode):
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(8, 12))
    optimizer = MuonOptimizer([p], rule="spectral_sphere", momentum=0.1, lambda_mode=mode, retract_mode=retract_mode)
    p.grad = torch.randn_like(p)
    for _ in range(20):
        optimizer.step()
        p.grad = torch.zeros_like(p)
    stopped = p.detach().clone()
    for _ in range(60):  # momentum underflows on the way
        optimizer.step()
        # "dynamic" multiplies by 1 +- retract_alpha lr, here 1e-3, in turns.
        assert float((p.detach() - stopped).norm() / stopped.norm()) < (1e-5 if retract_mode == "hard" else 4e-3)
    assert not optimizer.state[p]["momentum_buffer"].any()


def first_updates(rule: str, norms: list[float], options: dict[str, Any], dtype=torch.float32) -> list[Tensor]:
    """Return the updates of the first step, of matrices with gradients of these norms."""
    torch.manual_seed(0)
    params = [nn.Parameter(matrix.to(DEVICE, dtype)) for matrix in of_norms([1.0] * len(norms), 12, 16)]
    before = [p.detach().double().clone() for p in params]
    for p, grad in zip(params, of_norms(norms, 12, 16), strict=True):
        p.grad = grad.to(DEVICE, dtype)
    MuonOptimizer(params, lr=1.0, rule=rule, **options).step()
    return [old - p.detach().double() for old, p in zip(before, params, strict=True)]


@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("muon", {}),
        ("muon", {"ns_steps": 4}),
        ("muon", {"orthogonalization": "exact"}),
        ("normuon", {}),
        ("spectral_sphere", {"lambda_mode": "bracketed", "retract_mode": "dynamic", "ns_steps": 1}),
        ("spectral_sphere", {"lambda_mode": "projection"}),
    ],
    ids=str,
)
def test_kernels_damp_too(monkeypatch, kernels_everywhere, rule, options):
    monkeypatch.setattr(tangent, "unusable", lambda device: None)
    norms = [1.0, 2 * EPS, EPS / 4, 1e-36, 0.0]
    found = first_updates(rule, norms, options)
    full = first_updates(rule, norms, {**options, "momentum_eps": 0.0})
    assert "_damp_kernel" in kernels_everywhere
    assert_same(torch.stack(found[:2]), torch.stack(full[:2]))
    for norm, a, b in zip(norms[2:], found[2:], full[2:], strict=True):
        if rule != "spectral_sphere":  # W is retracted in the same step
            assert float(a.norm()) == pytest.approx(float(b.norm()) * norm / EPS, rel=1e-2, abs=1e-6)
    if rule == "spectral_sphere":
        still = first_updates(rule, [0.0] * len(norms), options)
        for norm, a, b, c in zip(norms[2:], found[2:], full[2:], still[2:], strict=True):
            torch.testing.assert_close(a - c, (b - c) * norm / EPS, rtol=2e-2, atol=2e-6)


@pytest.mark.parametrize("shape", [(4, 7, 9), (4, 100, 200)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_damping_by_the_kernel(monkeypatch, shape, dtype):
    triton_norms = pytest.importorskip("muon_fsdp.kernels.triton_norms")
    monkeypatch.setattr(triton_norms, "DAMPING_PROGRAMS", 2)  # so that a program has more than one chunk
    updates = random(*shape, dtype=dtype)
    norms = torch.tensor([1.0, EPS / 3, torch.nan, 1e-37], device=DEVICE)
    memory = torch.full((updates.numel() + 64,), 7.0, dtype=dtype, device=DEVICE)
    found = memory[: updates.numel()].view(shape).copy_(updates)
    triton_norms.damp(found, 1 / norms, EPS)
    factors = torch.tensor([1.0, 1 / 3, 1.0, 1e-30], device=DEVICE)[:, None, None]
    rounding = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0.0}  # the interpreter truncates to bfloat16
    torch.testing.assert_close(found, (updates.float() * factors).to(dtype), **rounding)
    assert_same(found[::2], updates[::2])
    assert (memory[updates.numel() :] == 7).all()
    by_library = updates.clone()
    damp(by_library, 1 / norms, EPS)
    torch.testing.assert_close(found, by_library, **rounding)


def test_inverse_norms_of_any_size():
    norms = [1e30, 1.0, 1e-30, 1e-38]
    found = inverse_norms(of_norms(norms, 5, 9).to(DEVICE, torch.float32))
    torch.testing.assert_close(found.double().cpu(), 1 / torch.tensor(norms).double(), rtol=1e-4, atol=0)
    assert inverse_norms(torch.zeros(2, 3, 4)).tolist() == [1.0, 1.0]
    assert inverse_norms(torch.full((1, 2, 2), 1e-45)).isfinite().all()


def test_options_of_groups():
    matrices = of_norms([1e-8, 1e-8], 4, 6).float()
    params = [nn.Parameter(torch.zeros(4, 6)) for _ in matrices]
    for p, grad in zip(params, matrices, strict=True):
        p.grad = grad.clone()
    optimizer = MuonOptimizer([{"params": params[:1]}, {"params": params[1:], "momentum_eps": 0}], lr=1.0)
    optimizer.step()
    assert [float(p.detach().norm()) for p in params] == pytest.approx([0.2, 2.0], rel=1e-2)
    with pytest.raises(ValueError, match="momentum_eps"):
        MuonOptimizer(params, momentum_eps=-1e-7)
    with pytest.raises(ValueError, match="momentum_eps"):
        MuonOptimizer([nn.Parameter(torch.zeros(3))], rule="adamw", momentum_eps=1e-7)


@pytest.mark.parametrize(("rule", "options"), RULES[:4], ids=IDS[:4])
def test_idle_matrices_stop_on_shards(ranks: RankPool, rule, options):
    """FSDP2 on two ranks, fused kernels in the interpreter: the owner of a matrix knows its norm, holders do not."""
    ranks.run(2, cases.by_kernels, cases.stop_idle, rule, options)
