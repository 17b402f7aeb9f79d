"""Capture a step as a CUDA graph after it has run eagerly once, and replay it as long as its key does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from muon_fsdp.comm.transfers import local
from muon_fsdp.kernels.recorder import GraphRecorder, Recorder
from muon_fsdp.kernels.tables import FUSED_DTYPES
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.step.fused import not_fusable
from muon_fsdp.step.inputs import StepInputs


class CapturedStep:
    """The CUDA graph of a step, and the key of the step that it was captured for."""

    def __init__(self) -> None:
        self.graph: GraphRecorder | None = None
        self._key: object = None

    def forget(self) -> None:
        """Drop the graph: it holds addresses of tensors that were replaced."""
        self.graph = self._key = None

    def run(
        self,
        key: object,
        step: Callable[[Recorder], None],
        device: Callable[[], torch.device],
        check: Callable[[], None],
        rules: Iterable[str],
    ) -> None:
        """Replay the step, or capture it if it has run eagerly with the same key, or run it eagerly.

        Args:
            key: what the graph depends on.
            step: runs the step with a recorder, which records the calls that must come from the host.
            device: returns the device of the graph.
            check: raises if some parameter can't be captured; called before a step with a new key.
            rules: the names of the rules in use, for an error.
        """
        if self._key != key:
            check()
            self.graph, self._key = None, key
            step(Recorder())  # compiles and tunes kernels, which a capture can't
        elif self.graph is not None:
            self.graph.replay()
        else:
            recorder = GraphRecorder(device())
            try:
                recorder.record(lambda: step(recorder))
            except Exception as error:
                names = ", ".join(sorted(map(repr, set(rules))))
                reason = str(error).partition("\n")[0]
                raise RuntimeError(
                    f"cuda_graph=True can't capture the step: an operation of one of the rules {names} can't be "
                    f"captured ({reason}). Leave cuda_graph out, or avoid what makes the host wait for the GPU."
                ) from error
            self.graph = recorder


def check_capturable(records: Sequence[ParameterRecord], inputs: StepInputs, unfusable: Mapping[int, str]) -> None:
    """Raise if some parameter can't be part of a captured step, naming it and the reason.

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
            raise RuntimeError(
                f"cuda_graph=True can't capture the step: parameter {record.name!r}: {reason}. Leave cuda_graph out."
            )


def _obstacle(record: ParameterRecord, inputs: StepInputs) -> str | None:
    """Return why one parameter can't be part of a captured step, or None."""
    rule, grad = record.rule, record.tensor.grad
    if rule.fused is None:
        return f"its rule {rule.name!r} has no kernels for prepare and apply"
    state = inputs.states[record.position]
    reason = not_fusable(inputs.shards[record.position], [local(state[name]) for name in rule.fused.layout.states])
    if reason is None and grad is not None and grad.dtype not in FUSED_DTYPES:
        reason = f"its gradient is {grad.dtype}"
    return reason or rule.not_capturable(record.group)
