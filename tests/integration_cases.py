"""Tiny models and runs of training libraries, in one process and on ranks, for tests/test_integrations.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from muon_fsdp.integrations import trainer_optimizer

VOCABULARY, LENGTH = 32, 12
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "adamw_lr": 0.01}


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def sequences(count: int = 64) -> list[dict[str, Tensor]]:
    """Make sequences in which each token is the previous one plus a step that the first two tokens show."""
    generator = torch.Generator().manual_seed(0)
    start, step = torch.randint(0, VOCABULARY, (2, count, 1), generator=generator)
    tokens = (start + step * torch.arange(LENGTH)) % VOCABULARY
    labels = tokens.clone()
    labels[:, 0] = -100  # it is never predicted, but Trainer would count it in the mean of some models
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all of an optimizer's state, whole, in the order of its parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [whole(value) for p in parameters for value in optimizer.state[p].values()]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(p).clone() for name, p in model.named_parameters()}


def by_hand(
    model: nn.Module, optimizer: torch.optim.Optimizer, rows: list[list[int]], rates: list[float]
) -> list[float]:
    """Run the loop of Trainer by hand: clip, step, and multiply every learning rate by a factor."""
    data, losses = sequences(), []
    initial = [group["lr"] for group in optimizer.param_groups]
    for indices, rate in zip(rows, rates, strict=True):
        for group, lr in zip(optimizer.param_groups, initial, strict=True):
            group["lr"] = lr * rate
        tokens = torch.stack([data[index]["input_ids"] for index in indices])
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


@contextmanager
def launched() -> Iterator[None]:
    """Set the environment variables of torchrun; afterwards remove them and reset the state that libraries keep."""
    before = dict(os.environ)
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, NODE_RANK="0", GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29511",
    )  # fmt: skip
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def fsdp_on_cpus() -> Iterator[None]:
    """Make Accelerate use FSDP on CPUs: it does so only where it finds several GPUs, though all of it works on CPUs."""
    original = AcceleratorState.__init__

    def patched(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = patched
    try:
        yield
    finally:
        AcceleratorState.__init__ = original


# ----------------------------------------------------------------------------------------------------- Transformers


def trainer(
    model: PreTrainedModel, folder: Path, optimizer: dict[str, Any], steps: int = 6, **arguments: Any
) -> Trainer:
    defaults: dict[str, Any] = {
        "max_steps": steps, "per_device_train_batch_size": 8 // int(os.environ.get("WORLD_SIZE", "1")),
        "logging_steps": 1, "save_steps": 3, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    choice = TrainingArguments(str(folder), **{**defaults, **arguments})
    return Trainer(model, choice, train_dataset=sequences(), **optimizer)


def history(run: Trainer, key: str = "loss") -> list[float]:
    return [entry[key] for entry in run.state.log_history if key in entry]


def trainer_fsdp(folder: str) -> dict[str, Any]:
    """Run Trainer on FSDP2, save after half of the steps and resume."""
    arguments: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    }
    optimizer = {"optimizer_cls_and_kwargs": trainer_optimizer(FSDPMuonOptimizer, **OPTIONS)}
    with launched(), fsdp_on_cpus():
        run = trainer(llama(), Path(folder), optimizer, **arguments)
        run.train()
        resumed = trainer(llama(), Path(folder), optimizer, **arguments)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
        return {
            "losses": history(run),
            "resumed": history(resumed),
            "sharded": all(isinstance(p, DTensor) for p in run.model.parameters()),
            "ranks": run.optimizer.optimizer.plan_report().num_ranks,
            "weights": weights_of(run.model),
            "resumed weights": weights_of(resumed.model),
        }


# ------------------------------------------------------------------------------------------------------- Accelerate


def accelerate_steps(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, scheduler: Any, steps: range
) -> list[float]:
    losses = []
    data = sequences()
    for step in steps:
        rows = torch.stack([row["input_ids"] for row in data[8 * step : 8 * step + 8]])
        tokens = rows.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


def accelerate_run(folder: str, kind: str, name: str) -> dict[str, Any]:
    """Train six steps of `kind` "fsdp" or "ddp" with a checkpoint after three, then load it and train on."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[{"llama": "LlamaDecoderLayer", "gpt2": "GPT2Block"}[name]],
        cpu_ram_efficient_loading=True,
        state_dict_type="SHARDED_STATE_DICT",
    )
    with launched(), fsdp_on_cpus():
        accelerator = Accelerator(
            cpu=True, fsdp_plugin=plugin if kind == "fsdp" else None, step_scheduler_with_optimizer=False
        )
        model = {"llama": llama, "gpt2": gpt2}[name]()
        group = dist.group.WORLD if kind == "ddp" and dist.get_world_size() > 1 else None
        bare = FSDPMuonOptimizer(model, replicate_group=group, **OPTIONS)
        scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(bare, 12)
        routes = bare.routing_report().rows
        model, optimizer, scheduler = accelerator.prepare(model, bare, scheduler)
        before = accelerate_steps(accelerator, model, optimizer, scheduler, range(3))
        accelerator.save_state(folder)
        after = accelerate_steps(accelerator, model, optimizer, scheduler, range(3, 6))
        weights = weights_of(model)
        accelerator.load_state(folder)
        again = accelerate_steps(accelerator, model, optimizer, scheduler, range(3, 6))
        with bare.unshard_params():
            unsharded = {key.removeprefix("module."): p.detach().clone() for key, p in model.named_parameters()}
        return {
            "losses": before + after,
            "resumed": before + again,
            "weights": weights,
            "resumed weights": weights_of(model),
            "unsharded weights": unsharded,
            "sharded": all(isinstance(p, DTensor) for group in bare.param_groups for p in group["params"]),
            "ranks": bare.plan_report().num_ranks,
            "routes before prepare": routes,
            "routes after prepare": optimizer.optimizer.routing_report().rows,
            "scales": {row.name: row.scale for row in bare.routing_report().rows if row.rule == "muon"},
        }


