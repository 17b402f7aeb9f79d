"""Run kernels of the spectral sphere rule: u^T A v and A + c u v^T for batches, W x and W^T y for lists of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from muon_fsdp.kernels.launch import has_aligned_rows, is_aligned, launch
from muon_fsdp.kernels.tables import ALIGNMENT
from muon_fsdp.kernels.triton_elementwise import TYPES
from muon_fsdp.kernels.triton_norms import INT32_MAX
from muon_fsdp.kernels.triton_rows import ROWS, rows_of_program

MAX_VECTORS = 16  # per matrix: the smallest dimension of a tensor-core product, so fewer vectors cost as much


@triton.jit(do_not_specialize=["rows", "cols", "programs_each"], do_not_specialize_on_alignment=["partials", "active"])
def _bilinear_kernel(  # type: ignore[no-untyped-def]
    left, matrices, right, active, partials, rows, cols, programs_each,
    HAS_ACTIVE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # From the end: the matrices that were written last, and those that are read first afterwards, are in the L2 cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    matrix, row, cols, base = rows_of_program(program, programs_each, rows, cols, ROWS, ALIGNED)
    computes = True
    if HAS_ACTIVE:
        computes = tl.load(active + matrix) != 0
    if computes:
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for first in range(0, cols, BLOCK):
            col = first + tl.arange(0, BLOCK)
            mask = (row < rows)[:, None] & (col < cols)[None, :]
            values = tl.load(matrices + base + row[:, None] * cols + col[None, :], mask=mask, other=0.0).to(tl.float32)
            total += values * tl.load(right + matrix * cols + col, mask=col < cols, other=0.0)[None, :]
        weights = tl.load(left + matrix * rows + row, mask=row < rows, other=0.0)
        tl.store(partials + program, tl.sum(tl.sum(total, axis=1) * weights, axis=0))


@triton.jit(do_not_specialize=["rows", "cols", "programs_each"], do_not_specialize_on_alignment=["norms", "partials"])
def _project_out_kernel(  # type: ignore[no-untyped-def]
    matrices, left, right, norms, partials, smallest, rows, cols, programs_each,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Subtract (u^T A v) u v^T from A; `partials` has the parts of u^T A v."""
    matrix = tl.program_id(0) // programs_each
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, programs_each, BLOCK):
        index = first + tl.arange(0, BLOCK)
        sums += tl.load(partials + matrix * programs_each + index, mask=index < programs_each, other=0.0)
    shift = tl.where(tl.load(norms + matrix) >= smallest, -tl.sum(sums, axis=0), 0.0)
    matrix, row, cols, base = rows_of_program(tl.program_id(0), programs_each, rows, cols, ROWS, ALIGNED)
    weights = shift * tl.load(left + matrix * rows + row, mask=row < rows, other=0.0)
    for first in range(0, cols, BLOCK):
        col = first + tl.arange(0, BLOCK)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        at = matrices + base + row[:, None] * cols + col[None, :]
        values = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        values += weights[:, None] * tl.load(right + matrix * cols + col, mask=col < cols, other=0.0)[None, :]
        tl.store(at, values.to(matrices.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["norms", "saved", "lr", "weight_decay"])
def _sphere_factors_kernel(  # type: ignore[no-untyped-def]
    norms, saved, lr, weight_decay, out, count, target, smallest, alpha,
    INITIALIZE: tl.constexpr, DYNAMIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = matrix < count
    norm, old = tl.load(norms + matrix, mask=mask, other=1.0), tl.load(saved + matrix, mask=mask, other=1.0)
    rate = tl.load(lr + matrix, mask=mask, other=0.0)  # float64
    is_regular = norm >= smallest
    radius = tl.zeros((BLOCK,), dtype=tl.float32) + target
    if INITIALIZE:
        radius = tl.where(old == 0, tl.where(is_regular, norm, radius), old)
    factor = radius / tl.where(is_regular, norm, 1.0)
    if DYNAMIC:
        decay = 1.0 - rate * tl.load(weight_decay + matrix, mask=mask, other=0.0)
        beyond = radius - decay * norm
        sign = tl.where(beyond > 0, 1.0, tl.where(beyond < 0, -1.0, 0.0))
        factor = tl.where(old == 0, factor, (decay * (1.0 + alpha * rate * sign)).to(tl.float32))
    moves = is_regular & (rate != 0)
    tl.store(out + matrix, tl.where(moves, factor, 1.0), mask=mask)
    tl.store(out + count + matrix, radius, mask=mask)
    tl.store(out + 2 * count + matrix, tl.where(moves, radius, old), mask=mask)
    tl.store(out + 3 * count + matrix, tl.where(is_regular, norm / radius, float("nan")), mask=mask)
    tl.store(out + 4 * count + matrix, tl.where(is_regular, 0.0, 1.0), mask=mask)


@triton.jit(do_not_specialize=["rows", "cols", "programs_each"], do_not_specialize_on_alignment=["active"])
def _shifted_cast_kernel(  # type: ignore[no-untyped-def]
    matrices, scales, left, right, shifts, factors, active, out, rows, cols, programs_each,
    HAS_ACTIVE: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    matrix, row, cols, base = rows_of_program(tl.program_id(0), programs_each, rows, cols, ROWS, ALIGNED)
    computes = True
    if HAS_ACTIVE:
        computes = tl.load(active + matrix) != 0
    if computes:
        scale, factor = tl.load(scales + matrix), tl.load(factors + matrix)
        weights = tl.load(shifts + matrix) * tl.load(left + matrix * rows + row, mask=row < rows, other=0.0)
        for first in range(0, cols, BLOCK):
            col = first + tl.arange(0, BLOCK)
            mask = (row < rows)[:, None] & (col < cols)[None, :]
            at = base + row[:, None] * cols + col[None, :]
            values = scale * tl.load(matrices + at, mask=mask, other=0.0).to(tl.float32)
            values += weights[:, None] * tl.load(right + matrix * cols + col, mask=col < cols, other=0.0)[None, :]
            values *= factor  # last, because factor * scale could overflow: a tiny matrix has a huge scale
            tl.store(out + at, values.to(out.dtype.element_ty), mask=mask)


def bilinear(
    left: Tensor,  # (B, m) float32
    matrices: Tensor,  # (B, m, n)
    right: Tensor,  # (B, n) float32
    active: Tensor | None = None,  # (B,) int32
) -> Tensor:
    """Return u^T A v of every matrix, (B,), and 0 for matrices that are not active."""
    return _bilinear_parts(left, matrices, right, active).sum(-1)


def _bilinear_parts(left: Tensor, matrices: Tensor, right: Tensor, active: Tensor | None = None) -> Tensor:
    """Return parts of u^T A v, one per program, (B, programs for each matrix)."""
    count, rows, cols = matrices.shape
    each, options = _grid(matrices)
    make = torch.empty if active is None else torch.zeros
    partials = make(count, each, dtype=torch.float32, device=matrices.device)
    launch(
        _bilinear_kernel,
        count * each,
        (left, matrices, right, active, partials, rows, cols, each),
        {"HAS_ACTIVE": active is not None, **options},
        (matrices.device, matrices.dtype, is_aligned(left, matrices, right), matrices.numel() > INT32_MAX),
    )
    return partials


def project_out(
    matrices: Tensor,  # (B, m, n), changed in place
    left: Tensor,  # (B, m) float32
    right: Tensor,  # (B, n) float32
    norms: Tensor,  # (B,) float32
    smallest: float,
) -> None:
    """Subtract (u^T A v) u v^T from every matrix A whose norm is not below `smallest`."""
    count, rows, cols = matrices.shape
    partials = _bilinear_parts(left, matrices, right)
    each, options = _grid(matrices)
    launch(
        _project_out_kernel,
        count * each,
        (matrices, left, right, norms, partials, float(smallest), rows, cols, each),
        options,
        (matrices.device, matrices.dtype, is_aligned(matrices, left, right), matrices.numel() > INT32_MAX),
    )


def sphere_factors(
    norms: Tensor,  # (B,) float32
    saved: Tensor,  # (B,) float32
    lr: Tensor,  # (B,) float64
    weight_decay: Tensor,  # (B,) float64
    target: float,
    alpha: float,
    *,
    smallest: float,
    modes: tuple[str, str],  # of the radius and of the retraction
) -> Tensor:
    """Compute the numbers of `muon_fsdp.linalg.sphere.Retraction` in one launch, (5, B) float32."""
    out = torch.empty(5, len(norms), dtype=torch.float32, device=norms.device)
    launch(
        _sphere_factors_kernel,
        triton.cdiv(len(norms), 128),
        (norms, saved, lr, weight_decay, out, len(norms), float(target), float(smallest), float(alpha)),
        {"INITIALIZE": modes[0] == "initialize", "DYNAMIC": modes[1] == "dynamic", "BLOCK": 128},
        norms.device,
    )
    return out


def shifted_cast(
    matrices: Tensor,  # (B, m, n)
    scales: Tensor,  # (B,)
    left: Tensor,  # (B, m)
    right: Tensor,  # (B, n)
    shifts: Tensor,  # (B,)
    factors: Tensor,  # (B,)
    out: Tensor,  # (B, m, n), in any precision; may be `matrices`
    active: Tensor | None = None,  # (B,) int32
) -> Tensor:
    """Compute factors * (scales * matrices + shifts * left right^T) into `out`; inactive matrices do not change.

    Returns:
        `out`.
    """
    count, rows, cols = matrices.shape
    each, options = _grid(matrices)
    launch(
        _shifted_cast_kernel,
        count * each,
        (matrices, scales, left, right, shifts, factors, active, out, rows, cols, each),
        {"HAS_ACTIVE": active is not None, **options},
        (
            matrices.device,
            matrices.dtype,
            out.dtype,
            is_aligned(matrices, scales, left, right, shifts, factors, out),
            matrices.numel() > INT32_MAX,
        ),
    )
    return out


def _grid(matrices: Tensor) -> tuple[int, dict[str, int | bool]]:
    """Return the number of programs per matrix, and constants of the kernel."""
    options = {"ALIGNED": has_aligned_rows(matrices), "ROWS": ROWS, "BLOCK": 512}
    return triton.cdiv(matrices.shape[1], ROWS), options


# ------------------------------------------------------------------------------------------- products with all weights
#
# Products use TF32, which has 11 significant bits. Rounding W to TF32 changes its spectral norm by at most 2^-11 of the
# norm of |W|, and by 1e-5 if the errors are independent, as in a Gaussian matrix. The rule needs norms to 0.5%.
# Tensor cores truncate float32 operands instead of rounding them, which makes W smaller by 3e-4 on average. The norms
# come from W x, so the kernels round W before that product.


class Operand(NamedTuple):
    """One part of a weight in memory, and the positions of the vectors along its rows and columns in flat buffers.

    A weight that is stored by columns is described as its transpose, with rows and columns swapped.
    """

    address: int
    row_stride: int
    col_stride: int
    rows: int
    cols: int
    row_start: int  # index of the first vector's entry for the first row
    row_step: int  # distance of the entries for two successive rows
    row_vector: int  # distance of two successive vectors
    col_start: int  # the same for columns
    col_step: int
    col_vector: int
    num_vectors: int

    @property
    def unit(self) -> bool:
        """Return whether entries along a row, of the weight and of the vectors, are adjacent in memory."""
        return self.col_stride == self.col_step == 1

    @property
    def aligned(self) -> bool:
        """Return whether rows of the weight and vectors along the columns allow aligned loads."""
        numbers = (self.address, self.row_stride, self.cols, self.col_start, self.col_vector)
        return self.unit and not any(number % ALIGNMENT for number in numbers)

    @property
    def aligned_rows(self) -> bool:
        """Return whether vectors along the rows allow aligned loads."""
        return self.row_step == 1 and self.row_start % ALIGNMENT == 0 and self.row_vector % ALIGNMENT == 0


FIELDS = len(Operand._fields)


@triton.jit
def rounded(values):  # type: ignore[no-untyped-def]
    """Round float32 values to the nearest TF32 number; NaN stays NaN."""
    bits = (values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(values == values, bits.to(tl.float32, bitcast=True), values)


@triton.jit
def _operand(operands, number, TYPE: tl.constexpr, ALIGNED: tl.constexpr, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = operands + FIELDS * number
    base = tl.load(at).to(tl.pointer_type(TYPE))
    row_stride, cols = tl.load(at + 1), tl.load(at + 4)
    if ALIGNED:  # without this hint the compiled kernel loads single elements
        base, row_stride, cols = tl.multiple_of(base, 16), tl.multiple_of(row_stride, 16), tl.multiple_of(cols, 16)
    return base, row_stride, tl.load(at + 2), tl.load(at + 3), cols


@triton.jit
def _side(operands, number, FIELD: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr, FIELDS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = operands + FIELDS * number + FIELD
    start, step, vector = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if UNIT:
        step = 1
    if ALIGNED:
        start, vector = tl.multiple_of(start, 16), tl.multiple_of(vector, 16)
    return start, step, vector


@triton.jit(do_not_specialize_on_alignment=["programs", "operands"])
def _along_columns_kernel(  # type: ignore[no-untyped-def]
    programs, operands, vectors, out,
    TYPE: tl.constexpr, ADD: tl.constexpr, ROUND: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr,
    ALIGNED_ROWS: tl.constexpr, PRECISION: tl.constexpr, FIELDS: tl.constexpr, VECTORS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    number = tl.load(programs + 2 * tl.program_id(0))
    first = tl.multiple_of(tl.load(programs + 2 * tl.program_id(0) + 1), 16)
    base, row_stride, col_stride, rows, cols = _operand(operands, number, TYPE, ALIGNED, FIELDS)
    row_start, row_step, row_vector = _side(operands, number, 5, ALIGNED_ROWS, ALIGNED_ROWS, FIELDS)
    col_start, col_step, col_vector = _side(operands, number, 8, UNIT, ALIGNED, FIELDS)
    if UNIT:
        col_stride = 1
    vector = tl.arange(0, VECTORS)
    has_vector = (vector < tl.load(operands + FIELDS * number + 11))[None, :]
    row = first + tl.arange(0, ROWS)
    targets = out + row_start + vector[None, :] * row_vector + row[:, None] * row_step
    mask = (row < rows)[:, None] & has_vector
    total = tl.zeros((ROWS, VECTORS), dtype=tl.float32)
    for first_col in range(0, cols, COLS):
        col = first_col + tl.arange(0, COLS)
        there = (row < rows)[:, None] & (col < cols)[None, :]
        at = base + row[:, None] * row_stride + col[None, :] * col_stride
        weights = tl.load(at, mask=there, other=0.0).to(tl.float32)
        if ROUND:
            weights = rounded(weights)
        sources = vectors + col_start + vector[None, :] * col_vector + col[:, None] * col_step
        values = tl.load(sources, mask=(col < cols)[:, None] & has_vector, other=0.0)
        total = tl.dot(weights, values, total, input_precision=PRECISION)
    if ADD:
        total += tl.load(targets, mask=mask, other=0.0)
    tl.store(targets, total, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["programs", "operands"])
def _along_rows_kernel(  # type: ignore[no-untyped-def]
    programs, operands, vectors, out,
    TYPE: tl.constexpr, ADD: tl.constexpr, ROUND: tl.constexpr, UNIT: tl.constexpr, ALIGNED: tl.constexpr,
    ALIGNED_ROWS: tl.constexpr, PRECISION: tl.constexpr, FIELDS: tl.constexpr, VECTORS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    number = tl.load(programs + 2 * tl.program_id(0))
    first = tl.multiple_of(tl.load(programs + 2 * tl.program_id(0) + 1), 16)
    base, row_stride, col_stride, rows, cols = _operand(operands, number, TYPE, ALIGNED, FIELDS)
    row_start, row_step, row_vector = _side(operands, number, 5, ALIGNED_ROWS, ALIGNED_ROWS, FIELDS)
    col_start, col_step, col_vector = _side(operands, number, 8, UNIT, ALIGNED, FIELDS)
    if UNIT:
        col_stride = 1
    vector = tl.arange(0, VECTORS)
    has_vector = (vector < tl.load(operands + FIELDS * number + 11))[:, None]
    col = first + tl.arange(0, COLS)
    targets = out + col_start + vector[:, None] * col_vector + col[None, :] * col_step
    mask = has_vector & (col < cols)[None, :]
    total = tl.zeros((VECTORS, COLS), dtype=tl.float32)
    for first_row in range(0, rows, ROWS):
        row = first_row + tl.arange(0, ROWS)
        there = (row < rows)[:, None] & (col < cols)[None, :]
        at = base + row[:, None] * row_stride + col[None, :] * col_stride
        weights = tl.load(at, mask=there, other=0.0).to(tl.float32)
        if ROUND:
            weights = rounded(weights)
        sources = vectors + row_start + vector[:, None] * row_vector + row[None, :] * row_step
        values = tl.load(sources, mask=has_vector & (row < rows)[None, :], other=0.0)
        total = tl.dot(values, weights, total, input_precision=PRECISION)
    if ADD:
        total += tl.load(targets, mask=mask, other=0.0)
    tl.store(targets, total, mask=mask)


class Multiplication(NamedTuple):
    """Products of vectors with many parts of weights, in one launch. No two of them write to the same result."""

    kernel: Any
    operands: Tensor  # (P, fields of `Operand`) int64
    programs: Tensor  # (num_programs, 2) int32: operand, first row or column of the result
    constants: dict[str, Any]
    num_stages: int

    @classmethod
    def of(
        cls,
        operands: Sequence[Operand],  # with the same values of unit, aligned and aligned_rows
        dtype: torch.dtype,
        device: torch.device,
        *,
        along_rows: bool,
        adds: bool,  # add to the result instead of overwriting it
        rounds: bool,  # round the weights to TF32 first
    ) -> Multiplication:
        """Build the tables of a launch on the host and copy them to the device."""
        rows, cols = (torch.tensor([getattr(each, name) for each in operands]) for name in ("rows", "cols"))
        tiles = _tiles(along_rows)
        length, tile = (cols, tiles["COLS"]) if along_rows else (rows, tiles["ROWS"])
        longest_first = torch.argsort(rows if along_rows else cols, descending=True, stable=True)
        counts = ((length + tile - 1) // tile)[longest_first]
        number = torch.repeat_interleave(longest_first, counts)
        starts = torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
        firsts = tile * (torch.arange(len(number)) - starts)
        first = operands[0]
        precision, num_stages = precision_and_stages(torch.version.hip is not None)
        constants = {
            "TYPE": TYPES[dtype],
            "ADD": adds,
            "ROUND": rounds and dtype == torch.float32,  # half precision is exact in TF32
            "UNIT": first.unit,
            "ALIGNED": first.aligned,
            "ALIGNED_ROWS": first.aligned_rows,
            "PRECISION": precision,
            "FIELDS": FIELDS,
            "VECTORS": MAX_VECTORS,
            **tiles,
        }
        return cls(
            _along_rows_kernel if along_rows else _along_columns_kernel,
            torch.tensor(operands, dtype=torch.int64).to(device),
            torch.stack([number, firsts], dim=1).to(torch.int32).to(device),
            constants,
            num_stages,
        )

    def run(self, vectors: Tensor, out: Tensor) -> None:
        """Multiply flat float32 `vectors` with the weights into flat float32 `out`.

        Tensor cores truncate vectors that are not TF32 numbers, so round them first if that matters.
        """
        variant = (vectors.device, is_aligned(vectors, out))
        arguments = (self.programs, self.operands, vectors, out)
        launch(self.kernel, len(self.programs), arguments, self.constants, variant, num_stages=self.num_stages)


def precision_and_stages(is_amd: bool) -> tuple[str, int]:
    """Return the precision of products with weights, and the depth of the pipeline.

    Some AMD GPUs reject TF32, and the MI300 has shared memory for two stages only.
    """
    return ("ieee", 2) if is_amd else ("tf32", 3)


def _tiles(along_rows: bool) -> dict[str, int]:
    return {"ROWS": 64, "COLS": 128 if along_rows else 64}
