"""Cases of FSDPMuonOptimizer that tests/test_fsdp.py runs on ranks, and torchrun runs as a program."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, label
from muon_fsdp.comm.dtensors import local
from tests.comparisons import assert_same
from tests.distributed_cases import batch, full_state, lay_out, make_model, shard, sharded_state, train

OPTIONS: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05, "adamw_lr": 0.01}


def world_mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def data_place() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def classes_agree() -> None:
    """Check that the two classes with equal options and routing give equal results, bit for bit."""
    results = []
    for by_class in (True, False):
        model = make_model()
        shard(model, world_mesh())
        if by_class:
            optimizer: MuonOptimizer = FSDPMuonOptimizer(model, **OPTIONS)
        else:
            groups = [dict(group) for group in optimizer.param_groups]
            by_name = dict(model.named_parameters())
            for group in groups:
                group["params"] = [(name, by_name[name]) for name in group.pop("param_names")]
            optimizer = MuonOptimizer(groups)
        losses = train(model, optimizer, range(5), *data_place())
        results.append((losses, full_state(model)))
    (losses, weights), (other_losses, other_weights) = results
    assert losses == other_losses, (losses, other_losses)
    assert_same(other_weights, weights)


def unshard() -> None:
    """Check everything that `unshard_params` promises."""
    model = make_model().double()
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    shard(model, world_mesh())
    optimizer = FSDPMuonOptimizer(model, **OPTIONS)
    before = {name: local(p).clone() for name, p in model.named_parameters()}
    with optimizer.unshard_params():
        inside = dict(model.named_parameters())
        assert _types(inside) == {nn.Parameter}, _types(inside)
        assert_same(inside, expected, "inside of unshard_params")
        with torch.no_grad():
            inside["blocks.0.up.weight"].add_(1.0)
    after = dict(model.named_parameters())
    assert _types(after) == {DTensor}, _types(after)
    written = after.pop("blocks.0.up.weight").full_tensor()
    assert_same(written, expected["blocks.0.up.weight"] + 1.0, "the weight that was written")
    assert_same(after, {name: before[name] for name in after}, "weights that were not written")
    _unshard_during_training(model, optimizer)
    alive = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert alive() is None, "the model keeps the optimizer alive"


def _types(parameters: dict[str, nn.Parameter]) -> set[type]:
    """Return the types of the tensors: DTensor while sharded, nn.Parameter while whole."""
    return {DTensor if isinstance(p, DTensor) else type(p) for p in parameters.values()}


def _unshard_during_training(model: nn.Module, optimizer: FSDPMuonOptimizer) -> None:
    """Check that `unshard_params` is refused between forward and backward, and works after both and an evaluation."""
    train(model.float(), optimizer, range(2), *data_place())
    loss = model(batch(0)[0]).sum()
    with pytest.raises(RuntimeError, match="between forward and backward"), optimizer.unshard_params():
        pass
    loss.backward()
    with optimizer.unshard_params():
        pass
    with torch.no_grad():
        model(batch(0)[0])
    with optimizer.unshard_params():  # after an evaluation, FSDP keeps the root unsharded
        types = _types(dict(model.named_parameters()))
        assert types == {nn.Parameter}, types
    optimizer.zero_grad()
    train(model, optimizer, range(2), *data_place())


def accumulate(steps_per_update: int) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train with micro-batches; return the losses of whole batches and the final weights."""
    model = make_model()
    shard(model, world_mesh())
    optimizer = FSDPMuonOptimizer(model, gradient_accumulation_steps=steps_per_update, **OPTIONS)
    rank, world = data_place()
    losses = []
    for step in range(4):
        whole = 0.0
        for micro in range(steps_per_update):
            tokens, targets = (part.chunk(steps_per_update)[micro].chunk(world)[rank] for part in batch(step))
            loss = nn.functional.cross_entropy(model(tokens), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            whole += loss.item() / steps_per_update
        losses.append(whole)
    return losses, full_state(model)


def accumulation_is_saved() -> None:
    """Check that a run resumed in the middle of an accumulation gives the weights of one that was not interrupted."""
    rank, world = data_place()

    def micro_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        tokens, targets = (part.chunk(world)[rank] for part in batch(number))
        nn.functional.cross_entropy(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    def start() -> tuple[nn.Module, FSDPMuonOptimizer]:
        model = make_model()
        shard(model, world_mesh())
        return model, FSDPMuonOptimizer(model, gradient_accumulation_steps=3, **OPTIONS)

    model, optimizer = start()
    for number in range(4):
        micro_step(model, optimizer, number)
    resumed_model, resumed = start()
    resumed.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for p, q in zip(model.parameters(), resumed_model.parameters(), strict=True):
            local(q).copy_(local(p))
            q.grad = None if p.grad is None else p.grad.clone()
    for number in range(4, 9):
        micro_step(model, optimizer, number)
        micro_step(resumed_model, resumed, number)
    assert_same(full_state(resumed_model), full_state(model))


def mixed_precision(dtype_name: str) -> tuple[list[float], set[str], set[str]]:
    """Train under FSDP2's mixed precision, float16 with a GradScaler.

    Returns:
        The losses, the dtypes of the weights, and the dtypes of the momentum.
    """
    dtype = getattr(torch, dtype_name)
    model = make_model()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=world_mesh(), mp_policy=policy)
    fully_shard(model, mesh=world_mesh(), mp_policy=policy)
    optimizer = FSDPMuonOptimizer(model, **OPTIONS)
    rank, world = data_place()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)
    losses = []
    for step in range(10):
        tokens, targets = (part.chunk(world)[rank] for part in batch(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).float(), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    momenta = {str(s["momentum_buffer"].dtype) for s in optimizer.state.values()}
    return losses, {str(p.dtype) for p in model.parameters()}, momenta


def scaler_overflow() -> None:
    """Check that an infinite gradient on rank 0 makes GradScaler skip the step on all ranks and halve its scale."""
    model = make_model()
    shard(model, world_mesh())
    optimizer = FSDPMuonOptimizer(model, **OPTIONS)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    train(model, optimizer, range(1), *data_place())
    before = full_state(model)
    optimizer.zero_grad()
    scaler.scale(model(batch(1)[0]).sum()).backward()
    if dist.get_rank() == 0:
        local(model.blocks[0].up.weight.grad)[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert_same(full_state(model), before)
    assert scaler.get_scale() == 4.0, scaler.get_scale()


def variant(kind: str) -> tuple[list[float], list[float]]:
    """Return the losses with a way of building or running the model that must not matter, and without it."""
    results = []
    for special in (True, False):
        if special and kind == "meta":
            with torch.device("meta"):
                model = make_model()
        else:
            model = make_model()
        reference = make_model()
        if special and kind == "checkpointing":
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

            model.blocks = nn.ModuleList([checkpoint_wrapper(block) for block in model.blocks])
        if special and kind == "compile":
            for block in model.blocks:
                block.compile(backend="eager")
        options: dict[str, Any] = {
            "mesh": world_mesh(),
            "reshard_after_forward": not (special and kind == "keep unsharded"),
        }
        if special and kind == "cpu offload":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
        if special and kind == "meta":
            optimizer = FSDPMuonOptimizer(model, **OPTIONS)  # before the weights exist
            model.to_empty(device="cpu")
            set_model_state_dict(model, reference.state_dict(), options=StateDictOptions(full_state_dict=True))
        else:
            optimizer = FSDPMuonOptimizer(model, **OPTIONS)
        after = clip if special and kind == "clip" else None
        results.append(train(model, optimizer, range(6), *data_place(), after_backward=after))
    return results[0], results[1]


def clip(module: nn.Module) -> None:
    """Clip DTensor gradients to a norm that is never reached, which must change nothing."""
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1e4)
    size = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    assert 0 < size < 1e4, size


def refusals() -> list[str]:
    """Return the error messages for FSDP1 given as a model and as parameters."""
    texts = []
    flat = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
    for build in (
        lambda: FSDPMuonOptimizer(flat),
        lambda: MuonOptimizer(flat.parameters()),
    ):
        with pytest.raises(RuntimeError) as caught:
            build()
        texts.append(str(caught.value))
    return texts


def labels() -> list[str]:
    """Return the scales of a layer that is labelled "attn" before `fully_shard`, and after it."""
    scales = []
    for before in (True, False):
        layer = nn.Sequential(nn.Linear(16, 4, bias=False))
        if before:
            label(layer[0], "attn")
        fully_shard(layer, mesh=world_mesh())
        if not before:
            label(layer[0], "attn")
        scales += [row.scale for row in FSDPMuonOptimizer(layer, scale="v1").routing_report().rows]
    return scales


def ddp_counts() -> tuple[int, int]:
    """Train under DDP, and check that all replicas have equal weights.

    Returns:
        The number of matrices that this rank computes, and that all ranks compute.
    """
    model = nn.parallel.DistributedDataParallel(make_model())
    optimizer = FSDPMuonOptimizer(model, comm_dtype=torch.bfloat16, **OPTIONS)
    train(model, optimizer, range(4), *data_place())
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    gathered = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, weights)
    assert_same(gathered, [weights] * len(gathered), "weights, by rank")
    plan = optimizer._current_plan().plan
    return sum(batch.count for stage in plan.stages for batch in stage.batches), optimizer.plan_report().num_matrices


