"""Plans of transfers: boxes match PyTorch's, every byte sent is received, and no order of stages is a deadlock."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from muon_fsdp.declarations.settings import Settings
from muon_fsdp.declarations.views import matrix_view
from muon_fsdp.plan.layout import Box, Layout, LayoutError, box_of
from muon_fsdp.plan.outline import make_outline
from muon_fsdp.plan.report import make_report
from muon_fsdp.plan.stages import SCATTER_GROUP_RANKS, Exchange, make_plan
from muon_fsdp.plan.units import NO_OPTIONS, ParameterSpec
from muon_fsdp.step import pipeline
from muon_fsdp.step.matrix_state import SUMS
from tests.comparisons import assert_same

CPU = torch.device("cpu"), torch.float32


# ------------------------------------------------------------------------------------------------------------ boxes


@st.composite
def layouts(draw, num_dims=None, boxes_only=False):
    num_dims = num_dims or draw(st.integers(1, 3))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, num_dims - 1)
    kinds = [st.just(Replicate()), st.builds(Shard, dims)]
    if not boxes_only:
        kinds.append(st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(1, 3)))
    placements = tuple(draw(st.one_of(kinds)) for _ in mesh_shape)
    ranks = tuple(draw(st.permutations(range(math.prod(mesh_shape)))))
    return Layout(ranks, mesh_shape, placements)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 13), min_size=3, max_size=3), layouts(num_dims=3), st.data())
def test_boxes_are_those_of_pytorch(shape, layout, data):
    at = [data.draw(st.integers(0, size - 1)) for size in layout.mesh_shape]
    expected_shape, expected_offset = _compute_local_shape_and_global_offset(
        shape, layout.mesh_shape, at, layout.placements
    )
    try:
        box = box_of(tuple(shape), layout.mesh_shape, layout.placements, at)
    except LayoutError:
        assert any(isinstance(placement, _StridedShard) for placement in layout.placements)
        return
    assert box.shape == tuple(expected_shape)
    if box.numel:
        assert box.offset == tuple(expected_offset)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=2), layouts(num_dims=2, boxes_only=True))
def test_boxes_of_a_replica_partition_the_tensor(shape, layout):
    boxes = layout.boxes(tuple(shape))
    for replica in range(layout.num_replicas):
        held = Counter()
        for box, number in zip(boxes, layout.replica_of, strict=True):
            if number == replica:
                held.update(product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))))
        assert held == Counter(product(*map(range, shape)))


# --------------------------------------------------------------------------------------------------------- exchange


SHAPES = st.sampled_from([(5, 7), (4, 4), (1, 6), (3, 4, 5)])


class PlayedExchange:
    """An exchange whose ranks are all played in this process, with slices of tensors in place of messages."""

    def __init__(self, specs, wholes, stages):
        self.specs, self.wholes = specs, wholes
        self.stages = stages  # the same stage, by rank
        self.order = sorted(stages)

    def shard(self, rank, position):
        """Return what a rank holds of a parameter."""
        layout = self.specs[position].layout
        return self._part(position, layout.boxes(self.specs[position].shape)[layout.index_of[rank]])

    def whole(self, unit):
        """Return the region of the parameter that a unit is."""
        return self._part(unit.position, unit.box)

    def _part(self, position, box):
        shape = self.specs[position].shape
        return self.wholes[position][box.within(Box((0,) * len(shape), shape))]

    def messages(self, rank, kind):
        """Yield the source, the piece sent and the piece received of each message to `rank`.

        `kind` is "gather" or "scatter".
        """
        exchange = self.stages[rank].exchange
        for source, pieces in zip(self.order, getattr(exchange, f"{kind}_receive"), strict=True):
            sent = getattr(self.stages[source].exchange, f"{kind}_send")[exchange.me]
            assert [(p.unit, p.shape) for p in sent] == [(p.unit, p.shape) for p in pieces]
            if source != rank and pieces:
                assert getattr(exchange, f"{kind}s")
            yield from ((source, out, into) for out, into in zip(sent, pieces, strict=True))

    def check_gather(self, rank):
        """Check that every unit that `rank` computes is assembled from what it receives; return those units."""
        stage = self.stages[rank]
        assembled = {i: torch.full(stage.units[i].box.shape, torch.nan) for i in stage.unit_slots}
        for source, out, into in self.messages(rank, "gather"):
            assembled[into.unit][into.in_unit] = self.shard(source, stage.units[out.unit].position)[out.in_shard]
        for i, value in assembled.items():
            assert_same(value, self.whole(stage.units[i]), f"unit {i} on rank {rank}")
        return [stage.units[i] for i in stage.unit_slots]

    def scattered(self, rank):
        """Return the buffer of updates that the scatter fills on `rank`, with NaN where nothing arrives."""
        stage = self.stages[rank]
        updates = torch.full((stage.update_numel,), torch.nan)
        for _, out, into in self.messages(rank, "scatter"):
            unit = stage.units[out.unit]
            target = stage.shard_slots[unit.position].of(updates)[into.in_shard]
            assert torch.isnan(target).all(), "an element is sent twice"
            target.copy_(self.whole(unit)[out.in_unit])
        return updates

    def check_results(self, rank, scattered):
        """Check that scattered and forwarded results fill every shard of `rank`."""
        stage, updates = self.stages[rank], scattered[rank].clone()
        exchange = stage.exchange
        for number, peer in enumerate(exchange.peers):
            of_peer = self.stages[peer].exchange
            assert (of_peer.peers, of_peer.slice_numel) == (exchange.peers, exchange.slice_numel)
            own = slice(number * exchange.slice_numel, (number + 1) * exchange.slice_numel)
            updates[own] = scattered[peer][own]
        positions = [position for _, members in stage.positions_by_group for position in members]
        returned = {position: stage.shard_slots[position].of(updates) for position in positions}
        expected = {position: self.shard(rank, position) for position in positions}
        assert_same(returned, expected, f"shards of rank {rank}, by parameter")

    def check_packings(self, rank):
        """Check that every message holds its pieces in order, packed from and unpacked into flat buffers."""
        stage = self.stages[rank]
        me = stage.exchange.me
        for kind, is_shards in (
            ("gather_send", True),
            ("gather_receive", False),
            ("scatter_send", False),
            ("scatter_receive", True),
        ):
            buffer = torch.arange(float(stage.shard_numel if is_shards else stage.unit_numel))
            pieces = [p for other, many in enumerate(getattr(stage.exchange, kind)) if other != me for p in many]
            views = [
                stage.shard_slots[stage.units[p.unit].position].of(buffer)[p.in_shard]
                if is_shards
                else stage.unit_slots[p.unit].of(buffer)[p.in_unit]
                for p in pieces
            ]
            expected = torch.cat([torch.empty(0), *(view.reshape(-1) for view in views)])
            packing = getattr(stage.packings, kind)
            message = torch.full((packing.numel,), torch.nan)
            copies = packing.copies
            for source, target in zip(copies.in_first(buffer), copies.in_second(message), strict=True):
                target.copy_(source)
            assert_same(message, expected, f"{kind} of rank {rank}")
            unpacked, wanted = torch.zeros_like(buffer), torch.zeros_like(buffer)
            for target, source in zip(copies.in_first(unpacked), copies.in_second(message), strict=True):
                target.copy_(source)
            assert all(view.is_contiguous() for view in copies.in_first(buffer)[: copies.num_dense])
            for view in views:
                wanted[view.reshape(-1).long()] = view.reshape(-1)
            assert_same(unpacked, wanted, f"{kind} of rank {rank}, unpacked")
        for kind, copies in (("gather", stage.packings.gather_own), ("scatter", stage.packings.scatter_own)):
            shards, units = 1.0 + torch.arange(stage.shard_numel), torch.zeros(stage.unit_numel)
            wanted = units.clone()
            for p in getattr(stage.exchange, f"{kind}_receive")[me]:
                of_shard = stage.shard_slots[stage.units[p.unit].position].of(shards)[p.in_shard]
                stage.unit_slots[p.unit].of(wanted)[p.in_unit] = of_shard
            for source, target in zip(copies.in_first(shards), copies.in_second(units), strict=True):
                target.copy_(source)
            assert_same(units, wanted, f"{kind} of rank {rank} to itself")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(SHAPES, layouts(num_dims=2, boxes_only=True)), min_size=1, max_size=4),
    st.sampled_from(["owner", "replicate", "auto"]),
    st.sampled_from([1, 200, 10**6]),
)
def test_every_byte_sent_is_received_and_every_unit_assembled(parameters, strategy, max_stage_bytes):
    mesh = parameters[0][1]
    specs, wholes = [], []
    for position, (shape, other) in enumerate(parameters):
        placements = other.placements if other.mesh_shape == mesh.mesh_shape else mesh.placements
        layout = Layout(mesh.ranks, mesh.mesh_shape, placements)
        view = matrix_view(shape, name="w", kind="auto")
        specs.append(
            ParameterSpec(position, 0, "muon", shape, layout, 4, *CPU, view, NO_OPTIONS, (float(math.prod(shape)),))
        )
        wholes.append(torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape) + 1000 * position)
    outlines = make_outline(specs, max_stage_bytes=max_stage_bytes, strategy=strategy)
    plans = {rank: make_plan(outlines, rank) for rank in mesh.ranks}
    computed = Counter()
    for number in range(len(outlines)):
        stages = {rank: plan.stages[number] for rank, plan in plans.items()}
        if len(stages) == 1:
            computed.update((u.position, u.box) for u in stages[0].units)
            continue
        exchange = PlayedExchange(specs, wholes, stages)
        scattered = {rank: exchange.scattered(rank) for rank in stages}
        for rank in stages:
            units = exchange.check_gather(rank)
            # All ranks compute a unit without an owner; it is counted once.
            computed.update((u.position, u.box) for u in units if u.owner is not None or rank == exchange.order[0])
            exchange.check_results(rank, scattered)
            exchange.check_packings(rank)
    assert set(computed.values()) == {1}
    assert sum(math.prod(box.shape) for _, box in computed) == sum(whole.numel() for whole in wholes)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SHAPES, min_size=1, max_size=5),
    layouts(num_dims=2, boxes_only=True),
    st.sampled_from([1.0, 1e9]),
    st.sampled_from([1, 200, 10**6]),
    st.sampled_from(["owner", "replicate"]),
)
def test_the_report_says_what_ranks_send(shapes, layout, cost, max_stage_bytes, strategy):
    specs = []
    for position, shape in enumerate(shapes):
        view = matrix_view(shape, name="w", kind="auto")
        specs.append(ParameterSpec(position, 0, "muon", shape, layout, 2, *CPU, view, NO_OPTIONS, (cost * shape[-1],)))
    report = make_report(specs, Settings("propagate", max_stage_bytes, False, strategy, None))
    outlines = make_outline(specs, max_stage_bytes=max_stage_bytes, strategy=strategy)
    sent, forwarded = dict.fromkeys(layout.ranks, 0), dict.fromkeys(layout.ranks, 0)
    for rank in layout.ranks:
        for number, stage in enumerate(make_plan(outlines, rank).stages):
            if stage.exchange is not None:
                exchange = stage.exchange
                scatters, gathers, receives = (
                    2 * sum(p.numel for other, pieces in enumerate(lists) if other != exchange.me for p in pieces)
                    for lists in (
                        exchange.scatter_send,
                        exchange.gather_send,
                        exchange.gather_receive,
                    )
                )
                held = 2 * sum(slot.numel for slot in stage.shard_slots.values())
                assert held + gathers + receives <= report.stages[number].gathering
                sent[rank] += scatters
                forwarded[rank] += 2 * max(0, len(exchange.peers) - 1) * exchange.slice_numel
    assert report.traffic.scattered == sent
    assert report.traffic.forwarded == max(forwarded.values())


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "shape"),
    [
        ((8,), (Replicate(),), (40, 24)),
        ((3,), (Replicate(),), (5, 7)),
        ((4, 2), (Replicate(), Shard(0)), (40, 24)),
        ((4, 2), (Replicate(), Shard(1)), (40, 24)),
        ((4, 2), (Replicate(), Shard(0)), (2, 40, 24)),  # two experts, each whole on four ranks
    ],
)
def test_an_owner_sends_each_result_once(mesh_shape, placements, shape):
    """No rank packs a copy per replica: an all-gather among the holders of a box spreads it."""
    layout = Layout(tuple(range(math.prod(mesh_shape))), mesh_shape, placements)
    view = matrix_view(shape, name="w", kind="auto")
    specs = [ParameterSpec(i, 0, "muon", shape, layout, 4, *CPU, view, NO_OPTIONS, (1.0,)) for i in range(5)]
    outlines = make_outline(specs, max_stage_bytes=10**9, strategy="owner")
    for rank in layout.ranks:
        (stage,) = make_plan(outlines, rank).stages
        owned = sum(stage.units[number].box.numel for number in stage.unit_slots)
        received = stage.packings.scatter_receive.numel
        assert stage.packings.scatter_send.numel <= owned
        assert received <= stage.exchange.slice_numel <= -(-stage.shard_numel // layout.num_replicas) + 16
        assert len(stage.exchange.peers) == layout.num_replicas
        assert stage.update_numel == layout.num_replicas * stage.exchange.slice_numel


# ---------------------------------------------------------------------------------------------------------- order


class LoggedRun:
    """A stage that notes the calls of `run_stages` instead of running, with the process group of every transfer."""

    def __init__(self, stage, source, sink, number):
        self.name, self.ranks, self.peers, self.in_flight, self.sums, self.log = stage
        self.travels, self.positions, self.forwards = True, {0}, len(self.peers) > 1
        self.group = (self.ranks, "")
        exchange = Exchange(self.ranks, 0, (), (), (), (), True, True, self.peers, 1)
        self.scatter_group = (self.ranks, exchange.scatter_purpose)
        self.forward_group = (self.peers, exchange.forward_purpose)
        self.sum_group = (self.ranks, SUMS)
        self.phases = iter((self.start, self.compute, self.forward, self.sum, self.finish))

    def advance(self):
        next(self.phases)()

    def start(self):
        self.log.append(("start", "gather", self.name, self.group))

    def compute(self):
        self.log += [("wait", "gather", self.name, self.group), ("start", "scatter", self.name, self.scatter_group)]

    def forward(self):
        self.log.append(("wait", "scatter", self.name, self.scatter_group))
        if self.forwards:
            self.log.append(("start", "forward", self.name, self.forward_group))

    def sum(self):
        self.log += [("wait", "forward", self.name, self.forward_group)] if self.forwards else []
        self.log += [("start", "sum", self.name, self.sum_group)] if self.sums else []

    def finish(self):
        self.log += [("wait", "sum", self.name, self.sum_group)] if self.sums else []


def peers_among(ranks, rank, num_replicas):
    """Return the ranks that hold the same shards as `rank` if replicas are consecutive ranks, as far as they divide."""
    num_shards = len(ranks) // math.gcd(len(ranks), num_replicas)
    return tuple(other for place, other in enumerate(ranks) if (place - ranks.index(rank)) % num_shards == 0)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.frozensets(st.integers(0, 6), min_size=2),
            # Replicas (60: every rank holds everything), stages in flight, whether updates are summed.
            st.lists(
                st.tuples(st.sampled_from([1, 2, 3, 60]), st.sampled_from([3, 3, 2, 1]), st.booleans()), max_size=6
            ),
        ),
        max_size=5,
        unique_by=lambda item: item[0],
    )
)
def test_no_order_of_sets_and_stages_is_a_circle(sets):
    """Every transfer begins on all ranks in the order of its group, and none waits for one that can't begin."""
    stages = [
        ((ranks, number), ranks, num_replicas, in_flight, sums)
        for ranks, many in sorted((tuple(sorted(ranks)), many) for ranks, many in sets)
        for number, (num_replicas, in_flight, sums) in enumerate(many)
    ]
    logs = {rank: [] for rank in range(7)}
    with patch.object(pipeline, "_StageRun", LoggedRun):
        for rank, log in logs.items():
            mine = [
                (name, ranks, peers_among(ranks, rank, replicas), in_flight, sums, log)
                for name, ranks, replicas, in_flight, sums in stages
                if rank in ranks
            ]
            pipeline.run_stages(mine, None, None)
    for group in {event[3] for log in logs.values() for event in log}:
        orders = {tuple(e for e in logs[rank] if e[0] == "start" and e[3] == group) for rank in group[0]}
        assert len(orders) == 1
    started = Counter()
    left = {rank: list(log) for rank, log in logs.items()}
    moved = True
    while moved:
        moved = False
        for log in left.values():
            while log and (log[0][0] == "start" or started[log[0][1:]] == len(log[0][3][0])):
                what, *transfer = log.pop(0)
                started[tuple(transfer)] += what == "start"
                moved = True
    assert {rank: log for rank, log in left.items() if log} == {}


