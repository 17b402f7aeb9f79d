"""Replicas that `replicate_mesh` promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from muon_fsdp import MuonOptimizer
from muon_fsdp.comm.dtensors import local
from tests.comparisons import assert_changed, assert_same
from tests.fault_cases import LIMIT, error_of, sharded
from tests.fault_cases import give_gradients as give_sharded_gradients
from tests.pool import RankPool
from tests.promises import promise
from tests.replicate_mesh_cases import give_gradients, matrices_on, mesh_of


def flip_a_bit(tensor: Tensor) -> None:
    with torch.no_grad():
        local(tensor).view(-1)[-1:].view(torch.int64).bitwise_xor_(1)


def difference(what: str, name: str) -> list[str]:
    """Make one matrix differ on ranks 1 and 3, the siblings of 0 and 2; return the errors of two steps.

    Check that the steps change nothing.
    """
    mesh = mesh_of((2, 2))
    parameters = matrices_on(mesh)
    optimizer = MuonOptimizer(list(parameters.items()), rule="normuon", replicate_mesh=mesh)
    give_gradients(parameters, 0)
    is_other = dist.get_rank() % 2 == 1
    if what == "state":
        optimizer.step()
        saved = optimizer.state_dict()
        if is_other:
            flip_a_bit(saved["state"][list(parameters).index(name)]["second_moment"])
        optimizer.load_state_dict(saved)
    elif is_other and what == "values":
        flip_a_bit(parameters[name])
    elif is_other:
        grad = parameters[name].grad
        assert grad is not None
        local(grad).neg_()
    before = {key: local(p).detach().clone() for key, p in parameters.items()}
    errors = [error_of(optimizer.step) for _ in range(2)]
    assert_same({key: local(p) for key, p in parameters.items()}, before)
    return errors


@promise(
    "`replicate_mesh` is passed, and a weight, its gradient or loaded state differs between siblings",
    "All ranks raise before anything is changed; the error names the parameter, the ranks and what to do",
)
@pytest.mark.parametrize(
    ("what", "name"),
    [("values", "rows"), ("values", "stack"), ("gradients", "columns"), ("gradients", "plain"), ("state", "repeated")],
)
def test_replicas_that_differ_are_told(ranks: RankPool, name, what):
    for texts in ranks.run(4, difference, what, name, timeout=LIMIT):
        for text in texts:
            assert f"hold the same parameter {name!r}" in text
            assert f"but they differ in its {what}" in text
            assert f"pass replicate_mesh={{{name!r}: None, '*': mesh}}" in text


def seen_from_afar() -> str:
    """Make a matrix differ between ranks 0 and 1; return the error of rank 2, which only decides with them."""
    mesh = DeviceMesh("cpu", [0, 1])
    weight = nn.Parameter(torch.full((4, 6), float(dist.get_rank())))
    weight.grad = torch.ones(4, 6)
    chosen = mesh if dist.get_rank() < 2 else None
    optimizer = MuonOptimizer([("w", weight)], replicate_mesh=chosen, agreement_group=dist.group.WORLD)
    text = error_of(optimizer.step)
    assert_same(weight, torch.full((4, 6), float(dist.get_rank())))
    return text


@promise(
    "Replicas differ, and further ranks decide about the step with theirs (`agreement_group`)",
    "These ranks raise too",
)
def test_ranks_that_hold_no_replica_raise_too(ranks: RankPool):
    texts = ranks.run(3, seen_from_afar, timeout=LIMIT)
    assert all("hold the same parameter 'w'" in text for text in texts)
    assert "cannot take this step, so no rank does" in texts[2]


def left_out() -> dict[str, np.ndarray]:
    """Train matrices that differ between siblings, and are left out; return the weights of this rank."""
    mesh = mesh_of((2, 2))
    parameters = matrices_on(mesh)
    if dist.get_rank() % 2 == 1:
        with torch.no_grad():
            local(parameters["stack"]).mul_(2.0)
    optimizer = MuonOptimizer(list(parameters.items()), replicate_mesh={"st*": None, "*": mesh}, strategy="owner")
    give_gradients(parameters, 0)
    before = {name: local(p).detach().clone() for name, p in parameters.items()}
    optimizer.step()
    assert_changed({name: local(p) for name, p in parameters.items()}, before)
    return {name: local(p).detach().numpy().copy() for name, p in parameters.items()}


@promise(
    "A weight is meant to differ between siblings (local experts)",
    "`replicate_mesh={pattern: None, '*': mesh}` leaves it to each of them",
)
def test_matrices_that_are_left_out_may_differ(ranks: RankPool):
    first, second, *_ = ranks.run(4, left_out)
    for name in ("rows", "columns", "plain"):
        np.testing.assert_array_equal(second[name], first[name], err_msg=name)
    assert not np.allclose(second["stack"], first["stack"])


def before_weights_are_loaded() -> str:
    """Take the step by which torch.distributed.checkpoint makes state, with weights that differ; then make them equal.

    Returns:
        The error of the first step of training, "" if there is none.
    """
    mesh = mesh_of((2, 2))
    parameters = matrices_on(mesh)
    optimizer = MuonOptimizer(list(parameters.items()), replicate_mesh=mesh, lr=0.0)
    with torch.no_grad():
        for p in parameters.values():
            local(p).add_(dist.get_rank())
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for p, loaded in zip(parameters.values(), matrices_on(mesh).values(), strict=True):
            local(p).copy_(local(loaded))
    give_gradients(parameters, 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    return error_of(optimizer.step)


@promise(
    "`replicate_mesh` is passed, and the weights are loaded after the optimizer made its state",
    "They are compared when training starts",
)
def test_replicas_are_compared_when_training_starts(ranks: RankPool):
    assert ranks.run(4, before_weights_are_loaded) == [""] * 4


def no_slice() -> tuple[str, str]:
    """Take a step with a matrix on ranks that are no submesh; build an optimizer with a mesh of other ranks.

    Returns:
        Both errors.
    """
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 3], [1, 2])]
    (own,) = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    (other,) = [mesh for mesh in meshes if mesh.get_coordinate() is None]
    parameter = sharded(torch.randn(6, 5), own)
    optimizer = MuonOptimizer([("odd", parameter)], replicate_mesh=mesh_of((2, 2)))
    give_sharded_gradients([parameter])
    text = error_of(optimizer.step)
    with pytest.raises(ValueError, match="must contain this rank") as caught:
        MuonOptimizer([("odd", parameter)], replicate_mesh=other)
    return text, str(caught.value)


@promise(
    "A matrix lies on ranks that are no submesh of `replicate_mesh`, or the mesh does not contain the rank",
    "An error that names the parameter and what to pass",
)
def test_a_mesh_that_does_not_fit_is_refused(ranks: RankPool):
    for text, other in ranks.run(4, no_slice, timeout=LIMIT):
        assert "'odd' lies on ranks" in text
        assert "no submesh of replicate_mesh with ranks (0, 1, 2, 3)" in text
        assert "replicate_mesh={'odd': None, '*': mesh}" in text
        assert other == "replicate_mesh must contain this rank: pass a mesh that it belongs to"
