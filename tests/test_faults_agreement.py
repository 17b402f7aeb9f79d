"""Ranks that differ from each other."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, label
from muon_fsdp.comm.dtensors import local
from tests.comparisons import assert_changed
from tests.distributed_cases import lay_out, make_model, train
from tests.fault_cases import LIMIT, backward, error_of, give_gradients, net, sharded
from tests.pool import RankPool
from tests.promises import promise
from tests.storage_cases import build, small_blocks


def nan_far_away(sets: list[list[int]]) -> float:
    """Give the last rank of a chain of overlapping sets a NaN, and check that no weight becomes one.

    Returns:
        The number of steps that this rank skipped; 1 for a rank that holds nothing.
    """
    parameters = []
    for ranks in sets:
        mesh = DeviceMesh("cpu", ranks)
        if mesh.get_coordinate() is not None:
            parameters.append(sharded(torch.randn(6, 5), mesh))
    if not parameters:
        return 1.0
    optimizer = MuonOptimizer(parameters, nonfinite="skip")
    for step in range(3):
        give_gradients(parameters)
        if step == 1 and dist.get_rank() == sets[-1][-1]:
            local(parameters[-1].grad).fill_(torch.nan)
        optimizer.step()
    for index, p in enumerate(parameters):
        assert p.to_local().isfinite().all(), f"parameter {index}: {p.to_local()}"
    return optimizer.metrics()["skipped_steps"]


CUBE = [[0, 1], [2, 3], [4, 5], [6, 7], [0, 2], [1, 3], [4, 6], [5, 7], [0, 4], [1, 5], [2, 6], [3, 7]]


@promise(
    "One rank sees a NaN, and other ranks depend on it although they share no parameter with it",
    "All of them skip the step",
)
@pytest.mark.parametrize(
    ("world_size", "sets"), [(5, [[0, 1], [1, 2], [2, 3], [3, 4]]), (8, CUBE), (4, [[0, 1], [0, 1, 2], [2, 3]])]
)
def test_news_reach_every_rank(ranks: RankPool, world_size, sets):
    assert ranks.run(world_size, nan_far_away, sets, timeout=LIMIT) == [1.0] * world_size


def reductions() -> tuple[int, int]:
    """Take a step under FSDP2 x tensor parallelism.

    Returns:
        The number of all-reduces of the step, and the number of sets of ranks that share a parameter with this rank.
    """
    module, data_rank, data_size = lay_out(make_model(hidden=32), "fsdp_tp")
    optimizer = MuonOptimizer(module.named_parameters())
    train(module, optimizer, range(2), data_rank, data_size)
    count, original = 0, dist.all_reduce

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **options)

    sets = {tuple(p.device_mesh.mesh.flatten().tolist()) for p in module.parameters()}
    with patch.object(dist, "all_reduce", counted):
        optimizer.step()
    return count, len(sets)


def test_one_reduction_agrees_for_all_sets_of_ranks(ranks: RankPool):
    assert ranks.run(4, reductions) == [(1, 2)] * 4


def numbers_of_one_rank(name: str, value: object, make: str) -> list[str]:
    """Change an option on rank 1 after two steps; return the errors of the next two."""
    module, data_rank, data_size = lay_out(make_model(), "ddp" if make == "ddp" else "fsdp")
    optimizer = FSDPMuonOptimizer(module, rule="normuon" if name == "beta2" else "muon")
    train(module, optimizer, range(2), data_rank, data_size)
    if dist.get_rank() == 1:
        index = 1 if name == "betas" else 0
        assert name in optimizer.param_groups[index]
        optimizer.param_groups[index][name] = value
    return [error_of(optimizer.step) for _ in range(2)]


@promise(
    "lr, weight decay, momentum, betas or any option is changed on one rank only",
    "All ranks raise before anything is changed, and say what differs",
)
@pytest.mark.parametrize("make", ["fsdp", "ddp"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", 0.01), ("weight_decay", 0.5), ("momentum", 0.5), ("betas", (0.5, 0.9)), ("ns_steps", 3), ("beta2", 0.5)],
)
def test_numbers_that_differ_between_ranks_are_told(ranks: RankPool, name, value, make):
    for texts in ranks.run(2, numbers_of_one_rank, name, value, make, timeout=LIMIT):
        for text in texts:
            assert "Ranks disagree about what to optimize: parameter" in text
            assert f"rank 1 has {name}={value!r}" in text
            assert text.count("=") == 2  # what is equal is not printed


def damaged_on_one_rank(damage: str, options: dict[str, Any]) -> tuple[list[str], str]:
    """Damage the stored momentum of one weight on rank 0, after two steps, and restore it after two more.

    Check that the steps between change nothing, and that the step after them works.

    Returns:
        The errors of the two steps, and that of the step after.
    """
    with small_blocks():
        return _damaged_on_one_rank(damage, options)


def _damaged_on_one_rank(damage: str, options: dict[str, Any]) -> tuple[list[str], str]:
    module, optimizer, data_rank, data_size = build("fsdp", torch.float32, **options)
    train(module, optimizer, range(2), data_rank, data_size)
    name, parameter = "blocks.0.up.weight", module.get_parameter("blocks.0.up.weight")
    state = optimizer.state[parameter]
    given = dict(state)
    if dist.get_rank() == 0:
        if damage == "no scales":
            del state["momentum_buffer_scales"]
        elif damage == "other scales":
            state["momentum_buffer_scales"] = torch.ones(1, 1)
        else:
            state["momentum_buffer"] = torch.zeros(parameter.shape if damage == "whole" else (3, 5))
    before = {key: local(p).clone() for key, p in module.named_parameters()}
    stored = {key: local(value).clone() for key, value in given.items()}
    errors = []
    for step in (2, 3):
        errors.append(error_of(lambda step=step: train(module, optimizer, [step], data_rank, data_size)))
        assert f"of parameter {name!r}" in errors[-1]
    for key, p in module.named_parameters():
        assert torch.equal(local(p), before[key]), key
    for key, value in given.items():
        assert torch.equal(local(value), stored[key]), key
    state.update(given)
    error = error_of(lambda: train(module, optimizer, [4], data_rank, data_size))
    assert_changed(local(parameter), before[name])
    return errors, error


@promise(
    "The stored state of a parameter is damaged on one rank: scales of 8 bits are gone, or a tensor of another shape "
    "was written",
    "All ranks raise before anything is changed, and name the parameter; once it is restored, steps continue",
)
@pytest.mark.parametrize(
    ("damage", "text", "options"),
    [
        ("no scales", "is torch.int8 without its scales", {"state_dtype": "int8"}),
        ("other scales", "has shape (1, 1) on cpu instead of", {"state_dtype": "int8", "overlap": "backward"}),
        ("whole", "instead of", {}),
        ("whole", "instead of", {"state_dtype": "int8", "offload_state": True}),
        ("small", "has shape (3, 5) instead of", {"state_dtype": "bfloat16", "overlap": "backward"}),
    ],
)
def test_state_that_is_damaged_on_one_rank_is_told(ranks: RankPool, damage, text, options):
    for errors, after in ranks.run(2, damaged_on_one_rank, damage, options, timeout=LIMIT):
        assert all(text in error for error in errors)
        assert after == ""


class Conv1D(nn.Module):
    """A weight that is stored (in, out), as the name of the class tells."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))


