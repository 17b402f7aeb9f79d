"""Record device work as CUDA graphs with host calls between them, and replay both with little host time.

Collectives are not captured. A captured collective would tie the graph to its NCCL communicator, and the process group
could not be destroyed before the graph. Every replay issues them again, with the same buffers.
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
    """Runs all work immediately and records nothing; the base class of `GraphRecorder`."""

    def host(self, call: Callable[[], T]) -> T:
        """Make a call that must not be captured in a CUDA graph and must be repeated at every replay.

        Returns:
            The result of the call.
        """
        return call()

    def buffer(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat, uninitialized tensor of `numel` elements for the calls passed to `host`."""
        return torch.empty(numel, dtype=dtype, device=device)


class GraphRecorder(Recorder):
    """Runs work once while it records it, and runs it again at every `replay`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._tape: list[Callable[[], object]] = []
        self._buffers: dict[str, Tensor] = {}

    def record(self, work: Callable[[], None]) -> None:
        """Run the work and record it. If it raises, nothing is recorded, but completed parts are not undone."""
        gc.collect()  # tensors that are freed during a capture would not return their memory to the allocator
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
                # An aborted capture leaves the generator in its capturing state, in which torch.randn would fail.
                generator.graphsafe_set_state(random_state)
                raise
            self._end()
        current.wait_stream(self._stream)

    def replay(self) -> None:
        """Run everything that was recorded once more, in the same order."""
        for call in self._tape:
            call()

    def host(self, call: Callable[[], T]) -> T:
        """Finish and run the current graph, make the call, record it, and begin the next graph."""
        self._end()
        self._tape.append(call)
        result = call()
        self._begin()
        return result

    def buffer(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the beginning of the buffer with this name, which stays at one address unless it has to grow.

        Recorded calls use the buffer again at every replay.
        """
        known = self._buffers.get(name)
        num_bytes = numel * dtype.itemsize
        if known is None or known.numel() < num_bytes:
            self._buffers[name] = known = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return known[:num_bytes].view(dtype)

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local", because other threads, such as those of NCCL, call CUDA during the capture.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        """Finish the capture and run the graph once, because capturing work does not run it."""
        graph, self._graph = self._graph, None
        assert graph is not None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph.capture_end()
        self._graphs.append(graph)  # empty ones too: the memory pool lives as long as a graph that uses it
        is_empty = any("graph is empty" in str(warning.message).lower() for warning in caught)
        if not is_empty:  # a graph is empty if one host call directly follows another
            graph.replay()
            self._tape.append(graph.replay)

    def _abandon(self) -> None:
        graph, self._graph, self._tape = self._graph, None, []
        if graph is not None:
            with suppress(RuntimeError):  # the error may have invalidated the capture
                graph.capture_end()
