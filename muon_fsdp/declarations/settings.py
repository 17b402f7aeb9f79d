"""Declare the settings of the whole optimizer, and the keys of parameter groups that are not options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from muon_fsdp.declarations.option import Option, flag, integer

NonFinite = Literal["propagate", "skip", "raise"]
Strategy = Literal["auto", "owner", "replicate"]
Overlap = Literal["step", "backward"]
Attention = Literal["split", "whole", "per_head"]
CudaGraph: TypeAlias = Literal["auto"] | bool

# The bound of a stage on one device, where there is no transfer to hide, and of any batch. Larger batches were not
# faster on a GPU.
ONE_DEVICE_BYTES = 256 * 2**20

# Keys of a group that are not options: torch's own, those of its schedulers, and a free name.
SCHEDULED_LRS = ("initial_lr", "max_lr", "min_lr")
SCHEDULED_MOMENTA = ("base_momentum", "max_momentum")
MICRO_STEP = "micro_step"  # calls of step() since the last update
STARTED = "started"  # whether step() has been called
NUM_UPDATES = "num_updates"  # steps that have updated parameters; random numbers of rules depend on it
PROGRESS = (MICRO_STEP, STARTED, NUM_UPDATES)  # saved with the group
FOREIGN_KEYS = ("params", "param_names", "name", *PROGRESS, *SCHEDULED_MOMENTA, *SCHEDULED_LRS)


def _floating_point(value: object) -> None:
    if not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise TypeError("must be None or a floating-point torch.dtype")


def _graph_mode(value: object) -> None:
    if not isinstance(value, bool) and value != "auto":
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind('must be True, False or "auto"')


SETTINGS = (
    Option(
        "nonfinite",
        "propagate",
        'what to do about NaN or infinite gradients: "propagate" them as PyTorch does, "skip" the whole step, or '
        '"raise" an error. The last two check all gradients before anything changes, which waits for the device',
        choices=get_args(NonFinite),
    ),
    Option(
        "strategy",
        "auto",
        'which ranks orthogonalize a matrix that several ranks hold: "owner" one rank of the whole job, "replicate" '
        'every rank, "auto" the faster one by an estimate, which is "replicate" for small models under DDP',
        choices=get_args(Strategy),
    ),
    Option(
        "comm_dtype",
        None,
        "precision of updates before they are orthogonalized, in memory and between ranks; None is bfloat16 on GPUs "
        "and float32 on CPUs",
        check=_floating_point,
    ),
    Option(
        "max_stage_bytes",
        None,
        "bytes of updates that a rank holds or computes in one stage of the step, at most; temporary memory is a few "
        "times this. None chooses the fastest stages, by an estimate, whose temporary memory is within 5% of the total "
        "memory of the smallest device; on one device it means 256 MiB",
        check=integer,
    ),
    Option(
        "cuda_graph",
        "auto",
        "capture the step as a CUDA graph and replay it, which takes about a millisecond of host time. "
        'Gradients may move and options may change between steps; temporary memory stays reserved. "auto" captures '
        "after a few equal steps, where that is possible and peak memory grows by at most 10%; `plan_report()` says "
        "what it did. True captures the second step, and raises an error if a parameter does not allow it",
        check=_graph_mode,
    ),
    Option(
        "shard_state",
        False,
        "under DDP, or with `replicate_group`: each rank keeps the state of its rows of every parameter, updates these "
        "rows and receives all others. State is then a DTensor, and memory for it shrinks by the number of ranks",
        check=flag,
    ),
    Option(
        "offload_state",
        False,
        "keep moments in the memory of the host, page-locked for a GPU, and copy those of at most three stages of the "
        "step to the device at a time, while other stages compute. `step()` returns when the host has them again, and "
        "is not captured as a CUDA graph",
        check=flag,
    ),
    Option(
        "overlap",
        "step",
        'when matrices are gathered and orthogonalized: in "step", or in "backward" once the gradients of a stage have '
        "arrived. Results are the same: `step()` writes momentum and weights. What was started is discarded if "
        "gradients change after backward, as by clipping. The updates stay in memory until `step()`, and the step is "
        "not captured as a CUDA graph",
        choices=get_args(Overlap),
    ),
    Option(
        "attention",
        "split",
        'how weights with several matrices in one are read, if the model tells their parts: "split" updates each part '
        '(Q, K and V; gate and up) like a weight of its own, "per_head" also each head of Q, K and V, and "whole" '
        "updates the weight as one matrix. Options of a group and overrides win",
        choices=get_args(Attention),
    ),
    Option(
        "strict",
        False,
        "raise an error instead of a warning if routing is a guess or in doubt, or if no parameter is a matrix",
        check=flag,
    ),
)


# Arguments of the constructors that hold for the whole optimizer.
ARGUMENTS = (
    "other_rule",
    "overrides",
    "replicate_group",
    "replicate_mesh",
    "agreement_group",
    *(option.name for option in SETTINGS),
)


@dataclass(frozen=True)
class Settings:
    """The settings of the whole optimizer on this machine; they are not part of a checkpoint."""

    nonfinite: NonFinite
    max_stage_bytes: int | None
    strict: bool
    strategy: Strategy
    comm_dtype: torch.dtype | None
    cuda_graph: CudaGraph = "auto"
    shard_state: bool = False
    overlap: Overlap = "step"
    attention: Attention = "split"
    offload_state: bool = False

    def __post_init__(self) -> None:
        for option in SETTINGS:
            option.validate(getattr(self, option.name))
        if self.overlap == "backward" and self.nonfinite != "propagate":
            raise ValueError(
                f"overlap='backward' can't be combined with nonfinite={self.nonfinite!r}, which must see all gradients "
                "before anything starts: leave one of them out"
            )
        if self.overlap == "backward" and self.cuda_graph is True:
            raise ValueError(
                "overlap='backward' can't be combined with cuda_graph=True: a part of the step runs in backward and is "
                "not captured. Leave one of them out"
            )
        if self.offload_state and self.cuda_graph is True:
            raise ValueError(
                "offload_state=True can't be combined with cuda_graph=True: a step that waits for copies from the host "
                "is not captured. Leave one of them out"
            )

    @property
    def bucket_bytes(self) -> int:
        """Return the bytes of weights that are all-gathered together if state is sharded over replicas."""
        return ONE_DEVICE_BYTES if self.max_stage_bytes is None else self.max_stage_bytes

    def staging_dtype(self, device_type: str, working: torch.dtype) -> torch.dtype:
        """Return the precision of stage buffers and transfers: bfloat16 on GPUs, float32 on CPUs, float64 for float64.

        It is never float16 by default: the norm of a matrix is not known before it is assembled, so its elements may
        underflow. A model on the meta device is planned for GPUs.
        """
        if self.comm_dtype is not None:
            return self.comm_dtype
        if working == torch.float64:
            return torch.float64
        return torch.float32 if device_type == "cpu" else torch.bfloat16
