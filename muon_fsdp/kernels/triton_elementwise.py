"""Update many tensors element-wise in one kernel launch.

A kernel finds its tensors through a table of addresses in device memory. A captured launch therefore uses the
gradients, states, weights and lr that are in the table when it runs, not those at the time of the capture.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muon_fsdp.kernels.launch import launch
from muon_fsdp.kernels.tables import ADAMW_LAYOUT, CHUNK, MUON_LAYOUT, REMAINDER, SCALES, TensorList
from muon_fsdp.kernels.triton_norms import partial_norm
from muon_fsdp.kernels.triton_rounding import ROUNDINGS, STOCHASTIC, WITH_REMAINDER, load_weight, store_weight
from muon_fsdp.kernels.triton_state import (
    CODES,
    IN_BLOCKS,
    PLAIN,
    blocks_of_chunk,
    element_bits,
    load_state,
    store_state,
)

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.int8: tl.int8}

# Indices in tables that are the same in all layouts.
GRADIENT_ROW = tl.constexpr(MUON_LAYOUT.row("gradient"))
PARAMETER_ROW = tl.constexpr(MUON_LAYOUT.row("parameter"))
LR = tl.constexpr(MUON_LAYOUT.scalar("lr"))
WEIGHT_DECAY = tl.constexpr(MUON_LAYOUT.scalar("weight_decay"))
GRADIENT_FACTOR = tl.constexpr(MUON_LAYOUT.scalar("gradient_factor"))

_BUFFER_ROW = tl.constexpr(MUON_LAYOUT.row("momentum_buffer"))
_BUFFER_SCALES_ROW = tl.constexpr(MUON_LAYOUT.with_scales().row("momentum_buffer" + SCALES))
_MOMENTUM = tl.constexpr(MUON_LAYOUT.scalar("momentum"))

_FIRST_ROW = tl.constexpr(ADAMW_LAYOUT.row("momentum_buffer"))
_SECOND_ROW = tl.constexpr(ADAMW_LAYOUT.row("second_moment"))
_FIRST_SCALES_ROW = tl.constexpr(ADAMW_LAYOUT.with_scales().row("momentum_buffer" + SCALES))
_SECOND_SCALES_ROW = tl.constexpr(ADAMW_LAYOUT.with_scales().row("second_moment" + SCALES))
_STEP_ROW = tl.constexpr(ADAMW_LAYOUT.row("step"))
_BETA2 = tl.constexpr(ADAMW_LAYOUT.scalar("beta2"))
_EPS = tl.constexpr(ADAMW_LAYOUT.scalar("eps"))
_LOG_BETA1 = tl.constexpr(ADAMW_LAYOUT.scalar("log_beta1"))
_LOG_BETA2 = tl.constexpr(ADAMW_LAYOUT.scalar("log_beta2"))
_ONE_MINUS_BETA1 = tl.constexpr(ADAMW_LAYOUT.scalar("one_minus_beta1"))
_ONE_MINUS_BETA2 = tl.constexpr(ADAMW_LAYOUT.scalar("one_minus_beta2"))


@triton.jit
def tensor_chunk(chunks, index, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    tensor = tl.load(chunks + 4 * index)
    start = tl.load(chunks + 4 * index + 1)
    length = tl.load(chunks + 4 * index + 2)
    if ALIGNED:  # without this hint the compiled kernel loads single elements
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
    """Return a chunk of the gradient times the gradient factor, or zeros if the gradient is missing."""
    there = tl.load(addresses + GRADIENT_ROW * num_tensors + tensor) != 0
    pointer = tensor_pointer(addresses, GRADIENT_ROW, tensor, num_tensors, TYPE, ALIGNED)
    return tl.load(pointer + start + offset, mask=mask & there, other=0.0).to(tl.float32) * tl.load(
        scalars + GRADIENT_FACTOR
    )


@triton.jit
def _state_chunk(chunks, updated, places, CODE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the tensor of this program, whether it is updated, its first element and the others counted from it, which
    of them exist, their blocks if state is stored in blocks, and which blocks exist and are updated.
    """
    index = tl.program_id(0)
    is_updated = tl.load(updated + tl.load(chunks + 4 * index)) != 0
    if CODE == IN_BLOCKS:
        tensor, first, count = tensor_chunk(chunks, index, False)
        block, has_block, offset, here = blocks_of_chunk(places, tensor, first, count, ALIGNED, CHUNK)
        start, has_block = 0, has_block & is_updated
    else:
        tensor, start, length = tensor_chunk(chunks, index, ALIGNED)
        offset = tl.arange(0, CHUNK)
        here = offset < length
        block, has_block = start, is_updated
    return tensor, is_updated, start, offset, here, block, has_block


