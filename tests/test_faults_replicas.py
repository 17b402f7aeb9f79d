"""Replicas, DDP and parts that are not sharded."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from muon_fsdp import MuonOptimizer
from tests.comparisons import assert_near, assert_same
from tests.fault_cases import OPTIMIZERS, backward, error_of, net, warnings_of
from tests.pool import RankPool
from tests.promises import promise


def average_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


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
            if kind == "replicated":
                average_gradients(model)
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
    "An error that names `fully_shard` as the replacement",
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
    directions = type(RULES["muon"]).directions

    def counted(self: Any, batches: Any) -> None:
        nonlocal computed
        computed += sum(len(batch.matrices) for batch in batches)
        directions(self, batches)

    with patch.object(type(RULES["muon"]), "directions", counted):
        optimizer.step()
    return computed


@promise("`MuonOptimizer` is given a DDP model", "The work is split over DDP's ranks, as by `FSDPMuonOptimizer`")
def test_the_work_of_a_ddp_model_is_split(ranks: RankPool):
    assert ranks.run(2, replicated_work) == [4, 4]


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


def step_after_new_groups(folder: str) -> str:
    """Initialize torch.distributed anew between two steps of an optimizer that knows a group of replicas."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = net()
    optimizer = MuonOptimizer(model, replicate_group=dist.group.WORLD)
    backward(model)
    optimizer.step()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    return error_of(optimizer.step)


@promise(
    "torch.distributed is initialized anew, and an optimizer for replicas takes a step",
    "An error says that their process group was destroyed, and to build the optimizer anew",
)
def test_a_destroyed_group_of_replicas_is_told(ranks: RankPool, tmp_path):
    for text in ranks.run(2, step_after_new_groups, str(tmp_path)):
        assert "The process group of replicated parameters was destroyed" in text
        assert "build the optimizer anew" in text
