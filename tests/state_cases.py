"""Ways in which frameworks take the state of an optimizer off its device between steps, and training around them.

Frameworks for reinforcement learning free the memory of the state while they generate. The classes do what
verl 0.9.1 (`offload_fsdp_optimizer`), AReaL (4aef98d, `_offload_optimizer_states`) and prime-rl (559b447,
`CPUOffloadOptimizer`) do to `optimizer.state`; the last one assigns to `data`, as others do.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from muon_fsdp import MuonOptimizer
from tests.checkpoint_cases import folder
from tests.comparisons import assert_changed, assert_near, assert_same

RULES: list[tuple[str, dict[str, Any]]] = [
    ("muon", {}),
    ("normuon", {}),
    ("spectral_sphere", {"lambda_mode": "projection"}),
]


def moved(value: Tensor, device: torch.device | str) -> Tensor:
    """Move a tensor as `to` does; on one device, copy it and overwrite what was there, so that no one can use it."""
    if value.device.type != torch.device(device).type:
        return value.to(device, non_blocking=True)
    result = value.clone()
    if value.is_floating_point():
        value.fill_(torch.nan)
    return result


class _Mover:
    """A way that moves state in both directions alike."""

    def away(self, optimizer: torch.optim.Optimizer) -> None:
        self._move(optimizer, is_away=True)

    def back(self, optimizer: torch.optim.Optimizer) -> None:
        self._move(optimizer, is_away=False)

    def _move(self, optimizer: torch.optim.Optimizer, is_away: bool) -> None:
        raise NotImplementedError


class Verl(_Mover):
    """Puts new tensors into the dictionaries of all parameters of all groups, also of those without state."""

    def _move(self, optimizer: torch.optim.Optimizer, is_away: bool) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state[p]
                for key, value in state.items():
                    state[key] = moved(value, "cpu" if is_away else p.device)


class Areal:
    """Keeps the tensors elsewhere, and leaves tensors without elements in their place."""

    def __init__(self) -> None:
        self._kept: dict[Tensor, dict[str, Tensor]] = {}

    def away(self, optimizer: torch.optim.Optimizer) -> None:
        for p, state in optimizer.state.items():
            self._kept[p] = {key: moved(value.detach(), "cpu") for key, value in state.items()}
            state.update({key: torch.empty(0) for key in state})

    def back(self, optimizer: torch.optim.Optimizer) -> None:
        for p, state in optimizer.state.items():
            state.update({key: moved(value, p.device) for key, value in self._kept[p].items()})
        self._kept.clear()


class PrimeRL(_Mover):
    """Copies a DTensor and gives the copy another local tensor; the state is on the device during steps only."""

    def _move(self, optimizer: torch.optim.Optimizer, is_away: bool) -> None:
        for p, state in optimizer.state.items():
            for key, value in state.items():
                device = "cpu" if is_away else p.device
                if isinstance(value, DTensor):
                    state[key] = copy.copy(value)
                    state[key]._local_tensor = moved(value._local_tensor, device)
                else:
                    state[key] = moved(value, device)


class InPlace(_Mover):
    """Leaves the dictionaries alone and assigns to `data` of their tensors; that of a DTensor has no effect."""

    def _move(self, optimizer: torch.optim.Optimizer, is_away: bool) -> None:
        for p, state in optimizer.state.items():
            for value in state.values():
                local = value._local_tensor if isinstance(value, DTensor) else value
                local.data = moved(local.data, "cpu" if is_away else p.device)


WAYS = [Verl, Areal, PrimeRL, InPlace]


class Training:
    """A model with gradients that depend on the step alone, and its optimizer; sharded where there are ranks."""

    def __init__(self, rule: str = "muon", device: str = "cpu", **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Embedding(10, 16), nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 16), nn.LayerNorm(16)]
        self.model = nn.Sequential(*layers).to(device)
        if dist.is_initialized():
            fully_shard(self.model[1])
            fully_shard(self.model)
        self.optimizer = MuonOptimizer(self.model, lr=0.02, rule=rule, **options)
        self.device, self.num_steps = device, 0

    def step(self) -> None:
        """Take a step; one parameter has its first gradient in the third."""
        generator = torch.Generator().manual_seed(self.num_steps)
        for number, p in enumerate(self.model.parameters()):
            grad = torch.randn(p.shape, generator=generator).to(p.device)
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            else:
                p.grad = grad
            if number == 3 and self.num_steps < 2:
                p.grad = None
        self.optimizer.step()
        self.num_steps += 1

    def train(self, num_steps: int, way: Any = None) -> None:
        """Take steps; the state is away between them."""
        for _ in range(num_steps):
            self.step()
            if way is not None:
                states = self.optimizer.state.values()
                shapes = [value.shape for state in states for value in state.values()]
                way.away(self.optimizer)
                # What was free is used for something else, so the state comes back to other addresses.
                others = [torch.full(shape, torch.nan, device=self.device) for shape in shapes]
                way.back(self.optimizer)
                del others

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Copies of this rank's weights and state, by name."""
        found = {}
        for name, p in self.model.named_parameters():
            for key, value in {"weight": p, **self.optimizer.state[p]}.items():
                value = value.detach()
                local = value.to_local() if isinstance(value, DTensor) else value
                found[f"{name} {key}"] = local.cpu().clone()
        return found


