"""MuonOptimizer on one device: the update against the float64 reference, groups, state and PyTorch's conventions."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from muon_fsdp import MuonOptimizer, create_hybrid_optimizer
from muon_fsdp.rules import RULES
from tests.reference import ReferenceAdamW, ReferenceMuon, matrix_with_condition

SHAPES = [(1, 7), (7, 1), (5, 5), (16, 40), (40, 16), (3, 33), (24, 24)]


def parameter(array: np.ndarray, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.tensor(array).to(dtype))


def set_grad(p: nn.Parameter, array: np.ndarray) -> np.ndarray:
    """Give p the gradient, and give back what it is after rounding to p's dtype."""
    p.grad = torch.tensor(array).to(p.dtype)
    return p.grad.double().numpy()


def train(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int, seed: int = 0, closure: bool = False) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 12, generator=generator, dtype=torch.float32).to(next(model.parameters()).dtype)

        def loss(x=x):
            optimizer.zero_grad()
            value = model(x).square().mean()
            value.backward()
            return value

        if closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()


def mlp(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 6)).to(dtype)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


# ------------------------------------------------------------------------------------------ against the reference


@st.composite
def muon_options(draw):
    return {
        "lr": draw(st.sampled_from([1e-3, 0.02, 0.1])),
        "momentum": draw(st.sampled_from([0.0, 0.5, 0.95])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "nesterov": draw(st.booleans()),
        "scale": draw(st.sampled_from(["v1", "v2", "v3", "v4", 0.7])),
        "ns_stepsize": draw(st.sampled_from([1.0, 0.5])),
    }


@settings(max_examples=25, deadline=None)
@given(
    groups=st.lists(
        st.tuples(muon_options(), st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3)), min_size=1, max_size=3
    ),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    condition=st.sampled_from([1.0, 30.0, 1e3]),
    seed=st.integers(0, 2**16),
)
def test_exact_orthogonalization_follows_the_reference_for_20_steps(groups, dtype, condition, seed):
    rng = np.random.default_rng(seed)
    torch_groups, references, parameters = [], [], []
    for options, shapes in groups:
        starts = [rng.standard_normal(shape) for shape in shapes]
        members = [parameter(start, dtype) for start in starts]
        torch_groups.append({"params": members, **options})
        references += [ReferenceMuon(p.detach().double().numpy(), **options) for p in members]
        parameters += members
    optimizer = MuonOptimizer(torch_groups, orthogonalization="exact")
    for _ in range(20):
        for p, reference in zip(parameters, references, strict=True):
            reference.step(set_grad(p, matrix_with_condition(rng, *p.shape, condition)))
        optimizer.step()
    # 2e-5 and 1e-10 of the size of what was added up: 20 updates of spectral norm lr * scale on top of the start.
    for p, reference in zip(parameters, references, strict=True):
        error = np.abs(p.detach().double().numpy() - reference.w).max()
        size = max(1.0, np.abs(reference.w).max())
        assert error <= (1e-10 if dtype == torch.float64 else 2e-5) * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nesterov", [False, True])
def test_half_precision_is_one_rounding_a_step(dtype, nesterov):
    rng = np.random.default_rng(0)
    p = parameter(rng.standard_normal((16, 40)), dtype)
    bias = parameter(rng.standard_normal(16), dtype)
    optimizer = MuonOptimizer(
        [p, bias],
        lr=0.1,
        weight_decay=0.3,
        nesterov=nesterov,
        orthogonalization="exact",
        adamw_lr=0.1,
        adamw_weight_decay=0.3,
    )
    matrix = ReferenceMuon(p.detach().double().numpy(), lr=0.1, weight_decay=0.3, nesterov=nesterov)
    vector = ReferenceAdamW(bias.detach().double().numpy(), lr=0.1, weight_decay=0.3)
    for _ in range(20):
        matrix.step(set_grad(p, rng.standard_normal((16, 40))))
        vector.step(set_grad(bias, rng.standard_normal(16)))
        optimizer.step()
        for reference, ours in ((matrix, p), (vector, bias)):
            rounded = torch.tensor(reference.w).to(dtype)
            neighbours = (
                torch.nextafter(rounded, torch.full_like(rounded, torch.inf)),
                torch.nextafter(rounded, torch.full_like(rounded, -torch.inf)),
            )
            # Equal to the reference rounded once; where float32 arithmetic lands on the other side of a tie, its neighbour.
            assert torch.equal(
                ours,
                torch.where(
                    ours == neighbours[0], neighbours[0], torch.where(ours == neighbours[1], neighbours[1], rounded)
                ),
            )
            assert (ours == rounded).float().mean() > 0.98
            reference.w = ours.detach().double().numpy()
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.float32
    assert optimizer.state[bias]["second_moment"].dtype == torch.float32
