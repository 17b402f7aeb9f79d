"""Run the kernels of the element-wise pair (`muon_fsdp.optimizers.elementwise`): gradient norms and the update."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muon_fsdp.kernels.launch import launch
from muon_fsdp.kernels.tables import CHUNK, PAIR_LAYOUT, TensorList
from muon_fsdp.kernels.triton_elementwise import (
    GRADIENT_ROW,
    LR,
    PARAMETER_ROW,
    TYPES,
    WEIGHT_DECAY,
    gradient_chunk,
    tensor_chunk,
    tensor_pointer,
)
from muon_fsdp.kernels.triton_norms import partial_norm

EPSILON = tl.constexpr(1e-8)
PARTIALS_AT_ONCE = 1024
BLOCK = 4096  # elements at a time: more would use so many registers that fewer loads are in flight
WARPS = 16
_TABLES = ["chunks", "addresses", "scalars"]

_FIRST_ROW = tl.constexpr(PAIR_LAYOUT.row("momentum"))
_SECOND_ROW = tl.constexpr(PAIR_LAYOUT.row("velocity"))
_MOMENTUM = tl.constexpr(PAIR_LAYOUT.scalar("momentum"))
_VELOCITY = tl.constexpr(PAIR_LAYOUT.scalar("velocity"))
_ONE_MINUS_MOMENTUM = tl.constexpr(PAIR_LAYOUT.scalar("one_minus_momentum"))
_ONE_MINUS_VELOCITY = tl.constexpr(PAIR_LAYOUT.scalar("one_minus_velocity"))


@triton.jit(do_not_specialize=["num_tensors"], do_not_specialize_on_alignment=_TABLES)
def _sums_of_squares_kernel(  # type: ignore[no-untyped-def]
    chunks,
    addresses,
    scalars,
    first_chunk,
    partials,
    counters,
    sums,
    num_tensors,
    COUPLED: tl.constexpr,
    PARAMETER_TYPE: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the squares of every chunk, and of every tensor.

    The program that finishes the last chunk of a tensor adds up all its chunks in a fixed order, so the result does not
    depend on which program that is.
    """
    index = tl.program_id(0)
    tensor, start, length = tensor_chunk(chunks, index, ALIGNED)
    offset = tl.arange(0, CHUNK)
    mask = (offset < length) & (tl.load(addresses + GRADIENT_ROW * num_tensors + tensor) != 0)
    grad = gradient_chunk(addresses, scalars, tensor, num_tensors, start, offset, mask, GRADIENT_TYPE, ALIGNED)
    if COUPLED:
        pointer = (
            tensor_pointer(addresses, PARAMETER_ROW, tensor, num_tensors, PARAMETER_TYPE, ALIGNED) + start + offset
        )
        grad += tl.load(scalars + WEIGHT_DECAY) * tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    largest, squares = partial_norm(grad)
    tl.store(partials + index, squares.to(tl.float64) * largest.to(tl.float64) * largest.to(tl.float64))
    first, stop = tl.load(first_chunk + tensor), tl.load(first_chunk + tensor + 1)
    tl.debug_barrier()  # the partial sum must be written before the chunk counts as finished
    if tl.atomic_add(counters + tensor, 1) == stop - first - 1:
        total = tl.zeros((BLOCK,), dtype=tl.float64)
        for chunk in range(first, stop, BLOCK):
            lanes = chunk + tl.arange(0, BLOCK)
            total += tl.load(partials + lanes, mask=lanes < stop, other=0.0, cache_modifier=".cg")
        tl.store(sums + tensor, tl.sum(total, axis=0))
        tl.store(counters + tensor, 0)


