"""A small model and training loops that run on any number of ranks and in any layout, for the distributed tests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from muon_fsdp.comm import transfers
from muon_fsdp.rules import RULES
from tests.comparisons import assert_changed, assert_near, assert_same
from tests.reference import ReferenceAdamW, ReferenceMuon, ReferenceNorMuon

VOCABULARY, WIDTH, BATCH = 11, 10, 12


class Experts(nn.Module):
    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_experts, width, width) / width)

    def forward(self, x: Tensor) -> Tensor:  # every expert on every token, averaged
        weight = self.weight
        return torch.einsum("bi,eoi->bo", x, weight) / weight.shape[0]


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.experts = Experts(num_experts, width) if num_experts else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.down(torch.tanh(self.up(y)))
        return x if self.experts is None else x + self.experts(y)


class Model(nn.Module):
    """Embedding, blocks, a (2, width) matrix that most ranks hold nothing of, and a head."""

    # 31 rows are uneven on every number of ranks.
    def __init__(self, num_blocks: int = 2, num_experts: int = 3, width: int = WIDTH, hidden: int = 31) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList([Block(width, hidden, num_experts) for _ in range(num_blocks)])
        self.gate = nn.Linear(width, 2)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x * torch.sigmoid(self.gate(x)).prod(dim=-1, keepdim=True))


def make_model(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BATCH,), generator=generator)
    return tokens, (3 * tokens + 1) % VOCABULARY


OPTIONS: dict[str, Any] = {
    "lr": 0.02,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 0.05,
    "adamw_lr": 0.01,
    "adamw_weight_decay": 0.03,
}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    data_rank: int = 0,
    data_size: int = 1,
    after_backward: Callable[[nn.Module], None] | None = None,
) -> list[float]:
    """Train on this rank's part of every batch; return the losses of the whole batch."""
    losses = []
    for step in steps:
        tokens, targets = (part.chunk(data_size)[data_rank] for part in batch(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).float(), targets)
        loss.backward()
        if after_backward is not None:
            after_backward(model)
        optimizer.step()
        total = loss.detach().clone()
        if data_size > 1:
            dist.all_reduce(total)  # also over tensor-parallel ranks, which hold equal losses
            total /= dist.get_world_size()
        losses.append(total.item())
    return losses


def full_state(model: nn.Module) -> dict[str, np.ndarray]:
    return {
        name.replace("module.", ""): (p.full_tensor() if isinstance(p, DTensor) else p).detach().float().numpy().copy()
        for name, p in model.named_parameters()
    }


# ---------------------------------------------------------------------------------------------------------- layouts


def shard(model: Model, mesh: Any, placement_fn: Any = None) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, shard_placement_fn=placement_fn)
    fully_shard(model, mesh=mesh, shard_placement_fn=placement_fn)


