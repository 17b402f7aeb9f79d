"""Define the base class of update rules: options, state, statistics of W, and the mathematics of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from muon_fsdp.declarations.encoding import STORAGE_OPTIONS
from muon_fsdp.declarations.option import Option, PlannedOptions, flag, integer, merge, number, sizes
from muon_fsdp.declarations.state import PerMatrix, State, StateSpec, working_dtype
from muon_fsdp.declarations.views import VIEW_NAMES
from muon_fsdp.kernels.tables import TableLayout, is_on_device
from muon_fsdp.plan.costs import scratch_numel
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
        "cut the rows of every matrix into this many equal matrices; None cuts them as the model tells, and "
        'view="matrix" not at all',
        check=integer,
    ),
    Option(
        "split_sizes",
        None,
        "cut the rows of every matrix into matrices of these heights, as in a fused QKV weight; None cuts them as "
        "the model tells",
        check=sizes,
    ),
    Option(
        "transposed",
        None,
        "whether a weight stores (d_in, d_out), as experts of GPT-OSS do; None detects it from the model",
        check=flag,
    ),
)

# Options that describe a parameter and not the mathematics of its rule, which therefore reads none of them.
PARAMETER_OPTIONS = {option.name: option for option in (*VIEW_OPTIONS, *STORAGE_OPTIONS)}

# The option of rules whose weight decay is that of `Rule.apply`, arXiv 2510.12402.
CAUTIOUS_OPTION = Option(
    "cautious_weight_decay",
    False,
    "decay only weights that the update shrinks or leaves: those whose update, which is subtracted, has their sign or "
    "is 0",
    check=flag,
)


class NamedValues(dict[str, Any]):
    """The state or the statistics of some matrices by name; reading another name raises an error that says why.

    Args:
        rule: the name of their rule.
        what: "state" or "statistics".
        values: the values by name.
    """

    def __init__(self, rule: str, what: Literal["state", "statistics"], values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._rule, self._what = rule, what

    def __missing__(self, name: str) -> Any:
        declared = f"rule {self._rule!r} declares {', '.join(map(repr, self)) or 'none'}"
        if self._what == "statistics":
            raise KeyError(f"there is no statistic {name!r} of W: {declared}. Add it to `statistics`")
        raise KeyError(
            f"there is no per-matrix state {name!r}: {declared}. Declare PerMatrix({name!r}, kind); only `prepare` "
            "gets PerParameter state"
        )


class MatrixBatch:
    """A batch of B matrices of one shape, which `direction` works on together.

    Args:
        matrices: (B, d_out, d_in), what `prepare` returned for these matrices. Do not change it.
        update: (B, d_out, d_in). Write the update here; assigning a tensor copies it.
        state: the `PerMatrix` state of these matrices by name, copies in working precision with B as the first
            dimension. Their values after the call are stored.
        statistics: by name, the statistics of W that the rule declares. Do not change them. On one GPU they are
            computed beside the first batch, which waits when it reads one: read them as late as possible.
        options: the options of the group that are not `per_step`.
        diagnostics: write numbers (B,) for `metrics` here, by the names in the rule's `diagnostics`.
        inverse_norms: (B,), one over the Frobenius norm of each matrix; None if the norms are not known.
    """

    def __init__(
        self,
        matrices: Tensor,
        update: Tensor,
        options: PlannedOptions,
        state: MutableMapping[str, Tensor] | None = None,
        statistics: Mapping[str, Any] | None = None,
        inverse_norms: Tensor | None = None,
    ) -> None:
        self.matrices, self._update, self.options = matrices, update, options
        self.state: MutableMapping[str, Tensor] = state if state is not None else NamedValues(options.rule, "state", {})
        self.statistics: Mapping[str, Any] = (
            statistics if statistics is not None else NamedValues(options.rule, "statistics", {})
        )
        self.diagnostics: dict[str, Tensor] = {}
        self.inverse_norms = inverse_norms
        self.may_overwrite = False  # whether `directions` may leave other numbers in `matrices`, to save memory
        self.is_touched = False  # whether somebody has asked for the update or assigned it
        self.draw: Callable[[int, tuple[int, ...], torch.dtype], Tensor] | None = None  # draws random numbers
        self._num_draws = 0

    def random(self, *shape: int) -> Tensor:
        """Return random numbers for every matrix, uniform in (0, 1) and never 0 or 1.

        They are a function of seed, name of the parameter, number of the matrix in it, step, and call: a second call
        returns others. They do not depend on ranks, layouts or `torch.manual_seed`, and a resumed run has the same.
        Every rank that computes a matrix gets the same numbers, which `torch.rand` does not give. A CUDA graph can
        capture them. The seed is the rule's option `seed` if it declares one, else 0.

        Args:
            shape: the shape of the numbers of one matrix.

        Returns:
            (B, *shape), float32, or float64 for float64 weights.
        """
        if self.draw is None:
            raise RuntimeError("batch.random works within direction only")
        self._num_draws += 1
        return self.draw(self._num_draws - 1, shape, working_dtype(self.matrices.dtype))

    @property
    def update(self) -> Tensor:
        """Return the tensor (B, d_out, d_in) that holds the update."""
        self.is_touched = True  # whoever asks for it may write to it
        return self._update

    @update.setter
    def update(self, value: Tensor) -> None:
        self.is_touched = True
        if value is self._update:
            return
        where = f"rule {self.options.rule!r}: batch.update has shape {tuple(self._update.shape)}"
        if not isinstance(value, Tensor):
            raise TypeError(f"{where}, and direction assigns {shown(value)} to it: assign a tensor")
        if value.shape != self._update.shape:
            raise ValueError(f"{where}, got {tuple(value.shape)}: assign a tensor of this shape")
        self._update.copy_(value)

    @property
    def result(self) -> Tensor:
        """Return the same tensor to somebody who only reads it."""
        return self._update


class UpdateStatistics(NamedTuple):
    """Sums over the elements of every weight matrix W and of its update U, as `direction` wrote and ranks received it.

    Args:
        inner_product: (B,), <W, U>, float64.
        squared_norm: (B,), ||U||_F^2, float64.
    """

    inner_product: Tensor
    squared_norm: Tensor


class MatrixValues:
    """State, statistics and options of B matrices of one shape, which `factors` gets on every rank.

    Args:
        rows: d_out.
        cols: d_in.
        state: the `PerMatrix` state of these matrices by name, copies with B as the first dimension. `direction` gets
            their values after the call.
        statistics: by name, the statistics of W that the rule declares.
        options: the options of their groups, except those of views. `per_step` numbers are tensors (B,) in float64.
        update_statistics: those of the update, for a rule that declares `update_statistics = True`.
        diagnostics: write numbers (B,) for `metrics` here, by the names in the rule's `diagnostics`.
    """

    def __init__(
        self,
        rows: int,
        cols: int,
        state: dict[str, Tensor],
        statistics: Mapping[str, Any],
        options: Mapping[str, Any],
        update_statistics: UpdateStatistics | None = None,
    ) -> None:
        self.rows, self.cols, self.state, self.statistics, self.options = rows, cols, state, statistics, options
        self._of_update = update_statistics
        self.diagnostics: dict[str, Tensor] = {}

    @property
    def update_statistics(self) -> UpdateStatistics:
        """Return the statistics of the update."""
        if self._of_update is None:
            raise AttributeError("there are no update_statistics: declare `update_statistics = True` in the rule")
        return self._of_update


class FusedKernels:
    """Kernels that compute `prepare` and `apply` of a rule for many tensors in one launch."""

    layout: ClassVar[TableLayout]
    state_in_apply: ClassVar[bool] = False  # whether `apply` changes state
    # How the state that they read and write may be stored; int8 stands for codes of 8 bits.
    state_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)
    roundings: ClassVar[tuple[str, ...]] = ("nearest",)  # how `apply` can round weights, by the option `rounding`

    def scalars(self, group: GroupOptions) -> dict[str, float]:
        """Return the scalars of `layout` for a group, except those that all layouts have."""
        return {}

    def prepare(self, group: GroupOptions, tensors: TensorList, staging: Tensor, partials: Tensor | None) -> None:
        """Compute `prepare` for a list of tensors.

        Args:
            group: the options of their group.
            tensors: gradients, parameters and state.
            staging: flat; the results are written into the slots of the tensors.
            partials: the partial norms of every matrix are written here, unless it is None.
        """

    def apply(self, group: GroupOptions, tensors: TensorList, updates: Tensor, factors: Tensor | None) -> None:
        """Compute `apply` for a list of tensors.

        Args:
            group: the options of their group.
            tensors: gradients, parameters and state.
            updates: flat; the updates lie in the slots of the tensors.
            factors: (2, matrices), the factors of the weights and of the updates; None for rules without `factors`.
        """
        raise NotImplementedError


class Rule:
    """The base class of update rules. A subclass declares options and state, and overrides methods.

    A rule gets lists of local tensors and batches of whole matrices, never a device mesh or a process group. A rule
    that defines `direction` works on whole matrices. A rule without it is element-wise: `prepare` returns its update.
    A rule that defines `factors` multiplies each weight matrix by a factor. All tensors of one call belong to one
    parameter group, and their parameters are updated in this step.
    """

    name: ClassVar[str]  # the value of the option `rule`
    title: ClassVar[str] = ""  # the name in tables and plots; `name` by default
    aliases: ClassVar[tuple[str, ...]] = ()  # further names on the command line
    options: ClassVar[tuple[Option, ...]] = (
        Option("lr", 0.02, "learning rate", check=number, per_step=True, label="learning rate"),
        Option("weight_decay", 0.0, "decoupled weight decay, times lr", check=number, per_step=True),
    )
    state: ClassVar[tuple[StateSpec, ...]] = ()
    statistics: ClassVar[tuple[str, ...]] = ()  # the names of the statistics of W that the rule needs
    # Whether `factors` reads statistics of the update. It is then called after `direction`, stage by stage.
    update_statistics: ClassVar[bool] = False
    # Whether `directions` uses the memory of `batch.matrices` for something else where `batch.may_overwrite` allows it.
    overwrites_matrices: ClassVar[bool] = False
    diagnostics: ClassVar[tuple[str, ...]] = ()  # the names of numbers per matrix that `metrics` gets
    state_in_apply: ClassVar[bool] = False  # whether `apply` gets the state of its parameters, and may change it
    # The dtype of updates on GPUs. None is that of `orthogonalize`: float16, which represents [2^-14, 6e4].
    update_dtype: ClassVar[torch.dtype | None] = None
    kernels: ClassVar[FusedKernels | None] = None
    hints: ClassVar[Mapping[str, str]] = {}  # for options that users expect and the rule lacks: what to use instead
    paper: ClassVar[str] = ""  # where the rule was published, such as "arXiv 2510.05491"
    recipe: ClassVar[Mapping[str, float]] = {}  # the default lr and weight_decay of `muon-fsdp train`

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset title, aliases and paper, so that a rule that extends another does not inherit them."""
        super().__init_subclass__(**options)
        cls.title, cls.aliases = vars(cls).get("title", ""), vars(cls).get("aliases", ())
        cls.paper = vars(cls).get("paper", "")

    # ---------------------------------------------------------------------------------------------- the mathematics

    def prepare(self, group: GroupOptions, grads: list[Tensor], states: list[State]) -> list[Tensor]:
        """Update the moments of many parameters, shard by shard.

        Args:
            group: the options of the parameters.
            grads: local gradients in working precision. Do not change them.
            states: for each parameter, its `PerParameter` state by name: local tensors, changed in place.

        Returns:
            For each parameter a tensor of its local shape in working precision: what `direction` works on, or for an
            element-wise rule the update. It may be a tensor of the state, because nobody writes to it. The default is
            the gradients.
        """
        return grads

    def direction(self, batch: MatrixBatch) -> None:
        """Compute the updates of a batch of whole matrices.

        Ranks may compute other matrices of the same parameter, or all of them the same ones.

        Args:
            batch: B matrices of one shape, what `prepare` returned for them. Write (B, d_out, d_in) to `batch.update`,
                and change `batch.state` in place.
        """
        raise NotImplementedError

    def directions(self, batches: Sequence[MatrixBatch]) -> None:
        """Compute the updates of several batches of other shapes together, in fewer launches than one by one.

        A rule may define this beside `direction`. It is not called for a subclass that overrides `direction` alone.

        Args:
            batches: what `direction` would get one by one. Their shapes and planned options may differ.
        """
        raise NotImplementedError

    def factors(self, values: MatrixValues) -> tuple[Tensor | float, Tensor | float]:
        """Return the factors f of the weights and g of the updates in W <- f W - lr g U.

        f replaces weight decay. To keep weight decay, multiply f by
        `1 - values.options["lr"] * values.options["weight_decay"]`. Every rank calls this with the same values.

        With `update_statistics`, this runs when the update is known: `direction` does not see the changes that this
        makes to the state, nor this those of `direction`. Where both change a value, that of `factors` is stored.

        Args:
            values: state, statistics and options of B matrices of one shape. Change `values.state` in place.

        Returns:
            f and g, each a number or a tensor (B,), (B, d_out, 1) or (B, 1, d_in); with `update_statistics` a number
            or a tensor (B,).
        """
        raise NotImplementedError

    def apply(
        self,
        group: GroupOptions,
        params: list[Tensor],
        updates: list[Tensor],
        factors: Sequence[tuple[Tensor, Tensor]] | None = None,
        states: Sequence[State] | None = None,
    ) -> None:
        """Compute W <- W (1 - lr * weight_decay) - lr * U, or W <- f W - lr g U, shard by shard and in place.

        With the option `cautious_weight_decay`, only elements with U W >= 0 decay. The result is rounded to the
        parameter's dtype once.

        Args:
            group: the options of the parameters.
            params: local tensors of the parameters W.
            updates: the updates U, of the same shapes.
            factors: for each parameter f and g, which broadcast to its shape; None for rules without `factors`.
            states: for each parameter, its `PerParameter` state by name: local tensors, changed in place. It is passed,
                by its name, only to rules that declare `state_in_apply = True`.
        """
        lr, weight_decay = group["lr"], group["weight_decay"]
        lr = lr.reshape(()) if is_on_device(lr) else float(lr)
        weights = [p if p.dtype == u.dtype else p.to(u.dtype) for p, u in zip(params, updates, strict=True)]
        if factors is not None:
            updates = [update * of_update for update, (_, of_update) in zip(updates, factors, strict=True)]
            for weight, (of_weight, _) in zip(weights, factors, strict=True):
                weight.mul_(of_weight)
        elif group.get("cautious_weight_decay", False):
            for weight, update in zip(weights, updates, strict=True):
                weight.mul_(1 - _not_opposed(weight, update).to(weight.dtype) * (lr * weight_decay))
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
        """Return the state of another optimizer that this rule can use for a parameter.

        Args:
            saved: the parameter's state in the state dict of the other optimizer.
            group: the parameter's group in that state dict.

        Returns:
            Tensors by the names of this rule's state; empty if nothing can be used.

        Raises:
            ValueError: the state looks usable and is not; the message explains why.
        """
        return {}

    # ------------------------------------------------------------------------------- answers for planning and reports

    def flops(self, options: PlannedOptions, rows: int, cols: int) -> float:
        """Return the cost of `direction` for one matrix; the planner balances ranks by it.

        Override it if the cost is not one operation per element: with too small a number, all matrices of a kind may
        end on one rank.

        Args:
            options: the options of the group that are not `per_step`.
            rows: d_out.
            cols: d_in.

        Returns:
            Floating-point operations; only their ratios matter within one rule.
        """
        return float(rows * cols)

    def scratch_bytes(self, options: PlannedOptions, rows: int, cols: int, itemsize: int, update_itemsize: int) -> int:
        """Return the bytes that `direction` needs at most for one matrix, beside it and its update.

        The planner chooses stages by it, and reports it. The default suffices for a call of `orthogonalize` that
        writes to `batch.update`.

        Args:
            options: the options of the group that are not `per_step`.
            rows: d_out.
            cols: d_in.
            itemsize: bytes of an element of `batch.matrices`.
            update_itemsize: bytes of an element of `batch.update`.
        """
        return scratch_numel(rows, cols) * itemsize

    def half_precision_suffices(self, options: PlannedOptions, rows: int, cols: int) -> bool:
        """Return whether float16 can represent the updates of (rows, cols) matrices; GPUs then use it.

        Args:
            options: the options of the group that are not `per_step`.
            rows: d_out.
            cols: d_in.
        """
        return self.update_dtype is None

    def update_scale(self, group: GroupOptions, rows: int, cols: int) -> float | None:
        """Return the scale of an update of this shape for the routing report.

        Args:
            group: the options of a group.
            rows: d_out.
            cols: d_in.

        Returns:
            The number that `direction` multiplies updates of this shape by; None if the rule has no such scale.
        """
        return None

    def other_lr_ratio(self, options: GroupOptions) -> float | None:
        """Return the learning rate of AdamW beside these matrices, relative to their lr, if the user passes none.

        Args:
            options: the options of the matrices.

        Returns:
            The ratio; None, the default, if there is no usual one: AdamW then has a learning rate of its own.
        """
        return None

    def not_capturable(self, group: GroupOptions) -> str | None:
        """Return why a step with these options cannot be captured as a CUDA graph.

        Args:
            group: the options of a group.

        Returns:
            A reason for `plan_report()`; None if it can.
        """
        return None

    def check_options(self, group: GroupOptions) -> None:
        """Raise an error if options of a group contradict each other; each has been checked by itself.

        Args:
            group: the options of a group.

        Raises:
            ValueError: the options can't be used together; the message says which and what to pass.
        """
        if group.get("cautious_weight_decay", False) and self.multiplies_weights:
            raise ValueError(
                f"cautious_weight_decay=True can't be used with rule {self.name!r}: the rule multiplies whole matrices "
                "by factors, which replace weight decay. Pass cautious_weight_decay=False"
            )

    def warnings(self, group: GroupOptions) -> list[str]:
        """Return warnings for the user about the options of a group.

        Args:
            group: the options of a group, which `check_options` has accepted.
        """
        return []

    def residual(self, batch: MatrixBatch) -> Tensor | None:
        """Return how far the results of `direction` are from orthogonal, for `metrics`.

        Override it if updates should be orthogonal up to a scale: `metrics()` reports the largest number.

        Args:
            batch: a batch whose updates are written. Do not change it.

        Returns:
            (B,); None, the default, if updates are not meant to be orthogonal.
        """
        return None

    def metrics(self, last: Mapping[str, Tensor], total: Mapping[str, float]) -> dict[str, float]:
        """Return numbers for a logger.

        Args:
            last: the diagnostics of the last step by name, each with one number per matrix.
            total: their sums since the optimizer was built, over all matrices and all steps that updated them.

        Returns:
            Numbers by name, which `MuonOptimizer.metrics` returns beside its own.
        """
        return {}

    # -------------------------------------------------------------------------------- derived from the declarations

    @cached_property
    def display_name(self) -> str:
        """Return the name of the rule in tables and plots."""
        return self.title or self.name

    @cached_property
    def needs_matrices(self) -> bool:
        """Return whether the rule works on whole matrices; if not, it is element-wise."""
        return type(self).direction is not Rule.direction or type(self).directions is not Rule.directions

    def _comes_with(self, name: str, *methods: str) -> bool:
        """Return whether an attribute belongs to these methods: no class below its definer overrides them."""
        for owner in type(self).__mro__:
            if name in vars(owner):
                return True
            if any(method in vars(owner) for method in methods):
                return False
        return False

    @cached_property
    def has_directions(self) -> bool:
        """Return whether `directions` computes what `direction` does."""
        return type(self).directions is not Rule.directions and self._comes_with("directions", "direction")

    @cached_property
    def may_overwrite(self) -> bool:
        """Return whether batches may be overwritten: nothing but the rule that declares it sees them."""
        return self.overwrites_matrices and self._comes_with("overwrites_matrices", "direction", "directions")

    @cached_property
    def residual_overwrites(self) -> bool:
        """Return whether `residual` may overwrite its matrix too."""
        return self.may_overwrite and self._comes_with("overwrites_matrices", "residual")

    @cached_property
    def multiplies_weights(self) -> bool:
        """Return whether the rule multiplies each weight matrix by a factor."""
        return type(self).factors is not Rule.factors

    @cached_property
    def all_options(self) -> dict[str, Option]:
        """Return all options by name, including those of the rule's statistics and of views."""
        views = VIEW_OPTIONS if self.needs_matrices else ()
        has_moments = any(spec.is_moment for spec in self.all_state)
        storage = [option for option in STORAGE_OPTIONS if has_moments or option.name != "state_dtype"]
        of_statistics = [option for name in self.statistics for option in STATISTICS[name].options]
        return {option.name: option for option in merge(self.options, of_statistics, storage, views, self.options)}

    @cached_property
    def all_state(self) -> tuple[StateSpec, ...]:
        """Return the declarations of all state, including that of the rule's statistics."""
        return (*self.state, *(spec for name in self.statistics for spec in STATISTICS[name].state))

    @cached_property
    def matrix_state(self) -> tuple[PerMatrix, ...]:
        """Return the declarations of the per-matrix state that `direction` and `factors` may change."""
        return tuple(spec for spec in self.state if isinstance(spec, PerMatrix))

    @cached_property
    def declarations(self) -> dict[str, str]:
        """Return what a step of this rule depends on besides options, as text: ranks compare it."""
        methods = ("prepare", "direction", "directions", "factors", "apply")
        specs = [
            f"{type(spec).__name__}({spec.name!r}, {spec.kind!r}, "
            f"{spec.initial if isinstance(spec, PerMatrix) else spec.code!r})"
            for spec in self.state
        ]
        statistics = [*self.statistics, *(["update_statistics"] if self.update_statistics else [])]
        return {
            "state": ", ".join(specs),
            "statistics": ", ".join(statistics),
            "diagnostics": ", ".join(self.diagnostics),
            "options": ", ".join(f"{o.name} (per_step)" if o.per_step else o.name for o in self.all_options.values()),
            "methods": ", ".join(name for name in methods if getattr(type(self), name) is not getattr(Rule, name)),
            "update_dtype": str(self.update_dtype),
            "state_in_apply": str(self.state_in_apply),
            "kernels": "none" if self.fused is None else type(self.fused).__name__,
        }

    @cached_property
    def has_matrix_values(self) -> bool:
        """Return whether the rule keeps, computes or reports values that belong to whole matrices."""
        return bool(self.matrix_state or self.statistics or self.multiplies_weights or self.diagnostics)

    @cached_property
    def needs_weights(self) -> bool:
        """Return whether a step must look at the weights, or multiply them by factors, before `direction`."""
        return bool(self.statistics or self.multiplies_weights)

    @cached_property
    def fused(self) -> FusedKernels | None:
        """Return the kernels of the rule.

        Returns:
            None if a subclass overrides `prepare` or `apply` without declaring kernels: the inherited kernels would
            compute something else.
        """
        return self.kernels if self._comes_with("kernels", "prepare", "apply") else None

    @cached_property
    def plan_names(self) -> tuple[str, ...]:
        """Return the names of the options that a plan depends on: all that may not change at every step."""
        return tuple(name for name, option in self.all_options.items() if not option.per_step)

    @cached_property
    def per_step_numbers(self) -> tuple[str, ...]:
        """Return the names of the per-step options that are numbers, which `factors` may read."""
        declared = [option for name, option in self.all_options.items() if name not in PARAMETER_OPTIONS]
        return tuple(o.name for o in declared if o.per_step and type(o.default) in (int, float))

    def planned_options(self, group: GroupOptions) -> PlannedOptions:
        """Return the options of a group that `direction` may read, without those of views.

        Args:
            group: the options of a group.
        """
        values = {name: group[name] for name in self.plan_names if name not in PARAMETER_OPTIONS}
        return PlannedOptions(self.name, values, self.all_options.keys() - set(self.plan_names))


def shown(value: object) -> str:
    """Return what a rule has passed, for an error message."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}" + ("" if value.is_floating_point() else f" of {value.dtype}")
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _not_opposed(weight: Tensor, update: Tensor) -> Tensor:
    """Return where update * weight >= 0, by signs: a product of small numbers would be rounded to 0."""
    return ((weight >= 0) & (update >= 0)) | ((weight <= 0) & (update <= 0))
