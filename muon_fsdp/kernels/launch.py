"""Launch Triton kernels with little host time, and record launches so that they can be repeated.

At every launch Triton inspects all arguments to find the compiled kernel for them, which takes longer than many of our
kernels run. `launch` caches the compiled kernel instead, under a key that the caller provides. Everything that is not
documented by Triton is in this module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

_run_is_usable = True  # whether compiled kernels have the method that `_run` calls, which is not documented
_compiled: dict[Hashable, tuple[Any, Any]] = {}  # the kernel and its compiled form
_this_thread = threading.local()  # `recorded`: the `RecordedLaunches` of this thread, while it records


class TiledTensor:
    """A tensor that kernels read and write in tiles: a stand-in for Triton's TensorDescriptor.

    It skips the checks of TensorDescriptor, which cost host time. They run only when a kernel is compiled.
    """

    __slots__ = ("base", "block_shape", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: Tensor, block_shape: tuple[int, int]) -> None:
        self.base: Tensor | Address = base
        self.shape = base.shape
        self.strides = base.stride()
        self.block_shape = (1, *block_shape)
        self.padding = "zero"
        self.round_f32_to_tf32 = False

    def checked(self) -> TensorDescriptor:
        """Return a TensorDescriptor of the same tensor, which checks shape, strides and alignment."""
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.block_shape))


class Address:
    """Stands in for a tensor of which only the address is read, and does not keep its memory alive."""

    __slots__ = ("address",)

    def __init__(self, tensor: Tensor) -> None:
        self.address = tensor.data_ptr()

    def data_ptr(self) -> int:
        """Return the address."""
        return self.address


class Launch(NamedTuple):
    """A launch that was made: of which compiled kernel, on how many programs, and with which arguments.

    An `Address` stands for each tensor, also for the base of a `TiledTensor`: memory must be freed as it would be
    without the record.
    """

    compiled: Any
    programs: int
    args: tuple[Any, ...]


class RecordedLaunches:
    """The launches of a thread.

    `is_repeatable` is False if not all of them would be made again: kernels were compiled or timed.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.is_repeatable = True


@contextmanager
def record_launches() -> Iterator[RecordedLaunches]:
    """Record the launches that this thread makes inside of the context."""
    recorded = _this_thread.recorded = RecordedLaunches()
    try:
        yield recorded
    finally:
        _this_thread.recorded = None


def is_recording() -> bool:
    """Return whether this thread records its launches."""
    return getattr(_this_thread, "recorded", None) is not None


def mark_unrepeatable() -> None:
    """Note that what is being recorded would not be done again."""
    recorded: RecordedLaunches | None = getattr(_this_thread, "recorded", None)
    if recorded is not None:
        recorded.is_repeatable = False


