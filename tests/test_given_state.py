"""`set_per_matrix`: numbers that a user passes per matrix, against a reference, on shards, and where they don't fit."""

from __future__ import annotations

import copy
from concurrent.futures import wait
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from muon_fsdp import MuonOptimizer
from tests import toy_rules  # noqa: F401 (registers the rules on this rank)
from tests.comparisons import assert_near
from tests.distributed_cases import lay_out
from tests.pool import RankPool
from tests.reference import polar

FUSED, STACK, PLAIN = "blocks.0.up.weight", "blocks.0.experts", "blocks.1.down.weight"
SIZES = (16, 12, 4)
OPTIONS: dict[str, Any] = {
    "rule": "toy_given",
    "lr": 0.1,
    "orthogonalization": "exact",
    "overrides": {FUSED: {"split_sizes": SIZES}},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(14, 32, bias=False), nn.Linear(32, 14, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 14, 10))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])


def make(layout: str | None, **options: Any) -> tuple[nn.Module, MuonOptimizer]:
    torch.manual_seed(0)
    model = Model().double()
    module = model if layout is None else lay_out(model, layout)[0]
    if layout in ("ddp", "ddp_sharded"):
        options["replicate_group"] = dist.group.WORLD
    if layout == "ddp_sharded":
        options["shard_state"] = True
    named = [(name.removeprefix("module."), p) for name, p in module.named_parameters()]
    return module, MuonOptimizer(named, **{**OPTIONS, **options})


def values_of(step: int) -> dict[tuple[str, str], Any]:
    """Return what is passed before a step: numbers, lists and tensors; nothing before the third one."""
    generator = torch.Generator().manual_seed(100 + step)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    if step == 2:
        return {}
    return {
        (FUSED, "log_rate"): draw(3).tolist(),
        (STACK, "log_rate"): draw(3),
        (PLAIN, "log_rate"): float(draw(1)),
        (FUSED, "gains"): [draw(rows) for rows in SIZES],
        (STACK, "gains"): draw(3, 14),
        (PLAIN, "gains"): draw(14) if step else draw(1, 14),
    }


def gradients_of(module: nn.Module, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in module.named_parameters()}


def take_step(module: nn.Module, optimizer: MuonOptimizer, step: int) -> None:
    for (name, state), values in values_of(step).items():
        optimizer.set_per_matrix(name, state, values)
    gradients = gradients_of(module, step)
    for name, p in module.named_parameters():
        grad = gradients[name]
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
    optimizer.step()


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in module.named_parameters()
    }


def trained(layout: str | None, steps: int = 4, **options: Any) -> dict[str, torch.Tensor]:
    module, optimizer = make(layout, **options)
    for step in range(steps):
        take_step(module, optimizer, step)
    return weights(module)


@pytest.fixture(scope="module")
def reference() -> dict[str, torch.Tensor]:
    """Return the weights after four steps of a reference in NumPy."""
    module, _ = make(None)
    found = {}
    for name, p in module.named_parameters():
        w = p.detach().numpy().copy()
        buffer = np.zeros_like(w)
        heights = SIZES if name == FUSED else None
        count = len(heights) if heights else len(w) if w.ndim == 3 else 1
        rates, gains = np.ones(count), [np.zeros(height) for height in heights or [w.shape[-2]] * count]
        for step in range(4):
            given = values_of(step)
            if (name, "log_rate") in given:
                rates = np.exp(np.broadcast_to(np.asarray(given[name, "log_rate"]), count))
                rows = given[name, "gains"]
                gains = [np.asarray(r).reshape(-1) for r in (rows if count > 1 else [rows])]
            buffer = 0.95 * buffer + gradients_of(module, step)[name].numpy()
            parts = np.split(buffer, np.cumsum(heights)[:-1]) if heights else buffer if w.ndim == 3 else [buffer]
            scale = lambda part: max(1, part.shape[0] / part.shape[1]) ** 0.5  # noqa: E731
            updates = [
                rate * (1 + gain)[:, None] * scale(part) * polar(part)
                for rate, gain, part in zip(rates, gains, parts, strict=True)
            ]
            w = w - 0.1 * (np.concatenate(updates) if heights else np.stack(updates) if w.ndim == 3 else updates[0])
        found[name] = torch.from_numpy(w)
    return found


def test_given_numbers_are_those_of_the_reference(reference):
    assert_near(trained(None), reference, "one device", atol=1e-10)


