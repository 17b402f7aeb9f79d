"""Note what something depends on, and find out later whether it has changed.

| what has changed | who must react |
|---|---|
| parameters (identity, dtype, device, shape), planned options of groups | the plan: `plan_key` |
| tensors of state (identity, device, dtype, size) | missing or damaged state, lists of fused launches: `StateTensors` |
| addresses of observed and gathered weights, of per-matrix state | the graph, copies of that state: `addresses_of` |
| what a stage has read in backward: gradients, state, options | the round: `Arrival`, `NotedState`, `NotedOptions` |
| per-matrix state that a user has written | the agreement, in which ranks compare it: `NotedState` |

PyTorch counts changes to a tensor, but not all of them: `torch.nn.utils.clip_grad_norm_` changes the gradients of FSDP2
on a CPU without being counted. On a CPU values are therefore copied and compared. On a GPU a comparison would make the
host wait, so there the counts decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muon_fsdp.comm.dtensors import local
from muon_fsdp.declarations.state import State
from muon_fsdp.rules import RULES


def plan_key(groups: Sequence[Mapping[str, Any]]) -> object:
    """Return a key that changes whenever a new plan is needed; None if a group has no valid rule."""
    rules = [RULES.get(group.get("rule", "")) for group in groups]
    if None in rules:
        return None
    options = [
        (rule, len(group["params"]), *[group.get(name) for name in rule.plan_names])
        for rule, group in zip(rules, groups, strict=True)
        if rule is not None
    ]
    return options, [(id(p), p.dtype, p.device, p.shape) for group in groups for p in group["params"]]


class StateTensors:
    """The tensors of state at the last step: which they are, their devices, dtypes and sizes."""

    def __init__(self) -> None:
        self._tensors: Sequence[ReferenceType[Tensor]] = ()  # weak: state that is moved to the CPU frees its memory
        self._forms: object = ()
        self._sharded: Sequence[int] = ()  # the indices of DTensors among them

    def have_changed(self, states: Mapping[int, State]) -> bool:
        """Return whether some tensor was added, dropped, replaced or moved since the last call of `accept`."""
        now = _tensors(states)
        if len(now) != len(self._tensors) or not all(map(is_, now, [known() for known in self._tensors])):
            return True
        # Assigning to `data` moves a tensor or changes its size. A DTensor does not notice this of its local tensor.
        return self._forms_of(now) != self._forms

    def accept(self, states: Mapping[int, State]) -> None:
        """Remember these tensors."""
        now = _tensors(states)
        self._sharded = [index for index, value in enumerate(now) if isinstance(value, DTensor)]
        self._tensors, self._forms = [ref(value) for value in now], self._forms_of(now)

    def _forms_of(self, tensors: Sequence[Tensor]) -> object:
        """Return the numbers of the devices, the dtypes and the sizes of tensors; of a DTensor, its local tensor."""
        tensors = list(tensors)
        for index in self._sharded:
            tensors[index] = local(tensors[index])
        return list(map(Tensor.get_device, tensors)), [t.dtype for t in tensors], list(map(Tensor.numel, tensors))


def _tensors(states: Mapping[int, State]) -> list[Tensor]:
    """Return all tensors of state; others may keep numbers there."""
    return [value for state in states.values() for value in state.values() if isinstance(value, Tensor)]


def addresses_of(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Return the addresses of tensors, which a captured step keeps."""
    return tuple([tensor.data_ptr() for tensor in tensors])


