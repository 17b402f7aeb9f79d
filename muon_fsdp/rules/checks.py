"""Check what the methods of a rule return and write, so that a mistake names the rule and what to do instead."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real

import torch
from torch import Tensor

from muon_fsdp.declarations.state import PerMatrix, State
from muon_fsdp.rules.base import MatrixBatch, Rule, shown


class GivenStates:
    """The states that `prepare` or `apply` gets, and those of the optimizer, into which the results belong.

    Args:
        rule: the rule.
        method: "prepare" or "apply".
        states: the local state of every parameter.
    """

    def __init__(self, rule: Rule, method: str, states: Sequence[State]) -> None:
        self._rule, self._method, self._states = rule, method, states
        self.copies: list[State] = [dict(state) for state in states]
        self._declared = {spec.name for spec in rule.all_state}
        self._of_matrices = [spec.name for spec in rule.all_state if isinstance(spec, PerMatrix)]
        self._versions = [self._versions_of(state) for state in states]

    def _versions_of(self, state: State) -> list[int]:
        return [0 if state[name].is_inference() else state[name]._version for name in self._of_matrices]

    def take(self) -> None:
        """Copy tensors that the method has replaced into the state; raise if it has written what would be lost."""
        for state, left, versions in zip(self._states, self.copies, self._versions, strict=True):
            for name in left.keys() | state.keys():
                if left.get(name) is state.get(name):
                    continue
                if name not in self._declared:
                    raise ValueError(
                        f"rule {self._rule.name!r}: {self._method} writes the state {name!r}, which it does not "
                        f"declare, so that no checkpoint would load it: add PerParameter({name!r}) to `state`"
                    )
                self._replace(name, state[name], left.get(name))
            if self._versions_of(state) != versions:
                self._refuse_matrix_state(self._of_matrices)

    def _replace(self, name: str, tensor: Tensor, value: object) -> None:
        if name in self._of_matrices:
            self._refuse_matrix_state([name])
        if not isinstance(value, Tensor) or value.shape != tensor.shape:
            raise ValueError(
                f"rule {self._rule.name!r}: {self._method} must leave a tensor of shape {tuple(tensor.shape)} in the "
                f"state {name!r}, got {shown(value)}"
            )
        tensor.copy_(value)

    def _refuse_matrix_state(self, names: Sequence[str]) -> None:
        raise ValueError(
            f"rule {self._rule.name!r}: {self._method} writes the per-matrix state {', '.join(map(repr, names))}, "
            "where it would be lost: change it in direction or factors"
        )


def checked_prepared(rule: Rule, prepared: object, shards: Sequence[Tensor]) -> list[Tensor]:
    """Return what `prepare` has returned as a list; raise unless it has one tensor per shard, of the same shape."""
    where = f"rule {rule.name!r}: prepare must return a list of {len(shards)} tensors, one per parameter"
    if isinstance(prepared, Tensor) or not isinstance(prepared, Iterable):
        raise TypeError(f"{where}, got {shown(prepared)}")
    listed = list(prepared)
    if len(listed) != len(shards):
        raise ValueError(f"{where}, got {len(listed)}")
    for value, shard in zip(listed, shards, strict=True):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise TypeError(f"{where}, in floating point, got {shown(value)}")
        if value.shape != shard.shape:
            raise ValueError(
                f"{where}, of its local shape: for {tuple(shard.shape)} it returned {tuple(value.shape)}. A norm of a "
                "shard is not that of its parameter: declare a statistic, or define direction"
            )
    return listed


def check_returned(rule: Rule, method: str, returned: object) -> None:
    """Raise if `direction` or `directions` has returned something."""
    if returned is not None:
        raise TypeError(
            f"rule {rule.name!r}: {method} must write the update and return None, but it returned {shown(returned)}: "
            "assign it to batch.update"
        )


def check_direction(rule: Rule, batch: MatrixBatch) -> None:
    """Raise if `direction` has written what the rule does not declare, or wrote no update."""
    check_names(rule, batch.state, batch.diagnostics)
    if not batch.is_touched:
        raise ValueError(f"rule {rule.name!r}: direction has not written batch.update: assign the update to it")


def check_generators(rule: Rule, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Raise if `direction` has drawn from torch's generators, which differ between ranks, given their states."""
    if not all(map(torch.equal, before, after)):
        raise RuntimeError(
            f"rule {rule.name!r}: direction draws random numbers from torch's generator, and several ranks compute the "
            "same matrix: each would get others. Draw them with batch.random(*shape)"
        )


