"""Collect the update rules: one class in one file each, listed in `BUILT_IN`; users add theirs with `register`."""

from muon_fsdp.declarations.option import Option
from muon_fsdp.declarations.state import PerMatrix, PerParameter
from muon_fsdp.rules.adamw import AdamW
from muon_fsdp.rules.base import FusedKernels, MatrixBatch, MatrixValues, Rule, UpdateStatistics
from muon_fsdp.rules.hyperball import Hyperball
from muon_fsdp.rules.muon import Muon
from muon_fsdp.rules.normuon import NorMuon
from muon_fsdp.rules.registry import RULES, RuleInfo, available, register, register_built_in, rule_named
from muon_fsdp.rules.sinkhorn import Sinkhorn
from muon_fsdp.rules.spectral_sphere import SpectralSphere
from muon_fsdp.statistics.top_singular import TopSingular

BUILT_IN = (Muon, NorMuon, SpectralSphere, Hyperball, Sinkhorn, AdamW)
for _rule in BUILT_IN:
    register_built_in(_rule)

# The rules of matrices and of non-matrix parameters if the user names no others.
DEFAULT_RULE = Muon.name
DEFAULT_OTHER_RULE = AdamW.name

__all__ = [
    "AdamW",
    "FusedKernels",
    "Hyperball",
    "MatrixBatch",
    "MatrixValues",
    "Muon",
    "NorMuon",
    "Option",
    "PerMatrix",
    "PerParameter",
    "RULES",
    "Rule",
    "RuleInfo",
    "Sinkhorn",
    "SpectralSphere",
    "TopSingular",
    "UpdateStatistics",
    "available",
    "register",
    "rule_named",
]
