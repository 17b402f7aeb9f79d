"""FSDPMuonOptimizer on real ranks. Also runs by itself: `torchrun --nproc_per_node=2 tests/test_fsdp.py`."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import pytest
import torch
from torch import nn

from muon_fsdp import FSDPMuonOptimizer
from tests import distributed_cases, fsdp_cases
from tests.pool import RankPool


def test_the_signature_shows_the_defaults_in_use():
    parameters = inspect.signature(FSDPMuonOptimizer).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert list(parameters)[:3] == ["model", "params", "lr"]
    assert [name for name, p in list(parameters.items())[3:] if p.kind < inspect.Parameter.KEYWORD_ONLY] == []
    shown = {
        "params": None, "lr": 0.02, "weight_decay": 0.01, "momentum": 0.95, "nesterov": True, "ns_steps": 5,
        "ns_stepsize": 1.0, "beta2": 0.99, "eps": 1e-8, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    assert {name: defaults[name] for name in shown} == shown
    # What it shows is what it does.
    optimizer = FSDPMuonOptimizer(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6)))
    matrices, embedding, vectors = optimizer.param_groups
    assert {name: matrices[name] for name in matrices if name in defaults and name != "params"} == {
        name: value for name, value in defaults.items() if name in matrices and name != "params"
    }
    others = {name.removeprefix("adamw_"): value for name, value in defaults.items() if name.startswith("adamw_")}
    assert {name: embedding[name] for name in others} == {**others, "lr": 0.003}  # None follows from lr
    assert vectors["weight_decay"] == 0.0


def test_it_trains_without_a_process_group():
    model = distributed_cases.make_model()
    optimizer = FSDPMuonOptimizer(model, beta2=0.98, eps=1e-6, weight_decay=0.1)
    losses = distributed_cases.train(model, optimizer, range(10))
    assert losses[-1] < losses[0]
    by_name = {name: group for group in optimizer.param_groups for name in group["param_names"]}
    assert by_name["wte.weight"]["weight_decay"] == by_name["lm_head.weight"]["weight_decay"] == 0.1
    assert by_name["blocks.0.up.weight"]["weight_decay"] == 0.1
    assert by_name["blocks.0.up.bias"]["weight_decay"] == by_name["blocks.0.norm.weight"]["weight_decay"] == 0.0
    assert by_name["wte.weight"]["betas"] == (0.9, 0.98)
    assert by_name["wte.weight"]["eps"] == 1e-6
    with optimizer.unshard_params():
        assert len(list(model.parameters())) == 18


def test_parameters_and_groups_can_be_chosen():
    model = distributed_cases.make_model()
    optimizer = FSDPMuonOptimizer(model, [model.wte.weight, model.blocks[0].up.weight, model.blocks[0].up.bias])
    rows = {row.name: row.rule for row in optimizer.routing_report().rows}
    assert rows == {"wte.weight": "adamw", "blocks.0.up.weight": "muon", "blocks.0.up.bias": "adamw"}
    groups = [{"params": [model.blocks[0].up.bias], "weight_decay": 0.3}, {"params": [model.blocks[0].up.weight]}]
    assert FSDPMuonOptimizer(model, groups).param_groups[0]["weight_decay"] == 0.3


def test_bad_input_is_refused():
    with pytest.raises(TypeError, match="needs the model itself, got list"):
        FSDPMuonOptimizer([nn.Parameter(torch.randn(2, 2))])
    with pytest.raises(ValueError, match="gradient_accumulation_steps: 0"):
        FSDPMuonOptimizer(nn.Linear(2, 2), gradient_accumulation_steps=0)
    with pytest.raises(ValueError, match="valid names are auto, owner, replicate"):
        FSDPMuonOptimizer(nn.Linear(2, 2), strategy="fast")
    with pytest.raises(TypeError, match="comm_dtype"):
        FSDPMuonOptimizer(nn.Linear(2, 2), comm_dtype="bf16")


@pytest.fixture
def alone(tmp_path):
    """Start a process group of this process only: a DTensor on one rank is a layout like any other."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "case", ["classes_agree", "accumulation_is_saved", "scaler_overflow", "full_state_dict_round_trip"]
)
def test_a_process_group_of_one(case):
    getattr(fsdp_cases, case)()


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_unshard_params_refusals_and_labels_in_a_group_of_one(tmp_path):
    fsdp_cases.unshard()
    assert "" not in fsdp_cases.refusals()
    assert fsdp_cases.labels() == ["2", "2"]
    fsdp_cases.plain_state_dict(str(tmp_path))