def check_names(rule: Rule, state: Collection[str], diagnostics: Collection[str]) -> None:
    """Raise if `direction` or `factors` has left state or diagnostics that the rule does not declare."""
    declared = [spec.name for spec in rule.matrix_state]
    for name in state:
        if name not in declared:
            raise ValueError(
                f"rule {rule.name!r} writes the per-matrix state {name!r}, which it does not declare: add "
                f"PerMatrix({name!r}, kind) to `state`"
            )
    for name in diagnostics:
        if name not in rule.diagnostics:
            raise ValueError(
                f"rule {rule.name!r} writes diagnostics[{name!r}], which it does not declare: add {name!r} to "
                "`diagnostics`"
            )


def checked_factors(rule: Rule, returned: object) -> tuple[Tensor | float, Tensor | float]:
    """Return the two factors that `factors` has returned; raise if it has returned something else."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise TypeError(
            f"rule {rule.name!r}: factors must return two factors (f, g) for W <- f W - lr g U, got "
            f"{shown(returned)}: return 1.0 for one that has no effect"
        )
    for factor in returned:
        if not isinstance(factor, (Tensor, Real)):
            raise TypeError(
                f"rule {rule.name!r}: each of the two factors must be a number or a tensor, got {shown(factor)}"
            )
    return returned[0], returned[1]


def check_applied(rule: Rule, returned: object) -> None:
    """Raise if `apply` has returned something: it must change the parameters in place."""
    if returned is not None:
        raise TypeError(
            f"rule {rule.name!r}: apply must change the tensors of `params` in place and return None, but it returned "
            f"{shown(returned)}: use p.copy_(...) or torch._foreach_copy_"
        )


def checked_metrics(rule: Rule, returned: object) -> Mapping[str, float]:
    """Return the numbers that `metrics` has returned; raise if it has returned something else."""
    if not isinstance(returned, Mapping):
        raise TypeError(f"rule {rule.name!r}: metrics must return a dict of numbers, got {shown(returned)}")
    return returned


def finite_matrices(batch: MatrixBatch) -> Tensor:
    """Return which matrices of a batch are finite, (B,)."""
    # The largest elements are not finite if any is not, and take no memory, unlike a mask of all elements.
    largest: Tensor = torch.linalg.vector_norm(batch.matrices, ord=torch.inf, dim=(-2, -1))
    return largest.isfinite()


def finite_error(
    rule: Rule, batch: MatrixBatch, finite: Tensor | None, names: str, *, is_first: bool
) -> Exception | None:
    """Return an error if some update of a batch is not finite; None if all are. The host waits for the device.

    Args:
        rule: the rule.
        batch: the batch after `direction`.
        finite: what `finite_matrices` returned before `direction`, if that may have overwritten the matrices.
        names: the names of its parameters.
        is_first: whether the update was filled with NaN before the call. Then NaN counts only where the matrix itself
            is finite, because a gradient that is not finite may be passed on.
    """
    largest = torch.linalg.vector_norm(batch.result, ord=torch.inf, dim=(-2, -1))
    wrong = largest.isnan() if is_first else ~largest.isfinite()
    if wrong.is_meta or not bool(wrong.any()):
        return None
    if bool((wrong & (finite_matrices(batch) if finite is None else finite)).any()):
        return ValueError(
            f"rule {rule.name!r}: direction left an update of {names} that is not finite, though its matrices are: "
            "write all elements of batch.update, and check what may divide by zero or overflow"
        )
    if is_first:
        return None
    return ValueError(f"rule {rule.name!r}: what prepare returned for {names} is not finite, though its gradients are")
