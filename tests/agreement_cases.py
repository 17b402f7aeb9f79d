"""Steps where ranks, gradients or meshes differ, and what all ranks then agree on; run on gloo ranks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from muon_fsdp import MuonOptimizer
from muon_fsdp.comm import dtensors
from tests.comparisons import assert_changed, assert_near, assert_same
from tests.distributed_cases import OPTIONS, full_state, lay_out, make_model, train


def missing_gradients(layout: str, missing_on: str, rule: str = "muon") -> None:
    """Leave out gradients on rank 0, or on all ranks, of four parameters of different kinds.

    Check that a parameter and its state change when some rank has a gradient, and stay as they are when none has.
    """
    module, data_rank, data_size = lay_out(make_model(), layout)
    group = dist.group.WORLD if layout == "ddp" else None
    optimizer = MuonOptimizer(module.named_parameters(), replicate_group=group, rule=rule, **OPTIONS)
    train(module, optimizer, range(1), data_rank, data_size)
    affected = ("blocks.0.up.weight", "blocks.0.up.bias", "wte.weight", "blocks.1.experts.weight")
    parameters = {name.replace("module.", ""): p for name, p in module.named_parameters()}
    if missing_on == "all" or dist.get_rank() == 0:
        for name in affected:
            parameters[name].grad = None

    held = [name for name in affected if dtensors.local(parameters[name]).numel() > 0]
    assert held, f"rank {dist.get_rank()} holds nothing of {affected}, so there is nothing to compare"

    def snapshot() -> dict[str, dict[str, Tensor]]:
        state = {name: {"weight": parameters[name].detach(), **optimizer.state[parameters[name]]} for name in held}
        return {name: {key: dtensors.local(v).clone() for key, v in one.items()} for name, one in state.items()}

    before = snapshot()
    optimizer.step()
    compare = assert_changed if missing_on == "some" else assert_same
    compare(snapshot(), before)


def zero_equals_missing() -> None:
    """Check that a gradient that is missing on one rank counts as zero there."""
    results = []
    for missing in (True, False):
        module, _, _ = lay_out(make_model(), "fsdp")
        optimizer = MuonOptimizer(module.named_parameters(), **OPTIONS)
        torch.manual_seed(3)
        for p in module.parameters():
            p.grad = distribute_tensor(torch.randn(p.shape), p.device_mesh, p.placements)
            if dist.get_rank() == 0:
                if missing:
                    p.grad = None
                else:
                    p.grad.to_local().zero_()
        optimizer.step()
        results.append(full_state(module))
    assert_same(results[0], results[1])


def local_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [dtensors.local(value) for state in optimizer.state.values() for value in state.values()]


def not_finite_on_one_rank(policy: str) -> tuple[str, float]:
    """Give rank 1 a NaN in a gradient, and check that the step changes nothing and training can go on.

    Returns:
        The text of the error of that step, "" if there was none, and the number of skipped steps.
    """
    module, data_rank, data_size = lay_out(make_model(), "fsdp")
    optimizer = MuonOptimizer(module.named_parameters(), nonfinite=policy, **OPTIONS)
    train(module, optimizer, range(2), data_rank, data_size)
    before = full_state(module), [value.clone() for value in local_state(optimizer)]
    if dist.get_rank() == 1:
        module.blocks[0].down.weight.grad.to_local()[0, 0] = torch.nan
    text = ""
    try:
        optimizer.step()
    except RuntimeError as error:
        text = str(error)
    assert_same(full_state(module), before[0], "weights")
    assert_same(local_state(optimizer), before[1], "state")
    losses = train(module, optimizer, range(2, 4), data_rank, data_size)
    assert all(np.isfinite(losses)), losses
    return text, optimizer.metrics()["skipped_steps"]


def disagreement(kind: str) -> str:
    """Build something different on rank 1; return the error on this rank."""
    module, data_rank, data_size = lay_out(make_model(), "fsdp")
    options = dict(OPTIONS)
    if dist.get_rank() == 1:
        different: dict[str, dict[str, Any]] = {
            "scale": {"scale": "v1"},
            "lr": {"lr": 0.5},
            "strategy": {"strategy": "replicate"},
            "stages": {"max_stage_bytes": 100},
            "policy": {"nonfinite": "skip"},
        }
        options.update(different.get(kind, {}))
    names = list(module.named_parameters())
    if kind == "parameters" and dist.get_rank() == 1:
        names = names[:-1]
    optimizer = MuonOptimizer(names, **options)
    try:
        train(module, optimizer, range(1), data_rank, data_size)
        if kind == "later":
            if dist.get_rank() == 1:
                optimizer.param_groups[0]["scale"] = "v3"
            train(module, optimizer, range(1, 2), data_rank, data_size)
    except RuntimeError as error:
        return str(error)
    return ""


def unsupported_layout() -> list[str]:
    """Return the errors for a parameter of partial sums and for one whose shard is not a box.

    Check also that AdamW updates the second.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    texts = []
    partial = nn.Parameter(DTensor.from_local(torch.randn(4, 4), mesh, [Partial()]))
    strided = nn.Parameter(
        DTensor.from_local(torch.randn(4, 4), mesh, [_StridedShard(0, split_factor=2)], shape=(8, 4), stride=(4, 1))
    )
    for p in (partial, strided):
        p.grad = DTensor.from_local(torch.randn(4, 4), mesh, p.placements, shape=p.shape, stride=p.stride())
        optimizer = MuonOptimizer([("odd.weight", p)])
        try:
            optimizer.step()
        except RuntimeError as error:
            texts.append(str(error))
    before = strided.to_local().clone()
    optimizer = MuonOptimizer([{"params": [strided], "rule": "adamw"}])
    optimizer.step()
    assert_changed(strided, before, "the parameter that AdamW updates")
    saved = optimizer.state_dict()
    assert "boxes" not in saved
    optimizer.load_state_dict(deepcopy(saved))
    return texts


