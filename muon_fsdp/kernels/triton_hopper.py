"""Compute the symmetric product on Hopper GPUs, in Gluon: Triton's dialect with explicit layouts, barriers and warps.

The kernel computes alpha * A B^T + beta * C + gamma * E. One program per multiprocessor computes the tasks that the
host assigned to it (`schedule.py`). Its warps are specialized:

- Two consumers of four warps multiply one 128 x 128 tile each. Their tiles share an operand, so a step of the inner
  dimension loads three blocks instead of four. Only the ring of blocks synchronizes the two consumers.
- The producer, one warp, loads blocks into the ring. After the blocks of a task it loads the tiles of E.
- One courier per consumer, one warp, moves data between global memory and the consumer's buffer: it loads the tile of
  C, and stores the result and its mirror. The consumer writes the mirror to the buffer while it already multiplies its
  next tile.

Barriers come in pairs: `full` and `empty` for a place in the ring, `granted` and `filled` for a buffer.
"""

# mypy: disallow-untyped-decorators=false

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from muon_fsdp.kernels.launch import Addend, KernelError, launch, num_processors, unpack
from muon_fsdp.kernels.schedule import NO_TILE, packed, schedule

SIDE = 128  # rows and columns of a tile
INNER = 32  # columns of a block of an operand, 128 x 32, and the step along the inner dimension
STAGES = 6  # places in the ring, with three blocks each
_SIDE, _INNER, _STAGES, _NO_TILE = map(gl.constexpr, (SIDE, INNER, STAGES, NO_TILE))
_BLOCK_BYTES, _TILE_BYTES = gl.constexpr(SIDE * INNER * 2), gl.constexpr(SIDE * SIDE * 2)
_BLOCK_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=3)
_TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
_HALF_TILE_LAYOUT = gl.constexpr(_BLOCK_LAYOUT)
# 12 warps (the last one is idle) start with 168 registers per thread. Consumers then get registers from the others.
MAX_REGISTERS = 168
_CONSUMER_REGISTERS, _OTHER_REGISTERS = gl.constexpr(240), gl.constexpr(24)


@gluon.jit  # pragma: no cover
def _tiles(word):  # type: ignore[no-untyped-def]
    """Return two indices of tiles, the index that the tiles share, and whether they share their row."""
    return word & 1023, (word >> 10) & 1023, (word >> 20) & 1023, (word >> 30) != 0


@gluon.jit  # pragma: no cover
def _task(table, number):  # type: ignore[no-untyped-def]
    matrix = gl.load(table + 2 * number)
    first, second, shared, shares_row = _tiles(gl.load(table + 2 * number + 1))
    return matrix, first, second, shared, shares_row


@gluon.jit  # pragma: no cover
def _next(stage, phase):  # type: ignore[no-untyped-def]
    last = stage == _STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit  # pragma: no cover
def _previous(stage):  # type: ignore[no-untyped-def]
    """Return the place before `stage` in the ring.

    The loop must not keep this in a variable of its own: Triton 3.6 treats a variable that starts as a copy of another
    one as invariant in a loop.
    """
    return gl.where(stage == 0, _STAGES - 1, stage - 1)


@gluon.jit  # pragma: no cover
def _half_tile(ring, stage):  # type: ignore[no-untyped-def]
    """Return the first two blocks of a place in the ring as one block, which holds half of a tile of E."""
    return ring.index(3 * stage)._reinterpret(ring.dtype, [1, _SIDE, 2 * _INNER], _HALF_TILE_LAYOUT)


@gluon.jit  # pragma: no cover
def _produce(a, b, e, ring, full, empty, table, num_tasks, num_steps, SAME: gl.constexpr, HAS_E: gl.constexpr):  # type: ignore[no-untyped-def]
    stage = 0
    phase = 1
    for number in range(num_tasks):
        matrix, first, second, shared, shares_row = _task(table, number)
        has_first = first != _NO_TILE
        has_second = second != _NO_TILE
        if SAME:  # on the diagonal both operands are the same block
            has_first = has_first & (first != shared)
            has_second = has_second & (second != shared)
        blocks = 1 + has_first.to(gl.int32) + has_second.to(gl.int32)
        for step in range(num_steps):
            loaded = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(loaded, _BLOCK_BYTES, pred=blocks == 1)
            mbarrier.expect(loaded, 2 * _BLOCK_BYTES, pred=blocks == 2)
            mbarrier.expect(loaded, 3 * _BLOCK_BYTES, pred=blocks == 3)
            x = step * _INNER
            if SAME:
                _load_blocks(a, a, matrix, first, second, shared, x, loaded, ring, stage, has_first, has_second)
            elif shares_row:
                _load_blocks(b, a, matrix, first, second, shared, x, loaded, ring, stage, has_first, has_second)
            else:
                _load_blocks(a, b, matrix, first, second, shared, x, loaded, ring, stage, has_first, has_second)
            stage, phase = _next(stage, phase)
        if HAS_E:  # two halves for each consumer; for a missing tile TMA loads zeros from outside the matrix
            for half in gl.static_range(4):
                index = first if half < 2 else second
                row = gl.where(shares_row, shared, index) * _SIDE
                col = gl.where(shares_row, index, shared) * _SIDE + (half % 2) * 2 * _INNER
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(full.index(stage), 2 * _BLOCK_BYTES)
                tma.async_copy_global_to_shared(e, [matrix, row, col], full.index(stage), _half_tile(ring, stage))
                stage, phase = _next(stage, phase)


