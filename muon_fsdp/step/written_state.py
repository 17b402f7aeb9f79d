"""Notice per-matrix state that users have written between two steps, so that ranks compare it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from muon_fsdp.declarations.state import State
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.step.changes import NotedState
from muon_fsdp.step.replica_check import States
from muon_fsdp.step.shared_sets import Written


class WrittenState:
    """The per-matrix state of matrices that several ranks hold, as the last step left it.

    Rules change it on one rank, and all ranks get the result. What a user writes reaches one rank only. On a CPU values
    are compared; on a GPU, where the host would wait for them, what PyTorch counts as a change.

    Args:
        records: one per parameter.
    """

    def __init__(self, records: Sequence[ParameterRecord]) -> None:
        self._records = [r for r in records if len(r.layout.ranks) > 1 and r.rule.matrix_state]
        self._noted: NotedState | None = None

    def note(self, states: States) -> None:
        """Note the state that all ranks have now."""
        self._noted = NotedState(self._now(states))

    def has_changed(self, states: States) -> bool:
        """Return whether somebody has written state since the last call of `note`, or created it before the first."""
        now = self._now(states)
        return any(now.values()) if self._noted is None else not self._noted.is_current(now)

    def texts(self, states: States) -> Written:
        """Return the state as text, by position of the parameter and name; equal bits give equal texts."""
        texts: dict[int, dict[str, str]] = {}
        for position, state in self._now(states).items():
            for name, tensor in state.items():
                values = tensor.detach().cpu().contiguous()
                first = ", ".join(f"{float(value):.6g}" for value in values[:4])
                checksum = zlib.crc32(values.view(torch.uint8).numpy().tobytes())
                more = f", ... (checksum {checksum:08x})" if len(values) > 4 else ""
                texts.setdefault(position, {})[name] = f"[{first}{more}]"
        return texts

    def _now(self, states: States) -> dict[int, State]:
        """Return the per-matrix state that exists, by position."""
        found: dict[int, State] = {}
        for record in self._records:
            state = states.get(record.tensor, {})
            names = [spec.name for spec in record.rule.matrix_state]
            found[record.position] = {name: state[name] for name in names if isinstance(state.get(name), Tensor)}
        return found
