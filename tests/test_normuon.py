"""Rule "normuon": against the float64 reference, on one device, on shards, by kernels and through checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from tests import agreement_cases, fsdp_cases
from tests import distributed_cases as cases
from tests.comparisons import assert_same
from tests.pool import RankPool
from tests.reference import ReferenceNorMuon

OPTIONS = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05}


def gradients(shape: tuple[int, ...], steps: int) -> torch.Tensor:
    """Make gradients with rows of very different sizes, as rare features cause."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-3, 0, shape[-2], dtype=torch.float64)[:, None]
    return torch.randn((steps, *shape), generator=generator, dtype=torch.float64) * sizes


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (9, 9), (1, 7), (7, 1)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_follows_the_reference(shape, nesterov):
    w = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    reference = ReferenceNorMuon(w.detach().numpy(), nesterov=nesterov, beta2=0.8, eps=1e-6, **OPTIONS)
    optimizer = MuonOptimizer(
        [("w", w)], rule="normuon", nesterov=nesterov, orthogonalization="exact", beta2=0.8, eps=1e-6,
        overrides={"w": "normuon"}, **OPTIONS,
    )  # fmt: skip
    for grad in gradients(shape, 20):
        w.grad = grad.clone()
        optimizer.step()
        np.testing.assert_allclose(w.detach().numpy(), reference.step(grad.numpy()), atol=1e-10)
        np.testing.assert_allclose(optimizer.state[w]["second_moment"].numpy(), reference.v[:, 0], atol=1e-12)


def test_logical_matrices_have_moments_of_their_own():
    """The weights are a fused weight in blocks and a stack of experts."""
    fused, stack = (nn.Parameter(torch.randn(*shape, dtype=torch.float64)) for shape in ((12, 8), (3, 4, 6)))
    optimizer = MuonOptimizer(
        [{"params": [fused], "split_sizes": (6, 4, 2)}, {"params": [stack]}],
        rule="normuon", orthogonalization="exact", ns_stepsize=0.5, **OPTIONS,
    )  # fmt: skip
    blocks = ReferenceNorMuon(fused.detach().numpy(), blocks=[6, 4, 2], ns_stepsize=0.5, **OPTIONS)
    experts = [ReferenceNorMuon(w.detach().numpy(), ns_stepsize=0.5, **OPTIONS) for w in stack]
    for grad, grads in zip(gradients((12, 8), 10), gradients((3, 4, 6), 10), strict=True):
        fused.grad, stack.grad = grad.clone(), grads.clone()
        optimizer.step()
        np.testing.assert_allclose(fused.detach().numpy(), blocks.step(grad.numpy()), atol=1e-10)
        expected = [expert.step(part.numpy()) for expert, part in zip(experts, grads, strict=True)]
        np.testing.assert_allclose(stack.detach().numpy(), np.stack(expected), atol=1e-10)


def test_rows_of_one_size_and_the_norm_of_muon():
    """This is the purpose of NorMuon. After one step the moments are those of the update itself."""
    grad = torch.randn(30, 10, generator=torch.Generator().manual_seed(1))  # O has rows of different sizes
    moved = {}
    for rule in ("muon", "normuon"):
        w = nn.Parameter(torch.zeros(30, 10))
        optimizer = MuonOptimizer([w], rule=rule, lr=1.0, momentum=0.0)
        w.grad = grad
        optimizer.step()
        moved[rule] = -w.detach()
    assert moved["muon"].norm(dim=1).std() > 0.05
    torch.testing.assert_close(moved["normuon"].norm(dim=1), moved["normuon"].norm(dim=1).mean().expand(30))
    torch.testing.assert_close(moved["normuon"].norm(), moved["muon"].norm(), rtol=1e-4, atol=0.0)