def views_of_one_rank(kind: str) -> str:
    """Build an optimizer from a model that tells another view on rank 1; return the error of its step."""
    layer: nn.Module = nn.Linear(8, 8, bias=False)
    if dist.get_rank() == 1:
        if kind == "transposed":
            layer = Conv1D()
        else:
            label(layer, "attn")
    for weight in layer.parameters():
        nn.init.ones_(weight)
        weight.grad = torch.eye(8)
    return error_of(MuonOptimizer(layer, replicate_group=dist.group.WORLD).step)


@promise(
    "The model tells another view of a parameter on one rank: another label, or weights stored (in, out)",
    "All ranks raise before anything is changed, and say what differs",
)
@pytest.mark.parametrize(("kind", "view"), [("transposed", "matrix, transposed"), ("label", "attn")])
def test_views_that_differ_between_ranks_are_told(ranks: RankPool, kind, view):
    for text in ranks.run(2, views_of_one_rank, kind, timeout=LIMIT):
        assert "parameter 'weight' of shape (8, 8): rank 0 has effective view='matrix'" in text
        assert f"rank 1 has effective view={view!r}" in text


def betas_as_a_list() -> list[float]:
    """Put a list where a tuple was between two steps; return the losses."""
    module, data_rank, data_size = lay_out(make_model(), "fsdp")
    optimizer = FSDPMuonOptimizer(module)
    losses = train(module, optimizer, range(1), data_rank, data_size)
    optimizer.param_groups[1]["betas"] = [0.9, 0.95]
    return losses + train(module, optimizer, range(1, 2), data_rank, data_size)


