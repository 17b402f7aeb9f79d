"""Run the self-tests of `muon-fsdp doctor`, and ask which kernels compute."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muon_fsdp import MuonOptimizer
from muon_fsdp.benchmarks.accuracy import make_probe, measure_accuracy
from muon_fsdp.benchmarks.machine import ISA_VARIABLE, backends, best_device
from muon_fsdp.benchmarks.ranks import on_this_machine
from muon_fsdp.elementwise import find_other_muon_optimizer
from muon_fsdp.kernels import Addend, multiply_add, symmetric_product
from muon_fsdp.kernels.select import (
    KERNELS_VARIABLE,
    Product,
    gluon_unusable,
    is_hopper,
    probe_gluon,
    select,
    unusable,
)
from muon_fsdp.linalg.newton_schulz import orthogonalize

Status = Literal["ok", "warning", "wrong"]

ISA_WITHOUT_AMX = "AVX512_CORE_FP16"
LEAST_TORCH = (2, 10)
# The default chains bring singular values to within 1.1e-3 of 1, and five steps of degree 5 to within 1.75e-3; anything
# above is rounding.
# On GPUs float32 matrices are iterated in float16.
TOLERANCES = {torch.float64: 2e-3, torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 2e-2}
# By design it is 0.35.
FAST_TOLERANCE = 0.36
# Far longer than any check needs, so that a busy machine does not fail.
PATIENCE_SECONDS = 180
# Returns the error that it measured, the largest error that is right, and what the error is.
SelfTest = Callable[..., tuple[float, float, str]]
REPORT = "Please report this, with the whole output."


@dataclass(frozen=True)
class Finding:
    """The result of one check, with advice if something can be improved."""

    name: str
    status: Status
    detail: str
    advice: str = ""


def self_test(name: str, advice: str = REPORT) -> Callable[[SelfTest], Callable[..., Finding]]:
    """Return a decorator that makes a check of a self-test, also if it raises.

    Args:
        name: the name of the finding, in which {} stands for the argument of the test.
        advice: what to do if the error is too large or the test raises.
    """

    def decorate(test: SelfTest) -> Callable[..., Finding]:
        @functools.wraps(test)
        def check(*args: Any) -> Finding:
            title = name.format(*args)
            try:
                error, tolerance, what = test(*args)
            except Exception as failure:  # the report must be complete whatever a self-test raises
                text = " ".join(str(failure).split())
                return Finding(title, "wrong", f"{type(failure).__name__}: {text[:400]}", advice)
            detail = f"{error:.2e} {what} (at most {tolerance:g})"
            return Finding(title, "ok", detail) if error <= tolerance else Finding(title, "wrong", detail, advice)

        return check

    return decorate


def findings(*, quick: bool) -> list[Finding]:
    """Run all checks, or with `quick` all but the step on two ranks; those in other processes run beside the others."""
    with ThreadPoolExecutor(max_workers=2) as executor:
        bf16 = executor.submit(check_cpu_bf16)
        ranks = executor.submit(check_two_ranks) if not quick and backends()["gloo"] else None
        dtypes = ("float64", "float32", "bfloat16", "float16") if torch.cuda.is_available() else ("float64", "float32")
        found = [check_torch(), *check_settings(), *map(check_orthogonalization, dtypes)]
        found += [check_fast_orthogonalization(), check_step(best_device())]
        if torch.cuda.is_available():
            found += [check_kernels(best_device()), *check_hopper_kernel(best_device())]
        found.append(bf16.result())
        if ranks is not None:
            found.append(ranks.result())
        elif not quick:
            found.append(Finding("two ranks", "warning", "not tried, because torch has no gloo"))
    return found


def check_torch() -> Finding:
    """Check that PyTorch is new enough."""
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdecimal())
    least = ".".join(map(str, LEAST_TORCH))
    if found < LEAST_TORCH:
        advice = f'Install a newer version: pip install "torch>={least}".'
        return Finding("torch", "wrong", str(torch.__version__), advice)
    return Finding("torch", "ok", f"{torch.__version__}, {least} is needed")


def check_settings() -> list[Finding]:
    """Look for settings that make a GPU slow or leave it unused, and for a package that hides a module of ours."""
    found: list[Finding] = []

    def warn(name: str, detail: str, advice: str) -> None:
        found.append(Finding(name, "warning", detail, advice))

    other = find_other_muon_optimizer()
    if other is not None:
        advice = "Import from muon_fsdp.elementwise, or uninstall that package and reinstall muon_fsdp."
        warn("module muon_optimizer", f"belongs to another package: {other}", advice)
    if not backends()["gloo"]:
        warn("gloo", "not in this build of torch", "Install a build of torch with gloo to use ranks on CPUs.")
    if not torch.cuda.is_available():
        if torch.version.cuda is not None:
            advice = "If there is one, check that nvidia-smi lists it, that its driver is new enough, and "
            detail = f"none visible to torch, a build for CUDA {torch.version.cuda}"
            warn("GPU", detail, f"{advice}CUDA_VISIBLE_DEVICES.")
        return found
    if not backends()["nccl"]:
        warn("NCCL", "not in this build of torch", "Install a build of torch with NCCL to use ranks on GPUs.")
    reason = unusable(best_device())
    if reason is not None:
        advice = {
            "Triton is not installed": "Install it: pip install triton.",
            f"{KERNELS_VARIABLE}=torch": f"Unset {KERNELS_VARIABLE} to use them.",
        }.get(reason, "PyTorch's own products are used instead: they are correct, but slower.")
        warn("kernels", f"ours are not used: {reason}", advice)
    if os.environ.get("TRITON_INTERPRET") == "1":
        warn("kernels", "TRITON_INTERPRET=1: kernels run in Triton's interpreter", "Unset TRITON_INTERPRET.")
    return found


@self_test("orthogonalization, {}")
def check_orthogonalization(dtype_name: str) -> tuple[float, float, str]:
    """Compare the orthogonalization in a precision with an SVD."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for shape in ((4, 64, 128), (2, 300, 100)):
        rounded = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        found = orthogonalize(rounded.to(best_device())).cpu().double()
        worst = max(worst, float(torch.linalg.matrix_norm(found - polar(rounded.double()), 2).max()))
    iterated = torch.float16 if dtype == torch.float32 and best_device().type == "cuda" else dtype
    return worst, TOLERANCES[iterated], "from the polar factor by SVD, in spectral norm"