@pytest.mark.parametrize(
    ("layout", "world_size", "options"),
    [
        ("fsdp", 2, {}),
        ("fsdp", 3, {"strategy": "replicate"}),
        ("hsdp", 4, {}),
        ("fsdp_tp", 4, {}),
        ("ddp", 2, {"strategy": "owner"}),
        ("ddp_sharded", 3, {}),
    ],
)
def test_given_numbers_on_ranks(ranks: RankPool, reference, layout, world_size, options):
    """Uneven shards, replicas and submeshes get the same numbers, before the first step and between steps."""
    for rank, found in enumerate(ranks.run(world_size, trained_with, layout, options)):
        assert_near(found, reference, f"rank {rank}", atol=1e-7)


def trained_with(layout: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    return trained(layout, **options)


def test_numbers_that_change_after_backward_discard_what_it_has_computed(ranks: RankPool):
    for early, late in zip(*(ranks.run(2, trained_by_backward, each) for each in ("backward", "step")), strict=True):
        assert early[1]["overlapped_stages"] > 0
        assert early[1]["discarded_stages"] > 0
        for name, value in early[0].items():
            assert torch.equal(value, late[0][name]), name


def wait_for_stages(optimizer: MuonOptimizer) -> None:
    """Wait until every stage that starts in backward has its result."""
    overlap = optimizer._current_plan().overlap
    if overlap is not None:
        wait([*overlap._round._results.values()], timeout=60)


def trained_by_backward(overlap: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Pass numbers after backward, at the fourth step only."""
    module, optimizer = make("fsdp", overlap=overlap)
    for step in range(6):
        optimizer.zero_grad()
        sum((p * (step + 1 + p)).square().sum() for p in module.parameters()).backward()
        if step == 3:
            wait_for_stages(optimizer)  # a stage that has not begun would read the new numbers
            optimizer.set_per_matrix(STACK, "log_rate", -1.0)
        optimizer.step()
    return weights(module), optimizer.metrics()


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_other_numbers_on_one_rank_are_an_error_on_every_rank(ranks: RankPool, layout, before):
    """Also where one rank alone calls it, before the first step or after it; nothing changes."""
    for text, is_unchanged in ranks.run(2, step_with_other_numbers, layout, before):
        assert "log_rate" in text
        assert PLAIN in text
        assert is_unchanged


def step_with_other_numbers(layout: str, before: bool) -> tuple[str, bool]:
    module, optimizer = make(layout)
    if not before:
        take_step(module, optimizer, 2)
    start = weights(module)
    if dist.get_rank() == 1:
        optimizer.set_per_matrix(PLAIN, "log_rate", 0.5)
    with pytest.raises(RuntimeError) as caught:
        take_step(module, optimizer, 2)
    now = weights(module)
    return str(caught.value), all(torch.equal(start[name], now[name]) for name in start)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_given_numbers_are_saved_and_resharded(ranks: RankPool, reference, tmp_path):
    """Those of a checkpoint replace those that were passed before it was loaded, also from before the first step."""
    for steps in (0, 2):
        path = str(tmp_path / str(steps))
        ranks.run(2, saved, "fsdp", path, steps)
        for rank, found in enumerate(ranks.run(3, resumed, "fsdp", path, steps)):
            assert_near(found, reference, f"rank {rank}, {steps} steps", atol=1e-7)


def saved(layout: str, path: str, steps: int) -> None:
    module, optimizer = make(layout)
    for step in range(steps):
        take_step(module, optimizer, step)
    if not steps:
        for (name, state), values in values_of(0).items():
            optimizer.set_per_matrix(name, state, values)
    optimizer.zero_grad()
    states = {"optimizer": get_optimizer_state_dict(module, optimizer), "model": module.state_dict()}
    dcp.save(states, checkpoint_id=path)


def resumed(layout: str, path: str, steps: int) -> dict[str, torch.Tensor]:
    module, optimizer = make(layout)
    optimizer.set_per_matrix(PLAIN, "log_rate", 3.0)
    states = {"optimizer": get_optimizer_state_dict(module, optimizer), "model": module.state_dict()}
    dcp.load(states, checkpoint_id=path)
    module.load_state_dict(states["model"])
    set_optimizer_state_dict(module, optimizer, states["optimizer"])
    found = optimizer.state[dict(module.named_parameters())[PLAIN]]["log_rate"]
    assert float(found) == pytest.approx(values_of(1 if steps else 0)[PLAIN, "log_rate"])
    for step in range(steps, 4):
        take_step(module, optimizer, step)
    return weights(module)


def test_state_stays_empty_until_the_first_step():
    """Accelerate asks for the state before it replaces the tensors of groups: what is kept follows the name."""
    module, optimizer = make(None)
    optimizer.set_per_matrix(PLAIN, "log_rate", 0.5)
    assert not optimizer.state_dict()["state"]
    optimizer.load_state_dict(optimizer.state_dict())
    replaced = copy.deepcopy(module)
    for group in optimizer.param_groups:
        named = dict(replaced.named_parameters())
        group["params"] = [named[name] for name in group["param_names"]]
    copied = copy.deepcopy(optimizer)
    for made in (optimizer, copied):
        for p in made._parameters():
            p.grad = torch.randn_like(p)
        kept = made.state_dict()["state"]
        assert sorted(float(s["log_rate"]) for s in kept.values() if len(s["log_rate"]) == 1) == [0, 0, 0.5]


def test_a_captured_step_reads_the_numbers_in_place():
    module, optimizer = make(None)
    take_step(module, optimizer, 0)
    parameter = dict(module.named_parameters())[PLAIN]
    address = optimizer.state[parameter]["log_rate"].data_ptr()
    optimizer.set_per_matrix(PLAIN, "log_rate", torch.tensor(0.25, requires_grad=True))
    assert optimizer.state[parameter]["log_rate"].data_ptr() == address
    assert optimizer.state[parameter]["log_rate"].tolist() == [0.25]


@pytest.mark.parametrize(
    ("name", "state", "values", "text"),
    [
        ("blocks.1.dwn.weight", "log_rate", 0.0, "no parameter is called 'blocks.1.dwn.weight'; did you mean 'blocks"),
        (PLAIN, "lograte", 0.0, "has no per-matrix state 'lograte'; did you mean 'log_rate'.*'log_rate', 'gains'"),
        (PLAIN, "momentum_buffer", 0.0, "'momentum_buffer' is PerParameter state of rule 'toy_given'"),
        ("embedding", "log_rate", 0.0, "rule 'adamw' of parameter 'embedding' has no.*Valid names are none"),
        ("sphere", "singular_subspace", 0.0, "belongs to a statistic of W that rule 'spectral_sphere'"),
        (FUSED, "log_rate", "x", r"one value per matrix, 3 in all.*; got 'x'"),
        (FUSED, "log_rate", None, r"one value per matrix, 3 in all.*; got None"),
        (FUSED, "log_rate", [0.0, 1.0], r"one value per matrix, 3 in all.* of shape \(\); got 2 value"),
        (FUSED, "gains", torch.zeros(3, 16), r"shape \(16,\) or \(12,\) or \(4,\); that of matrix 1 has shape \(16,\)"),
        (PLAIN, "gains", torch.zeros(13), r"1 in all.*shape \(14,\); got 13 value"),
        (PLAIN, "log_rate", float("nan"), "must be real and finite; the value of matrix 0 is not"),
        (STACK, "log_rate", [0.0, 1.0, float("inf")], "the value of matrix 2 is not"),
        (STACK, "log_rate", torch.zeros(3, dtype=torch.complex64), "must be real and finite"),
    ],
)
@pytest.mark.parametrize("after_a_step", [True, False])
def test_what_does_not_fit_is_an_error(name, state, values, text, after_a_step):
    model = Model().double()
    others = {"embedding": nn.Parameter(torch.randn(8, 6)), "sphere": nn.Parameter(torch.randn(8, 6))}
    overrides = {**OPTIONS["overrides"], "embedding": "adamw", "sphere": "spectral_sphere"}
    named = [*model.named_parameters(), *others.items()]
    optimizer = MuonOptimizer(named, **{**OPTIONS, "overrides": overrides, "orthogonalization": "default"})
    if after_a_step:
        for _, p in named:
            p.grad = torch.randn_like(p)
        optimizer.step()
    with pytest.raises(ValueError, match=f"set_per_matrix: .*{text}"):
        optimizer.set_per_matrix(name, state, values)


def test_a_loaded_state_replaces_what_was_passed_before():
    saved_by, optimizer = (make(None)[1] for _ in range(2))
    for p in saved_by._parameters():
        p.grad = torch.randn_like(p)
    saved_by.step()
    saved_by.set_per_matrix(PLAIN, "log_rate", 0.25)
    optimizer.set_per_matrix(PLAIN, "log_rate", 3.0)
    optimizer.load_state_dict(saved_by.state_dict())
    for p in optimizer._parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert sorted(float(s["log_rate"]) for s in optimizer.state.values() if len(s["log_rate"]) == 1) == [0, 0, 0.25]
