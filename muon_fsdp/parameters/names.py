"""Read names of parameters: without what wrappers insert, and one pattern for the names of repeated layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

_WRAPPER_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# What PEFT, parametrizations and wrappers insert into the name of a weight. Without it, the name shows its purpose.
_INSERTED = (
    (re.compile(r"\.modules_to_save\.[^.]+(?=\.)|\.(original_module|base_layer|token_adapter|module)(?=\.)"), ""),
    (re.compile(r"\.parametrizations\.([^.]+)\.original\d*$"), r".\1"),
)
_NUMBER = re.compile(r"(?<![^.\[])(\d+)(?![^.\]])")  # "layers.3.fc", "param[3]"; not "fc1"


def clean_name(name: str) -> str:
    """Return a parameter's name without what torch.compile, activation checkpointing and DDP insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS).removeprefix("module.")


def plain_name(name: str) -> str:
    """Return a parameter's name without what adapters and parametrizations insert."""
    name = f".{name}"
    for pattern, replacement in _INSERTED:
        name = pattern.sub(replacement, name)
    return name.removeprefix(".")


def without_numbers(name: str) -> str:
    """Return a name with every number of a layer replaced by "*"; it is the same for the same part of each layer."""
    return _NUMBER.sub("*", name)


def first_match(patterns: Iterable[str], name: str) -> str | None:
    """Return the first pattern that matches a name; None if none does."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def common_pattern(names: Sequence[str]) -> str:
    """Return names that are equal without numbers as one, with "*" for each number in which they differ."""
    split = [_NUMBER.split(name) for name in names]  # texts and numbers in turn
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*split, strict=True))


def override_pattern(names: Sequence[str], among: Iterable[str]) -> str:
    """Return a pattern for overrides that matches these names and no others; the first name if there is none.

    Args:
        names: names that are equal without numbers.
        among: all names of the model.
    """
    pattern = common_pattern(names)
    return pattern if set(names) >= {name for name in among if fnmatchcase(name, pattern)} else names[0]
