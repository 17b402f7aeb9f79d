"""Launch Triton kernels with little host time.

At every launch Triton inspects all arguments to find the compiled kernel for them, which takes longer than many of our
kernels run. `launch` caches the compiled kernel instead, under a key that the caller provides.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

_run_is_usable = True  # whether compiled kernels have the method that `_run` calls, which is not documented
_compiled: dict[Hashable, tuple[Any, Any]] = {}  # the kernel and its compiled form


class TiledTensor:
    """A tensor that kernels read and write in tiles: a stand-in for Triton's TensorDescriptor.

    It skips the checks of TensorDescriptor, which cost host time. They run only when a kernel is compiled.
    """

    __slots__ = ("base", "block_shape", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: Tensor, block_shape: tuple[int, int]) -> None:
        self.base = base
        self.shape = base.shape
        self.strides = base.stride()
        self.block_shape = (1, *block_shape)
        self.padding = "zero"
        self.round_f32_to_tf32 = False

    def checked(self) -> TensorDescriptor:
        """Return a TensorDescriptor of the same tensor, which checks shape, strides and alignment."""
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.block_shape))


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
        return
    args = tuple(arg.checked() if isinstance(arg, TiledTensor) else arg for arg in args)
    limits = {} if maxnreg is None else {"maxnreg": maxnreg}  # not every backend supports it
    compiled = kernel[(programs,)](*args, **constants, num_warps=num_warps, num_stages=num_stages, **limits)
    if compiled is not None:  # Triton's interpreter returns None
        _compiled[key] = kernel, compiled


def _run(compiled: Any, programs: int, args: tuple[Any, ...]) -> None:
    """Launch a compiled kernel.

    `compiled[grid](*args)` does the same. It also prepares and calls the hooks of Triton's profiler, although there
    usually are none, and this takes a good part of the time of a launch.
    """
    global _run_is_usable
    if _run_is_usable and not _has_hooks():
        try:
            stream = driver.active.get_current_stream(driver.active.get_current_device())
            compiled.run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)
        except (AttributeError, TypeError):  # this version of Triton differs; nothing was launched
            _run_is_usable = False
        else:
            return
    compiled[(programs, 1, 1)](*args)


def _has_hooks() -> bool:
    """Return whether a profiler wants to be called around launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))
