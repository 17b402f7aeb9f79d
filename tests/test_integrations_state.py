"""State is moved off its device between steps, as frameworks do, and saved by `async_save` while training continues."""

from __future__ import annotations

import pytest
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tests import state_cases as cases
from tests.comparisons import assert_same
from tests.pool import RankPool

# -------------------------------------------------------------------------------------------------------- moved state


@pytest.mark.parametrize("way", cases.WAYS)
@pytest.mark.parametrize(("rule", "options"), cases.RULES)
def test_state_that_was_moved_and_came_back_changes_nothing(rule, options, way):
    expected, found = cases.Training(rule, **options), cases.Training(rule, **options)
    expected.train(6)
    found.train(6, way())
    assert_same(found.tensors, expected.tensors, way.__name__)
    assert all(value.isfinite().all() for value in found.tensors.values())


@pytest.mark.parametrize("way", range(len(cases.WAYS)))
def test_state_of_shards_that_was_moved_changes_nothing(ranks: RankPool, way):
    assert ranks.run(2, cases.move_on_ranks, way) == [[], []]


def test_kernels_read_the_state_where_it_is_now(request):
    """Kernels find state through tables of addresses; what lay there before is overwritten."""
    pytest.importorskip("triton")
    from tests.kernel_cases import kernels_fixture

    launched = kernels_fixture.__wrapped__(request.getfixturevalue("monkeypatch"))
    options = {"ns_steps": 2}  # every product takes the interpreter long
    expected = cases.Training(**options)
    expected.train(2)
    for way in (cases.Verl, cases.InPlace):
        found = cases.Training(**options)
        found.train(2, way())
        assert_same(found.tensors, expected.tensors, way.__name__)
    assert {"_muon_prepare_kernel", "_adamw_kernel"} <= set(launched)


# -------------------------------------------------------------------------------------------------------- async_save


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("rule", "options"), cases.RULES)
def test_async_save_saves_what_was_there_when_it_was_called(rule, options):
    cases.saved_while_training(rule, **options)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_async_save_with_staging_in_the_background():
    stager = DefaultStager(StagingOptions(False, False, use_async_staging=True, use_non_blocking_copy=False))
    cases.saved_while_training("muon", stager=stager)
    stager.close()


@pytest.mark.parametrize(("rule", "options"), cases.RULES)
def test_async_save_on_ranks(ranks: RankPool, rule, options):
    assert ranks.run(2, cases.save_on_ranks, rule, options) == [11, 11]