@pytest.mark.parametrize("world_size", [1, 2])
def test_both_classes_give_the_same_weights(ranks: RankPool, world_size):
    ranks.run(world_size, fsdp_cases.classes_agree)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unshard_params_gives_whole_parameters_and_writes_them_back(ranks: RankPool, world_size):
    ranks.run(world_size, fsdp_cases.unshard)


def test_gradient_accumulation_equals_whole_batches(ranks: RankPool):
    (expected, expected_weights), *_ = ranks.run(2, fsdp_cases.accumulate, 1)
    (losses, weights), *_ = ranks.run(2, fsdp_cases.accumulate, 3)
    for name, value in expected_weights.items():
        np.testing.assert_allclose(weights[name], value, atol=2e-5, err_msg=name)
    assert len(losses) == len(expected)


def test_a_run_resumes_in_the_middle_of_an_accumulation(ranks: RankPool):
    ranks.run(2, fsdp_cases.accumulation_is_saved)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_keeps_weights_and_momentum_in_float32(ranks: RankPool, dtype):
    expected, *_ = ranks.run(2, fsdp_cases.mixed_precision, "float32")[0]
    for losses, weights, momenta in ranks.run(2, fsdp_cases.mixed_precision, dtype):
        np.testing.assert_allclose(losses, expected, rtol=3e-2)
        assert weights == momenta == {"torch.float32"}


def test_grad_scaler_skips_a_step_that_overflows_on_one_rank(ranks: RankPool):
    ranks.run(2, fsdp_cases.scaler_overflow)


@pytest.mark.parametrize("kind", ["checkpointing", "compile", "meta", "keep unsharded", "clip", "cpu offload"])
def test_ways_of_building_the_model_do_not_matter(ranks: RankPool, kind):
    for special, plain in ranks.run(2, fsdp_cases.variant, kind):
        np.testing.assert_allclose(special, plain, rtol=1e-5)


def test_fsdp1_is_refused(ranks: RankPool):
    for fsdp1, flat in ranks.run(2, fsdp_cases.refusals):
        assert "FSDP1 is not supported" in fsdp1
        assert "FSDP1 is not supported" in flat


def test_labels_on_modules_survive_fully_shard(ranks: RankPool):
    for scales in ranks.run(2, fsdp_cases.labels):
        assert scales == ["2", "2"]  # four matrices of (4, 4)


def test_ddp_splits_the_work_and_keeps_replicas_equal(ranks: RankPool):
    results = ranks.run(3, fsdp_cases.ddp_counts)
    assert sum(mine for mine, _ in results) == results[0][1] == 11


# ------------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options", [{}, {"flatten_optimizer_state_dict": True}])
def test_a_checkpoint_continues_on_other_ranks_and_layouts(ranks: RankPool, options, tmp_path):
    expected = ranks.run(4, fsdp_cases.saved_in, str(tmp_path), "hsdp", options)[0]
    for world_size, layout in [(1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (4, "fsdp_tp"), (4, "hsdp")]:
        for losses in ranks.run(world_size, fsdp_cases.resumed_from, str(tmp_path), layout, options):
            np.testing.assert_allclose(losses, expected, rtol=1e-5, err_msg=f"{layout} on {world_size}")
    alone = fsdp_cases.resumed_from(str(tmp_path), None, options)  # one device, no process group
    np.testing.assert_allclose(alone, expected, rtol=1e-5)


def test_a_full_state_dict_restores_state(ranks: RankPool):
    ranks.run(2, fsdp_cases.full_state_dict_round_trip)


def test_a_plain_state_dict_restores_state_of_ranks_and_of_one_device(ranks: RankPool, tmp_path):
    ranks.run(2, fsdp_cases.plain_state_dict, str(tmp_path))


def test_state_of_shards_is_refused_by_one_device(ranks: RankPool):
    for text in ranks.run(2, fsdp_cases.shards_into_one_device):
        assert "torch.distributed.checkpoint" in text


def main() -> None:
    """Run the cases that need no particular number of ranks on the process group that torchrun made."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    fsdp_cases.classes_agree()
    fsdp_cases.unshard()
    fsdp_cases.accumulation_is_saved()
    fsdp_cases.scaler_overflow()
    assert "" not in fsdp_cases.refusals()
    fsdp_cases.full_state_dict_round_trip()
    if torch.distributed.get_rank() == 0:
        print("6 passed, 0 failed")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
