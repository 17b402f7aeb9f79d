"""Notice per-matrix state that users have written between two steps, so that ranks compare it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.step.shared_sets import Written

States: TypeAlias = Mapping[Tensor, Mapping[str, Any]]


class WrittenState:
    """The per-matrix state of matrices that several ranks hold, as the last step left it.

    Rules change it on one rank, and all ranks get the result. What a user writes reaches one rank only. On a CPU values
    are compared; on a GPU, where the host would wait for them, what PyTorch counts as a change.

    Args:
        records: one per parameter.
    """

    def __init__(self, records: Sequence[ParameterRecord]) -> None:
        self._places = [
            (record, spec.name)
            for record in records
            if len(record.layout.ranks) > 1
            for spec in record.rule.matrix_state
        ]
        self._noted: list[object] = []

    def note(self, states: States) -> None:
        """Note the state that all ranks have now."""
        self._noted = [_stamp(tensor, copies=True) for _, _, tensor in self._tensors(states)]

    def has_changed(self, states: States) -> bool:
        """Return whether somebody has written state since the last call of `note`, or created it before the first."""
        now = [tensor for _, _, tensor in self._tensors(states)]
        if len(now) != len(self._noted):
            return bool(now)
        for tensor, noted in zip(now, self._noted, strict=True):
            if isinstance(noted, Tensor):
                if tensor.dtype != noted.dtype or tensor.device != noted.device or not torch.equal(tensor, noted):
                    return True
            elif _stamp(tensor, copies=False) != noted:
                return True
        return False

    def texts(self, states: States) -> Written:
        """Return the state as text, by position of the parameter and name; equal bits give equal texts."""
        texts: dict[int, dict[str, str]] = {}
        for record, name, tensor in self._tensors(states):
            values = tensor.detach().cpu().contiguous()
            first = ", ".join(f"{float(value):.6g}" for value in values[:4])
            checksum = zlib.crc32(values.view(torch.uint8).numpy().tobytes())
            more = f", ... (checksum {checksum:08x})" if len(values) > 4 else ""
            texts.setdefault(record.position, {})[name] = f"[{first}{more}]"
        return texts

    def _tensors(self, states: States) -> Iterator[tuple[ParameterRecord, str, Tensor]]:
        for record, name in self._places:
            tensor = states.get(record.tensor, {}).get(name)
            if isinstance(tensor, Tensor):
                yield record, name, tensor


def _stamp(tensor: Tensor, *, copies: bool) -> object:
    """Return a copy of a tensor on the CPU; else numbers that differ after it was replaced or written to."""
    if copies and tensor.device.type == "cpu":
        return tensor.detach().clone()
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
