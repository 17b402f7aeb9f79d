"""Whole steps recorded on CPU ranks, with a stand-in for CUDA graphs; run by tests/test_graph_capture.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muon_fsdp import MuonOptimizer
from muon_fsdp.step import metrics, planned_step
from muon_fsdp.step.fused import FusedStep
from tests import toy_rules  # noqa: F401 (registers the rules on this rank)

SHAPES = [(12, 8), (16, 6), (9, 9)]
NUM_STEPS = 5  # the first two of the spectral sphere are never captured
_EMPTY = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")


class NotedOperations(TorchDispatchMode):
    """Notes operations and runs none that writes to a tensor that exists, as the capture of a CUDA graph does.

    Other operations run, because somebody has to allocate their results. What they compute is overwritten later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.name == "aten::_local_scalar_dense":
            raise RuntimeError("operation not permitted when stream is capturing")
        if schema.is_mutable and schema.name.startswith("aten::"):  # not the marks of record_function
            self.calls.append(partial(func, *args, **kwargs))
            given = [*args, *(kwargs.get(argument.name) for argument in schema.arguments[len(args) :])]
            written = [value for a, value in zip(schema.arguments, given, strict=True) if a.is_write]
            return written[0] if schema.returns else None
        result = func(*args, **kwargs)
        is_view = any(returned.alias_info is not None for returned in schema.returns)
        results = [result] if isinstance(result, Tensor) else result
        if not is_view and schema.name not in _EMPTY and isinstance(results, (list, tuple)):
            self.calls.append(partial(self._again, func, args, kwargs, results))
        return result

    @staticmethod
    def _again(func: Any, args: Any, kwargs: Any, results: Any) -> None:
        found = func(*args, **kwargs)
        for old, new in zip(results, [found] if isinstance(found, Tensor) else found, strict=True):
            old.copy_(new)


class NotedSegments:
    """Segments of noted operations. The one with the number `fails_at` fails when it ends."""

    num_bytes = 0

    def __init__(self, fails_at: int) -> None:
        self.fails_at, self.count = fails_at, 0
        self._mode: NotedOperations | None = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._mode is not None:
                self._leave()

    def begin(self) -> None:
        self._mode = NotedOperations()
        self._mode.__enter__()

    def end(self) -> Callable[[], object] | None:
        self.count += 1
        if self.count - 1 == self.fails_at:
            raise RuntimeError(f"injected into segment {self.fails_at}")
        calls = self._leave()

        def replay() -> None:
            for call in calls:
                call()

        return replay if calls else None

    def _leave(self) -> list[Callable[[], object]]:
        assert self._mode is not None
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        return mode.calls


class Recorded:
    """Sharded weights and their optimizer, which captures its second step with `NotedSegments`."""

    def __init__(self, rule: str, cuda_graph: bool, fails_at: int = -1) -> None:
        generator = torch.Generator().manual_seed(0)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._whole = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self._mesh = mesh
        self.params = [nn.Parameter(distribute_tensor(w, mesh, [Shard(0)])) for w in self._whole]
        # Other modes of the spectral sphere look at numbers on a CPU.
        options = {"lambda_mode": "projection"} if rule == "spectral_sphere" else {}
        self.optimizer = MuonOptimizer(
            self.params, rule=rule, lr=0.05, max_stage_bytes=600, cuda_graph=cuda_graph, **options
        )
        self.segments = NotedSegments(fails_at)
        self.num_warnings = 0

    def train(self, before_step: Callable[[MuonOptimizer, int], object] = lambda *_: None) -> list[Tensor]:
        """Return the local weights and states after some steps."""
        self.optimizer._current_plan().captured._make_segments = lambda device: self.segments  # type: ignore[assignment]
        with (
            patch.object(planned_step, "capture_obstacle", lambda *_: None),
            patch.object(FusedStep, "device", torch.device("cpu")),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            for step in range(NUM_STEPS):
                generator = torch.Generator().manual_seed(step)
                for p in self.params:
                    grad = torch.randn(p.shape, generator=generator)
                    part = distribute_tensor(grad, self._mesh, [Shard(0)], src_data_rank=None)
                    if p.grad is None:
                        p.grad = part
                    else:  # in place: without kernels, a recorded step reads a gradient where it was
                        p.grad.to_local().copy_(part.to_local())
                before_step(self.optimizer, step)
                self.optimizer.step()
        self.num_warnings = sum("not captured as a CUDA graph" in str(each.message) for each in caught)
        values = [value for p in self.params for value in (p, *self.optimizer.state[p].values())]
        return [v.detach().to_local() if hasattr(v, "to_local") else v.detach() for v in values]


def failing_captures(rule: str) -> int:
    """Check that a failure in any segment on rank 1 alone changes nothing; return the number of segments here."""
    expected = Recorded(rule, False).train()
    both = Recorded(rule, True)
    assert all(map(torch.equal, both.train(), expected)), "captured on both ranks"
    assert both.optimizer.plan_report().cuda_graph == "captured"
    most = torch.tensor(both.segments.count)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    for number in range(0, int(most), 1 + int(most) // 20):  # the spectral sphere has many, for its statistics
        fails = dist.get_rank() == 1
        one = Recorded(rule, True, number if fails else -1)
        assert all(map(torch.equal, one.train(), expected)), f"failure in segment {number}"
        assert one.num_warnings == (fails and number < both.segments.count), f"warnings about segment {number}"
    return both.segments.count


def measured_between_replays() -> list[bool]:
    """Ask for metrics on rank 1 alone, and pass numbers per matrix, while steps are replayed.

    Returns:
        For every step, whether it was measured here.
    """

    def given(optimizer: MuonOptimizer, step: int) -> None:
        for number in range(len(SHAPES)):
            optimizer.set_per_matrix(f"param[{number}]", "log_rate", 0.1 * step - number)

    measured, captured = [False] * NUM_STEPS, list[str]()

    def asking(optimizer: MuonOptimizer, step: int) -> None:
        given(optimizer, step)
        meter = optimizer._current_plan().meter
        measured[step - 1], meter._last = bool(meter._last), []
        captured.append(optimizer.plan_report().cuda_graph)
        if step in (1, 3) and dist.get_rank() == 1:
            optimizer.metrics()

    expected, both = Recorded("toy_given", False).train(given), Recorded("toy_given", True)
    with patch.object(metrics, "STEPS_BETWEEN", 2):
        assert all(map(torch.equal, both.train(asking), expected))
    asking(both.optimizer, NUM_STEPS)
    assert [status.startswith("captured;") for status in captured[2:]] == [False, True, False, True]
    return measured
