"""Ranks and process groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from muon_fsdp.comm.transfers import local
from tests.comparisons import assert_changed, assert_near, assert_same
from tests.distributed_cases import lay_out, make_model, train
from tests.fault_cases import error_of, net
from tests.pool import RankPool
from tests.promises import promise

OPTIMIZERS = [MuonOptimizer, FSDPMuonOptimizer]
ROWS = (Shard(0),)
LIMIT = 240.0  # seconds for a case that must not hang; on a busy machine they take a while


def backward(model: nn.Module, seed: int = 0) -> None:
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()


def warnings_of(act: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in caught if "drift apart" in str(warning.message)]


def sharded(value: Tensor, mesh: DeviceMesh, placements: Any = ROWS) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(value, mesh, placements, src_data_rank=None))


def give_gradients(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.ndim))
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)


# ------------------------------------------------------------------------------------------------------- replicas


def nothing_is_shared(kind: str) -> list[str]:
    """Train a model whose parameters no mesh shards; return the warnings of three steps."""
    model: nn.Module = net()
    options: dict[str, Any] = {}
    if kind == "ddp":
        model = DistributedDataParallel(model)
        parameters: Any = list(model.parameters())
    elif kind == "stages":  # other parameters on every rank
        parameters = [(f"{dist.get_rank()}.{name}", p) for name, p in model.named_parameters()]
    else:
        parameters = model.named_parameters() if kind == "named" else model
        options = {"replicate_group": dist.group.WORLD} if kind == "replicated" else {}
    optimizer = MuonOptimizer(parameters, **options)

    def steps() -> None:
        for step in range(3):
            optimizer.zero_grad()
            backward(model, seed=step * dist.get_world_size() + dist.get_rank())
            optimizer.step()

    return warnings_of(steps)


@promise(
    "Several ranks train the same parameters and nothing shards or replicates them",
    "One warning at the first step: the ranks will drift apart",
)
@pytest.mark.parametrize("kind", ["model", "named"])
def test_replicas_that_drift_apart_are_told(ranks: RankPool, kind):
    for rank, texts in enumerate(ranks.run(2, nothing_is_shared, kind)):
        assert len(texts) == 1
        assert f"Ranks {1 - rank} and {rank} train the same parameters" in texts[0]


@pytest.mark.parametrize("kind", ["ddp", "stages", "replicated"])
def test_no_warning_where_replicas_are_kept_equal_or_are_none(ranks: RankPool, kind):
    assert ranks.run(2, nothing_is_shared, kind) == [[], []]


def ddp_over_tensor_parallel() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(net(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = DistributedDataParallel(model, device_mesh=mesh["dp"])
    return [error_of(lambda make=make: make(model)) for make in OPTIMIZERS]


@promise(
    "DDP is given a `device_mesh` over tensor-parallel parameters, and puts local shards in their place",
    "Refused, with `fully_shard` named in its place",
)
def test_ddp_over_tensor_parallel_parameters_is_refused(ranks: RankPool):
    for texts in ranks.run(4, ddp_over_tensor_parallel):
        for text in texts:
            assert "DDP(model, device_mesh=...) is not supported" in text
            assert "fully_shard" in text


class OwnExpert(nn.Module):
    """A layer that all ranks share, and one that differs from rank to rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(8, 8)
        torch.manual_seed(1 + dist.get_rank())
        self.expert = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(torch.tanh(self.shared(x)))


def ddp_with_ignored(make: str) -> None:
    """Train a model of which DDP ignores a layer, and check that its weights are those of one device."""
    model = OwnExpert()
    names = [f"expert.{leaf}" for leaf in ("weight", "bias")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    wrapped = DistributedDataParallel(model)
    alone = OwnExpert()
    options = {"lr": 0.1, "orthogonalization": "exact"}
    optimizer = OPTIMIZERS[make == "fsdp"](wrapped, **options)
    reference = OPTIMIZERS[make == "fsdp"](alone, **options)
    for step in range(3):
        optimizer.zero_grad()
        backward(wrapped, seed=10 * step + dist.get_rank())
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            q.grad = p.grad.clone()
            if name.startswith("shared"):
                equal = [torch.zeros_like(q.grad) for _ in range(dist.get_world_size())]
                dist.all_gather(equal, q.grad)
                assert_same(equal, [q.grad] * len(equal), f"gradients of {name}, by rank")
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference.step()
    assert_near(dict(model.named_parameters()), dict(alone.named_parameters()), atol=1e-6)


@promise(
    "DDP is told to ignore parameters, such as the experts of one rank",
    "They are updated on their own rank; the others are replicas over which the work is split",
)
@pytest.mark.parametrize("make", ["muon", "fsdp"])
def test_parameters_that_ddp_ignores_stay_on_their_rank(ranks: RankPool, make):
    ranks.run(2, ddp_with_ignored, make)


def replicated_work() -> int:
    """Count the matrices that this rank orthogonalizes in a step of a DDP model."""
    from muon_fsdp.rules import RULES

    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))))
    optimizer = MuonOptimizer(model, strategy="owner")
    model(torch.ones(2, 64)).sum().backward()
    computed = 0
    direction = type(RULES["muon"]).direction

    def counted(self: Any, batch: Any) -> None:
        nonlocal computed
        computed += batch.matrices.shape[0]
        direction(self, batch)

    with patch.object(type(RULES["muon"]), "direction", counted):
        optimizer.step()
    return computed


