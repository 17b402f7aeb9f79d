"""Build the tables of addresses through which one kernel launch updates many tensors.

A table has a row of addresses for the gradients, the parameters and every state of a list of tensors, a flag per
tensor, and a few scalars. The host writes it at every step. Gradients, states and weights may therefore move in memory
and lr may change, and neither the plan nor a captured CUDA graph has to be renewed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, TypeGuard

import torch
from torch import Tensor

FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16  # elements: data at multiples of it is read and written 16 bytes at a time
CHUNK = 8192  # elements that one program works on; a chunk never contains elements of two matrices


@dataclass(frozen=True)
class TableLayout:
    """The names of the rows and scalars in the tables of one kind of update, shared by the host and the kernels.

    Every layout begins with the rows `gradient` and `parameter`, and with the scalars `lr`, `weight_decay` and
    `gradient_factor`. An address of 0 in the row of gradients stands for a gradient of zeros.
    """

    states: tuple[str, ...]
    scalars: tuple[str, ...]

    def row(self, name: str) -> int:
        """Return the index of a row of addresses."""
        return ("gradient", "parameter", *self.states).index(name)

    def scalar(self, name: str) -> int:
        """Return the index of a scalar."""
        return self.all_scalars.index(name)

    @property
    def all_scalars(self) -> tuple[str, ...]:
        return ("lr", "weight_decay", "gradient_factor", *self.scalars)

    @property
    def num_rows(self) -> int:
        return 2 + len(self.states)


MUON_LAYOUT = TableLayout(("momentum_buffer",), ("momentum",))
ADAMW_LAYOUT = TableLayout(
    ("momentum_buffer", "second_moment", "step"),
    ("beta2", "eps", "log_beta1", "log_beta2", "one_minus_beta1", "one_minus_beta2"),
)
PAIR_LAYOUT = TableLayout(
    ("momentum", "velocity"), ("momentum", "velocity", "one_minus_momentum", "one_minus_velocity")
)


@dataclass
class TensorList:
    """A list of tensors with the same parameter group and dtypes, as kernels read it."""

    num_tensors: int
    parameter_dtype: torch.dtype
    gradient_dtype: torch.dtype
    chunks: Tensor  # (num_chunks, 4) int64: tensor, first element, number of elements, index of the partial norm
    aligned_chunks: bool
    slots: Tensor | None  # (num_tensors,) int64: where a tensor begins in a staging buffer
    addresses: Tensor  # (rows, num_tensors) int64
    # (num_tensors,) int64: whether the tensor is updated in this step; its gradient may still be missing (zero)
    updated: Tensor
    scalars: Tensor  # (num_scalars,) float32
    aligned: bool = True  # whether all addresses of this step are multiples of 16 bytes

    @property
    def tables(self) -> tuple[Tensor | None, ...]:
        """Return the first arguments of a kernel that reads or writes a staging buffer."""
        return (self.chunks, self.addresses, self.updated, self.scalars, self.slots)


@dataclass(frozen=True)
class ListSpec:
    """The properties of a list of tensors that stay the same as long as sizes and dtypes do."""

    layout: TableLayout
    num_tensors: int
    parameter_dtype: torch.dtype
    gradient_dtype: torch.dtype
    chunks: Tensor
    aligned_chunks: bool
    slots: Tensor | None = None


@dataclass(frozen=True)
class ListValues:
    """The tensors and scalars of a list in one step."""

    gradients: Sequence[Tensor | None]  # None stands for zeros
    updated: Sequence[bool]
    parameters: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]  # in the order of the layout
    lr: float | Tensor
    scalars: Mapping[str, float]  # all scalars of the layout except lr


class Tables:
    """The tables of several lists, in two buffers on the device that a step fills with two copies."""

    def __init__(self, specs: Sequence[ListSpec], device: torch.device) -> None:
        self.device = device
        self.specs = specs
        sizes = [(spec.layout.num_rows + 1) * spec.num_tensors for spec in specs]
        self._ints = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        num_scalars = [len(spec.layout.all_scalars) for spec in specs]
        self._scalars = torch.zeros(sum(num_scalars), dtype=torch.float32, device=device)
        parts = zip(specs, torch.split(self._ints, sizes), torch.split(self._scalars, num_scalars), strict=True)
        self.lists = [_tensor_list(spec, ints, scalars) for spec, ints, scalars in parts]

    def fill(self, values: Sequence[ListValues]) -> None:
        """Write the addresses and scalars of a step to the tables, without waiting for the device."""
        refuse_capture(self.device)
        ints: list[int] = []
        scalars: list[float] = []
        for spec, tensors, value in zip(self.specs, self.lists, values, strict=True):
            addresses = [0 if grad is None else grad.data_ptr() for grad in value.gradients]
            addresses += [tensor.data_ptr() for tensor in value.parameters]
            addresses += [tensor.data_ptr() for row in value.states for tensor in row]
            tensors.aligned = tensors.aligned_chunks and reduce(or_, addresses, 0) % 16 == 0
            ints += addresses
            ints += map(int, value.updated)
            lr = 0.0 if is_on_device(value.lr) else float(value.lr)
            scalars += [lr, *(value.scalars[name] for name in spec.layout.all_scalars[1:])]
        self._ints.copy_(pinned(ints, torch.int64, self.device), non_blocking=True)
        self._scalars.copy_(pinned(scalars, torch.float32, self.device), non_blocking=True)
        for tensors, value in zip(self.lists, values, strict=True):
            if is_on_device(value.lr):
                tensors.scalars[:1].copy_(value.lr.reshape(1))


def _tensor_list(spec: ListSpec, ints: Tensor, scalars: Tensor) -> TensorList:
    num_addresses = spec.layout.num_rows * spec.num_tensors
    return TensorList(
        num_tensors=spec.num_tensors,
        parameter_dtype=spec.parameter_dtype,
        gradient_dtype=spec.gradient_dtype,
        chunks=spec.chunks,
        aligned_chunks=spec.aligned_chunks,
        slots=spec.slots,
        addresses=ints[:num_addresses].view(spec.layout.num_rows, spec.num_tensors),
        updated=ints[num_addresses:],
        scalars=scalars,
    )


# ------------------------------------------------------------------------------------------------------------- chunks


def make_chunks(
    numels: Sequence[int], matrix_numels: Sequence[int], first_partials: Sequence[int], device: torch.device
) -> tuple[Tensor, bool]:
    """Cut tensors into chunks that never mix two matrices of a tensor.

    Returns:
        The chunks, (num_chunks, 4), and whether all of them begin and end at multiples of `ALIGNMENT`.
    """
    counts = torch.tensor([n // max(1, m) for n, m in zip(numels, matrix_numels, strict=True)])
    tensor = torch.repeat_interleave(torch.arange(len(numels)), counts)  # the tensor of every matrix
    size = torch.tensor(matrix_numels, dtype=torch.int64)[tensor]
    start = _position_in_run(counts) * size
    each = (size + CHUNK - 1) // CHUNK
    matrix = torch.repeat_interleave(torch.arange(len(tensor)), each)  # the matrix of every chunk
    offset = _position_in_run(each) * CHUNK
    chunk_start = start[matrix] + offset
    length = torch.minimum(size[matrix] - offset, torch.tensor(CHUNK))
    chunks_of_tensor = torch.bincount(tensor[matrix], minlength=len(numels))
    partial = torch.tensor(first_partials, dtype=torch.int64)[tensor[matrix]] + _position_in_run(chunks_of_tensor)
    chunks = torch.stack([tensor[matrix], chunk_start, length, partial], dim=1)
    return chunks.to(device), not bool((chunk_start % ALIGNMENT).any() or (length % ALIGNMENT).any())


def num_chunks(numel: int, matrix_numel: int) -> int:
    """Return the number of chunks of a tensor that consists of matrices of `matrix_numel` elements."""
    return numel // max(1, matrix_numel) * -(-matrix_numel // CHUNK)


def _position_in_run(lengths: Tensor) -> Tensor:
    """Return 0, 1, .. for every run: lengths (2, 3) give 0 1 0 1 2."""
    ends = torch.cumsum(lengths, 0)
    return torch.arange(int(ends[-1]) if len(ends) else 0) - torch.repeat_interleave(ends - lengths, lengths)


def cut_into_chunks(segments: Sequence[tuple[int, int, int, int]], device: torch.device) -> tuple[Tensor, bool]:
    """Cut segments (tensor, first element, number of elements, index of the matrix) into chunks.

    Returns:
        The chunks, (num_chunks, 4), and whether all of them begin and end at multiples of `ALIGNMENT`.
    """
    chunks = [
        (tensor, first, min(CHUNK, start + length - first), matrix)
        for tensor, start, length, matrix in segments
        for first in range(start, start + length, CHUNK)
    ]
    aligned = all(first % ALIGNMENT == 0 and length % ALIGNMENT == 0 for _, first, length, _ in chunks)
    return torch.tensor(chunks, dtype=torch.int64).reshape(-1, 4).to(device), aligned


# ----------------------------------------------------------------------------------------------------- host and device


def pinned(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers as a tensor on the host, in pinned memory if the device is a GPU.

    Copies from pinned memory do not make the host wait.
    """
    tensor = torch.tensor(numbers, dtype=dtype)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def is_on_device(lr: float | Tensor) -> TypeGuard[Tensor]:
    """Return whether lr is a tensor on a device, which the host could only read by waiting for the device."""
    return isinstance(lr, Tensor) and lr.device.type != "cpu"


def refuse_capture(device: torch.device) -> None:
    """Raise an error if a CUDA graph is being captured around `step()`.

    Tables are copied from host memory that is reused later, so a replay would copy unrelated data.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "step() can't be part of a graph that you capture: call it after the capture. MuonOptimizer captures its "
            "own steps"
        )
