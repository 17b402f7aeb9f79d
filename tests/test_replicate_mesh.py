"""With `replicate_mesh`, matrices on submeshes are computed once, and siblings stay equal bit for bit."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from muon_fsdp import MuonOptimizer
from muon_fsdp.linalg import fingerprints
from muon_fsdp.plan.layout import Layout
from tests import distributed_cases, replicate_mesh_cases
from tests.pool import RankPool
from tests.replicate_mesh_cases import NUM_MATRICES, NUM_STEPS


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_a_layout_on_a_slice_becomes_one_on_the_whole_mesh(mesh_shape, data):
    """Compare with submeshes that NumPy cuts out of the mesh; axes may be flattened into one."""
    mesh = 10 + np.arange(np.prod(mesh_shape)).reshape(mesh_shape)
    axes = [axis for axis in range(mesh.ndim) if data.draw(st.booleans())]
    own_shape = [mesh_shape[axis] for axis in axes]
    is_run = axes == list(range(axes[0], axes[-1] + 1)) if axes else True
    if is_run and data.draw(st.booleans()):
        own_shape = [int(np.prod(own_shape))]
    placements = tuple(data.draw(st.sampled_from([Shard(0), Shard(1), Replicate()])) for _ in own_shape)
    shape, ranks = (7, 5), tuple(mesh.flatten().tolist())
    slices = np.moveaxis(mesh, axes, range(mesh.ndim - len(axes), mesh.ndim)).reshape(-1, *own_shape)
    found = set()
    for part in slices:
        own = Layout(tuple(part.flatten().tolist()), tuple(own_shape), placements)
        repeated = own.repeated_over(ranks)
        assert repeated is not None
        found.add(repeated)
        for rank in own.ranks:
            assert repeated.box_on(rank, shape) == own.box_on(rank, shape)
            together = [other for other, number in zip(repeated.ranks, repeated.replica_of, strict=True)
                        if number == repeated.replica_of[repeated.index_of[rank]]]  # fmt: skip
            own_replica = own.replica_of[own.index_of[rank]]
            assert together == [r for r, number in zip(own.ranks, own.replica_of, strict=True) if number == own_replica]
    assert len(found) == 1  # all submeshes find the same layout
    assert found.pop().ranks == ranks


@pytest.mark.parametrize("own", [(0, 3), (1, 2), (1, 0), (0, 1, 2), (0, 1, 3, 2, 4, 5), (5, 6)])
def test_ranks_that_are_no_slice(own):
    assert Layout(own, (len(own),), (Shard(0),)).repeated_over(tuple(range(8))) is None


@pytest.mark.parametrize("shape", [(2, 2), (2, 1, 2)])
@pytest.mark.parametrize("rule", ["muon", "normuon", "spectral_sphere"])
def test_each_matrix_once_and_as_the_float64_reference(ranks: RankPool, rule, shape):
    results = ranks.run(4, replicate_mesh_cases.follow_reference, shape, rule)
    assert sum(computed for computed, _ in results) == NUM_STEPS * NUM_MATRICES
    for _, weights in results[1:]:
        for name, value in weights.items():
            np.testing.assert_array_equal(value, results[0][1][name], err_msg=name)


@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_siblings_stay_equal_though_their_gradients_differ_by_rounding(ranks: RankPool, rule):
    results = ranks.run(4, replicate_mesh_cases.follow_reference, (2, 2), rule, 1e-6)
    for _, weights in results[1:]:
        for name, value in weights.items():
            np.testing.assert_array_equal(value, results[0][1][name], err_msg=name)


@pytest.mark.parametrize("rule", ["normuon", "spectral_sphere"])
@pytest.mark.parametrize("layout", ["fsdp_tp_once", "hsdp_tp_once"])
def test_each_matrix_of_a_model_once(ranks: RankPool, layout, rule):
    results = ranks.run(4, distributed_cases.count, layout, "owner", {"hidden": 32}, rule)
    assert sum(result["matrices"] for result in results) == 2 * 2 + 2 * 3 + 1
    assert {result["repeated"] for result in results} == {None}


def test_the_report_says_what_could_be_saved(ranks: RankPool):
    for result in ranks.run(4, distributed_cases.count, "fsdp_tp", "owner", {"hidden": 32}):
        repeated = result["repeated"]
        assert (repeated.num_matrices, repeated.of_matrices) == (7, 11)  # three experts in two blocks, and the gate
        assert 0 < repeated.saved < 0.5
        assert "7 of 11 matrices lie on a submesh of a larger mesh" in result["report"]
        assert f"replicate_mesh= saves {repeated.saved:.0%} of the FLOPs" in result["report"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_bit_and_every_place_count_in_the_hash(dtype):
    torch.manual_seed(0)
    weights = torch.randn(7, 9, dtype=dtype)
    hashes = [int(fingerprints.hash_of(weights))]
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[weights.itemsize]
    for bit in range(8 * weights.itemsize):
        changed = weights.clone()
        changed.view(bits)[3, 4] ^= -(2**bit) if bit == 8 * weights.itemsize - 1 else 2**bit
        hashes.append(int(fingerprints.hash_of(changed)))
    hashes += [int(fingerprints.hash_of(weights.roll(shift, dims=0))) for shift in range(1, 7)]
    assert len(set(hashes)) == len(hashes)
    assert int(fingerprints.hash_of(weights.T.contiguous().T)) == hashes[0]  # by values, not by memory
    with patch.object(fingerprints, "_CHUNK", 16):
        assert int(fingerprints.hash_of(weights)) == hashes[0]


@pytest.mark.parametrize("chunk", [2**22, 64 * 3])
def test_sums_of_gradients_are_as_large_as_the_gradients(chunk):
    torch.manual_seed(0)
    grad, other = torch.randn(2, 64, 31)
    grad -= grad.mean(dim=1, keepdim=True)  # as behind a normalization: rows sum to zero
    fingerprints.random_sums(grad)  # makes the signs for chunks of the usual size
    with patch.object(fingerprints, "_CHUNK", chunk):
        sums = fingerprints.random_sums(grad)
        assert 0.3 < float(sums.norm() / grad.norm()) < 3
        for changed in (other, grad.roll(1, dims=0), grad.roll(64 * 3), grad + 1e-2 * other):
            distance = (fingerprints.random_sums(changed) - sums).norm() / (changed - grad).norm()
            assert 0.3 < float(distance) < 3
        assert not torch.equal(fingerprints.random_sums(grad, seed=1), sums)


def test_a_mesh_that_is_none_is_refused():
    layer = nn.Linear(4, 6)
    for value in ("dp", {"weight": "dp"}):
        with pytest.raises(
            TypeError, match=r"replicate_mesh.* must be a DeviceMesh or a dict of name patterns, got str"
        ):
            MuonOptimizer(layer, replicate_mesh=value)
    with pytest.raises(TypeError, match="a pattern of names must be a string"):
        MuonOptimizer(layer, replicate_mesh={1: None})
    with pytest.raises(ValueError, match="patterns in replicate_mesh need names"):
        MuonOptimizer(layer.parameters(), replicate_mesh={"*": None})
    with pytest.warns(UserWarning, match=r"replicate_mesh: the patterns \['bias'\] match no matrix"):
        MuonOptimizer(layer, replicate_mesh={"bias": None, "*": None})
    assert torch.isfinite(layer.weight).all()
