"""Frameworks move the state of a GPU's optimizer to the CPU between steps, and save it while training continues."""

from __future__ import annotations

import re

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tests import state_cases as cases
from tests.comparisons import assert_near
from tests.gpu.test_nccl import nccl  # noqa: F401 - a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# AReaL leaves tensors without elements behind, the others leave the state on the CPU.
REFUSED = {
    way: "instead of .*: restore it, or delete it" if way is cases.Areal else "move the state back before step"
    for way in cases.WAYS
}


@pytest.mark.parametrize("cuda_graph", ["auto", False])
@pytest.mark.parametrize("way", cases.WAYS)
@pytest.mark.parametrize(("rule", "options"), cases.RULES)
def test_state_that_is_away_between_all_steps_changes_nothing(rule, options, way, cuda_graph):
    expected = cases.Training(rule, "cuda", cuda_graph=False, **options)
    found = cases.Training(rule, "cuda", cuda_graph=cuda_graph, **options)
    expected.train(12)
    found.train(12, way())
    assert_near(found.tensors, expected.tensors, way.__name__, atol=cases.tolerance(rule, "cuda"))
    if rule == "muon" and cuda_graph == "auto":  # its graph keeps no address of state
        assert found.optimizer.plan_report().cuda_graph == "captured"


@pytest.mark.parametrize("cuda_graph", ["auto", False])
@pytest.mark.parametrize("way", cases.WAYS)
@pytest.mark.parametrize(("rule", "options"), cases.RULES)
def test_a_step_while_state_is_away_is_refused(rule, options, way, cuda_graph):
    expected = cases.Training(rule, "cuda", cuda_graph=False, **options)
    found = cases.Training(rule, "cuda", cuda_graph=cuda_graph, **options)
    mover = way()
    found.train(9)
    mover.away(found.optimizer)
    with pytest.raises(RuntimeError, match=REFUSED[way]):
        found.step()
    mover.back(found.optimizer)
    found.train(9)
    expected.train(18)
    assert_near(found.tensors, expected.tensors, way.__name__, atol=cases.tolerance(rule, "cuda"))
    if cuda_graph == "auto":
        assert found.optimizer.plan_report().cuda_graph == "captured"


@pytest.mark.parametrize("cuda_graph", ["auto", False])
@pytest.mark.parametrize("way", range(len(cases.WAYS)))
def test_state_of_shards_is_moved(nccl, way, cuda_graph):  # noqa: F811
    assert nccl.run(2, cases.move_on_ranks, way, "cuda", cuda_graph, 8) == [[], []]


@pytest.mark.parametrize("way", range(len(cases.WAYS)))
def test_a_step_while_state_of_shards_is_away_is_refused(nccl, way):  # noqa: F811
    for messages in nccl.run(2, cases.step_while_away_on_ranks, way):
        assert len(messages) == len(cases.RULES)
        assert all(re.search(REFUSED[cases.WAYS[way]], message) for message in messages), messages


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("stages_in_background", [False, True])
@pytest.mark.parametrize("cuda_graph", ["auto", False])
@pytest.mark.parametrize(("rule", "options"), cases.RULES)
def test_async_save_saves_what_was_there_when_it_was_called(rule, options, cuda_graph, stages_in_background):
    stager = None
    if stages_in_background:
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=True, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=True
            )
        )
    training = cases.saved_while_training(rule, "cuda", stager, cuda_graph=cuda_graph, **options)
    if cuda_graph == "auto":
        assert training.optimizer.plan_report().cuda_graph == "captured"
    if stager is not None:
        stager.close()
