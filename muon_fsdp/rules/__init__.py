"""Update rules by name. A new rule is one file here and one row in RULES."""

from muon_fsdp.rules.adamw import AdamW
from muon_fsdp.rules.base import Rule, StateSpec
from muon_fsdp.rules.muon import Muon
from muon_fsdp.rules.normuon import NorMuon
from muon_fsdp.rules.spectral_sphere import SpectralSphere

RULES: dict[str, Rule] = {rule.name: rule for rule in (Muon(), AdamW(), NorMuon(), SpectralSphere())}

__all__ = ["RULES", "Rule", "StateSpec"]
