"""Element-wise updates of many tensors in one launch.

A kernel finds its tensors through a table of addresses in device memory, so a captured launch works on whatever
gradients, states and weights the table names when it runs, and on an lr that was changed meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from muon_fsdp.kernels.launch import launch
from muon_fsdp.kernels.triton_norms import ALIGNMENT, CHUNK, partial_norm

# Rows of the table of addresses: gradient, parameter, and from this one on the states, in the order of their rule.
FIRST_STATE = 2
# Scalars of a list: lr, weight decay, the factor of the gradient, and those of the rule.
MAX_SCALARS = 12

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass
class TensorList:
    """Tensors of one group and one pair of precisions, as kernels see them."""

    num_tensors: int
    parameter_dtype: torch.dtype
    gradient_dtype: torch.dtype
    chunks: Tensor  # (num_chunks, 4) int64: tensor, first element, number of elements, number of the partial norm
    aligned_chunks: bool
    addresses: Tensor  # (rows, num_tensors) int64
    scalars: Tensor  # (MAX_SCALARS,) float32
    # (num_tensors,) int64: whether it is updated at all; its gradient may still be missing (zero)
    active: Tensor | None = None
    slots: Tensor | None = None  # (num_tensors,) int64: where a tensor begins in a staging buffer
    aligned: bool = True  # all addresses, in this step

    @property
    def tables(self) -> tuple[Tensor | None, ...]:
        """The first arguments of a kernel that works on slots."""
        return (self.chunks, self.addresses, self.active, self.scalars, self.slots)


def make_chunks(
    numels: Sequence[int], matrix_numels: Sequence[int], first_partials: Sequence[int], device: torch.device
) -> tuple[Tensor, bool]:
    """Cut tensors into chunks that never mix two matrices of a tensor; whether all begin and end aligned."""
    counts = torch.tensor([n // max(1, m) for n, m in zip(numels, matrix_numels, strict=True)])
    tensor = torch.repeat_interleave(torch.arange(len(numels)), counts)  # of every matrix
    size = torch.tensor(matrix_numels, dtype=torch.int64)[tensor]
    start = _position_in_run(counts) * size
    each = (size + CHUNK - 1) // CHUNK
    matrix = torch.repeat_interleave(torch.arange(len(tensor)), each)  # of every chunk
    offset = _position_in_run(each) * CHUNK
    chunk_start = start[matrix] + offset
    length = torch.minimum(size[matrix] - offset, torch.tensor(CHUNK))
    chunks_of_tensor = torch.bincount(tensor[matrix], minlength=len(numels))
    partial = torch.tensor(first_partials, dtype=torch.int64)[tensor[matrix]] + _position_in_run(chunks_of_tensor)
    chunks = torch.stack([tensor[matrix], chunk_start, length, partial], dim=1)
    return chunks.to(device), not bool((chunk_start % ALIGNMENT).any() or (length % ALIGNMENT).any())


def num_chunks(numel: int, matrix_numel: int) -> int:
    return numel // max(1, matrix_numel) * -(-matrix_numel // CHUNK)


def _position_in_run(lengths: Tensor) -> Tensor:
    """0, 1, .. for every run: (2, 3) -> 0 1 0 1 2."""
    ends = torch.cumsum(lengths, 0)
    return torch.arange(int(ends[-1]) if len(ends) else 0) - torch.repeat_interleave(ends - lengths, lengths)


@triton.jit
def tensor_chunk(chunks, index, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    tensor = tl.load(chunks + 4 * index)
    start = tl.load(chunks + 4 * index + 1)
    length = tl.load(chunks + 4 * index + 2)
    if ALIGNED:  # without this the compiler reads element by element
        start = tl.multiple_of(start, 16)
        length = tl.multiple_of(length, 16)
    return tensor, start, length


@triton.jit
def tensor_pointer(addresses, row, tensor, num_tensors, TYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    pointer = tl.load(addresses + row * num_tensors + tensor).to(tl.pointer_type(TYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def gradient_chunk(  # type: ignore[no-untyped-def]
    addresses, scalars, tensor, num_tensors, start, offset, mask, TYPE: tl.constexpr, ALIGNED: tl.constexpr
):
    """The gradient times its factor; zero where there is none."""
    there = tl.load(addresses + tensor) != 0
    pointer = tensor_pointer(addresses, 0, tensor, num_tensors, TYPE, ALIGNED)
    return tl.load(pointer + start + offset, mask=mask & there, other=0.0).to(tl.float32) * tl.load(scalars + 2)


@triton.jit(
    do_not_specialize=["num_tensors"],
    do_not_specialize_on_alignment=["chunks", "addresses", "active", "scalars", "slots"],
)
def _muon_prepare_kernel(  # type: ignore[no-untyped-def]
    chunks,
    addresses,
    active,
    scalars,
    slots,
    staging,
    partials,
    num_tensors,
    NESTEROV: tl.constexpr,
    NORMS: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    index = tl.program_id(0)
    tensor, start, length = tensor_chunk(chunks, index, ALIGNED)
    offset = tl.arange(0, CHUNK)
    here = offset < length
    mask = here & (tl.load(active + tensor) != 0)
    momentum = tl.load(scalars + 3)
    grad = gradient_chunk(addresses, scalars, tensor, num_tensors, start, offset, mask, GRADIENT_TYPE, ALIGNED)
    buffer = tensor_pointer(addresses, 2, tensor, num_tensors, tl.float32, ALIGNED) + start + offset
    update = momentum * tl.load(buffer, mask=mask, other=0.0) + grad
    tl.store(buffer, update, mask=mask)
    if NESTEROV:
        update = grad + momentum * update
    staged = update.to(staging.dtype.element_ty)
    slot = tl.multiple_of(tl.load(slots + tensor), 16)
    tl.store(staging + slot + start + offset, staged, mask=here)
    if NORMS:
        largest, squares = partial_norm(staged.to(tl.float32))
        partial = tl.load(chunks + 4 * index + 3)
        tl.store(partials + 2 * partial, largest)
        tl.store(partials + 2 * partial + 1, squares)


@triton.jit(
    do_not_specialize=["num_tensors", "num_factors"],
    do_not_specialize_on_alignment=["chunks", "addresses", "active", "scalars", "slots", "factors"],
)
def _apply_kernel(  # type: ignore[no-untyped-def]
    chunks,
    addresses,
    active,
    scalars,
    slots,
    updates,
    factors,
    num_tensors,
    num_factors,
    HAS_FACTORS: tl.constexpr,
    PARAMETER_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    tensor, start, length = tensor_chunk(chunks, tl.program_id(0), ALIGNED)
    offset = tl.arange(0, CHUNK)
    mask = (offset < length) & (tl.load(active + tensor) != 0)
    lr, weight_decay = tl.load(scalars), tl.load(scalars + 1)
    slot = tl.multiple_of(tl.load(slots + tensor), 16)
    update = tl.load(updates + slot + start + offset, mask=mask, other=0.0).to(tl.float32)
    pointer = tensor_pointer(addresses, 1, tensor, num_tensors, PARAMETER_TYPE, ALIGNED) + start + offset
    weight = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        matrix = tl.load(chunks + 4 * tl.program_id(0) + 3)
        weight = weight * tl.load(factors + matrix) - lr * tl.load(factors + num_factors + matrix) * update
    else:
        weight = weight * (1.0 - lr * weight_decay) - lr * update
    tl.store(pointer, weight.to(PARAMETER_TYPE), mask=mask)


@triton.jit(
    do_not_specialize=["num_tensors"], do_not_specialize_on_alignment=["addresses", "active", "scalars", "corrections"]
)
def _adamw_count_kernel(addresses, active, scalars, corrections, num_tensors, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count a step of every tensor, and 1 - beta^t for both betas."""
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tensor < num_tensors
    counts = mask & (tl.load(active + tensor, mask=mask, other=0) != 0)
    pointer = tl.load(addresses + 4 * num_tensors + tensor, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(pointer, mask=counts, other=0.0) + 1.0
    tl.store(pointer, step, mask=counts)
    # In float64: at beta = 0.999 and t = 1 float32 loses three digits.
    first = 1.0 - tl.exp(step.to(tl.float64) * tl.load(scalars + 6).to(tl.float64))
    second = 1.0 - tl.exp(step.to(tl.float64) * tl.load(scalars + 7).to(tl.float64))
    tl.store(corrections + tensor, first.to(tl.float32), mask=mask)
    tl.store(corrections + num_tensors + tensor, second.to(tl.float32), mask=mask)


@triton.jit(
    do_not_specialize=["num_tensors"],
    do_not_specialize_on_alignment=["chunks", "addresses", "active", "scalars", "corrections"],
)
def _adamw_kernel(  # type: ignore[no-untyped-def]
    chunks,
    addresses,
    active,
    scalars,
    corrections,
    num_tensors,
    PARAMETER_TYPE: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    tensor, start, length = tensor_chunk(chunks, tl.program_id(0), ALIGNED)
    offset = tl.arange(0, CHUNK)
    mask = (offset < length) & (tl.load(active + tensor) != 0)
    lr, weight_decay = tl.load(scalars), tl.load(scalars + 1)
    beta2, eps = tl.load(scalars + 4), tl.load(scalars + 5)
    rest1, rest2 = tl.load(scalars + 8), tl.load(scalars + 9)  # 1 - beta, which float32 would round
    grad = gradient_chunk(addresses, scalars, tensor, num_tensors, start, offset, mask, GRADIENT_TYPE, ALIGNED)
    first_pointer = tensor_pointer(addresses, 2, tensor, num_tensors, tl.float32, ALIGNED) + start + offset
    second_pointer = tensor_pointer(addresses, 3, tensor, num_tensors, tl.float32, ALIGNED) + start + offset
    first = tl.load(first_pointer, mask=mask, other=0.0)
    first += rest1 * (grad - first)
    second = beta2 * tl.load(second_pointer, mask=mask, other=0.0) + rest2 * grad * grad
    tl.store(first_pointer, first, mask=mask)
    tl.store(second_pointer, second, mask=mask)
    correction1, correction2 = tl.load(corrections + tensor), tl.load(corrections + num_tensors + tensor)
    update = first / correction1 / (tl.sqrt(second / correction2) + eps)
    pointer = tensor_pointer(addresses, 1, tensor, num_tensors, PARAMETER_TYPE, ALIGNED) + start + offset
    weight = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    weight = weight * (1.0 - lr * weight_decay) - lr * update
    tl.store(pointer, weight.to(PARAMETER_TYPE), mask=mask)


def muon_prepare(tensors: TensorList, staging: Tensor, partials: Tensor | None, *, nesterov: bool) -> None:
    """buf = momentum * buf + grad; buf, or grad + momentum * buf, and its partial norms into the buffers given."""
    if len(tensors.chunks) == 0:
        return
    launch(
        _muon_prepare_kernel,
        len(tensors.chunks),
        (*tensors.tables, staging, partials, tensors.num_tensors),
        {
            "NESTEROV": nesterov,
            "NORMS": partials is not None,
            "GRADIENT_TYPE": TYPES[tensors.gradient_dtype],
            "ALIGNED": tensors.aligned,
            "CHUNK": CHUNK,
        },
        (staging.device, staging.dtype),
        num_warps=8,
    )


def apply_updates(tensors: TensorList, updates: Tensor, factors: Tensor | None = None) -> None:
    """W <- W (1 - lr * weight_decay) - lr * U; with factors (2, matrices), W <- f W - lr * R * U.

    The last column of the chunks is the number of the matrix then.
    """
    if len(tensors.chunks) == 0:
        return
    launch(
        _apply_kernel,
        len(tensors.chunks),
        (*tensors.tables, updates, factors, tensors.num_tensors, 0 if factors is None else factors.shape[1]),
        {
            "HAS_FACTORS": factors is not None,
            "PARAMETER_TYPE": TYPES[tensors.parameter_dtype],
            "ALIGNED": tensors.aligned,
            "CHUNK": CHUNK,
        },
        (updates.device, updates.dtype),
        num_warps=8,
    )


def cut_into_chunks(segments: Sequence[tuple[int, int, int, int]], device: torch.device) -> tuple[Tensor, bool]:
    """Chunks of segments (tensor, first element, number of elements, number of the matrix); whether all are aligned."""
    chunks = [
        (tensor, first, min(CHUNK, start + length - first), matrix)
        for tensor, start, length, matrix in segments
        for first in range(start, start + length, CHUNK)
    ]
    aligned = all(first % ALIGNMENT == 0 and length % ALIGNMENT == 0 for _, first, length, _ in chunks)
    return torch.tensor(chunks, dtype=torch.int64).reshape(-1, 4).to(device), aligned


def adamw_update(tensors: TensorList) -> None:
    corrections = torch.empty(2 * tensors.num_tensors, dtype=torch.float32, device=tensors.scalars.device)
    device = tensors.scalars.device
    launch(
        _adamw_count_kernel,
        triton.cdiv(tensors.num_tensors, 128),
        (tensors.addresses, tensors.active, tensors.scalars, corrections, tensors.num_tensors),
        {"BLOCK": 128},
        device,
    )
    if len(tensors.chunks) == 0:  # empty shards count their steps all the same
        return
    launch(
        _adamw_kernel,
        len(tensors.chunks),
        (
            tensors.chunks,
            tensors.addresses,
            tensors.active,
            tensors.scalars,
            corrections,
            tensors.num_tensors,
        ),
        {
            "PARAMETER_TYPE": TYPES[tensors.parameter_dtype],
            "GRADIENT_TYPE": TYPES[tensors.gradient_dtype],
            "ALIGNED": tensors.aligned,
            "CHUNK": CHUNK,
        },
        device,
        num_warps=8,
    )
