"""How pieces of flat buffers lie in messages: thousands of them are moved by few copies."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard

from muon_fsdp.declarations.views import matrix_view
from muon_fsdp.plan.layout import Layout
from muon_fsdp.plan.outline import make_outline
from muon_fsdp.plan.packing import SHORT_RUN, Slot, make_copies, make_packing
from muon_fsdp.plan.stages import make_plan
from muon_fsdp.plan.units import NO_OPTIONS, ParameterSpec

CPU = (torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("rank", [0, 1, 4095])
def test_a_matrix_on_thousands_of_ranks_is_moved_by_few_copies(rank):
    """FSDP2's pieces of a matrix are contiguous in the matrix and in the message, apart from the rank's own piece."""
    num_ranks = 4096
    layout = Layout(tuple(range(num_ranks)), (num_ranks,), (Shard(0),))
    view = matrix_view((2 * num_ranks, 64), name="w", kind="auto")
    specs = [ParameterSpec(i, 0, "muon", view.shape, layout, 2, *CPU, view, NO_OPTIONS, (1.0,)) for i in range(2)]
    outlines = make_outline(specs, max_stage_bytes=10**9, strategy="owner")
    (stage,) = make_plan(outlines, rank).stages
    packings = stage.packings
    computes = bool(stage.unit_slots)
    assert computes == (rank < 2)
    for packing in (packings.gather_receive, packings.scatter_send):
        assert packing.copies.strided == ()
        assert len(packing.copies.runs) <= 2 if computes else packing.copies.runs == ()
    assert sum(packings.gather_receive.sizes) == computes * (num_ranks - 1) * 2 * 64


def test_columns_are_strided_and_whole_rows_are_not():
    slot = Slot(32, (6, 8))
    rows, columns = (slice(2, 4), slice(0, 8)), (slice(0, 6), slice(2, 4))
    one_row = (slice(3, 4), slice(1, 5))
    packing = make_packing([[(slot, rows)], [(slot, columns)], [(slot, one_row)]], me=1)
    assert packing.sizes == (16, 0, 4)
    assert [(run.first, run.second, run.numel) for run in packing.copies.runs] == [(48, 0, 16), (57, 16, 4)]
    packing = make_packing([[(slot, columns)], [(slot, rows)]], me=5)
    assert [slot.offset for _, (slot, _) in packing.copies.strided] == [0]
    assert packing.sizes == (12, 16)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_thousands_of_equal_matrices_are_moved_by_few_copies(num_ranks):
    """Their pieces lie at equal distances in buffers and messages, from and to every other rank."""
    layout = Layout(tuple(range(num_ranks)), (num_ranks,), (Shard(0),))
    view = matrix_view((8, 8), name="w", kind="auto")
    specs = [ParameterSpec(i, 0, "muon", (8, 8), layout, 2, *CPU, view, NO_OPTIONS, (1.0,)) for i in range(1000)]
    outlines = make_outline(specs, max_stage_bytes=10**9, strategy="owner")
    (stage,) = make_plan(outlines, 1).stages
    packings = stage.packings
    for packing in (packings.gather_send, packings.gather_receive, packings.scatter_send, packings.scatter_receive):
        assert packing.copies.strided == ()
        assert len(packing.copies.runs) == num_ranks - 1
        assert {run.count for run in packing.copies.runs} == {1000 // num_ranks}
    for copies in (packings.gather_own, packings.scatter_own):
        assert [(run.count, run.numel) for run in copies.runs] == [(1000 // num_ranks, 64 // num_ranks)]


def test_long_runs_and_other_distances_are_copied_one_by_one():
    def runs(numel, *starts):
        boxes = [((Slot(start, (numel,)), (slice(0, numel),)),) * 2 for start in starts]
        return [(run.first, run.count, run.first_step) for run in make_copies(boxes).runs]

    assert runs(4, 0, 8, 16, 30, 40, 50) == [(0, 3, 8), (30, 3, 10)]
    assert runs(4, 0, 8, 18) == [(18, 1, 0), (0, 2, 8)]
    assert runs(4, 8, 0) == [(8, 1, 0), (0, 1, 0)]
    assert runs(SHORT_RUN + 1, 0, 2**17, 2**18) == [(0, 1, 0), (2**17, 1, 0), (2**18, 1, 0)]