def lay_out(model: Model, layout: str) -> tuple[nn.Module, int, int]:
    """Distribute the model as `layout` says.

    Returns:
        The model, this rank's place in the data-parallel dimension, and the size of that dimension.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    if layout == "fsdp":
        shard(model, init_device_mesh("cpu", (world,)))
    elif layout == "fsdp_columns":

        def columns(parameter: nn.Parameter) -> Shard | None:
            return Shard(parameter.ndim - 1) if parameter.ndim > 1 and parameter.shape[-1] % world == 0 else None

        shard(model, init_device_mesh("cpu", (world,)), columns)
    elif layout == "hsdp":
        shard(model, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif layout in ("fsdp_tp", "tp"):
        shards = world // 2 if layout == "fsdp_tp" else 1
        mesh = init_device_mesh("cpu", (shards, world // shards), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout == "fsdp_tp":
            shard(model, mesh["dp"])
        return model, mesh["dp"].get_local_rank(), shards
    elif layout == "experts_inside":  # experts sharded inside their matrices, the rest plain FSDP

        def inside(parameter: nn.Parameter) -> Shard | None:
            return Shard(1) if parameter.ndim == 3 and parameter.shape[1] % world == 0 else None

        shard(model, init_device_mesh("cpu", (world,)), inside)
    elif layout == "two_meshes":  # experts over pairs of ranks, the rest over all
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "inner"))
        for block in model.blocks:
            fully_shard(block.experts, mesh=init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("r", "s")))
        shard(model, mesh._flatten("all"))
    elif layout == "ddp":
        return nn.parallel.DistributedDataParallel(model), rank, world
    else:
        raise ValueError(layout)
    return model, rank, world


def curve(
    layout: str | None, options: dict[str, Any], model_options: Any = None, steps: int = 20, by_model: bool = False
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train in a layout, where None is one device; return the losses and the final weights."""
    model = make_model(**(model_options or {}))
    module, data_rank, data_size = (model, 0, 1) if layout is None else lay_out(model, layout)
    options = {**OPTIONS, **options}
    if by_model:
        optimizer: torch.optim.Optimizer = FSDPMuonOptimizer(module, **options)
    else:
        group = dist.group.WORLD if layout == "ddp" else None
        optimizer = MuonOptimizer(module.named_parameters(), replicate_group=group, **options)
    losses = train(module, optimizer, range(steps), data_rank, data_size)
    return losses, full_state(module)


# ----------------------------------------------------------------------------------- against the float64 reference


