"""The Spectral Sphere Optimizer on gloo ranks, run by tests/test_sso_shards.py, and a spectral norm by an SVD."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from muon_fsdp import SpectralSphereOptimizer
from muon_fsdp.comm import transfers
from muon_fsdp.comm.dtensors import layout_of
from muon_fsdp.comm.process_groups import make_group
from muon_fsdp.comm.recorder import Recorder
from muon_fsdp.declarations.state import num_vectors
from muon_fsdp.declarations.views import matrix_view
from muon_fsdp.plan.matrix_sets import make_sets
from muon_fsdp.plan.units import ParameterSpec
from muon_fsdp.spectral import compute_spectral_norm
from muon_fsdp.statistics import shard_products
from muon_fsdp.statistics.top_singular import Survey
from tests.comparisons import assert_same
from tests.distributed_cases import lay_out, make_model, train


def norm_of(matrix) -> float:
    return float(np.linalg.svd(matrix.detach().double().numpy(), compute_uv=False)[0])


def _optimizer(module: nn.Module, **options: Any) -> SpectralSphereOptimizer:
    return SpectralSphereOptimizer(module.named_parameters(), lr=0.02, momentum=0.9, adamw_lr=0.01, **options)


def stay_on_the_sphere(layout: str, model_options: Any) -> None:
    """Check that the spectral norm s of every matrix is its radius R within 2% after each of five steps."""
    module, rank, size = lay_out(make_model(**model_options), layout)
    optimizer = _optimizer(module)
    for step in range(5):
        train(module, optimizer, range(step, step + 1), rank, size)
        for name, p in module.named_parameters():
            if p.ndim < 2 or "wte" in name or "lm_head" in name:
                continue
            whole = (p.full_tensor() if isinstance(p, DTensor) else p).detach().double().numpy()
            for matrix in whole if whole.ndim == 3 else [whole]:
                s = np.linalg.svd(matrix, compute_uv=False)[0]
                radius = (matrix.shape[0] / matrix.shape[1]) ** 0.5
                np.testing.assert_allclose(s, radius, rtol=0.02, err_msg=f"{name} after step {step}")


def count_collectives(layout: str) -> dict[str, int]:
    """Count the collectives of a warm step, and check that no weight is assembled.

    Returns:
        The number of all-reduces, the elements of the largest, and the elements that the vectors of all matrices have.
    """
    module, rank, size = lay_out(make_model(), layout)
    optimizer = _optimizer(module)
    train(module, optimizer, range(3), rank, size)
    classes = [kind for own in optimizer._current_plan().matrices.sets for kind in own.classes]
    sizes = [(kind.count, num_vectors(kind.rows, kind.cols), kind.cols) for kind in classes]
    vectors = sum(max(count * each * cols, count * 4 * each**2) for count, each, cols in sizes)
    counted = {"all_reduces": 0, "largest": 0, "elements_of_vectors": vectors}
    all_reduce = dist.all_reduce

    def counted_all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        counted["all_reduces"] += 1
        counted["largest"] = max(counted["largest"], tensor.numel() if tensor.is_floating_point() else 0)
        return all_reduce(tensor, *args, **kwargs)

    def assembled(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a weight was assembled")

    with (
        patch.object(transfers.dist, "all_reduce", counted_all_reduce),
        patch.object(DTensor, "full_tensor", assembled),
        patch.object(transfers, "gather_full", assembled),
    ):
        optimizer.step()
    return counted


def save_in_the_middle(layout: str, path: str, radius_mode: str) -> list[float]:
    module, rank, size = lay_out(make_model(), layout)
    optimizer = _optimizer(module, radius_mode=radius_mode)
    train(module, optimizer, range(3), rank, size)
    model_state, optimizer_state = get_state_dict(module, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    return train(module, optimizer, range(3, 6), rank, size)


def resume(layout: str, path: str, radius_mode: str) -> list[float]:
    module, rank, size = lay_out(make_model(), layout)
    optimizer = _optimizer(module, radius_mode=radius_mode)
    model_state, optimizer_state = get_state_dict(module, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return train(module, optimizer, range(3, 6), rank, size)


def norms_of_shards() -> tuple[list[float], list[float]]:
    mesh = init_device_mesh("cpu", (3,))
    found, expected = [], []
    generator = torch.Generator().manual_seed(0)
    for shape, placement in [((17, 23), Shard(0)), ((17, 23), Shard(1)), ((2, 29), Shard(0)), ((17, 23), Replicate())]:
        whole = torch.randn(shape, generator=generator)
        found.append(float(compute_spectral_norm(distribute_tensor(whole, mesh, [placement]))))
        expected.append(float(torch.linalg.matrix_norm(whole.double(), 2)))
    return found, expected


def surveys_by_kernels() -> list[tuple[Tensor, Tensor]]:
    """Find singular triples and subspaces of sharded matrices.

    Returns:
        For each layout, the numbers by kernels in the interpreter and the numbers by the library.
    """
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    results = []
    make_group(tuple(range(dist.get_world_size())), torch.device("cpu"), None)
    for placement in (Shard(0), Shard(1), Replicate()):  # rows of W x on one rank each, parts of them, and all of them
        matrix = torch.randn(9, 20, generator=generator)
        parameter = distribute_tensor(matrix, mesh, [placement])
        subspace = torch.randn(1, 9, 20, generator=generator)
        found = []
        for reason in (None, "compared with"):
            with patch.object(shard_products, "unusable", lambda device, reason=reason: reason):
                view = matrix_view((9, 20), name="it", kind="matrix")
                layout, device = layout_of(parameter, None), matrix.device
                spec = ParameterSpec(0, 0, "", view.shape, layout, 4, device, matrix.dtype, view, is_observed=True)
                (matrices,) = make_sets([spec], dist.get_rank())
                shards = {0: parameter.to_local()}
                ((kept, it),) = Survey(matrices, 10).run([subspace], shards, Recorder(), cold=False)
                spanned = kept.mT @ kept  # a projection: signs of vectors may differ
                parts = (it.norm, it.norm * it.left[0, :, None] * it.right[0, None, :], spanned)
                found.append(torch.cat([part.flatten() for part in parts]))
        results.append((found[0], found[1]))
    return results


def missing_gradient() -> float:
    """Train one matrix whose gradient is missing on rank 1, and one whose gradient is missing on both ranks.

    Check that the second stays as it is.

    Returns:
        The spectral norm of the first.
    """
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(18, 18, generator=generator) for _ in range(2)]
    params = [nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])) for whole in wholes]
    optimizer = SpectralSphereOptimizer(params, lr=0.02)
    for _ in range(3):
        if dist.get_rank() == 0:
            params[0].grad = distribute_tensor(torch.ones(18, 18), mesh, [Shard(0)], src_data_rank=None)
        optimizer.step()
    assert_same(params[1].full_tensor(), wholes[1], "the matrix without a gradient")
    return float(torch.linalg.matrix_norm(params[0].full_tensor().detach().double(), 2))
