"""The Spectral Sphere Optimizer on shards: the curve of one device in every layout, and no matrix assembled."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from muon_fsdp.declarations.views import matrix_view
from muon_fsdp.linalg.subspaces import num_products
from muon_fsdp.plan.layout import Box, Layout
from muon_fsdp.plan.matrix_sets import blocks_of, segments_of
from tests import distributed_cases as cases
from tests import sso_cases
from tests.comparisons import assert_same
from tests.pool import RankPool
from tests.test_distributed import LAYOUTS, model_options

VIEWS = [
    ((12, 10), {"kind": "matrix"}),
    ((12, 10), {"kind": "matrix", "transposed": True}),
    ((12, 10), {"kind": "matrix", "num_heads": 3}),
    ((12, 10), {"kind": "matrix", "split_sizes": (2, 7, 3)}),
    ((10, 12), {"kind": "matrix", "transposed": True, "split_sizes": (5, 7)}),
    ((5, 6, 7), {"kind": "stacked"}),
    ((5, 6, 7), {"kind": "stacked", "num_heads": 2}),
    ((5, 7, 6), {"kind": "stacked", "transposed": True}),
    ((5, 7, 6), {"kind": "stacked", "transposed": True, "num_heads": 2}),
    ((2, 3, 5, 4), {"kind": "stacked", "transposed": True, "split_sizes": (1, 3)}),
    ((2, 3, 4, 5), {"kind": "stacked", "split_sizes": (1, 3)}),
    ((6, 3, 2, 5), {"kind": "flatten"}),
    ((6, 12), {"kind": "attn"}),
    ((7, 20), {"kind": "attn"}),
]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(VIEWS), st.lists(st.integers(1, 3), min_size=1, max_size=2), st.data())
def test_a_shard_is_the_parts_of_matrices_that_it_says(shape_and_view, mesh_shape, data):
    shape, options = shape_and_view
    view = matrix_view(shape, name="it", **options)
    dims = [data.draw(st.integers(0, len(shape) - 1)) for _ in mesh_shape]
    ranks = tuple(range(math.prod(mesh_shape)))
    layout = Layout(ranks, tuple(mesh_shape), tuple(Shard(dim) for dim in dims))
    whole = torch.randn(shape)
    expected = view.split(whole)
    base = [(index, 0) for index in range(len(expected))]
    found = [torch.full_like(block, torch.nan) for block in expected]
    for box in layout.boxes(shape):
        shard = whole[box.within(Box((0,) * len(shape), shape))]
        for block in blocks_of(0, view, box, base):
            target = found[block.class_index][block.matrices, block.rows, block.cols]
            assert torch.isnan(target).all()  # every element is in one part
            target.copy_(block.of(shard))
        segments = segments_of(view, box)
        if segments is not None:
            assert sum(length for _, length, _ in segments) == box.numel
            marked = [torch.arange(block.shape[0])[:, None, None].expand(block.shape).float() for block in expected]
            first = 0
            owner = torch.empty(shape)
            for target, mark in zip(view.split(owner), marked, strict=True):
                target.copy_(mark + first)
                first += len(mark)
            flat = owner[box.within(Box((0,) * len(shape), shape))].reshape(-1)
            for start, length, matrix in segments:
                assert (flat[start : start + length] == matrix).all()
    for block, target in zip(expected, found, strict=True):
        assert_same(block, target)


SPHERE = {"rule": "spectral_sphere", "weight_decay": 0.0}


STEPS = 6  # of which the last ones begin with vectors that are known well


@functools.cache
def one_device(hidden: int, mode: str):
    return cases.curve(None, {**SPHERE, "lambda_mode": mode}, {"hidden": hidden}, STEPS)


WAYS = [("bracketed", "owner"), ("projection", "replicate")]
EVERY_LAYOUT_ONE_WAY = [(*layout, *WAYS[index % 2]) for index, layout in enumerate(LAYOUTS)]


@pytest.mark.parametrize(
    ("layout", "world_size", "mode", "strategy"),
    dict.fromkeys([*EVERY_LAYOUT_ONE_WAY, *(("fsdp_tp", 4, *way) for way in WAYS)]),
)
def test_same_curve_as_one_device(ranks: RankPool, layout, world_size, mode, strategy):
    model = model_options(layout)
    expected, expected_weights = one_device(model.get("hidden", 31), mode)
    options = {**SPHERE, "lambda_mode": mode, "strategy": strategy}
    results = ranks.run(world_size, cases.curve, layout, options, model, STEPS)
    for losses, weights in results:
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        for name, value in expected_weights.items():
            np.testing.assert_allclose(weights[name], value, atol=2e-3, err_msg=name)
        for name, value in weights.items():  # replicas do not drift apart
            np.testing.assert_array_equal(value, results[0][1][name], err_msg=name)
    assert expected[-1] < 0.95 * expected[0]


@pytest.mark.parametrize(("layout", "world_size"), [("fsdp", 3), ("hsdp", 4), ("fsdp_tp", 4)])
def test_on_the_sphere_on_ranks(ranks: RankPool, layout, world_size):
    ranks.run(world_size, sso_cases.stay_on_the_sphere, layout, model_options(layout))


def test_nothing_is_assembled_and_little_is_sent(ranks: RankPool):
    for counted in ranks.run(4, sso_cases.count_collectives, "fsdp"):
        # W^T W x, inner products, the left vector, multipliers; and the flags of every step.
        assert counted["all_reduces"] <= num_products(10) - 1 + 3 + 1
        assert counted["largest"] <= counted["elements_of_vectors"]


def test_kernels_do_the_same(ranks: RankPool):
    # The multiplier is found on whole matrices, so it does not matter to it how they lay.
    for mode, layout in (("bracketed", "fsdp"), ("projection", "fsdp_columns")):
        options = {**SPHERE, "lambda_mode": mode}
        expected, weights = cases.curve(None, options, {"hidden": 32}, 2)
        ((losses, found), *_) = ranks.run(2, cases.by_kernels, cases.curve, layout, options, {"hidden": 32}, 2)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(found[name], value, atol=2e-4, err_msg=name)


def test_kernels_survey_shards(ranks: RankPool):
    (first, second) = ranks.run(2, sso_cases.surveys_by_kernels)
    for (found, expected), (other, _) in zip(first, second, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=5e-3)
        assert_same(other, found, "ranks 1 and 0")


@pytest.mark.parametrize(
    ("radius_mode", "resumed_on"),
    [("spectral_mup", [("hsdp", 4), ("fsdp", 1)]), ("initialize", [("fsdp", 3)])],
)
def test_checkpoint_on_another_number_of_ranks(ranks: RankPool, tmp_path, radius_mode, resumed_on):
    expected = ranks.run(2, sso_cases.save_in_the_middle, "fsdp", str(tmp_path), radius_mode)[0]
    for layout, world_size in resumed_on:
        for losses in ranks.run(world_size, sso_cases.resume, layout, str(tmp_path), radius_mode):
            np.testing.assert_allclose(losses, expected, rtol=1e-4)


def test_norm_of_shards(ranks: RankPool):
    for found, expected in ranks.run(3, sso_cases.norms_of_shards):
        np.testing.assert_allclose(found, expected, rtol=1e-2)


def test_a_gradient_on_one_rank_only(ranks: RankPool):
    assert ranks.run(2, sso_cases.missing_gradient) == pytest.approx([1.0, 1.0], rel=0.03)
