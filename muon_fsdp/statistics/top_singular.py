"""Find the top singular triples of weights on shards, without gathering a weight W.

Every rank multiplies vectors with the parts of W that it holds, and all-reduces add up the products, for all matrices
on the same ranks at once. The vectors are small, and every rank holds all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muon_fsdp.comm.dtensors import layout_of, local
from muon_fsdp.comm.process_groups import group_like, make_group, my_rank
from muon_fsdp.comm.recorder import Recorder
from muon_fsdp.comm.transfers import add_up
from muon_fsdp.declarations.state import num_vectors, working_dtype
from muon_fsdp.declarations.views import matrix_view
from muon_fsdp.kernels import on_device
from muon_fsdp.linalg.power_iteration import COLD_STEPS
from muon_fsdp.linalg.subspaces import Refined, best_in_krylov_space, normalized_or, num_products, refine, start_vectors
from muon_fsdp.plan.matrix_sets import MatrixSet, make_sets
from muon_fsdp.plan.units import ParameterSpec
from muon_fsdp.statistics.shard_products import ShardProducts, have_kernels

if TYPE_CHECKING:
    from muon_fsdp.kernels.triton_subspace import Space

COLD_ROUNDS = 4  # calls of `refine` that build a subspace around a first vector
_PRODUCTS_BY_KERNELS = 2  # products of W with a subspace that the kernels are written for


class TopSingular(NamedTuple):
    """The largest singular value of every weight matrix, with its vectors.

    Args:
        norm: (B,), the spectral norm.
        left: (B, d_out), unit vectors u; zero where the norm is zero.
        right: (B, d_in), unit vectors v.
    """

    norm: Tensor
    left: Tensor
    right: Tensor


class Survey:
    """Finds the top singular triples of all matrices of a set at once.

    `steps` is the accuracy of a survey, given as the number of steps of power iteration with that accuracy.
    """

    def __init__(self, matrices: MatrixSet, steps: int) -> None:
        self.classes, self._blocks = matrices.classes, matrices.blocks
        self._ranks, self._is_split, self._cuts_rows = matrices.ranks, matrices.is_split, matrices.cuts_rows
        self.steps = num_products(steps)
        self._device, self._dtype = self.classes[0].device, self.classes[0].dtype
        self._recorder = Recorder()
        self._known_products: ShardProducts | None = None

    def run(
        self, subspaces: Sequence[Tensor], shards: Mapping[int, Tensor], recorder: Recorder, *, cold: bool
    ) -> list[tuple[Tensor, TopSingular]]:
        """Find the top singular triples of all matrices; a collective.

        Args:
            subspaces: (count, num_vectors, cols) for every class, from the previous survey. They may be changed.
            shards: the local shards by position of the parameter.
            recorder: issues the collectives, so that a CUDA graph can be recorded around them.
            cold: whether some subspaces may still be zero.

        Returns:
            For every class the subspaces from which the next survey starts, and the top singular triples.
        """
        self._recorder = recorder
        try:
            with on_device(self._device):
                return self._run(subspaces, self._products(shards), cold)
        finally:
            self._recorder = Recorder()  # one with a graph would keep the memory of the graph

    def _run(
        self, subspaces: Sequence[Tensor], products: ShardProducts, cold: bool
    ) -> list[tuple[Tensor, TopSingular]]:
        if cold:
            starts = self._starts(products)
            # In the layout of later surveys, which decides in what order products are summed.
            subspaces = [normalized_or(*each).contiguous() for each in zip(subspaces, starts, strict=True)]
        elif self._by_kernels:
            subspaces = self._filled(subspaces)
        else:
            subspaces = [normalized_or(known, start_vectors(known)) for known in subspaces]
        refined = self._refine(products, subspaces)
        rights, lefts = [found.right for found in refined], [found.left for found in refined]
        if self._shares_rows:
            lefts = self._add_up(lefts)
        rights, lefts, norms = self._unit(rights, lefts)
        return [
            (found.subspace, TopSingular(norm, left, right))
            for found, right, left, norm in zip(refined, rights, lefts, norms, strict=True)
        ]

    def _starts(self, products: ShardProducts) -> list[Tensor]:
        """Return subspaces to start from, for matrices without a previous survey."""

        def gram(vectors: Sequence[Tensor]) -> list[Tensor]:
            lefts = self._left(products, [vector[:, None] for vector in vectors])
            return [product[:, 0] for product in self._right(products, lefts)]

        starts = self._cold_starts
        steps = min(COLD_STEPS, 1 + max(min(class_.rows, class_.cols) for class_ in self.classes))
        tops = best_in_krylov_space(gram, [start[:, 0] for start in starts], steps)
        starts = [torch.cat([top[:, None], start[:, 1:]], dim=1) for top, start in zip(tops, starts, strict=True)]
        for _ in range(COLD_ROUNDS):
            starts = [found.subspace for found in self._refine(products, starts)]
        return starts

    def _refine(self, products: ShardProducts, subspaces: Sequence[Tensor]) -> list[Refined]:
        if not self._by_kernels:
            left, right = partial(self._left, products), partial(self._right, products)
            return refine(left, right, self._inner, subspaces, self.steps)
        from muon_fsdp.kernels import triton_subspace

        cols, rows = self._spaces
        each = [vectors for _, vectors, _ in cols.shapes]

        def flat_left(vectors: Tensor) -> Tensor:
            return self._added(rows.split, products.multiply_flat(vectors, each, transposed=False), self._cuts_rows)

        def flat_right(lefts: Tensor) -> Tensor:
            return self._added(cols.split, products.multiply_flat(lefts, each, transposed=True), self._is_split)

        def inner(sums: Tensor) -> Tensor:
            counts = [class_.count for class_ in self.classes]
            return _packed(self._add_up(torch.split(sums, counts))).view(sums.shape)

        summed = inner if self._shares_rows else None
        found = triton_subspace.refine(flat_left, flat_right, summed, cols, rows, _packed(subspaces))
        rights, lefts = cols.split(found.right, single=True), rows.split(found.left, single=True)
        return [Refined(*parts) for parts in zip(rights, lefts, cols.split(found.subspace), strict=True)]

    def _unit(
        self, rights: Sequence[Tensor], lefts: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Scale vectors v and W v to unit vectors.

        Returns:
            Three lists with one tensor per class: v (count, cols) and W v (count, rows), both of norm 1, and the norms
            (count,) of W v for unit vectors v.
        """
        if not self._by_kernels:
            norms = [torch.linalg.vector_norm(left, dim=-1) for left in lefts]
            return list(rights), [normalized_or(left, torch.zeros_like(left)) for left in lefts], norms
        from muon_fsdp.kernels import triton_subspace

        cols, rows = self._spaces
        right, left = _packed(rights), _packed(lefts)
        norms = list(torch.split(triton_subspace.make_unit(cols, rows, right, left), [k.count for k in self.classes]))
        return cols.split(right, single=True), rows.split(left, single=True), norms

    def _filled(self, subspaces: Sequence[Tensor]) -> list[Tensor]:
        """Return the subspaces with start vectors in place of zero vectors."""
        from muon_fsdp.kernels import triton_subspace

        cols, _ = self._spaces
        flat = _packed(subspaces)
        triton_subspace.fill(cols, flat, self._flat_starts)
        return cols.split(flat)

    @property
    def _by_kernels(self) -> bool:
        return self.steps == _PRODUCTS_BY_KERNELS and have_kernels(self._device, self._dtype)

    @property
    def _shares_rows(self) -> bool:
        """Return whether a rank has complete entries of W x, but not all entries: the rows of W are sharded."""
        return self._is_split and not self._cuts_rows

    @cached_property
    def _spaces(self) -> tuple[Space, Space]:
        """Return the positions of vectors in flat buffers: along the columns, and along the rows of all matrices."""
        from muon_fsdp.kernels.triton_subspace import Space

        each = [
            (class_.count, num_vectors(class_.rows, class_.cols), class_.rows, class_.cols) for class_ in self.classes
        ]
        return (
            Space.of([(count, vectors, cols) for count, vectors, _, cols in each], self._device),
            Space.of([(count, vectors, rows) for count, vectors, rows, _ in each], self._device),
        )

    @cached_property
    def _flat_starts(self) -> Tensor:
        return _packed([start[:1] for start in self._cold_starts])

    @property
    def _cold_starts(self) -> list[Tensor]:
        """Return fixed start vectors, (count, num_vectors, cols) for every class."""
        shapes = [(class_.count, num_vectors(class_.rows, class_.cols), class_.cols) for class_ in self.classes]
        return [start_vectors(torch.empty(shape, dtype=self._dtype, device=self._device)) for shape in shapes]

    @cached_property
    def _weights(self) -> list[Tensor]:
        """Return for every class, (count,), 1 if this rank's part of a matrix counts in a sum over ranks, else 0."""
        return [torch.tensor(class_.weights, dtype=self._dtype, device=self._device) for class_ in self.classes]

    def _products(self, shards: Mapping[int, Tensor]) -> ShardProducts:
        known = self._known_products
        if known is None or known.key != ShardProducts.key_of(self._blocks, shards):
            shapes = [(class_.count, class_.rows, class_.cols) for class_ in self.classes]
            known = self._known_products = ShardProducts(shapes, self._blocks, shards)
        return known

    def _left(self, products: ShardProducts, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Return W x (G, b, m) for vectors (G, b, n): complete, or only for the rows that this rank holds."""
        result = products.left(vectors)
        return self._add_up(result) if self._cuts_rows else result

    def _right(self, products: ShardProducts, lefts: Sequence[Tensor]) -> list[Tensor]:
        """Return W^T y (G, b, n), complete on every rank."""
        result = products.right(lefts)
        return self._add_up(result) if self._is_split else result

    def _inner(self, lefts: Sequence[Tensor]) -> list[Tensor]:
        products = [y @ y.mT for y in lefts]
        return self._add_up(products) if self._shares_rows else products

    def _added(self, split: Callable[[Tensor], list[Tensor]], flat: Tensor, adds: bool) -> Tensor:
        return _packed(self._add_up(split(flat))) if adds else flat

    def _add_up(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Add parts up over the ranks. Several ranks may hold the same part, and only one of them counts it."""
        weighted = [
            part * weight.view(-1, *[1] * (part.ndim - 1)).to(part.dtype)
            for weight, part in zip(self._weights, parts, strict=True)
        ]
        return add_up(weighted, self._ranks, self._recorder)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return one flat tensor with all elements; a view if the tensors already follow each other in memory."""
    first = tensors[0]
    storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
    stop = start
    for tensor in tensors:
        is_next = tensor.untyped_storage().data_ptr() == storage and tensor.storage_offset() == stop
        if not (is_next and tensor.is_contiguous()):
            return torch.cat([tensor.reshape(-1) for tensor in tensors])
        stop += tensor.numel()
    return first.as_strided((stop - start,), (1,), start)


def spectral_norm_of_shards(parameter: DTensor) -> Tensor:
    """Return the spectral norm of a DTensor (m, n), or of every matrix of a DTensor (B, m, n); a collective."""
    shape = tuple(parameter.shape)
    view = matrix_view(shape, name="given", kind="matrix" if len(shape) == 2 else "stacked")
    shard = local(parameter.detach())
    dtype = working_dtype(shard.dtype)
    layout = layout_of(parameter, None)
    spec = ParameterSpec(0, 0, "", shape, layout, dtype.itemsize, shard.device, dtype, view, is_observed=True)
    if len(layout.ranks) > 1:
        make_group(tuple(sorted(layout.ranks)), shard.device, group_like(parameter, None))
    (matrices,) = make_sets([spec], my_rank())
    (only,) = matrices.classes
    subspace = torch.zeros(only.count, num_vectors(only.rows, only.cols), only.cols, dtype=dtype, device=shard.device)
    with torch.no_grad():
        ((_, top),) = Survey(matrices, 1).run([subspace], {0: shard}, Recorder(), cold=True)
    return top.norm.view(shape[:-2])
