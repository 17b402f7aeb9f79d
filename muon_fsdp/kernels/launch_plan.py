"""Repeat the launches of a computation for other tensors of the same shapes, with little host time.

Python takes tens of microseconds to prepare a launch: it selects a kernel, computes its arguments, and describes every
tensor to the bulk copy engine. All of this depends only on shapes and addresses. So a launch plan notes the launches
of a computation once. Later calls write the addresses of their tensors into the noted arguments and launch.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from muon_fsdp.kernels.launch import (
    Address,
    DirectLauncher,
    Launch,
    RecordedLaunches,
    TiledTensor,
    current_stream,
    has_hooks,
    is_recording,
    record_launches,
)

# Calls that compile kernels or copy tables to the device can't be planned, so the next call is recorded too. If
# something besides our kernels still runs after this many calls, it always will.
MOST_ATTEMPTS = 4
MOST_PLANS = 512  # a plan takes tens of kilobytes of host memory
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

_plans: dict[Hashable, LaunchPlan | int] = {}  # or the number of attempts to make one
_permanent: dict[int, Tensor] = {}  # by address: tensors that plans need not find again
_is_usable = True  # whether `DirectLauncher` works with this version of Triton


def run_planned(key: Hashable, tensors: Sequence[Tensor | None], compute: Callable[[], None]) -> None:
    """Run a computation on a GPU; once its launches are known, repeat them without running Python code.

    Args:
        key: everything besides `tensors` that the launches depend on.
        tensors: the tensors that the computation reads or writes, besides those that it allocates. Their shapes,
            strides, dtypes and alignment are part of the key.
        compute: the computation. It may launch kernels by `launch` and allocate memory.
    """
    global _is_usable
    if is_recording() or not _is_usable or has_hooks():
        compute()
        return
    bases = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    key = (key, *map(_kind, tensors, bases))
    plan = _plans.get(key, 0)
    if isinstance(plan, LaunchPlan):
        try:
            if plan.run(bases):
                return
        except (AttributeError, TypeError):  # this version of Triton differs; the computation can begin anew
            _is_usable = False
    elif plan < MOST_ATTEMPTS:
        recording = _Recording()
        with record_launches() as recorded, recording:
            compute()
        while len(_plans) >= MOST_PLANS:
            del _plans[next(iter(_plans))]
        _plans[key] = _make_plan(recorded, recording, tensors) or plan + 1
        return
    compute()


def keep_forever(tensor: Tensor) -> None:
    """Keep a tensor that does not depend on the tensors of a caller; plans may contain its address."""
    _permanent[tensor.data_ptr()] = tensor


def _kind(tensor: Tensor | None, address: int) -> Hashable:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, address % 16)


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes allocations, and whether PyTorch did anything else on a device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.allocations: list[tuple[int, int]] = []  # where each begins and ends
        self.obstacle: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in _ALLOCATIONS:
            begin = result.data_ptr()
            self.allocations.append((begin, begin + result.untyped_storage().nbytes()))
        elif not func.is_view:
            self.obstacle = name
        return result


class _Place(NamedTuple):
    """An offset in one of the regions of memory that a plan knows."""

    region: int
    offset: int


class _Regions:
    """The memory of a computation: the tensors of its caller first, then what it allocated itself.

    Allocations overlap if one was freed before the other was made. They are one region then, so a plan uses as much
    memory as the computation did.
    """

    def __init__(self, tensors: Sequence[Tensor | None], allocations: Iterable[tuple[int, int]]) -> None:
        self._begins: list[tuple[int, int, int]] = []  # begin, end and number of every region, sorted
        for number, tensor in enumerate(tensors):
            if tensor is not None:
                begin = tensor.data_ptr()
                steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                self._begins.append((begin, begin + (steps + 1) * tensor.itemsize, number))
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(allocations):
            if merged and begin < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
        self.sizes = [end - begin for begin, end in merged]
        self._begins += [(begin, end, len(tensors) + number) for number, (begin, end) in enumerate(merged)]
        self._begins.sort()

    @property
    def overlap(self) -> bool:
        """Return whether tensors of the caller share memory: an address does not say then which of them is meant."""
        return any(first[1] > second[0] for first, second in zip(self._begins, self._begins[1:], strict=False))

    def find(self, address: int) -> _Place | None:
        """Return where an address lies; None if in no region."""
        index = bisect_right(self._begins, address, key=lambda region: region[0]) - 1
        if index < 0 or address >= self._begins[index][1]:
            return None
        return _Place(self._begins[index][2], address - self._begins[index][0])


def _make_plan(
    recorded: RecordedLaunches, recording: _Recording, tensors: Sequence[Tensor | None]
) -> LaunchPlan | None:
    """Return the plan of a recorded computation; None if it can't be repeated by its launches alone."""
    if not recorded.is_repeatable or recording.obstacle is not None:
        return None
    regions = _Regions(tensors, recording.allocations)
    if regions.overlap:
        return None
    plan = LaunchPlan(regions.sizes, next(tensor.device for tensor in tensors if tensor is not None))
    try:
        for launch in recorded.launches:
            launcher = DirectLauncher(launch.compiled)
            if launcher.allocates or not plan.add(launcher, launch, regions):
                return None
    except (AttributeError, KeyError, ImportError):  # this version of Triton differs
        return None
    return plan


