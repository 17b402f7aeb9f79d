"""Several NCCL ranks on one GPU: training equal to one rank, overlap, and memory bounded by the stage buffers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.comparisons import assert_same
from tests.gpu import nccl_cases
from tests.pool import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def nccl() -> Iterator[RankPool]:
    pool = RankPool("nccl")
    yield pool
    pool.close()


@pytest.mark.parametrize("strategy", ["owner", "replicate"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_training_equals_one_rank(nccl: RankPool, world_size, strategy):
    (expected,) = nccl.run(1, nccl_cases.curve, strategy)
    for losses in nccl.run(world_size, nccl_cases.curve, strategy):
        assert losses == pytest.approx(expected, rel=4e-2, abs=1e-3)
    assert expected[-1] < 0.5 * expected[0]


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_matrices_on_submeshes_are_computed_once(nccl: RankPool, cuda_graph):
    (expected,) = nccl.run(1, nccl_cases.curve, "owner")
    results = nccl.run(4, nccl_cases.once, cuda_graph)
    assert sum(num_matrices for _, num_matrices, _ in results) == 4 * 2
    for losses, _, weights in results:
        assert losses == pytest.approx(expected, rel=4e-2, abs=1e-3)
        assert_same(weights, results[0][2])


@pytest.mark.parametrize("what", ["values", "gradients"])
def test_replicas_that_differ_are_told(nccl: RankPool, what):
    for text in nccl.run(2, nccl_cases.replicas_that_differ, what, timeout=120):
        assert "hold the same parameter 'weight' of shape (2051, 2049) by replicate_mesh" in text
        assert f"but they differ in its {what}" in text


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize(("kind", "world_size"), [("ddp", 2), ("ddp", 3), ("hsdp", 4)])
def test_replicas_stay_equal(nccl: RankPool, kind, world_size, cuda_graph):
    ((expected, *_),) = nccl.run(1, nccl_cases.replicas, "ddp", {"cuda_graph": False})
    results = nccl.run(world_size, nccl_cases.replicas, kind, {"cuda_graph": cuda_graph}, timeout=120)
    assert results[0][0] == pytest.approx(expected, rel=4e-2, abs=1e-3)
    for _, weights, _ in results[1:]:
        assert all(map(torch.equal, weights, results[0][1]))


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_state_of_replicas(nccl: RankPool, world_size, cuda_graph):
    """The rows of three ranks are uneven and begin at addresses that are not multiples of 16 bytes."""
    (whole, *_) = nccl.run(world_size, nccl_cases.replicas, "ddp", {"cuda_graph": False}, timeout=120)
    options = {"cuda_graph": cuda_graph, "shard_state": True}
    results = nccl.run(world_size, nccl_cases.replicas, "ddp", options, timeout=120)
    assert results[0][0] == pytest.approx(whole[0], rel=4e-2, abs=1e-3)
    for _, weights, state in results:
        assert all(map(torch.equal, weights, results[0][1]))
        assert state < 1.1 * whole[2] / world_size


def test_the_next_stage_is_gathered_while_one_computes(nccl: RankPool):
    nccl.run(2, nccl_cases.overlap)


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize(("name", "value"), [("lr", 0.5), ("ns_steps", 3)])
def test_what_is_changed_on_one_rank_is_told_on_all(nccl: RankPool, name, value, cuda_graph):
    for texts in nccl.run(2, nccl_cases.changed_on_one_rank, name, value, cuda_graph, timeout=120):
        for text in texts:
            assert f"rank 1 has {name}={value}" in text


def test_agreement_does_not_wait_for_gradients(nccl: RankPool):
    nccl.run(2, nccl_cases.agreement_beside_backward)


def test_fewer_stages_in_flight_need_the_memory_that_the_plan_says(nccl: RankPool):
    peaks = {}
    for in_flight in (1, 2, 3):
        for result in nccl.run(2, nccl_cases.peak_in_flight, in_flight, 2048, 6):
            assert result["peak of step"] < 1.05 * result["planned"]
            peaks[in_flight] = result["peak of step"]
    assert peaks[1] < peaks[2] < peaks[3], peaks


def test_memory_beyond_weights_gradients_and_momentum_is_bounded_by_stages(nccl: RankPool):
    bound = 8 * 2**20
    for result in nccl.run(2, nccl_cases.peak_of_step, "muon", 1024, 8, bound):
        # Three stages in flight (gathered, computed, scattered) with their send and receive buffers and the scratch
        # of an orthogonalization; the largest matrix is 16 MiB in float32 and takes the place of the bound.
        assert result["peak of step"] < 16 * 2 * bound
        assert result["state"] < 1.1 * result["weights"]
