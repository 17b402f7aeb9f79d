"""Inputs, errors and fixtures for the tests of Triton kernels, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from muon_fsdp.kernels import launch, products, triton_elementwise, triton_norms, triton_products, triton_rows
from muon_fsdp.kernels.launch import TileConfig
from muon_fsdp.linalg import newton_schulz, scaling
from muon_fsdp.step import fused

select_module = sys.modules["muon_fsdp.kernels.select"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def symmetric(batch, size, dtype):
    x = random(batch, size, size)
    return ((x + x.mT) / 2).to(dtype)


def poisoned(*shape, dtype):
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def error(result, expected, size=None):
    """Return the distance relative to the expected norm or, where terms may cancel, to the size of the terms."""
    size = expected if size is None else size
    return float((result.double() - expected).norm() / size.norm().clamp_min(1e-30))


def unpacked(line):
    """Return the tiles (matrix, row, column) of a program, decoded as the Hopper kernel decodes them."""
    (num_tasks, _), *tasks = line
    assert len(tasks) > num_tasks  # one more is read than there are
    tiles = []
    for matrix, word in tasks[:num_tasks]:
        assert 0 <= word < 2**31
        first, second, shared = (word >> shift & 1023 for shift in (0, 10, 20))
        indices = [index for index in (first, second) if index != 1023]
        tiles += [(matrix, shared, index) if word >> 30 else (matrix, index, shared) for index in indices]
    return tiles


@pytest.fixture(name="kernels_everywhere")
def kernels_fixture(monkeypatch):
    """Use kernels for all that they can compute, on the CPU too; give the names of those launched."""
    for module in (fused, newton_schulz, scaling):
        monkeypatch.setattr(module, "unusable", lambda device: None)
    if DEVICE == "cpu":
        choice = select_module.Choice("triton", TileConfig(64, 64, 64, 4, 2), "test")
        library = select_module.Choice("torch", None, "test")
        monkeypatch.setattr(
            products, "select", lambda product, _: library if product.dtype == torch.float64 else choice
        )
    launched = []
    for module in (triton_products, triton_norms, triton_elementwise, triton_rows):
        monkeypatch.setattr(
            module, "launch", lambda k, *a, **o: launched.append(k.fn.__name__) or launch.launch(k, *a, **o)
        )
    return launched


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 8, 16) * 0.1)
        self.qkv = nn.Parameter(torch.randn(24, 8) * 0.1)
        self.odd = nn.Parameter(torch.randn(5, 7) * 0.1)
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.1)
        self.other = nn.Parameter(torch.randn(8, 8) * 0.1)
        self.bias = nn.Parameter(torch.randn(33) * 0.1)
