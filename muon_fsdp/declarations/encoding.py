"""Declare how the `PerParameter` state of a parameter is stored: in float32, in bfloat16, or in 8 bits with scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from muon_fsdp.declarations.option import Option, integer
from muon_fsdp.declarations.state import PerParameter, State, working_dtype
from muon_fsdp.kernels.tables import SCALES, Rounding
from muon_fsdp.linalg.codes import Encoded, decode, dithered, dtype_of, encode, num_blocks


def _seed(value: object) -> bool:
    integer(value, at_least=0)
    return int(value) < 2**31  # type: ignore[call-overload, no-any-return]


STATE_DTYPES = ("float32", "bfloat16", "int8")
STORAGE_OPTIONS = (
    Option(
        "state_dtype",
        "float32",
        'how moments are stored: "float32", "bfloat16", or "int8" in blocks of 256 with a scale each. Parameters of '
        "fewer than 4,096 elements, with int8 also those with rows of fewer than 64, keep float32",
        choices=STATE_DTYPES,
        shared=True,
    ),
    Option(
        "rounding",
        "nearest",
        'how weights in bfloat16 or float16 without a float32 master are rounded: "nearest", which loses updates below '
        'half an ulp, "stochastic", or "remainder", which keeps what was dropped in one more byte per weight',
        choices=get_args(Rounding),
        shared=True,
    ),
    Option(
        "rounding_seed",
        0,
        "seed of stochastic rounding, below 2^31",
        check=_seed,
        per_step=True,
        shared=True,
    ),
)
HALF_DTYPES = (torch.bfloat16, torch.float16)
LEAST_ELEMENTS, LEAST_COLUMNS = 4096, 64  # of smaller parameters and rows, scales would take more than they save


@dataclass(frozen=True)
class Encoding:
    """How the elements of state of one parameter are stored on one rank, if not in working precision.

    Args:
        dtype: bfloat16, or int8 for codes of 8 bits with scales beside them.
        first: the column of the whole parameter at which this rank's shard begins. Blocks begin at multiples of their
            size in the whole parameter, and end where the shard ends.
    """

    dtype: torch.dtype
    first: int = 0

    @property
    def has_scales(self) -> bool:
        """Return whether scales lie beside the codes."""
        return self.dtype is torch.int8

    def dtypes(self, spec: PerParameter) -> dict[str, torch.dtype]:
        """Return the dtypes of the tensors in which a moment is stored, by name."""
        if not self.has_scales:
            return {spec.name: self.dtype}
        return {spec.name: dtype_of(spec.code), spec.name + SCALES: torch.float32}

    def scales_shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape of the scales of a shard."""
        return torch.Size((*shape[:-1], num_blocks(shape[-1], self.first)))

    def encode(self, spec: PerParameter, value: Tensor, dither: Tensor | None = None) -> State:
        """Return the stored form of a shard of state in working precision, by name; `dither` is that of `codes`."""
        if not self.has_scales:
            rounded = value.to(self.dtype) if dither is None else dithered(value, dither)
            return {spec.name: rounded}
        return dict(zip(self.dtypes(spec), encode(value, spec.code, self.first, dither), strict=True))

    def decode(self, spec: PerParameter, state: Mapping[str, Tensor]) -> Tensor:
        """Return a shard of state in working precision; a new tensor."""
        stored = [state[name] for name in self.dtypes(spec)]
        return decode(Encoded(*stored), spec.code, self.first) if self.has_scales else stored[0].float()

    def num_bytes(self, shape: torch.Size) -> int:
        """Return the bytes of a moment of a shard of this shape."""
        scales = 4 * self.scales_shape(shape).numel() if self.has_scales else 0
        return shape.numel() * self.dtype.itemsize + scales


def encoding_for(state_dtype: str, parameter: Tensor, shard: torch.Size, first: int = 0) -> Encoding | None:
    """Return how state of a parameter is stored; None in working precision.

    Args:
        state_dtype: the option of the parameter's group.
        parameter: the parameter.
        shard: the shape of the shard of its state.
        first: the column of the parameter at which the shard begins.
    """
    if state_dtype == "float32" or parameter.numel() < LEAST_ELEMENTS:
        return None
    if state_dtype == "bfloat16":
        return Encoding(torch.bfloat16)
    return Encoding(torch.int8, first) if shard[-1] >= LEAST_COLUMNS else None


def check_storage(name: str, parameter: Tensor, group: Mapping[str, Any]) -> None:
    """Raise if the state of a parameter can't be stored as the options of its group say."""
    state_dtype = group.get("state_dtype", "float32")
    if state_dtype != "float32" and working_dtype(parameter.dtype) is not torch.float32:
        raise ValueError(
            f"state_dtype={state_dtype!r} can't store the state of parameter {name!r}, which is {parameter.dtype}: its "
            "moments need float64. Pass state_dtype='float32', which keeps the working precision of every parameter"
        )
    rounding = group.get("rounding", "nearest")
    if rounding != "nearest" and parameter.dtype not in HALF_DTYPES:
        raise ValueError(
            f"rounding={rounding!r} is for weights in bfloat16 and float16, and parameter {name!r} is "
            f"{parameter.dtype}: pass rounding='nearest' for it, in its group or in overrides. FSDP2 with mixed "
            "precision keeps float32 weights, which need no such rounding"
        )