@gluon.jit  # pragma: no cover
def _load_blocks(own, common, matrix, first, second, shared, x, loaded, ring, stage, has_first, has_second):  # type: ignore[no-untyped-def]
    block = 3 * stage
    _load_block(common, matrix, shared, x, loaded, ring, block + 2, True)
    _load_block(own, matrix, first, x, loaded, ring, block, has_first)
    _load_block(own, matrix, second, x, loaded, ring, block + 1, has_second)


@gluon.jit  # pragma: no cover
def _load_block(operand, matrix, tile, x, loaded, ring, block, needed):  # type: ignore[no-untyped-def]
    if ring.shape[2] == _SIDE:  # noqa: SIM108 - Gluon has no conditional expression of lists
        place = [matrix, tile * _SIDE, x]
    else:  # the operand is transposed
        place = [matrix, x, tile * _SIDE]
    tma.async_copy_global_to_shared(operand, place, loaded, ring.index(block), pred=needed)


@gluon.jit  # pragma: no cover
def _carry(c, d, buffers, granted, filled, table, num_tasks, HAS_C: gl.constexpr, WHICH: gl.constexpr):  # type: ignore[no-untyped-def]
    """Grant the buffer twice per tile: for the mirror of the previous tile, and for the tile itself, with C loaded.

    The first mirror of a program belongs to no tile and is not stored. The last mirror is stored after all tiles.
    """
    buffer = buffers.index(WHICH)
    grant = granted.index(WHICH)
    fill = filled.index(WHICH)
    matrix = -1
    row = 0
    col = 0
    mbarrier.arrive(grant, count=1)
    for number in range(num_tasks):
        next_matrix, first, second, shared, shares_row = _task(table, number)
        index = second if WHICH else first
        if index != _NO_TILE:
            mbarrier.wait(fill, 0)
            if matrix >= 0:
                tma.async_copy_shared_to_global(d, [matrix, col, row], buffer)
                tma.store_wait(0)
            matrix = next_matrix
            row = gl.where(shares_row, shared, index) * _SIDE
            col = gl.where(shares_row, index, shared) * _SIDE
            if HAS_C:
                mbarrier.expect(grant, _TILE_BYTES)
                tma.async_copy_global_to_shared(c, [matrix, row, col], grant, buffer)
            else:
                mbarrier.arrive(grant, count=1)
            mbarrier.wait(fill, 1)
            tma.async_copy_shared_to_global(d, [matrix, row, col], buffer)
            tma.store_wait(0)
            mbarrier.arrive(grant, count=1)
    mbarrier.wait(fill, 0)
    if matrix >= 0:
        tma.async_copy_shared_to_global(d, [matrix, col, row], buffer)
    tma.store_wait(0)


@gluon.jit  # pragma: no cover
def _pass_by(full, empty, stage, phase, count):  # type: ignore[no-untyped-def]
    """Skip blocks that only the other consumer needs."""
    for _ in range(count):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = _next(stage, phase)
    return stage, phase


@gluon.jit  # pragma: no cover
def _multiply_block(ring, full, acc, left, right, stage, phase):  # type: ignore[no-untyped-def]
    mbarrier.wait(full.index(stage), phase)
    x = ring.index(3 * stage + left).reshape([ring.shape[2], ring.shape[3]])
    y = ring.index(3 * stage + right).reshape([ring.shape[2], ring.shape[3]])
    if ring.shape[2] == _SIDE:
        acc = warpgroup_mma(x, y.permute([1, 0]), acc, is_async=True)
    else:  # operands are transposed
        acc = warpgroup_mma(x.permute([1, 0]), y, acc, is_async=True)
    return acc


@gluon.jit  # pragma: no cover
def _multiply(ring, full, empty, acc, left, right, stage, phase, steps):  # type: ignore[no-untyped-def]
    for _ in range(steps):
        acc = _multiply_block(ring, full, acc, left, right, stage, phase)
        acc = warpgroup_mma_wait(1, deps=[acc])  # wait for the previous step
        mbarrier.arrive(empty.index(_previous(stage)), count=1)
        stage, phase = _next(stage, phase)
    return acc, stage, phase


