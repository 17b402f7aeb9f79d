"""Allocate tensors in the memory of the host, which a GPU can read and write while the host does something else."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from muon_fsdp.text import format_bytes, warn_user

_ALIGNMENT = 256  # bytes between the addresses where tensors may begin


class HostArena:
    """Memory of the host that is allocated in few blocks and cut into tensors.

    For a GPU it is page-locked. PyTorch rounds every such allocation up to a power of two, so blocks have these sizes
    and are shared. Every tensor has a storage of its own, a slice of its block: torch.save would write whole blocks and
    refuse those of several dtypes, and DTensors that begin within a storage can't be copied by copy.deepcopy.

    Args:
        num_bytes: the bytes of all tensors, as `bytes_of` counts them.
        device: the device that copies from and to these tensors.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._to_come = num_bytes  # bytes of the tensors that have not been cut yet
        self._is_locked = device.type not in ("cpu", "meta")
        self._free: list[Tensor] = []  # what is left of every block

    @staticmethod
    def bytes_of(shape: Iterable[int], dtype: torch.dtype) -> int:
        """Return the bytes that a tensor takes."""
        return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT

    def zeros(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a new tensor of zeros."""
        if math.prod(shape) == 0:
            return torch.zeros(shape, dtype=dtype)
        size = self.bytes_of(shape, dtype)
        self._to_come = max(0, self._to_come - size)
        index = next((i for i, free in enumerate(self._free) if free.numel() >= size), None)
        if index is None:
            index = len(self._free)
            self._free.append(self._allocate(size, size + self._to_come))
        block = self._free[index]
        self._free[index] = block[size:]
        start = block.storage_offset()
        part = block.untyped_storage()[start : start + math.prod(shape) * dtype.itemsize]
        return torch.empty(0, dtype=dtype).set_(part).view(shape)

    def _allocate(self, least: int, wanted: int) -> Tensor:
        """Return a block of at least `least` bytes, and of at most `wanted` if that is possible."""
        if self._is_locked:
            size = max(_power(least - 1) * 2 if least > 1 else 1, _power(wanted))
            try:
                return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._is_locked = False
                warn_user(
                    f"offload_state: {format_bytes(size)} of the host's memory can't be page-locked "
                    f"({str(error).partition(chr(10))[0]}), so copies to and from the GPU are slower. Raise the limit "
                    "of locked memory (ulimit -l, or that of the container), or store less: state_dtype='int8'"
                )
        return torch.zeros(wanted, dtype=torch.uint8)


def _power(number: int) -> int:
    """Return the largest power of two that is at most a positive number."""
    return 1 << max(1, number).bit_length() - 1
