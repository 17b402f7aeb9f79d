"""Declare options of rules: name, default, check, one line of documentation, and when the value may change."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import torch


class UnknownOptionError(TypeError, ValueError):
    """The error for an option that no rule has.

    It is both a TypeError, which Python raises for an unexpected keyword, and a ValueError, which `torch.optim` raises
    for a parameter group.
    """


@dataclass(frozen=True)
class Option:
    """An option of an update rule.

    Args:
        name: what users pass: a keyword of the constructor, or a key of a group or an override.
        default: its value if nobody passes one; always valid.
        doc: one line for the reference.
        check: a function of a value. It raises ValueError or TypeError, or returns something false, if the value is not
            valid.
        per_step: True if the value may change at every step without planning or capturing the step again. `prepare`,
            `factors` and `apply` can read such an option; `direction` cannot.
        choices: the valid names, if the value is a name.
        meanings: what these names mean, for the error about an unknown one; second names of the same may be left out.
        label: how errors name the option; its name by default.
        shared: whether a value that is passed without the prefix of an element-wise rule counts for that rule too,
            unless the prefixed option is passed beside it.
    """

    name: str
    default: Any
    doc: str
    check: Callable[[Any], object] | None = field(default=None, kw_only=True)
    per_step: bool = field(default=False, kw_only=True)
    choices: tuple[str, ...] = field(default=(), kw_only=True)
    meanings: Mapping[str, str] = field(default_factory=dict, kw_only=True, hash=False)
    label: str | None = field(default=None, kw_only=True)
    shared: bool = field(default=False, kw_only=True)

    def validate(self, value: Any, name: str | None = None) -> None:
        """Raise ValueError or TypeError if the option cannot have this value.

        Args:
            value: what the user passed.
            name: the name under which the user passed it, such as "adamw_lr"; the option's own name by default.
        """
        if value is not self.default:
            self.check_value(value, name or self.name)

    def check_value(self, value: Any, name: str) -> None:
        """Check a value like `validate`, which accepts the default unchecked."""
        if not _fits_a_checkpoint(value):
            raise TypeError(
                f"Invalid {self.label or name}: {_shown(value)} (option {name!r} must be a number, a string, None or a "
                "sequence of these)"
            )
        label = self.label or name
        if self.choices and (isinstance(value, str) or self.check is None):
            if value not in self.choices:
                number_too = ", or a number" if self.check is number else ""
                explained = [f"{choice!r} ({meaning})" for choice, meaning in self.meanings.items()]
                listed = ", ".join(explained or self.choices)
                meant = suggestion(str(value).removeprefix("torch."), self.choices)  # a dtype, for state_dtype
                raise ValueError(f"Unknown {name} {value!r}; valid names are {listed}{number_too}{meant}")
            return
        try:
            result = None if self.check is None else self.check(value)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"Invalid {label}: {_shown(value)} (option {name!r} {error})") from None
        if result is not None and not result:
            raise ValueError(f"Invalid {label}: {_shown(value)} (option {name!r}: {self.doc})")


class PlannedOptions(Mapping[str, Any]):
    """The options of a group that change only with a new plan, and that `direction` may read; hashable.

    Args:
        rule: the name of the rule.
        values: the options by name.
        per_step: the names of the rule's other options. Reading one of them raises a KeyError that explains why.
    """

    __slots__ = ("_hash", "_per_step", "_rule", "_text", "_values")

    def __init__(self, rule: str = "", values: Mapping[str, Any] | None = None, per_step: Iterable[str] = ()) -> None:
        self._rule, self._per_step = rule, frozenset(per_step)
        self._values = dict(values or {})
        self._text = f"{rule}{self._values!r}"  # planning sorts by it, so it is computed once
        self._hash = hash((rule, tuple(self._values.items())))

    def __getitem__(self, name: str) -> Any:
        if name in self._per_step:
            raise KeyError(
                f"option {name!r} of rule {self._rule!r} may change at every step, so direction can't read it: read it "
                "in prepare, factors or apply, or declare it without per_step=True"
            )
        if name not in self._values:
            raise KeyError(f"rule {self._rule!r} has no option {name!r}{suggestion(name, self._values)}")
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an option, or the default; raise for a per-step option, as indexing does."""
        return self[name] if name in self._per_step else self._values.get(name, default)

    @property
    def rule(self) -> str:
        """Return the name of the rule that the options belong to."""
        return self._rule

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlannedOptions):
            return NotImplemented
        return self is other or (self._hash, self._rule, self._values) == (other._hash, other._rule, other._values)

    def __repr__(self) -> str:
        return self._text


def _fits_a_checkpoint(value: object) -> bool:
    """Return whether a checkpoint can hold a value."""
    if isinstance(value, torch.Tensor):
        return True  # `Option.check` explains what is wrong with a tensor of several elements
    if isinstance(value, (list, tuple)):
        return all(map(_fits_a_checkpoint, value))
    return value is None or isinstance(value, (bool, str, Real, torch.dtype))


