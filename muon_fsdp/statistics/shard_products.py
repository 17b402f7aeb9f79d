"""Multiply vectors with the parts of weights on this rank, W x and W^T y, with kernels where they are available."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muon_fsdp.kernels import unusable
from muon_fsdp.kernels.tables import FUSED_DTYPES, refuse_capture
from muon_fsdp.plan.matrix_sets import Block

if TYPE_CHECKING:
    from muon_fsdp.kernels.triton_spectral import Multiplication, Operand


def have_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels can multiply vectors of this dtype on a device.

    The kernels need TF32 and float64 on tensor cores, which only NVIDIA GPUs have.
    """
    return dtype == torch.float32 and torch.version.hip is None and unusable(device) is None


class ShardProducts:
    """Multiplies vectors of whole matrices with the parts of the matrices in some shards.

    Vectors are a list of (count, b, length), one tensor per class of matrices, or flat: one buffer with the vectors of
    all classes in order.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],  # (count, rows, cols) of every class
        blocks: Sequence[Block],
        shards: Mapping[int, Tensor],
    ) -> None:
        self.key = self.key_of(blocks, shards)
        self._shapes, self._blocks, self._shards = shapes, blocks, shards
        # Whether one launch writes every entry of the result, because this rank holds each matrix in one whole block.
        num_whole = sum(
            block.matrices.stop - block.matrices.start
            for block in blocks
            for _, rows, cols in [shapes[block.class_index]]
            if range(rows)[block.rows] == range(rows) and range(cols)[block.cols] == range(cols)
        )
        self._is_whole = num_whole == sum(count for count, _, _ in shapes)
        # By number of vectors per class: launches for W x, launches for W^T y, and blocks that PyTorch multiplies.
        self._launches: dict[tuple[int, ...], tuple[list[Multiplication], list[Multiplication], list[Block]]] = {}

    @staticmethod
    def key_of(blocks: Sequence[Block], shards: Mapping[int, Tensor]) -> object:
        """Return a key that changes whenever the tables of the kernels have to be built again."""
        of_blocks = [shards[position] for position in dict.fromkeys(block.position for block in blocks)]
        return tuple([(shard.data_ptr(), shard.stride(), shard.dtype) for shard in of_blocks])

    def left(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of W x, (count, b, rows) for every class, for vectors (count, b, cols)."""
        return self._multiply(vectors, transposed=False)

    def right(self, lefts: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of W^T y, (count, b, cols) for every class, for vectors (count, b, rows)."""
        return self._multiply(lefts, transposed=True)

    def _multiply(self, vectors: Sequence[Tensor], *, transposed: bool) -> list[Tensor]:
        num_vectors = [x.shape[1] for x in vectors]
        if not have_kernels(vectors[0].device, vectors[0].dtype):
            result = [vectors[0].new_zeros(size) for size in self._sizes(num_vectors, not transposed)]
            self._add(self._blocks, vectors, result, transposed)
            return result
        flat = torch.cat([x.reshape(-1) for x in vectors])
        if not transposed:
            flat = _rounded(flat)
        return self._split(self.multiply_flat(flat, num_vectors, transposed=transposed), num_vectors, not transposed)

    def multiply_flat(self, vectors: Tensor, num_vectors: Sequence[int], *, transposed: bool) -> Tensor:
        """Return W x, or W^T y if transposed, for vectors in a flat buffer, computed with kernels.

        x must be rounded to TF32, because tensor cores would truncate it.
        """
        numel = sum(size.numel() for size in self._sizes(num_vectors, not transposed))
        forward, backward, others = self._launches_for(tuple(num_vectors), vectors.device)
        result = vectors.new_empty(numel) if self._is_whole and not others else vectors.new_zeros(numel)
        for multiplication in backward if transposed else forward:
            multiplication.run(vectors, result)
        if others:
            sources = self._split(vectors, num_vectors, transposed)
            self._add(others, sources, self._split(result, num_vectors, not transposed), transposed)
        return result

    def _sizes(self, num_vectors: Sequence[int], along_rows: bool) -> list[torch.Size]:
        """Return (count, b, length) of the vectors of every class, along its rows or along its columns."""
        return [
            torch.Size((count, each, rows if along_rows else cols))
            for (count, rows, cols), each in zip(self._shapes, num_vectors, strict=True)
        ]

    def _split(self, flat: Tensor, num_vectors: Sequence[int], along_rows: bool) -> list[Tensor]:
        sizes = self._sizes(num_vectors, along_rows)
        parts = torch.split(flat, [size.numel() for size in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]

    def _add(
        self, blocks: Sequence[Block], vectors: Sequence[Tensor], result: Sequence[Tensor], transposed: bool
    ) -> None:
        for block in blocks:
            source, target = (block.rows, block.cols) if transposed else (block.cols, block.rows)
            vector = vectors[block.class_index][block.matrices, :, source]
            weights = block.of(self._shards[block.position]).to(vector.dtype)
            result[block.class_index][block.matrices, :, target] += vector @ (weights if transposed else weights.mT)

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
        times: dict[tuple[int, int], int] = defaultdict(int)  # how many launches write to a matrix so far
        for block in self._blocks:
            shard = self._shards[block.position]
            weights = block.of(shard)
            is_view = weights.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
            if not is_view or shard.dtype not in FUSED_DTYPES:
                others.append(block)
                continue
            for index in range(block.matrices.start, block.matrices.stop):
                turn = times[(block.class_index, index)]
                times[(block.class_index, index)] += 1
                matrix = weights[index - block.matrices.start]
                operand, swapped = self._operand(block, index, matrix, num_vectors)
                key = (turn, shard.dtype, swapped, operand.unit, operand.aligned, operand.aligned_rows)
                groups[key].append(operand)
        launches: tuple[list[Multiplication], list[Multiplication]] = ([], [])
        # Launches that add to a result come after the one that writes it.
        for key in sorted(groups, key=lambda key: int(key[0])):
            turn, dtype, swapped = key[:3]
            for transposed in (False, True):
                multiplication = Multiplication.of(
                    groups[key], dtype, device, along_rows=swapped != transposed, adds=turn > 0, rounds=not transposed
                )
                launches[transposed].append(multiplication)
        return (*launches, others)

    def _operand(self, block: Block, index: int, matrix: Tensor, num_vectors: Sequence[int]) -> tuple[Operand, bool]:
        """Describe a part of a matrix, or of its transpose, for a kernel.

        Returns:
            The operand, and whether rows and columns are swapped in it.
        """
        from muon_fsdp.kernels.triton_spectral import Operand

        _, rows, cols = self._shapes[block.class_index]
        each = num_vectors[block.class_index]
        before = list(zip(self._shapes[: block.class_index], num_vectors, strict=False))
        first_row = sum(count * number * m for (count, m, _), number in before) + index * each * rows
        first_col = sum(count * number * n for (count, _, n), number in before) + index * each * cols
        row_side = (first_row + block.rows.start, block.rows.step or 1, rows)
        col_side = (first_col + block.cols.start, 1, cols)
        # The stride of a dimension of size 1 is arbitrary in PyTorch, so it gets the value that kernels prefer.
        row_stride = matrix.stride(0) if len(matrix) > 1 else 0
        col_stride = matrix.stride(1) if matrix.shape[1] > 1 else 1
        height, width = matrix.shape
        if row_stride == 1 and col_stride != 1:
            return Operand(matrix.data_ptr(), col_stride, 1, width, height, *col_side, *row_side, each), True
        return Operand(matrix.data_ptr(), row_stride, col_stride, height, width, *row_side, *col_side, each), False


def _rounded(vectors: Tensor) -> Tensor:
    """Round float32 vectors to the nearest TF32 number, because tensor cores truncate. NaN stays NaN."""
    bits = (vectors.view(torch.int32) + 0x1000) & -0x2000
    return torch.where(vectors.isnan(), vectors, bits.view(torch.float32))
