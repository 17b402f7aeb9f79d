"""`muon-fsdp doctor`: what it checks on this machine, and what it says of a machine with a fault."""

from __future__ import annotations

import json
import platform
import re
import signal

import pytest
import torch
import torch.distributed as dist

from muon_fsdp import MuonOptimizer
from muon_fsdp.cli import checks
from tests import cli_cases
from tests import multi_gpu_cases as cases
from tests.cli_cases import run


@pytest.fixture
def no_processes(monkeypatch):
    """Replace the probes in other processes by answers that can be set."""
    codes = {None: 0, checks.ISA_WITHOUT_AMX: 0}
    monkeypatch.delenv(checks.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(checks, "run_bf16_product", codes.__getitem__)
    return codes


@pytest.fixture
def only_processes(monkeypatch):
    """Leave out the self-tests of this process."""
    ok = checks.Finding("self-test", "ok", "left out")
    monkeypatch.setattr(checks, "check_torch", lambda: ok)
    monkeypatch.setattr(checks, "check_settings", list)
    monkeypatch.setattr(checks, "check_orthogonalization", lambda dtype: ok)
    monkeypatch.setattr(checks, "check_fast_orthogonalization", lambda: ok)
    monkeypatch.setattr(checks, "check_step", lambda device: ok)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_doctor_on_this_machine(no_processes, monkeypatch):
    monkeypatch.setenv(checks.KERNELS_VARIABLE, "auto")
    result = run("doctor", "--quick")
    assert result.stdout.endswith("Everything works.\n")
    assert f"torch          {torch.__version__}" in result.stdout
    assert f"{checks.KERNELS_VARIABLE}=auto" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    content = json.loads(run("doctor", "--quick", "--json").stdout)
    assert content["ok"] is True
    assert content["backends"]["gloo"] is True
    assert {choice["why"] for choice in content["kernels"]}
    errors = [float(f["detail"].split()[0]) for f in content["findings"] if f["name"].startswith("orthogonalization")]
    assert len(errors) >= 2
    assert min(errors) > 1e-3  # the default chain leaves 1.1e-3, so zero would mean that nothing was computed
    assert max(errors) < 2e-2


def test_doctor_sees_a_wrong_iteration(no_processes, monkeypatch):
    monkeypatch.setattr(
        checks, "orthogonalize", lambda x, method="default": 1.01 * checks.polar(x.double()).to(x.dtype)
    )
    result = run("doctor", "--quick", "--json", code=1)
    wrong = [f for f in json.loads(result.stdout)["findings"] if f["status"] == "wrong"]
    assert {f["name"] for f in wrong} == {"orthogonalization, float64", "orthogonalization, float32"}
    assert all(f["detail"].startswith("1.00e-02 ") and "report" in f["advice"] for f in wrong)


def test_doctor_sees_a_wrong_fast_chain(monkeypatch):
    finding = checks.check_fast_orthogonalization()
    assert finding.status == "ok"
    assert 0.3 < float(finding.detail.split()[0]) < 0.35
    right = checks.orthogonalize
    monkeypatch.setattr(checks, "orthogonalize", lambda x, method: 1.1 * right(x, method=method))
    assert checks.check_fast_orthogonalization().status == "wrong"


def test_doctor_sees_a_wrong_step(no_processes, monkeypatch):
    monkeypatch.setattr(checks, "MuonOptimizer", lambda weights, **options: MuonOptimizer(weights, lr=options["lr"]))
    assert checks.check_step(torch.device("cpu")).status == "wrong"
    monkeypatch.setattr(checks, "MuonOptimizer", lambda weights, **options: 1 / 0)
    finding = checks.check_step(torch.device("cpu"))
    assert (finding.status, finding.detail) == ("wrong", "ZeroDivisionError: division by zero")


def test_products_are_checked(monkeypatch):
    assert checks.check_kernels(torch.device("cpu")).status == "ok"
    monkeypatch.setattr(checks, "symmetric_product", lambda a, b: 1.1 * (a @ b.mT))
    assert checks.check_kernels(torch.device("cpu")).status == "wrong"


ILLEGAL = -signal.SIGILL


@pytest.mark.parametrize(
    ("given", "codes", "status", "says"),
    [
        (None, {None: 0}, "ok", "they run"),
        (None, {None: ILLEGAL, "AVX512_CORE_FP16": 0}, "wrong", "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"),
        (None, {None: ILLEGAL, "AVX512_CORE_FP16": ILLEGAL}, "wrong", "float32"),
        ("AVX512_CORE_FP16", {"AVX512_CORE_FP16": 0, None: 0}, "ok", "and without it"),
        ("AVX512_CORE_FP16", {"AVX512_CORE_FP16": 0, None: ILLEGAL}, "ok", "Keep ONEDNN_MAX_CPU_ISA set"),
        ("AVX512_CORE_FP16", {"AVX512_CORE_FP16": 1, None: 1}, "wrong", "exit status 1"),
        ("AVX512_CORE_AMX", {"AVX512_CORE_AMX": ILLEGAL, None: ILLEGAL}, "wrong", "Try: export"),
    ],
)
def test_bf16_that_dies(no_processes, monkeypatch, given, codes, status, says):
    no_processes.clear()
    no_processes.update(codes)
    if given is not None:
        monkeypatch.setenv(checks.ISA_VARIABLE, given)
    finding = checks.check_cpu_bf16()
    assert finding.status == status
    assert says in finding.detail + finding.advice
    assert ("illegal instruction" in finding.detail) == (ILLEGAL in codes.values())


def test_the_exit_status_tells_of_bf16(no_processes, only_processes):
    assert run("doctor", "--quick").stdout.endswith("Everything works.\n")
    no_processes[None] = ILLEGAL
    result = run("doctor", "--quick", "--json", code=1)
    *_, finding = json.loads(result.stdout)["findings"]
    assert finding["status"] == "wrong"


def test_the_bf16_product_runs_in_a_process(monkeypatch):
    assert checks.run_bf16_product(checks.ISA_WITHOUT_AMX) == 0
    monkeypatch.setattr(checks, "_BF16_PRODUCT", "import os; os.kill(os.getpid(), 4)")
    assert checks.run_bf16_product(None) == -signal.SIGILL


def test_two_ranks_are_tried(no_processes, only_processes, monkeypatch):
    finding = checks.check_two_ranks()
    assert finding.status == "ok", finding
    monkeypatch.setattr(checks, "on_this_machine", lambda *_: [[1e-6, 1.0]])
    result = run("doctor", code=1)
    assert "wrong    two ranks, gloo: 1.00e+00 between a sharded step" in result.stdout
    assert result.stdout.endswith("Something is wrong: two ranks, gloo\n")
    monkeypatch.setattr(checks, "backends", lambda: {"gloo": False, "nccl": False})
    *_, finding = checks.findings(quick=False)
    assert (finding.name, finding.status) == ("two ranks", "warning")


def test_the_comparison_of_two_ranks_does_not_warn():
    found, *_ = checks.on_this_machine(2, lambda ranks: ranks.run(cli_cases.warnings_of_the_comparison), 60.0, "gloo")
    assert found == [[], []]


def test_a_rank_sees_a_difference(monkeypatch):
    """On one rank nothing is sent, and the comparison is the same."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert checks.sharded_difference() < 1e-6
        rates = iter((0.02, 0.03))
        monkeypatch.setattr(checks, "MuonOptimizer", lambda p, **options: MuonOptimizer(p, lr=next(rates), **options))
        assert checks.sharded_difference() > 1e-3
    finally:
        dist.destroy_process_group()


def test_a_rank_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(checks, "sharded_difference", cases.raise_on_last)
    finding = checks.check_two_ranks()
    assert (finding.status, finding.advice) == ("wrong", "Ranks must reach each other through the loopback interface.")
    assert finding.detail == "RanksError: rank 1: ValueError: the last rank has a problem"


def test_a_build_for_gpus_that_sees_none(no_processes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    text = run("doctor", "--quick").stdout
    assert "warning  GPU: none visible to torch, a build for CUDA 12.8\n         -> If there is one, check " in text
    assert text.endswith("Everything works.\n")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert checks.check_settings() == []


def test_settings_that_leave_a_gpu_unused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(checks, "backends", lambda: {"gloo": False, "nccl": False})
    monkeypatch.setenv(checks.KERNELS_VARIABLE, "torch")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = checks.check_settings()
    assert [finding.name for finding in found] == ["gloo", "NCCL", "kernels", "kernels"]
    assert {finding.status for finding in found} == {"warning"}
    assert found[2].advice == f"Unset {checks.KERNELS_VARIABLE} to use them."


def test_processes_that_do_not_end(monkeypatch):
    monkeypatch.setattr(checks, "PATIENCE_SECONDS", 0.05)
    finding = checks.check_two_ranks()
    assert finding.status == "wrong"
    assert re.fullmatch(r"RanksError: rank [01]: it took longer than 0\.05 s and was stopped", finding.detail)
    finding = checks.check_cpu_bf16()
    assert (finding.status, finding.detail) == ("warning", "unknown: the process did not end within 0.05 s")


def test_an_old_torch(monkeypatch):
    assert checks.check_torch().status == "ok"
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    finding = checks.check_torch()
    assert (finding.status, finding.advice) == ("wrong", 'Install a newer version: pip install "torch>=2.10".')


def test_no_path_of_the_user_is_shown(no_processes, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(platform, "release", lambda: "6.1.2-somebody-s-machine")

    def fails(*args: object, **options: object) -> None:
        raise OSError("can't read /home/somebody/secret/file")

    monkeypatch.setattr(checks, "MuonOptimizer", fails)
    for args in (["--json"], []):
        text = run("doctor", "--quick", *args, code=1).stdout
        assert "somebody" not in text
        assert "~/secret/file" in text
