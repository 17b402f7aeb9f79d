"""`muon-fsdp bench`: what is measured, beside which peers, and with how many threads."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from typer.testing import CliRunner

from muon_fsdp.benchmarks import pair, peers, ranks, sphere, steps, trace
from muon_fsdp.benchmarks.machine import Ceilings
from muon_fsdp.benchmarks.processes import run_on_ranks
from muon_fsdp.cli.app import app
from tests.cli_cases import error_of, run, subprocess_run


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(Ceilings, "measure", classmethod(lambda cls, device: cls(1e11, 1e10)))
    monkeypatch.setattr(steps, "CPU_MODELS", {"tiny, 1 layer": [(16, 8), (8, 16)]})
    monkeypatch.setattr(pair, "CPU_SIZES", {"small": 2 * [(8, 8)]})


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_bench(small, tmp_path):
    file = tmp_path / "figures.json"
    args = ["bench", "--repeats", "1", "--shapes", "2x16x32,1x8x8", "--threads", "1"]
    result = run(*args, "--json", str(file))
    figures = json.loads(file.read_text())
    assert [entry["shape"] for entry in figures["orthogonalization"]] == ["2 x 16 x 32", "1 x 8 x 8"]
    (step,) = figures["step"]
    assert {"muon_fsdp", "torch.optim.AdamW(fused)", "torch.optim.Muon"} <= set(step["optimizers"])
    assert all(one["milliseconds"] > 0 for one in step["optimizers"].values())
    assert {"TritonMuon", "torch.optim.Adam"} <= set(figures["pair"][0]["optimizers"])
    for title in ("Orthogonalization, five steps", "One step", "The element-wise pair"):
        assert title in result.stdout
    assert "2 x 16 x 32:" in result.stderr
    floor = 2 * (2 * 16**3 * min(5 * (1.5 * 2 + 0.5), 3 * 2 + 1.4 * 5)) / 1e11 + 2 * (2 * 16 * 32 * 4) / 1e10
    assert figures["orthogonalization"][0]["floor_milliseconds"] == pytest.approx(1e3 * floor)
    result = run(*args, "--tables", "step", "--models", "tiny", "--json", "-")
    assert set(json.loads(result.stdout)) == {"date", "device", "torch", "ceilings", "step"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_threads_of_bench(small, monkeypatch):
    def threads(*args: str) -> str:
        result = run(
            "bench", "--tables", "orthogonalization", "--shapes", "1x8x8", "--repeats", "1", "--json", "-", *args
        )
        return json.loads(result.stdout)["device"].partition("CPU, ")[2]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads() == "2 threads"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)  # as PyTorch does at its start
    assert threads() == "1 thread"
    assert threads("--threads", "2") == "2 threads"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_the_real_bench_has_the_threads_of_openmp():
    args = ["--tables", "orthogonalization", "--shapes", "1x8x8", "--repeats", "1"]
    done = subprocess_run("-m", "muon_fsdp.cli", "bench", *args, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert " CPU, 1 thread, " in done.stdout.splitlines()[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_peer_that_does_not_run_is_left_out_and_ours_is_not(small, monkeypatch):
    def broken(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        raise RuntimeError("not here")

    monkeypatch.setattr(steps, "optimizers", lambda device: {"peer": broken})
    result = run("bench", "--tables", "step", "--repeats", "1", "--json", "-")
    assert "tiny, 1 layer, peer: RuntimeError: not here" in result.stderr
    assert list(json.loads(result.stdout)["step"][0]["optimizers"]) == ["muon_fsdp"]
    monkeypatch.setattr(steps, "ours", lambda device: {"muon_fsdp": broken})
    assert isinstance(CliRunner().invoke(app, ["bench", "--tables", "step"]).exception, RuntimeError)


def test_the_plain_iteration_is_the_published_one():
    """Its singular values are those of the polynomial, applied five times."""
    x = torch.randn(2, 12, 20, generator=torch.Generator().manual_seed(0))
    found = torch.linalg.svdvals(peers.plain_newton_schulz(x.mT).float())
    values = torch.linalg.svdvals(x.double())
    values = values / values.norm(dim=-1, keepdim=True)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    torch.testing.assert_close(found.double().sort().values, values.sort().values, rtol=0, atol=0.05)


def test_other_libraries_take_part_where_they_are_installed(monkeypatch):
    class Other:
        def __init__(self, params, lr, **options):
            self.seen = (params, lr, options)

    for name in ("dion", "dion.newton_schulz_triton", "gram_newton_schulz"):
        monkeypatch.setitem(sys.modules, name, None)
    alone = set(peers.orthogonalizers("cuda")), set(peers.optimizers("cuda"))
    assert alone == (set(peers.orthogonalizers("cpu")), set(peers.optimizers("cpu")))
    monkeypatch.setitem(sys.modules, "dion", SimpleNamespace(Muon=Other))
    monkeypatch.setitem(sys.modules, "dion.newton_schulz_triton", SimpleNamespace(newton_schulz_triton=abs))
    gram = SimpleNamespace(Muon=Other, POLAR_EXPRESS_COEFFICIENTS=(), GramNewtonSchulz=lambda **options: abs)
    monkeypatch.setitem(sys.modules, "gram_newton_schulz", gram)
    assert {*peers.orthogonalizers("cuda")} - alone[0] == {"dion Triton", "gram-newton-schulz"}
    more = peers.optimizers("cuda")
    assert {*more} - alone[1] == {"dion Muon (Triton)", "dion Muon (Gram)", "gram-newton-schulz Muon"}
    assert more["dion Muon (Triton)"]([]).seen == ([], 0.02, {"use_triton": True})


def test_ceilings_are_measured(monkeypatch):
    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: real(*(min(64, size) for size in shape), **options))
    ceilings = Ceilings.measure("cpu")
    assert math.isfinite(ceilings.flops)
    assert ceilings.flops > 0
    assert ceilings.bytes > 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--tables", "speed"], "--tables: 'speed' is not one of orthogonalization, step, pair"),
        (["--tables", ","], "--tables: pass some of"),
        (["--shapes", "3x4"], "--shapes: shape '3x4' is not BATCHxROWSxCOLUMNS"),
        (["--models", "gpt9"], "--models: 'gpt9' is not one of gpt2-124m"),
        (["--json", "no/such/folder/file.json"], "--json: the folder of no/such/folder/file.json does not exist"),
    ],
)
def test_mistakes_of_bench(args, says):
    assert says in error_of("bench", *args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_spheres_are_measured_beside_muon(small, capsys):
    sphere.main(["--modes", "zero", "--repeats", "1"])
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[3:]]
    assert names == ["Muon", "SSO, zero"]


def test_steps_on_ranks_are_measured(capsys):
    ranks.main([2], [(16, 8), (8, 16)])
    header, _, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["ranks", "owner", "s", "replicate", "s"]
    assert row.split()[0] == "2"


def test_a_rank_that_fails_ends_the_run():
    with pytest.raises(ProcessRaisedException, match="could not convert string to float"):
        run_on_ranks(2, float, "one")


def test_a_timeline_is_drawn(tmp_path):
    lanes = [("host", "gather stage 1"), ("GPU, NCCL stream", "ncclKernel"), ("GPU, computing stream", "gemm")]
    trace.draw([(lane, name, start, 1.0) for start, (lane, name) in enumerate(lanes)], str(tmp_path / "trace.png"))
    assert (tmp_path / "trace.png").stat().st_size > 10_000
