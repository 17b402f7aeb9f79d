"""A fused kernel for a toy rule, as a user would write it: a layout, a kernel, and the rule that has it."""

from __future__ import annotations

import triton
import triton.language as tl

from muon_fsdp.kernels.launch import launch
from muon_fsdp.kernels.tables import CHUNK, TableLayout
from muon_fsdp.kernels.triton_elementwise import LR, PARAMETER_ROW, TYPES, gradient_chunk, tensor_chunk, tensor_pointer
from muon_fsdp.rules import FusedKernels, register
from tests.toy_rules import ToyMomentum

LAYOUT = TableLayout(states=("momentum_buffer",), scalars=("beta",))
_BUFFER_ROW = tl.constexpr(LAYOUT.row("momentum_buffer"))
_BETA = tl.constexpr(LAYOUT.scalar("beta"))


@triton.jit
def toy_momentum_kernel(
    chunks, addresses, updated, scalars, num_tensors, PARAMETER: tl.constexpr, GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tensor, start, length = tensor_chunk(chunks, tl.program_id(0), ALIGNED)
    offset = tl.arange(0, CHUNK)
    mask = (offset < length) & (tl.load(updated + tensor) != 0)
    grad = gradient_chunk(addresses, scalars, tensor, num_tensors, start, offset, mask, GRADIENT, ALIGNED)
    buffer = tensor_pointer(addresses, _BUFFER_ROW, tensor, num_tensors, tl.float32, ALIGNED) + start + offset
    momentum = tl.load(scalars + _BETA) * tl.load(buffer, mask=mask, other=0.0) + grad
    tl.store(buffer, momentum, mask=mask)
    weight = tensor_pointer(addresses, PARAMETER_ROW, tensor, num_tensors, PARAMETER, ALIGNED) + start + offset
    tl.store(weight, tl.load(weight, mask=mask, other=0.0) - tl.load(scalars + LR) * momentum, mask=mask)


class ToyMomentumKernels(FusedKernels):
    layout = LAYOUT

    def scalars(self, group):
        return {"beta": group["beta"]}

    def apply(self, group, tensors, updates, factors):
        launch(
            toy_momentum_kernel,
            len(tensors.chunks),
            (tensors.chunks, tensors.addresses, tensors.updated, tensors.scalars, tensors.num_tensors),
            {
                "PARAMETER": TYPES[tensors.parameter_dtype],
                "GRADIENT": TYPES[tensors.gradient_dtype],
                "ALIGNED": tensors.aligned,
                "CHUNK": CHUNK,
            },
            tensors.scalars.device,
        )


@register
class ToyFusedMomentum(ToyMomentum):
    name = "toy_fused_momentum"
    kernels = ToyMomentumKernels()