@gluon.jit  # pragma: no cover
def _load_half(ring, full, empty, stage, phase):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    mbarrier.wait(full.index(stage), phase)
    half = _half_tile(ring, stage).reshape([_SIDE, 2 * _INNER]).load(layout)
    fence_async_shared()
    mbarrier.arrive(empty.index(stage), count=1)
    stage, phase = _next(stage, phase)
    return half, stage, phase


@gluon.jit  # pragma: no cover
def _fill(buffer, result, filled):  # type: ignore[no-untyped-def]
    buffer.store(result)
    fence_async_shared()
    mbarrier.arrive(filled, count=1)


@gluon.jit  # pragma: no cover
def _consume(  # type: ignore[no-untyped-def]
    ring,
    full,
    empty,
    buffers,
    granted,
    filled,
    table,
    num_tasks,
    num_steps,
    steps_before_mirror,
    alpha,
    beta,
    gamma,
    SAME: gl.constexpr,
    HAS_C: gl.constexpr,
    HAS_E: gl.constexpr,
    WHICH: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    buffer = buffers.index(WHICH).reshape([_SIDE, _SIDE])
    mirror = buffer.permute([1, 0])
    grant = granted.index(WHICH)
    fill = filled.index(WHICH)
    stage = 0
    phase = 0
    result = gl.zeros((_SIDE, _SIDE), ring.dtype, layout)
    word = gl.load(table + 1)
    for number in range(num_tasks):
        first, second, shared, shares_row = _tiles(word)
        word = gl.load(table + 2 * number + 3)  # load the next task long before it is needed
        index = second if WHICH else first
        if index == _NO_TILE:
            stage, phase = _pass_by(full, empty, stage, phase, num_steps + (4 if HAS_E else 0))
        else:
            own = WHICH
            if SAME:
                own = gl.where(index == shared, 2, WHICH)
            left = gl.where(shares_row, 2, own)
            right = gl.where(shares_row, own, 2)
            acc = gl.zeros((_SIDE, _SIDE), gl.float32, layout)
            acc = _multiply_block(ring, full, acc, left, right, stage, phase)
            acc = warpgroup_mma_wait(1, deps=[acc])  # no wait: this only gives `acc` the type that the loop needs
            stage, phase = _next(stage, phase)
            steps = steps_before_mirror - 1
            acc, stage, phase = _multiply(ring, full, empty, acc, left, right, stage, phase, steps)
            mbarrier.wait(grant, 0)
            _fill(mirror, result, fill)  # the mirror of the previous tile
            steps = num_steps - steps_before_mirror
            acc, stage, phase = _multiply(ring, full, empty, acc, left, right, stage, phase, steps)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(_previous(stage)), count=1)

            acc *= alpha
            mbarrier.wait(grant, 1)
            if HAS_C:
                acc += beta * buffer.load(layout).to(gl.float32)
            if HAS_E:
                if WHICH == 1:
                    stage, phase = _pass_by(full, empty, stage, phase, 2)
                first_half, stage, phase = _load_half(ring, full, empty, stage, phase)
                second_half, stage, phase = _load_half(ring, full, empty, stage, phase)
                added = gl.join(first_half, second_half).permute(0, 2, 1).reshape([_SIDE, _SIDE])
                acc += gamma * gl.convert_layout(added, layout, assert_trivial=True).to(gl.float32)
            result = acc.to(ring.dtype)
            if not SAME:  # noqa: SIM102 - a constant when the kernel is compiled, unlike the next condition
                if index == shared:  # rounding makes the product of two different matrices asymmetric
                    buffer.store(result)
                    mirrored = mirror.load(layout)
                    i = gl.arange(0, _SIDE, gl.SliceLayout(1, layout))[:, None]
                    j = gl.arange(0, _SIDE, gl.SliceLayout(0, layout))[None, :]
                    result = gl.where(i >= j, result, mirrored)
            _fill(buffer, result, fill)
            if HAS_E and WHICH == 0:
                stage, phase = _pass_by(full, empty, stage, phase, 2)
    mbarrier.wait(grant, 0)
    _fill(mirror, result, fill)