def test_few_ranks_scatter_in_a_group_of_their_own():
    """Every process group has connections between all of its ranks, so many ranks share one."""
    purposes = [
        Exchange(tuple(range(count)), 0, (), (), (), (), True, True).scatter_purpose
        for count in (2, SCATTER_GROUP_RANKS, SCATTER_GROUP_RANKS + 1)
    ]
    assert purposes == ["scatter", "scatter", ""]


def test_with_two_stages_in_flight_the_network_does_not_wait_for_updates():
    """A stage has been scattered before the next one computes, and is applied after the one after that has started."""

    class Applied(LoggedRun):
        def finish(self):
            self.log.append(("wait", "apply", self.name, self.group))

    log = []
    with patch.object(pipeline, "_StageRun", Applied):
        stages = [(number, (0, 1), (0,), 2, False, log) for number in range(4)]
        pipeline.run_stages(stages, None, None)
    order = [f"{what} {kind} {name}" for what, kind, name, _ in log]
    for first in range(2):
        begin = order.index(f"wait scatter {first}")
        assert order[begin : begin + 4] == [
            f"wait scatter {first}",
            f"start gather {first + 2}",
            f"wait apply {first}",
            f"wait gather {first + 1}",
        ]
    assert order[-2:] == ["wait scatter 3", "wait apply 3"]