class _Descriptor:
    """A tensor that kernels read or write in tiles, and where the arguments that describe it are needed."""

    def __init__(self, tiled: TiledTensor, describe: Callable[[TiledTensor], list[Any]]) -> None:
        self._tiled, self._describe = tiled, describe
        self.uses: list[tuple[list[Any], int]] = []  # arguments of a launch, and where this description begins
        self.values = describe(tiled)

    def move(self, address: int) -> None:
        """Describe the tensor at another address."""
        assert isinstance(self._tiled.base, Address)
        self._tiled.base.address = address
        self.values = self._describe(self._tiled)
        for args, position in self.uses:
            args[position : position + len(self.values)] = self.values


class LaunchPlan:
    """Launches with all their arguments.

    Args:
        sizes: the bytes of every region that the computation allocates.
        device: where it allocates them.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._sizes, self._device = sizes, device
        self._bases: list[int] = []  # the addresses of all regions that the arguments contain
        self._calls: list[tuple[Callable[[int, list[Any]], object], list[Any]]] = []
        self._pointers: list[tuple[list[Any], int, _Place]] = []  # arguments, position, what it points to
        self._descriptors: dict[Hashable, tuple[_Descriptor, _Place]] = {}
        self._lock = threading.Lock()

    def add(self, launcher: DirectLauncher, launch: Launch, regions: _Regions) -> bool:
        """Add a launch.

        Returns:
            False if an argument points to memory outside of the regions.
        """
        args: list[Any] = []
        num_tiled = 0
        for arg in launch.args:
            if isinstance(arg, TiledTensor):
                place = regions.find(arg.base.data_ptr())
                if place is None:
                    return False
                descriptor = self._descriptor(arg, place, launcher, num_tiled)
                descriptor.uses.append((args, len(args)))
                args += descriptor.values
                num_tiled += 1
            elif isinstance(arg, Address):
                place = regions.find(arg.address)
                if place is not None:
                    self._pointers.append((args, len(args), place))
                elif arg.address not in _permanent:
                    return False
                args.append(arg.address)
            else:
                args.append(arg)
        self._calls.append((launcher.call(launch.programs), args))
        return True

    def _descriptor(self, tiled: TiledTensor, place: _Place, launcher: DirectLauncher, number: int) -> _Descriptor:
        """Return the description of a tensor, the same one for all launches that cut it into the same tiles."""
        key = (place, tuple(tiled.shape), tuple(tiled.strides), launcher.tiles(number))
        if key not in self._descriptors:
            self._descriptors[key] = _Descriptor(tiled, lambda moved: launcher.describe(moved, number)), place
        return self._descriptors[key][0]

    def run(self, tensors: Sequence[int]) -> bool:
        """Launch everything on the current stream, with the tensors of the caller at these addresses.

        Returns:
            False if nothing was launched, because another thread is using the plan.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            memory = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in self._sizes]
            bases = [*tensors, *(region.data_ptr() for region in memory)]
            if bases != self._bases:
                self._move(bases)
            stream = current_stream()
            for call, args in self._calls:
                call(stream, args)
        finally:
            self._lock.release()
        return True

    def _move(self, bases: list[int]) -> None:
        """Write the addresses of all regions into the arguments of the launches."""
        self._bases = []  # a failure would leave them incomplete
        for args, position, (region, offset) in self._pointers:
            args[position] = bases[region] + offset
        for descriptor, (region, offset) in self._descriptors.values():
            descriptor.move(bases[region] + offset)
        self._bases = bases
