"""Stages that start in backward under DDP: the same results, whatever DDP was told and whatever changes gradients."""

from __future__ import annotations

import pytest

from tests import overlap_ddp_cases as cases
from tests.fault_cases import LIMIT
from tests.overlap_cases import THREAD
from tests.pool import RankPool


def test_same_bits_in_every_mode_of_ddp(ranks: RankPool):
    for found in ranks.run(2, cases.same_in_all, list(cases.DDP_CASES), timeout=LIMIT):
        for name, (used, discarded, stages) in found.items():
            assert stages > 1, name
            assert (used, discarded) == (3 * stages, 0), name  # the first two of five steps find out what comes


@pytest.mark.parametrize("world_size", [3, 4])
def test_same_bits_on_more_ranks(ranks: RankPool, world_size):
    """On three ranks the mean is rounded: our hook must divide exactly as DDP does."""
    for found in ranks.run(world_size, cases.same_in_all, ["owners", "sharded state"], timeout=LIMIT):
        for name, (used, discarded, stages) in found.items():
            assert (used, discarded) == (3 * stages, 0), name


@pytest.mark.filterwarnings("ignore:overlap='backward' gains nothing")
def test_changed_gradients_and_state_are_discarded_under_ddp(ranks: RankPool):
    all_stages, one, none = ["clip", "load"], ["double one on rank 1", "remove one"], ["clip others"]
    for found in ranks.run(2, cases.same_in_all, all_stages + one + none, timeout=LIMIT):
        for name, (used, discarded, stages) in found.items():
            assert discarded == (stages if name in all_stages else name in one), name
            assert used == 3 * stages - discarded - (name == "remove one"), name


@pytest.mark.filterwarnings("ignore:overlap='backward' gains nothing")
def test_same_bits_if_backward_runs_more_or_less_often_than_before(ranks: RankPool):
    for found in ranks.run(2, cases.same_in_all, list(cases.UNEXPECTED), timeout=LIMIT):
        assert all(discarded > 0 for _, discarded, _ in found.values())


def test_a_further_backward_is_noticed_where_values_are_not_compared(ranks: RankPool):
    for _, discarded, stages in ranks.run(2, cases.counted_only, timeout=LIMIT):
        assert discarded == 2 * stages  # and in step 4, which has one less than step 3


def test_ranks_may_lack_different_gradients_under_ddp(ranks: RankPool):
    results = ranks.run(2, cases.missing_gradients, timeout=LIMIT)
    assert results[0] == results[1]
    used, discarded = results[0]
    assert used > 20
    assert discarded == 2  # in steps 6 and 8, no rank has used one matrix


def test_several_wrappers_may_share_a_backward(ranks: RankPool):
    for used, discarded in ranks.run(2, cases.in_two_wrappers, timeout=LIMIT):
        assert (used, discarded) == (6, 0)


def test_a_stage_runs_before_backward_has_ended_under_ddp(ranks: RankPool):
    for in_time, threads in ranks.run(2, cases.gathered_before_backward_ends, timeout=LIMIT):
        assert in_time
        assert threads == {THREAD}


def test_listeners_hear_of_gradients_before_ddp_writes_them(ranks: RankPool):
    for count, equal, is_early in ranks.run(2, cases.what_listeners_hear, timeout=LIMIT):
        assert equal == 3 * count * [True]
        assert is_early


def test_a_wrapper_can_be_copied_and_outlives_its_optimizer(ranks: RankPool):
    assert all(ranks.run(2, cases.copied, timeout=LIMIT))