def test_nothing_moves_without_a_gradient():
    w, other = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 4))
    optimizer = MuonOptimizer([w, other], rule="normuon")
    for p in (w, other):
        p.grad = torch.randn(6, 4)
    optimizer.step()
    before, moments = w.detach().clone(), optimizer.state[w]["second_moment"].clone()
    w.grad, other.grad = None, torch.zeros(6, 4)
    optimizer.step()
    assert_same(w, before)
    assert_same(optimizer.state[w]["second_moment"], moments)
    optimizer = MuonOptimizer([other], rule="normuon", momentum=0.0)
    kept = other.detach().clone()
    optimizer.step()  # a zero gradient: no NaN, and no step
    assert_same(other, kept)
    assert not optimizer.state[other]["second_moment"].any()


def test_options_may_change_between_steps():
    w = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    reference = ReferenceNorMuon(w.detach().numpy(), **OPTIONS)
    optimizer = MuonOptimizer([w], rule="normuon", orthogonalization="exact", **OPTIONS)
    for beta2, grad in zip((0.95, 0.5, 0.0), gradients((6, 4), 3), strict=True):
        optimizer.param_groups[0]["beta2"] = beta2
        reference.beta2 = beta2
        w.grad = grad.clone()
        optimizer.step()
        np.testing.assert_allclose(w.detach().numpy(), reference.step(grad.numpy()), atol=1e-10)


def test_beta2_and_eps_of_the_wrapped_model():
    optimizer = FSDPMuonOptimizer(nn.Sequential(nn.Linear(4, 6)), rule="normuon", beta2=0.7, eps=1e-5)
    matrices, vectors = optimizer.param_groups
    assert (matrices["rule"], matrices["beta2"], matrices["eps"]) == ("normuon", 0.7, 1e-5)
    assert (vectors["betas"], vectors["eps"]) == ((0.9, 0.7), 1e-5)


@pytest.mark.parametrize(
    ("layout", "world_size", "strategy"),
    [
        ("fsdp", 3, "owner"),
        ("hsdp", 4, "owner"),
        ("hsdp", 4, "replicate"),
        ("fsdp_tp", 4, "owner"),
        ("ddp", 2, "replicate"),
    ],
)
def test_follows_the_reference_on_ranks(ranks: RankPool, layout, world_size, strategy):
    ranks.run(world_size, cases.follow_reference, layout, strategy, 5, "normuon")


@pytest.mark.parametrize(("layout", "world_size"), [("fsdp_columns", 2), ("experts_inside", 2), ("two_meshes", 4)])
def test_same_curve_as_one_device(ranks: RankPool, layout, world_size):
    options = {"rule": "normuon"}
    expected, weights = cases.curve(None, options)
    for losses, found in ranks.run(world_size, cases.curve, layout, {**options, "max_stage_bytes": 3000}):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(found[name], value, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("missing_on", ["some", "all"])
def test_a_parameter_without_any_gradient_is_left_alone_on_ranks(ranks: RankPool, missing_on):
    ranks.run(4, agreement_cases.missing_gradients, "hsdp", missing_on, "normuon")
    ranks.run(4, cases.by_kernels, agreement_cases.missing_gradients, "hsdp", missing_on, "normuon")


def test_same_curve_by_kernels(ranks: RankPool):
    options, sizes = {"rule": "normuon"}, {"hidden": 32}
    expected, _ = cases.curve(None, options, sizes, 3)
    for world_size in (1, 2):
        for losses, _ in ranks.run(world_size, cases.by_kernels, cases.curve, "fsdp", options, sizes, 3):
            np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}])
def test_a_checkpoint_continues_on_other_ranks(ranks: RankPool, tmp_path, options):
    expected = ranks.run(4, fsdp_cases.saved_in, str(tmp_path), "hsdp", options, "normuon")[0]
    for world_size, layout in [(2, "fsdp"), (4, "fsdp_tp")]:
        for losses in ranks.run(world_size, fsdp_cases.resumed_from, str(tmp_path), layout, options, "normuon"):
            np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=f"{layout} on {world_size}")
    alone = fsdp_cases.resumed_from(str(tmp_path), None, options, "normuon")
    np.testing.assert_allclose(alone, expected, rtol=1e-5)
