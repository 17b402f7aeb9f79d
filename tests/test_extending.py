"""The seams: a rule, a statistic's state, a strategy and a kernel of one's own, each in one place.

The toy rules are in tests/toy_rules.py. An independent reference in NumPy float64 says what they should do.
"""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.plan import outline
from muon_fsdp.rules import RULES, Muon, register
from muon_fsdp.statistics.observer import STATISTICS, SummedStatistic
from muon_fsdp.step import fused
from tests import extending_cases as cases
from tests import toy_rules
from tests.comparisons import assert_near, assert_same
from tests.pool import RankPool
from tests.reference import polar

# Rules that read statistics of the update, or state in `apply`, or have state as large as a matrix.
UPDATE_RULES = ("toy_turn", "toy_adamuon", "toy_shampoo")
MATRIX_RULES = ("row_normed", "toy_sphere", "toy_magnitudes", "toy_noise", "hyperball", *UPDATE_RULES)


# -------------------------------------------------------------------------------------------- against a reference


class ReferenceToySphere:
    """`toy_sphere` for one matrix, without any of our code."""

    def __init__(self, w: np.ndarray, beta: float = 0.5) -> None:
        self.w, self.beta = w.copy(), beta
        self.buffer, self.rows, self.columns = np.zeros_like(w), np.zeros(len(w)), np.zeros(w.shape[1])
        self.radius = np.linalg.norm(w)

    def step(self, grad: np.ndarray, lr: float, decay: float) -> np.ndarray:
        self.buffer = 0.95 * self.buffer + grad
        update = polar(self.buffer) * max(1.0, self.w.shape[0] / self.w.shape[1]) ** 0.5
        self.rows = self.beta * self.rows + (1 - self.beta) * np.linalg.norm(self.w, axis=1)
        self.columns += 0.25 * ((update**2).sum(0) - self.columns)
        update /= (1 + self.rows / self.rows.mean())[:, None]
        factor = self.radius / np.linalg.norm(self.w) * (1 - lr * decay)
        self.w = factor * self.w - 0.5 * lr * update
        return self.w


def test_a_rule_with_state_an_option_and_statistics_follows_its_reference():
    """The weights are a matrix, a stack of experts and a fused weight in blocks, and lr changes."""
    torch.manual_seed(0)
    shapes = {"w": (6, 9), "experts": (3, 7, 5), "qkv": (12, 8)}
    params = {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    optimizer = MuonOptimizer(
        params.items(), lr=0.1, weight_decay=0.2, rule="toy_sphere", orthogonalization="exact", row_beta=0.6,
        overrides={"qkv": {"split_sizes": (6, 4, 2), "row_beta": 0.3}},
    )  # fmt: skip

    def matrices(name: str, tensor: torch.Tensor) -> list[np.ndarray]:
        blocks = tensor.split((6, 4, 2)) if name == "qkv" else tensor if tensor.ndim == 3 else [tensor]
        return [block.detach().numpy() for block in blocks]

    references = {
        name: [ReferenceToySphere(m, 0.3 if name == "qkv" else 0.6) for m in matrices(name, p)]
        for name, p in params.items()
    }
    for step in range(5):
        lr = 0.1 * 0.8**step
        for group in optimizer.param_groups:
            group["lr"] = lr
        for name, p in params.items():
            p.grad = torch.randn_like(p)
            for reference, grad in zip(references[name], matrices(name, p.grad), strict=True):
                reference.step(grad, lr, 0.2)
        optimizer.step()
    for name, p in params.items():
        state = optimizer.state[p]
        for found, reference in zip(matrices(name, p), references[name], strict=True):
            np.testing.assert_allclose(found, reference.w, atol=1e-10, err_msg=name)
        rows, columns, radii = (np.concatenate([np.atleast_1d(getattr(r, key)) for r in references[name]])
                                for key in ("rows", "columns", "radius"))  # fmt: skip
        np.testing.assert_allclose(state["row_moment"].numpy(), rows, atol=1e-10)
        np.testing.assert_allclose(state["column_moment"].numpy(), columns, atol=1e-10)
        np.testing.assert_allclose(state["radius"].numpy(), radii, atol=1e-10)
    assert optimizer.metrics()["largest_norm"] == pytest.approx(
        max(r.radius for many in references.values() for r in many), rel=0.2
    )


def test_factors_of_rows_and_columns_follow_a_reference():
    w = nn.Parameter(torch.randn(5, 7, dtype=torch.float64))
    reference, buffer = w.detach().numpy().copy(), np.zeros((5, 7))
    magnitude = np.linalg.norm(reference, axis=1)
    optimizer = MuonOptimizer([w], lr=0.1, rule="toy_magnitudes", orthogonalization="exact")
    for _ in range(4):
        w.grad = torch.randn_like(w)
        buffer = 0.95 * buffer + w.grad.numpy()
        of_rows = 0.5 + 0.5 * magnitude / np.linalg.norm(reference, axis=1)
        of_columns = 1 / (1 + np.linalg.norm(reference, axis=0) / np.linalg.norm(reference, 2))
        reference = of_rows[:, None] * reference - 0.1 * of_columns * polar(buffer)
        optimizer.step()
    np.testing.assert_allclose(w.detach().numpy(), reference, atol=2e-4)  # the spectral norm is found by iteration


def test_a_matrix_that_is_not_updated_keeps_its_state():
    torch.manual_seed(0)
    used, unused = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6, 4))
    optimizer = MuonOptimizer([used, unused], rule="toy_sphere")
    used.grad = torch.randn(6, 4)
    before = unused.detach().clone()
    optimizer.step()
    assert optimizer.state[used]["radius"] > 0
    assert_same(unused, before)
    assert not any(value.any() for value in optimizer.state[unused].values())
    with torch.no_grad():
        unused.mul_(3)
    unused.grad = torch.randn(6, 4)
    optimizer.step()  # the state starts from W as it is at its own first step
    torch.testing.assert_close(optimizer.state[unused]["radius"], 3 * before.norm().reshape(1))


