"""`muon-fsdp bench`: what is measured, beside which peers, and with how many threads."""

from __future__ import annotations

import json
import math
import os
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from experiments import ranks
from muon_fsdp.benchmarks import accuracy, contestants, orthogonalization, steps
from muon_fsdp.benchmarks.live import LiveLine
from muon_fsdp.benchmarks.machine import Ceilings, Setup
from muon_fsdp.benchmarks.steps import Gradients, PeakMemory
from muon_fsdp.cli.app import app
from muon_fsdp.linalg.newton_schulz import orthogonalize
from tests.cli_cases import error_of, run, subprocess_run

CEILINGS = Ceilings(burst_flops=2e11, sustained_flops=1e11, bytes=1e10)
RULES = ("normuon", "spectral_sphere:lambda_mode=projection")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(Ceilings, "measure", classmethod(lambda cls, device: CEILINGS))
    monkeypatch.setattr(steps, "CPU_MODELS", {"tiny, 1 layer": [(16, 8), (8, 16)]})
    monkeypatch.setattr(steps, "CPU_PAIR_SIZES", {"small": 2 * [(8, 8)]})


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_bench(small, tmp_path):
    file = tmp_path / "figures.json"
    args = ["bench", "--repeats", "1", "--shapes", "2x16x32,1x8x8", "--threads", "1"]
    result = run(*args, "--json", str(file))
    figures = json.loads(file.read_text())
    assert [entry["shape"] for entry in figures["orthogonalization"]] == ["2 x 16 x 32", "1 x 8 x 8"]
    (step,) = figures["step"]
    ours = ["muon_fsdp", contestants.FAST, *(f"muon_fsdp, {rule}" for rule in RULES)]
    assert list(step["optimizers"]) == [*ours, "torch.optim.AdamW(fused)", "torch.optim.Muon"]
    assert all(one["milliseconds"] > 0 for one in step["optimizers"].values())
    assert [name for name, one in step["optimizers"].items() if "tflops" in one] == ["muon_fsdp", "torch.optim.Muon"]
    assert {"TritonMuon", "torch.optim.Adam"} <= set(figures["pair"][0]["optimizers"])
    for title in ("Orthogonalization, five steps; the floor is at the sustained rate", "One step", "The element-wise"):
        assert title in result.stdout
    assert "ceilings: 0.1 TFLOP/s sustained, 0.2 TFLOP/s in a burst, 0.01 TB/s" in result.stdout
    assert "not known" not in result.stdout  # nothing is said about the clocks of a CPU
    floor = 2 * (2 * 16**3 * (4.5 * 2 + 4)) / 1e11 + 2 * (2 * 16 * 32 * 4) / 1e10
    assert figures["orthogonalization"][0]["floor_milliseconds"] == pytest.approx(1e3 * floor)
    for entry in figures["orthogonalization"]:
        assert list(entry["accuracy"]) == ["muon_fsdp", "muon_fsdp, fast", "plain NS5, torch"]
    assert "of the norm on end, and the slope at zero\nbatch x m x n " in result.stdout
    assert figures["ceilings"] == {"burst_flops": 2e11, "sustained_flops": 1e11, "bytes": 1e10}
    assert figures["versions"]["torch"] == torch.__version__
    result = run(*args, "--tables", "step", "--models", "tiny", "--rules", "", "--first-step", "--json", "-")
    figures = json.loads(result.stdout)
    assert set(figures) == {"date", "device", "versions", "repeats", "ceilings", "step"}
    assert not any(rule in name for name in figures["step"][0]["optimizers"] for rule in RULES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_line_says_what_is_running(small):
    result = run("bench", "--repeats", "2", "--shapes", "2x16x32,1x8x8", "--rules", "normuon", "--first-step")
    assert "The first step of a new process: not measured" in result.stdout
    lines = result.stderr.splitlines()
    assert lines[:4] == [
        "ceilings ...",
        "orthogonalization 1/2: 2 x 16 x 32, muon_fsdp ...",
        "orthogonalization 1/2: 2 x 16 x 32, muon_fsdp, fast ...",
        "orthogonalization 1/2: 2 x 16 x 32, plain NS5, torch ...",
    ]
    assert "step 1/1: tiny, 1 layer, muon_fsdp, normuon ..." in lines
    assert "pair 1/1: small, TritonMuon ..." in lines
    assert len(lines) == len(set(lines))


def test_the_line_of_a_terminal_is_overwritten(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "20")
    live = LiveLine()
    assert next(live.each("step", [("1.3b", "shapes"), ("2b", ""), ("3b", "")])) == ("1.3b", "shapes")
    for _ in range(2):
        live.running("torch.optim.Muon")
    live.note("dion", "broken")
    assert capsys.readouterr().err == 2 * "\rstep 1/3: 1.3b, tor\x1b[K" + "\r\x1b[K" + "step 1/3: 1.3b, dion: broken\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_every_contestant_is_also_captured_where_it_can_be(small, monkeypatch):
    """The graphs are pretended: a replay calls the function, and one of another library can't be captured."""
    tried = []

    def broken(matrices, method="default"):
        raise RuntimeError("not here")

    def capture(function, matrices):
        tried.append(function)
        if function is abs:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        return lambda: function(matrices)

    monkeypatch.setattr(
        orthogonalization, "modes_on", lambda device: {"": orthogonalization.partial, ", captured": capture}
    )
    monkeypatch.setattr(orthogonalization, "orthogonalizers", lambda device: {"peer": abs, "other": torch.neg})
    result = run("bench", "--tables", "orthogonalization", "--repeats", "1", "--shapes", "1x8x8,2x8x8")
    table = result.stdout.partition("batch x m x n")[2].splitlines()
    cells = table[2].split()
    assert cells[:5] == ["1", "x", "8", "x", "8"]
    assert cells[10] == "-"  # after both of ours, eager and captured, and the peer eager
    assert float(cells[12]) > 0
    assert table[4] == "peer, captured: RuntimeError: operation not permitted when stream is capturing"
    assert tried.count(abs) == 1  # not once more for the second shape
    assert tried.count(torch.neg) == 2
    assert "1 x 8 x 8, peer, captured: RuntimeError" in result.stderr
    monkeypatch.setattr(orthogonalization, "orthogonalize", broken)
    assert isinstance(CliRunner().invoke(app, ["bench", "--shapes", "1x8x8"]).exception, RuntimeError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_shape_that_a_peer_does_not_support_shows_a_dash(small, monkeypatch):
    def only_square(matrices):
        if matrices.shape[-2] != matrices.shape[-1]:
            raise ValueError("only square matrices")
        return matrices

    modes = {"": orthogonalization.partial, ", captured": orthogonalization.partial}
    monkeypatch.setattr(orthogonalization, "modes_on", lambda device: modes)
    monkeypatch.setattr(orthogonalization, "orthogonalizers", lambda device: {"peer": only_square})
    args = ["--tables", "orthogonalization", "--repeats", "1", "--shapes", "1x8x16,1x8x8", "--json", "-"]
    wide, square = json.loads(run("bench", *args).stdout)["orthogonalization"]
    assert [wide["milliseconds"][name] for name in ("peer", "peer, captured")] == [None, None]
    assert wide["notes"] == {"peer": "ValueError: only square matrices"}
    assert all(time > 0 for time in square["milliseconds"].values())
    assert square["notes"] == {}
    assert wide["accuracy"]["peer"] is None
    # The probe itself: nothing is lifted.
    assert square["accuracy"]["peer"]["slope"] == pytest.approx(1)
    assert square["accuracy"]["peer"]["low"] == pytest.approx(accuracy.LARGE, rel=1e-3)


# Band and slope of five steps, as their polynomials give them in exact arithmetic.
KNOWN = {
    "keller": (0.682, 1.203, 484.9),
    "polar_express": (0.870, 1.125, 976.5),
    "fast": (0.655, 1.345, 650.0),
    "accurate": (0.9975, 1.0025, 481.0),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("shape", [(128, 128), (30, 90), (2000, 500)])
def test_band_and_slope_are_those_of_the_polynomials(name, shape):
    low, high, slope = KNOWN[name]
    if name == "accurate" and min(shape) > 256:
        slope = 543.0  # the chain for wide matrices
    probe = accuracy.make_probe(*shape, "cpu", torch.float32)
    found = accuracy.measure_accuracy(lambda matrices: orthogonalize(matrices, method=name), probe)
    assert low - 1e-3 < found["low"] < low + 0.02
    assert high - 0.02 < found["high"] < high + 1e-3
    assert found["slope"] == pytest.approx(slope, rel=0.02)
    rounded = accuracy.make_probe(*shape, "cpu", torch.bfloat16)
    assert accuracy.measure_accuracy(contestants.plain_newton_schulz, rounded)["slope"] == pytest.approx(485, rel=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_peer_that_fails_on_the_probe_alone_shows_a_dash(small, monkeypatch):
    def only_small(matrices):
        if matrices.shape[-1] > 8:
            raise ValueError("only small matrices")
        return matrices

    monkeypatch.setattr(orthogonalization, "orthogonalizers", lambda device: {"peer": only_small})
    args = ["--tables", "orthogonalization", "--repeats", "1", "--shapes", "1x8x8", "--json", "-"]
    (entry,) = json.loads(run("bench", *args).stdout)["orthogonalization"]
    assert entry["milliseconds"]["peer"] > 0
    assert entry["accuracy"]["peer"] is None
    assert orthogonalization.show([entry]).splitlines()[-1].split()[-1] == "-"


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
    result = run("bench", "--tables", "step", "--repeats", "1", "--rules", "", "--json", "-")
    assert "tiny, 1 layer, peer: RuntimeError: not here" in result.stderr
    (step,) = json.loads(result.stdout)["step"]
    assert list(step["optimizers"]) == ["muon_fsdp", contestants.FAST]
    assert step["notes"] == {"peer": "RuntimeError: not here"}
    monkeypatch.setattr(steps, "ours", lambda device, rules=(): {"muon_fsdp": broken})
    assert isinstance(CliRunner().invoke(app, ["bench", "--tables", "step"]).exception, RuntimeError)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_run_that_is_stopped_has_saved_and_printed_the_figures_so_far(small, monkeypatch, tmp_path):
    file = tmp_path / "figures.json"
    real = steps.measure_pair

    def stopped(setup):
        yield from real(setup)
        raise RuntimeError("stopped")

    monkeypatch.setattr(steps, "measure_pair", stopped)
    args = ["bench", "--repeats", "1", "--shapes", "1x8x8", "--rules", "", "--json", str(file)]
    result = CliRunner().invoke(app, args)
    assert isinstance(result.exception, RuntimeError)
    assert "\n\nOne step; the floor is at the sustained rate\n" in result.stdout
    figures = json.loads(file.read_text())
    assert [len(figures[table]) for table in ("orthogonalization", "step", "pair")] == [1, 1, 1]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_run_that_is_stopped_within_a_model_has_saved_its_optimizers_so_far(small, monkeypatch, tmp_path):
    file, real, measured = tmp_path / "figures.json", steps.measure_one, []

    def measure_two(*args):
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(real(*args))
        return measured[-1]

    monkeypatch.setattr(steps, "measure_one", measure_two)
    CliRunner().invoke(app, ["bench", "--tables", "step", "--repeats", "1", "--rules", "", "--json", str(file)])
    (entry,) = json.loads(file.read_text())["step"]
    assert list(entry["optimizers"]) == ["muon_fsdp", contestants.FAST]
    assert entry["optimizers"]["muon_fsdp"]["tflops"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_rules_with_options_are_measured(small):
    rules = "spectral_sphere:lambda_mode=zero:momentum=0.9,muon:nesterov=True"
    result = run("bench", "--tables", "step", "--repeats", "1", "--rules", rules)
    for rule in rules.split(","):
        assert f"\nmuon_fsdp, {rule} " in result.stdout


def test_gradients_are_new_and_keep_their_part_of_low_rank():
    params = [nn.Parameter(torch.zeros(24, 40)), nn.Parameter(torch.zeros(16, 16))]
    gradients = Gradients(params, torch.Generator().manual_seed(0))

    def mean(of: nn.Parameter) -> torch.Tensor:
        found = []
        for _ in range(20):
            gradients.renew()
            found.append(of.grad)
        assert all(a is not b and not torch.equal(a, b) for a, b in pairwise(found))
        return torch.stack(found).mean(0)

    for p in params:
        assert torch.nn.functional.cosine_similarity(mean(p).flatten(), mean(p).flatten(), 0) > 0.9


def test_fixed_gradients_change_where_they_are():
    seen = []

    class Noting(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self):
            (grad,) = (p.grad for group in self.param_groups for p in group["params"])
            seen.append((grad, grad.clone()))

    for fixed in (True, False):
        seen.clear()
        steps.measure_one(Noting, [(4, 6)], "cpu", 2, fixed_gradients=fixed)
        assert all((a is b) == fixed and not torch.equal(x, y) for (a, x), (b, y) in pairwise(seen))


def test_memory_between_watched_calls_does_not_count(monkeypatch):
    numbers = {"allocated": 100, "reserved": 200}
    peaks = dict(numbers)
    for name in numbers:
        monkeypatch.setattr(torch.cuda, f"memory_{name}", lambda name=name: numbers[name])
        monkeypatch.setattr(torch.cuda, f"max_memory_{name}", lambda name=name: peaks[name])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peaks.update(numbers))
    memory = PeakMemory()

    def step() -> float:
        peaks.update(allocated=130, reserved=250)
        return 1.5

    assert memory.watch(step) == 1.5
    peaks.update(allocated=900, reserved=900)
    memory.watch(lambda: 0.0)
    assert (memory.allocated, memory.reserved) == (30, 50)


class FirstProcesses(ProcessPoolExecutor):
    """New processes, of which only the first one computes."""

    caches: ClassVar[list[str]] = []

    def submit(self, function, device, shapes, cache, threads):
        self.caches.append(cache)
        if len(self.caches) == 1:
            return super().submit(function, device, shapes, cache, threads)
        done = Future()
        done.set_result({"first_step_seconds": 2.0, "warm_up_seconds": 3.0})
        return done


def test_first_steps_are_measured_in_new_processes(monkeypatch, capsys):
    monkeypatch.setattr(steps, "ProcessPoolExecutor", FirstProcesses)
    (entry,) = steps.measure_first(Setup("cpu", CEILINGS, 1, LiveLine()), {"tiny": [(16, 8), (8, 16)]})
    first, second = FirstProcesses.caches
    assert first == second  # the second process finds what the first compiled
    assert 0 < entry["cold"]["first_step_seconds"] < entry["cold"]["warm_up_seconds"]
    assert steps.show_first([entry]).splitlines()[2].split()[2] == "2.00"
    assert "first step 1/1: tiny, warm cache ..." in capsys.readouterr().err


def test_compiled_kernels_of_first_steps_stay_in_their_folder(monkeypatch, tmp_path):
    for variable in steps.CACHES:
        monkeypatch.setenv(variable, "elsewhere")
    steps.first_steps("cpu", [(2, 2)], str(tmp_path), torch.get_num_threads())
    assert [os.environ[variable] for variable in steps.CACHES] == [str(tmp_path / name) for name in steps.CACHES]


def test_the_plain_iteration_is_the_published_one():
    """Its singular values are those of the polynomial, applied five times."""
    x = torch.randn(2, 12, 20, generator=torch.Generator().manual_seed(0))
    found = torch.linalg.svdvals(contestants.plain_newton_schulz(x.mT).float())
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
    alone = set(contestants.orthogonalizers("cuda")), set(contestants.optimizers("cuda"))
    assert alone == (set(contestants.orthogonalizers("cpu")), set(contestants.optimizers("cpu")))
    monkeypatch.setitem(sys.modules, "dion", SimpleNamespace(Muon=Other))
    wrapper = SimpleNamespace(CudaGraphOptimizer=lambda inner, warmup_steps: (inner, warmup_steps))
    monkeypatch.setitem(sys.modules, "dion.cuda_graph", wrapper)
    monkeypatch.setitem(sys.modules, "dion.newton_schulz_triton", SimpleNamespace(newton_schulz_triton=abs))
    gram = SimpleNamespace(Muon=Other, POLAR_EXPRESS_COEFFICIENTS=(), GramNewtonSchulz=lambda **options: abs)
    monkeypatch.setitem(sys.modules, "gram_newton_schulz", gram)
    assert {*contestants.orthogonalizers("cuda")} - alone[0] == {"dion Triton", "gram-newton-schulz"}
    more = contestants.optimizers("cuda")
    dions = {"dion Muon (Triton)", "dion Muon (Gram)", contestants.DION_CAPTURED}
    assert {*more} - alone[1] == {*dions, "gram-newton-schulz Muon"}
    inner, warm_up = more[contestants.DION_CAPTURED]([])
    assert inner.seen == ([], 0.02, {"use_gram_newton_schulz": True, "use_triton": True})
    assert more["dion Muon (Gram)"]([]).seen == inner.seen
    assert warm_up < steps.WARM_UP["cuda"] - 1  # so that a replay is timed
    assert more["dion Muon (Triton)"]([]).seen == ([], 0.02, {"use_triton": True})


def test_ceilings_are_measured(monkeypatch):
    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: real(*(min(64, size) for size in shape), **options))
    ceilings = Ceilings.measure("cpu", pause=0.01, load=0.01)
    for value in (ceilings.burst_flops, ceilings.sustained_flops, ceilings.bytes):
        assert math.isfinite(value)
        assert value > 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--tables", "speed"], "--tables: 'speed' is not one of orthogonalization, step, pair"),
        (["--tables", ","], "--tables: pass some of"),
        (["--shapes", "3x4"], "--shapes: shape '3x4' is not BATCHxROWSxCOLUMNS"),
        (["--models", "gpt9"], "--models: 'gpt9' is not one of gpt2-124m"),
        (["--rules", "normuon:beta2"], "--rules: 'normuon:beta2' is not RULE or RULE:OPTION=VALUE, for example "),
        (["--rules", "nomuon"], "--rules: "),
        (["--rules", "normuon:betta2=0.9"], "beta2"),
        (["--json", "no/such/folder/file.json"], "--json: the folder of no/such/folder/file.json does not exist"),
    ],
)
def test_mistakes_of_bench(args, says):
    assert says in error_of("bench", *args)


def test_steps_on_ranks_are_measured(capsys):
    ranks.main([2], [(16, 8), (8, 16)])
    header, _, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["ranks", "owner", "s", "replicate", "s"]
    assert row.split()[0] == "2"
