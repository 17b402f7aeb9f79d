"""Capture a step as a CUDA graph once it has run a few times, and replay it as long as its key does not change.

Whether a rank captures, replays or runs eagerly is its own affair: all three issue the same collectives in the same
order, so ranks need not agree about it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from muon_fsdp.comm.recorder import CudaSegments, GraphRecorder, Recorder, Segments
from muon_fsdp.declarations.settings import CudaGraph
from muon_fsdp.kernels.tables import FUSED_DTYPES
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.parameters.stored_state import stored_tensors
from muon_fsdp.step.fused import not_fusable, unread_form
from muon_fsdp.step.inputs import StepInputs
from muon_fsdp.text import format_bytes, warn_user

STEPS_BEFORE = 3  # eager steps with the same key before "auto" captures it
MEMORY_LIMIT = 1.1  # reserved memory of training with a graph, as a multiple of that without
# Memory that "auto" always accepts. The allocator reserves blocks of 2 and 20 MiB, and cuBLAS a workspace of 32 MiB, so
# a percentage of the memory of a small model says nothing.
SMALL_POOL = 64 * 2**20


class StepKey(NamedTuple):
    """The key of a captured step: everything that it depends on besides the contents of tensors.

    Args:
        addresses: the addresses of tensors that the graph keeps. If they change, the graph is dropped.
        launches: which kernels are launched. A step with other launches runs eagerly, and the graph is kept.
    """

    addresses: object
    launches: object


class CapturedStep:
    """The CUDA graph of a step, the key that it was captured for, and the reason if there is no graph.

    Args:
        mode: the setting `cuda_graph`.
        make_segments: returns an object that captures device work on a device.
    """

    def __init__(self, mode: CudaGraph, make_segments: Callable[[torch.device], Segments] = CudaSegments) -> None:
        self.graph: GraphRecorder | None = None
        self._mode, self._make_segments = mode, make_segments
        self._key: StepKey | None = None  # of the graph
        self._obstacle: str | None = None  # why these parameters can't be captured
        self._refusal: str | None = None  # why this plan is not captured again: a failure, or too much memory
        self._steps_before = STEPS_BEFORE if mode == "auto" else 1
        self._num_captures = 0
        self._last: StepKey | None = None  # the key of the last eager step
        self._repeats = 0  # eager steps with this key in a row
        self._ran_without = False  # whether the last step ran eagerly although there is a graph
        # What PyTorch's allocator has reserved in a training step without a graph. Peak statistics would not do: they
        # may show a peak of long ago, and users reset them.
        self._of_passes = 0  # what forward and backward need
        self._of_step = 0  # what the optimizer needs too

    @property
    def status(self) -> str:
        """Return whether the step is captured, and if not, why."""
        if self._mode is False:
            return "off: cuda_graph=False"
        if self.graph is not None:
            return "captured" + ("; the last step was another one and ran eagerly" if self._ran_without else "")
        reason = self._obstacle or self._refusal
        if reason is not None:
            return f"not captured: {reason}"
        if self._last is None:
            return "not captured: there was no step yet"
        left = self._steps_before - self._repeats
        return f"not captured yet: {left} more equal step(s) come first" if left > 0 else "captured at the next step"

    @property
    def is_due(self) -> bool:
        """Return whether the next step may be captured or replayed."""
        if self._is_off:
            return False
        return self._mode is True or self.graph is not None or self._repeats >= self._steps_before

    @property
    def _is_off(self) -> bool:
        return self._mode is False or self._obstacle is not None or self._refusal is not None

    def forget(self) -> None:
        """Drop the graph, and free its memory."""
        if self.graph is not None:
            self.graph = self._key = None
            torch.cuda.empty_cache()  # nobody else can use the memory of a pool

    def start_over(self, obstacle: str | None) -> None:
        """Drop the graph, because the tables that its kernels read were made anew.

        Args:
            obstacle: why steps can't be captured from now on; None if they can.
        """
        self.forget()
        self._obstacle, self._last, self._repeats = obstacle, None, 0

    def run(
        self, key: StepKey, step: Callable[[Recorder], None], device: Callable[[], torch.device], *, eager: bool
    ) -> None:
        """Replay the step, or capture and replay it if it has run a few times with the same key, or run it eagerly.

        Args:
            key: what the graph depends on.
            step: runs the step with a recorder, which records the calls that must come from the host.
            device: returns the device of the graph.
            eager: whether this step must run eagerly.
        """
        if self._obstacle is not None and self._mode is True:
            raise RuntimeError(f"cuda_graph=True can't capture the step: {self._obstacle}. Leave cuda_graph out.")
        if self._is_off:
            step(Recorder())
            return
        if self._key is not None and self._key.addresses != key.addresses:
            self.forget()  # the tensors that it reads were replaced
        failure = None
        if not eager and key != self._key and key == self._last and self._repeats >= self._steps_before:
            failure = self._capture(key, step, device())
        if not eager and key == self._key:
            assert self.graph is not None
            self.graph.replay()
            self._last, self._repeats, self._ran_without = None, 0, False
        else:
            self._run_eagerly(key, step, device())
        if failure is not None:  # after the step, because a warning may raise and other ranks wait for the step
            warn_user(
                f"The step is not captured as a CUDA graph: {failure}. It runs eagerly, with the same results and more "
                "host time. A rule that makes the host wait for the GPU, with .item() for example, can't be captured. "
                "Pass cuda_graph=False to switch capturing off.",
                RuntimeWarning,
            )

    def _run_eagerly(self, key: StepKey, step: Callable[[Recorder], None], device: torch.device) -> None:
        repeats = self._repeats + 1 if key == self._last else 1
        steps_left = self._steps_before - repeats
        # Only in the last step before a capture, because reading statistics takes host time. If there is a graph
        # already, its memory would count, and the last numbers are better.
        measures = self._mode == "auto" and self.graph is None and steps_left == 0
        if measures:
            try:
                self._of_passes = torch.cuda.memory_reserved(device)
            except RuntimeError as error:  # an allocator that replaces PyTorch's need not have statistics
                self._refusal, measures = f"reserved memory is not known: {str(error).partition(chr(10))[0]}", False
        step(Recorder())  # compiles and tunes kernels, which a capture can't
        self._last, self._repeats, self._ran_without = key, repeats, self.graph is not None
        if measures:
            self._of_step = torch.cuda.memory_reserved(device)
        elif self._mode == "auto" and self.graph is None and steps_left == 1:
            torch.cuda.empty_cache()  # so that the next passes reserve only what they need

    def _capture(self, key: StepKey, step: Callable[[Recorder], None], device: torch.device) -> str | None:
        """Capture the step without running it. If there is no graph afterwards, nothing has changed.

        Returns:
            The failure, if the capture failed. A graph that needs too much memory is no failure.
        """
        self.forget()  # two graphs at a time would need twice the memory
        self._num_captures += 1
        if self._num_captures > 1 and self._mode == "auto":  # steps that alternate must not be captured again and again
            self._steps_before *= 2
        failure = None
        try:
            segments = self._make_segments(device)
            recorder = GraphRecorder(segments)
            recorder.record(step)
            self._refusal = self._excess(segments.num_bytes) if self._mode == "auto" else None
            if self._refusal is None:
                self.graph, self._key = recorder, key
                return None
            del segments, recorder
        except Exception as error:
            failure = f"the capture failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._refusal = failure
        gc.collect()  # the traceback of the error may have left tensors of the pool in cycles
        torch.cuda.empty_cache()
        return failure

    def _excess(self, pool: int) -> str | None:
        """Return why a graph that keeps `pool` bytes reserved needs too much memory; None if it does not."""
        needed = self._of_passes + pool
        if needed <= max(MEMORY_LIMIT * self._of_step, self._of_step + SMALL_POOL):
            return None
        return (
            f"it would keep {format_bytes(pool)} reserved, and the reserved memory of a training step would grow from "
            f"{format_bytes(self._of_step)} to {format_bytes(needed)}; pass cuda_graph=True to accept this"
        )


def capture_obstacle(
    records: Sequence[ParameterRecord], inputs: StepInputs, unfusable: Mapping[int, str]
) -> str | None:
    """Return why a step with these parameters can't be captured, with the name of one of them; None if it can.

    Args:
        records: one per parameter.
        inputs: the tensors and options of the step.
        unfusable: positions whose weights kernels can't multiply by factors, and why.
    """
    devices = {shard.device for shard in inputs.shards}
    for record in records:
        reason = _obstacle(record, inputs) or unfusable.get(record.position)
        if reason is None and len(devices) > 1:
            reason = f"parameters lie on several devices: {', '.join(sorted(map(str, devices)))}"
        if reason is not None:
            return f"parameter {record.name!r}: {reason}"
    return None


def _obstacle(record: ParameterRecord, inputs: StepInputs) -> str | None:
    """Return why one parameter can't be part of a captured step, or None."""
    rule, grad = record.rule, record.tensor.grad
    if rule.fused is None:
        return f"its rule {rule.name!r} has no kernels for prepare and apply"
    shard, state = inputs.shards[record.position], inputs.states[record.position]
    unread = unread_form(record)
    if unread is not None:
        return unread
    reason = not_fusable(shard, stored_tensors(record, state))
    if reason is None and shard.device.type != "cuda":  # kernels may run elsewhere, in Triton's interpreter
        reason = f"CUDA graphs need a GPU, and it is on {shard.device.type!r}"
    if reason is None and grad is not None and grad.dtype not in FUSED_DTYPES:
        reason = f"its gradient is {grad.dtype}"
    return reason or rule.not_capturable(inputs.groups[record.group_index])
