"""The plan as a pure function: every matrix once, equal ones together, stages within their bound."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from muon_fsdp.layout import local_layout
from muon_fsdp.plan import ParameterSpec, Plan, make_outline, make_plan
from muon_fsdp.views import matrix_view


def spec(position, group, rule, shape, placement="cpu", key="k"):
    view = matrix_view(shape, name="w", kind="stacked") if rule == "muon" else None
    keys, flops = ((key,), (1.0,)) if view else ((), ())
    return ParameterSpec(position, group, rule, shape, local_layout(0), 4, placement, view, keys, flops)


def plan_of(specs, max_stage_bytes) -> Plan:
    return make_plan(make_outline(specs, max_stage_bytes=max_stage_bytes), 0, max_stage_bytes)


@st.composite
def parameter_specs(draw):
    return [
        spec(
            position,
            draw(st.integers(0, 2)),
            draw(st.sampled_from(["muon", "adamw"])),
            draw(st.sampled_from([(1, 4, 4), (1, 4, 8), (5, 4, 8), (1, 0, 4), (3, 2, 2)])),
            draw(st.sampled_from(["cpu", "gpu"])),
            draw(st.sampled_from(["a", "b"])),
        )
        for position in range(draw(st.integers(0, 20)))
    ]


@given(parameter_specs(), st.integers(1, 700))
def test_plan_of_one_rank(specs, max_stage_bytes):
    plan = plan_of(specs, max_stage_bytes)
    by_position = {spec.position: spec for spec in specs}
    planned = [i for stage in plan.stages for _, positions in stage.positions_by_group for i in positions]
    assert sorted(planned) == [spec.position for spec in specs if math.prod(spec.shape)]

    matrices = Counter()
    for stage in plan.stages:
        assert stage.exchange is None
        members = [by_position[i] for _, positions in stage.positions_by_group for i in positions]
        assert len({(spec.rule, spec.placement) for spec in members}) == 1
        assert all(by_position[i].group == group for group, positions in stage.positions_by_group for i in positions)
        assert stage.num_bytes == sum(4 * math.prod(spec.shape) for spec in members)
        assert stage.num_bytes <= max_stage_bytes or len(members) == 1
        for batch in stage.batches:
            assert batch.count * batch.rows * batch.cols * 4 <= max_stage_bytes or batch.count == 1
            for member in batch.members:
                unit = stage.units[member.unit]
                assert unit.view.block_shapes[member.block][1:] == (batch.rows, batch.cols)
                assert unit.batch_keys[member.block] == batch.key
                matrices.update((unit.position, member.block, i) for i in range(member.start, member.stop))
    assert set(matrices.values()) <= {1}
    expected = sum(spec.shape[0] for spec in specs if math.prod(spec.shape) and spec.rule == "muon")
    assert len(matrices) == expected == plan.num_matrices


def test_equal_matrices_of_different_groups_share_a_batch():
    (stage,) = plan_of([spec(i, i % 2, "muon", (1, 4, 8)) for i in range(6)], 2**20).stages
    (batch,) = stage.batches
    assert batch.count == 6
    assert stage.positions_by_group == ((0, (0, 2, 4)), (1, (1, 3, 5)))


def test_a_large_stack_is_cut_into_batches():
    (stage,) = plan_of([spec(0, 0, "muon", (10, 4, 8))], 3 * 4 * 8 * 4).stages
    assert [batch.count for batch in stage.batches] == [3, 3, 3, 1]