@self_test("fast orthogonalization")
def check_fast_orthogonalization() -> tuple[float, float, str]:
    """Measure where the chain "fast" leaves singular values."""
    probe = make_probe(128, 256, str(best_device()), torch.float32)
    found = measure_accuracy(lambda matrices: orthogonalize(matrices, method="fast"), probe)
    return max(1 - found["low"], found["high"] - 1), FAST_TOLERANCE, "between singular values and 1"


def polar(matrices: Tensor) -> Tensor:
    """Return the orthogonal polar factor of matrices, computed by an SVD."""
    svd: tuple[Tensor, Tensor, Tensor] = torch.linalg.svd(matrices, full_matrices=False)
    return svd[0] @ svd[2]


@self_test("one step on {0.type}")
def check_step(device: torch.device) -> tuple[float, float, str]:
    """Compare two steps of MuonOptimizer, with a matrix and a vector, with the formulas."""
    generator = torch.Generator().manual_seed(0)
    lr, momentum, decay, adamw_lr = 0.1, 0.9, 0.01, 0.05
    matrix, vector, *gradients = [torch.randn(s, generator=generator) for s in ((96, 768), (7,), (96, 768), (7,))]
    weights = [nn.Parameter(value.to(device)) for value in (matrix, vector)]
    options: dict[str, Any] = {"momentum": momentum, "weight_decay": decay, "nesterov": True, "adamw_lr": adamw_lr}
    optimizer = MuonOptimizer(weights, lr=lr, **options)
    expected = [matrix.double(), vector.double()]
    buffer = torch.zeros(96, 768, dtype=torch.float64)
    for step in range(2):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = ((1 + step) * gradient).to(device)
        optimizer.step()
        update = (1 + step) * gradients[0].double()
        buffer = momentum * buffer + update
        expected[0] = expected[0] * (1 - lr * decay) - lr * polar(update + momentum * buffer)
    # AdamW with gradients g and 2 g: the moments are known numbers times g and g^2.
    for first, second in ((1.0, 1.0), ((0.9 + 2.0) / 1.9, (0.95 + 4.0) / 1.95)):
        g = gradients[1].double()
        expected[1] = expected[1] - adamw_lr * first * g / (second**0.5 * g.abs() + 1e-8)
    errors = [
        float(torch.linalg.norm(weights[0].detach().cpu().double() - expected[0], 2)) / lr,
        float((weights[1].detach().cpu().double() - expected[1]).abs().max()) / adamw_lr,
    ]
    # Each of the two updates may be as far from the polar factor as one orthogonalization. GPUs round the momentum to
    # bfloat16 first.
    tolerance = 2 * TOLERANCES[torch.float32 if device.type == "cpu" else torch.bfloat16]
    return max(errors), tolerance, "from the formulas in float64, in units of the learning rate"


