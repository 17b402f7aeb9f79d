"""Connect the ranks of a run and place its model on them: one device, DDP, FSDP2, HSDP or tensor parallelism."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from muon_fsdp.training.arguments import ConfigError
from muon_fsdp.training.config import TrainConfig
from muon_fsdp.training.heartbeat import Heartbeat
from muon_fsdp.training.model import GPT


@dataclass(frozen=True)
class World:
    """The ranks of a run. This rank reads part `data_rank` of a batch; tensor-parallel ranks read the same part."""

    device: torch.device
    precision: torch.dtype
    rank: int = 0
    size: int = 1
    data_rank: int = 0
    data_size: int = 1
    mesh: DeviceMesh | None = None  # (replicas, shards, tensor); only with FSDP2
    heartbeat: Heartbeat | None = None

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which prints and writes."""
        return self.rank == 0

    def mean(self, values: Tensor) -> list[float]:
        """Return the mean of each value over all ranks; this waits for the device."""
        total = values.float()
        if self.size > 1:
            dist.all_reduce(total)
        return [float(value) / self.size for value in total.tolist()]

    def barrier(self) -> None:
        """Wait until all ranks have arrived here."""
        if self.size > 1:
            dist.barrier()

    def note(self, where: str | None = None) -> None:
        """Record for the heartbeat that this rank makes progress, and where it is."""
        if self.heartbeat is not None:
            self.heartbeat.note(where)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of a forward pass: `torch.autocast`, or none under FSDP2, which casts by itself."""
        if self.mesh is not None or self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.precision)


@contextmanager
def connect(config: TrainConfig) -> Iterator[World]:
    """Join the other ranks if torchrun or `--processes` started several, and leave them at the end.

    If the process group is initialized already, it is used and left as it is.

    Raises:
        ConfigError: device, number of ranks and layout do not fit together.
    """
    joined = dist.is_initialized()
    size = dist.get_world_size() if joined else int(os.environ.get("WORLD_SIZE", "1"))
    rank = dist.get_rank() if joined else int(os.environ.get("RANK", "0"))
    device = _device(config, int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if config.cuda_graph and device.type == "cpu":
        raise ConfigError("--cuda-graph needs a GPU; leave it out on a CPU")
    if size > 1 and config.parallel == "none":
        raise ConfigError(f"{size} processes were started: pass --fsdp to shard the model over them, or --ddp")
    per_replica = config.replicas * config.tensor_parallel
    if size % per_replica:
        raise ConfigError(f"{size} process(es) cannot be divided into --replicas {config.replicas} x --tp "
                          f"{config.tensor_parallel}; start a multiple of {per_replica}, with torchrun or "
                          f"--processes {per_replica}")  # fmt: skip
    is_half = "bfloat16" in (config.precision, config.weights)
    is_half |= config.precision == "auto" and device.type == "cuda"
    precision = torch.bfloat16 if is_half else torch.float32
    if config.parallel == "none":
        yield World(device, precision)
        return
    store = None if joined else _find_store(rank, size, config.timeout)
    # The errors of torch's process groups name no rank, so the heartbeat must come first.
    longer = timedelta(seconds=2 * config.timeout + 60)
    hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun and --processes set it
    watch: AbstractContextManager[Heartbeat | None] = nullcontext()
    if store is not None and size > 1:
        watch = Heartbeat(store, rank, size, config.timeout, None if hosted_by_launcher else 0)
    try:
        with watch as heartbeat:
            if store is not None:
                backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
                dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=longer)
            mesh = None
            if config.parallel == "fsdp":
                shape = (config.replicas, size // per_replica, config.tensor_parallel)
                mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replica", "shard", "tensor"))
                for group in mesh.get_all_groups() if store is not None else ():
                    dist.distributed_c10d._set_pg_timeout(longer, group)
            tensor_size = config.tensor_parallel
            yield World(device, precision, rank, size, rank // tensor_size, size // tensor_size, mesh, heartbeat)
            dist.barrier()  # a rank that leaves early would close connections that others still use
    finally:
        if not joined and dist.is_initialized():
            dist.destroy_process_group()


def _device(config: TrainConfig, local_rank: int, local_size: int) -> torch.device:
    device_type = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch sees no GPU; run `muon-fsdp doctor` to find out why, or pass --device cpu"
        )
    count = torch.cuda.device_count()
    if local_size > count and "NCCL_HOSTID" not in os.environ:  # with it, NCCL lets ranks share a GPU
        raise ConfigError(
            f"{local_size} processes were started on a machine with {count} GPU(s): start {count}, or pass --device cpu"
        )
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def _find_store(rank: int, size: int, timeout: float) -> Store:
    """Return the store through which the ranks of the job find each other."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and size > 1:
        raise ConfigError(f"WORLD_SIZE is {size}, but {' and '.join(missing)} are not set: start with torchrun")
    if missing:  # one process, no torchrun
        return HashStore()
    try:
        found: Store = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout)))[0]
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
        raise ConfigError(
            f"cannot connect to {where}: {error}. If another program uses that port, pass torchrun --standalone or "
            "another --master-port, or start with --processes instead of torchrun"
        ) from error
    return found


def place(model: GPT, config: TrainConfig, world: World) -> nn.Module:
    """Convert a model, which every rank has built with the same weights, and place it on its device or its ranks.

    Returns:
        The model, wrapped in DistributedDataParallel for `--ddp`.
    """
    model.to(getattr(torch, config.weights))
    if world.mesh is None:
        model.to(world.device)
    if config.tensor_parallel > 1:
        _split_heads_and_channels(model, config.tensor_parallel, world)
    if config.compile:
        for block in model.blocks:
            block.compile()
    if config.parallel == "ddp":
        return DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None)
    if world.mesh is not None:
        data_mesh = world.mesh["replica", "shard"] if config.replicas > 1 else world.mesh["shard"]
        shard(model, data_mesh, world.precision)
    return model


def shard(model: GPT, mesh: DeviceMesh, precision: torch.dtype) -> None:
    """Apply FSDP2 to every block of a model, and to the rest of it; gradients are reduced in float32."""
    policy = MixedPrecisionPolicy()
    if precision != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def _split_heads_and_channels(model: GPT, size: int, world: World) -> None:
    assert world.mesh is not None
    if model.config.num_heads % size or model.config.mlp_ratio * model.config.d_model % size:
        raise ConfigError(f"--tp {size} must divide the model's {model.config.num_heads} heads")
    plan = {
        "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(),
    }  # fmt: skip
    for block in model.blocks:
        parallelize_module(block, world.mesh["tensor"], plan)


def synchronize_gradients(model: nn.Module, wanted: bool) -> AbstractContextManager[object]:
    """Return a context whose backward pass reduces gradients over ranks only if `wanted`.

    Only the last micro-batch of an accumulation needs the reduction.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
    elif isinstance(model, DistributedDataParallel) and not wanted:
        return model.no_sync()
    return nullcontext()
