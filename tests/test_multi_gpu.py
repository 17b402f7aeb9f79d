"""`muon-fsdp bench --multi-gpu`: on real ranks, with contestants that fail or hang, and what it reports."""

from __future__ import annotations

import json

import pytest
import torch

from muon_fsdp.benchmarks import machine, multi_gpu
from muon_fsdp.benchmarks.contestants import OURS, OVERLAPPED, sharded_optimizers
from muon_fsdp.benchmarks.multi_gpu import CPU_WORKLOADS, Workload, combine, ours_failed, table
from muon_fsdp.benchmarks.ranks import Place, RanksError
from muon_fsdp.training.model import GPTConfig
from tests import multi_gpu_cases as cases
from tests.cli_cases import ROOT, error_of, subprocess_run
from tests.pool import RankPool

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@on_cpu
def test_two_ranks_of_torchrun(tmp_path):
    file = tmp_path / "figures.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "muon_fsdp.cli"]
    done = subprocess_run(*launcher, "bench", "--multi-gpu", "--repeats", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert (figures["world_size"], figures["shares_gpu"], figures["topology"]) == (2, False, [])
    assert figures["versions"]["torch"] == torch.__version__
    assert figures["network_gigabytes_per_second"] > 0
    (entry,) = figures["models"]
    assert entry["notes"] == {}
    assert list(entry["optimizers"]) == list(sharded_optimizers("cpu"))
    for name, one in entry["optimizers"].items():
        assert one["tokens_per_second"] == pytest.approx(2 * 2 * 16 / (1e-3 * one["training_milliseconds"]))
        assert ("step_milliseconds" in one) == (name != OVERLAPPED)
    assert done.stdout.count("\noptimizer ") == 1  # one rank prints
    assert f'To send {file}: open an issue with the form "Figures from several GPUs"' in done.stdout
    assert f"multi-gpu 1/1: tiny, {OURS} ..." in done.stderr


@on_cpu
def test_four_ranks(ranks: RankPool):
    names = [OURS, OVERLAPPED, "torch.optim.AdamW(fused)"]
    by_rank = ranks.run(4, cases.measured, names, 1)
    for name in names:
        found = combine([one[name] for one in by_rank], CPU_WORKLOADS["tiny"])
        assert 0 <= found["optimizer_share"] < 1
        assert found["tokens_per_second"] > 0
        assert len(found.get("step_milliseconds_by_rank", range(4))) == 4


@on_cpu
def test_a_contestant_that_fails_or_hangs_stops_no_other():
    def work(ranks):
        errors = []
        for function in (cases.raise_on_last, cases.die_on_first):
            with pytest.raises(RanksError) as caught:
                ranks.run(function)
            errors.append(str(caught.value))
        return errors, ranks.run(cases.total, 3), ranks.from_first(ranks.place.rank)

    for errors, totals, first in cases.on_ranks(2, work):
        assert errors == [
            "rank 1: ValueError: the last rank has a problem",
            "rank 0: its process died without a message",
        ]
        assert (totals, first) == ([6, 6], 0)
    for error in cases.on_ranks(2, lambda ranks: ranks.run(cases.hang), limit=1.0):
        assert str(error)[len("rank 0: ") :] == "it took longer than 1 s and was stopped"


def test_what_gloo_prints_is_not_on_stdout():
    """`--json -` and `doctor --json` print JSON and nothing else."""
    code = "from tests import multi_gpu_cases as cases; print(cases.on_ranks(1, lambda r: r.run(cases.print_as_gloo)))"
    done = subprocess_run("-c", code)
    assert (done.returncode, done.stdout) == (0, "[[44]]\n"), done.stderr
    assert "[Gloo] Rank 0" in done.stderr


class OneRank:
    """Ranks of which the contestants fail as told, without processes."""

    place = Place(0, 1, 0, 1, "", 0)

    def __init__(self, failing):
        self._failing = failing

    def from_first(self, value):
        return value

    def run(self, function, workload, name="", repeats=0):
        if not name:
            return [None]
        if name in self._failing:
            raise RanksError("rank 0: no memory")
        times = {"training_milliseconds": [4.0], "backward_milliseconds": [3.0]}
        return [{"first_step_seconds": 1.0, "step_milliseconds": [2.0], **times}]


def test_figures_are_saved_after_every_contestant():
    saved, shown = [], []
    failing = {"torch.optim.Muon"}
    figures = multi_gpu.run(OneRank(failing), "cpu", (), 1, lambda it: saved.append(json.dumps(it)), shown.append)
    assert len(saved) == 1 + len(sharded_optimizers("cpu"))
    assert "models" not in json.loads(saved[0])
    assert list(json.loads(saved[2])["models"][0]["optimizers"]) == [OURS, OVERLAPPED]
    assert not ours_failed(figures)
    assert shown[-1].rstrip().splitlines()[-1] == "torch.optim.Muon: fails: rank 0: no memory"
    assert ours_failed(multi_gpu.run(OneRank({OURS}), "cpu", (), 1, lambda _: None, shown.append))


def test_the_slowest_rank_counts():
    first = {
        "first_step_seconds": 1.0,
        "step_milliseconds": [1.0, 9.0, 2.0],
        "training_milliseconds": [10.0, 20.0, 12.0],
        "backward_milliseconds": [5.0, 5.0, 5.0],
        "peak_allocated_gigabytes": 3.0,
        "peak_reserved_gigabytes": 4.0,
    }
    second = first | {"step_milliseconds": [2.0, 2.0, 4.0], "backward_milliseconds": [9.0, 9.0, 9.0]}
    second |= {"peak_allocated_gigabytes": 3.5, "first_step_seconds": 0.5}
    found = combine([first, second], Workload(GPTConfig(1, 1, 2, 10), 3))
    assert found == {
        "training_milliseconds": 12.0,
        "tokens_per_second": pytest.approx(2 * 3 * 10 / 0.012),
        "optimizer_share": pytest.approx(0.25),
        "first_step_seconds": 1.0,
        "step_milliseconds": 4.0,
        "step_milliseconds_by_rank": [2.0, 2.0],
        "peak_allocated_gigabytes": 3.5,
        "peak_reserved_gigabytes": 4.0,
    }
    row = table({"model": "m", "optimizers": {OURS: found}, "notes": {}}).splitlines()[3]
    assert row.split() == [OURS, "4.00", "2.00", "to", "2.00", "12.0", "5,000", "25.0", "3.50", "1.00"]


def test_without_a_launcher_the_error_has_the_command(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert "-m muon_fsdp.cli bench --multi-gpu --json multi_gpu.json" in error_of("bench", "--multi-gpu")
    assert "--tables does not work with --multi-gpu" in error_of("bench", "--multi-gpu", "--tables", "step")
    assert "--models: 'gpt9' is not one of" in error_of("bench", "--multi-gpu", "--models", "gpt9")


def test_dion_takes_part_on_gpus_where_it_is_installed(monkeypatch):
    class Muon:
        def __init__(self, groups, distributed_mesh, **options):
            self.seen = groups, distributed_mesh

    found = {"dion": None}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found.get(name))
    assert not any("dion" in name for name in sharded_optimizers("cuda"))
    found["dion"] = object()
    monkeypatch.setattr("importlib.import_module", lambda name: type("dion", (), {"Muon": Muon}))
    model = torch.nn.ModuleDict({"blocks": torch.nn.Linear(3, 2), "head": torch.nn.Linear(2, 2, bias=False)})
    (optimizer,) = sharded_optimizers("cuda")["dion Muon (Triton)"](model, "mesh")
    (matrices, others), mesh = optimizer.seen
    assert [p.shape for p in matrices["params"]] == [(2, 3)]
    assert [tuple(p.shape) for p in others["params"]] == [(2,), (2, 2)]
    assert (others["algorithm"], mesh) == ("adamw", "mesh")


def test_how_gpus_are_connected(monkeypatch, tmp_path):
    command = tmp_path / "nvidia-smi"
    command.write_text('#!/bin/sh\necho "GPU0 NV18"\n')
    command.chmod(0o755)
    for found, lines in ((None, []), (str(command), ["GPU0 NV18"]), (str(tmp_path), [])):
        monkeypatch.setattr(machine.shutil, "which", lambda _, found=found: found)
        assert machine.topology() == lines


def test_where_figures_are_sent(monkeypatch):
    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / "multi_gpu.yml").read_text()
    assert form.startswith(f"name: {multi_gpu.TEMPLATE}\n")

    class Installed:
        def get_all(self, _):
            return ["Repository, https://a.example", "Issues, https://b.example"]

    monkeypatch.setattr(multi_gpu.importlib.metadata, "metadata", lambda _: Installed())
    assert multi_gpu.closing_line("f.json").endswith(f'the form "{multi_gpu.TEMPLATE}", https://b.example.')

    def missing(_):
        raise multi_gpu.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(multi_gpu.importlib.metadata, "metadata", missing)
    assert multi_gpu.closing_line(None).startswith("Add --json FILE to get a file that you can send")
    assert ".github/ISSUE_TEMPLATE/multi_gpu.yml" in multi_gpu.closing_line(None)
