"""Collect what rules raise during a step, so that it is raised after all transfers that other ranks wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from muon_fsdp.comm.process_groups import my_rank
from muon_fsdp.comm.recorder import Recorder
from muon_fsdp.text import first_names


class Failures:
    """The errors of rules in one step on this rank, with updates that are not finite where that is an error.

    Args:
        names: the names of all parameters.
        others_wait: whether other ranks wait for transfers of this one. If not, an error is raised at once.
        is_recorded: whether the step is being recorded for a CUDA graph, in which no value can be read.
    """

    def __init__(self, names: Sequence[str] = (), *, others_wait: bool = False, is_recorded: bool = False) -> None:
        self._names = names
        self._others_wait, self.is_recorded = others_wait, is_recorded
        self.rules: set[str] = set()  # that have failed before the stages: nothing of them is applied
        self.text = ""  # of the first failure, as other ranks are told about it
        self._first: Exception | None = None
        self._flags: list[Tensor] = []
        self._texts: list[str] = []

    def add(self, rule: str, method: str, error: Exception, positions: Iterable[int]) -> None:
        """Note that a method of a rule has failed.

        Args:
            rule: the name of the rule.
            method: the name of the method.
            error: what it has raised.
            positions: the parameters that this rank does not update because of it.
        """
        if not self._others_wait:
            raise error
        if self._first is None:
            self._first = error
            self.text = (
                f"step was applied in part: {method} of rule {rule!r} failed on rank {my_rank()} with "
                f"{type(error).__name__}: {error}. Rank {my_rank()} has not updated {self.names_of(positions)}, and "
                "other ranks got zeros for the matrices that it computes. Correct the rule, and resume all ranks from "
                "a checkpoint"
            )

    def names_of(self, positions: Iterable[int]) -> str:
        """Return the names of some parameters, for an error."""
        return first_names([self._names[position] for position in sorted(set(positions))])

    def postpone(self, update: Tensor, rule: str, names: str) -> bool:
        """Note an update, to check later that it is finite, if no value can be read now; return whether that is so."""
        if self.is_recorded:
            self._flags.append(torch.linalg.vector_norm(update, ord=torch.inf).isfinite())
            self._texts.append(f"direction of rule {rule!r} left an update of {names} that is not finite")
        return self.is_recorded

    def end(self, recorder: Recorder, current: Callable[[], Failures]) -> None:
        """Read what was postponed at the end of every replay. The host waits for the device there.

        Args:
            recorder: records the step.
            current: returns the failures of the step that is replayed.
        """
        if not self._flags:
            return
        flags, texts = torch.stack(self._flags), self._texts

        def read() -> None:
            for text, is_finite in zip(texts, flags.tolist(), strict=True):
                if not is_finite:
                    current()._add_late(text)

        recorder.host(read)

    def _add_late(self, text: str) -> None:
        """Note an update that is not finite and was applied."""
        error = ValueError(f"{text}, though gradients are finite. It was applied: resume from a checkpoint")
        if not self._others_wait:
            raise error
        if self._first is None:
            self._first, self.text = error, f"step was not applied rightly: {error}"

    def error(self) -> Exception | None:
        """Return the error that `step()` raises at its end; None if nothing has failed."""
        if self._first is None:
            return None
        error = RuntimeError(f"This {self.text}")
        error.__cause__ = self._first
        return error