@promise("`MuonOptimizer` is given a DDP model", "The work is split over DDP's ranks, as by `FSDPMuonOptimizer`")
def test_the_work_of_a_ddp_model_is_split(ranks: RankPool):
    assert ranks.run(2, replicated_work) == [4, 4]


# ---------------------------------------------------------------------------------------------------- process groups


def groups_with_a_history() -> None:
    """Train two stages of 2 x 2 ranks each, after ranks 0 and 4 have made a group that the others know nothing of.

    Check that the weights are those of one device.
    """
    if dist.get_rank() in (0, 4):
        dist.new_group([0, 4], use_local_synchronization=True)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stage", "replicate", "shard"))
    model = net()
    fully_shard(model, mesh=mesh["replicate", "shard"])
    alone = net()
    for module in (model, alone):
        optimizer = MuonOptimizer(module.named_parameters(), lr=0.1, orthogonalization="exact")
        for step in range(2):
            optimizer.zero_grad()
            backward(module, step)
            optimizer.step()
    found = {name: p.full_tensor() for name, p in model.named_parameters()}
    assert_near(found, dict(alone.named_parameters()), atol=1e-5)


@promise(
    "Some ranks have made process groups that others know nothing of",
    "No effect: groups are named by their ranks, and found through the store",
)
def test_the_history_of_process_groups_does_not_matter(ranks: RankPool):
    ranks.run(8, groups_with_a_history, timeout=LIMIT)


def groups_in_use() -> tuple[int, int]:
    """Count the collectives of a step, after rank 0 alone has asked for a plan.

    Returns:
        The number of collectives on process groups of FSDP2 or torch, and the number on other groups.
    """
    module, data_rank, data_size = lay_out(make_model(), "hsdp")
    optimizer = FSDPMuonOptimizer(module)
    if dist.get_rank() == 0:
        optimizer.plan_report()
    mesh = module.lm_head.weight.device_mesh
    foreign = {dist.group.WORLD, *(mesh.get_group(axis) for axis in range(mesh.ndim))}
    seen: list[bool] = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_to_all_single")}

    def spy(name: str) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, **options: Any) -> Any:
            seen.append(group is None or group in foreign)
            return originals[name](*args, group=group, **options)

        return call

    train(module, optimizer, range(1), data_rank, data_size)
    with (
        patch.object(dist, "all_reduce", spy("all_reduce")),
        patch.object(dist, "all_to_all_single", spy("all_to_all_single")),
    ):
        optimizer.step()
    return sum(seen), len(seen) - sum(seen)


@promise("FSDP2 uses its communicators while a step runs", "No effect: ours are our own")
def test_no_group_of_torch_is_borrowed(ranks: RankPool):
    for foreign, own in ranks.run(4, groups_in_use):
        assert foreign == 0
        assert own > 0


def second_world() -> None:
    """Train, shut torch.distributed down, start it again, and check that a new optimizer updates the model."""
    import tempfile

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model = net()
    optimizer = MuonOptimizer(model.named_parameters(), replicate_group=dist.group.WORLD)
    backward(model)
    optimizer.step()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder[0]}/store", rank=rank, world_size=size)
    again = MuonOptimizer(model.named_parameters(), replicate_group=dist.group.WORLD)
    before = model[0].weight.detach().clone()
    again.step()
    assert_changed(model[0].weight, before, "0.weight")


@promise("torch.distributed is shut down and started again", "An optimizer that is built then makes new groups")
def test_another_initialization_of_torch_distributed(ranks: RankPool):
    ranks.run(2, second_world, timeout=LIMIT)


def in_a_pretended_world() -> tuple[int, ...]:
    """Take a step on rank 3 of 64 that do not exist; return the shape of this rank's momentum."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=64)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    fully_shard(model, mesh=init_device_mesh("cpu", (64,)))
    optimizer = FSDPMuonOptimizer(model, strategy="replicate")
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return tuple(optimizer.state[model[0].weight]["momentum_buffer"].to_local().shape)


@promise(
    'A program is tried out under the "fake" backend of torch.distributed', "A step runs, with ranks that do not exist"
)
def test_a_pretended_world(ranks: RankPool):
    assert ranks.run(1, in_a_pretended_world, timeout=LIMIT) == [(2, 64)]


def late_rank() -> str:
    """Let rank 0 call `step()` and rank 1 never; return rank 0's error."""
    import tempfile

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    init = f"file://{folder[0]}/store"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=timedelta(seconds=5))
    parameter = sharded(torch.ones(6, 4), init_device_mesh("cpu", (2,)))
    give_gradients([parameter])
    optimizer = MuonOptimizer([("weight", parameter)])
    return error_of(optimizer.step) if rank == 0 else ""


