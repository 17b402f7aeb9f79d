"""A small model and training loops that run on any number of ranks and in any layout, for the distributed tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from muon_fsdp.plan import outline
from muon_fsdp.plan.costs import StageLimits
from muon_fsdp.plan.stages import Stage
from muon_fsdp.rules import RULES
from tests.reference import ReferenceAdamW, ReferenceMuon, ReferenceNorMuon, ReferenceSinkhorn

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
    elif layout == "whole":  # every rank holds everything, as under DDP, but as DTensors
        shard(model, init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard")))
    elif layout in ("fsdp_tp", "fsdp_tp_once", "tp", "tp_once"):
        shards = world // 2 if layout.startswith("fsdp") else 1
        mesh = init_device_mesh("cpu", (shards, world // shards), mesh_dim_names=("dp", "tp"))
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if layout.startswith("fsdp"):
            shard(model, mesh["dp"])
        return model, mesh["dp"].get_local_rank(), shards
    elif layout == "hsdp_tp_once":
        # Other names than in "fsdp_tp": DTensor caches equal meshes, of an earlier test too.
        mesh = init_device_mesh("cpu", (2, world // 4, 2), mesh_dim_names=("replica", "shard", "tensor"))
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shard(model, mesh["replica", "shard"])
        return model, rank // 2, world // 2
    elif layout == "experts_inside":  # experts sharded inside their matrices, the rest plain FSDP

        def inside(parameter: nn.Parameter) -> Shard | None:
            return Shard(1) if parameter.ndim == 3 and parameter.shape[1] % world == 0 else None

        shard(model, init_device_mesh("cpu", (world,)), inside)
    elif layout == "two_meshes":  # experts over pairs of ranks, the rest over all
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "inner"))
        for block in model.blocks:
            fully_shard(block.experts, mesh=init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("r", "s")))
        shard(model, mesh._flatten("all"))
    elif layout in ("ddp", "ddp_sharded"):  # "sharded" is the state, see `sharded_state`
        return nn.parallel.DistributedDataParallel(model), rank, world
    else:
        raise ValueError(layout)
    return model, rank, world


def replicas_of(module: nn.Module, layout: str | None) -> dict[str, Any]:
    """Return the arguments that name the replicas which the parameters of a layout do not show."""
    if layout is not None and layout.endswith("once"):
        return {"replicate_mesh": module.blocks[0].up.weight.device_mesh}  # type: ignore[union-attr, index]
    return {"replicate_group": dist.group.WORLD if layout == "ddp" else None}


def sharded_state(layout: str | None) -> dict[str, bool]:
    """Return the options of optimizers that a layout needs."""
    return {"shard_state": True} if layout == "ddp_sharded" else {}


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
        optimizer = MuonOptimizer(module.named_parameters(), **replicas_of(module, layout), **options)
    losses = train(module, optimizer, range(steps), data_rank, data_size)
    return losses, full_state(module)


def curve_in_stages(limits: StageLimits, layout: str, options: dict[str, Any], steps: int) -> list[float]:
    """Train in a layout with stages that are cut and overlap in this way; return the losses."""
    with patch.object(outline, "choose_limits", lambda *_: limits):
        return curve(layout, options, {}, steps)[0]


# ----------------------------------------------------------------------------------- against the float64 reference


def follow_reference(
    layout: str, strategy: str, steps: int = 5, rule: str = "muon", options: dict[str, Any] | None = None
) -> None:
    """Check that a float64 model in a layout follows the reference to 1e-10, given random gradients."""
    model_options = {"hidden": 32} if "tp" in layout else {}
    model = make_model(**model_options).double()
    references: dict[str, list[Any]] = {}
    given = options or {}
    of_matrices, of_others = (given.get(f"{rule}cautious_weight_decay", False) for rule in ("", "adamw_"))
    for name, p in model.named_parameters():
        value = p.detach().numpy()
        if rule == "sinkhorn" and ("wte" in name or "lm_head" in name):
            references[name] = [ReferenceSinkhorn(value, lr=0.02, momentum=0.9)]
        elif "wte" in name or "lm_head" in name or p.ndim == 1:
            references[name] = [ReferenceAdamW(value, lr=0.01, weight_decay=0.03, cautious=of_others)]
        else:
            muon = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05, "cautious": of_matrices}
            reference = ReferenceNorMuon if rule == "normuon" else ReferenceMuon
            references[name] = [reference(matrix, **muon) for matrix in (value if p.ndim == 3 else value[None])]
    module, _, _ = lay_out(model, layout)
    if rule == "sinkhorn":  # for embedding and head
        override = {"rule": rule, "weight_decay": 0.0}
        rules: dict[str, Any] = {"overrides": {"*wte*": override, "*lm_head*": override}}
    else:
        rules = {"rule": rule}
    optimizer = MuonOptimizer(
        module.named_parameters(),
        orthogonalization="exact",
        strategy=strategy,
        **replicas_of(module, layout),
        **rules,
        **OPTIONS,
        **given,
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


def count(layout: str, strategy: str, model_options: Any = None, rule_name: str = "muon") -> dict[str, Any]:
    """Count the orthogonalizations and the bytes sent of one step; return them beside what the plan says.

    A rank sends its slice once per peer in an all-gather, "padding" of it only to make slices equal.
    """
    module, data_rank, data_size = lay_out(make_model(**(model_options or {})), layout)
    options = {**OPTIONS, **replicas_of(module, layout), "weight_decay": 0.0}
    optimizer = MuonOptimizer(module.named_parameters(), rule=rule_name, strategy=strategy, **options)
    train(module, optimizer, range(1), data_rank, data_size)
    matrices, sent = 0, 0
    rule = type(RULES[rule_name])
    all_to_all, all_gather = dist.all_to_all_single, dist.all_gather_into_tensor
    directions = rule.directions

    def counted_directions(self: Any, batches: Any) -> None:
        nonlocal matrices
        matrices += sum(len(batch.matrices) for batch in batches)
        directions(self, batches)

    def counted_all_to_all(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += input.numel() * input.itemsize
        return all_to_all(output, input, *args, **kwargs)

    def counted_all_gather(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += (output.numel() - input.numel()) * input.itemsize
        return all_gather(output, input, *args, **kwargs)

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("full_tensor was called")

    with ExitStack() as patches:
        patches.enter_context(patch.object(rule, "directions", counted_directions))
        patches.enter_context(patch.object(dist, "all_to_all_single", counted_all_to_all))
        patches.enter_context(patch.object(dist, "all_gather_into_tensor", counted_all_gather))
        patches.enter_context(patch.object(DTensor, "full_tensor", forbidden))
        optimizer.step()
    stages = optimizer._current_plan().plan.stages
    planned = bytes_sent(stages)
    padding = 0.0
    for stage in stages:
        if stage.exchange is not None and stage.exchange.forwards:
            peers, held = len(stage.exchange.peers), sum(slot.numel for slot in stage.shard_slots.values())
            padding += 4 * (peers - 1) * (stage.exchange.slice_numel - held / peers)
    report = optimizer.plan_report()
    return {
        "matrices": matrices,
        "sent": sent,
        "planned": planned,
        "padding": padding,
        "report_matrices": report.num_matrices,
        "report_bytes": report.gather_bytes + report.scatter_bytes,
        "report": str(report),
        "repeated": report.repeated,
        "strategies": sorted({row.strategy for row in report.rows}),
    }


def bytes_sent(stages: Sequence[Stage]) -> int:
    """Return the bytes of float32 that this rank sends to others in the transfers of stages."""
    numel = 0
    for exchange in (stage.exchange for stage in stages):
        if exchange is not None:
            lists = (pieces for sent in (exchange.gather_send, exchange.scatter_send) for pieces in enumerate(sent))
            numel += sum(piece.numel for other, pieces in lists if other != exchange.me for piece in pieces)
            numel += max(0, len(exchange.peers) - 1) * exchange.slice_numel
    return 4 * numel


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
    stages = optimizer._current_plan().plan.stages
    return sum(batch.count for stage in stages for batch in stage.batches), bytes_sent(stages)


def imagined_ranks() -> int:
    """Plan a sharded model for 64 ranks; return the number of ranks in the report."""
    module, _, _ = lay_out(make_model(), "fsdp")
    return MuonOptimizer(module.named_parameters()).plan_report(world_size=64).num_ranks


def by_kernels(case: Callable[..., Any], *args: Any) -> Any:
    """Run another case with updates by fused kernels in Triton's interpreter, and check that they were launched."""
    from muon_fsdp.kernels import triton_elementwise, triton_norms, triton_rows, triton_spectral
    from muon_fsdp.linalg import scaling, sphere, tangent
    from muon_fsdp.step import fused

    launched: list[str] = []
    launch = triton_elementwise.launch

    def noted_launch(kernel: Any, *rest: Any, **options: Any) -> None:
        launched.append(kernel.fn.__name__)
        launch(kernel, *rest, **options)

    with ExitStack() as stack:
        for module in (triton_elementwise, triton_norms, triton_rows, triton_spectral):
            stack.enter_context(patch.object(module, "launch", noted_launch))
        for module in (fused, scaling, sphere, tangent):
            stack.enter_context(patch.object(module, "unusable", lambda device: None))
        result = case(*args)
    expected = {"_muon_prepare_kernel", "_apply_kernel", "_adamw_kernel"}
    of_options = {
        ("rule", "normuon"): {"_row_squares_kernel", "_row_factors_kernel", "_scale_rows_kernel"},
        ("rule", "spectral_sphere"): {"_bilinear_kernel", "_sphere_factors_kernel"},
        ("lambda_mode", "bracketed"): {"_shifted_cast_kernel"},
        ("lambda_mode", "projection"): {"_project_out_kernel"},
    }
    for arg in args:
        for (name, value), kernels in of_options.items() if isinstance(arg, dict) else ():
            expected |= kernels if arg.get(name) == value else set()
    assert expected <= set(launched), f"not launched: {expected - set(launched)}"
    return result


