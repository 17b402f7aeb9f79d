"""Make our own optimizers for the table of steps: Muon in several ways, and other rules with any options."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.benchmarks.peers import MakeOptimizer

OURS = "muon_fsdp"
DEFAULT_RULES = ("normuon", "spectral_sphere:lambda_mode=projection")


def parse_rule(text: str) -> dict[str, Any]:
    """Parse a rule with options, such as "spectral_sphere:lambda_mode=zero:momentum=0.9".

    Returns:
        The keyword arguments of MuonOptimizer.

    Raises:
        ValueError: the text has another form, or MuonOptimizer does not accept the rule or an option.
    """
    name, *options = text.split(":")
    arguments: dict[str, Any] = {"rule": name}
    for option in options:
        key, equals, value = option.partition("=")
        if not (key.isidentifier() and equals):
            raise ValueError(f"{text!r} is not RULE or RULE:OPTION=VALUE, for example {DEFAULT_RULES[-1]}")
        arguments[key] = _value(value)
    try:
        MuonOptimizer([nn.Parameter(torch.zeros(2, 2))], **arguments)
    except TypeError as error:  # an option that no rule has
        raise ValueError(str(error)) from error
    return arguments


def _value(text: str) -> Any:
    """Return the number, the boolean or None that a text stands for, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def ours(device: str, rules: Sequence[str] = ()) -> dict[str, MakeOptimizer]:
    """Return what makes each of our optimizers, by the name that the table shows.

    Args:
        device: "cuda" or "cpu".
        rules: further rules to measure, as `parse_rule` reads them.
    """
    muon = partial(MuonOptimizer, nesterov=True)  # as in the optimizers of other libraries
    found: dict[str, MakeOptimizer] = {OURS: muon}
    if device == "cuda":
        found[f"{OURS}, cuda_graph=False"] = partial(muon, cuda_graph=False)
        found[f"{OURS}, cuda_graph=True"] = partial(muon, cuda_graph=True)
    for rule in rules:
        found[f"{OURS}, {rule}"] = partial(MuonOptimizer, **parse_rule(rule))
    return found
