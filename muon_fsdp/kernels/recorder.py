"""Device work as CUDA graphs with host calls between them: recorded once, then played again with little host time.

Collectives are not captured: a captured one ties the graph to its communicator, and a process group then can't be
destroyed before the graph. They are issued again at every replay, from buffers that stay where they are.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Recorder:
    """Does everything at once and remembers nothing."""

    def host(self, call: Callable[[], T]) -> T:
        """Make a call from the host that must not be captured, and must be made again at every replay."""
        return call()

    def buffer(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A flat tensor that such calls may use."""
        return torch.empty(numel, dtype=dtype, device=device)


class GraphRecorder(Recorder):
    """Does everything once, and again with `replay`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._tape: list[Callable[[], object]] = []
        self._buffers: dict[str, Tensor] = {}

    def record(self, work: Callable[[], None]) -> None:
        """Do the work and record it. If it fails, nothing is recorded, and what was done before stays done."""
        gc.collect()  # memory that is freed during a capture would not be given back
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        generator = torch.cuda.default_generators[current.device_index]
        random_state = generator.clone_state()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._begin()
            try:
                work()
            except BaseException:
                self._abandon()
                # A capture that broke off leaves the generator as if it were still captured: torch.randn would fail.
                generator.graphsafe_set_state(random_state)
                raise
            self._end()
        current.wait_stream(self._stream)

    def replay(self) -> None:
        for call in self._tape:
            call()

    def host(self, call: Callable[[], T]) -> T:
        self._end()
        self._tape.append(call)
        result = call()
        self._begin()
        return result

    def buffer(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """One tensor per name, as long as the longest that was asked for: calls at a replay find what they need."""
        known = self._buffers.get(name)
        num_bytes = numel * dtype.itemsize
        if known is None or known.numel() < num_bytes:
            self._buffers[name] = known = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return known[:num_bytes].view(dtype)

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, NCCL's among them, go on using CUDA meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        """Close the graph and run it: what was captured has not been done yet."""
        graph, self._graph = self._graph, None
        assert graph is not None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph.capture_end()
        self._graphs.append(graph)  # an empty one too: the pool of memory lives as long as a graph that uses it
        is_empty = any("graph is empty" in str(warning.message).lower() for warning in caught)
        if not is_empty:  # between two calls from the host, say
            graph.replay()
            self._tape.append(graph.replay)

    def _abandon(self) -> None:
        graph, self._graph, self._tape = self._graph, None, []
        if graph is not None:
            with suppress(RuntimeError):  # the capture may have been invalidated by what went wrong
                graph.capture_end()
