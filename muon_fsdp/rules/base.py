"""What an update rule is: state, and prepare / direction / apply on lists of tensors and batches of matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from muon_fsdp.views import MatrixView

if TYPE_CHECKING:
    from muon_fsdp.kernels.triton_elementwise import TensorList

GroupOptions: TypeAlias = Mapping[str, Any]
State: TypeAlias = dict[str, Tensor]

NUM_VECTORS = 16


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of moments and updates: float32 for half and single precision, float64 for double."""
    return torch.promote_types(dtype, torch.float32)


def num_vectors(rows: int, cols: int) -> int:
    """How many vectors span the subspace that is kept of a matrix."""
    return min(NUM_VECTORS, rows, cols)


@dataclass(frozen=True)
class StateSpec:
    """One tensor of state per parameter, in working precision but for the float32 scalar.

    "parameter": of its shape, distributed as it is. All others are whole on every rank, whatever the layout, so that
    a checkpoint fits any: "rows", "columns": a vector along that side of every logical matrix, one after another;
    "subspaces": `num_vectors` along the columns of each; "matrices": a number for each.
    """

    name: str
    like: Literal["parameter", "scalar", "rows", "columns", "subspaces", "matrices"] = "parameter"

    def dtype(self, parameter: Tensor) -> torch.dtype:
        return torch.float32 if self.like == "scalar" else working_dtype(parameter.dtype)

    def shape(self, parameter: Tensor, view: MatrixView | None) -> torch.Size:
        if self.like == "parameter":
            return parameter.shape
        if self.like == "scalar":
            return torch.Size(())
        assert view is not None
        return torch.Size((sum(self.numel(*shape) for shape in view.block_shapes),))

    def numel(self, count: int, rows: int, cols: int) -> int:
        """Numbers for so many matrices of this shape."""
        each = {"rows": rows, "columns": cols, "subspaces": num_vectors(rows, cols) * cols, "matrices": 1}
        return count * each[self.like]

    def create(self, parameter: Tensor, view: MatrixView | None) -> Tensor:
        if self.like == "parameter":
            return torch.zeros_like(parameter, dtype=self.dtype(parameter), memory_format=torch.preserve_format)
        return torch.zeros(self.shape(parameter, view), dtype=self.dtype(parameter), device=parameter.device)


@dataclass
class Spectrum:
    """What a rule that keeps matrices on spheres is told of a batch of them, and what it found."""

    left: Tensor  # (B, rows), the top singular vectors of the weights
    right: Tensor  # (B, cols)
    multiplier: Tensor  # (B,)
    slope: Tensor  # (B,)
    regular: Tensor  # (B,) bool: not zero
    calls: Tensor | None = None  # (B,) of msign
    failed: Tensor | None = None  # (B,) bool