@triton.jit
def _decayed(weight, update, decay, CAUTIOUS: tl.constexpr):  # type: ignore[no-untyped-def]
    if CAUTIOUS:  # decay where update * weight >= 0; by signs, because a product may underflow
        decay = tl.where(((weight >= 0) & (update >= 0)) | ((weight <= 0) & (update <= 0)), decay, 0.0)
    return weight * (1.0 - decay)


@triton.jit(
    do_not_specialize=["num_tensors"],
    do_not_specialize_on_alignment=["chunks", "addresses", "updated", "scalars", "slots", "places"],
)
def _muon_prepare_kernel(  # type: ignore[no-untyped-def]
    chunks,
    addresses,
    updated,
    scalars,
    slots,
    staging,
    partials,
    places,
    num_tensors,
    NESTEROV: tl.constexpr,
    NORMS: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    STATE_TYPE: tl.constexpr,
    CODE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    tensor, is_updated, start, offset, here, block, has_block = _state_chunk(
        chunks, updated, places, CODE, ALIGNED, CHUNK
    )
    scales = addresses
    if CODE == IN_BLOCKS:
        scales = tensor_pointer(addresses, _BUFFER_SCALES_ROW, tensor, num_tensors, tl.float32, False)
    mask = here & is_updated
    momentum = tl.load(scalars + _MOMENTUM)
    grad = gradient_chunk(addresses, scalars, tensor, num_tensors, start, offset, mask, GRADIENT_TYPE, ALIGNED)
    buffer = tensor_pointer(addresses, _BUFFER_ROW, tensor, num_tensors, STATE_TYPE, ALIGNED) + start
    update = momentum * load_state(buffer, scales, offset, mask, block, has_block, CODE, False) + grad
    store_state(buffer, scales, offset, mask, block, has_block, update, 0, CODE, False)
    if NESTEROV:
        update = grad + momentum * update
    staged = update.to(staging.dtype.element_ty)
    slot = tl.multiple_of(tl.load(slots + tensor), 16)
    tl.store(staging + slot + start + offset, staged, mask=here)
    if NORMS:
        largest, squares = partial_norm(tl.reshape(staged.to(tl.float32), (CHUNK,)))
        partial = tl.load(chunks + 4 * tl.program_id(0) + 3)
        tl.store(partials + 2 * partial, largest)
        tl.store(partials + 2 * partial + 1, squares)


@triton.jit(
    do_not_specialize=["num_tensors", "num_factors"],
    do_not_specialize_on_alignment=[
        "chunks",
        "addresses",
        "updated",
        "scalars",
        "slots",
        "factors",
        "places",
        "random",
    ],
)
def _apply_kernel(  # type: ignore[no-untyped-def]
    chunks,
    addresses,
    updated,
    scalars,
    slots,
    updates,
    factors,
    places,
    random,
    num_tensors,
    num_factors,
    HAS_FACTORS: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    PARAMETER_TYPE: tl.constexpr,
    ROUNDING: tl.constexpr,
    REMAINDER_ROW: tl.constexpr,
    ONE_RUN: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    tensor, start, length = tensor_chunk(chunks, tl.program_id(0), ALIGNED)
    offset = tl.arange(0, CHUNK)
    mask = (offset < length) & (tl.load(updated + tensor) != 0)
    lr, weight_decay = tl.load(scalars + LR), tl.load(scalars + WEIGHT_DECAY)
    slot = tl.multiple_of(tl.load(slots + tensor), 16)
    update = tl.load(updates + slot + start + offset, mask=mask, other=0.0).to(tl.float32)
    pointer = tensor_pointer(addresses, PARAMETER_ROW, tensor, num_tensors, PARAMETER_TYPE, ALIGNED) + start
    remainders = addresses
    if ROUNDING == WITH_REMAINDER:
        remainders = tensor_pointer(addresses, REMAINDER_ROW, tensor, num_tensors, tl.int8, ALIGNED) + start
    weight = load_weight(pointer, remainders, offset, mask, ROUNDING, PARAMETER_TYPE)
    if HAS_FACTORS:
        matrix = tl.load(chunks + 4 * tl.program_id(0) + 3)
        weight = weight * tl.load(factors + matrix) - lr * tl.load(factors + num_factors + matrix) * update
    else:
        weight = _decayed(weight, update, lr * weight_decay, CAUTIOUS) - lr * update
    bits = 0
    if ROUNDING == STOCHASTIC:
        bits = element_bits(places, tensor, random, start + offset, ONE_RUN)
    store_weight(pointer, remainders, offset, mask, weight, bits, ROUNDING, PARAMETER_TYPE)


@triton.jit(
    do_not_specialize=["num_tensors"], do_not_specialize_on_alignment=["addresses", "updated", "scalars", "corrections"]
)
def _adamw_count_kernel(addresses, updated, scalars, corrections, num_tensors, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Increment the step count t of every updated tensor, and store 1 - beta^t for both betas."""
    tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = tensor < num_tensors
    counts = mask & (tl.load(updated + tensor, mask=mask, other=0) != 0)
    pointer = tl.load(addresses + _STEP_ROW * num_tensors + tensor, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(pointer, mask=counts, other=0.0) + 1.0
    tl.store(pointer, step, mask=counts)
    # In float64, because float32 would lose three digits at beta = 0.999 and t = 1.
    first = 1.0 - tl.exp(step.to(tl.float64) * tl.load(scalars + _LOG_BETA1).to(tl.float64))
    second = 1.0 - tl.exp(step.to(tl.float64) * tl.load(scalars + _LOG_BETA2).to(tl.float64))
    tl.store(corrections + tensor, first.to(tl.float32), mask=mask)
    tl.store(corrections + num_tensors + tensor, second.to(tl.float32), mask=mask)


@triton.jit(
    do_not_specialize=["num_tensors"],
    do_not_specialize_on_alignment=["chunks", "addresses", "updated", "scalars", "corrections", "places", "random"],
)
def _adamw_kernel(  # type: ignore[no-untyped-def]
    chunks,
    addresses,
    updated,
    scalars,
    corrections,
    places,
    random,
    num_tensors,
    CAUTIOUS: tl.constexpr,
    PARAMETER_TYPE: tl.constexpr,
    GRADIENT_TYPE: tl.constexpr,
    FIRST_TYPE: tl.constexpr,
    SECOND_TYPE: tl.constexpr,
    CODE: tl.constexpr,
    ROUNDING: tl.constexpr,
    REMAINDER_ROW: tl.constexpr,
    ONE_RUN: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    tensor, is_updated, start, offset, here, block, has_block = _state_chunk(
        chunks, updated, places, CODE, ALIGNED, CHUNK
    )
    first_scales, second_scales = addresses, addresses
    if CODE == IN_BLOCKS:
        first_scales = tensor_pointer(addresses, _FIRST_SCALES_ROW, tensor, num_tensors, tl.float32, False)
        second_scales = tensor_pointer(addresses, _SECOND_SCALES_ROW, tensor, num_tensors, tl.float32, False)
    mask = here & is_updated
    lr, weight_decay = tl.load(scalars + LR), tl.load(scalars + WEIGHT_DECAY)
    beta2, eps = tl.load(scalars + _BETA2), tl.load(scalars + _EPS)
    rest1, rest2 = tl.load(scalars + _ONE_MINUS_BETA1), tl.load(scalars + _ONE_MINUS_BETA2)
    grad = gradient_chunk(addresses, scalars, tensor, num_tensors, start, offset, mask, GRADIENT_TYPE, ALIGNED)
    first_pointer = tensor_pointer(addresses, _FIRST_ROW, tensor, num_tensors, FIRST_TYPE, ALIGNED) + start
    second_pointer = tensor_pointer(addresses, _SECOND_ROW, tensor, num_tensors, SECOND_TYPE, ALIGNED) + start
    first = load_state(first_pointer, first_scales, offset, mask, block, has_block, CODE, False)
    first += rest1 * (grad - first)
    second = beta2 * load_state(second_pointer, second_scales, offset, mask, block, has_block, CODE, True)
    second += rest2 * grad * grad
    bits = 0
    if CODE != PLAIN or ROUNDING == STOCHASTIC:
        bits = element_bits(places, tensor, random, start + offset, ONE_RUN)
    store_state(first_pointer, first_scales, offset, mask, block, has_block, first, 0, CODE, False)
    store_state(second_pointer, second_scales, offset, mask, block, has_block, second, bits, CODE, True)
    correction1, correction2 = tl.load(corrections + tensor), tl.load(corrections + num_tensors + tensor)
    update = first / correction1 / (tl.sqrt(second / correction2) + eps)
    pointer = tensor_pointer(addresses, PARAMETER_ROW, tensor, num_tensors, PARAMETER_TYPE, ALIGNED) + start
    remainders = addresses
    if ROUNDING == WITH_REMAINDER:
        remainders = tensor_pointer(addresses, REMAINDER_ROW, tensor, num_tensors, tl.int8, ALIGNED) + start
    weight = load_weight(pointer, remainders, offset, mask, ROUNDING, PARAMETER_TYPE)
    weight = _decayed(weight, update, lr * weight_decay, CAUTIOUS) - lr * update
    store_weight(pointer, remainders, offset, mask, weight, bits, ROUNDING, PARAMETER_TYPE)


def muon_prepare(tensors: TensorList, staging: Tensor, partials: Tensor | None, *, nesterov: bool) -> None:
    """Update momentum buffers, buf <- momentum * buf + grad, and write the input of the orthogonalization to `staging`.

    The input is buf, or grad + momentum * buf with Nesterov momentum. Unless `partials` is None, the kernel also
    stores the partial norm of every chunk of the input there.
    """
    launch(
        _muon_prepare_kernel,
        len(tensors.state_chunks),
        (tensors.state_chunks, *tensors.tables, tensors.slots, staging, partials, tensors.places, tensors.num_tensors),
        {
            "NESTEROV": nesterov,
            "NORMS": partials is not None,
            "GRADIENT_TYPE": TYPES[tensors.gradient_dtype],
            "STATE_TYPE": TYPES[tensors.state_dtype],
            "CODE": CODES[tensors.state_dtype],
            "ALIGNED": tensors.aligned_state,
            "CHUNK": CHUNK,
        },
        (staging.device, staging.dtype, tensors.places is None),
        num_warps=8,
    )


def apply_updates(
    tensors: TensorList, updates: Tensor, factors: Tensor | None = None, *, cautious: bool = False
) -> None:
    """Apply updates U to weights: W <- W (1 - lr * weight_decay) - lr * U; with `cautious`, decay where U W >= 0.

    With factors, (2, num_matrices), of rows f and R, it is W <- f W - lr * R * U, without weight decay. The last
    column of the chunks must then be the index of the matrix.
    """
    launch(
        _apply_kernel,
        len(tensors.chunks),
        (
            tensors.chunks,
            *tensors.tables,
            tensors.slots,
            updates,
            factors,
            tensors.places,
            tensors.random,
            tensors.num_tensors,
            0 if factors is None else factors.shape[1],
        ),
        {
            "HAS_FACTORS": factors is not None,
            "CAUTIOUS": cautious,
            "PARAMETER_TYPE": TYPES[tensors.parameter_dtype],
            **_rounding(tensors),
            "ONE_RUN": tensors.one_run,
            "ALIGNED": tensors.aligned,
            "CHUNK": CHUNK,
        },
        (updates.device, updates.dtype, tensors.places is None),
        num_warps=8,
    )


def adamw_update(tensors: TensorList, *, cautious: bool = False) -> None:
    """Run one AdamW step: count it, update both moments, and update the weights.

    With `cautious`, only weights with U W >= 0 decay.
    """
    device = tensors.scalars.device
    corrections = torch.empty(2 * tensors.num_tensors, dtype=torch.float32, device=device)
    launch(  # also on ranks whose shards are all empty, so that state is the same on all ranks
        _adamw_count_kernel,
        triton.cdiv(tensors.num_tensors, 128),
        (*tensors.tables, corrections, tensors.num_tensors),
        {"BLOCK": 128},
        device,
    )
    launch(
        _adamw_kernel,
        len(tensors.state_chunks),
        (
            tensors.state_chunks,
            *tensors.tables,
            corrections,
            tensors.places,
            tensors.random,
            tensors.num_tensors,
        ),
        {
            "CAUTIOUS": cautious,
            "PARAMETER_TYPE": TYPES[tensors.parameter_dtype],
            "GRADIENT_TYPE": TYPES[tensors.gradient_dtype],
            "FIRST_TYPE": TYPES[tensors.state_dtype],
            "SECOND_TYPE": tl.uint8 if tensors.state_dtype is torch.int8 else TYPES[tensors.state_dtype],
            "CODE": CODES[tensors.state_dtype],
            **_rounding(tensors),
            "ONE_RUN": tensors.one_run,
            "ALIGNED": tensors.aligned_state,
            "CHUNK": CHUNK,
        },
        (device, tensors.places is None),
        num_warps=8,
    )


def _rounding(tensors: TensorList) -> dict[str, int]:
    """Return the constants ROUNDING and REMAINDER_ROW of kernels."""
    row = tensors.layout.row(REMAINDER) if tensors.rounding == "remainder" else 0
    return {"ROUNDING": ROUNDINGS[tensors.rounding], "REMAINDER_ROW": row}