# -------------------------------------------------------------------------------------------------------- Lightning


class Net(lightning.LightningModule):
    """Learns to shift its input; `configure_model` shards it where the strategy has a mesh."""

    def __init__(self, kind: str = "one") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.kind == "fsdp" and not isinstance(self.net[0].weight, DTensor):
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = (self.net(batch) - batch.roll(1, -1)).square().mean()
        mean = loss.detach().clone()
        if self.kind != "one":
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.losses.append(mean.item())
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        group = dist.group.WORLD if self.kind == "ddp" else None
        optimizer = FSDPMuonOptimizer(self, replicate_group=group, **OPTIONS)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8), "interval": "step"},
        }


class Unfreeze(BaseFinetuning):
    """Freezes the first layer of `Net`, and adds it to the optimizer in the second epoch."""

    def freeze_before_training(self, pl_module: lightning.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(
        self, pl_module: lightning.LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch >= 1:  # Lightning does not restore `requires_grad`
            self.make_trainable(pl_module.net[0])
        if epoch == 1:
            optimizer.add_param_group({"params": list(pl_module.net[0].parameters()), "lr": 0.01, "name": "thawed"})


class ThawedNet(Net):
    """A `Net` whose optimizer gets the parameters that are trainable when it is built, in a named group."""

    def configure_optimizers(self) -> torch.optim.Optimizer:  # type: ignore[override]
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return MuonOptimizer([{"params": parameters, "name": "head"}], lr=0.02)


def lightning_finetuning(folder: str) -> dict[str, Any]:
    """Unfreeze a layer in the second of three epochs, and resume a checkpoint of that epoch; log all learning rates."""

    def trainer(epochs: int) -> lightning.Trainer:
        logger = CSVLogger(f"{folder}/{epochs}")
        return lightning_trainer("one", epochs, folder, logger=logger, callbacks=[Unfreeze(), LearningRateMonitor()])

    batches = lightning_batches("one")
    module, half, resumed = ThawedNet(), ThawedNet(), ThawedNet()
    trainer(3).fit(module, batches)
    first = trainer(2)
    first.fit(half, batches)
    first.save_checkpoint(f"{folder}/thawed")
    second = trainer(3)
    second.fit(resumed, batches, ckpt_path=f"{folder}/thawed", weights_only=True)
    return {
        "losses": module.losses,
        "resumed": half.losses + resumed.losses,
        "weights": weights_of(module),
        "resumed weights": weights_of(resumed),
        "names": [group["name"] for group in second.optimizers[0].param_groups],
    }


def lightning_trainer(kind: str, epochs: int, folder: str, **options: Any) -> lightning.Trainer:
    world = 1 if kind == "one" else dist.get_world_size()
    strategies: dict[str, Any] = {
        "one": lambda: "auto",
        "ddp": DDPStrategy,
        "fsdp": lambda: ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
    }
    return lightning.Trainer(
        accelerator="cpu", devices=world, strategy=strategies[kind](),
        max_epochs=epochs, gradient_clip_val=0.5, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=folder, use_distributed_sampler=False,
        plugins=[] if kind == "one" else [LightningEnvironment()], **({"logger": False} | options),
    )  # fmt: skip


def lightning_batches(kind: str) -> DataLoader[Tensor]:
    rows = torch.randn(24, 8, generator=torch.Generator().manual_seed(0))
    if kind == "one":
        return DataLoader(rows, batch_size=8)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.cat([batch.chunk(world)[rank] for batch in rows.split(8)])
    return DataLoader(mine, batch_size=8 // world)


def lightning_run(folder: str, kind: str) -> dict[str, Any]:
    """Train six steps in two epochs, with a checkpoint after the first epoch that another run resumes."""
    module, batches = Net(kind), lightning_batches(kind)
    lightning_trainer(kind, 2, folder).fit(module, batches)
    half = Net(kind)
    first = lightning_trainer(kind, 1, folder)
    first.fit(half, batches)
    first.save_checkpoint(f"{folder}/half")
    resumed = Net(kind)
    second = lightning_trainer(kind, 2, folder)
    second.fit(resumed, batches, ckpt_path=f"{folder}/half", weights_only=True)
    optimizer = second.optimizers[0]
    return {
        "losses": module.losses,
        "resumed": half.losses + resumed.losses,
        "lr": optimizer.param_groups[0]["lr"],
        "sharded": all(isinstance(p, DTensor) for p in resumed.parameters()),
        "ranks": optimizer.plan_report().num_ranks,
        "weights": weights_of(module),
        "resumed weights": weights_of(resumed),
    }


def lightning_on_ranks(folder: str, kind: str) -> dict[str, Any]:
    with launched():
        return lightning_run(folder, kind)