def check_hopper_kernel(device: torch.device) -> list[Finding]:
    """Check that large symmetric products use their fast kernel, on GPUs that have one."""
    if unusable(device) is not None or not is_hopper(device):
        return []
    if probe_gluon(device):
        return [Finding("Gluon kernel for Hopper", "ok", "large symmetric products use it")]
    advice = f"Results are right without it, but large products take up to 29% longer. {REPORT}"
    return [Finding("Gluon kernel for Hopper", "warning", f"not used: {gluon_unusable()}", advice)]


@self_test("products on {0.type}")
def check_kernels(device: torch.device) -> tuple[float, float, str]:
    """Compare the matrix products of our kernels with products in float64."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.randn(2, 384, 512, generator=generator).mul_(512**-0.5).to(device, dtype)
        gram = symmetric_product(x, x)
        worst = max(worst, _relative(gram, x.double() @ x.double().mT))
        found = multiply_add(gram, x, Addend(x))
        worst = max(worst, _relative(found, gram.double() @ x.double() + x.double()))
    return worst, 1e-2, "from float64, relative"


def _relative(found: Tensor, expected: Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float(torch.linalg.norm(found.double() - expected) / torch.linalg.norm(expected))


def check_cpu_bf16() -> Finding:
    """Try bfloat16 products on this CPU in another process, because they kill the process on some virtual machines.

    The products run with and without AMX, to tell which setting of oneDNN is needed.
    """
    name = "bfloat16 products on the CPU"
    given, setting = os.environ.get(ISA_VARIABLE), f"{ISA_VARIABLE}={ISA_WITHOUT_AMX}"
    try:
        code = run_bf16_product(given)
        other = None if code == 0 and given is None else run_bf16_product(ISA_WITHOUT_AMX if given is None else None)
    except subprocess.TimeoutExpired:
        return Finding(name, "warning", f"unknown: the process did not end within {PATIENCE_SECONDS} s", "Try again.")
    if other is None:
        return Finding(name, "ok", "they run")
    if code == 0:
        if other == 0:
            return Finding(name, "ok", f"they run, with {ISA_VARIABLE}={given} and without it")
        detail = f"they run with {ISA_VARIABLE}={given}; without it the process dies ({_exit(other)})"
        return Finding(name, "ok", detail, f"Keep {ISA_VARIABLE} set.")
    detail = f"the process dies ({_exit(code)})"
    if given is None and other == 0:
        why = "This machine advertises AMX but does not allow it."
        return Finding(name, "wrong", f"{detail}; with {setting} they run", f"{why} Set it: export {setting}")
    if given is not None and given != ISA_WITHOUT_AMX:
        return Finding(name, "wrong", f"{detail} with {ISA_VARIABLE}={given}", f"Try: export {setting}")
    return Finding(name, "wrong", f"{detail}, with {setting} too", "Keep weights on the CPU in float32.")


_BF16_PRODUCT = """
import torch
for size in (16, 512):
    x = torch.ones(size, size, dtype=torch.bfloat16)
    assert float((x @ x)[0, 0]) == size
    assert float(torch.bmm(x[None], x[None])[0, 0, 0]) == size
