"""NorMuon (arXiv 2510.05491): Muon whose rows are brought to one size by a second moment of each."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from muon_fsdp.rules.base import GroupOptions, StateSpec
from muon_fsdp.rules.muon import Muon


class NorMuonBatchKey(NamedTuple):
    method: str
    steps: int
    factor: float  # scale * ns_stepsize
    beta2: float
    eps: float


class NorMuon(Muon):
    """O = polar(momentum);  v = beta2 * v + (1 - beta2) * mean of O^2 over a row;  U = scale * c * O / (sqrt(v) + eps).

    c leaves the Frobenius norm as it was, so `scale` and lr mean what they mean for Muon.
    """

    name = "normuon"
    normalizes_rows = True
    state: ClassVar[tuple[StateSpec, ...]] = (StateSpec("momentum_buffer"), StateSpec("second_moment", like="rows"))

    def batch_key(self, group: GroupOptions, rows: int, cols: int) -> NorMuonBatchKey:  # type: ignore[override]
        muon = super().batch_key(group, rows, cols)
        return NorMuonBatchKey(*muon, beta2=group["betas"][1], eps=group["eps"])

    def normalize_rows(self, key: NorMuonBatchKey, directions: Tensor, second_moment: Tensor) -> Tensor:
        precision = second_moment.dtype
        norms = torch.linalg.vector_norm(directions, dim=-1, dtype=precision) / (key.factor or 1.0)
        second_moment = key.beta2 * second_moment + (1 - key.beta2) * norms.square() / directions.shape[-1]
        factors = 1 / (second_moment.sqrt() + key.eps)
        before, after = (torch.linalg.vector_norm(n, dim=-1, keepdim=True) for n in (norms, factors * norms))
        factors = factors * torch.where(after > 0, before / after, 0.0)
        directions.mul_(factors.unsqueeze(-1))
        return second_moment