# ------------------------------------------------------------------------------------------------------ checkpoints


def saved_in(folder: str, layout: str, options: dict[str, Any], rule: str = "muon") -> list[float]:
    """Train, save with torch.distributed.checkpoint, train on; return the losses after the save."""
    module, data_rank, data_size = lay_out(make_model(hidden=32), layout)
    optimizer = FSDPMuonOptimizer(module, rule=rule, **OPTIONS, **sharded_state(layout))
    train(module, optimizer, range(3), data_rank, data_size)
    choice = StateDictOptions(**options)
    state = {
        "model": get_model_state_dict(module, options=choice),
        "optimizer": get_optimizer_state_dict(module, optimizer, options=choice),
    }
    dcp.save(state, checkpoint_id=folder)
    return train(module, optimizer, range(3, 6), data_rank, data_size)


def resumed_from(folder: str, layout: str | None, options: dict[str, Any], rule: str = "muon") -> list[float]:
    """Load what `saved_in` saved into another layout, and train on; return the losses."""
    torch.manual_seed(1)
    model = make_model(hidden=32)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    module, data_rank, data_size = (model, 0, 1) if layout is None else lay_out(model, layout)
    changed = {**OPTIONS, "lr": 0.3}  # options come from the checkpoint
    optimizer = FSDPMuonOptimizer(module, rule=rule, **changed, **sharded_state(layout))
    choice = StateDictOptions(**options)
    state = {
        "model": get_model_state_dict(module, options=choice),
        "optimizer": get_optimizer_state_dict(module, optimizer, options=choice),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(module, state["model"], options=choice)
    set_optimizer_state_dict(module, optimizer, state["optimizer"], options=choice)
    for name, p in module.named_parameters():
        momentum = optimizer.state[p]["momentum_buffer"]
        is_sharded = isinstance(p, DTensor) or layout == "ddp_sharded"
        assert isinstance(momentum, DTensor) == is_sharded, f"momentum of {name} is a {type(momentum)}"
    return train(module, optimizer, range(3, 6), data_rank, data_size)


def full_state_dict_round_trip() -> None:
    """Check that a full, CPU-offloaded state dict restores a fresh optimizer on the same ranks."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = make_model()
    shard(model, world_mesh())
    optimizer = FSDPMuonOptimizer(model, **OPTIONS)
    train(model, optimizer, range(3), *data_place())
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        kept = [name for name, state in saved["state"].items() for v in state.values() if isinstance(v, DTensor)]
        assert not kept, f"state that is still sharded: {kept}"
    other = make_model()
    shard(other, world_mesh())
    resumed = FSDPMuonOptimizer(other, **OPTIONS)
    choice = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, resumed, saved, options=choice)
    assert_same(_state_by_name(other, resumed), _state_by_name(model, optimizer))


def _state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    return {name: optimizer.state[p] for name, p in model.named_parameters()}


def plain_state_dict(folder: str) -> None:
    """Check that `load_state_dict` restores the state of the same ranks, and the state of one device into shards."""
    model = make_model()
    shard(model, world_mesh())
    optimizer = FSDPMuonOptimizer(model, **OPTIONS)
    train(model, optimizer, range(3), *data_place())
    path = Path(folder) / f"rank{dist.get_rank()}"
    torch.save(optimizer.state_dict(), path)
    resumed = FSDPMuonOptimizer(model, **OPTIONS)
    resumed.load_state_dict(torch.load(path, weights_only=False))
    assert_same(_state_by_name(model, resumed), _state_by_name(model, optimizer), "from the same ranks")
    alone = make_model()
    single = FSDPMuonOptimizer(alone, **OPTIONS)
    train(alone, single, range(3))
    resumed.load_state_dict(single.state_dict())
    whole = {name: resumed.state[p]["momentum_buffer"].full_tensor() for name, p in model.named_parameters()}
    expected = {name: single.state[p]["momentum_buffer"] for name, p in alone.named_parameters()}
    assert_same(whole, expected, "momentum from one device")


def shards_into_one_device() -> str:
    """Load the state of shards into an optimizer of whole tensors; return the error."""
    model = make_model()
    shard(model, world_mesh())
    optimizer = FSDPMuonOptimizer(model, **OPTIONS)
    train(model, optimizer, range(1), *data_place())
    alone = FSDPMuonOptimizer(make_model(), **OPTIONS)
    with pytest.raises(RuntimeError) as caught:
        alone.load_state_dict(optimizer.state_dict())
    return str(caught.value)
