"""Check that both classes train under FSDP2, used as a newcomer would use them.

pytest runs this on a pool of gloo ranks, and torchrun on two GPUs or on the CPU:

    torchrun --nproc_per_node=2 tests/test_fsdp_integration.py
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from tests.comparisons import assert_changed
from tests.pool import RankPool


def device() -> torch.device:
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= dist.get_world_size()
    return torch.device("cuda", dist.get_rank()) if on_gpu else torch.device("cpu")


def acceptance_snippet() -> None:
    """Check that the plain class updates DTensor parameters, used as a newcomer would use it."""
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 10)).to(device())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optim = MuonOptimizer(model.parameters())
    before = [p.to_local().clone() for p in model.parameters()]
    for _ in range(3):
        optim.zero_grad()
        model(torch.randn(4, 100, device=device())).square().mean().backward()
        optim.step()
    assert_changed(list(model.parameters()), before)


def loss_falls() -> None:
    """Check that FSDPMuonOptimizer learns a permutation of features."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).to(device())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = FSDPMuonOptimizer(model, lr=0.02, adamw_lr=0.01)
    print(optimizer.plan_report()) if dist.get_rank() == 0 else None
    torch.manual_seed(dist.get_rank() + 1)
    losses = []
    for _ in range(60):
        x = torch.randn(64, 32, device=device())
        loss = (model(x) - x.roll(1, -1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0], losses


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_plain_class_updates_every_shard(ranks: RankPool, world_size):
    ranks.run(world_size, acceptance_snippet)


def test_the_loss_falls(ranks: RankPool):
    ranks.run(2, loss_falls)


ONE_AFTER_THE_OTHER = """
import os, runpy, sys
first, second = sys.argv[1:]
before = list(sys.path)
runpy.run_path(first, run_name="__main__")
sys.path[:] = before
# The store of torchrun still holds the addresses of the first group.
os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=os.environ["NEXT_PORT"])
runpy.run_path(second, run_name="__main__")
"""


def test_both_files_run_under_torchrun(tmp_path):
    """They share their ranks, because starting ranks takes longer than all that they do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "NEXT_PORT": str(port)}
    environment.pop("PYTHONPATH", None)  # they find the package themselves
    (tmp_path / "both.py").write_text(ONE_AFTER_THE_OTHER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "both.py"]
    command += [str(ROOT / "tests" / name) for name in ("test_fsdp_integration.py", "test_fsdp.py")]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "2 passed, 0 failed" in result.stdout
    assert "6 passed, 0 failed" in result.stdout


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world_size = int(os.environ["WORLD_SIZE"])
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= world_size
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus else "gloo")
    if not on_gpus:
        torch.set_num_threads(1)
    acceptance_snippet()
    loss_falls()
    if dist.get_rank() == 0:
        print("2 passed, 0 failed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
