"""Update matrices by Muon: the orthogonalized momentum of their gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from muon_fsdp.declarations.option import Option, PlannedOptions, flag, fraction, integer, number
from muon_fsdp.declarations.state import PerParameter, State, StateSpec, working_dtype
from muon_fsdp.kernels.tables import MUON_LAYOUT
from muon_fsdp.linalg.coefficients import check_steps
from muon_fsdp.linalg.newton_schulz import (
    ORTHOGONALIZATIONS,
    Request,
    orthogonalization_flops,
    orthogonalization_scratch,
    orthogonalize_together,
)
from muon_fsdp.linalg.scaling import DEFAULT_SCALE, SCALE_MEANINGS, SCALE_NAMES, damp, scale_named, update_scale
from muon_fsdp.rules.base import CAUTIOUS_OPTION, FusedKernels, GroupOptions, MatrixBatch, Rule

if TYPE_CHECKING:
    from muon_fsdp.kernels.tables import TensorList

# Options of every rule that orthogonalizes momentum, whatever it does with the result.
MOMENTUM_OPTIONS = (
    *Rule.options,
    Option("momentum", 0.95, "decay of the momentum buffer, in [0, 1)", check=fraction, per_step=True),
    Option("nesterov", False, "use Nesterov momentum: orthogonalize grad + momentum * buffer", check=flag),
    Option(
        "ns_steps",
        5,
        'Newton-Schulz steps of the orthogonalization, at least 1; 5 means the whole chain with "accurate", "fast", '
        '"cans" and "deepseek_v4", which have no other number of steps',
        check=integer,
    ),
    Option(
        "orthogonalization",
        "default",
        'how singular values are brought to 1: "accurate" (the default) ends within 0.0011 of 1, "fast" needs fewer '
        'products and ends between 0.65 and 1.35, others are published coefficients, "exact" is a slow SVD',
        choices=ORTHOGONALIZATIONS,
    ),
    Option(
        "momentum_eps",
        1e-7,
        "an update is multiplied by min(1, norm / momentum_eps), norm being the Frobenius norm of what is "
        "orthogonalized, so that matrices without gradients stop; 0 switches this off",
        check=number,
    ),
)


class MuonKernels(FusedKernels):
    """The kernels of Muon: one launch writes momentum into the staging buffer, another updates the weights."""

    layout = MUON_LAYOUT
    state_dtypes = (torch.float32, torch.bfloat16, torch.int8)
    roundings = ("nearest", "stochastic", "remainder")

    def scalars(self, group: GroupOptions) -> dict[str, float]:
        return {"momentum": group["momentum"]}

    def prepare(self, group: GroupOptions, tensors: TensorList, staging: Tensor, partials: Tensor | None) -> None:
        from muon_fsdp.kernels import triton_elementwise

        triton_elementwise.muon_prepare(tensors, staging, partials, nesterov=group["nesterov"])

    def apply(self, group: GroupOptions, tensors: TensorList, updates: Tensor, factors: Tensor | None) -> None:
        from muon_fsdp.kernels import triton_elementwise

        cautious = group.get("cautious_weight_decay", False)  # rules with factors do not have it
        triton_elementwise.apply_updates(tensors, updates, factors, cautious=cautious)


class Muon(Rule):
    """The Muon rule: the update is the orthogonalized momentum of the gradients.

        buf = momentum * buf + grad
        M = grad + momentum * buf with Nesterov, else buf
        U = scale * ns_stepsize * polar(M) * min(1, ||M||_F / momentum_eps)

    polar(M) has the singular vectors of M, and all its singular values are 1. The last factor stops idle matrices.
    """

    name = "muon"
    title = "Muon"
    paper = "Keller Jordan, 2024 (kellerjordan.github.io/posts/muon)"
    options: ClassVar[tuple[Option, ...]] = (
        *MOMENTUM_OPTIONS,
        Option(
            "scale",
            DEFAULT_SCALE,
            'factor of the update by shape: "original" (or "v2") sqrt(max(1, d_out/d_in)), "match_rms_adamw" ("v4") '
            '0.2 sqrt(max(d_out, d_in)), "spectral" ("v3") sqrt(d_out/d_in), "size" ("v1") sqrt(max(d_out, d_in)), '
            "or a number",
            choices=SCALE_NAMES,
            meanings=SCALE_MEANINGS,
            check=number,
        ),
        Option("ns_stepsize", 1.0, "another factor of the orthogonalized update", check=number),
        CAUTIOUS_OPTION,
    )
    state: ClassVar[tuple[StateSpec, ...]] = (PerParameter("momentum_buffer"),)
    overwrites_matrices = True
    kernels = MuonKernels()
    recipe: ClassVar[dict[str, float]] = {"lr": 0.02, "weight_decay": 0.01}

    def prepare(self, group: GroupOptions, grads: list[Tensor], states: list[State]) -> list[Tensor]:
        return accumulate(group["momentum"], grads, states, nesterov=group["nesterov"])

    def direction(self, batch: MatrixBatch) -> None:
        Muon.directions(self, [batch])

    def directions(self, batches: Sequence[MatrixBatch]) -> None:
        for batch, norms in zip(batches, self._orthogonalize(batches), strict=True):
            damp(batch.update, norms, batch.options["momentum_eps"])

    def _orthogonalize(self, batches: Sequence[MatrixBatch]) -> list[Tensor]:
        """Write the orthogonalized matrices of some batches, times `factor`, to their updates in few launches.

        Returns:
            For each batch one over the Frobenius norms of its matrices, (B,), for `damp`.
        """
        norms: dict[int, Tensor] = {}  # by index of the batch
        alike: dict[tuple[str, int], list[int]] = defaultdict(list)
        for index, batch in enumerate(batches):
            alike[batch.options["orthogonalization"], batch.options["ns_steps"]].append(index)
        for (method, steps), indices in alike.items():
            requests = [
                Request(
                    each.matrices,
                    each.update,
                    self.factor(each.options, *each.matrices.shape[-2:]),
                    each.inverse_norms,
                    each.may_overwrite,
                )
                for each in map(batches.__getitem__, indices)
            ]
            norms.update(zip(indices, orthogonalize_together(requests, method=method, steps=steps), strict=True))
        return [norms[index] for index in range(len(batches))]

    def factor(self, options: PlannedOptions, rows: int, cols: int) -> float:
        """Return the factor of an orthogonalized (rows, cols) matrix, which is the spectral norm of the update."""
        return update_scale(options["scale"], rows, cols) * float(options["ns_stepsize"])

    def take_over(self, saved: Mapping[str, Any], group: GroupOptions) -> dict[str, Any]:
        """Return the momentum of `torch.optim.Muon` or of Keller Jordan's Muon.

        Theirs is an average, (1 - momentum) times the sum that this rule keeps, so it is divided by that.
        """
        is_muon = "adjust_lr_fn" in group or group.get("use_muon")
        if "momentum_buffer" not in saved or not is_muon:
            return {}
        buffer = saved["momentum_buffer"]
        return {"momentum_buffer": buffer.to(working_dtype(buffer.dtype)) / (1 - group["momentum"])}

    def flops(self, options: PlannedOptions, rows: int, cols: int) -> float:
        return orthogonalization_flops(rows, cols, options["ns_steps"], options["orthogonalization"])

    def scratch_bytes(self, options: PlannedOptions, rows: int, cols: int, itemsize: int, update_itemsize: int) -> int:
        method = options["orthogonalization"]
        if not self.may_overwrite or method == "exact" or itemsize != 2:  # what lies in float32 is not overwritten
            return super().scratch_bytes(options, rows, cols, itemsize, update_itemsize)
        return orthogonalization_scratch(rows, cols, options["ns_steps"], method, overwrites=update_itemsize == 2)

    def half_precision_suffices(self, options: PlannedOptions, rows: int, cols: int) -> bool:
        in_range = 2.0**-8 <= self.factor(options, rows, cols) <= 2.0**8
        return self.update_dtype is None and in_range and options["orthogonalization"] != "exact"

    def update_scale(self, group: GroupOptions, rows: int, cols: int) -> float | None:
        return update_scale(group["scale"], rows, cols)

    def other_lr_ratio(self, options: GroupOptions) -> float | None:
        scale = scale_named(options["scale"])
        return scale.adamw_ratio if scale is not None else None

    def check_options(self, group: GroupOptions) -> None:
        super().check_options(group)
        check_steps(group["ns_steps"], group["orthogonalization"])

    def warnings(self, group: GroupOptions) -> list[str]:
        name, scale = group["scale"], scale_named(group["scale"])
        if scale is None or scale.usual_lrs is None:
            return []
        effect = f"With scale={name!r} the spectral norm of an update is about lr"
        keep = "keep lr={lr:g} and pass scale='match_rms_adamw', which gives updates the size of AdamW's"
        return unusual_lr(group, scale.usual_lrs, effect, keep)

    def not_capturable(self, group: GroupOptions) -> str | None:
        return "orthogonalization='exact' waits for the host" if group["orthogonalization"] == "exact" else None

    def residual(self, batch: MatrixBatch) -> Tensor | None:
        options, orthogonal = batch.options, torch.empty_like(batch.result)
        request = Request(batch.matrices, orthogonal, 1.0, batch.inverse_norms, batch.may_overwrite)
        orthogonalize_together([request], method=options["orthogonalization"], steps=options["ns_steps"])
        return _residual(orthogonal)


def accumulate(momentum: float, grads: list[Tensor], states: list[State], *, nesterov: bool) -> list[Tensor]:
    """Add gradients to their momentum buffers, in place; return these, or with `nesterov` G + momentum * buffer."""
    buffers = [state["momentum_buffer"] for state in states]
    torch._foreach_mul_(buffers, momentum)
    torch._foreach_add_(buffers, grads)
    return list(torch._foreach_add(grads, buffers, alpha=momentum)) if nesterov else buffers


def unusual_lr(group: GroupOptions, usual: tuple[float, float], effect: str, keep: str = "") -> list[str]:
    """Return a warning, at most one, if the learning rate of a group is likely a mistake.

    Args:
        group: the options of the group.
        usual: the range of learning rates that are not warned about.
        effect: what the learning rate decides.
        keep: what to do instead to keep one of AdamW, with "{lr:g}" in its place.
    """
    lr, (low, high) = group["lr"], usual
    # A tensor is not read, which would wait for the device; a resumed group has a scheduled lr.
    if isinstance(lr, Tensor) or lr == 0 or "initial_lr" in group or low <= lr <= high:
        return []
    if lr < low:
        remedy = f", or {keep.format(lr=lr)}" if keep else ""
        return [
            f"lr={lr:g} looks like a learning rate of AdamW. {effect}, so the matrices will hardly train. Pass lr=0.02"
            f"{remedy}."
        ]
    return [f"lr={lr:g} is far above the usual 0.02. {effect}, so training will likely diverge. Pass lr=0.02."]


def _residual(matrices: Tensor) -> Tensor:
    """Return ||O O^T - I||_F / sqrt(m) for every matrix O, m its shorter side: 0 if orthogonal, near 1 if of low rank.

    Args:
        matrices: (B, rows, cols).

    Returns:
        (B,) in float64.
    """
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    rows = wide.shape[-2]
    gram = wide.new_zeros(len(wide), rows, rows, dtype=torch.float64)
    for columns in torch.split(wide, max(1, 2**22 // rows), dim=-1):  # a whole copy in float64 may not fit
        part = columns.to(gram.dtype)
        gram.baddbmm_(part, part.mT)
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    residual: Tensor = torch.linalg.matrix_norm(gram) / rows**0.5
    return residual
