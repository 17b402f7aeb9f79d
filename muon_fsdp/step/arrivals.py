"""Note the gradients that arrive in backward, and find out later whether they have changed since."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muon_fsdp.comm.bucket_hook import Listener, listen
from muon_fsdp.comm.dtensors import is_replica, local
from muon_fsdp.declarations.state import State
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.parameters.wrappers import ddp_wrappers


class Receiver(Listener, Protocol):
    """An object that is told about gradients, by FSDP2 or autograd one by one, and by DDP bucket by bucket."""

    def arrived(self, position: int, parameter: Tensor) -> None:
        """Note that backward has written the gradient of a parameter."""


def watch(records: Iterable[ParameterRecord], receiver: Receiver) -> None:
    """Call `receiver.arrived` in backward whenever the gradient of a parameter is complete, as long as it exists.

    FSDP2 calls these hooks after it has reduced the gradient, on the stream of the reduction. They must not launch
    anything there, because later reductions would wait for it.
    """
    known = weakref.ref(receiver)

    def hook_of(position: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            alive = known()
            if alive is not None:
                alive.arrived(position, parameter)

        return hook

    handles = []
    for record in records:
        hook = hook_of(record.position)
        handles.append(record.tensor.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
    weakref.finalize(receiver, _remove, handles)


def watch_replicas(records: Sequence[ParameterRecord], receiver: Receiver) -> dict[int, str]:
    """Tell the receiver about the gradients of plain tensors in a job of several ranks, which DDP reduces.

    A hook on such a parameter is called before its gradient is reduced.

    Returns:
        By position, why the receiver is not told about a gradient.
    """
    if not records:
        return {}
    found: dict[int, str | None] = dict.fromkeys(
        (record.position for record in records),
        "no DistributedDataParallel wraps a plain tensor, so its gradient may be reduced after backward",
    )
    for wrapper, ids in ddp_wrappers(record.tensor for record in records):
        obstacle = listen(wrapper, receiver)
        for record in records:
            if id(record.tensor) in ids:
                found[record.position] = obstacle or _unlike_bucket(record.tensor)
    return {position: reason for position, reason in found.items() if reason is not None}


def _unlike_bucket(parameter: Tensor) -> str | None:
    """Return why a bucket of DDP does not have the gradient of a parameter as `p.grad` will have it; None if it does.

    `GradBucket.gradients` returns the elements in the order of memory.
    """
    if not is_replica(parameter):
        return "DistributedDataParallel was told to ignore a parameter"
    return None if parameter.is_contiguous() else "a parameter is not contiguous"


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def is_usable(parameter: Tensor, grad: Tensor | None) -> bool:
    """Return whether a gradient can be read in backward: dense, complete, and in the layout of its parameter."""
    if grad is None or grad.layout != torch.strided:
        return False
    if isinstance(parameter, DTensor) and not (isinstance(grad, DTensor) and grad.placements == parameter.placements):
        return False
    return type(local(grad)) in (Tensor, nn.Parameter)  # an AsyncCollectiveTensor is still being reduced


class Arrival:
    """A gradient as it was when backward had reduced it.

    On a CPU its values are copied when they are used, and compared later. PyTorch counts changes to a tensor, but not
    all of them: `torch.nn.utils.clip_grad_norm_` changes the gradients of FSDP2 on a CPU without being counted. On a
    GPU a comparison would make the host wait, so there the counts decide.

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
    """A tensor of state or an option, as it was when a stage has read it.

    As for gradients, its values are compared later, except on a GPU.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._stamp = tensor, _stamp(tensor)
        part = local(tensor)
        self.values = part if part.is_cuda else part.clone()

    def is_unchanged(self, now: object) -> bool:
        """Return whether `now` is this tensor, with the values that it had."""
        if now is not self._tensor or _stamp(self._tensor) != self._stamp:
            return False
        part = local(self._tensor)
        return part.is_cuda or _are_equal(self.values, part)


class StateCopies:
    """Copies of the state of some parameters, which `prepare` may change, and the tensors that they were made from.

    Args:
        states: the state of each parameter by position.
        shards: the local part of every parameter.
    """

    def __init__(self, states: Mapping[int, State], shards: Mapping[int, Tensor]) -> None:
        self._sources = {
            # A copy of the dict: the user may clear it in another thread.
            position: {name: _Seen(value) for name, value in dict(state).items() if isinstance(value, Tensor)}
            for position, state in states.items()
        }
        self.copies: dict[int, State] = {
            position: {name: _copied(seen.values, shards[position].device) for name, seen in state.items()}
            for position, state in self._sources.items()
        }

    def are_current(self, states: Mapping[int, State]) -> bool:
        """Return whether these states are the tensors that were copied, unchanged."""
        for position, sources in self._sources.items():
            now = {name: value for name, value in states[position].items() if isinstance(value, Tensor)}
            if now.keys() != sources.keys():
                return False
            if not all(seen.is_unchanged(now[name]) for name, seen in sources.items()):
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

    def are_current(self, group: Mapping[str, Any]) -> bool:
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


def _copied(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor of state. If it was moved off the device, kernels could not read it there."""
    if value.ndim == 0 or value.device == device:
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream(value.device))
        return value.clone()
    return value.to(device)
