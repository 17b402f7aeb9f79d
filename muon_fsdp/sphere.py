"""Weights on spheres of spectral norm: what a step does with the singular triples that a survey finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from muon_fsdp.distributed import add_up, my_rank
from muon_fsdp.fused import lr_is_on_device, pinned
from muon_fsdp.layout import Layout, Tile
from muon_fsdp.parts import local_parts, segments_of
from muon_fsdp.plan import Batch, Member, Stage
from muon_fsdp.recorder import Recorder
from muon_fsdp.rules.base import Spectrum, State, working_dtype
from muon_fsdp.rules.spectral_sphere import SpectralSphere
from muon_fsdp.spectral import retraction, target_radius
from muon_fsdp.survey import SphereClass, make_sets
from muon_fsdp.views import MatrixView

if TYPE_CHECKING:
    from muon_fsdp.kernels.triton_elementwise import TensorList

# Steps in which a matrix without a cached vector is looked for. The second, because a matrix that began at zero has a
# direction only then.
COLD_SURVEYS = 2
_STATE = {spec.name: spec for spec in SpectralSphere.state}
_FACTORS = ("factor", "radius")


class Sphere:
    """All matrices of an optimizer that are kept on spheres: `begin` a step, use what it found, `finish` it."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        views: Sequence[MatrixView | None],  # of all parameters, as are the layouts
        layouts: Sequence[Layout],
        spherical: Sequence[int],  # positions
    ) -> None:
        group_of = [index for index, group in enumerate(groups) for _ in group["params"]]
        parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
        entries = []
        self._views: dict[int, MatrixView] = {}
        self._tiles: dict[int, Tile] = {}
        for position in spherical:
            view, parameter = views[position], parameters[position]
            assert view is not None
            if parameter.numel() == 0:
                continue
            layout = layouts[position]
            self._views[position] = view
            self._tiles[position] = layout.tiles(view.shape)[layout.index_of[my_rank()]]
            placement = (parameter.device, working_dtype(parameter.dtype))
            steps = groups[group_of[position]]["power_iteration_steps"]
            entries.append((position, view, layout, group_of[position], steps, placement))
        self.sets = make_sets(entries)
        self._kinds = [kind for own in self.sets for kind in own.classes]
        counts = [kind.count for kind in self._kinds]
        self._first_of = {id(kind): sum(counts[:index]) for index, kind in enumerate(self._kinds)}
        self._class_of: dict[tuple[int, int], tuple[SphereClass, int]] = {}
        for own in self.sets:
            for kind in own.classes:
                for position, block, first in kind.members:
                    self._class_of[(position, block)] = (kind, first)
        # Parameters in whose shards the elements of a matrix are not one run of memory.
        self.scattered = {
            position for position in self._views if segments_of(self._views[position], self._tiles[position]) is None
        }
        self._chunks: dict[int, tuple[TensorList, Tensor, bool]] = {}
        self._maps: dict[int, Tensor | None] = {}
        self._indices: dict[int, Tensor] = {}
        self._surveyed: tuple[tuple[int, ...], int] = ((), 0)  # identities of the states, and how often so far
        self._known_slices: dict[tuple[int, str], list[Tensor]] = {}
        self._shapes: dict[object, _Shape] = {}

    def look_up(
        self,
        groups: Sequence[Mapping[str, Any]],
        shards: Sequence[Tensor],
        states: Sequence[State],
        gradients: Mapping[int, Tensor],
        wanted: Mapping[int, Tensor],
    ) -> None:
        """Write down what differs from step to step: where weights lie, what has a gradient, and lr."""
        identities = tuple([id(states[position][name]) for position in self._views for name in _STATE])
        known, times = self._surveyed
        if known != identities:
            self._known_slices, times = {}, 0
        self._surveyed = (identities, times + 1)
        for own in self.sets:
            for kind in own.classes:
                self._look_up_class(kind, groups[kind.group]["lr"], shards, gradients, wanted)

    def _look_up_class(
        self,
        kind: SphereClass,
        lr: float | Tensor,
        shards: Sequence[Tensor],
        gradients: Mapping[int, Tensor],
        wanted: Mapping[int, Tensor],
    ) -> None:
        device = shards[kind.members[0][0]].device
        if kind.lr.numel() == 0:
            kind.lr = torch.zeros((), dtype=torch.float64, device=device)
            kind.touched = torch.ones(kind.count, dtype=torch.bool, device=device)
        if lr_is_on_device(lr):
            kind.lr.copy_(lr.reshape(()))
        else:
            kind.lr.fill_(float(lr))
        counts = [self._views[position].block_shapes[block][0] for position, block, _ in kind.members]
        if any(position in wanted for position, _, _ in kind.members):
            flags = [
                wanted.get(position, torch.tensor(position in gradients)).to(device).expand(count)
                for (position, _, _), count in zip(kind.members, counts, strict=True)
            ]
            torch.cat(flags, out=kind.touched)
        else:
            present = tuple([position in gradients for position, _, _ in kind.members])
            if present != kind.present:
                each = [flag for flag, count in zip(present, counts, strict=True) for _ in range(count)]
                kind.touched.copy_(pinned(each, torch.bool, device), non_blocking=True)
                kind.present = present

    @property
    def is_cold(self) -> bool:
        """Whether some matrix may have no vector to start from in this step."""
        return self._surveyed[1] <= COLD_SURVEYS

    def variant(self, groups: Sequence[Mapping[str, Any]], shards: Sequence[Tensor]) -> object:
        """What a captured step has written down: options, and where weights lie."""
        options = ("weight_decay", "radius_mode", "radius_scaler", "retract_mode", "retract_alpha", "lambda_mode")
        return (
            tuple([tuple([groups[kind.group][name] for name in options]) for kind in self._kinds]),
            tuple([shards[position].data_ptr() for position in self._views]),
        )

    def begin(
        self,
        groups: Sequence[Mapping[str, Any]],
        shards: Sequence[Tensor],
        states: Sequence[State],
        recorder: Recorder,
    ) -> None:
        """Find the singular triples of all weights, how far to retract them, and the radii of their spheres."""
        by_position = {position: shards[position] for position in self._views}
        for own in self.sets:
            for kind in own.classes:
                kind.subspace = self._read(kind, states, "singular_subspace").view(kind.count, -1, kind.cols)
                kind.multiplier = self._read(kind, states, "lagrange_multiplier")
                kind.slope = self._read(kind, states, "lagrange_slope")
                kind.saved_radius = self._read(kind, states, "radius")
                kind.calls, kind.failed = torch.zeros_like(kind.slope), torch.zeros_like(kind.touched)
            own.survey(by_position, recorder, cold=self.is_cold)
            for kind in own.classes:
                _aim(kind, groups[kind.group])
        self._shapes = {}
        for kind in self._kinds:
            self._shapes.setdefault(_shape_of(kind), _Shape()).kinds.append(kind)
        for shape in self._shapes.values():
            shape.put_together()

    def spectrum(self, stage: Stage, batch: Batch, members: Sequence[Member]) -> tuple[Spectrum, Tensor]:
        """What a rule needs of the matrices of a batch, and their numbers among all of their shape."""
        shape = self._shape(stage, members)
        where = self._indices.get(id(batch)) if len(members) == len(batch.members) else None
        if where is None:
            where = torch.tensor([i for m in members for i in self._numbers(stage, m)]).to(shape.found.device)
            if len(members) == len(batch.members):
                self._indices[id(batch)] = where
        return Spectrum(*[value[where] for value in shape.values]), where

    def take(self, stage: Stage, members: Sequence[Member], where: Tensor, spectrum: Spectrum) -> None:
        """Keep what a rule has found."""
        shape, unit = self._shape(stage, members), stage.units[members[0].unit]
        if spectrum.calls is None or spectrum.failed is None:  # nothing was searched for
            return
        columns = (spectrum.multiplier, spectrum.slope, spectrum.calls, spectrum.failed)
        found = torch.stack([column.to(shape.found.dtype) for column in columns], dim=1)
        everywhere = unit.owner is None and stage.exchange is not None  # all ranks have the same, and all add it up
        shape.found[where] = found / len(stage.exchange.ranks) if everywhere and stage.exchange else found

    def _shape(self, stage: Stage, members: Sequence[Member]) -> _Shape:
        kind, _ = self._class_of[(stage.units[members[0].unit].position, members[0].block)]
        return self._shapes[_shape_of(kind)]

    def _numbers(self, stage: Stage, member: Member) -> range:
        """The matrices of a member among all of their shape."""
        unit = stage.units[member.unit]
        kind, first = self._class_of[(unit.position, member.block)]
        first += self._shapes[_shape_of(kind)].first_of(kind)
        first += unit.first_matrix(self._views[unit.position], member.block)
        return range(first + member.start, first + member.stop)

    def factors(self, position: int, shard: Tensor) -> tuple[Tensor, Tensor]:
        """By what to multiply a shard and its update, broadcastable to it."""
        view = self._views[position]
        kinds = [self._class_of[(position, block)] for block in range(len(view.block_shapes))]
        values = []
        for name in _FACTORS:
            parts = [
                getattr(kind, name)[first : first + count]
                for (kind, first), (count, _, _) in zip(kinds, view.block_shapes, strict=True)
            ]
            values.append(torch.cat(parts) if len(parts) > 1 else parts[0])
        index = self._map(position, shard)
        if index is None:
            return values[0][0], values[1][0]
        return values[0][index], values[1][index]

    def apply_fused(self, tensors: TensorList, positions: Sequence[int], updates: Tensor) -> None:
        """Retract and update a list of parameters in one launch."""
        from muon_fsdp.kernels import triton_elementwise

        known = self._chunks.get(id(tensors))
        if known is None or known[0] is not tensors:
            segments = []
            for index, position in enumerate(positions):
                view, tile = self._views[position], self._tiles[position]
                numbers = [
                    self._first_of[id(kind)] + first + i
                    for block, (count, _, _) in enumerate(view.block_shapes)
                    for kind, first in [self._class_of[(position, block)]]
                    for i in range(count)
                ]
                for start, length, matrix in segments_of(view, tile) or ():
                    segments.append((index, start, length, numbers[matrix]))
            chunks, aligned = triton_elementwise.cut_into_chunks(segments, updates.device)
            known = self._chunks[id(tensors)] = (tensors, chunks, aligned)
        _, chunks, aligned = known
        factors = torch.stack([torch.cat([getattr(kind, name) for kind in self._kinds]) for name in _FACTORS])
        # What is aligned as a whole may be cut otherwise.
        own = replace(tensors, chunks=chunks, aligned=tensors.aligned and aligned)
        triton_elementwise.apply_updates(own, updates, factors.float())

    def _map(self, position: int, shard: Tensor) -> Tensor | None:
        """The number of the matrix of every element of a shard, broadcastable to it; None if there is one matrix."""
        if position not in self._maps:
            view, tile = self._views[position], self._tiles[position]
            index: Tensor | None = None
            if sum(count for count, _, _ in view.block_shapes) > 1:
                matrix_of, _ = view.row_numbers()
                index = torch.empty(tuple(shard.shape), dtype=torch.int64)
                for part in local_parts(view, tile):
                    part.of(index).copy_(matrix_of[part.rows][:, None].expand(-1, part.width))
                for axis in range(index.ndim):  # a number that is the same along an axis is kept once
                    if index.shape[axis] > 1 and bool((index == index.narrow(axis, 0, 1)).all()):
                        index = index.narrow(axis, 0, 1)
                index = index.contiguous().to(shard.device)
            self._maps[position] = index
        return self._maps[position]

    def finish(self, groups: Sequence[Mapping[str, Any]], states: Sequence[State], recorder: Recorder) -> None:
        """Tell all ranks what each has found, and write it down."""
        for own in self.sets:
            searching = [k for k in own.classes if groups[k.group]["lambda_mode"] in ("bracketed", "bisection")]
            found = [kind.found for kind in searching]
            if len(own.ranks) > 1 and found:
                found = add_up(found, own.ranks, recorder)
            for kind, numbers in zip(searching, found, strict=True):
                kind.multiplier = torch.where(kind.touched, numbers[:, 0], kind.multiplier)
                kind.slope = torch.where(kind.touched, numbers[:, 1], kind.slope)
                kind.calls = torch.where(kind.touched, numbers[:, 2], 0.0)
                kind.failed = kind.touched & (numbers[:, 3] > 0)
            for kind in own.classes:
                if kind not in searching:
                    kind.calls = kind.touched.to(kind.slope.dtype)
                self._write(kind, states, "singular_subspace", kind.subspace)
                self._write(kind, states, "right_singular_vector", kind.right)
                self._write(kind, states, "left_singular_vector", kind.left)
                self._write(kind, states, "lagrange_multiplier", kind.multiplier)
                self._write(kind, states, "lagrange_slope", kind.slope)
                self._write(kind, states, "radius", kind.saved_radius)

    def _slices(self, kind: SphereClass, states: Sequence[State], name: str) -> list[Tensor]:
        """The parts of every member's state that belong to a class."""
        known = self._known_slices.get((id(kind), name))
        if known is not None:
            return known
        slices = self._known_slices[(id(kind), name)] = []
        for position, block, _ in kind.members:
            sizes = [_STATE[name].numel(*shape) for shape in self._views[position].block_shapes]
            start = sum(sizes[:block])
            slices.append(states[position][name][start : start + sizes[block]])
        return slices

    def _read(self, kind: SphereClass, states: Sequence[State], name: str) -> Tensor:
        return torch.cat(self._slices(kind, states, name))

    def _write(self, kind: SphereClass, states: Sequence[State], name: str, values: Tensor) -> None:
        slices = self._slices(kind, states, name)
        parts = torch.split(values.reshape(-1), [part.numel() for part in slices])
        torch._foreach_copy_(slices, list(parts))

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step, of all matrices on the ranks that this one shares some with."""
        kinds = [kind for kind in self._kinds if kind.norm.numel() > 0]
        if not kinds:
            return {}
        ratios = torch.cat([(kind.norm / kind.radius)[kind.regular].double().cpu() for kind in kinds])
        calls = torch.cat([kind.calls.double().cpu() for kind in kinds])
        multipliers = torch.cat([kind.multiplier.abs().double().cpu() for kind in kinds])
        return {
            "spectral_norm_over_radius_min": float(ratios.min()) if len(ratios) else 0.0,
            "spectral_norm_over_radius_max": float(ratios.max()) if len(ratios) else 0.0,
            "lambda_abs_mean": float(multipliers.mean()),
            "lambda_abs_max": float(multipliers.max()),
            "msign_calls_median": float(calls.median()),
            "msign_calls_max": float(calls.max()),
        }

    def count(self, counters: dict[str, Tensor]) -> None:
        """Add what went otherwise in this step to counters that stay on their device."""
        for kind in self._kinds:
            for name, flags in (
                ("lambda_fallbacks", kind.failed),
                ("matrices_without_norm", kind.touched & ~kind.regular),
            ):
                number = flags.sum()
                counters[name] = counters[name].to(number.device) + number if name in counters else number


@dataclass
class _Shape:
    """All classes of one shape: a batch may have matrices of several groups."""

    kinds: list[SphereClass] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)  # what a `Spectrum` is made of
    found: Tensor = field(default_factory=lambda: torch.empty(0))  # (count, 4)

    def put_together(self) -> None:
        names = ("left", "right", "multiplier", "slope", "regular")
        self.values = [torch.cat([getattr(kind, name) for kind in self.kinds]) for name in names]
        self.found = self.values[0].new_zeros(sum(kind.count for kind in self.kinds), 4)
        for kind, part in zip(self.kinds, torch.split(self.found, [kind.count for kind in self.kinds]), strict=True):
            kind.found = part

    def first_of(self, kind: SphereClass) -> int:
        return sum(other.count for other in self.kinds[: self.kinds.index(kind)])


def _shape_of(kind: SphereClass) -> object:
    return (kind.rows, kind.cols, kind.norm.device, kind.norm.dtype)


def _aim(kind: SphereClass, group: Mapping[str, Any]) -> None:
    """The radius of every matrix, and the factor that brings it there. The first step always goes all the way."""
    mode = group["radius_mode"]
    kind.radius = torch.full_like(kind.norm, target_radius(kind.rows, kind.cols, mode, group["radius_scaler"]))
    first = kind.saved_radius == 0
    if mode == "initialize":
        initial = torch.where(kind.regular, kind.norm, kind.radius)
        kind.radius = torch.where(first, initial, kind.saved_radius)
    kind.factor = retraction(kind.norm, kind.radius, "hard", kind.lr)
    if group["retract_mode"] == "dynamic":
        decay, alpha = group["weight_decay"], group["retract_alpha"]
        gentle = retraction(kind.norm, kind.radius, "dynamic", kind.lr, decay, alpha)
        kind.factor = torch.where(first, kind.factor, gentle)
    moves = kind.touched & kind.regular & (kind.lr != 0)
    kind.saved_radius = torch.where(moves, kind.radius, kind.saved_radius)
