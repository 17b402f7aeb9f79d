"""Define the result of a stage that runs beside backward, and who keeps it until `step()`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from muon_fsdp.declarations.option import PlannedOptions
from muon_fsdp.plan.stages import Member, Stage
from muon_fsdp.rules import MatrixBatch
from muon_fsdp.step.matrix_state import LeftNumbers
from muon_fsdp.step.metrics import Sample


class EarlyResult(NamedTuple):
    """The result of a stage that ran beside backward.

    Args:
        buffer: the updates, (stage.shard_numel,); the gathered units, (stage.unit_numel,), if the rule needs weights.
        numbers: by number of the batch, what `direction` has left; empty if the rule needs weights.
        samples: the samples that were taken for `metrics()`.
        failure: the method of the rule that failed and what it raised; None if all is well.
    """

    buffer: Tensor
    numbers: Mapping[int, LeftNumbers]
    samples: Mapping[tuple[int, int], Sample]
    failure: tuple[str, Exception] | None = None


class BatchNumbers(Protocol):
    """Gives per-matrix state to batches, and takes what `direction` leaves."""

    def place(self, stage: Stage, batch_number: int, members: Sequence[Member]) -> Any:
        """Return where the numbers of some members of a batch are."""

    def batch(
        self, options: PlannedOptions, place: Any, matrices: Tensor, update: Tensor, inverse_norms: Tensor | None
    ) -> MatrixBatch:
        """Return the batch that `direction` gets for the matrices at a place."""

    def take(self, stage: Stage, number: int, place: Any, left: LeftNumbers) -> None:
        """Keep what `direction` has left for a batch."""


class Keeper(Protocol):
    """Keeps the results of stages that run beside backward, until `step()` uses them."""

    @property
    def numbers(self) -> BatchNumbers:
        """Return the per-matrix state of these stages."""

    def keep(self, stage: Stage, buffer: Tensor) -> None:
        """Keep the updates or the gathered units of a stage."""

    def fail(self, stage: Stage, method: str, error: Exception) -> None:
        """Note that a stage has no result, because a method of its rule has raised an error."""
