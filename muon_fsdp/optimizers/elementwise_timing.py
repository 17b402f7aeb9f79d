"""Time the steps of the element-wise optimizers beside those of torch's optimizers."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import nn

from muon_fsdp.optimizers.elementwise import TritonMuon, TritonMuonW
from muon_fsdp.timing import seconds as time_of


def benchmark_muon_optimizers(model_size: int = 1000, num_steps: int = 100, lr: float = 1e-3) -> dict[str, float]:
    """Time `num_steps` steps on an `nn.Linear(model_size, model_size)`, beside torch's Adam and SGD.

    It runs on the GPU if there is one. Every optimizer warms up first, and the host waits for the device before it
    reads the clock. Times are the median of three runs.

    Args:
        model_size: rows and columns of the weight.
        num_steps: how many steps are timed together.
        lr: learning rate of all optimizers.

    Keys:
        triton_muon_time: seconds for `TritonMuon`.
        triton_muonw_time: seconds for `TritonMuonW`.
        torch_adam_time: seconds for `torch.optim.Adam`.
        torch_sgd_time: seconds for `torch.optim.SGD`.
        muon_vs_adam_speedup: `torch_adam_time / triton_muon_time`.
        muonw_vs_adam_speedup: `torch_adam_time / triton_muonw_time`.
        muon_vs_sgd_speedup: `torch_sgd_time / triton_muon_time`.
        model_size: as given.
        num_steps: as given.
        parameters: model_size squared, plus model_size.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    makers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "triton_muon_time": lambda params: TritonMuon(params, lr=lr),
        "triton_muonw_time": lambda params: TritonMuonW(params, lr=lr),
        "torch_adam_time": lambda params: torch.optim.Adam(params, lr=lr),
        "torch_sgd_time": lambda params: torch.optim.SGD(params, lr=lr),
    }
    seconds = {name: _seconds(make, model_size, num_steps, device) for name, make in makers.items()}
    return {
        **seconds,
        "muon_vs_adam_speedup": seconds["torch_adam_time"] / seconds["triton_muon_time"],
        "muonw_vs_adam_speedup": seconds["torch_adam_time"] / seconds["triton_muonw_time"],
        "muon_vs_sgd_speedup": seconds["torch_sgd_time"] / seconds["triton_muon_time"],
        "model_size": model_size,
        "num_steps": num_steps,
        "parameters": model_size * model_size + model_size,
    }


def _seconds(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], model_size: int, num_steps: int, device: str
) -> float:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(model_size, model_size, device=device)
    optimizer = make(list(model.parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)

    def run(count: int) -> None:
        for _ in range(count):
            optimizer.step()

    run(min(num_steps, 3))  # compiles kernels and makes state
    return statistics.median(time_of(lambda: run(num_steps), device) for _ in range(3))
