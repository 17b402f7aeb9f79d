"""Small models, and the rules that their parameters get, for the tests of routing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.parameters.routing_report import RoutingRow


def rows(optimizer: MuonOptimizer) -> dict[str, RoutingRow]:
    """Return the rows of the routing report by name; check that no name comes twice."""
    report = optimizer.routing_report().rows
    found = {row.name: row for row in report}
    assert len(found) == len(report)
    return found


def rules(optimizer: MuonOptimizer) -> dict[str, str]:
    return {name: row.rule for name, row in rows(optimizer).items()}


class LanguageModel(nn.Module):
    def __init__(self, vocab: int = 50, width: int = 8, layers: int = 2, tied: bool = False, head: str = "lm_head"):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width),
                nn.Linear(width, 4 * width), nn.Linear(4 * width, width),
            )
            for _ in range(layers)
        )  # fmt: skip
        self.add_module(head, nn.Linear(width, vocab, bias=False))
        if tied:
            self.get_submodule(head).weight = self.wte.weight


def mlp(widths: Sequence[int], bias: bool = True) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(a, b, bias=bias) for a, b in pairwise(widths)])
