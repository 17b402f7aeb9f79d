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
from tests.comparisons import assert_changed, assert_same
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
        named = [(f"w{len(parameters) + index}", p) for index, p in enumerate(members)]
        torch_groups.append({"params": named, **options})
        references += [ReferenceMuon(p.detach().double().numpy(), **options) for p in members]
        parameters += members
    full_names = {f"w{index}": "muon" for index in range(len(parameters))}  # one row or column too
    optimizer = MuonOptimizer(torch_groups, orthogonalization="exact", overrides=full_names)
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
            # The reference rounded once, or its neighbour where float32 lands on the other side of a tie.
            is_neighbour = (ours == neighbours[0]) | (ours == neighbours[1])
            assert_same(ours, torch.where(is_neighbour, ours, rounded))
            assert (ours == rounded).float().mean() > 0.98
            reference.w = ours.detach().double().numpy()
    assert optimizer.state[p]["momentum_buffer"].dtype == torch.float32
    assert optimizer.state[bias]["second_moment"].dtype == torch.float32


@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from([(9,), (), (4, 5), (2, 3, 4)]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    betas=st.sampled_from([(0.9, 0.95), (0.0, 0.999), (0.9, 0.0)]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**16),
)
def test_adamw_follows_the_reference_for_20_steps(shape, dtype, betas, weight_decay, seed):
    rng = np.random.default_rng(seed)
    p = parameter(rng.standard_normal(shape), dtype)
    group = {"params": [p], "rule": "adamw", "lr": 0.01, "betas": betas, "eps": 1e-6, "weight_decay": weight_decay}
    reference = ReferenceAdamW(p.detach().double().numpy(), lr=0.01, betas=betas, eps=1e-6, weight_decay=weight_decay)
    optimizer = MuonOptimizer([group])
    for _ in range(20):
        reference.step(set_grad(p, rng.standard_normal(shape)))
        optimizer.step()
    error = np.abs(p.detach().double().numpy() - reference.w).max()
    assert error <= (1e-10 if dtype == torch.float64 else 2e-5)


