"""What an update rule is: state, and prepare / direction / apply on lists of tensors and batches of matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from muon_fsdp.kernels.triton_elementwise import TensorList

GroupOptions: TypeAlias = Mapping[str, Any]
State: TypeAlias = dict[str, Tensor]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of moments and updates: float32 for half and single precision, float64 for double."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class StateSpec:
    """One tensor of state per parameter: of the parameter's shape in working precision, or a float32 scalar."""

    name: str
    like: Literal["parameter", "scalar"] = "parameter"

    def dtype(self, parameter: Tensor) -> torch.dtype:
        return working_dtype(parameter.dtype) if self.like == "parameter" else torch.float32

    def shape(self, parameter: Tensor) -> torch.Size:
        return parameter.shape if self.like == "parameter" else torch.Size(())

    def create(self, parameter: Tensor) -> Tensor:
        if self.like == "parameter":
            return torch.zeros_like(parameter, dtype=self.dtype(parameter), memory_format=torch.preserve_format)
        return torch.zeros((), dtype=torch.float32, device=parameter.device)


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

    # A rule may come with kernels that do `prepare` and `apply` for a whole group in one launch. With `fused_scalars`
    # it names the numbers they need besides lr and weight decay.
    fused: ClassVar[bool] = False

    def fused_scalars(self, group: GroupOptions) -> tuple[float, ...]:
        raise AssertionError(f"rule {self.name!r} has no kernels")

    def fused_prepare(self, group: GroupOptions, tensors: TensorList, staging: Tensor, partials: Tensor | None) -> None:
        """`prepare`, from the tensors of a list into their slots of `staging`, with partial norms where asked for."""
        raise AssertionError(f"rule {self.name!r} has no kernels")

    def fused_apply(self, group: GroupOptions, tensors: TensorList, updates: Tensor) -> None:
        """`apply`, from slots of `updates`."""
        raise AssertionError(f"rule {self.name!r} has no kernels")

    def apply(self, group: GroupOptions, params: list[Tensor], updates: list[Tensor]) -> None:
        """W <- W (1 - lr * weight_decay) - lr * U, rounded to the parameter's precision once."""
        lr, weight_decay = _host_number(group["lr"]), group["weight_decay"]
        weights = [p if p.dtype == u.dtype else p.to(u.dtype) for p, u in zip(params, updates, strict=True)]
        if isinstance(lr, Tensor) or weight_decay != 0:
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