def follow_reference(layout: str, strategy: str, steps: int = 5, rule: str = "muon") -> None:
    """Check that a float64 model in a layout follows the reference to 1e-10, given random gradients."""
    model_options = {"hidden": 32} if layout == "fsdp_tp" else {}
    model = make_model(**model_options).double()
    references: dict[str, list[Any]] = {}
    for name, p in model.named_parameters():
        value = p.detach().numpy()
        if "wte" in name or "lm_head" in name or p.ndim == 1:
            references[name] = [ReferenceAdamW(value, lr=0.01, weight_decay=0.03)]
        else:
            muon = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}
            reference = {"muon": ReferenceMuon, "normuon": ReferenceNorMuon}[rule]
            references[name] = [reference(matrix, **muon) for matrix in (value if p.ndim == 3 else value[None])]
    module, _, _ = lay_out(model, layout)
    group = dist.group.WORLD if layout == "ddp" else None
    optimizer = MuonOptimizer(
        module.named_parameters(),
        orthogonalization="exact",
        strategy=strategy,
        replicate_group=group,
        rule=rule,
        **OPTIONS,
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for name, p in module.named_parameters():
            grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad.clone()
            many = references[name.replace("module.", "")]
            for reference, part in zip(many, grad.numpy() if p.ndim == 3 else [grad.numpy()], strict=True):
                reference.step(part)
        optimizer.step()
    for name, p in module.named_parameters():
        many = [reference.w for reference in references[name.replace("module.", "")]]
        value = (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy()
        expected = np.stack(many) if p.ndim == 3 else many[0]
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10, err_msg=name)


# --------------------------------------------------------------------------------------------------------- counting


def count(layout: str, strategy: str, model_options: Any = None) -> dict[str, Any]:
    """Count the orthogonalizations and the bytes sent of one step; return them beside what the plan says."""
    module, data_rank, data_size = lay_out(make_model(**(model_options or {})), layout)
    group = dist.group.WORLD if layout == "ddp" else None
    optimizer = MuonOptimizer(module.named_parameters(), strategy=strategy, replicate_group=group, **OPTIONS)
    train(module, optimizer, range(1), data_rank, data_size)
    matrices, sent = 0, 0
    rule, collective, full_tensor = type(RULES["muon"]), dist.all_to_all_single, DTensor.full_tensor
    direction = rule.direction

    def counted_direction(self: Any, batch: Any) -> None:
        nonlocal matrices
        matrices += len(batch.matrices)
        direction(self, batch)

    def counted_collective(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += input.numel() * input.itemsize
        return collective(output, input, *args, **kwargs)

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("full_tensor was called")

    rule.direction, dist.all_to_all_single, DTensor.full_tensor = counted_direction, counted_collective, forbidden
    try:
        optimizer.step()
    finally:
        rule.direction, dist.all_to_all_single, DTensor.full_tensor = direction, collective, full_tensor
    stages = optimizer._current_plan().plan.stages
    planned = sum(4 * stage.exchange.elements_sent() for stage in stages if stage.exchange is not None)
    report = optimizer.plan_report()
    return {
        "matrices": matrices,
        "sent": sent,
        "planned": planned,
        "report_matrices": report.num_matrices,
        "report_bytes": report.gather_bytes + report.scatter_bytes,
        "strategies": sorted({row.strategy for row in report.rows}),
    }


def lone_matrix() -> tuple[int, int]:
    """Take a step with one (64, 48) matrix on all ranks.

    Returns:
        The number of matrices that this rank computes, and the bytes that it sends.
    """
    layer = nn.Linear(48, 64, bias=False)
    fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = MuonOptimizer(layer.parameters())
    layer.weight.grad = distribute_tensor(torch.randn(64, 48), layer.weight.device_mesh, layer.weight.placements)
    optimizer.step()
    plan = optimizer._current_plan().plan
    return plan.num_matrices, 4 * sum(s.exchange.elements_sent() for s in plan.stages if s.exchange is not None)


# -------------------------------------------------------------------------------------------------- rank agreement


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

    held = [name for name in affected if transfers.local(parameters[name]).numel() > 0]
    assert held, f"rank {dist.get_rank()} holds nothing of {affected}, so there is nothing to compare"

    def snapshot() -> dict[str, dict[str, Tensor]]:
        state = {name: {"weight": parameters[name].detach(), **optimizer.state[parameters[name]]} for name in held}
        return {name: {key: transfers.local(v).clone() for key, v in one.items()} for name, one in state.items()}

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
    return [transfers.local(value) for state in optimizer.state.values() for value in state.values()]


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
    MuonOptimizer([{"params": [strided], "rule": "adamw"}]).step()
    assert_changed(strided, before, "the parameter that AdamW updates")
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
    found = {name: transfers.local(p) for name, p in sharded.items()}
    expected = {name: transfers.local_part(whole[name], p) for name, p in sharded.items()}
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


def imagined_ranks() -> int:
    """Plan a sharded model for 64 ranks; return the number of ranks in the report."""
    module, _, _ = lay_out(make_model(), "fsdp")
    return MuonOptimizer(module.named_parameters()).plan_report(world_size=64).num_ranks


def by_kernels(case: str, *args: Any) -> Any:
    """Run another case with updates by fused kernels in Triton's interpreter, and check that they were launched."""
    from unittest.mock import patch

    from muon_fsdp.kernels import triton_elementwise, triton_spectral
    from muon_fsdp.linalg import tangent
    from muon_fsdp.step import fused

    launched: list[str] = []
    launch = triton_elementwise.launch

    def noted_launch(kernel: Any, *rest: Any, **options: Any) -> None:
        launched.append(kernel.fn.__name__)
        launch(kernel, *rest, **options)

    with ExitStack() as stack:
        for module in (triton_elementwise, triton_spectral):
            stack.enter_context(patch.object(module, "launch", noted_launch))
        for module in (fused, tangent):
            stack.enter_context(patch.object(module, "unusable", lambda device: None))
        result = globals()[case](*args)
    expected = {"_muon_prepare_kernel", "_apply_kernel", "_adamw_kernel"}
    if any(isinstance(arg, dict) and arg.get("rule") == "spectral_sphere" for arg in args):
        expected |= {"_bilinear_kernel", "_shifted_cast_kernel"}
    assert expected <= set(launched), f"not launched: {expected - set(launched)}"
    return result
