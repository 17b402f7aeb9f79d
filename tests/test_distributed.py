"""Training on gloo ranks equals one device, computes each matrix once, sends what was planned, and ranks agree."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from muon_fsdp.plan.costs import StageLimits
from tests import agreement_cases
from tests import distributed_cases as cases
from tests.pool import RankPool

HSDP = (Replicate(), Shard(0))
LAYOUTS = [
    ("fsdp", 1),
    ("fsdp", 2),
    ("fsdp", 3),
    ("fsdp", 4),
    ("fsdp_columns", 2),
    ("hsdp", 2),
    ("hsdp", 4),
    ("fsdp_tp", 4),
    ("fsdp_tp_once", 4),
    ("tp", 2),
    ("experts_inside", 2),
    ("two_meshes", 4),
    ("whole", 4),
    ("ddp", 2),
    ("ddp", 3),
    ("ddp", 4),
]


def model_options(layout: str) -> dict[str, int]:
    return {"hidden": 32} if "tp" in layout else {}  # tensor parallelism needs even shards


STEPS = 10


@functools.cache
def one_device(hidden: int) -> tuple[list[float], dict[str, np.ndarray]]:
    return cases.curve(None, {}, {"hidden": hidden}, STEPS)


# Every layout by owners, and the main ones with work on every rank.
BY_STRATEGY = [(*layout, "owner") for layout in LAYOUTS]
BY_STRATEGY += [
    ("fsdp", 3, "replicate"),
    ("hsdp", 4, "replicate"),
    ("fsdp_tp", 4, "replicate"),
    ("ddp", 2, "replicate"),
]


@pytest.mark.parametrize(("layout", "world_size", "strategy"), BY_STRATEGY)
def test_same_curve_as_one_device(ranks: RankPool, layout, world_size, strategy):
    options = model_options(layout)
    expected, expected_weights = one_device(options.get("hidden", 31))
    results = ranks.run(world_size, cases.curve, layout, {"strategy": strategy}, options, STEPS)
    for losses, weights in results:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for name, value in expected_weights.items():
            np.testing.assert_allclose(weights[name], value, atol=1e-4, err_msg=name)
    assert expected[-1] < 0.9 * expected[0]


@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 2), ("fsdp", 3), ("hsdp", 4), ("ddp", 3)])
def test_bfloat16_on_the_wire(ranks: RankPool, layout, world_size):
    expected, _ = one_device(31)
    options = {"strategy": "owner", "comm_dtype": torch.bfloat16}
    results = ranks.run(world_size, cases.curve, layout, options, {}, STEPS)
    np.testing.assert_allclose(results[0][0], expected, rtol=1e-2)
    assert results[0][0] != expected
    for _, weights in results[1:]:  # replicas and everyone else see the same weights
        for name, value in weights.items():
            np.testing.assert_array_equal(value, results[0][1][name], err_msg=name)


@pytest.mark.parametrize("max_stage_bytes", [1, 3000])
@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 2), ("hsdp", 4)])
def test_stages_and_their_overlap_do_not_change_the_curve(ranks: RankPool, layout, world_size, max_stage_bytes):
    expected, _ = one_device(31)
    options = {"strategy": "owner", "max_stage_bytes": max_stage_bytes}
    (losses, _), *_ = ranks.run(world_size, cases.curve, layout, options, {}, STEPS)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 2), ("hsdp", 4)])
def test_stages_that_overlap_less_give_the_same_curve(ranks: RankPool, layout, world_size, in_flight):
    expected, _ = one_device(31)
    limits = StageLimits(3000, in_flight)
    for losses in ranks.run(world_size, cases.curve_in_stages, limits, layout, {"strategy": "owner"}, STEPS):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("strategy", ["owner", "replicate"])
@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 3), ("hsdp", 4), ("fsdp_tp", 4), ("whole", 3), ("ddp", 3)])
def test_follows_the_float64_reference(ranks: RankPool, layout, world_size, strategy):
    ranks.run(world_size, cases.follow_reference, layout, strategy)


# ---------------------------------------------------------------------------------------------------------- counted


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [("fsdp", 2), ("fsdp", 3), ("hsdp", 4), ("ddp", 2), ("ddp", 3), ("tp", 2), ("tp_once", 2), ("fsdp_tp_once", 4)],
)
def test_every_matrix_once_and_every_byte_as_planned(ranks: RankPool, layout, world_size):
    results = ranks.run(world_size, cases.count, layout, "owner", model_options(layout))
    in_model = 2 * 2 + 2 * 3 + 1  # up and down of two blocks, three experts in each, the gate
    repeated = world_size - 1 if layout == "tp" else 0  # experts and gate are plain tensors on every rank there
    assert sum(result["matrices"] for result in results) == in_model + repeated * 7
    assert [result["sent"] for result in results] == [result["planned"] for result in results]
    assert sum(result["sent"] - result["padding"] for result in results) == pytest.approx(results[0]["report_bytes"])


def test_replicate_computes_everything_everywhere(ranks: RankPool):
    results = ranks.run(2, cases.count, "fsdp", "replicate")
    assert [result["matrices"] for result in results] == [11, 11]
    assert [result["sent"] for result in results] == [result["planned"] for result in results]
    assert "replicate" in results[0]["strategies"]


def test_experts_that_lie_whole_do_not_travel(ranks: RankPool):
    results = ranks.run(2, cases.count, "fsdp", "owner", {"num_experts": 4})
    assert "local" in results[0]["strategies"]
    without = ranks.run(2, cases.count, "fsdp", "owner", {"num_experts": 0})
    assert sum(r["sent"] for r in results) == sum(r["sent"] for r in without)
    assert sum(r["matrices"] for r in results) == 4 + 8 + 1


def test_a_lone_matrix_moves_its_own_bytes_only(ranks: RankPool):
    results = ranks.run(8, cases.lone_matrix)
    assert sum(matrices for matrices, _ in results) == 1
    one_way = 64 * 48 * 4 * 7 // 8  # all but what the owner holds itself
    assert sum(sent for _, sent in results) == 2 * one_way


# -------------------------------------------------------------------------------------------------- rank agreement


@pytest.mark.parametrize("missing_on", ["some", "all"])
@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 2), ("hsdp", 4), ("ddp", 2)])
def test_a_parameter_without_any_gradient_is_left_alone(ranks: RankPool, layout, world_size, missing_on):
    ranks.run(world_size, agreement_cases.missing_gradients, layout, missing_on)


def test_a_gradient_that_is_missing_on_some_ranks_counts_as_zero_there(ranks: RankPool):
    ranks.run(2, agreement_cases.zero_equals_missing)


@pytest.mark.skipif(find_spec("triton") is None or torch.cuda.is_available(), reason="needs Triton's interpreter")
@pytest.mark.parametrize(
    ("world_size", "case", "args"),
    [
        (4, "missing_gradients", ("hsdp", "some")),
        (2, "missing_gradients", ("fsdp", "all")),
        (2, "missing_gradients", ("ddp", "some")),
        (2, "zero_equals_missing", ()),
    ],
)
def test_ranks_agree_by_kernels_too(ranks: RankPool, world_size, case, args):
    ranks.run(world_size, cases.by_kernels, getattr(agreement_cases, case), *args)


@pytest.mark.skipif(find_spec("triton") is None or torch.cuda.is_available(), reason="needs Triton's interpreter")
@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 3), ("fsdp_tp", 4)])
def test_same_curve_by_kernels(ranks: RankPool, layout, world_size):
    options = {"hidden": 32}
    expected, expected_weights = cases.curve(None, {}, options, 2)
    for losses, weights in ranks.run(world_size, cases.by_kernels, cases.curve, layout, {}, options, 2):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for name, value in expected_weights.items():
            np.testing.assert_allclose(weights[name], value, atol=1e-5, err_msg=name)


def test_nan_on_one_rank_skips_the_step_on_all(ranks: RankPool):
    assert ranks.run(3, agreement_cases.not_finite_on_one_rank, "skip") == [("", 1)] * 3


def test_nan_on_one_rank_raises_on_all(ranks: RankPool):
    texts = [text for text, _ in ranks.run(3, agreement_cases.not_finite_on_one_rank, "raise")]
    assert "blocks.0.down.weight" in texts[1]
    assert "on another rank" in texts[0]
    assert "on another rank" in texts[2]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("scale", "scale='original'"),
        ("lr", "lr=0.5"),
        ("parameters", "lm_head.weight"),
        ("later", "scale='v3'"),
        ("strategy", "strategy='replicate'"),
        ("stages", "max_stage_bytes=100"),
        ("policy", "nonfinite='skip'"),
    ],
)
def test_ranks_that_disagree_are_told_so(ranks: RankPool, kind, expected):
    for text in ranks.run(2, agreement_cases.disagreement, kind):
        assert "Ranks disagree" in text
        assert expected in text


def test_sets_of_ranks_that_cross(ranks: RankPool):
    assert ranks.run(4, agreement_cases.crossing_meshes) == [1.0] * 4


@pytest.mark.parametrize(
    "sets",
    [
        # Rank 3 gathers on (1, 3) while rank 1 still has to do with (1, 2).
        [([[0, 1], [2, 3]], HSDP, 2), ([1, 2], (Shard(0),), 5), ([1, 3], (Shard(0),), 2)],
        # The same ranks in two orders share a process group, and (0, 1, 3) lies between them.
        [([[0, 1], [2, 3]], HSDP, 1), ([0, 1, 3], (Shard(0),), 1), ([[0, 2], [1, 3]], HSDP, 1)],
    ],
)
def test_sets_that_overlap_do_not_wait_in_a_circle(ranks: RankPool, sets):
    ranks.run(4, agreement_cases.sets_that_overlap, sets)


def test_ranks_with_different_numbers_of_parameters(ranks: RankPool):
    ranks.run(3, agreement_cases.some_ranks_have_more)


@pytest.mark.parametrize("kind", ["empty", "missing"])
def test_a_warm_up_from_zero_where_one_rank_has_nothing(ranks: RankPool, kind):
    assert ranks.run(2, agreement_cases.first_step_without_lr, kind) == [2.0, 2.0]


def test_one_rank_may_ask_for_metrics_alone(ranks: RankPool):
    losses, others = ranks.run(2, agreement_cases.metrics_on_one_rank)
    assert losses == others


def test_meshes_that_can_not_be_handled_are_named(ranks: RankPool):
    results = ranks.run(3, agreement_cases.odd_meshes)
    for descending, _ in results:
        assert "'odd' lies on a mesh whose ranks do not ascend: [1, 0, 2]" in descending
    assert "'odd' lies on ranks (0, 1), not on rank 2" in results[2][1]
    assert not results[0][1]


def test_planning_for_other_ranks(ranks: RankPool):
    assert ranks.run(2, cases.imagined_ranks) == [64, 64]


def test_layouts_that_can_not_be_handled_are_named(ranks: RankPool):
    for partial, strided in ranks.run(2, agreement_cases.unsupported_layout):
        assert "'odd.weight' of shape (4, 4) with placements (Partial(sum),)" in partial
        assert "'odd.weight' of shape (8, 4)" in strided
        assert "several separate ranges" in strided


def test_partial_gradients_are_reduced_first(ranks: RankPool):
    ranks.run(2, agreement_cases.partial_gradients)