def tolerance(rule: str, device: str) -> float:
    """Return by how much weights and state may differ if state was moved.

    Where state has other addresses, the spectral sphere starts its statistics of W again, as in its first two steps.
    On a GPU this rounds differently: 6.5e-5 was seen in a singular vector. All else is equal to the last bit.
    """
    return 1e-3 if rule == "spectral_sphere" and device == "cuda" else 0.0


def move_on_ranks(way: int, device: str = "cpu", cuda_graph: bool | str = False, num_steps: int = 5) -> list[str]:
    """Train with moved state under every rule; return the rules after which something differs from plain training."""
    different = []
    for rule, options in RULES:
        expected = Training(rule, device, cuda_graph=False, **options)
        found = Training(rule, device, cuda_graph=cuda_graph, **options)
        expected.train(num_steps)
        found.train(num_steps, WAYS[way]())
        assert any(isinstance(value, DTensor) for state in found.optimizer.state.values() for value in state.values())
        atol = tolerance(rule, device)
        after = found.tensors
        if not all(torch.allclose(value, after[name], rtol=0, atol=atol) for name, value in expected.tensors.items()):
            different.append(rule)
    return different


def step_while_away_on_ranks(way: int) -> list[str]:
    """Take a step while the state of a GPU's shards is on the CPU; return the messages, and check that it recovers."""
    messages = []
    for rule, options in RULES:
        expected, found = Training(rule, "cuda", **options), Training(rule, "cuda", **options)
        mover = WAYS[way]()
        found.train(5)
        mover.away(found.optimizer)
        try:
            found.step()
        except RuntimeError as error:
            messages.append(str(error))
        mover.back(found.optimizer)
        expected.train(8)
        found.train(3)
        name = f"{rule}: after a step that was refused"
        assert_near(found.tensors, expected.tensors, name, atol=tolerance(rule, "cuda"))
    return messages


# -------------------------------------------------------------------------------------------------------- async_save


class SlowWriter(dcp.FileSystemWriter):
    """A writer that begins to write when it is told to, in the thread of `async_save`."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.may_write = threading.Event()

    def write_data(self, *arguments: Any) -> Any:
        assert self.may_write.wait(60)
        return super().write_data(*arguments)


def saved_while_training(rule: str, device: str = "cpu", stager: Any = None, **options: Any) -> Training:
    """Save with `async_save`, train before anything is written, and check that the checkpoint is of when it was asked.

    Returns:
        The training that was saved.
    """
    training, resumed = Training(rule, device, **options), Training(rule, device, **options)
    training.train(8)
    expected = training.tensors
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None  # FSDP2 uses the default group
    with folder() as path:
        writer = SlowWriter(path)
        state = dict(zip(("model", "optimizer"), get_state_dict(training.model, training.optimizer), strict=True))
        answer = dcp.async_save(state, storage_writer=writer, process_group=group, async_stager=stager)
        if stager is not None:
            answer.staging_completion.result()
            answer = answer.upload_completion
        training.train(3)
        assert_changed(training.tensors["1.weight momentum_buffer"], expected["1.weight momentum_buffer"])
        assert not answer.done()
        writer.may_write.set()
        answer.result()
        model_state, state_dict = get_state_dict(resumed.model, resumed.optimizer)
        dcp.load({"model": model_state, "optimizer": state_dict}, checkpoint_id=path)
        set_state_dict(resumed.model, resumed.optimizer, model_state_dict=model_state, optim_state_dict=state_dict)
    assert_same(resumed.tensors, expected, "when async_save was called")
    resumed.num_steps = 8
    resumed.train(3)
    assert_same(resumed.tensors, training.tensors, "after the same steps")
    return training


def save_on_ranks(rule: str, options: dict[str, Any]) -> int:
    return saved_while_training(rule, **options).num_steps
