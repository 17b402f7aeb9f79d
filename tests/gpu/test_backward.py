"""Stages that start in backward on a GPU: the same bits, and a gather that ends before backward does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from tests.comparisons import assert_same
from tests.gpu import overlap_cases as cases
from tests.gpu.test_nccl import nccl  # noqa: F401 - a fixture
from tests.pool import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_same_bits(nccl: RankPool, world_size):  # noqa: F811
    for used, discarded in nccl.run(world_size, cases.same_bits, None):
        assert used > 10
        assert discarded == 0


@pytest.mark.filterwarnings("ignore:overlap='backward' gains nothing")
def test_clipped_gradients_are_noticed(nccl: RankPool):  # noqa: F811
    for used, discarded in nccl.run(2, cases.same_bits, 5):
        assert used > 10
        assert discarded > 2


@pytest.mark.parametrize("rule", ["normuon", "spectral_sphere"])
def test_same_bits_of_other_rules(nccl: RankPool, rule):  # noqa: F811
    for used, discarded in nccl.run(2, cases.same_bits, None, None, {"rule": rule}):
        assert used > 10
        assert discarded == 0


DDP = [
    (2, {}, {"strategy": "owner"}),
    (4, {}, {"strategy": "owner"}),
    (2, {}, {"strategy": "replicate"}),
    (2, {}, {"shard_state": True}),
    (2, {}, {"rule": "normuon"}),
    (2, {"gradient_as_bucket_view": True}, {}),
    (2, {"static_graph": True}, {}),
    (3, {}, {}),  # here the mean is rounded
]


@pytest.mark.parametrize(("world_size", "ddp", "options"), DDP)
def test_same_bits_under_ddp(nccl: RankPool, world_size, ddp, options):  # noqa: F811
    for used, discarded in nccl.run(world_size, cases.same_bits, None, ddp, options):
        assert used > 5
        assert discarded == 0


@pytest.mark.parametrize("ddp", [{}, {"gradient_as_bucket_view": True}])
@pytest.mark.filterwarnings("ignore:overlap='backward' gains nothing")
def test_clipped_gradients_are_noticed_under_ddp(nccl: RankPool, ddp):  # noqa: F811
    for used, discarded in nccl.run(2, cases.same_bits, 5, ddp):
        assert used > 5
        assert discarded > 0


@pytest.mark.parametrize("in_ddp", [False, True])
def test_a_gather_ends_before_backward_does(nccl: RankPool, in_ddp):  # noqa: F811
    for gathered, still_in_backward, threads in nccl.run(2, cases.gathered_before_backward_ends, in_ddp):
        assert gathered, "no stage was gathered while the device computed gradients"
        assert still_in_backward, "backward had ended before the gather"
        assert threads == {"muon_fsdp backward"}


def train(overlap: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], MuonOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, device="cuda", dtype=dtype) for _ in range(6)))
    optimizer = MuonOptimizer(model, lr=0.05, nesterov=True, max_stage_bytes=2**18, overlap=overlap, cuda_graph=False)
    for step in range(6):
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(step)).to("cuda", dtype)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = [p.detach().clone() for p in model.parameters()]
    return values + [value.clone() for p in model.parameters() for value in optimizer.state[p].values()], optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_same_bits_in_one_process(dtype):
    expected, _ = train("step", dtype)
    found, optimizer = train("backward", dtype)
    assert_same(found, expected)
    assert optimizer.metrics()["overlapped_stages"] > 4
    assert optimizer.metrics()["discarded_stages"] == 0