def stop_idle(rule: str, options: dict[str, Any]) -> None:
    """Check that every second matrix, which has gradients only at first, stops on shards as it does on one device."""

    def train(strategy: str, sharded: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(*shape) for shape in [(10, 7), (7, 9), (9, 9), (9, 9)]))
        if sharded:
            fully_shard(model)
        optimizer = MuonOptimizer(
            model.named_parameters(), rule=rule, strategy=strategy, momentum=0.01, comm_dtype=torch.float32, **options
        )
        generator = torch.Generator().manual_seed(1)
        before: list[Tensor] = []
        for step in range(7):
            before = [whole(layer.weight) for layer in model]
            for number, p in enumerate(model.parameters()):
                grad = torch.randn(p.shape, generator=generator) * (step == 0 or number % 4 != 0)
                p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad
            optimizer.step()
        after = [whole(layer.weight) for layer in model]
        return after, [new - old for new, old in zip(after, before, strict=True)]

    def whole(p: Tensor) -> Tensor:
        return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()

    expected, _ = train("owner", sharded=False)  # once, because the interpreter of kernels takes seconds
    for strategy in ("owner", "replicate"):
        found, moved = train(strategy, sharded=True)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(
                a, b, rtol=0, atol=2e-4, msg=lambda text, strategy=strategy: f"{strategy}: {text}"
            )
        sizes = [float(each.norm()) for each in moved]
        assert max(sizes[::2]) < 1e-3 < 1e-2 < min(sizes[1::2]), (strategy, sizes)
