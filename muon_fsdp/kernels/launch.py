"""Launching Triton kernels with little host time.

At every launch Triton inspects all arguments to find the compiled kernel that fits them, which takes longer than many
of ours run. What it found is remembered here, by what the caller says can differ.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_compiled: dict[Hashable, Any] = {}


class TiledTensor:
    """A tensor that is read and written in tiles: a TensorDescriptor, checked only when a kernel is compiled."""

    __slots__ = ("base", "block_shape", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(self, base: Tensor, block_shape: tuple[int, int]) -> None:
        self.base = base
        self.shape = base.shape
        self.strides = base.stride()
        self.block_shape = (1, *block_shape)
        self.padding = "zero"
        self.round_f32_to_tf32 = False

    def checked(self) -> TensorDescriptor:
        return TensorDescriptor(self.base, list(self.shape), list(self.strides), list(self.block_shape))


def is_aligned(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Whether each begins at a multiple of 16 bytes, which kernels are compiled for."""
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
    """Run a kernel whose first parameters take `args` and whose last ones are `constants`, in their order.

    `kind` is all that a compiled kernel depends on besides constants: the device, precisions, alignment, which
    arguments are None. Numbers must be declared `do_not_specialize`: a compiled kernel is used again for others.
    """
    key = (kernel, kind, tuple(constants.values()), num_warps, num_stages, maxnreg)
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[(programs, 1, 1)](*args, *key[2])
        return
    args = tuple(arg.checked() if isinstance(arg, TiledTensor) else arg for arg in args)
    limits = {} if maxnreg is None else {"maxnreg": maxnreg}  # not every backend knows it
    compiled = kernel[(programs,)](*args, **constants, num_warps=num_warps, num_stages=num_stages, **limits)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[key] = compiled
