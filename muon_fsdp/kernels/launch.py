"""Launch Triton kernels, and find the compiled form of a kernel with little host time.

At every launch Triton inspects all arguments to find the compiled kernel for them, which takes longer than many of our
kernels run. `launch` caches the compiled kernel instead, under a key that the caller provides. Only documented
interfaces of Triton are used here, because other ones change from release to release.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

_compiled: dict[Hashable, tuple[Any, Any]] = {}  # the kernel and its compiled form


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
        known[1][(programs, 1, 1)](*args, *values)
        return
    limits = {} if maxnreg is None else {"maxnreg": maxnreg}  # not every backend supports it
    compiled = kernel[(programs,)](*args, **constants, num_warps=num_warps, num_stages=num_stages, **limits)
    if compiled is not None:  # Triton's interpreter returns None
        _compiled[key] = kernel, compiled
