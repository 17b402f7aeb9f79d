"""Build the tables of addresses through which one kernel launch updates many tensors.

A table has a row of addresses for the gradients, the parameters and every state of a list of tensors, a flag per
tensor, and a few scalars. The host writes it at every step. Gradients, states and weights may therefore move in memory
and lr may change, and neither the plan nor a captured CUDA graph has to be renewed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any, Literal, TypeAlias, TypeGuard

import torch
from torch import Tensor

Rounding: TypeAlias = Literal["nearest", "stochastic", "remainder"]
FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16  # elements: data at multiples of it is read and written 16 bytes at a time
CHUNK = 8192  # elements that one program works on; a chunk never contains elements of two matrices
STATE_BLOCK = 256  # elements of a row that share a scale, where state is stored in 8 bits
LEAST_SCALED = 2.0**-90  # blocks of smaller numbers are stored as zeros: products with scales must be normal numbers
REMAINDER = "weight_remainder"  # the name of state: what rounding dropped from half-precision weights
SCALES = "_scales"  # what is added to the name of state, for the scales beside its codes
# Where the elements of a shard lie in the whole parameter: its columns, the blocks in a row, and the columns before it
# in the first block; then `Runs` of plan/layout.py, and the key of its random numbers.
PLACE = ("cols", "blocks", "before", "first", "length", "stride", "key", "key_high")


@dataclass(frozen=True)
class TableLayout:
    """The names of the rows and scalars in the tables of one kind of update, shared by the host and the kernels.

    Every layout begins with the rows `gradient` and `parameter`, and with the scalars `lr`, `weight_decay` and
    `gradient_factor`. An address of 0 in the row of gradients stands for a gradient of zeros.

    Args:
        states: the state by name.
        scalars: the scalars by name.
        numbers: which of the states are one number for the whole tensor.
    """

    states: tuple[str, ...]
    scalars: tuple[str, ...]
    numbers: tuple[str, ...] = ()

    def with_scales(self) -> TableLayout:
        """Return the layout of state in 8 bits: rows of addresses of scales follow."""
        scales = tuple(name + SCALES for name in self.states if name not in self.numbers)
        return replace(self, states=self.states + scales)

    def with_remainder(self) -> TableLayout:
        """Return the layout of parameters with remainders: a row of their addresses follows."""
        return replace(self, states=(*self.states, REMAINDER))

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
    numbers=("step",),
)
PAIR_LAYOUT = TableLayout(
    ("momentum", "velocity"), ("momentum", "velocity", "one_minus_momentum", "one_minus_velocity")
)


@dataclass
class TensorList:
    """Tensors of one parameter group, with the same dtypes, that kernels update in one launch.

    A position is the number of a tensor among those that `Tables.fill` gets.
    """

    layout: TableLayout
    group: int
    positions: Sequence[int]  # in the order of the table
    parameter_dtype: torch.dtype
    gradient_dtype: torch.dtype
    chunks: Tensor  # (num_chunks, 4) int64: tensor, first element, number of elements, index of the partial norm
    aligned_chunks: bool
    slots: Tensor | None = None  # (num_tensors,) int64: where a tensor begins in a staging buffer
    # Chunks with one factor each, and whether they are aligned; None if the rule does not multiply weights.
    factor_chunks: tuple[Tensor, bool] | None = None
    # (num_matrices + 1,) int32: where the partial norms of each matrix begin, and their number. The lists of a stage
    # share it; None if kernels do not leave norms, because matrices are not whole on this rank.
    first_partials: Tensor | None = None
    state_dtype: torch.dtype = torch.float32  # int8 stands for codes of 8 bits
    rounding: Rounding = "nearest"  # how weights are rounded
    # (num_tensors, len(PLACE)) int64, and whether every tensor is one run of its parameter; None if kernels of this
    # list need neither blocks nor random bits.
    places: Tensor | None = None
    one_run: bool = True
    starts: Sequence[
        int
    ] = ()  # for every tensor, the element of parameter and gradient where it begins; () if all at 0
    # With codes of 8 bits: (num_chunks, 4) int64: tensor, first block, number of blocks, index of the partial norm; and
    # whether all blocks begin and end at multiples of `ALIGNMENT`.
    block_chunks: tuple[Tensor, bool] | None = None
    # The table, of which `Tables` makes these views.
    addresses: Tensor = field(init=False)  # (rows, num_tensors) int64
    # (num_tensors,) int64: whether the tensor is updated in this step; its gradient may still be missing (zero)
    updated: Tensor = field(init=False)
    scalars: Tensor = field(init=False)  # (num_scalars,) float32
    random: Tensor = field(init=False)  # (2,) int64: the number of the step and the seed, for random bits
    aligned_addresses: bool = field(init=False, default=True)  # whether those of this step are multiples of 16 bytes

    @property
    def num_tensors(self) -> int:
        return len(self.positions)

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the arguments of a kernel that follow its chunks."""
        return self.addresses, self.updated, self.scalars

    @property
    def aligned(self) -> bool:
        """Return whether all chunks, and the addresses of this step, are aligned."""
        return self.aligned_chunks and self.aligned_addresses

    @property
    def state_chunks(self) -> Tensor:
        """Return the chunks for kernels that read or write state."""
        return self.chunks if self.block_chunks is None else self.block_chunks[0]

    @property
    def aligned_state(self) -> bool:
        """Return the same as `aligned` for these chunks."""
        return self.aligned if self.block_chunks is None else self.aligned_addresses and self.block_chunks[1]

    def with_factor_chunks(self) -> TensorList:
        """Return the list, with the same table, cut so that every chunk has one factor."""
        assert self.factor_chunks is not None
        result = copy(self)
        result.chunks, result.aligned_chunks = self.factor_chunks
        return result


