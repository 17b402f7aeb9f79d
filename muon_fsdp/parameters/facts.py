"""Collect what a model or a list of names tells about parameters, and find the layers around a layer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from muon_fsdp.parameters.names import plain_name

_DEPTH = 3  # how many levels below a module `Layers.below` looks

Path = tuple[str, ...]  # the parts of a name


@dataclass(frozen=True)
class Fused:
    """A weight that looks like several matrices in one.

    Args:
        parts: what they are, for example "Q, K, V".
        options: the options that split it, if its model tells the sizes of the parts.
    """

    parts: str
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(eq=False)
class Facts:
    """Facts about one parameter, from its model or its name."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    owners: list[nn.Module] = field(default_factory=list)  # empty if only its name is known
    plain_names: set[str] = field(default_factory=set)  # one per owner, without inserted parts
    view: str = "auto"
    labelled: bool = False  # the user has set the view
    transposed: bool = False
    other_reason: str | None = None  # why it is not updated as a matrix
    matrix_reason: str | None = None
    guessed: bool = False
    fused: Fused | None = None

    @property
    def logical_shape(self) -> tuple[int, int]:
        """Return (d_out, d_in) of a weight with two dimensions or more; of each of its matrices if it is a stack."""
        if self.view == "flatten" or len(self.shape) > 3:
            return self.shape[0], math.prod(self.shape[1:])
        first, second = self.shape[-2], self.shape[-1]
        return (second, first) if self.transposed else (first, second)

    def belongs_to(self, *classes: type[nn.Module]) -> bool:
        """Return whether a module of one of these classes holds the parameter."""
        return any(isinstance(module, classes) for module in self.owners)


@dataclass(frozen=True, eq=False)
class Layer:
    """A weight and its place in the model: the name of its module, or its own if the module has several.

    Args:
        path: for example ("blocks", "0", "fc") for `blocks.0.fc.weight`, ("attn", "in_proj_weight") for the parameter
            `attn.in_proj_weight`.
        facts: what is known about the weight.
        number: its number among the weights of the model.
    """

    path: Path
    facts: Facts
    number: int

    @property
    def name(self) -> str:
        """Return the last part of the path, in lower case."""
        return self.path[-1].lower()

    @property
    def parent(self) -> Path:
        """Return the path of the module that contains the layer."""
        return self.path[:-1]

    @property
    def is_bare(self) -> bool:
        """Return whether the weight is a parameter of the containing module and no layer of its own."""
        return not any(name.endswith(".weight") for name in self.facts.plain_names)

    @property
    def is_stack(self) -> bool:
        """Return whether the weight is a stack of matrices."""
        return len(self.facts.shape) == 3 and self.facts.view in ("auto", "stacked") and 1 not in self.facts.shape

    @property
    def rows(self) -> int:
        """Return d_out of the weight, or of each matrix of a stack."""
        return self.facts.logical_shape[0]

    @property
    def cols(self) -> int:
        """Return d_in of the weight, or of each matrix of a stack."""
        return self.facts.logical_shape[1]


class Layers:
    """The weights with two dimensions or more, by their places.

    Args:
        facts: facts about all parameters, in the order of the model.
        modules: the modules of the model by name; empty if only names are known.
    """

    def __init__(self, facts: Iterable[Facts], modules: Mapping[str, nn.Module]) -> None:
        self.all = [
            Layer(_path(name), entry, number)
            for number, entry in enumerate(facts)
            for name in sorted(entry.plain_names)
            if len(entry.shape) >= 2
        ]
        self._modules = {_path(plain_name(f"{name}.weight")) if name else (): each for name, each in modules.items()}

    def beside(self, layer: Layer) -> list[Layer]:
        """Return the other layers of the module that contains a layer."""
        return [other for other in self._by_parent[layer.parent] if other.facts is not layer.facts]

    def within(self, parent: Path) -> list[Layer]:
        """Return the layers that a module contains directly."""
        return self._by_parent.get(parent, [])

    def below(self, parent: Path) -> list[Layer]:
        """Return the layers that a module contains, at most three levels down."""
        return self._by_ancestor.get(parent, [])

    def readers(self, layer: Layer, size: int) -> list[Layer]:
        """Return the layers beside a layer that have inputs of this size."""
        return [other for other in self.beside(layer) if other.cols == size]

    def module(self, path: Path) -> nn.Module | None:
        """Return the module at a path; None if only names are known."""
        return self._modules.get(path)

    def class_names(self, path: Path) -> list[str]:
        """Return the names of the class of the module at a path and of its base classes; none without a model."""
        module = self.module(path)
        return [cls.__name__ for cls in type(module).__mro__] if module is not None else []

    def number_at(self, path: Path, names: Iterable[str]) -> int | None:
        """Return a positive int that a module, its config, or the config of a module around it has by these names."""
        modules = [self.module(path[:length]) for length in range(len(path), -1, -1)]
        for holder in (*modules[:1], *(getattr(module, "config", None) for module in modules)):
            for name in names:
                value = getattr(holder, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None

    @cached_property
    def _by_parent(self) -> dict[Path, list[Layer]]:
        found: dict[Path, list[Layer]] = defaultdict(list)
        for layer in self.all:
            found[layer.parent].append(layer)
        return found

    @cached_property
    def _by_ancestor(self) -> dict[Path, list[Layer]]:
        found: dict[Path, list[Layer]] = defaultdict(list)
        for layer in self.all:
            for depth in range(1, min(_DEPTH, len(layer.path)) + 1):
                found[layer.path[:-depth]].append(layer)
        return found


def _path(name: str) -> Path:
    """Return the place of a weight by its name: without "weight", which says nothing."""
    parts = name.split(".")
    return tuple(parts[:-1] if parts[-1] == "weight" and len(parts) > 1 else parts)