def test_adamw_equals_torch():
    ours, theirs = nn.Parameter(torch.randn(7, 5)), None
    theirs = nn.Parameter(ours.detach().clone())
    mine = MuonOptimizer([{"params": [ours], "rule": "adamw", "lr": 0.01, "weight_decay": 0.1}])
    torchs = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(20):
        ours.grad = torch.randn(7, 5)
        theirs.grad = ours.grad.clone()
        mine.step()
        torchs.step()
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_default_orthogonalization_stays_within_its_tolerance():
    """Singular values above 4e-3 of the Frobenius norm come out within 1.75e-3 of 1, so 20 steps may differ from the
    exact polar factor by 20 * lr * scale * 1.75e-3 in the spectral norm, and float32 adds little to that."""
    rng = np.random.default_rng(0)
    p = parameter(rng.standard_normal((40, 16)), torch.float32)
    reference = ReferenceMuon(p.detach().double().numpy(), lr=0.02, momentum=0.9)
    optimizer = MuonOptimizer([p], lr=0.02, momentum=0.9)
    for _ in range(20):
        reference.step(set_grad(p, rng.standard_normal((40, 16))))
        optimizer.step()
    error = np.linalg.norm(p.detach().double().numpy() - reference.w, ord=2)
    assert error <= 20 * 0.02 * (40 / 16) ** 0.5 * 1.75e-3 + 1e-5


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("scale", "adjust"), [("v2", "original"), ("v4", "match_rms_adamw")])
def test_agrees_with_torch_muon(nesterov, scale, adjust):
    """torch.optim.Muon iterates in bfloat16, so the two agree to bfloat16's rounding of an orthogonal matrix."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in [(48, 20), (20, 48), (32, 32)]]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    mine = MuonOptimizer(ours, orthogonalization="keller", scale=scale, **options)
    torchs = torch.optim.Muon(theirs, adjust_lr_fn=adjust, **options)
    for _ in range(10):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        torchs.step()
    for a, b in zip(ours, theirs, strict=True):
        moved = 10 * 0.02 * (0.2 * 48**0.5 if scale == "v4" else (48 / 20) ** 0.5) * min(a.shape) ** 0.5
        assert (a - b).norm() < 0.02 * moved


# -------------------------------------------------------------------------------------------------- matrix views


def updates_of(optimizer: MuonOptimizer, *parameters: nn.Parameter) -> list[torch.Tensor]:
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    return [old - p.detach() for old, p in zip(before, parameters, strict=True)]


def expected_update(grad: torch.Tensor, **options) -> torch.Tensor:
    """Return what Muon with lr = 1 subtracts from a separate weight with this gradient."""
    reference = ReferenceMuon(np.zeros(grad.shape), lr=1.0, **options)
    return -torch.tensor(reference.step(grad.double().numpy())).to(grad.dtype)


@pytest.fixture
def exact():
    return {"lr": 1.0, "orthogonalization": "exact"}


def test_stacked_experts_are_separate_matrices(exact):
    p = nn.Parameter(torch.randn(3, 8, 5, dtype=torch.float64))
    p.grad = torch.randn_like(p)
    (update,) = updates_of(MuonOptimizer([p], **exact), p)
    torch.testing.assert_close(update, torch.stack([expected_update(grad) for grad in p.grad]))


@pytest.mark.parametrize("convolution", [nn.Conv1d(4, 8, 3), nn.Conv2d(4, 8, 3), nn.Conv3d(2, 5, 2)])
def test_convolutions_are_flattened(convolution, exact):
    convolution.double()
    weight = convolution.weight
    weight.grad = torch.randn_like(weight)
    (update,) = updates_of(MuonOptimizer(convolution, **exact), weight)
    torch.testing.assert_close(update.flatten(1), expected_update(weight.grad.flatten(1)))


def test_channels_last_convolution(exact):
    layer = nn.Conv2d(4, 8, 3).double().to(memory_format=torch.channels_last)
    layer.weight.grad = torch.randn(8, 4, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    (update,) = updates_of(MuonOptimizer(layer, **exact), layer.weight)
    torch.testing.assert_close(update.flatten(1), expected_update(layer.weight.grad.flatten(1)))


def test_heads_and_splits(exact):
    heads, qkv = (nn.Parameter(torch.randn(12, 5, dtype=torch.float64)) for _ in range(2))
    heads.grad, qkv.grad = torch.randn_like(heads), torch.randn_like(qkv)
    groups = [{"params": [heads], "num_heads": 3}, {"params": [qkv], "split_sizes": [6, 4, 2]}]
    by_head, by_split = updates_of(MuonOptimizer(groups, **exact), heads, qkv)
    torch.testing.assert_close(by_head, expected_update(heads.grad, blocks=[4, 4, 4]))
    torch.testing.assert_close(by_split, expected_update(qkv.grad, blocks=[6, 4, 2]))


def test_attn_by_label_group_and_override(exact):
    grad = torch.randn(6, 8, dtype=torch.float64)
    expected = torch.stack([expected_update(block) for block in grad.view(4, 6, 2)]).view(6, 8)

    def attn_parameter():
        p = nn.Parameter(torch.randn(6, 8, dtype=torch.float64))
        p.grad = grad.clone()
        return p

    labelled = attn_parameter()
    labelled.label = "attn"
    by_group, by_name = attn_parameter(), attn_parameter()
    optimizers = [
        (labelled, MuonOptimizer([labelled], **exact)),
        (by_group, MuonOptimizer([{"params": [by_group], "view": "attn"}], **exact)),
        (by_name, MuonOptimizer([("block.qkvo", by_name)], overrides={"*.qkvo": {"view": "attn"}}, **exact)),
    ]
    for p, optimizer in optimizers:
        torch.testing.assert_close(updates_of(optimizer, p)[0], expected)


def test_a_foreign_label_means_nothing(exact):
    p = nn.Parameter(torch.randn(6, 8, dtype=torch.float64))
    p.label = "mlp"
    p.grad = torch.randn_like(p)
    torch.testing.assert_close(updates_of(MuonOptimizer([p], **exact), p)[0], expected_update(p.grad))


def test_transposed_storage_swaps_d_out_and_d_in(exact):
    class Conv1D(nn.Module):  # as in Hugging Face Transformers: (in, out)
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 15, dtype=torch.float64))

    layer = Conv1D()
    layer.weight.grad = torch.randn_like(layer.weight)
    optimizer = MuonOptimizer(layer, overrides={"weight": {"split_sizes": (5, 5, 5)}}, **exact)
    (update,) = updates_of(optimizer, layer.weight)
    torch.testing.assert_close(update, expected_update(layer.weight.grad.T, blocks=[5, 5, 5]).T)
    whole = MuonOptimizer(layer, scale="v3", **exact)
    torch.testing.assert_close(updates_of(whole, layer.weight)[0], expected_update(layer.weight.grad.T, scale="v3").T)


def test_equal_matrices_are_computed_together(monkeypatch):
    calls = []
    direction = RULES["muon"].direction
    monkeypatch.setattr(
        type(RULES["muon"]),
        "direction",
        lambda _, batch: calls.append(tuple(batch.matrices.shape)) or direction(batch),
    )
    groups = [{"params": [nn.Parameter(torch.randn(6, 8)) for _ in range(4)], "lr": lr} for lr in (0.1, 0.2)]
    groups.append({"params": [nn.Parameter(torch.randn(3, 6, 8)), nn.Parameter(torch.randn(8, 6))]})
    optimizer = MuonOptimizer(groups)
    for p in optimizer._parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert sorted(calls) == [(1, 8, 6), (11, 6, 8)]


@pytest.mark.parametrize("max_stage_bytes", [1, 500, 2000, 2**28])
def test_stages_do_not_change_the_result(max_stage_bytes):
    def run(max_stage_bytes):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape)) for shape in [(6, 8), (6, 8), (5, 6, 8), (12, 4), (9,)]]
        optimizer = MuonOptimizer(parameters, max_stage_bytes=max_stage_bytes)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn_like(p)
            optimizer.step()
        return [p.detach() for p in parameters]

    for bounded, unbounded in zip(run(max_stage_bytes), run(2**40), strict=True):
        torch.testing.assert_close(bounded, unbounded, atol=1e-4, rtol=0)


# --------------------------------------------------------------------------------------------------------- groups


def test_a_mixed_group_becomes_one_group_per_rule():
    w, b, s = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(()))
    optimizer = MuonOptimizer([b, w, s], lr=0.03, weight_decay=0.2, adamw_lr=0.004, adamw_weight_decay=0.05)
    matrices, rest = optimizer.param_groups
    assert (matrices["rule"], matrices["lr"], matrices["weight_decay"]) == ("muon", 0.03, 0.2)
    assert (rest["rule"], rest["lr"], rest["weight_decay"]) == ("adamw", 0.004, 0.05)
    assert rest["betas"] == (0.9, 0.95)
    assert matrices["params"] == [w]
    assert [id(p) for p in rest["params"]] == [id(b), id(s)]


def test_options_of_a_mixed_group_and_of_one_without_matrices():
    def pair():
        return [nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4))]

    groups = [
        {"params": pair(), "lr": 0.5, "weight_decay": 0.1, "momentum": 0.8},
        {"params": pair(), "lr": 0.6, "adamw_lr": 0.007, "adamw_betas": (0.8, 0.9)},
        {"params": pair()[1:], "lr": 0.02, "weight_decay": 0.3},
    ]
    optimizer = MuonOptimizer(groups, adamw_lr=0.001)
    seen = [(g["rule"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert seen == [
        ("muon", 0.5, 0.1),
        ("adamw", 0.001, 0.0),
        ("muon", 0.6, 0.0),
        ("adamw", 0.007, 0.0),
        ("adamw", 0.02, 0.3),
    ]
    assert optimizer.param_groups[0]["momentum"] == 0.8
    assert optimizer.param_groups[3]["betas"] == (0.8, 0.9)


def test_a_group_holds_the_common_keys_and_those_of_its_rule():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    optimizer = create_hybrid_optimizer(model, overrides={"1.weight": {"num_heads": 2}})
    common = {"params", "param_names", "rule", "micro_step", "started"}
    for group in optimizer.param_groups:
        assert set(group) == common | set(RULES[group["rule"]].all_options)


@pytest.mark.parametrize(
    "as_params",
    [
        lambda w: w,
        lambda w: [w],
        lambda w: iter([w]),
        lambda w: [("w", w)],
        lambda w: {"w": w}.items(),
        lambda w: [{"params": w}],
        lambda w: [{"params": [("w", w)]}],
    ],
)
def test_every_form_of_params_is_trained(as_params):
    w = nn.Parameter(torch.randn(4, 5))
    optimizer = MuonOptimizer(as_params(w))
    w.grad = torch.randn_like(w)
    (update,) = updates_of(optimizer, w)
    assert update.norm() > 0


def test_add_param_group_after_training_began():
    model = mlp()
    optimizer = MuonOptimizer(model)
    train(optimizer, model, 3)
    extra = nn.Linear(6, 6)
    optimizer.add_param_group({"params": extra.parameters(), "lr": 0.01})
    assert [g["rule"] for g in optimizer.param_groups] == ["muon", "adamw", "muon", "adamw"]
    assert optimizer.param_groups[2]["lr"] == 0.01
    extra(torch.randn(2, 6)).sum().backward()
    before = weights(extra)
    optimizer.step()
    assert_changed(weights(extra), before)
    assert set(optimizer.state[extra.bias]) == {"momentum_buffer", "second_moment", "step"}


def test_a_refused_group_changes_nothing():
    model = mlp()
    optimizer = MuonOptimizer(model)
    with pytest.raises(ValueError, match="given twice"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.randn(3, 3)), model[0].weight]})
    with pytest.raises(ValueError, match="does not divide"):
        optimizer.add_param_group(
            {"params": [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3, 3))], "num_heads": 2}
        )
    assert len(optimizer.param_groups) == 2
    train(optimizer, model, 1)


# -------------------------------------------------------------------------------------- PyTorch's own conventions


def test_scheduler_changes_take_effect_at_once():
    model = mlp()
    optimizer = MuonOptimizer(model, lr=0.02, adamw_lr=0.004)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    sizes = []
    for _ in range(3):
        before = model[0].weight.detach().clone()
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        sizes.append(float((model[0].weight.detach() - before).norm()))
        scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.02 / 8, 0.004 / 8]
    np.testing.assert_allclose([sizes[1] / sizes[0], sizes[2] / sizes[1]], 0.5, rtol=0.05)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.01], total_steps=10),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=2),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
        ),
    ],
)
@pytest.mark.parametrize("number", [float, torch.tensor])
def test_torch_schedulers(make, number):
    model = mlp()
    optimizer = MuonOptimizer(model, lr=number(0.02), adamw_lr=number(3e-4))
    scheduler = make(optimizer)
    seen = set()
    for _ in range(5):
        train(optimizer, model, 1)
        scheduler.step()
        seen.add((float(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["momentum"]))
    assert len(seen) > 2
    assert [i for i, w in enumerate(weights(model)) if not w.isfinite().all()] == []


@pytest.mark.parametrize("number", [float, torch.tensor])
def test_scheduler_on_a_plateau(number):
    model = mlp()
    optimizer = MuonOptimizer(model, lr=number(0.02), adamw_lr=number(4e-3))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    for loss in (3.0, 2.0, 2.0, 2.0):  # no better for longer than the patience
        train(optimizer, model, 1)
        scheduler.step(loss)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.01, 2e-3])


@pytest.mark.parametrize("number", [float, torch.tensor])
def test_one_cycle_with_a_peak_for_each_group(number):
    """Momentum is cycled where a rule has one; a peak for all groups would give AdamW the rate of matrices."""
    optimizer = MuonOptimizer(mlp(), lr=number(0.02), adamw_lr=number(3e-4))
    peaks = [float(group["lr"]) for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peaks, total_steps=10, pct_start=0.3)
    rates, momenta = [], []
    for _ in range(9):
        optimizer.step()
        scheduler.step()
        rates.append([float(group["lr"]) for group in optimizer.param_groups])
        momenta.append(optimizer.param_groups[0]["momentum"])
    assert [max(column) for column in zip(*rates, strict=True)] == pytest.approx(peaks)
    assert momenta[1] == pytest.approx(0.85)  # lowest at the peak
    assert momenta[-1] == pytest.approx(0.95)
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.95)


def test_cyclic_momentum_is_that_of_the_matrices():
    optimizer = MuonOptimizer(mlp())
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, max_momentum=0.97)
    assert optimizer.param_groups[0]["momentum"] == 0.97


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_lr_gives_the_steps_of_a_float(shape):
    lr = torch.full(shape, 0.05)
    model, other = mlp(), mlp()
    by_tensor, by_float = (
        MuonOptimizer(model, lr=lr, adamw_lr=lr, weight_decay=0.1),
        MuonOptimizer(other, lr=0.05, adamw_lr=0.05, weight_decay=0.1),
    )
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (by_tensor, by_float)]
    for _ in range(3):
        train(by_tensor, model, 1)
        train(by_float, other, 1)
        for scheduler in schedulers:
            scheduler.step()
    for a, b in zip(weights(model), weights(other), strict=True):
        torch.testing.assert_close(a, b)
    assert float(by_tensor.param_groups[1]["lr"]) == pytest.approx(0.05 / 8)
    assert by_tensor.param_groups[0]["lr"] is lr  # as with torch's optimizers


def test_closure_and_hooks():
    model, other = mlp(), mlp()
    with_closure, without = MuonOptimizer(model), MuonOptimizer(other)
    events = []
    with_closure.register_step_pre_hook(lambda *_: events.append("pre"))
    with_closure.register_step_post_hook(lambda *_: events.append("post"))
    train(with_closure, model, 2, closure=True)
    train(without, other, 2)
    assert_same(weights(model), weights(other))
    assert events == ["pre", "post"] * 2
    assert with_closure.step(lambda: torch.tensor(3.0)) == 3.0


def test_two_runs_are_bit_identical():
    results = []
    for _ in range(2):
        model = mlp()
        train(MuonOptimizer(model, nesterov=True, weight_decay=0.1), model, 10)
        results.append(weights(model))
    assert_same(*results)


def test_gradients_are_not_changed():
    model = mlp()
    optimizer = MuonOptimizer(model, nesterov=True)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    grads = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    optimizer.step()
    assert_same(grads, [p.grad for p in model.parameters()])


def test_momentum_is_not_overwritten_by_the_update():
    p = nn.Parameter(torch.randn(6, 8).bfloat16())
    optimizer = MuonOptimizer([p], nesterov=False, momentum=0.5)
    p.grad = torch.randn_like(p)
    expected = torch.zeros(6, 8)
    for _ in range(3):
        optimizer.step()
        expected = 0.5 * expected + p.grad.float()
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], expected)


def test_state_dict_round_trip_gives_identical_steps(tmp_path):
    model = mlp()
    optimizer = MuonOptimizer(model, nesterov=True)
    train(optimizer, model, 5)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint")
    saved = torch.load(tmp_path / "checkpoint", weights_only=True)
    resumed_model = mlp(seed=1)
    resumed = MuonOptimizer(resumed_model, lr=1.0, nesterov=False)
    resumed_model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(optimizer, model, 5, seed=1)
    train(resumed, resumed_model, 5, seed=1)
    assert_same(weights(model), weights(resumed_model))


def test_a_loaded_state_shares_no_memory():
    model, other = mlp(), mlp()
    optimizer, resumed = MuonOptimizer(model), MuonOptimizer(other)
    train(optimizer, model, 2)
    resumed.load_state_dict(optimizer.state_dict())
    before = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    train(resumed, other, 2)
    assert_same(optimizer.state[model[0].weight]["momentum_buffer"], before)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.float64, torch.float32, torch.float32),
    ],
)
def test_load_into_another_dtype_keeps_the_precision_of_the_state(source, target, expected):
    model, other = mlp(dtype=source), mlp(dtype=target)
    optimizer, resumed = MuonOptimizer(model), MuonOptimizer(other)
    train(optimizer, model, 3)
    resumed.load_state_dict(optimizer.state_dict())
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for name, value in resumed.state[q].items():
            assert value.dtype == (torch.float32 if name == "step" else expected)
            assert_same(value.float(), optimizer.state[p][name].float(), name)
    train(resumed, other, 2)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_deepcopy_and_pickle(duplicate):
    model = mlp()
    optimizer = MuonOptimizer(model, nesterov=True, nonfinite="skip", overrides={"0.weight": {"num_heads": 2}})
    train(optimizer, model, 3)
    other_model, other = duplicate((model, optimizer))
    train(optimizer, model, 3, seed=1)
    train(other, other_model, 3, seed=1)
    assert_same(weights(model), weights(other_model))
    assert str(other.routing_report()) == str(optimizer.routing_report())
    other.add_param_group({"params": [("extra", nn.Parameter(torch.randn(3, 3)))]})


def test_load_hooks_of_the_user_run_around_the_check():
    model = mlp()
    optimizer = MuonOptimizer(model)
    train(optimizer, model, 1)
    saved = optimizer.state_dict()
    renamed = {**saved, "state": {f"p{key}": value for key, value in saved["state"].items()}}
    renamed["param_groups"] = [{**g, "params": [f"p{i}" for i in g["params"]]} for g in saved["param_groups"]]
    broken = {**renamed, "state": {}, "param_groups": []}
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: renamed)
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[model[0].weight]["momentum_buffer"].dtype)
    )
    optimizer.load_state_dict(broken)
    assert seen == [torch.float32]
    optimizer.load_state_dict(broken)  # hooks are still there, and each runs once more
    assert seen == [torch.float32] * 2


def test_a_state_that_does_not_fit_is_refused_whole():
    model = mlp()
    optimizer = MuonOptimizer(model.named_parameters())
    train(optimizer, model, 2)
    before = copy.deepcopy(optimizer.state_dict())

    def refused(other_optimizer: torch.optim.Optimizer) -> str:
        with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for MuonOptimizer") as caught:
            optimizer.load_state_dict(other_optimizer.state_dict())
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert_same(
            [v for s in before["state"].values() for v in s.values()],
            [v for s in after["state"].values() for v in s.values()],
        )
        return str(caught.value)

    wider = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 6))
    other = MuonOptimizer(wider.named_parameters())
    train(other, wider, 1)
    text = refused(other)
    assert "0.weight: saved momentum_buffer of shape (30, 12), expected (20, 12)" in text
    assert "2.weight" in text
    assert "0.bias: saved momentum_buffer" in text
    assert "0.bias: saved second_moment" in text

    routed = refused(MuonOptimizer(mlp().named_parameters(), rule="adamw"))
    assert "groups of 4 parameters were saved, groups of 2, 2 are here" in routed
    assert "2.weight: saved with rule 'adamw', but takes 'muon' here" in routed
    assert "0.bias:" not in routed
    smaller = refused(
        MuonOptimizer([("0.weight", nn.Parameter(torch.zeros(20, 12))), ("x", nn.Parameter(torch.zeros(3)))])
    )
    assert "2.weight: not saved" in smaller
    assert "x: saved, but not here" in smaller
    layers = {"a": nn.Linear(12, 20), "b": nn.Linear(20, 6)}
    renamed = MuonOptimizer([(f"{n}.{m}", p) for n, layer in layers.items() for m, p in layer.named_parameters()])
    assert "0.weight: the saved parameter in its place is 'a.weight'" in refused(renamed)
    swapped = MuonOptimizer(
        [
            {
                "params": [
                    ("0.weight", nn.Parameter(torch.zeros(20, 12))),
                    ("2.weight", nn.Parameter(torch.zeros(6, 20))),
                ],
                "rule": "adamw",
            },
            {"params": [("0.bias", nn.Parameter(torch.zeros(20))), ("2.bias", nn.Parameter(torch.zeros(6)))]},
        ]
    )
    assert "2.weight: saved with rule 'adamw', but takes 'muon' here" in refused(swapped)
    lacking = MuonOptimizer(mlp().named_parameters())
    for p in lacking._parameters():
        p.grad = torch.ones_like(p)
    lacking.step()
    lacking.register_state_dict_post_hook(lambda _, saved: {**saved, "state": {2: {"step": torch.tensor(1.0)}}})
    assert "0.bias: saved state ['step'], but rule 'adamw' has ['momentum_buffer', 'second" in refused(lacking)


def test_parameters_in_another_order_are_refused():
    """Both are (4, 4): loaded by position, their momentum would be exchanged silently."""
    x, y = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    saved = MuonOptimizer(nn.ModuleDict({"x": x, "y": y}))
    for p in saved._parameters():
        p.grad = torch.randn_like(p)
    saved.step()
    with pytest.raises(RuntimeError, match=r"y.weight: the saved parameter in its place is 'x.weight'"):
        MuonOptimizer(nn.ModuleDict({"y": y, "x": x})).load_state_dict(saved.state_dict())


def test_state_that_did_not_exist_yet_can_be_loaded():
    model, extra = mlp(), nn.Linear(6, 6)
    optimizer = MuonOptimizer(model)
    train(optimizer, model, 2)
    optimizer.add_param_group({"params": extra.named_parameters("extra")})
    optimizer.load_state_dict(optimizer.state_dict())
    extra(torch.randn(2, 6)).sum().backward()
    train(optimizer, model, 1)
    assert "momentum_buffer" in optimizer.state[extra.weight]


def test_a_group_key_that_was_not_saved_keeps_its_value():
    model = mlp()
    optimizer = MuonOptimizer(model, ns_stepsize=0.5)
    train(optimizer, model, 1)
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["ns_stepsize"]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["ns_stepsize"] == 0.5
    train(optimizer, model, 1)
    with pytest.raises(RuntimeError, match="it needs 'state' and 'param_groups'"):
        optimizer.load_state_dict({"state": {}})


def test_grad_scaler_unscales_and_skips_infinite_gradients():
    model, other = mlp(), mlp()
    scaled, plain = MuonOptimizer(model), MuonOptimizer(other)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    x = torch.randn(4, 12)
    scaler.scale(model(x).square().mean()).backward()
    scaler.step(scaled)
    scaler.update()
    other(x).square().mean().backward()
    plain.step()
    for a, b in zip(weights(model), weights(other), strict=True):
        torch.testing.assert_close(a, b)
    model[0].weight.grad.fill_(torch.inf)
    before = weights(model)
    scaler.scale(torch.tensor(1.0))
    scaler.step(scaled)
    assert_same(weights(model), before)


@pytest.mark.parametrize("shape", [(50, 100), (64, 64)])
def test_a_step_inside_autocast_is_the_same_step(shape):
    def run(enabled: bool) -> torch.Tensor:
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(shape))
        p.grad = torch.randn(shape)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            MuonOptimizer([p]).step()
        return p.detach()

    assert_same(run(True), run(False))


def test_exact_keeps_a_gradient_that_is_not_finite_to_its_own_matrix():
    good, bad = (nn.Parameter(torch.randn(5, 6)) for _ in range(2))
    optimizer = MuonOptimizer([good, bad], orthogonalization="exact")
    good.grad, bad.grad = torch.randn(5, 6), torch.full((5, 6), torch.inf)
    optimizer.step()
    assert good.isfinite().all()
    assert bad.isnan().all()


def test_an_empty_group_stays_a_group():
    optimizer = MuonOptimizer([{"params": []}, {"params": [nn.Parameter(torch.randn(3, 3))]}])
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1]
    optimizer.step()


def test_the_rule_of_a_group_can_be_set():
    w = nn.Parameter(torch.randn(4, 5))
    optimizer = MuonOptimizer([w])
    w.grad = torch.randn_like(w)
    optimizer.step()
    optimizer.param_groups[0].update(rule="adamw", lr=1e-3)
    before = w.detach().clone()
    optimizer.step()
    assert 0 < (w - before).abs().max() < 0.05
    assert optimizer.routing_report().rows[0].rule == "adamw"
    resumed = MuonOptimizer([{"params": [w], "rule": "adamw"}])
    resumed.load_state_dict(optimizer.state_dict())


def test_initial_lr_of_a_mixed_group_keeps_its_ratio_to_lr():
    """A scheduler that resumes (last_epoch >= 0) wants it in every group."""
    params = [nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))]
    optimizer = MuonOptimizer([{"params": params, "lr": 0.05, "initial_lr": 0.1, "adamw_lr": 0.001}])
    matrices, vectors = optimizer.param_groups
    assert matrices["initial_lr"] == 0.1
    assert vectors["initial_lr"] == pytest.approx(0.002)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5, last_epoch=3)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.001])


# -------------------------------------------------------------------------------------------------------- metrics


def test_metrics_report_the_update_and_skipped_steps():
    model = mlp()
    optimizer = MuonOptimizer(model, nonfinite="skip")
    assert optimizer.metrics() == {"skipped_steps": 0.0}
    train(optimizer, model, 2)
    numbers = optimizer.metrics()
    assert 0 <= numbers["orthogonality_residual"] < 1.1
    assert 0 < numbers["update_rms"] < 0.02
    model[0].bias.grad.fill_(torch.nan)
    optimizer.step()
    assert optimizer.metrics()["skipped_steps"] == 1


def test_a_profile_names_the_phases_of_a_step_and_the_shapes_of_matrices():
    model = mlp()
    optimizer = create_hybrid_optimizer(model)
    train(optimizer, model, 1)
    with torch.profiler.profile() as profiler:
        optimizer.step()
    names = {event.key for event in profiler.key_averages() if event.key.startswith("muon_fsdp.")}
    assert any(name.startswith("muon_fsdp.orthogonalize stage 0 muon") and "20x12" in name for name in names), names
    assert {name.split()[0] for name in names} == {"muon_fsdp.prepare", "muon_fsdp.orthogonalize", "muon_fsdp.apply"}
