"""The top singular triples of weights, found on shards.

W is never assembled. Every rank multiplies the vectors of all matrices with the parts of W that it holds, and the
products are added up, for all matrices that lie on the same ranks at once. Vectors are whole on every rank and small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from muon_fsdp.distributed import add_up, layout_of, local, my_rank
from muon_fsdp.kernels import on_device
from muon_fsdp.layout import Layout
from muon_fsdp.parts import Block, blocks_of, has_whole_rows
from muon_fsdp.recorder import Recorder
from muon_fsdp.rules.base import num_vectors, working_dtype
from muon_fsdp.shard_products import ShardProducts, have_kernels
from muon_fsdp.spectral import COLD_STEPS, SMALLEST_NORM
from muon_fsdp.subspaces import Refined, best_in_krylov_space, normalized_or, num_products, refine, start_vectors
from muon_fsdp.views import MatrixView, matrix_view

if TYPE_CHECKING:
    from muon_fsdp.kernels.triton_subspace import Space

COLD_ROUNDS = 4  # in which a subspace is found around a first vector
_PRODUCTS_BY_KERNELS = 2  # of W with a subspace, in the kernels that refine one


@dataclass(eq=False)
class SphereClass:
    """Matrices of one shape in one group, and their vectors and numbers in this step."""

    group: int
    rows: int
    cols: int
    members: list[tuple[int, int, int]] = field(default_factory=list)  # (position, block of its view, first matrix)
    count: int = 0
    shares: list[float] = field(default_factory=list)  # per matrix, 1 / number of ranks that hold the same part of it
    subspace: Tensor = field(default_factory=lambda: torch.empty(0))  # (count, num_vectors, cols)
    right: Tensor = field(default_factory=lambda: torch.empty(0))  # (count, cols)
    left: Tensor = field(default_factory=lambda: torch.empty(0))  # (count, rows)
    norm: Tensor = field(default_factory=lambda: torch.empty(0))  # (count,), as are all below
    radius: Tensor = field(default_factory=lambda: torch.empty(0))
    saved_radius: Tensor = field(default_factory=lambda: torch.empty(0))
    factor: Tensor = field(default_factory=lambda: torch.empty(0))
    multiplier: Tensor = field(default_factory=lambda: torch.empty(0))
    slope: Tensor = field(default_factory=lambda: torch.empty(0))
    calls: Tensor = field(default_factory=lambda: torch.empty(0))
    failed: Tensor = field(default_factory=lambda: torch.empty(0))
    found: Tensor = field(default_factory=lambda: torch.empty(0))  # (count, 4): what this rank has found of these
    touched: Tensor = field(default_factory=lambda: torch.empty(0))  # (count,) bool: whether there is a gradient
    lr: Tensor = field(default_factory=lambda: torch.empty(0))  # ()
    present: tuple[bool, ...] = ()  # what `touched` says, per member

    @cached_property
    def weight(self) -> Tensor:  # (count,)
        return torch.tensor(self.shares, dtype=self.subspace.dtype, device=self.subspace.device)

    @property
    def regular(self) -> Tensor:
        return self.norm >= SMALLEST_NORM


class SphereSet:
    """All matrices that lie on the same ranks and are surveyed together."""

    def __init__(self, ranks: tuple[int, ...], steps: int) -> None:
        self.ranks, self.steps = ranks, num_products(steps)
        self.classes: list[SphereClass] = []
        self.blocks: list[Block] = []
        self.shares = False  # whether ranks hold different parts
        self.cuts_rows = False  # whether a rank may hold a part of a row only
        self._recorder = Recorder()
        self._known_products: ShardProducts | None = None

    def survey(self, shards: Mapping[int, Tensor], recorder: Recorder, *, cold: bool) -> None:
        """Find the top singular triples of all matrices, from the subspaces that the classes have."""
        self._recorder = recorder
        with on_device(self.classes[0].subspace.device):
            self._survey(self._products(shards), cold)

    def _survey(self, products: ShardProducts, cold: bool) -> None:
        if cold:
            starts = self._starts(products)
            subspaces = [normalized_or(kind.subspace, start) for kind, start in zip(self.classes, starts, strict=True)]
        elif self._by_kernels:
            subspaces = self._filled()
        else:
            subspaces = [normalized_or(kind.subspace, start_vectors(kind.subspace)) for kind in self.classes]
        refined = self._refine(products, subspaces)
        rights, lefts = [found.right for found in refined], [found.left for found in refined]
        if self._shares_rows:
            lefts = self._add_up(lefts)
        rights, lefts, norms = self._unit(rights, lefts)
        for kind, found, right, left, norm in zip(self.classes, refined, rights, lefts, norms, strict=True):
            kind.subspace, kind.right, kind.left, kind.norm = found.subspace, right, left, norm

    def _starts(self, products: ShardProducts) -> list[Tensor]:
        """Subspaces to start from, for matrices that nothing is known of."""

        def gram(vectors: Sequence[Tensor]) -> list[Tensor]:
            lefts = self._left(products, [vector[:, None] for vector in vectors])
            return [product[:, 0] for product in self._right(products, lefts)]

        starts = [start_vectors(kind.subspace) for kind in self.classes]
        steps = min(COLD_STEPS, 1 + max(min(kind.rows, kind.cols) for kind in self.classes))
        tops = best_in_krylov_space(gram, [start[:, 0] for start in starts], steps)
        starts = [torch.cat([top[:, None], start[:, 1:]], dim=1) for top, start in zip(tops, starts, strict=True)]
        for _ in range(COLD_ROUNDS):
            starts = [found.subspace for found in self._refine(products, starts)]
        return starts

    def _refine(self, products: ShardProducts, subspaces: Sequence[Tensor]) -> list[Refined]:
        if not self._by_kernels:

            def left(vectors: Sequence[Tensor]) -> list[Tensor]:
                return self._left(products, vectors)

            def right(lefts: Sequence[Tensor]) -> list[Tensor]:
                return self._right(products, lefts)

            return refine(left, right, self._inner, subspaces, self.steps)
        from muon_fsdp.kernels import triton_subspace

        cols, rows = self._spaces
        each = [vectors for _, vectors, _ in cols.shapes]

        def flat_left(vectors: Tensor) -> Tensor:
            return self._added(rows.split, products.multiply_flat(vectors, each, transposed=False), self.cuts_rows)

        def flat_right(lefts: Tensor) -> Tensor:
            return self._added(cols.split, products.multiply_flat(lefts, each, transposed=True), self.shares)

        def inner(sums: Tensor) -> Tensor:
            counts = [kind.count for kind in self.classes]
            added = self._added(lambda all_sums: list(torch.split(all_sums, counts)), sums, self._shares_rows)
            return added.view(sums.shape)

        found = triton_subspace.refine(flat_left, flat_right, inner, cols, rows, _packed(subspaces))
        rights, lefts = cols.split(found.right, single=True), rows.split(found.left, single=True)
        return [Refined(*parts) for parts in zip(rights, lefts, cols.split(found.subspace), strict=True)]

    def _unit(
        self, rights: Sequence[Tensor], lefts: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Vectors v (count, cols) and W v (count, rows) of norm 1, and the norms of W v for such v."""
        if not self._by_kernels:
            norms = [torch.linalg.vector_norm(left, dim=-1) for left in lefts]
            return list(rights), [normalized_or(left, torch.zeros_like(left)) for left in lefts], norms
        from muon_fsdp.kernels import triton_subspace

        cols, rows = self._spaces
        right, left = _packed(rights), _packed(lefts)
        norms = list(torch.split(triton_subspace.make_unit(cols, rows, right, left), [k.count for k in self.classes]))
        return cols.split(right, single=True), rows.split(left, single=True), norms

    def _filled(self) -> list[Tensor]:
        """The subspaces of all classes, with something to start from where there is nothing."""
        from muon_fsdp.kernels import triton_subspace

        cols, _ = self._spaces
        flat = _packed([kind.subspace for kind in self.classes])
        triton_subspace.fill(cols, flat, self._flat_starts)
        return cols.split(flat)

    @property
    def _by_kernels(self) -> bool:
        like = self.classes[0].subspace
        return self.steps == _PRODUCTS_BY_KERNELS and have_kernels(like.device, like.dtype)

    @property
    def _shares_rows(self) -> bool:
        """Whether a rank has whole numbers of W x, but not all of them."""
        return self.shares and not self.cuts_rows

    @cached_property
    def _spaces(self) -> tuple[Space, Space]:
        """Where the vectors along the columns and along the rows of all matrices are in flat buffers."""
        from muon_fsdp.kernels.triton_subspace import Space

        each = [(kind.count, kind.subspace.shape[1], kind.rows, kind.cols) for kind in self.classes]
        device = self.classes[0].subspace.device
        return (
            Space.of([(count, vectors, cols) for count, vectors, _, cols in each], device),
            Space.of([(count, vectors, rows) for count, vectors, rows, _ in each], device),
        )

    @cached_property
    def _flat_starts(self) -> Tensor:
        return _packed([start_vectors(kind.subspace[:1]) for kind in self.classes])

    def _products(self, shards: Mapping[int, Tensor]) -> ShardProducts:
        known = self._known_products
        if known is None or known.key != ShardProducts.key_of(self.blocks, shards):
            shapes = [(kind.count, kind.rows, kind.cols) for kind in self.classes]
            known = self._known_products = ShardProducts(shapes, self.blocks, shards)
        return known

    def _left(self, products: ShardProducts, vectors: Sequence[Tensor]) -> list[Tensor]:
        """W x (G, b, m) for vectors (G, b, n): whole, or of the rows that this rank holds."""
        result = products.left(vectors)
        return self._add_up(result) if self.cuts_rows else result

    def _right(self, products: ShardProducts, lefts: Sequence[Tensor]) -> list[Tensor]:
        """W^T y (G, b, n), whole."""
        result = products.right(lefts)
        return self._add_up(result) if self.shares else result

    def _inner(self, lefts: Sequence[Tensor]) -> list[Tensor]:
        products = [y @ y.mT for y in lefts]
        return self._add_up(products) if self._shares_rows else products

    def _added(self, split: Callable[[Tensor], list[Tensor]], flat: Tensor, adds: bool) -> Tensor:
        return _packed(self._add_up(split(flat))) if adds else flat

    def _add_up(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Sums over the ranks, of which several may hold the same part."""
        weighted = [
            part * kind.weight.view(-1, *[1] * (part.ndim - 1)).to(part.dtype)
            for kind, part in zip(self.classes, parts, strict=True)
        ]
        return add_up(weighted, self.ranks, self._recorder)


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def make_sets(
    positions: Sequence[tuple[int, MatrixView, Layout, int, int, object]],  # .., group, steps, (device, dtype)
) -> list[SphereSet]:
    sets: dict[tuple[object, ...], SphereSet] = {}
    for position, view, layout, group, steps, placement in positions:
        own = sets.setdefault((layout.ranks, steps, placement), SphereSet(layout.ranks, steps))
        base: list[tuple[int, int]] = []  # per block: its class, and the first of its matrices there
        for block, (count, rows, cols) in enumerate(view.block_shapes):
            known = [i for i, c in enumerate(own.classes) if (c.group, c.rows, c.cols) == (group, rows, cols)]
            if not known:
                own.classes.append(SphereClass(group, rows, cols))
            index = known[0] if known else len(own.classes) - 1
            kind = own.classes[index]
            kind.members.append((position, block, kind.count))
            base.append((index, kind.count))
            kind.count += count
        tiles = layout.tiles(view.shape)
        tile = tiles[layout.index_of[my_rank()]]
        own.shares |= any(other.shape != view.shape for other in tiles)
        own.cuts_rows |= any(not has_whole_rows(view, other) for other in tiles if other.numel > 0)
        own.blocks += blocks_of(position, view, tile, base)
        share = 1 / sum(other == tile for other in tiles)
        for (index, _), (count, _, _) in zip(base, view.block_shapes, strict=True):
            own.classes[index].shares += [share] * count
    return [own for _, own in sorted(sets.items(), key=lambda item: (item[0][0], item[0][1], str(item[0][2])))]


def spectral_norm_of_shards(parameter: DTensor) -> Tensor:
    """The spectral norm of a sharded matrix, or of every matrix of a sharded stack; a collective."""
    shape = tuple(parameter.shape)
    view = matrix_view(shape, name="given", kind="matrix" if len(shape) == 2 else "stacked")
    shard = local(parameter.detach())
    layout = layout_of(parameter, None)
    (only,) = make_sets([(0, view, layout, 0, 1, None)])
    for kind in only.classes:
        size = (kind.count, num_vectors(kind.rows, kind.cols), kind.cols)
        kind.subspace = torch.zeros(size, dtype=working_dtype(shard.dtype), device=shard.device)
    with torch.no_grad():
        only.survey({0: shard}, Recorder(), cold=True)
    return only.classes[0].norm.view(shape[:-2])
