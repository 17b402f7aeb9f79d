"""The base class of update rules: options, state, statistics of W, and the mathematics of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from muon_fsdp.declarations.option import Option, PlannedOptions, integer, merge, number, sizes
from muon_fsdp.declarations.state import PerMatrix, PerParameter, State, StateSpec, working_dtype
from muon_fsdp.declarations.views import VIEW_NAMES
from muon_fsdp.kernels.tables import TableLayout
from muon_fsdp.statistics.observer import STATISTICS

if TYPE_CHECKING:
    from muon_fsdp.kernels.tables import TensorList

GroupOptions: TypeAlias = Mapping[str, Any]

# Options of every rule that works on whole matrices: how a parameter is read as matrices.
VIEW_OPTIONS = (
    Option("view", "auto", "how a parameter is read as matrices", choices=VIEW_NAMES),
    Option(
        "num_heads",
        None,
        "cut the rows of every matrix into this many equal matrices; None leaves it whole",
        check=integer,
    ),
    Option(
        "split_sizes",
        None,
        "cut the rows of every matrix into matrices of these heights, as in a fused QKV weight; None leaves it whole",
        check=sizes,
    ),
)


class MatrixBatch:
    """Equal matrices that `direction` works on together.

    Args:
        matrices: (B, d_out, d_in), what `prepare` returned for each; not to be changed.
        update: (B, d_out, d_in), takes the update; assigning copies into it.
        state: by name, the `PerMatrix` state of these matrices as copies in working precision. What they hold after
            the call is stored.
        statistics: by name, the statistics of W that the rule asks for.
        options: the options of the group that are not `per_step`.
        diagnostics: takes numbers (B,) for `metrics`, by the names in the rule's `diagnostics`.
        inverse_norms: (B,), one over the Frobenius norms of `matrices` where they are known, else None.
    """

    def __init__(
        self,
        matrices: Tensor,
        update: Tensor,
        options: PlannedOptions,
        state: dict[str, Tensor] | None = None,
        statistics: Mapping[str, Any] | None = None,
        inverse_norms: Tensor | None = None,
    ) -> None:
        self.matrices, self._update, self.options = matrices, update, options
        self.state = state if state is not None else {}
        self.statistics = statistics if statistics is not None else {}
        self.diagnostics: dict[str, Tensor] = {}
        self.inverse_norms = inverse_norms

    @property
    def update(self) -> Tensor:
        return self._update

    @update.setter
    def update(self, value: Tensor) -> None:
        if value is not self._update:
            if value.shape != self._update.shape:
                raise ValueError(f"batch.update has shape {tuple(self._update.shape)}, got {tuple(value.shape)}")
            self._update.copy_(value)


class MatrixNumbers:
    """Equal matrices as `factors` sees them, on every rank: the numbers of each without its elements.

    Args:
        rows: d_out.
        cols: d_in.
        state: by name, their `PerMatrix` state as copies; what they hold after the call is what `direction` gets.
        statistics: by name, the statistics of W that the rule asks for.
        options: the options of their groups, views aside; numbers that are `per_step` as tensors (B,) in float64.
        diagnostics: takes numbers (B,) for `metrics`, by the names in the rule's `diagnostics`.
    """

    def __init__(
        self, rows: int, cols: int, state: dict[str, Tensor], statistics: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        self.rows, self.cols, self.state, self.statistics, self.options = rows, cols, state, statistics, options
        self.diagnostics: dict[str, Tensor] = {}


class FusedKernels:
    """Kernels that do `prepare` and `apply` of a rule for many tensors in one launch."""

    layout: ClassVar[TableLayout]

    def scalars(self, group: GroupOptions) -> dict[str, float]:
        """Return the scalars of the layout for a group, but for those that all layouts have."""
        return {}

    def prepare(self, group: GroupOptions, tensors: TensorList, staging: Tensor, partials: Tensor | None) -> None:
        """Do `prepare` from the tensors of a list into their slots of `staging`, with partial norms if asked for."""

    def apply(self, group: GroupOptions, tensors: TensorList, updates: Tensor, factors: Tensor | None) -> None:
        """Do `apply` from slots of `updates`; `factors` (2, matrices) multiply weights and updates."""
        raise NotImplementedError


class Rule:
    """An update rule: a subclass declares options and state, and overrides what it does differently.

    A rule sees lists of local tensors and batches of whole matrices, never a mesh or a process group. One that defines
    `direction` works on whole matrices; one that does not is element-wise, and what `prepare` returns is its update.
    One that defines `factors` multiplies weights by factors of their matrices. The lists of one call belong to one
    parameter group and to parameters that are updated in this step.
    """

    name: ClassVar[str]  # what the option `rule` says
    title: ClassVar[str] = ""  # what tables and plots call it; the name by default
    aliases: ClassVar[tuple[str, ...]] = ()  # further names on the command line
    options: ClassVar[tuple[Option, ...]] = (
        Option("lr", 0.02, "learning rate", check=number, per_step=True, label="learning rate"),
        Option("weight_decay", 0.0, "decoupled weight decay, times lr", check=number, per_step=True),
    )
    state: ClassVar[tuple[StateSpec, ...]] = ()
    statistics: ClassVar[tuple[str, ...]] = ()  # of W, by name
    diagnostics: ClassVar[tuple[str, ...]] = ()  # numbers per matrix for `metrics`
    # The precision of updates on GPUs; None: what `orthogonalize` gives, float16, which holds [2^-14, 6e4].
    update_dtype: ClassVar[torch.dtype | None] = None
    kernels: ClassVar[FusedKernels | None] = None
    hints: ClassVar[Mapping[str, str]] = {}  # by the name of an option that users expect and it does not have: why
    recipe: ClassVar[Mapping[str, float]] = {}  # lr and weight_decay that the training program starts from

    def __init_subclass__(cls, **options: Any) -> None:
        """Let a rule that extends another have a title and aliases of its own, or none."""
        super().__init_subclass__(**options)
        cls.title, cls.aliases = vars(cls).get("title", ""), vars(cls).get("aliases", ())

    # ---------------------------------------------------------------------------------------------- the mathematics

    def prepare(self, group: GroupOptions, grads: list[Tensor], states: list[State]) -> list[Tensor]:
        """Advance the moments and return, per parameter, what `direction` works on, or else the update itself.

        Gradients and results are in working precision. Gradients must not be changed. Results may be state: nobody
        writes to them. By default these are the gradients.
        """
        return grads

    def direction(self, batch: MatrixBatch) -> None:
        """Write the update of every matrix of a batch to `batch.update`, and change `batch.state` as needed."""
        raise NotImplementedError

    def factors(self, numbers: MatrixNumbers) -> tuple[Tensor | float, Tensor | float]:
        """Return what to multiply weights and updates by: W <- f W - lr g U.

        Each is a number, (B,), (B, d_out, 1) or (B, 1, d_in). f takes the place of weight decay: to keep it, multiply f
        by `1 - numbers.options["lr"] * numbers.options["weight_decay"]`. Called on every rank with the same numbers.
        """
        raise NotImplementedError

    def apply(
        self,
        group: GroupOptions,
        params: list[Tensor],
        updates: list[Tensor],
        factors: Sequence[tuple[Tensor, Tensor]] | None = None,  # of `factors`, broadcastable to the parameters
    ) -> None:
        """W <- W (1 - lr * weight_decay) - lr * U, or W <- f W - lr g U, rounded to the parameter's precision once."""
        lr, weight_decay = _host_number(group["lr"]), group["weight_decay"]
        weights = [p if p.dtype == u.dtype else p.to(u.dtype) for p, u in zip(params, updates, strict=True)]
        if factors is not None:
            updates = [update * of_update for update, (_, of_update) in zip(updates, factors, strict=True)]
            for weight, (of_weight, _) in zip(weights, factors, strict=True):
                weight.mul_(of_weight)
        elif isinstance(lr, Tensor) or weight_decay != 0:
            torch._foreach_mul_(weights, 1 - lr * weight_decay)
        if isinstance(lr, Tensor):  # on the device: reading it would stall the host
            torch._foreach_sub_(weights, torch._foreach_mul(updates, lr))
        else:
            torch._foreach_add_(weights, updates, alpha=-lr)
        rounded = [(p, w) for p, w in zip(params, weights, strict=True) if p is not w]
        if rounded:
            torch._foreach_copy_([p for p, _ in rounded], [w for _, w in rounded])

    # ------------------------------------------------------------------------------------------------- another's state

    def take_over(self, saved: Mapping[str, Any], group: GroupOptions) -> dict[str, Any]:
        """Return what it can use of another optimizer's state of a parameter, by the names of its own state.

        `saved` and `group` are that optimizer's, as its state dict has them. Empty if there is nothing; a ValueError
        says why something that looks alike can't be used.
        """
        return {}

    # ---------------------------------------------------------------------------------- what planning and reports ask

    def flops(self, options: PlannedOptions, rows: int, cols: int) -> float:
        """Return the cost of `direction` for one matrix, which balances the ranks."""
        return float(rows * cols)

    def half_precision_suffices(self, options: PlannedOptions, rows: int, cols: int) -> bool:
        """Return whether float16 holds the updates of such matrices, which GPUs then use."""
        return self.update_dtype is None

    def update_scale(self, group: GroupOptions, rows: int, cols: int) -> float | None:
        """Return the size of an update by shape for the routing report; None if the rule has none."""
        return None

    def not_capturable(self, group: GroupOptions) -> str | None:
        """Return why a step with these options can't be captured as a CUDA graph; None if it can."""
        return None

    def warnings(self, group: GroupOptions) -> list[str]:
        """Return what a user should know about the options of a group."""
        return []

    def residual(self, batch: MatrixBatch) -> Tensor | None:
        """Return how far from orthogonal `direction` is on a batch, (B,), for `metrics`; None if that says nothing."""
        return None

    def metrics(self, last: Mapping[str, Tensor], total: Mapping[str, float]) -> dict[str, float]:
        """Return numbers for a logger.

        `last` holds the diagnostics of the last step over all matrices, `total` their sums since the optimizer was
        built, over matrices and steps in which they were updated.
        """
        return {}

    # ------------------------------------------------------------------------------------ what follows from the above

    @cached_property
    def display_name(self) -> str:
        """The name of the rule in tables and plots."""
        return self.title or self.name

    @cached_property
    def needs_matrices(self) -> bool:
        """Whether the rule works on whole matrices; if not, it is element-wise."""
        return type(self).direction is not Rule.direction

    @cached_property
    def multiplies_weights(self) -> bool:
        """Whether the rule multiplies weights by factors of their matrices."""
        return type(self).factors is not Rule.factors

    @cached_property
    def all_options(self) -> dict[str, Option]:
        """Its options by name, with those of its statistics and of views."""
        views = VIEW_OPTIONS if self.needs_matrices else ()
        of_statistics = [option for name in self.statistics for option in STATISTICS[name].options]
        return {option.name: option for option in merge(self.options, of_statistics, views, self.options)}

    @cached_property
    def all_state(self) -> tuple[StateSpec, ...]:
        """Its state, with that of its statistics."""
        return (*self.state, *(spec for name in self.statistics for spec in STATISTICS[name].state))

    @cached_property
    def matrix_state(self) -> tuple[PerMatrix, ...]:
        """The per-matrix state that `direction` and `factors` may change."""
        return tuple(spec for spec in self.state if isinstance(spec, PerMatrix))

    @cached_property
    def has_matrix_numbers(self) -> bool:
        """Whether something of it belongs to whole matrices beside their elements."""
        return bool(self.matrix_state or self.statistics or self.multiplies_weights or self.diagnostics)

    @cached_property
    def fused(self) -> FusedKernels | None:
        """Its kernels, unless a subclass overrides `prepare` or `apply` after them: then these count."""
        for owner in type(self).__mro__:
            if "kernels" in vars(owner):
                return self.kernels
            if "prepare" in vars(owner) or "apply" in vars(owner):
                return None
        return None

    @cached_property
    def _planned_names(self) -> tuple[str, ...]:
        views = {option.name for option in VIEW_OPTIONS}
        return tuple(name for name, o in self.all_options.items() if not o.per_step and name not in views)

    @cached_property
    def plan_names(self) -> tuple[str, ...]:
        """The options that a plan depends on: all but those that may change at every step."""
        return tuple(name for name, option in self.all_options.items() if not option.per_step)

    @cached_property
    def per_step_names(self) -> tuple[str, ...]:
        """The options that may change at every step."""
        return tuple(name for name, option in self.all_options.items() if option.per_step)

    @cached_property
    def per_step_numbers(self) -> tuple[str, ...]:
        """Those of them that are numbers, which `factors` may read."""
        return tuple(n for n in self.per_step_names if type(self.all_options[n].default) in (int, float))

    def planned_options(self, group: GroupOptions) -> PlannedOptions:
        """Return what `direction` may read of a group's options, views aside."""
        return PlannedOptions(self.name, {name: group[name] for name in self._planned_names}, self.per_step_names)


def _host_number(value: float | Tensor) -> float | Tensor:
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" else value.reshape(())
    return value


__all__ = [
    "FusedKernels",
    "GroupOptions",
    "MatrixBatch",
    "MatrixNumbers",
    "Option",
    "PerMatrix",
    "PerParameter",
    "PlannedOptions",
    "Rule",
    "State",
    "StateSpec",
    "working_dtype",
]