# ------------------------------------------------------------------------------------------------------- on ranks


@pytest.fixture(scope="module")
def one_device() -> dict[str, dict[str, torch.Tensor]]:
    return {rule: cases.trained(None, rule) for rule in MATRIX_RULES}


def signless(numbers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out the state that is determined only up to a sign or a rotation."""
    return {name: value for name, value in numbers.items() if "singular" not in name}


@pytest.mark.parametrize("rule", MATRIX_RULES)
@pytest.mark.parametrize(
    ("layout", "world_size", "strategy"),
    [("fsdp", 2, "owner"), ("hsdp", 4, "owner"), ("fsdp_tp", 4, "replicate"), ("fsdp", 3, "replicate")],
)
def test_a_toy_rule_on_ranks_is_the_one_on_a_device(ranks: RankPool, one_device, rule, layout, world_size, strategy):
    for rank, found in enumerate(ranks.run(world_size, cases.trained, layout, rule, strategy)):
        assert_near(signless(found), signless(one_device[rule]), f"rank {rank}", atol=1e-7)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("rule", ["row_normed", "toy_sphere", "toy_noise", "hyperball", *UPDATE_RULES])
def test_a_toy_rule_is_saved_on_four_ranks_and_resumed_on_three_and_one(ranks: RankPool, one_device, tmp_path, rule):
    ranks.run(4, cases.saved, "hsdp", rule, str(tmp_path))
    for rank, found in enumerate(ranks.run(3, cases.resumed, "fsdp", rule, str(tmp_path))):
        assert_near(found, one_device[rule], f"rank {rank}", atol=1e-7)
    assert_near(cases.resumed(None, rule, str(tmp_path)), one_device[rule], "one device", atol=1e-7)


@pytest.mark.parametrize("rule", ["toy_sphere", "toy_noise", "toy_turn", "toy_adamuon"])
def test_a_toy_rule_under_ddp(ranks: RankPool, one_device, rule):
    for rank, found in enumerate(ranks.run(2, cases.trained, "ddp", rule, "owner")):
        assert_near(found, one_device[rule], f"rank {rank}", atol=1e-7)


# ---------------------------------------------------------------------------------------------------- as documented


def test_the_example_of_the_design_runs_as_written():
    page = (Path(__file__).parent.parent / "docs" / "rules.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (example,) = [snippet for snippet in snippets if 'name = "row_normed"' in snippet and "overrides" in snippet]
    model = nn.ModuleDict({"block": nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(6, 8))}), "out": nn.Linear(8, 6)})
    variables = {"model": model}
    exec(example, variables)
    optimizer = variables["optimizer"]
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    by_name = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    assert by_name["block.mlp.0.weight"]["row_beta"] == 0.8
    assert by_name["out.weight"]["row_beta"] == 0.95
    register(toy_rules.RowNormed)  # the test's own again


# -------------------------------------------------------------------------------- a statistic, a strategy, a kernel


class SumOfEntries(SummedStatistic):
    """A toy statistic: one object."""

    name, doc = "sum_of_entries", "(B,), the sum of all entries"

    def shape(self, rows, cols):
        return ()

    def add(self, sums, part, matrices, rows, cols):
        sums[matrices] += part.sum((-2, -1), dtype=torch.float64)


def with_toy_statistic(layout: str | None) -> dict[str, torch.Tensor]:
    with patch.dict(STATISTICS, {SumOfEntries.name: SumOfEntries()}), patch.dict(RULES):

        @register
        class Shrinking(Muon):
            name = "shrinking"
            statistics = ("sum_of_entries",)

            def factors(self, numbers):
                return 1 / (1 + numbers.statistics["sum_of_entries"].abs()), 1.0

        return cases.trained(layout, "shrinking", steps=2)


def test_a_toy_statistic_is_one_object(ranks: RankPool):
    w = nn.Parameter(torch.randn(5, 3))
    expected = with_toy_statistic(None)
    for layout, world_size in (("fsdp", 2), ("hsdp", 4)):
        for rank, found in enumerate(ranks.run(world_size, with_toy_statistic, layout)):
            assert_near(found, expected, f"{layout}, rank {rank}", atol=1e-9)
    with patch.dict(STATISTICS, {SumOfEntries.name: SumOfEntries()}), patch.dict(RULES):
        factors = lambda self, n: (n.statistics["sum_of_entries"], 0.0)  # noqa: E731
        register(type("Times", (Muon,), {"name": "times", "statistics": ("sum_of_entries",), "factors": factors}))
        start, w.grad = w.detach().clone(), torch.randn(5, 3)
        MuonOptimizer([w], rule="times").step()
    torch.testing.assert_close(w.detach(), start * start.sum())


def last_rank_computes(units, holders, loads, bytes_per_element):
    """Assign every unit to the last rank, as a toy strategy."""
    last = max(loads)
    return [last] * len(units), {rank: float(rank == last) for rank in loads}


def with_toy_strategy(layout: str, rule: str) -> tuple[dict[str, torch.Tensor], int]:
    assign, outline._assign = outline._assign, last_rank_computes
    try:
        module, optimizer = cases.make(layout, rule, "owner")
        for number in range(4):
            cases.step(module, optimizer, number)
        stages = optimizer._current_plan().plan.stages
        return cases.results(module, optimizer), sum(batch.count for stage in stages for batch in stage.batches)
    finally:
        outline._assign = assign


def test_a_toy_strategy_is_one_function(ranks: RankPool, one_device):
    """The owner of a unit is decided in one place; exchange, state and statistics follow."""
    outcomes = ranks.run(2, with_toy_strategy, "fsdp", "toy_sphere")
    assert [count for _, count in outcomes] == [0, 13]
    for rank, (found, _) in enumerate(outcomes):
        assert_near(found, one_device["toy_sphere"], f"rank {rank}", atol=1e-7)


def test_a_toy_kernel_is_one_class(monkeypatch):
    """The kernel chooses the order of its states and scalars. Without a GPU it runs in Triton's interpreter."""
    pytest.importorskip("triton")
    from tests import toy_kernels

    launched = []
    monkeypatch.setattr(fused, "unusable", lambda device: None)
    launch = toy_kernels.launch
    monkeypatch.setattr(
        toy_kernels, "launch", lambda kernel, *args, **options: launched.append(1) or launch(kernel, *args, **options)
    )
    generator = torch.Generator().manual_seed(0)
    shapes = [(17,), (40, 7), ()]
    starts = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3)]
    found = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for rule in ("toy_momentum", "toy_fused_momentum"):
        params = [nn.Parameter(start.to(device)) for start in starts]
        optimizer = MuonOptimizer([{"params": params, "rule": rule, "lr": 0.1, "beta": 0.25}])
        for grads in gradients:
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad.to(device)
            params[0].grad = None
            optimizer.step()
        found[rule] = [*params, *(optimizer.state[p]["momentum_buffer"] for p in params)]
    assert launched
    for plain, by_kernel in zip(*found.values(), strict=True):
        torch.testing.assert_close(by_kernel, plain)