def test_stages_on_their_way_drop_their_buffers_when_one_fails():
    """A generator and its stage refer to each other: without this, their buffers stay until Python looks for cycles."""

    class Failing(LoggedRun):
        def compute(self):
            if self.name == 3:
                raise ArithmeticError("no direction")
            super().compute()

        def close(self):
            self.log.append(("close", "", self.name, self.group))

    log = []
    with patch.object(pipeline, "_StageRun", Failing), pytest.raises(ArithmeticError, match="no direction"):
        pipeline.run_stages([(number, (0, 1), (0, 1), 3, False, log) for number in range(6)], None, None)
    assert {name for what, _, name, _ in log if what == "close"} >= {2, 3, 4}  # scattered, computed and gathered


# -------------------------------------------------------------------------------------------------------- agreement


def test_ranks_that_share_only_some_parameters_plan_those_alike():
    """Under FSDP2 + TP a rank knows the parameters of its own column of the mesh and those of the whole mesh."""
    whole = Layout((0, 1, 2, 3), (2, 2), (Shard(0), Shard(1)))
    columns = {0: Layout((0, 2), (2,), (Shard(0),)), 1: Layout((1, 3), (2,), (Shard(0),))}

    def outline(rank):
        specs = []
        for i in range(10):
            layout = whole if i % 2 else columns[rank % 2]
            shape = (8 + i, 8)
            view = matrix_view(shape, name="w", kind="auto")
            cost = float(i * i + 1 + (rank % 2 if not i % 2 else 0))
            wire = 2 if i % 2 else 2 + rank % 2 * 1000
            specs.append(ParameterSpec(i, 0, "muon", shape, layout, 4, *CPU, view, NO_OPTIONS, (cost,), wire))
        return [o for o in make_outline(specs, max_stage_bytes=400) if o.ranks == whole.ranks]

    assert [o.units for o in outline(0)] == [o.units for o in outline(1)]
