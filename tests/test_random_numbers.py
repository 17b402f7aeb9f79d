"""The random numbers of rules: a known generator, and functions of seed, parameter, matrix, step and call alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.linalg.philox import philox, uniform
from muon_fsdp.rules import RULES, Option, Rule, register
from tests import graph_cases
from tests.comparisons import assert_same
from tests.pool import RankPool


# The known answers that the authors of Philox publish with their library Random123.
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, answer):
    found = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(map(int, found)) == answer


def test_numbers_are_uniform_between_zero_and_one():
    found = uniform(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[0, 0, 0], [0, 0, 0]]), 100_003, torch.float32)
    assert found.shape == (2, 100_003)
    assert 0 < found.min() < 1e-4
    assert 1 - 1e-4 < found.max() < 1
    counts = torch.histc(found, 64, 0, 1)
    expected = found.numel() / 64
    assert ((counts - expected).square() / expected).sum() < 130  # chi-squared of 63 degrees: one in a million
    assert torch.corrcoef(found).triu(1).abs().max() < 0.02
    assert torch.corrcoef(torch.stack([found[0, 1:], found[0, :-1]])).triu(1).abs().max() < 0.02
    assert torch.special.ndtri(found).isfinite().all()
    of_one = uniform(torch.tensor([[3, 4]]), torch.tensor([[0, 0, 0]]), 7, torch.float64)
    assert_same(of_one.float(), found[1:, :7])


class Noise(Rule):
    """Replaces the update by random numbers."""

    name = "noise"
    options = (*Rule.options, Option("seed", 0, "seed of the noise"))
    seen: list[Tensor] = []  # noqa: RUF012

    def direction(self, batch: Any) -> None:
        numbers = batch.random(*batch.matrices.shape[-2:])
        assert numbers.dtype == torch.promote_types(batch.matrices.dtype, torch.float32)
        again = batch.random(*batch.matrices.shape[-2:])
        assert not torch.equal(numbers, again)
        assert batch.random().shape == (len(batch.matrices),)
        self.seen.append(again)
        batch.update = numbers


@pytest.fixture
def _noise():
    register(Noise)
    yield
    RULES.pop("noise")


def drawn(steps: int = 1, without: int | None = None, **options: Any) -> dict[str, Tensor]:
    """Return minus the sum of the numbers that every parameter has got, from two shapes, a stack and a fused weight."""
    shapes = {"a": (4, 3), "b": (4, 3), "stack": (2, 4, 3), "fused": (8, 3), "c": (3, 5)}
    params = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    optimizer = MuonOptimizer(
        params.items(), rule="noise", lr=1.0, overrides={"fused": {"split_sizes": (4, 4)}}, **options
    )
    for _ in range(steps):
        for index, p in enumerate(params.values()):
            p.grad = None if index == without else torch.ones_like(p)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


@pytest.mark.usefixtures("_noise")
def test_numbers_depend_on_seed_parameter_matrix_and_step_alone():
    first = drawn()
    matrices = [first["a"], first["b"], *first["stack"], *first["fused"].split(4)]
    for index, matrix in enumerate(matrices):
        assert not any(torch.equal(matrix, other) for other in matrices[:index]), f"matrix {index} repeats another"
    torch.manual_seed(5)
    assert_same(drawn(), first, "another generator of torch")
    assert_same(drawn(max_stage_bytes=60), first, "other batches")
    missing = drawn(without=0)
    assert_same({k: v for k, v in missing.items() if k != "a"}, {k: v for k, v in first.items() if k != "a"}, "a gap")
    assert not torch.equal(drawn(seed=1)["a"], first["a"])
    second = {name: value - first[name] for name, value in drawn(2).items()}
    assert not torch.allclose(second["a"], first["a"])


@pytest.mark.usefixtures("_noise")
def test_a_resumed_run_draws_the_same_numbers():
    def make() -> tuple[nn.Parameter, MuonOptimizer]:
        p = nn.Parameter(torch.zeros(4, 3))
        p.grad = torch.ones(4, 3)
        return p, MuonOptimizer([("a", p)], rule="noise", lr=1.0)

    (whole, straight), (first, saving) = make(), make()
    for _ in range(4):
        straight.step()
    for _ in range(2):
        saving.step()
    second, resumed = make()
    resumed.load_state_dict(saving.state_dict())
    with torch.no_grad():
        second.copy_(first)
    for _ in range(2):
        resumed.step()
    assert_same(second, whole)
    assert resumed.param_groups[0]["num_updates"] == 4


@pytest.mark.usefixtures("_noise")
def test_a_skipped_step_does_not_count():
    p = nn.Parameter(torch.zeros(4, 3))
    optimizer = MuonOptimizer([("a", p)], rule="noise", lr=1.0, nonfinite="skip")
    for value in (1.0, torch.nan, 1.0):
        p.grad = torch.full((4, 3), value)
        optimizer.step()
    assert optimizer.param_groups[0]["num_updates"] == 2
    assert_same(p, drawn(2)["a"])


def test_random_numbers_outside_of_direction():
    from muon_fsdp.declarations.option import PlannedOptions
    from muon_fsdp.rules import MatrixBatch

    batch = MatrixBatch(torch.ones(1, 2, 2), torch.empty(1, 2, 2), PlannedOptions("noise"))
    with pytest.raises(RuntimeError, match="within direction only"):
        batch.random(2)


def captured(cuda_graph: bool) -> list[Tensor]:
    """Train with noise, captured or not; return this rank's tensors."""
    from tests import toy_rules  # noqa: F401 (registers the rule on this rank)

    training = graph_cases.Recorded("toy_noise", cuda_graph)
    values = training.train()
    assert (training.optimizer.plan_report().cuda_graph == "captured") == cuda_graph
    return values


def test_a_captured_step_draws_new_numbers_at_every_replay(ranks: RankPool):
    for found, expected in zip(ranks.run(2, captured, True), ranks.run(2, captured, False), strict=True):
        assert_same(found, expected)


def test_stages_that_start_in_backward_draw_the_numbers_of_their_step():
    from tests import toy_rules  # noqa: F401 (registers the rule)

    found = []
    for overlap in ("step", "backward"):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape)) for shape in ((4, 6), (3, 4, 6), (5, 5))]
        optimizer = MuonOptimizer(params, rule="toy_noise", lr=0.1, overlap=overlap)
        for number in range(5):
            optimizer.zero_grad()
            sum((p * (1 + number)).square().sum() for p in params).backward()
            if number == 3:  # what was drawn in backward no longer counts
                if overlap == "backward":
                    optimizer._planned.overlap._round.wait()
                for group in optimizer.param_groups:
                    group["num_updates"] = 40
            optimizer.step()
        found.append(params)
    numbers = optimizer.metrics()
    assert (numbers["overlapped_stages"], numbers["discarded_stages"]) == (2, 1)
    assert_same(*found)
