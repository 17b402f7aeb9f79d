"""DDP with sharded state: the same training with state of a fraction of the size, and checkpoints that reshard."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.plan.slices import make_buckets
from tests import distributed_cases, fsdp_cases
from tests import shard_state_cases as cases
from tests.pool import RankPool


def assert_replicas_are_equal(weights):
    for other in weights[1:]:
        for name, value in other.items():
            np.testing.assert_array_equal(value, weights[0][name], err_msg=name)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_training_is_that_with_whole_state(ranks: RankPool, world_size):
    results = ranks.run(world_size, cases.same_as_whole_state, {"strategy": "owner"}, 1e-5)
    assert_replicas_are_equal([weights for weights, _, _ in results])
    num_whole = results[0][1]
    assert sum(num_sharded for _, _, num_sharded in results) == num_whole
    assert max(num_sharded for _, _, num_sharded in results) < 1.5 * num_whole / world_size


@pytest.mark.parametrize(
    ("options", "atol"),
    [
        ({"rule": "normuon"}, 1e-5),
        ({"max_stage_bytes": 700}, 1e-5),
        ({"comm_dtype": torch.bfloat16, "strategy": "owner"}, 5e-3),
    ],
)
def test_rules_stages_and_precisions_do_not_matter(ranks: RankPool, options, atol):
    results = ranks.run(2, cases.same_as_whole_state, options, atol)
    assert_replicas_are_equal([weights for weights, _, _ in results])


@pytest.mark.parametrize("strategy", ["owner", "replicate"])
def test_follows_the_float64_reference(ranks: RankPool, strategy):
    ranks.run(3, distributed_cases.follow_reference, "ddp", strategy, 5, "muon", {"shard_state": True})


def test_the_spectral_sphere_shards_its_momentum(ranks: RankPool):
    options = {"rule": "spectral_sphere"}
    expected, _ = ranks.run(2, distributed_cases.curve, "ddp", options, {}, 4)[0]
    for losses, _ in ranks.run(2, distributed_cases.curve, "ddp", {**options, "shard_state": True}, {}, 4):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.skipif(find_spec("triton") is None or torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_same_curve_by_kernels(ranks: RankPool):
    """Rows of a weight of 31 rows begin at addresses that are not multiples of 16 bytes."""
    expected, expected_weights = distributed_cases.curve(None, {}, {}, 2)
    arguments = ("ddp", {"shard_state": True}, {}, 2)
    for losses, weights in ranks.run(3, distributed_cases.by_kernels, distributed_cases.curve, *arguments):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for name, value in expected_weights.items():
            np.testing.assert_allclose(weights[name], value, atol=1e-5, err_msg=name)


def test_weights_are_gathered_as_reported(ranks: RankPool):
    for received, reported in ranks.run(3, cases.counted_gather):
        assert received == reported > 0


def test_a_parameter_without_a_gradient_is_left_alone(ranks: RankPool):
    ranks.run(2, cases.missing_gradients)


def test_parameters_may_move_in_memory(ranks: RankPool):
    ranks.run(2, cases.replaced_data)


def test_accumulation_clipping_and_skipped_steps(ranks: RankPool):
    assert ranks.run(2, cases.policies) == [(1.0, 1.0)] * 2


def test_a_captured_step_gathers_weights(ranks: RankPool):
    ranks.run(2, cases.captured)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_continues_on_other_ranks_and_layouts(ranks: RankPool, tmp_path):
    expected = ranks.run(4, fsdp_cases.saved_in, str(tmp_path), "ddp_sharded", {})[0]
    for world_size, layout in [(2, "ddp_sharded"), (3, "ddp_sharded"), (2, "fsdp"), (2, "ddp")]:
        for losses in ranks.run(world_size, fsdp_cases.resumed_from, str(tmp_path), layout, {}):
            np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=f"{layout} on {world_size}")
    alone = fsdp_cases.resumed_from(str(tmp_path), None, {})  # one device, no process group
    np.testing.assert_allclose(alone, expected, rtol=1e-5)


def test_a_checkpoint_of_shards_continues_with_sharded_state(ranks: RankPool, tmp_path):
    options = {"flatten_optimizer_state_dict": True}
    expected = ranks.run(2, fsdp_cases.saved_in, str(tmp_path), "fsdp", options)[0]
    for losses in ranks.run(3, fsdp_cases.resumed_from, str(tmp_path), "ddp_sharded", options):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_without_replicas_it_is_refused():
    with pytest.raises(ValueError, match="no process group holds replicas here: wrap the model in DDP"):
        MuonOptimizer(nn.Linear(4, 4), shard_state=True)


def test_sharded_state_and_a_mesh_of_replicas_are_not_combined():
    with pytest.raises(ValueError, match=r"shard_state=True and replicate_mesh= can't be combined"):
        MuonOptimizer(nn.Linear(4, 4), shard_state=True, replicate_mesh={"*": None})


def test_a_report_about_other_ranks_needs_replicas():
    optimizer = MuonOptimizer([nn.Parameter(torch.empty(64, 32, device="meta"))], shard_state=True)
    report = optimizer.plan_report(mesh=(4, 1))
    assert report.traffic.weights == 3 * 16 * 32 * 4
    assert report.weight_buffers == 64 * 32 * 4
    assert "Weights that a rank receives after a step: 6.144 kB" in str(report)
    with pytest.raises(ValueError, match=r"pass mesh=\(replicas, 1\)"):
        optimizer.plan_report(mesh=(2, 4))


def test_buckets_have_a_bound_and_one_weight_at_least():
    shapes = [(0, (6, 8)), (1, (64, 8)), (2, (5,)), (3, (7, 4))]
    buckets = make_buckets(shapes, 3, 200)
    assert [[rows.position for rows in bucket.weights] for bucket in buckets] == [[0], [1], [2, 3]]
    assert [bucket.slice_numel for bucket in buckets] == [16, 176, 32]
    assert [rows.rows_per_rank for bucket in buckets for rows in bucket.weights] == [2, 22, 2, 3]
    assert [rows.offset for rows in buckets[2].weights] == [0, 16]
