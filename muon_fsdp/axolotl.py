"""Give axolotl a plugin that trains with our optimizers; see docs/integrations.md."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from muon_fsdp.integrations import trainer_optimizer
from muon_fsdp.optimizers.fsdp import FSDPMuonOptimizer

__all__ = ["MuonArguments", "MuonPlugin"]

# Settings of axolotl that make groups of tensors, which a factory never receives.
_GROUP_SETTINGS = ("embedding_lr", "embedding_lr_scale", "loraplus_lr_ratio", "lr_groups")


class MuonArguments(BaseModel):
    """The section `muon_fsdp` of a configuration: arguments of `FSDPMuonOptimizer`."""

    muon_fsdp: dict[str, Any] = {}


class MuonPlugin(BasePlugin):
    """A plugin that makes the trainer use `FSDPMuonOptimizer` instead of the optimizer of the configuration."""

    def get_input_args(self) -> str:
        """Return the path of the class that declares the plugin's section."""
        return f"{MuonArguments.__module__}.{MuonArguments.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Make the trainer build the optimizer from its model; lr and weight decay default to axolotl's."""
        given = [name for name in _GROUP_SETTINGS if getattr(trainer.args, name, None) is not None]
        if given:
            raise ValueError(
                f"muon_fsdp.axolotl: {', '.join(given)} would have no effect. Remove it, and pass adamw_lr or "
                "overrides under muon_fsdp in the configuration"
            )
        defaults = {"lr": trainer.args.learning_rate, "weight_decay": trainer.args.weight_decay}
        options = defaults | _plain(cfg.muon_fsdp or {})
        trainer.optimizer_cls_and_kwargs = trainer_optimizer(FSDPMuonOptimizer, **options)


def _plain(value: Any) -> Any:
    """Turn what YAML gives into what our options accept: dictionaries of axolotl into plain ones, lists into tuples."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return tuple(map(_plain, value)) if isinstance(value, list) else value
