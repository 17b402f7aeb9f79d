"""State in 8 bits and rounded weights on a GPU: the bits of the CPU, captured steps, and memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.linalg import codes
from muon_fsdp.linalg.philox import element_bits, parameter_key

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(512, 768), (65, 300), (3, 256, 512), (5000,), (5, 7)]


def trained(device: str, dtype: torch.dtype, steps: int, **options) -> tuple[list[torch.Tensor], MuonOptimizer]:
    torch.manual_seed(0)
    parameters = [nn.Parameter((torch.randn(shape) * 0.1).to(device, dtype)) for shape in SHAPES]
    optimizer = MuonOptimizer(parameters, lr=0.02, weight_decay=0.1, **options)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device, dtype)
        optimizer.step()
    return [parameter.detach() for parameter in parameters], optimizer


def test_random_bits_are_those_of_the_cpu():
    elements = torch.arange(2**33 - 5, 2**33 + 5000)
    expected = element_bits(parameter_key("elements", "a"), 7, 3, elements)
    assert torch.equal(element_bits(parameter_key("elements", "a"), 7, 3, elements.cuda()).cpu(), expected)


@pytest.mark.parametrize("code", codes.CODES)
def test_codes_are_those_of_the_cpu(code):
    values = torch.randn(33, 700) * torch.exp(3 * torch.randn(33, 700))
    values = values.abs() if code == "positive" else values
    dither = torch.randint(0, 2**16, values.shape)
    expected, found = codes.encode(values, code, 10, dither), codes.encode(values.cuda(), code, 10, dither.cuda())
    assert torch.equal(found.codes.cpu(), expected.codes)
    assert torch.equal(found.scales.cpu(), expected.scales)


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "rounding"),
    [
        (torch.float32, "int8", "nearest"),
        (torch.bfloat16, "int8", "stochastic"),
        (torch.bfloat16, "bfloat16", "remainder"),
        (torch.float16, "float32", "stochastic"),
    ],
)
def test_a_captured_step_is_the_eager_one(dtype, state_dtype, rounding):
    options = {"state_dtype": state_dtype, "rounding": rounding}
    expected, eager = trained("cuda", dtype, 8, cuda_graph=False, **options)
    found, captured = trained("cuda", dtype, 8, cuda_graph=True, **options)
    assert captured.plan_report().cuda_graph.startswith("captured")
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    for p, q in zip(captured.state, eager.state, strict=True):
        for name, value in eager.state[q].items():
            assert torch.equal(captured.state[p][name], value), name


@pytest.mark.parametrize(("state_dtype", "rounding"), [("int8", "stochastic"), ("int8", "remainder")])
def test_a_step_is_that_of_the_cpu(state_dtype, rounding):
    """Orthogonalization differs by its precision, so weights are compared, and not their last bits."""
    options = {"state_dtype": state_dtype, "rounding": rounding, "comm_dtype": torch.float32}
    expected, _ = trained("cpu", torch.bfloat16, 4, **options)
    found, _ = trained("cuda", torch.bfloat16, 4, cuda_graph=False, **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu().float(), other.float(), rtol=2e-2, atol=5e-3)


def test_state_takes_a_quarter_of_the_memory():
    weight = nn.Parameter(torch.randn(4096, 4096, device="cuda"))
    sizes = {}
    for state_dtype in ("float32", "int8"):
        optimizer = MuonOptimizer([weight], state_dtype=state_dtype, cuda_graph=False)
        weight.grad = torch.randn_like(weight)
        before = torch.cuda.memory_allocated()
        optimizer.step()
        weight.grad = None
        sizes[state_dtype] = torch.cuda.memory_allocated() - before + weight.numel() * 4
        del optimizer
        torch.cuda.synchronize()
    assert sizes["int8"] < 0.3 * sizes["float32"]
