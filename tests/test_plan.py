"""The plan as a pure function: every matrix once, equal ones together, stages within their bound."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from muon_fsdp.plan import ParameterSpec, make_plan


@st.composite
def parameter_specs(draw):
    specs = []
    for position in range(draw(st.integers(0, 20))):
        rule = draw(st.sampled_from(["muon", "adamw"]))
        count, rows, cols = draw(st.sampled_from([(1, 4, 4), (1, 4, 8), (5, 4, 8), (1, 0, 4), (3, 2, 2)]))
        blocks = ((count, rows, cols),) if rule == "muon" else ()
        keys = (draw(st.sampled_from(["a", "b"])),) * len(blocks)
        placement = draw(st.sampled_from(["cpu", "gpu"]))
        specs.append(
            ParameterSpec(position, draw(st.integers(0, 2)), rule, (count, rows, cols), 4, placement, blocks, keys)
        )
    return specs


@given(parameter_specs(), st.integers(1, 700))
def test_plan(specs, max_stage_bytes):
    plan = make_plan(specs, max_stage_bytes)
    by_position = {spec.position: spec for spec in specs}
    planned = [i for stage in plan.stages for _, positions in stage.positions_by_group for i in positions]
    assert sorted(planned) == [spec.position for spec in specs if math.prod(spec.shape)]

    matrices = Counter()
    for stage in plan.stages:
        members = [by_position[i] for _, positions in stage.positions_by_group for i in positions]
        assert len({(spec.rule, spec.placement) for spec in members}) == 1
        assert all(by_position[i].group == group for group, positions in stage.positions_by_group for i in positions)
        assert stage.num_bytes == sum(spec.num_bytes for spec in members)
        assert stage.num_bytes <= max_stage_bytes or len(members) == 1
        for batch in stage.batches:
            assert batch.count * batch.rows * batch.cols * 4 <= max_stage_bytes or batch.count == 1
            for member in batch.members:
                spec = by_position[member.position]
                assert spec.blocks[member.block][1:] == (batch.rows, batch.cols)
                assert spec.batch_keys[member.block] == batch.key
                matrices.update((member.position, member.block, i) for i in range(member.start, member.stop))
    assert set(matrices.values()) <= {1}
    expected = sum(count for spec in specs if math.prod(spec.shape) for count, _, _ in spec.blocks)
    assert len(matrices) == expected == plan.num_matrices


def test_equal_matrices_of_different_groups_share_a_batch():
    specs = [ParameterSpec(i, i % 2, "muon", (4, 8), 4, "cpu", ((1, 4, 8),), ("k",)) for i in range(6)]
    (stage,) = make_plan(specs, 2**20).stages
    (batch,) = stage.batches
    assert batch.count == 6
    assert stage.positions_by_group == ((0, (0, 2, 4)), (1, (1, 3, 5)))


def test_a_large_stack_is_cut_into_batches():
    spec = ParameterSpec(0, 0, "muon", (10, 4, 8), 4, "cpu", ((10, 4, 8),), ("k",))
    (stage,) = make_plan([spec], max_stage_bytes=3 * 4 * 8 * 4).stages
    assert [batch.count for batch in stage.batches] == [3, 3, 3, 1]