@promise(
    "A rank never calls `step()`",
    "The others raise after the time limit of `init_process_group`, at the first step with its number",
)
def test_ranks_that_do_not_come_are_named(ranks: RankPool):
    text, _ = ranks.run(2, late_rank, timeout=LIMIT)
    assert text.startswith(
        "Rank 0 has waited 0:00:05 for ranks [1]: all ranks that hold a part of a parameter must call"
    )


# -------------------------------------------------------------------------------------------------------- agreement


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
    "One rank sees a NaN, and ranks that share no parameter with it depend on it all the same",
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


@promise("One rank can't plan its step", "All ranks raise, with that rank's reason; a later step is as usual")
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


def forgotten_root(kind: str) -> list[str]:
    """Take a step where only a part of a model is sharded; return the warnings.

    With equal data on all ranks (any `kind` but "drifts") the gradients of the other part are equal.
    """
    model = net()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
    optimizer = MuonOptimizer(model)

    def step() -> None:
        backward(model, seed=dist.get_rank() if kind == "drifts" else 0)
        optimizer.step()

    return warnings_of(step)


@promise(
    "A part of a model is not sharded, and its gradients differ between ranks",
    "A warning at the first step names it",
)
def test_a_part_that_is_not_sharded_is_told(ranks: RankPool):
    for texts in ranks.run(2, forgotten_root, "drifts"):
        assert len(texts) == 1
        assert "'2.weight'" in texts[0]
    assert ranks.run(2, forgotten_root, "equal") == [[], []]


# ---------------------------------------------------------------------------------------------------------- gradients


def sparse_gradient() -> list[str]:
    """Give rank 1 a sparse gradient at the first step, and at a later one; return both errors."""
    texts = []
    for steps_before in (0, 1):
        weight = nn.Parameter(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)))
        optimizer = MuonOptimizer([("weight", weight)], replicate_group=dist.group.WORLD)
        for _ in range(steps_before):
            weight.grad = torch.ones(6, 4)
            optimizer.step()
        weight.grad = torch.ones(6, 4).to_sparse() if dist.get_rank() == 1 else torch.ones(6, 4)
        texts.append(error_of(optimizer.step))
        weight.grad = torch.ones(6, 4)
        optimizer.step()
    return texts


@promise("One rank has a sparse gradient for a matrix", "All ranks raise, and name the rank and the parameter")
def test_a_sparse_gradient_on_one_rank(ranks: RankPool):
    results = ranks.run(2, sparse_gradient, timeout=LIMIT)
    for text in results[1]:
        assert text.startswith("Sparse gradients are not supported")
    for text in results[0]:
        assert text.startswith("Rank 1 cannot take this step")
        assert "'weight'" in text


