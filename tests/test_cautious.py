"""Cautious weight decay: a weight decays where its update does not oppose it, with the signs of the old weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer, SpectralSphereOptimizer
from muon_fsdp.rules import Muon, Rule, register
from muon_fsdp.rules.registry import RULES
from tests import distributed_cases as cases
from tests import shard_state_cases
from tests.comparisons import assert_same
from tests.pool import RankPool
from tests.reference import ReferenceAdamW, ReferenceMuon, ReferenceNorMuon

CAUTIOUS = {"cautious_weight_decay": True, "adamw_cautious_weight_decay": True}


@pytest.mark.parametrize(("rule", "reference"), [("muon", ReferenceMuon), ("normuon", ReferenceNorMuon)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_follows_the_reference(rule, reference, as_tensor):
    generator = torch.Generator().manual_seed(0)
    w = nn.Parameter(torch.randn(6, 4, generator=generator, dtype=torch.float64))
    bias = nn.Parameter(torch.randn(6, generator=generator, dtype=torch.float64))
    references = (
        reference(w.detach().numpy(), lr=0.1, weight_decay=0.7, cautious=True),
        ReferenceAdamW(bias.detach().numpy(), lr=0.1, weight_decay=0.5, cautious=True),
    )
    optimizer = MuonOptimizer(
        [w, bias],
        rule=rule,
        lr=torch.tensor(0.1, dtype=torch.float64) if as_tensor else 0.1,
        weight_decay=0.7,
        adamw_lr=0.1,
        adamw_weight_decay=0.5,
        orthogonalization="exact",
        **CAUTIOUS,
    )
    for _ in range(6):
        for p, each in zip((w, bias), references, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            each.step(p.grad.numpy())
        optimizer.step()
    for p, each in zip((w, bias), references, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), each.w, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_reads_the_old_weight_and_counts_zero(dtype):
    """The update turns the sign of the third weight; tiny numbers have a product that float32 rounds to zero."""
    old = torch.tensor([1.0, -1.0, 0.01, 1.0, 1e-30, 0.0])
    update = torch.tensor([1.0, 1.0, 1.0, 0.0, -1e-30, 1.0])
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    w = old.to(dtype)
    expected = (w.float() * (1 - 0.05 * mask) - 0.1 * update).to(dtype)
    Rule().apply({"lr": 0.1, "weight_decay": 0.5, "cautious_weight_decay": True}, [w], [update.clone()])
    torch.testing.assert_close(w, expected, rtol=1e-6 if dtype == torch.float32 else 0.0, atol=0.0)


def test_without_weight_decay_nothing_changes():
    weights = []
    for options in ({}, CAUTIOUS):
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        model(torch.ones(2, 6)).square().sum().backward()
        MuonOptimizer(model, **options).step()
        weights.append([p.detach() for p in model.parameters()])
    for one, other in zip(*weights, strict=True):
        assert_same(one, other)


def test_rules_with_factors_refuse_it():
    w = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(ValueError, match="'spectral_sphere' has no cautious_weight_decay: the factor that brings"):
        SpectralSphereOptimizer([w], cautious_weight_decay=True)

    @register
    class Shrinking(Muon):
        name = "shrinking"

        def factors(self, values):
            return 0.5, 1.0

    try:
        with pytest.raises(ValueError, match="can't be used with rule 'shrinking': the rule multiplies whole matrices"):
            MuonOptimizer([w], rule="shrinking", cautious_weight_decay=True)
        optimizer = MuonOptimizer([w], rule="shrinking")
        optimizer.param_groups[0]["cautious_weight_decay"] = True
        w.grad = torch.randn(4, 4)
        with pytest.raises(ValueError, match=r"param_groups\[0\]: cautious_weight_decay=True can't be used"):
            optimizer.step()
    finally:
        del RULES["shrinking"]


@pytest.mark.parametrize(
    ("layout", "world_size", "rule"),
    [("fsdp", 2, "muon"), ("fsdp", 3, "muon"), ("fsdp", 3, "normuon"), ("hsdp", 4, "muon"), ("fsdp_tp", 4, "muon")],
)
def test_follows_the_reference_on_ranks(ranks: RankPool, layout, world_size, rule):
    ranks.run(world_size, cases.follow_reference, layout, "auto", 4, rule, CAUTIOUS)


def test_by_kernels_on_ranks(ranks: RankPool):
    options, sizes = {**CAUTIOUS, "weight_decay": 0.5, "adamw_weight_decay": 0.5}, {"hidden": 32}
    expected, _ = cases.curve(None, options, sizes, 3)
    for losses, _ in ranks.run(2, cases.by_kernels, cases.curve, "fsdp", options, sizes, 3):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_with_sharded_state(ranks: RankPool):
    options = {**CAUTIOUS, "weight_decay": 0.5, "adamw_weight_decay": 0.5}
    ranks.run(2, shard_state_cases.same_as_whole_state, options, 1e-6)