"""


def run_bf16_product(isa: str | None) -> int:
    """Multiply bfloat16 matrices in a new process and return its exit status; if negative, the signal that killed it.

    `isa` is the value of ONEDNN_MAX_CPU_ISA in that process; None leaves it unset.
    """
    environment = {key: value for key, value in os.environ.items() if key != ISA_VARIABLE}
    if isa is not None:
        environment[ISA_VARIABLE] = isa
    command = [sys.executable, "-c", _BF16_PRODUCT]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=PATIENCE_SECONDS, check=False)
    return done.returncode


def _exit(code: int) -> str:
    """Describe the exit status of a process that failed."""
    if code == -signal.SIGILL:
        return "illegal instruction"
    return f"signal {-code}" if code < 0 else f"exit status {code}"


@self_test("two ranks, gloo", "Ranks must reach each other through the loopback interface.")
def check_two_ranks() -> tuple[float, float, str]:
    """Compare a sharded step on two gloo ranks with a step on one device."""
    found, *_ = on_this_machine(2, lambda ranks: ranks.run(sharded_difference), PATIENCE_SECONDS, "gloo")
    return max(found), 1e-5, "between a sharded step and one on a single device"


def sharded_difference() -> float:
    """Return how far weights differ after two sharded steps and after the same steps on one device.

    Every rank calls this function.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    shapes = ((9, 16), (16, 8), (8, 8))
    whole = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    sharded = [nn.Parameter(distribute_tensor(weight.detach().clone(), mesh, [Shard(0)])) for weight in whole]
    # A group of this rank alone: every rank has a whole copy of its own, which no other rank trains.
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    optimizers = [
        MuonOptimizer(whole, strategy="owner", nesterov=True, agreement_group=alone),
        MuonOptimizer(sharded, strategy="owner", nesterov=True),
    ]
    for _ in range(2):
        for weight, shard in zip(whole, sharded, strict=True):
            weight.grad = torch.randn(weight.shape, generator=generator)
            shard.grad = distribute_tensor(weight.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    worst = 0.0
    for weight, shard in zip(whole, sharded, strict=True):
        assert isinstance(shard.data, DTensor)
        worst = max(worst, float((shard.data.full_tensor() - weight.detach()).abs().max()))
    return worst


def kernel_choices(device: torch.device) -> list[dict[str, str]]:
    """Return which kernel computes matrix products of typical sizes, and why."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    products = [
        Product("symmetric", 12, 768, 768, 3072, dtype),
        Product("multiply_add", 12, 768, 3072, 768, dtype),
        Product("symmetric", 1, 4096, 4096, 4096, dtype),
        Product("multiply_add", 1, 4096, 14336, 4096, dtype),
        Product("symmetric", 128, 64, 64, 128, torch.float32),
    ]
    choices = [(product, select(product, device)) for product in products]
    return [
        {
            "product": f"{product.operation} {product.num_matrices} x "
            f"({product.rows} x {product.inner} x {product.cols})",
            "dtype": str(product.dtype).removeprefix("torch."),
            "kernel": choice.path or "chosen by timing at the first use",
            "why": choice.reason,
        }
        for product, choice in choices
    ]