def partial_gradients() -> None:
    """Check that a gradient of partial sums is reduced to the layout of its parameter first."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    start, grad = torch.randn(6, 4), torch.randn(6, 4)
    results = []
    for placements in ([Shard(0)], [Partial()]):
        p = nn.Parameter(distribute_tensor(start, mesh, [Shard(0)]))
        if isinstance(placements[0], Partial):
            p.grad = None
            p.grad = DTensor.from_local(grad / dist.get_world_size(), mesh, placements)
        else:
            p.grad = distribute_tensor(grad, mesh, placements)
        MuonOptimizer([p]).step()
        results.append(p.full_tensor())
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def crossing_meshes() -> float:
    """Put one parameter on each axis of a 2 x 2 mesh and a NaN on rank 3; return the steps that this rank skipped."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(0)
    parameters = [nn.Parameter(distribute_tensor(torch.randn(6, 5), mesh[name], [Shard(0)])) for name in ("a", "b")]
    optimizer = MuonOptimizer(parameters, nonfinite="skip")
    for step in range(3):
        for p in parameters:
            p.grad = distribute_tensor(torch.randn(6, 5), p.device_mesh, p.placements)
        if step == 1 and dist.get_rank() == 3:
            parameters[0].grad.to_local().fill_(torch.nan)
        optimizer.step()
    for name, p in zip(("a", "b"), parameters, strict=True):
        assert p.to_local().isfinite().all(), f"the parameter on axis {name}: {p.to_local()}"
    return optimizer.metrics()["skipped_steps"]


def sets_that_overlap(sets: list[tuple[Any, tuple[Placement, ...], int]]) -> None:
    """Train matrices on several meshes in the smallest stages, and compare them with one device.

    A mesh is given by its ranks, the placements of its matrices and their number.
    """
    generator = torch.Generator().manual_seed(0)
    sharded, whole = dict[str, nn.Parameter](), dict[str, nn.Parameter]()
    for place, (ranks, placements, number) in enumerate(sets):
        mesh = DeviceMesh("cpu", ranks)
        for index in range(number):
            name, value = f"{place}.{index}", torch.randn(8, 6, generator=generator)
            if mesh.get_coordinate() is not None:
                sharded[name] = nn.Parameter(distribute_tensor(value, mesh, placements, src_data_rank=None))
                whole[name] = nn.Parameter(value)
    for parameters in (sharded, whole):
        optimizer = MuonOptimizer(parameters.items(), strategy="owner", max_stage_bytes=1)
        for _ in range(2):
            for p in parameters.values():
                p.grad = p.detach().clone()
            optimizer.step()
    found = {name: dtensors.local(p) for name, p in sharded.items()}
    expected = {name: dtensors.local_part(whole[name], p) for name, p in sharded.items()}
    assert_near(found, expected, atol=1e-5)


def some_ranks_have_more() -> None:
    """Check that a parameter on all three ranks is updated beside one that only two of them hold."""
    everyone = init_device_mesh("cpu", (3,))
    pair = DeviceMesh("cpu", [0, 1])
    parameters = [nn.Parameter(distribute_tensor(torch.randn(6, 5), everyone, [Shard(0)]))]
    if dist.get_rank() < 2:
        parameters.append(nn.Parameter(distribute_tensor(torch.randn(4, 5), pair, [Shard(0)])))
    optimizer = MuonOptimizer(parameters)
    before = [p.to_local().clone() for p in parameters]
    for _ in range(3):
        for p in parameters:
            p.grad = distribute_tensor(torch.randn(p.shape), p.device_mesh, p.placements)
        optimizer.step()
    assert_changed(parameters, before)


def first_step_without_lr(kind: str) -> float:
    """Take two steps at lr = 0 where rank 1 holds nothing or has no gradients; return the step counter of AdamW."""
    layer = nn.Linear(8, 1)  # the weight is one row: rank 1 holds nothing of it
    fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = MuonOptimizer(layer, lr=0.0, adamw_lr=0.0, overrides={"weight": "muon"})
    for _ in range(2):
        layer(torch.ones(2, 8)).sum().backward()
        if kind == "missing" and dist.get_rank() == 1:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return float(optimizer.state[layer.bias]["step"])


def metrics_on_one_rank() -> list[float]:
    """Ask for metrics on rank 0 alone, before the first step and after every step; a scheduler is made in between.

    Returns:
        The losses of three steps.
    """
    module, data_rank, data_size = lay_out(make_model(), "fsdp")
    optimizer = MuonOptimizer(module.named_parameters(), **OPTIONS)
    if dist.get_rank() == 0:
        optimizer.metrics()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 * (step + 1))
    losses = []
    for step in range(3):
        losses += train(module, optimizer, range(step, step + 1), data_rank, data_size)
        scheduler.step()
        if dist.get_rank() == 0:
            optimizer.metrics()
    return losses


def odd_meshes() -> list[str]:
    """Return the errors for a mesh whose ranks do not ascend, and for one that this rank may not belong to."""
    texts = []
    for mesh in (DeviceMesh("cpu", [1, 0, 2]), DeviceMesh("cpu", [0, 1])):
        p = nn.Parameter(DTensor.from_local(torch.randn(2, 4), mesh, [Shard(0)], run_check=False))
        p.grad = DTensor.from_local(torch.randn(2, 4), mesh, [Shard(0)], run_check=False)
        optimizer = MuonOptimizer([("odd", p)])
        try:
            optimizer.step()
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    return texts
