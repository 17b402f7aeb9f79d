"""Record device work as CUDA graphs with host calls between them, and replay both with little host time.

Recording runs nothing. A failure in the middle therefore leaves parameters and state as they were, and the step can
still run eagerly.

Collectives are not captured. A captured collective would tie the graph to its NCCL communicator, and the process group
could not be destroyed before the graph. Every replay issues them again, with the same buffers.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor


class Recorder:
    """Runs all work immediately and records nothing; the base class of `GraphRecorder`."""

    def host(self, call: Callable[[], object]) -> None:
        """Make a call that must not be captured in a CUDA graph and must be repeated at every replay.

        A recorded call runs later, so nothing is returned. What it produces must be kept where later calls find it.
        """
        call()

    def buffer(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat, uninitialized tensor of `numel` elements for the calls passed to `host`."""
        return torch.empty(numel, dtype=dtype, device=device)


class Segments(Protocol):
    """Captures the device work between two host calls, one segment after the other."""

    num_bytes: int  # memory that the segments keep reserved, once all are captured

    def capturing(self) -> AbstractContextManager[None]:
        """Return a context manager around the capture of all segments; if its body raises, all are abandoned."""

    def begin(self) -> None:
        """Start a segment."""

    def end(self) -> Callable[[], object] | None:
        """Finish the segment.

        Returns:
            A function that runs the segment; None if it is empty.
        """


class GraphRecorder(Recorder):
    """Records work without running it. Every `replay` runs it: the segments, and the host calls between them.

    Args:
        segments: captures device work; `CudaSegments` except in tests.
    """

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._tape: list[Callable[[], object]] = []
        self._buffers: dict[str, Tensor] = {}

    def record(self, work: Callable[[Recorder], None]) -> None:
        """Record what `work` does with this recorder. If it raises, nothing has been run and nothing is kept."""
        try:
            with self._segments.capturing():
                self._segments.begin()
                work(self)
                self._end()
        except BaseException:
            self._tape, self._buffers = [], {}
            raise

    def replay(self) -> None:
        """Run everything that was recorded, in the same order, on the current stream."""
        for call in self._tape:
            call()

    def host(self, call: Callable[[], object]) -> None:
        """Finish the current segment, note the call, and start the next segment."""
        self._end()
        self._tape.append(call)
        self._segments.begin()

    def buffer(self, name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the beginning of the buffer with this name, which stays at one address unless it has to grow.

        Recorded calls use the buffer again at every replay.
        """
        known = self._buffers.get(name)
        num_bytes = numel * dtype.itemsize
        if known is None or known.numel() < num_bytes:
            self._buffers[name] = known = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return known[:num_bytes].view(dtype)

    def _end(self) -> None:
        replay = self._segments.end()
        if replay is not None:  # a segment is empty if one host call directly follows another
            self._tape.append(replay)


class CudaSegments:
    """CUDA graphs that are captured one after the other and share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []  # empty ones too: the pool lives as long as a graph that uses it

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Make the stream of the capture current; if the body raises, abandon all segments and restore everything."""
        gc.collect()  # tensors that are freed during a capture would not return their memory to the allocator
        # Eager steps left scratch memory in the allocator's cache, which would stay reserved beside the pool.
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(self._device)
        # The workspaces of cuBLAS belong to streams. The graphs must use one in their own pool, and nobody else may.
        torch._C._cuda_clearCublasWorkspaces()
        generator = torch.cuda.default_generators[self._stream.device_index]
        random_state = generator.clone_state()
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                try:
                    yield
                except BaseException:
                    if not self._abandon():
                        # The generator stays in its capturing state, in which torch.randn would fail.
                        generator.graphsafe_set_state(random_state)
                    raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()
        self.num_bytes = torch.cuda.memory_reserved(self._device) - reserved

    def begin(self) -> None:
        """Start to capture a graph."""
        self._graph = torch.cuda.CUDAGraph()
        # "thread_local", because other threads, such as those of NCCL, call CUDA during the capture.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Callable[[], object] | None:
        """Finish the capture of a graph.

        Returns:
            The function that replays the graph; None if it is empty.
        """
        graph = self._graph
        assert graph is not None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph.capture_end()
        self._graph = None
        self._graphs.append(graph)
        is_empty = any("graph is empty" in str(warning.message).lower() for warning in caught)
        return None if is_empty else graph.replay

    def _abandon(self) -> bool:
        """Drop all graphs.

        Returns:
            Whether the capture that was running could be ended in the usual way.
        """
        graph, self._graph, self._graphs = self._graph, None, []
        if graph is None:
            return True
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the graph may be empty
            graph.capture_end()
            return True
        # The error has invalidated the capture, and torch raises before it tells its allocator that the capture ended.
        with suppress(RuntimeError):
            graph.pool()  # succeeds if the graph itself will release the pool
            return False
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
            torch._C._cuda_releasePool(self._stream.device_index, self._pool)
        return False
