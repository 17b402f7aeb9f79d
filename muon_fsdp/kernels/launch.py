"""Launch Triton kernels: the tiles and addends of a product, and the compiled form of a kernel with little host time.

At every launch Triton inspects all arguments to find the compiled kernel for them, which takes longer than many of our
kernels run. `launch` caches the compiled kernel instead, under a key that the caller provides. Only documented
interfaces of Triton are used here, because other ones change from release to release.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muon_fsdp.kernels.tables import ALIGNMENT

_compiled: dict[Hashable, tuple[Any, Any]] = {}  # the kernel and its compiled form


class KernelError(RuntimeError):
    """Raised when a kernel could not be compiled or launched; the caller then uses another kernel."""


class TileConfig(NamedTuple):
    """The tiles of a product: a tile is `rows` x `cols` of the result, computed in steps of `inner`."""

    rows: int
    cols: int
    inner: int
    num_warps: int
    num_stages: int
    persistent: bool = False  # one program per multiprocessor that computes many tiles, not one program per tile
    group: int = 8  # rows of tiles that are computed together, so that their operands stay in the L2 cache


@lru_cache(maxsize=64)
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class Addend(NamedTuple):
    """A batch of matrices that is multiplied by a factor and added to a product.

    Args:
        matrices: (B, m, n), the matrices before the multiplication.
        factor: one number for the whole batch.
    """

    matrices: Tensor
    factor: float = 1.0


def contiguous(addends: Sequence[Addend]) -> Sequence[Addend]:
    """Return the addends with contiguous matrices, which kernels require."""
    if all(addend.matrices.is_contiguous() for addend in addends):
        return addends
    return [Addend(matrices.contiguous(), factor) for matrices, factor in addends]


def unpack(addends: Sequence[Addend]) -> tuple[Tensor | None, float, Tensor | None, float]:
    """Split up to two addends into the arguments that a kernel has for them.

    Returns:
        The matrices and the factor of the first addend, then those of the second one. A missing addend is None and 0.
    """
    padded: list[tuple[Tensor | None, float]] = [*addends, *[(None, 0.0)] * (2 - len(addends))]
    (first, first_factor), (second, second_factor) = padded
    return first, first_factor, second, second_factor


def is_aligned(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Return for each tensor whether its data pointer is a multiple of 16 bytes; True for None.

    Triton compiles different kernels for aligned and unaligned pointers, so this belongs to the key of `launch`.
    """
    return tuple([tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors])


def has_aligned_rows(*tensors: Tensor | None) -> bool:
    """Return whether all rows begin at aligned addresses, so that masked pointers load 16 bytes at a time."""
    return all(tensor is None or tensor.shape[-1] % ALIGNMENT == 0 for tensor in tensors) and all(is_aligned(*tensors))


def launch(
    kernel: Any,
    programs: int,
    args: tuple[Any, ...],
    constants: Mapping[str, Any],
    variant: Hashable,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    maxnreg: int | None = None,
) -> None:
    """Launch a Triton kernel on a one-dimensional grid, and compile it at the first launch of a variant.

    Args:
        kernel: a function with `@triton.jit` or `@gluon.jit`.
        programs: size of the grid. Without programs nothing is launched.
        args: the first arguments of the kernel. The kernel must declare numbers among them `do_not_specialize`, because
            a compiled kernel is reused for other numbers.
        constants: the last arguments of the kernel by name, in the order of its parameters.
        variant: everything besides the constants that the compiled kernel depends on: the device, dtypes, alignment,
            and which arguments are None.
        num_warps: warps per program.
        num_stages: depth of Triton's software pipeline.
        maxnreg: most registers per thread; None lets the compiler choose.
    """
    if programs == 0:
        return
    values = tuple(constants.values())
    # id(), because hashing a kernel takes longer; `_compiled` keeps it alive.
    key = (id(kernel), variant, values, num_warps, num_stages, maxnreg)
    known = _compiled.get(key)
    if known is not None:
        known[1][(programs, 1, 1)](*args, *values)
        return
    limits = {} if maxnreg is None else {"maxnreg": maxnreg}  # not every backend supports it
    compiled = kernel[(programs,)](*args, **constants, num_warps=num_warps, num_stages=num_stages, **limits)
    if compiled is not None:  # Triton's interpreter returns None
        _compiled[key] = kernel, compiled