def test_a_list_where_an_option_is_a_tuple_stops_no_rank(ranks: RankPool):
    losses, others = ranks.run(2, betas_as_a_list, timeout=LIMIT)
    assert losses == others


def bad_option_on_one_rank() -> str:
    """Give rank 1 an option that no check admits, put it right after a step and train on; return the step's error."""
    module, data_rank, data_size = lay_out(make_model(), "fsdp")
    optimizer = MuonOptimizer(module.named_parameters())
    train(module, optimizer, range(1), data_rank, data_size)
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["ns_steps"] = -1
    try:
        optimizer.step()
        text = ""
    except (RuntimeError, ValueError) as error:
        text = str(error)
    optimizer.param_groups[0]["ns_steps"] = 5
    train(module, optimizer, range(1, 3), data_rank, data_size)
    return text


@promise("One rank can't plan its step", "All ranks raise an error with that rank's reason; a later step works again")
def test_a_rank_that_fails_tells_the_others(ranks: RankPool):
    results = ranks.run(3, bad_option_on_one_rank, timeout=LIMIT)
    assert "ns_steps" in results[1]
    for text in (results[0], results[2]):
        assert text.startswith("Rank 1 cannot take this step, so no rank does: ")
        assert "ns_steps" in text


def parameters_of_one_rank() -> list[str]:
    """Add a parameter on rank 1 only, then on both, and check that it is trained in the end; return the errors."""
    mesh = init_device_mesh("cpu", (2,))
    first, second = (sharded(torch.randn(6, 4), mesh) for _ in range(2))
    optimizer = MuonOptimizer([("first", first)])
    give_gradients([first, second])
    optimizer.step()
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": [("second", second)]})
    texts = [error_of(optimizer.step)]
    if dist.get_rank() == 0:
        optimizer.add_param_group({"params": [("second", second)]})
    before = second.to_local().clone()
    give_gradients([first, second])
    texts.append(error_of(optimizer.step))
    assert_changed(second, before, "second")
    return texts


@promise(
    "Parameters are added on some ranks only",
    "All ranks raise. Once the others have added them too, training continues",
)
def test_parameters_added_on_one_rank(ranks: RankPool):
    for first, second in ranks.run(2, parameters_of_one_rank, timeout=LIMIT):
        assert "rank 0 has nothing where rank 1 has parameter 'second' of shape (6, 4)" in first
        assert second == ""


def many_parameters(counts: tuple[int, int]) -> str:
    mesh = init_device_mesh("cpu", (2,))
    parameters = [sharded(torch.zeros(2), mesh) for _ in range(counts[dist.get_rank()])]
    return error_of(MuonOptimizer([(f"p{i}", p) for i, p in enumerate(parameters)]).step)