def merge(*declarations: Iterable[Option]) -> tuple[Option, ...]:
    """Merge several lists of options; a later option replaces an earlier one of the same name."""
    by_name = {option.name: option for options in declarations for option in options}
    return tuple(by_name.values())


def _shown(value: object) -> str:
    """Return a value as an error message shows it: a tensor of several elements by its shape."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return repr(value.item()) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"


# ------------------------------------------------------------------------------------------------------------ checks


def number(value: object, *, below: float = math.inf) -> None:
    """Accept a finite real number in [0, below), or a tensor with one such element."""
    interval = ">= 0" if below == math.inf else f"in [0, {below:g})"
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            raise ValueError("must be one real number")
        if value.is_meta:
            return
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"must be a number {interval}")
    if not (0.0 <= float(value) < below and math.isfinite(value)):
        raise ValueError(f"must be a finite number {interval}")


def fraction(value: object) -> None:
    """Accept a number in [0, 1)."""
    number(value, below=1.0)


def positive(value: object) -> None:
    """Accept a finite number above 0."""
    number(value)
    if value == 0:
        raise ValueError("must be positive")


def integer(value: object, *, at_least: int = 1) -> None:
    """Accept an int of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"must be an int >= {at_least}")
    if value < at_least:
        raise ValueError(f"must be an int >= {at_least}")


def flag(value: object) -> None:
    """Accept True and False."""
    if not isinstance(value, bool):
        raise TypeError("must be True or False")


def pair_of_fractions(value: object) -> None:
    """Accept two numbers in [0, 1)."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise TypeError("must be a pair of numbers in [0, 1)")
    for each in value:
        fraction(each)


def sizes(value: object) -> None:
    """Accept a sequence of positive ints."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise TypeError("must be None or a sequence of positive ints")
    for size in value:
        integer(size)


# ------------------------------------------------------------------------------------------------------------- values


def canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the values of options to plain Python numbers and tuples, which any checkpoint can hold.

    "lr" stays a tensor if it is one, because schedulers write into it.
    """
    return {
        name: value if name == "lr" and isinstance(value, torch.Tensor) else _canonical(value)
        for name, value in options.items()
    }


def _canonical(value: Any) -> Any:
    """Convert one value: numbers of NumPy and tensors to Python numbers, sequences to tuples."""
    if isinstance(value, (bool, str)):
        return value
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else tuple(value.flatten().tolist())
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Sequence):
        return tuple(_canonical(item) for item in value)
    return value


# Names of the same options in other libraries. In a group they are errors too: they look as if they had an effect.
_SYNONYMS = {
    "learning_rate": "lr",
    "muon_lr": "lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "beta": "momentum",
    "mu": "momentum",
    "beta1": "momentum",
    "epsilon": "eps",
    "steps": "ns_steps",
    "backend_steps": "ns_steps",
    "num_ns_steps": "ns_steps",
    "ns_coefficients": "orthogonalization",
    "adjust_lr_fn": "scale",
    "adjust_lr": "scale",
    "heads": "num_heads",
    "use_muon": "rule",
    "algorithm": "rule",
}


def suggestion(name: str, valid: Iterable[str]) -> str:
    """Return a hint for an error message, such as "; did you mean 'lr'?", or "" if no valid name is near."""
    names = list(valid)
    meant = meant_name(name, names)
    prefixed = [each for each in names if each.endswith(f"_{name}")]
    near = [meant] if meant else prefixed or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def meant_name(name: str, valid: Iterable[str]) -> str | None:
    """Return the valid name that another one stands for: it is a known synonym, or a likely typing error.

    A typing error is one letter away (missing, added, another one, or two swapped); two if the valid name is longer
    than five letters, because many words are two letters away from "scale".
    """
    return _meant_name(name.lower(), tuple(valid))


@lru_cache(maxsize=1024)  # many groups have the same keys
def _meant_name(lower: str, names: tuple[str, ...]) -> str | None:
    if _SYNONYMS.get(lower) in names:
        return _SYNONYMS[lower]
    distances = [(_distance(lower, each), each) for each in names if abs(len(each) - len(lower)) <= 2]
    near = [(away, each) for away, each in distances if len(lower) > 1 and away <= (1 if len(each) <= 5 else 2)]
    return min(near)[1] if near else None


def _distance(one: str, other: str) -> int:
    """Return by how many letters two words differ; two neighbours that are swapped count once."""
    before: list[int] = []
    last, row = before, list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, last, row = last, row, [i]
        for j, wanted in enumerate(other, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != wanted)))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                row[j] = min(row[j], before[j - 2] + 1)
    return row[-1]
