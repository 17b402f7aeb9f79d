"""Rule "sinkhorn": against the float64 reference, on one device, on shards, by kernels and through checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from tests import distributed_cases as cases
from tests import fsdp_cases
from tests.comparisons import assert_same
from tests.pool import RankPool
from tests.reference import ReferenceSinkhorn
from tests.small_model import Net


def gradients(shape: tuple[int, int], steps: int) -> torch.Tensor:
    """Make gradients of an embedding: tokens that never occur, rare tokens below tau, and all others."""
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn((steps, *shape), generator=generator, dtype=torch.float64)
    grads[:, ::3] = 0.0
    grads[:, 1::7] *= 1e-5
    return grads


@pytest.mark.parametrize("shape", [(30, 8), (8, 30), (9, 9)])
@pytest.mark.parametrize("options", [{}, {"sinkhorn_steps": 1}, {"tau": 0.5, "gamma": 1.0, "momentum": 0.0}])
def test_follows_the_reference(shape, options):
    w = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    of_reference = {name.removeprefix("sinkhorn_"): value for name, value in options.items()}
    reference = ReferenceSinkhorn(w.detach().numpy(), lr=0.1, **of_reference)
    optimizer = MuonOptimizer([("w", w)], rule="sinkhorn", lr=0.1, **options)
    start = w.detach().clone()
    for grad in gradients(shape, 10):
        w.grad = grad.clone()
        optimizer.step()
        np.testing.assert_allclose(w.detach().numpy(), reference.step(grad.numpy()), rtol=0, atol=1e-10)
    assert_same(w.detach()[::3], start[::3], "rows without gradients")
    assert not torch.equal(w, start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e25])
def test_every_row_moves_by_gamma_whatever_the_size_of_gradients(dtype, size):
    w = nn.Parameter(torch.zeros(20, 16, dtype=dtype))
    optimizer = MuonOptimizer([("w", w)], rule="sinkhorn", lr=1.0, sinkhorn_eps=0.0)
    w.grad = (gradients((20, 16), 1)[0] * size).to(dtype)
    optimizer.step()
    rms = w.detach().float().square().mean(dim=1).sqrt()
    expected = torch.where(w.grad.float().abs().amax(dim=1) > 1e-2 * size, 0.18, 0.0)
    torch.testing.assert_close(rms, expected, rtol=0.02, atol=0.0)


def test_a_zero_gradient_changes_nothing():
    w = nn.Parameter(torch.randn(6, 4))
    kept = w.detach().clone()
    optimizer = MuonOptimizer([("w", w)], rule="sinkhorn", lr=1.0)
    w.grad = torch.zeros(6, 4)
    optimizer.step()
    assert_same(w, kept)


def test_only_an_override_or_a_group_routes_an_embedding_to_it():
    assert {route.rule for route in MuonOptimizer(Net()).routing_report().rows} == {"muon", "adamw"}
    optimizer = MuonOptimizer(Net(), weight_decay=0.1, overrides={"*embed*": {"rule": "sinkhorn", "weight_decay": 0.0}})
    rules = {row.name: row.rule for row in optimizer.routing_report().rows}
    assert rules["embed.weight"] == "sinkhorn"
    assert rules["lm_head.weight"] == "adamw"
    assert rules["up.weight"] == "muon"
    by_rule = {group["rule"]: group for group in optimizer.param_groups}
    assert by_rule["sinkhorn"]["weight_decay"] == 0.0
    assert by_rule["muon"]["weight_decay"] == 0.1
    model = Net()
    grouped = MuonOptimizer([{"params": [("embed.weight", model.embed.weight)], "rule": "sinkhorn"}])
    assert [group["rule"] for group in grouped.param_groups] == ["sinkhorn"]


def test_the_plan_shows_what_an_embedding_costs():
    model = Net()
    without = MuonOptimizer(model).plan_report(world_size=2)
    with_rule = MuonOptimizer(model, overrides={"embed*": "sinkhorn"}).plan_report(world_size=2)
    assert with_rule.num_matrices == without.num_matrices + 1
    assert sum(with_rule.flops_by_rank.values()) > sum(without.flops_by_rank.values())


@pytest.mark.parametrize("steps", [0, 2, 10, 1.5])
def test_the_number_of_normalizations_is_odd(steps):
    with pytest.raises((ValueError, TypeError), match="sinkhorn_steps"):
        MuonOptimizer(Net(), overrides={"embed*": {"rule": "sinkhorn", "sinkhorn_steps": steps}})


@pytest.mark.parametrize(
    ("layout", "world_size"), [("fsdp", 2), ("fsdp", 3), ("fsdp_columns", 2), ("hsdp", 4), ("fsdp_tp", 4), ("ddp", 2)]
)
def test_follows_the_reference_on_ranks(ranks: RankPool, layout, world_size):
    ranks.run(world_size, cases.follow_reference, layout, "owner", 3, "sinkhorn")


def test_same_curve_by_kernels(ranks: RankPool):
    options, sizes = {"overrides": {"wte*": {"rule": "sinkhorn", "lr": 3.0}}}, {"hidden": 32}
    expected, _ = cases.curve(None, options, sizes, 4)
    for losses, _ in ranks.run(2, cases.by_kernels, cases.curve, "fsdp", options, sizes, 4):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_continues_on_other_ranks(ranks: RankPool, tmp_path):
    expected = ranks.run(4, fsdp_cases.saved_in, str(tmp_path), "hsdp", {}, "sinkhorn")[0]
    for world_size, layout in [(2, "fsdp"), (4, "fsdp_tp")]:
        for losses in ranks.run(world_size, fsdp_cases.resumed_from, str(tmp_path), layout, {}, "sinkhorn"):
            np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=f"{layout} on {world_size}")


def test_the_lr_of_adamw_follows_muon_and_not_the_rule_of_an_override():
    """The embedding comes first, and its rule has another default for lr."""
    optimizer = MuonOptimizer(
        nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 32)), overrides={"0.weight": "sinkhorn"}
    )
    (lr,) = {group["lr"] for group in optimizer.param_groups if group["rule"] == "adamw"}
    assert lr == pytest.approx(0.15 * 0.02)
