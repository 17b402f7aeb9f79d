"""`muon-fsdp bench` on a CUDA device: captured columns, figures of memory, clocks, and the first step of a process."""

from __future__ import annotations

import json

import pytest
import torch

from muon_fsdp.benchmarks import orthogonalization, steps
from muon_fsdp.benchmarks.contestants import OURS, OVERLAPPED
from muon_fsdp.benchmarks.live import LiveLine
from muon_fsdp.benchmarks.machine import Ceilings, Setup
from muon_fsdp.benchmarks.multi_gpu import Workload, combine, measure, measure_network
from muon_fsdp.benchmarks.ranks import Ranks, RanksError
from muon_fsdp.training.model import GPTConfig
from tests.cli_cases import run
from tests.multi_gpu_cases import on_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TINY = {"tiny": 4 * [(256, 256)] + 2 * [(256, 1024)]}


def test_bench_on_a_gpu(monkeypatch):
    monkeypatch.setattr(steps, "MODELS", TINY)
    # Without the peers of other libraries, which tune their kernels for minutes.
    monkeypatch.setattr(orthogonalization, "orthogonalizers", lambda device: {"negation": torch.neg})
    args = ["--tables", "orthogonalization,step", "--shapes", "4x256x256", "--repeats", "2", "--json", "-"]
    figures = json.loads(run("bench", *args).stdout)
    (entry,) = figures["orthogonalization"]
    names = ["muon_fsdp", "muon_fsdp, fast", "negation"]
    assert list(entry["milliseconds"]) == [name + mode for name in names for mode in ("", ", captured")]
    assert list(entry["accuracy"]) == names
    assert entry["accuracy"]["muon_fsdp, fast"]["slope"] == pytest.approx(650, rel=0.03)
    assert all(time > 0 for time in entry["milliseconds"].values())
    assert entry["notes"] == {}
    ceilings = figures["ceilings"]
    assert ceilings["burst_flops"] > 0.9 * ceilings["sustained_flops"] > 0
    (step,) = figures["step"]
    assert {OURS, f"{OURS}, cuda_graph=False", f"{OURS}, cuda_graph=True"} <= set(step["optimizers"])
    momentum = 4 * sum(rows * cols for rows, cols in TINY["tiny"]) / 1e9
    for name in (OURS, f"{OURS}, cuda_graph=True"):
        one = step["optimizers"][name]
        assert momentum <= one["extra_allocated_gigabytes"] <= one["extra_reserved_gigabytes"] + 0.1
        assert one["device_milliseconds"] > 0
    assert set(figures["gpu"]) == {"ceilings", "orthogonalization", "step"}
    for summary in figures["gpu"].values():
        assert "unknown" in summary or summary["samples"] > 0


def test_a_capture_that_fails_does_not_disturb_the_next(monkeypatch):
    def waits_for_the_device(matrices: torch.Tensor) -> torch.Tensor:
        return matrices * matrices.sum().item()

    monkeypatch.setattr(orthogonalization, "orthogonalizers", lambda device: {"peer": waits_for_the_device})
    setup = Setup("cuda", Ceilings(1e14, 1e14, 1e12), 1, LiveLine())
    for entry in orthogonalization.measure(setup, [(2, 128, 128), (2, 128, 256)]):
        assert entry["milliseconds"]["peer"] > 0
        assert entry["milliseconds"]["peer, captured"] is None
        assert "peer, captured" in entry["notes"]
        assert entry["milliseconds"]["muon_fsdp, captured"] > 0


def test_the_first_step_is_faster_with_the_kernels_of_another_process():
    setup = Setup("cuda", Ceilings(1e14, 1e14, 1e12), 1, LiveLine())
    (entry,) = steps.measure_first(setup, TINY)
    assert entry["warm"]["first_step_seconds"] < entry["cold"]["first_step_seconds"]


def test_ranks_that_share_a_gpu_are_compared():
    """Two NCCL ranks; the optimizers of other libraries are left out, which compile for minutes."""
    tiny = Workload(GPTConfig(2, 4, 256, 64, vocab_size=512), 2)
    names = [OURS, OVERLAPPED, "torch.optim.AdamW(fused)"]

    def work(ranks: Ranks) -> list[list[dict[str, float]]]:
        assert ranks.place.shares_gpu == (torch.cuda.device_count() < 2)
        return [ranks.run(measure_network, 2**20), *(ranks.run(measure, tiny, name, 2) for name in names)]

    for found_by_rank in on_ranks(2, work):
        if isinstance(found_by_rank, RanksError):
            raise found_by_rank
        network, *by_name = found_by_rank
        assert min(network) > 0
        for name, by_rank in zip(names, by_name, strict=True):
            found = combine(by_rank, tiny)
            assert found["peak_reserved_gigabytes"] >= found["peak_allocated_gigabytes"] > 0
            assert found["tokens_per_second"] > 0
            assert ("step_milliseconds" in found) == (name != OVERLAPPED)
