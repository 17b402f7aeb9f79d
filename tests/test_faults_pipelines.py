"""Pipeline stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

from muon_fsdp import FSDPMuonOptimizer
from muon_fsdp.comm.dtensors import local
from tests.comparisons import assert_changed, assert_near, assert_same
from tests.pool import RankPool
from tests.promises import promise

WIDTH, NUM_LAYERS, MICRO_BATCHES, BATCH = 8, 4, 4, 16
OPTIONS: dict[str, Any] = {"lr": 0.05, "adamw_lr": 0.01, "orthogonalization": "exact"}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # so that the groups of stages have names of their own


class Layers(nn.Module):
    """Some layers of a net, by their numbers in the whole."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        for number in numbers:
            torch.manual_seed(number)
            self.layers[str(number)] = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


class Pipeline:
    """Two stages of two ranks each: 1F1B between them, FSDP2 inside."""

    def __init__(self, **options: Any) -> None:
        self.mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
        self.number = self.mesh["stage"].get_local_rank()
        half = NUM_LAYERS // 2
        self.model = Layers(range(self.number * half, (self.number + 1) * half))
        for layer in self.model.layers.values():
            fully_shard(layer, mesh=self.mesh["data"])
        fully_shard(self.model, mesh=self.mesh["data"])
        group = self.mesh["stage"].get_group()
        stage = PipelineStage(self.model, self.number, 2, torch.device("cpu"), group=group)
        self.schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
        self.optimizer = FSDPMuonOptimizer(self.model, **OPTIONS, **options)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        inputs, targets = (part.chunk(2)[self.mesh["data"].get_local_rank()] for part in batch(step))
        if self.number == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=targets)

    def train(self, steps: range) -> None:
        for step in steps:
            self.backward(step)
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        optimizer = get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
        return {"model": self.model.state_dict(), "optimizer": optimizer}

    def weights(self) -> dict[str, Tensor]:
        full = {name: p.full_tensor() for name, p in self.model.named_parameters() if isinstance(p, DTensor)}
        assert len(full) == len(list(self.model.parameters()))
        return full


def train_and_resume(folder: str) -> None:
    """Train four steps, two of them after resuming; compare the weights with one device and with an unbroken run."""
    alone = Layers(range(NUM_LAYERS))
    optimizer = FSDPMuonOptimizer(alone, **OPTIONS)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(alone(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
    expected = dict(alone.named_parameters())

    whole, first, second = Pipeline(), Pipeline(), Pipeline()
    whole.train(range(4))
    first.train(range(2))
    dcp.save(
        {
            "model": first.model.state_dict(),
            "optimizer": get_optimizer_state_dict(first.model, first.optimizer, options=FLAT),
        },
        checkpoint_id=folder,
    )
    state = {
        "model": second.model.state_dict(),
        "optimizer": get_optimizer_state_dict(second.model, second.optimizer, options=FLAT),
    }
    dcp.load(state, checkpoint_id=folder)
    second.model.load_state_dict(state["model"])
    set_optimizer_state_dict(second.model, second.optimizer, state["optimizer"], options=FLAT)
    second.train(range(2, 4))
    resumed = second.weights()
    assert_same(resumed, whole.weights(), "resumed and unbroken")
    assert_near(resumed, {name: expected[name] for name in resumed}, atol=1e-5)


@promise(
    "A model is trained by 1F1B of `torch.distributed.pipelining`, with FSDP2 in every stage, and resumed",
    "The same weights as on one device",
)
def test_a_pipeline_trains_and_resumes(ranks: RankPool, tmp_path):
    ranks.run(4, train_and_resume, str(tmp_path / "checkpoint"), timeout=300)


def nan_in_one_stage(agrees: bool) -> float:
    """Give the last stage a NaN, and check that weights change in a step exactly on ranks that do not skip it.

    Returns:
        The number of skipped steps.
    """
    pipeline = Pipeline(nonfinite="skip", agreement_group=dist.group.WORLD if agrees else None)
    pipeline.train(range(2))
    before = pipeline.weights()
    pipeline.backward(2)
    if dist.get_rank() == dist.get_world_size() - 1:
        local(next(pipeline.model.parameters()).grad).fill_(torch.nan)
    pipeline.optimizer.step()
    skipped = pipeline.optimizer.metrics()["skipped_steps"]
    compare = assert_same if skipped else assert_changed
    compare(pipeline.weights(), before)
    return skipped


@promise(
    'One pipeline stage sees a NaN under `nonfinite="skip"`',
    "With `agreement_group=` all stages leave out the step; without it the ranks that share parameters do",
)
@pytest.mark.parametrize("agrees", [True, False])
def test_stages_skip_a_step_together(ranks: RankPool, agrees):
    first_stage, last_stage = [float(agrees)] * 2, [1.0, 1.0]
    assert ranks.run(4, nan_in_one_stage, agrees, timeout=300) == first_stage + last_stage


def plain_stages() -> float:
    """Give rank 2 an infinite gradient where no rank shares a parameter; return the steps this rank skipped."""
    layer = nn.Linear(4, 4 + dist.get_rank())
    optimizer = FSDPMuonOptimizer(layer, nonfinite="skip", agreement_group=dist.group.WORLD)
    for step in range(3):
        optimizer.zero_grad()
        layer(torch.ones(2, 4)).sum().backward()
        if step == 1 and dist.get_rank() == 2:
            layer.weight.grad[0, 0] = torch.inf
        optimizer.step()
    return optimizer.metrics()["skipped_steps"]


def test_ranks_that_share_nothing_agree(ranks: RankPool):
    assert ranks.run(3, plain_stages, timeout=300) == [1.0] * 3