class Arrival:
    """A gradient as it was when backward had reduced it. On a CPU its values are copied when they are used.

    Args:
        part: the local gradient.
        before: `p.grad`, if it will have this gradient at the end of backward only, as under DDP.
    """

    def __init__(self, part: Tensor, before: Tensor | None = None) -> None:
        self._part, self._event = part, _event(part)
        self._before = (before, _stamp(before)) if before is not None else None
        self._copy: Tensor | None = None
        self._was_read = False
        self._grad: Tensor | None = None  # `p.grad`, once it has this gradient; kept alive as long as this object
        self._own, self._stamp = part, _stamp(part)

    @property
    def dtype(self) -> torch.dtype:
        return self._part.dtype

    def write(self, grad: Tensor | None) -> bool:
        """Note that `p.grad` has this gradient from now on. If nobody has read it elsewhere, it is read there.

        Returns:
            Whether that is so. DDP does not write the gradient of a parameter that no rank has used.
        """
        if grad is None:
            return False
        own, stamp = local(grad), _stamp(grad)
        is_elsewhere = own.data_ptr() != self._part.data_ptr()
        if is_elsewhere and self._before is not None and self._before[0] is grad and self._before[1] == stamp:
            return False
        if is_elsewhere and not self._was_read:
            self._part, self._event = own, _event(own)
        self._grad, self._own, self._stamp = grad, own, stamp
        return True

    def read(self) -> Tensor:
        """Return the local gradient. On a GPU the current stream waits for it; on a CPU it is a copy."""
        self._was_read = True
        if self._event is None:
            self._copy = self._part.clone()
            return self._copy
        stream = torch.cuda.current_stream(self._part.device)
        stream.wait_event(self._event)
        self._part.record_stream(stream)  # the user may drop it while this stream still reads it
        return self._part

    def is_unchanged(self, grad: Tensor | None) -> bool:
        """Return whether `grad`, the present gradient, is the one that was read, or will be read, with its values."""
        if grad is None or grad is not self._grad or local(grad) is not self._own:
            return False
        if self._event is not None:
            return _stamp(grad) == self._stamp
        return self._copy is None or _are_equal(self._copy, self._own)


def _event(part: Tensor) -> Any:
    """Return a CUDA event after which the current stream has written a tensor; None on a CPU."""
    if not part.is_cuda:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(part.device))
    return event


class _Seen:
    """A tensor of state or an option, as it was. As for gradients, its values are compared later on a CPU.

    Args:
        tensor: the tensor.
        by_values: whether they are, if it is on a CPU. State of a parameter on a GPU is large, and kept on the host.
    """

    def __init__(self, tensor: Tensor, *, by_values: bool = True) -> None:
        self._tensor, self._stamp = ref(tensor), _stamp(tensor)  # weak: state that is moved to the CPU frees its memory
        part = local(tensor)
        self._values = part.clone() if by_values and part.device.type == "cpu" else None

    def is_unchanged(self, now: object) -> bool:
        """Return whether `now` is this tensor, with the values that it had."""
        if not isinstance(now, Tensor) or now is not self._tensor() or _stamp(now) != self._stamp:
            return False
        return self._values is None or _are_equal(self._values, local(now))


class NotedState:
    """Tensors of state as they were.

    Args:
        states: the stored tensors of each parameter by position.
        by_values: as in `_Seen`.
    """

    def __init__(self, states: Mapping[int, State], *, by_values: bool = True) -> None:
        self._noted = {
            # A copy of the dict: the user may clear it in another thread.
            position: {
                name: _Seen(value, by_values=by_values)
                for name, value in dict(state).items()
                if isinstance(value, Tensor)
            }
            for position, state in states.items()
        }

    def is_current(self, states: Mapping[int, State]) -> bool:
        """Return whether these are the same tensors, unchanged."""
        for position, noted in self._noted.items():
            now = {name: value for name, value in states[position].items() if isinstance(value, Tensor)}
            if now.keys() != noted.keys():
                return False
            if not all(seen.is_unchanged(now[name]) for name, seen in noted.items()):
                return False
        return True


class NotedOptions(Mapping[str, Any]):
    """The options of a parameter group, which notes those that are read.

    Args:
        group: the parameter group.
    """

    def __init__(self, group: Mapping[str, Any]) -> None:
        self._group = group
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        value = self._group[name]
        self._read[name] = _Seen(value) if isinstance(value, Tensor) else value
        return value

    def __iter__(self) -> Any:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)

    def forget(self, *names: str) -> None:
        """Remove the notes that these options have been read."""
        for name in names:
            self._read.pop(name, None)

    def is_current(self, group: Mapping[str, Any]) -> bool:
        """Return whether this is the group, with the same values of all options that were read."""
        if group is not self._group:  # options that have not been read yet will be read in the old one
            return False
        for name, value in list(self._read.items()):  # the thread may read further ones meanwhile
            now = group.get(name)
            if isinstance(value, _Seen):
                is_same = value.is_unchanged(now)
            else:
                is_same = not isinstance(now, Tensor) and now == value
            if not is_same:
                return False
        return True


def _stamp(tensor: Tensor) -> tuple[int, ...]:
    """Return numbers that differ after a tensor has been written to or moved, if PyTorch counts the change.

    A change through a DTensor is counted there, and one of its local tensor in that.
    """
    part = local(tensor)
    versions = [0 if each.is_inference() else each._version for each in (tensor, part)]
    return (*versions, part.data_ptr())


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same precision, device and values."""
    return first.dtype is second.dtype and first.device == second.device and torch.equal(first, second)
