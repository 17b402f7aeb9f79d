r"""Train with points of the frontier that the package does not store: a plugin of the training program.

python -m muon_fsdp.training --plugin experiments.frontier_plugin --optimizer muon_frontier \
  --set orthogonalization=17-17

It registers Muon and NorMuon again, with these chains as further values of `orthogonalization`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from experiments.frontier_chains import FRONTIER_CHAINS
from muon_fsdp.declarations.option import Option
from muon_fsdp.linalg import newton_schulz
from muon_fsdp.linalg.chains import STORED_CHAINS, StoredChains
from muon_fsdp.linalg.coefficients import NORM_MARGINS
from muon_fsdp.rules import Muon, NorMuon, register

for _name, _chain in FRONTIER_CHAINS.items():
    STORED_CHAINS[_name] = StoredChains(_chain, _chain)
    NORM_MARGINS[_name] = NORM_MARGINS["fast"]
newton_schulz.ORTHOGONALIZATIONS = CHOICES = (*newton_schulz.ORTHOGONALIZATIONS, *FRONTIER_CHAINS)


def _with_choices(options: tuple[Option, ...]) -> tuple[Option, ...]:
    return tuple(replace(each, choices=CHOICES) if each.name == "orthogonalization" else each for each in options)


@register
class FrontierMuon(Muon):
    """Muon with the chains of this file."""

    name = "muon_frontier"
    options: ClassVar[tuple[Option, ...]] = _with_choices(Muon.options)


@register
class FrontierNorMuon(NorMuon):
    """NorMuon with the chains of this file."""

    name = "normuon_frontier"
    options: ClassVar[tuple[Option, ...]] = _with_choices(NorMuon.options)