class Rule(ABC):
    """An update rule. It sees lists of local tensors and batches of whole matrices, never a mesh or a process group.

    The lists of one call belong to one parameter group and to parameters that have a gradient.
    """

    name: ClassVar[str]
    # Whether `prepare`'s result must pass through `direction` as whole matrices.
    orthogonalizes: ClassVar[bool]
    state: ClassVar[tuple[StateSpec, ...]]

    @abstractmethod
    def prepare(self, group: GroupOptions, grads: list[Tensor], states: list[State]) -> list[Tensor]:
        """Advance the moments and return, per parameter, what is to be orthogonalized or else the update itself.

        Gradients and results are in working precision; gradients must not be changed, and results may be state:
        nobody writes to them.
        """

    def batch_key(self, group: GroupOptions, rows: int, cols: int) -> Hashable:
        """What two equally shaped matrices must share to be given to `direction` in one batch."""
        raise AssertionError(f"rule {self.name!r} does not orthogonalize")

    def flops(self, key: Any, rows: int, cols: int) -> float:
        """Cost of `direction` for one matrix, for the balance of ranks."""
        raise AssertionError(f"rule {self.name!r} does not orthogonalize")

    def result_dtype(self, keys: Sequence[Any], units: Tensor) -> torch.dtype:
        """The precision in which `direction` is asked for its results, given matrices in that of `units`."""
        return working_dtype(units.dtype)

    def direction(
        self,
        key: Any,
        matrices: Tensor,  # (B, rows, cols)
        out: Tensor,  # (B, rows, cols)
        inverse_norms: Tensor | None = None,  # (B,), where they are known
    ) -> None:
        """Write the update for every matrix of a batch to `out`."""
        raise AssertionError(f"rule {self.name!r} does not orthogonalize")

    # Whether weights are kept on spheres: then `tangent` takes the place of `direction`, and `apply` is given factors.
    spherical: ClassVar[bool] = False

    def tangent(
        self, key: Any, matrices: Tensor, out: Tensor, inverse_norms: Tensor | None, spectrum: Spectrum
    ) -> None:
        """Write the update, tangent to the spheres of the weights, to `out`, and what was found to `spectrum`."""
        raise AssertionError(f"rule {self.name!r} has no spheres")

    # Whether the rows of what `direction` gives are normalized by a second moment of each (state "second_moment").
    normalizes_rows: ClassVar[bool] = False

    def normalize_rows(self, key: Any, directions: Tensor, second_moment: Tensor) -> Tensor:
        """Normalize the rows of `directions` (B, rows, cols) in place, given (B, rows); the moments after this step."""
        raise AssertionError(f"rule {self.name!r} does not normalize rows")

    # A rule may come with kernels that do `prepare` and `apply` for a whole group in one launch.
    fused: ClassVar[bool] = False

    def fused_scalars(self, group: GroupOptions) -> tuple[float, ...]:
        """The numbers that the kernels need besides lr and weight decay."""
        raise AssertionError(f"rule {self.name!r} has no kernels")

    def fused_prepare(self, group: GroupOptions, tensors: TensorList, staging: Tensor, partials: Tensor | None) -> None:
        """`prepare`, from the tensors of a list into their slots of `staging`, with partial norms where asked for."""
        raise AssertionError(f"rule {self.name!r} has no kernels")

    def fused_apply(self, group: GroupOptions, tensors: TensorList, updates: Tensor) -> None:
        """`apply`, from slots of `updates`."""
        raise AssertionError(f"rule {self.name!r} has no kernels")

    def apply(
        self,
        group: GroupOptions,
        params: list[Tensor],
        updates: list[Tensor],
        factors: Sequence[tuple[Tensor, Tensor]] | None = None,  # broadcastable to the parameters
    ) -> None:
        """W <- W (1 - lr * weight_decay) - lr * U, rounded to the parameter's precision once.

        Under a spherical rule, W <- f W - lr * R * U with the factors (f, R) of every parameter.
        """
        lr, weight_decay = _host_number(group["lr"]), group["weight_decay"]
        weights = [p if p.dtype == u.dtype else p.to(u.dtype) for p, u in zip(params, updates, strict=True)]
        if factors is not None:
            updates = [update * radius for update, (_, radius) in zip(updates, factors, strict=True)]
            for weight, (factor, _) in zip(weights, factors, strict=True):
                weight.mul_(factor)
        elif isinstance(lr, Tensor) or weight_decay != 0:
            torch._foreach_mul_(weights, 1 - lr * weight_decay)
        if isinstance(lr, Tensor):  # on the device: reading it would stall the host
            torch._foreach_sub_(weights, torch._foreach_mul(updates, lr))
        else:
            torch._foreach_add_(weights, updates, alpha=-lr)
        rounded = [(p, w) for p, w in zip(params, weights, strict=True) if p is not w]
        if rounded:
            torch._foreach_copy_([p for p, _ in rounded], [w for _, w in rounded])


def _host_number(value: float | Tensor) -> float | Tensor:
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" else value.reshape(())
    return value