@promise("Ranks have different numbers of parameters", "All ranks raise, and name the first that is not on both")
@pytest.mark.parametrize("counts", [(1024, 1025), (3, 2)])
def test_different_numbers_of_parameters(ranks: RankPool, counts):
    for text in ranks.run(2, many_parameters, counts, timeout=LIMIT):
        more = counts.index(max(counts))
        assert "Ranks disagree" in text
        assert f"parameter 'p{min(counts)}' of shape (2,)" in text
        assert ("rank 0 has nothing" if more else "rank 1 has nothing") in text


def uneven_experts() -> str:
    mesh = init_device_mesh("cpu", (2,))
    width = 4 + dist.get_rank()
    parameters = [sharded(torch.zeros(width, 4), mesh, (Replicate(),))]
    return error_of(MuonOptimizer(parameters).step)


def test_unnamed_parameters_that_differ_hint_at_names(ranks: RankPool):
    for text in ranks.run(2, uneven_experts, timeout=LIMIT):
        assert "rank 0 has an unnamed parameter of shape (4, 4) where rank 1 has" in text
        assert "Pass the model or named parameters" in text


def groups_with_other_members() -> str:
    """Make two groups of the same options on both ranks, with different parameters in them; return the error."""
    mesh = init_device_mesh("cpu", (2,))
    parameters = [(f"p{i}", sharded(torch.ones(6, 4), mesh, (Replicate(),))) for i in range(3)]
    cut = 1 + dist.get_rank()
    groups = [{"params": parameters[:cut], "lr": 0.1}, {"params": parameters[cut:], "lr": 0.5}]
    give_gradients([p for _, p in parameters])
    return error_of(MuonOptimizer(groups).step)


def test_groups_with_other_members_are_told(ranks: RankPool):
    for text in ranks.run(2, groups_with_other_members, timeout=LIMIT):
        assert "parameter 'p1' of shape (6, 4): rank 0 has lr=0.5, rank 1 has lr=0.1" in text


def added_by_those_who_hold_it() -> None:
    """Train a parameter on all ranks, and check that it is updated with one that ranks 0 and 1 alone add later."""
    everyone, pair = init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [0, 1])
    parameters = [sharded(torch.randn(8, 4), everyone)]
    optimizer = MuonOptimizer([("dense", parameters[0])])
    for step in range(4):
        if step == 2 and dist.get_rank() < 2:
            parameters.append(sharded(torch.randn(6, 4), pair))
            optimizer.add_param_group({"params": [("expert", parameters[1])]})
        before = [p.to_local().clone() for p in parameters]
        give_gradients(parameters)
        optimizer.step()
        assert_changed(parameters, before, f"step {step}")


@promise(
    "Ranks that alone hold a parameter add it in mid-training",
    "All ranks agree again about who holds what, and training continues",
)
def test_parameters_added_where_they_are_held(ranks: RankPool):
    ranks.run(4, added_by_those_who_hold_it, timeout=LIMIT)


def accumulation(kind: str) -> list[str]:
    """Call `step()` four times with two calls per update, while rank 0 reads or saves its state or rank 1 fails.

    Returns:
        The error of every call, "" where there was none.
    """
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = FSDPMuonOptimizer(model, gradient_accumulation_steps=2)
    parameter = optimizer.param_groups[0]["params"][0]
    texts = []
    if kind == "reads" and dist.get_rank() == 0:
        optimizer.state[parameter]
    for call in range(4):
        backward(model, call)
        if kind == "saves" and dist.get_rank() == 0 and call == 0:
            optimizer.state_dict()
        if kind == "fails" and dist.get_rank() == 1:
            optimizer.param_groups[0]["ns_steps"] = -1 if call == 2 else 5  # a call that only accumulates
        texts.append(error_of(optimizer.step))
        optimizer.zero_grad()
    return texts


@promise(
    "Gradients accumulate over calls of `step()`, and ranks do different things between them",
    "Ranks stay in step: only calls that update, and the first one, communicate",
)
@pytest.mark.parametrize("kind", ["reads", "saves", "fails"])
def test_ranks_stay_in_step_while_gradients_accumulate(ranks: RankPool, kind):
    assert ranks.run(2, accumulation, kind, timeout=LIMIT) == [[""] * 4] * 2