def partial_on_one_rank(placements: Any) -> None:
    """Give rank 1 a gradient that is laid out unlike its parameter, and rank 0 none; compare with one device."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(6, 4, generator=generator) for _ in range(2))
    parameter, alone = sharded(start, mesh), nn.Parameter(start.clone())
    # Rank 0 stands for zeros: as a summand, as rows or as columns.
    value = {"Partial": grad, "Shard": grad[:, 2:]}[type(placements[0]).__name__]
    if dist.get_rank() == 1:
        parameter.grad = DTensor.from_local(value.clone(), mesh, placements, shape=(6, 4), stride=(4, 1))
    alone.grad = grad if isinstance(placements[0], Partial) else torch.cat([torch.zeros(6, 2), grad[:, 2:]], 1)
    MuonOptimizer([("weight", parameter)]).step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        MuonOptimizer([("weight", alone)]).step()
    assert_near(parameter.full_tensor(), alone, atol=1e-6)


@promise(
    "A gradient of partial sums, or laid out otherwise than its parameter, is missing on some ranks",
    "It counts as zero there, as a gradient in the parameter's own layout does",
)
@pytest.mark.parametrize("placements", [(Partial(),), (Shard(1),)])
def test_partial_gradients_that_are_missing_on_some_ranks(ranks: RankPool, placements):
    ranks.run(2, partial_on_one_rank, placements, timeout=LIMIT)


def mixed_gradients() -> str:
    mesh = init_device_mesh("cpu", (2,))
    parameter = sharded(torch.ones(6, 4), mesh)
    placement = Partial() if dist.get_rank() == 1 else Shard(0)
    part = torch.ones(6, 4) if dist.get_rank() == 1 else torch.ones(3, 4)
    parameter.grad = DTensor.from_local(part, mesh, [placement], run_check=False, shape=(6, 4), stride=(4, 1))
    return error_of(MuonOptimizer([("weight", parameter)]).step)


@promise("Gradients of one parameter are laid out differently on its ranks", "All ranks raise, and name it")
def test_gradients_that_lie_differently(ranks: RankPool):
    for text in ranks.run(2, mixed_gradients, timeout=LIMIT):
        assert "gradients of parameter 'weight' of shape (6, 4) are laid out differently on its ranks [0, 1]" in text


def mixed_gradients_of_others() -> str:
    """Give ranks 0 and 1 gradients of different layouts, where rank 2 shares a parameter with rank 1 only.

    Returns:
        The error on this rank.
    """
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    named = [(f"p{i}", sharded(torch.ones(6, 4), mesh)) for i, mesh in enumerate(meshes) if mesh.get_coordinate()]
    give_gradients([p for _, p in named])
    if dist.get_rank() == 1:
        first = named[0][1]
        first.grad = None
        first.grad = DTensor.from_local(torch.ones(6, 4), meshes[0], [Partial()], run_check=False)
    return error_of(MuonOptimizer(named).step)


def test_gradients_that_lie_differently_are_told_to_ranks_that_do_not_hold_them(ranks: RankPool):
    for text in ranks.run(3, mixed_gradients_of_others, timeout=LIMIT):
        assert "are laid out differently on its ranks [0, 1]" in text


def large_partial_sums() -> float:
    """Take a step with partial sums whose sum overflows float16, and check that the weight stays finite.

    Returns:
        The number of skipped steps.
    """
    mesh = init_device_mesh("cpu", (2,))
    parameter = sharded(torch.ones(6, 4, dtype=torch.float16), mesh)
    parameter.grad = DTensor.from_local(torch.full((6, 4), 6e4, dtype=torch.float16), mesh, [Partial()])
    optimizer = MuonOptimizer([("weight", parameter)], nonfinite="skip")
    optimizer.step()
    assert parameter.to_local().isfinite().all(), parameter.to_local()
    return optimizer.metrics()["skipped_steps"]


@promise("Partial sums in half precision add up to more than it holds", "They are added in single precision")
def test_partial_sums_do_not_overflow(ranks: RankPool):
    assert ranks.run(2, large_partial_sums, timeout=LIMIT) == [0.0, 0.0]


def plain_gradient() -> str:
    parameter = sharded(torch.ones(6, 4), init_device_mesh("cpu", (2,)))
    parameter.grad = torch.ones(6, 4)
    return error_of(MuonOptimizer([("weight", parameter)]).step)


@promise("A DTensor is given a plain, whole gradient", "An error that names it and `distribute_tensor`")
def test_a_plain_gradient_of_a_dtensor_is_named(ranks: RankPool):
    for text in ranks.run(2, plain_gradient, timeout=LIMIT):
        assert "gradient of parameter 'weight' is a plain tensor of shape (6, 4)" in text
        assert "distribute_tensor" in text


# ------------------------------------------------------------------------------------------------------------ metrics


def metrics_of_shards(rule: str) -> dict[str, Any]:
    """Collect the metrics of a sharded model at two steps, and the RMS of the update of each matrix at the last."""
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = FSDPMuonOptimizer(model, lr=0.1, weight_decay=0.0, rule=rule)
    found: dict[str, Any] = {"before": optimizer.metrics()}
    sizes: list[float] = []
    for step in range(2):
        before = [p.full_tensor().detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        model(torch.randn(64, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        after = [p.full_tensor().detach() for p in model.parameters()]
        sizes = [float((a - b).square().mean().sqrt()) for a, b in zip(before, after, strict=True)]
        found[f"step {step}"] = optimizer.metrics()
    for group in optimizer.param_groups:
        group["lr"] = 0.001
    return {**found, "sizes": sizes, "with another lr": optimizer.metrics()}


@promise(
    "Metrics are asked for where all matrices are sharded",
    "`update_rms` and the residual are there too, on ranks that compute a matrix",
)
@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_metrics_of_sharded_matrices(ranks: RankPool, rule):
    results = ranks.run(2, metrics_of_shards, rule)
    for result in results:
        assert "update_rms" not in result["before"]
        # One matrix each: what it reports is the size of one of the updates.
        last = result["step 1"]
        assert min(abs(last["update_rms"] - size) for size in result["sizes"]) < 1e-5
        assert result["with another lr"]["update_rms"] == last["update_rms"]  # that of the step that was sampled
        assert 0 <= last["orthogonality_residual"] < 0.5
        assert "update_rms" in result["step 0"]