@triton.jit(do_not_specialize=["num_tensors"], do_not_specialize_on_alignment=_TABLES)
def _update_kernel(  # type: ignore[no-untyped-def]
    chunks,
    addresses,
    scalars,
    sums,
    num_tensors,
    COUPLED: tl.constexpr,
    NESTEROV: tl.constexpr,
    NORM: tl.constexpr,
    PARAMETER_TYPE: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor, start, length = tensor_chunk(chunks, tl.program_id(0), ALIGNED)
    there = tl.load(addresses + GRADIENT_ROW * num_tensors + tensor) != 0
    lr, weight_decay = tl.load(scalars + LR), tl.load(scalars + WEIGHT_DECAY)
    beta1, beta2 = tl.load(scalars + _MOMENTUM), tl.load(scalars + _VELOCITY)
    # 1 - beta comes from the host, because computing it in float32 would lose digits.
    rest1, rest2 = tl.load(scalars + _ONE_MINUS_MOMENTUM), tl.load(scalars + _ONE_MINUS_VELOCITY)
    for begin in range(0, CHUNK, BLOCK):
        offset = begin + tl.arange(0, BLOCK)
        mask = (offset < length) & there
        grad = gradient_chunk(addresses, scalars, tensor, num_tensors, start, offset, mask, GRADIENT_TYPE, ALIGNED)
        pointer = (
            tensor_pointer(addresses, PARAMETER_ROW, tensor, num_tensors, PARAMETER_TYPE, ALIGNED) + start + offset
        )
        first_pointer = tensor_pointer(addresses, _FIRST_ROW, tensor, num_tensors, tl.float32, ALIGNED) + start + offset
        second_pointer = (
            tensor_pointer(addresses, _SECOND_ROW, tensor, num_tensors, tl.float32, ALIGNED) + start + offset
        )
        weight = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
        if COUPLED:
            grad += weight_decay * weight
        if NORM:
            grad /= (tl.sqrt(tl.load(sums + tensor)) + EPSILON).to(tl.float32)
        first = beta1 * tl.load(first_pointer, mask=mask, other=0.0) + rest1 * grad
        second = beta2 * tl.load(second_pointer, mask=mask, other=0.0) + rest2 * grad * grad
        tl.store(first_pointer, first, mask=mask)
        tl.store(second_pointer, second, mask=mask)
        if NESTEROV:
            first = beta1 * first + rest1 * grad
        if not COUPLED:
            weight *= 1.0 - lr * weight_decay
        weight -= lr / (tl.sqrt(second) + EPSILON) * first
        tl.store(pointer, weight.to(PARAMETER_TYPE), mask=mask)


def sums_of_squares(tensors: TensorList, counters: Tensor, *, coupled: bool) -> Tensor:
    """Return the sum of squares of every gradient, (num_tensors,) in float64.

    If `coupled`, weight_decay * W is part of the gradient. `counters` must be zeros; the kernel resets them.
    """
    device = tensors.scalars.device
    sums = torch.zeros(tensors.num_tensors, dtype=torch.float64, device=device)
    partials = torch.empty(len(tensors.chunks), dtype=torch.float64, device=device)
    launch(
        _sums_of_squares_kernel,
        len(tensors.chunks),
        (
            tensors.chunks,
            tensors.addresses,
            tensors.scalars,
            tensors.first_partials,
            partials,
            counters,
            sums,
            tensors.num_tensors,
        ),
        {
            "COUPLED": coupled,
            "PARAMETER_TYPE": TYPES[tensors.parameter_dtype],
            "GRADIENT_TYPE": TYPES[tensors.gradient_dtype],
            "ALIGNED": tensors.aligned,
            "CHUNK": CHUNK,
            "BLOCK": PARTIALS_AT_ONCE,
        },
        device,
        num_warps=8,
    )
    return sums


def update(tensors: TensorList, sums: Tensor | None, *, coupled: bool, nesterov: bool) -> None:
    """Update both moments and the weights; gradients are divided by their norms unless `sums` is None."""
    launch(
        _update_kernel,
        len(tensors.chunks),
        (tensors.chunks, tensors.addresses, tensors.scalars, sums, tensors.num_tensors),
        {
            "COUPLED": coupled,
            "NESTEROV": nesterov,
            "NORM": sums is not None,
            "PARAMETER_TYPE": TYPES[tensors.parameter_dtype],
            "GRADIENT_TYPE": TYPES[tensors.gradient_dtype],
            "ALIGNED": tensors.aligned,
            "CHUNK": CHUNK,
            "BLOCK": BLOCK,
        },
        tensors.scalars.device,
        num_warps=WARPS,
    )
