"""Products of vectors with all the parts of weights on this rank, W x and W^T y, by kernels where there are any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muon_fsdp.kernels import unusable
from muon_fsdp.kernels.tables import FUSED_DTYPES, refuse_capture
from muon_fsdp.plan.parts import Block

if TYPE_CHECKING:
    from muon_fsdp.kernels.triton_spectral import Multiplication, Operand


def have_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels multiply vectors of this precision there: TF32 and float64 on tensor cores are NVIDIA's."""
    return dtype == torch.float32 and torch.version.hip is None and unusable(device) is None


class ShardProducts:
    """Products with the parts of matrices in these shards, for vectors of whole matrices.

    Vectors are a list of (count, b, length), one per class of matrices, or flat: those of all classes in a row.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],  # (count, rows, cols) of every class
        blocks: Sequence[Block],
        shards: Mapping[int, Tensor],
    ) -> None:
        self.key = self.key_of(blocks, shards)
        self._shapes, self._blocks, self._shards = shapes, blocks, shards
        # By numbers of vectors: launches for W x, those for W^T y, and what has to be multiplied by the library.
        self._launches: dict[tuple[int, ...], tuple[list[Multiplication], list[Multiplication], list[Block]]] = {}

    @staticmethod
    def key_of(blocks: Sequence[Block], shards: Mapping[int, Tensor]) -> object:
        """What the tables of kernels depend on."""
        of_blocks = [shards[position] for position in dict.fromkeys(block.position for block in blocks)]
        return tuple([(shard.data_ptr(), shard.stride(), shard.dtype) for shard in of_blocks])

    def left(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """W x (count, b, rows), or the part of it that comes from this rank."""
        return self._multiply(vectors, transposed=False)

    def right(self, lefts: Sequence[Tensor]) -> list[Tensor]:
        """W^T y (count, b, cols), or the part of it that comes from this rank."""
        return self._multiply(lefts, transposed=True)

    def _multiply(self, vectors: Sequence[Tensor], *, transposed: bool) -> list[Tensor]:
        if not have_kernels(vectors[0].device, vectors[0].dtype):
            result = [
                x.new_zeros(count, x.shape[1], cols if transposed else rows)
                for (count, rows, cols), x in zip(self._shapes, vectors, strict=True)
            ]
            self._add(self._blocks, vectors, result, transposed)
            return result
        flat = torch.cat([x.reshape(-1) for x in vectors])
        num_vectors = [x.shape[1] for x in vectors]
        if not transposed:
            flat = _rounded(flat)
        return self._split(self.multiply_flat(flat, num_vectors, transposed=transposed), num_vectors, not transposed)

    def multiply_flat(self, vectors: Tensor, num_vectors: Sequence[int], *, transposed: bool) -> Tensor:
        """W x, or W^T y, by kernels; x in TF32."""
        numel = sum(
            count * each * (cols if transposed else rows)
            for (count, rows, cols), each in zip(self._shapes, num_vectors, strict=True)
        )
        result = vectors.new_zeros(numel)
        forward, backward, others = self._launches_for(tuple(num_vectors), vectors.device)
        for multiplication in backward if transposed else forward:
            multiplication.run(vectors, result)
        if others:
            sources = self._split(vectors, num_vectors, transposed)
            self._add(others, sources, self._split(result, num_vectors, not transposed), transposed)
        return result

    def _split(self, flat: Tensor, num_vectors: Sequence[int], along_rows: bool) -> list[Tensor]:
        sizes = [
            (count, each, rows if along_rows else cols)
            for (count, rows, cols), each in zip(self._shapes, num_vectors, strict=True)
        ]
        parts = torch.split(flat, [torch.Size(size).numel() for size in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]

    def _add(
        self, blocks: Sequence[Block], vectors: Sequence[Tensor], result: Sequence[Tensor], transposed: bool
    ) -> None:
        for block in blocks:
            source, target = (block.rows, block.cols) if transposed else (block.cols, block.rows)
            vector = vectors[block.kind][block.matrices, :, source]
            weights = block.of(self._shards[block.position]).to(vector.dtype)
            result[block.kind][block.matrices, :, target] += vector @ (weights if transposed else weights.mT)

    def _launches_for(
        self, num_vectors: tuple[int, ...], device: torch.device
    ) -> tuple[list[Multiplication], list[Multiplication], list[Block]]:
        known = self._launches.get(num_vectors)
        if known is None:
            refuse_capture(device)
            known = self._launches[num_vectors] = self._make_launches(num_vectors, device)
        return known

    def _make_launches(
        self, num_vectors: tuple[int, ...], device: torch.device
    ) -> tuple[list[Multiplication], list[Multiplication], list[Block]]:
        from muon_fsdp.kernels.triton_spectral import Multiplication

        groups: dict[tuple[Any, ...], list[Operand]] = defaultdict(list)
        others: list[Block] = []
        times: dict[tuple[int, int], int] = defaultdict(int)  # that a matrix is written to
        for block in self._blocks:
            shard = self._shards[block.position]
            weights = block.of(shard)
            is_view = weights.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
            if not is_view or shard.dtype not in FUSED_DTYPES:
                others.append(block)
                continue
            for index in range(block.matrices.start, block.matrices.stop):
                turn = times[(block.kind, index)]
                times[(block.kind, index)] += 1
                matrix = weights[index - block.matrices.start]
                operand, swapped = self._operand(block, index, matrix, num_vectors)
                kind = (turn, shard.dtype, swapped, operand.unit, operand.aligned, operand.aligned_rows)
                groups[kind].append(operand)
        launches: tuple[list[Multiplication], list[Multiplication]] = ([], [])
        for kind in sorted(groups, key=lambda kind: int(kind[0])):  # what adds to others comes after them
            turn, dtype, swapped = kind[:3]
            for transposed in (False, True):
                multiplication = Multiplication.of(
                    groups[kind], dtype, device, along_rows=swapped != transposed, adds=turn > 0, rounds=not transposed
                )
                launches[transposed].append(multiplication)
        return (*launches, others)

    def _operand(self, block: Block, index: int, matrix: Tensor, num_vectors: Sequence[int]) -> tuple[Operand, bool]:
        """A part of a matrix, or of the transposed one, as a kernel reads it."""
        from muon_fsdp.kernels.triton_spectral import Operand

        _, rows, cols = self._shapes[block.kind]
        each = num_vectors[block.kind]
        before = list(zip(self._shapes[: block.kind], num_vectors, strict=False))
        first_row = sum(count * number * m for (count, m, _), number in before) + index * each * rows
        first_col = sum(count * number * n for (count, _, n), number in before) + index * each * cols
        row_side = (first_row + block.rows.start, block.rows.step or 1, rows)
        col_side = (first_col + block.cols.start, 1, cols)
        # A stride that is never gone along may be any.
        row_stride = matrix.stride(0) if len(matrix) > 1 else 0
        col_stride = matrix.stride(1) if matrix.shape[1] > 1 else 1
        height, width = matrix.shape
        if row_stride == 1 and col_stride != 1:
            return Operand(matrix.data_ptr(), col_stride, 1, width, height, *col_side, *row_side, each), True
        return Operand(matrix.data_ptr(), row_stride, col_stride, height, width, *row_side, *col_side, each), False


def _rounded(vectors: Tensor) -> Tensor:
    """To the nearest number of TF32, which tensor cores would not do; NaN stays."""
    bits = (vectors.view(torch.int32) + 0x1000) & -0x2000
    return torch.where(vectors.isnan(), vectors, bits.view(torch.float32))