@gluon.jit(do_not_specialize=["line", "num_steps", "steps_before_mirror"])  # pragma: no cover
def _symmetric_hopper_kernel(  # type: ignore[no-untyped-def]
    a, b, c, e, d, table, line, num_steps, steps_before_mirror, alpha, beta, gamma,
    SAME: gl.constexpr, HAS_C: gl.constexpr, HAS_E: gl.constexpr,
):  # fmt: skip
    # A block of an operand is 128 x 32, or 32 x 128 if the operands are transposed.
    ring = gl.allocate_shared_memory(a.dtype, [3 * _STAGES, 1, a.block_shape[1], a.block_shape[2]], a.layout)
    buffers = gl.allocate_shared_memory(d.dtype, [2, 1, _SIDE, _SIDE], d.layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    granted = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(granted.index(i), count=1)
        mbarrier.init(filled.index(i), count=1)
    fence_async_shared()

    table += gl.program_id(0) * line * 2
    num_tasks = gl.load(table)
    table += 2
    gl.warp_specialize(
        [
            (_consume, (ring, full, empty, buffers, granted, filled, table, num_tasks, num_steps, steps_before_mirror,
                        alpha, beta, gamma, SAME, HAS_C, HAS_E, 0)),
            (_consume, (ring, full, empty, buffers, granted, filled, table, num_tasks, num_steps, steps_before_mirror,
                        alpha, beta, gamma, SAME, HAS_C, HAS_E, 1)),
            (_produce, (a, b, e, ring, full, empty, table, num_tasks, num_steps, SAME, HAS_E)),
            (_carry, (c, d, buffers, granted, filled, table, num_tasks, HAS_C, 0)),
            (_carry, (c, d, buffers, granted, filled, table, num_tasks, HAS_C, 1)),
        ],
        [4, 1, 1, 1],
        [_CONSUMER_REGISTERS, _OTHER_REGISTERS, _OTHER_REGISTERS, _OTHER_REGISTERS],
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ host


# Schedules by number of matrices, rows of tiles, whether both operands are the same tensor, and device. A captured CUDA
# graph holds the address of its table, so tables are never freed. They are small.
_tables: dict[tuple[int, int, bool, torch.device], Tensor] = {}


def _table(num_matrices: int, rows_of_tiles: int, same: bool, device: torch.device) -> Tensor:
    """Return the schedule on the device, (programs, tasks, 2) int32."""
    key = (num_matrices, rows_of_tiles, same, device)
    table = _tables.get(key)
    if table is None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a product can't be captured by its first call, which copies a schedule to the device; compute it once "
                "before the capture"
            )
        lists = schedule(num_matrices, rows_of_tiles, num_processors(device), same)
        # Not pinned: the copy is then complete when this line returns, so any stream may read the table.
        table = _tables[key] = torch.tensor(packed(lists), dtype=torch.int32).to(device)
    return table


def symmetric_product(
    a: Tensor,  # (B, m, k), or (B, k, m) if transposed
    b: Tensor,  # the same shape as a
    addends: Sequence[Addend],  # at most two, (B, m, m), symmetric
    out: Tensor,  # (B, m, m)
    *,
    alpha: float = 1.0,
    transposed: bool = False,
) -> Tensor:
    """Compute alpha * a @ b^T plus all addends into `out`, exactly symmetric.

    `select` must have chosen "gluon" for the product: nothing is checked here.

    Returns:
        `out`.
    """
    c, beta, e, gamma = unpack(addends)
    num_matrices, rows, inner = a.shape
    if transposed:
        rows, inner = inner, rows
    table = _table(num_matrices, -(-rows // SIDE), a is b, a.device)
    num_steps = -(-inner // INNER)
    block, layout = ((INNER, SIDE), _TILE_LAYOUT) if transposed else ((SIDE, INNER), _BLOCK_LAYOUT)
    args = (
        _tiled(a, block, layout),
        _tiled(None if a is b else b, block, layout),
        _tiled(c, (SIDE, SIDE), _TILE_LAYOUT),
        _tiled(e, (SIDE, 2 * INNER), _BLOCK_LAYOUT),
        _tiled(out, (SIDE, SIDE), _TILE_LAYOUT),
        table,
        table.shape[1],
        num_steps,
        # Steps before the consumer writes the mirror. If the courier has not yet stored the result from the buffer by
        # then, the consumer has to wait.
        min(8 if inner >= 1024 else 4, num_steps),
        float(alpha),
        float(beta),
        float(gamma),
    )
    constants = {"SAME": a is b, "HAS_C": c is not None, "HAS_E": e is not None}
    try:
        variant = (a.device, a.dtype, transposed)
        launch(_symmetric_hopper_kernel, table.shape[0], args, constants, variant, maxnreg=MAX_REGISTERS)
    except torch.OutOfMemoryError:  # no fault of the kernel: the next call may work
        raise
    except Exception as error:  # Gluon's interface is not stable
        raise KernelError(f"{type(error).__name__}: {error}") from error
    return out


def _tiled(tensor: Tensor | None, block: tuple[int, int], layout: gl.NVMMASharedLayout) -> TensorDescriptor | None:
    if tensor is None:
        return None
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, *block], layout)