def is_aligned(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Return for each tensor whether its data pointer is a multiple of 16 bytes; True for None.

    Triton compiles different kernels for aligned and unaligned pointers, so this belongs to the key of `launch`.
    """
    return tuple([tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors])


def launch(
    kernel: Any,
    programs: int,
    args: tuple[Any, ...],
    constants: Mapping[str, Any],
    kind: Hashable,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    maxnreg: int | None = None,
) -> None:
    """Launch a Triton kernel on a one-dimensional grid, and compile it at the first launch of its kind.

    Args:
        kernel: a function with `@triton.jit` or `@gluon.jit`.
        programs: size of the grid.
        args: the first arguments of the kernel. The kernel must declare numbers among them `do_not_specialize`, because
            a compiled kernel is reused for other numbers.
        constants: the last arguments of the kernel by name, in the order of its parameters.
        kind: everything besides the constants that the compiled kernel depends on: the device, dtypes, alignment, and
            which arguments are None.
        num_warps: warps per program.
        num_stages: depth of Triton's software pipeline.
        maxnreg: most registers per thread; None lets the compiler choose.
    """
    values = tuple(constants.values())
    # id(), because hashing a kernel takes longer; `_compiled` keeps it alive.
    key = (id(kernel), kind, values, num_warps, num_stages, maxnreg)
    known = _compiled.get(key)
    if known is not None:
        _run(known[1], programs, (*args, *values))
        recorded: RecordedLaunches | None = getattr(_this_thread, "recorded", None)
        if recorded is not None:
            noted = tuple([_without_memory(arg) for arg in args])
            recorded.launches.append(Launch(known[1], programs, (*noted, *values)))
        return
    mark_unrepeatable()
    args = tuple(arg.checked() if isinstance(arg, TiledTensor) else arg for arg in args)
    limits = {} if maxnreg is None else {"maxnreg": maxnreg}  # not every backend supports it
    compiled = kernel[(programs,)](*args, **constants, num_warps=num_warps, num_stages=num_stages, **limits)
    if compiled is not None:  # Triton's interpreter returns None
        _compiled[key] = kernel, compiled


def _without_memory(arg: Any) -> Any:
    """Return an argument of a launch with addresses instead of tensors."""
    if isinstance(arg, Tensor):
        return Address(arg)
    if isinstance(arg, TiledTensor):
        arg = copy(arg)
        arg.base = Address(arg.base)
    return arg


def _run(compiled: Any, programs: int, args: tuple[Any, ...]) -> None:
    """Launch a compiled kernel.

    `compiled[grid](*args)` does the same. It also prepares and calls the hooks of Triton's profiler, although there
    usually are none, and this takes a good part of the time of a launch.
    """
    global _run_is_usable
    if _run_is_usable and not has_hooks():
        try:
            metadata = compiled.packed_metadata
            compiled.run(programs, 1, 1, current_stream(), compiled.function, metadata, None, None, None, *args)
        except (AttributeError, TypeError):  # this version of Triton differs; nothing was launched
            _run_is_usable = False
        else:
            return
    compiled[(programs, 1, 1)](*args)


def current_stream() -> int:
    """Return the handle of the current stream of the current device."""
    stream: int = driver.active.get_current_stream(driver.active.get_current_device())
    return stream


def has_hooks() -> bool:
    """Return whether a profiler wants to be called around launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))


class DirectLauncher:
    """Launches a compiled kernel below Triton's Python layers, which prepare the arguments again at every launch.

    Args:
        compiled: a compiled kernel, on an NVIDIA GPU.

    Raises:
        AttributeError: if this version of Triton differs from those that are known.
    """

    def __init__(self, compiled: Any) -> None:
        run = compiled.run
        # Whether Triton allocates memory for the kernel at every launch, which this class does not do.
        self.allocates = bool(run.global_scratch_size or run.profile_scratch_size)
        self._function, self._metadata = compiled.function, compiled.packed_metadata
        self._flags = run.launch_cooperative_grid, run.launch_pdl
        self._tiles = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        self._launch = run.launch
        if isinstance(self._launch, FunctionType):  # it describes tiled tensors, and then calls the function below it
            names, cells = self._launch.__code__.co_freevars, self._launch.__closure__ or ()
            self._launch = dict(zip(names, cells, strict=True))["launcher"].cell_contents
        # From Triton 3.7 on, one function launches all kernels and is told how to read the arguments.
        self._reading = (run.arg_annotations, run.kernel_signature) if hasattr(run, "kernel_signature") else None

    def tiles(self, number: int) -> str | None:
        """Return how the kernel cuts its tiled tensor with this number, as a key."""
        return repr(sorted(self._tiles[number].items())) if self._tiles else None

    def describe(self, tiled: TiledTensor, number: int) -> list[Any]:
        """Return the arguments that describe the tiled tensor with this number."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        described: list[Any] = make_tensordesc_arg(tiled, self._tiles[number] if self._tiles else None)
        return described

    def call(self, programs: int) -> Callable[[int, list[Any]], object]:
        """Return a function that launches the kernel on a stream, with arguments in which tensors are described."""
        launch, function, flags, metadata = self._launch, self._function, self._flags, self._metadata
        if self._reading is None:
            return lambda stream, args: launch(
                programs, 1, 1, stream, function, *flags, None, None, metadata, None, None, None, *args
            )
        reading = self._reading
        return lambda stream, args: launch(
            programs, 1, 1, stream, function, *flags, metadata, None, None, None, None, None, *reading, args
        )
