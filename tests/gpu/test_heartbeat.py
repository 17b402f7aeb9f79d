"""The training program on NCCL ranks that share one GPU: a stopped rank is waited for no longer than told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROOT = Path(__file__).parents[2]


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    """The other rank names it while its main thread waits for the device."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 400)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    job |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NCCL_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "muon_fsdp.training", "--model", "demo", "--sequence-length", "16", "--fsdp"]
    command += ["--data", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out"), "--steps", "1000000"]
    command += ["--batch-size", "8", "--eval-windows", "8", "--timeout", "20"]
    processes = []
    for rank in ("0", "1"):
        environment = os.environ | job | {"RANK": rank, "LOCAL_RANK": "0", "NCCL_HOSTID": f"rank{rank}"}
        with (tmp_path / f"log{rank}").open("w") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    metrics, deadline = tmp_path / "out" / "metrics.jsonl", time.monotonic() + 120
    try:
        while not (metrics.exists() and '"train"' in metrics.read_text()):
            assert time.monotonic() < deadline
            assert processes[0].poll() is None, (tmp_path / "log0").read_text()
            time.sleep(0.05)
        processes[1].send_signal(signal.SIGSTOP)
        assert processes[0].wait(120) == 1
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert "error: rank 0: waited 20 s for rank 1 (last seen at " in (tmp_path / "log0").read_text()