class Tables:
    """The tables of several lists, in two buffers on the device that a step fills with two copies.

    Args:
        lists: lists of tensors on one device. `Tables.lists` are copies, because a list can have several tables.
    """

    def __init__(self, lists: Sequence[TensorList]) -> None:
        self.device = device = lists[0].chunks.device
        self.lists = [replace(each) for each in lists]
        sizes = [(each.layout.num_rows + 1) * each.num_tensors + 2 for each in lists]
        self._ints = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        num_scalars = [len(each.layout.all_scalars) for each in lists]
        self._scalars = torch.zeros(sum(num_scalars), dtype=torch.float32, device=device)
        parts = zip(self.lists, torch.split(self._ints, sizes), torch.split(self._scalars, num_scalars), strict=True)
        for each, ints, scalars in parts:
            rows = ints[:-2].view(each.layout.num_rows + 1, each.num_tensors)
            each.addresses, each.updated, each.scalars, each.random = rows[:-1], rows[-1], scalars, ints[-2:]

    def fill(
        self,
        parameters: Sequence[Tensor],
        gradients: Mapping[int, Tensor],
        states: Sequence[Sequence[Sequence[Tensor]]],
        updated: Collection[int],
        scalars: Mapping[int, Mapping[str, Any]],
        step: int = 0,
    ) -> None:
        """Write the addresses and scalars of a step to the tables, without waiting for the device.

        Args:
            parameters: the local part of every parameter, by position like all tensors here.
            gradients: the gradients; a missing one stands for zeros.
            states: for every list, the state of each of its tensors, in the order of its layout.
            updated: the parameters that are updated.
            scalars: by number of a group, all scalars of its layout by name. lr may be a tensor.
            step: the number of the step, for random bits.
        """
        refuse_capture(self.device)
        ints: list[int] = []
        floats: list[float] = []
        for each, of_list in zip(self.lists, states, strict=True):
            positions, named = each.positions, scalars[each.group]
            addresses = [gradients[i].data_ptr() if i in gradients else 0 for i in positions]
            addresses += [parameters[i].data_ptr() for i in positions]
            for number, start in enumerate(each.starts):
                gradient, parameter = number, len(positions) + number
                addresses[gradient] += start * each.gradient_dtype.itemsize if addresses[gradient] else 0
                addresses[parameter] += start * each.parameter_dtype.itemsize
            addresses += [state[row].data_ptr() for row in range(len(each.layout.states)) for state in of_list]
            each.aligned_addresses = reduce(or_, addresses, 0) % 16 == 0
            ints += addresses
            ints += [int(i in updated) for i in positions]
            ints += (step, named.get("rounding_seed", 0))
            lr = 0.0 if is_on_device(named["lr"]) else float(named["lr"])
            floats += [lr, *(named[name] for name in each.layout.all_scalars[1:])]
        self._ints.copy_(pinned(ints, torch.int64, self.device), non_blocking=True)
        self._scalars.copy_(pinned(floats, torch.float32, self.device), non_blocking=True)
        for each in self.lists:
            lr = scalars[each.group]["lr"]
            if is_on_device(lr):
                each.scalars[:1].copy_(lr.reshape(1))


# ------------------------------------------------------------------------------------------------------------- chunks


def make_chunks(
    numels: Sequence[int],
    matrix_numels: Sequence[int],
    first_partials: Sequence[int],
    device: torch.device,
    chunk: int = CHUNK,
) -> tuple[Tensor, bool]:
    """Cut tensors into chunks that never mix two matrices of a tensor. Sizes are elements, or blocks of them.

    Returns:
        The chunks, (num_chunks, 4), and whether all of them begin and end at multiples of `ALIGNMENT`.
    """
    counts = torch.tensor([n // max(1, m) for n, m in zip(numels, matrix_numels, strict=True)])
    tensor = torch.repeat_interleave(torch.arange(len(numels)), counts)  # the tensor of every matrix
    size = torch.tensor(matrix_numels, dtype=torch.int64)[tensor]
    start = _position_in_run(counts) * size
    each = (size + chunk - 1) // chunk
    matrix = torch.repeat_interleave(torch.arange(len(tensor)), each)  # the matrix of every chunk
    offset = _position_in_run(each) * chunk
    chunk_start = start[matrix] + offset
    length = torch.minimum(size[matrix] - offset, torch.tensor(chunk))
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
