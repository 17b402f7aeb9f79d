"""Collect what a model, names or shapes tell about parameters, and find the layers around a layer."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn

from muon_fsdp.parameters.attention import HeadNumbers, head_numbers, own_value, value_of
from muon_fsdp.parameters.names import plain_name
from muon_fsdp.plan.layout import Shape

_DEPTH = 3  # how many levels below a module `Layers.below` looks

# The least ratio of vocabulary to width. Fused projections of gated MLPs and state-space layers have up to 8 times the
# width as outputs; published models with a smaller ratio have large vocabularies.
_MANY_WORDS, _RATIO_OF_MANY, _RATIO = 30_000, 4, 8
_FUSED = (2, 3, 4)  # gate and up; query, key and value; the gates of an LSTM

Path: TypeAlias = tuple[str, ...]  # the parts of a name
Options: TypeAlias = tuple[tuple[str, Any], ...]  # of one parameter, as pairs of a name and a value


@dataclass(frozen=True)
class Fused:
    """A weight that looks like several matrices in one.

    Args:
        parts: what they are, for example "Q, K, V".
        options: the options that split it, if its model or shapes tell the sizes of the parts.
        by_head: the options that cut each head out, if the model tells the sizes of heads.
        is_known: whether modules or configurations tell both the sizes and that the parts follow each other. Otherwise
            `options` are only advice.
    """

    parts: str
    options: Options = ()
    by_head: Options = ()
    is_known: bool = False


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
    num_heads: int | None = None  # how its model cuts the rows of every matrix, as the options of the same names do
    split_sizes: tuple[int, ...] | None = None
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
        layers: all layers of the model, which a layer does not keep alive.
    """

    path: Path
    facts: Facts
    number: int
    layers: Layers

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

    @property
    def module(self) -> nn.Module | None:
        """Return the module that contains the layer; None if only names are known."""
        return self.layers.module(self.parent)

    @property
    def class_names(self) -> list[str]:
        """Return the names of the class of the module that contains the layer, and of its base classes."""
        return self.layers.class_names(self.parent)

    @property
    def beside(self) -> list[Layer]:
        """Return the other layers of the module that contains this one."""
        return [other for other in self.layers.within(self.parent) if other.facts is not self.facts]

    @property
    def readers(self) -> list[Layer]:
        """Return the layers beside it that may read its outputs: they have as many inputs as it has rows."""
        rows = self.rows
        return [other for other in self.beside if other.cols == rows]

    @property
    def heads(self) -> HeadNumbers | None:
        """Return the numbers of heads of the module; None if nothing tells how many query heads there are."""
        return head_numbers(self._around)

    def find_number(self, *names: str) -> int | None:
        """Return a positive int that the module, its config, or the config of a module around it has by these names."""
        return value_of(self._around, names, int)

    def own_number(self, *names: str) -> int | None:
        """Return a positive int that the module itself has by one of these names, the best known first."""
        return own_value(self.module, names, int)

    @property
    def _around(self) -> list[nn.Module | None]:
        """Return the module, then those around it, from inside to outside; Nones without a model."""
        return [self.layers.module(self.parent[:length]) for length in range(len(self.parent), -1, -1)]


class Layers:
    """The weights with two dimensions or more, by their places.

    Args:
        facts: facts about all parameters, in the order of the model.
        modules: the modules of the model by name; empty if only names are known.
    """

    def __init__(self, facts: Iterable[Facts], modules: Mapping[str, nn.Module]) -> None:
        own = weakref.proxy(self)  # a cycle would keep the modules of a deleted model until garbage collection
        self.all = [
            Layer(_path(name), entry, number, own)
            for number, entry in enumerate(facts)
            for name in sorted(entry.plain_names)
            if len(entry.shape) >= 2
        ]
        self._modules = {_path(plain_name(f"{name}.weight")) if name else (): each for name, each in modules.items()}
        self._below: dict[Path, list[Layer]] = defaultdict(list)
        for layer in self.all:
            for depth in range(1, min(_DEPTH, len(layer.path)) + 1):
                self._below[layer.path[:-depth]].append(layer)

    def within(self, parent: Path) -> list[Layer]:
        """Return the layers that a module contains directly."""
        return [layer for layer in self.below(parent) if layer.parent == parent]

    def below(self, parent: Path) -> list[Layer]:
        """Return the layers that a module contains, at most three levels down."""
        return self._below.get(parent, [])

    def module(self, path: Path) -> nn.Module | None:
        """Return the module at a path; None if only names are known."""
        return self._modules.get(path)

    def modules_with(self, method: str) -> list[tuple[Path, nn.Module]]:
        """Return the modules that have a method, with their places."""
        return [(path, module) for path, module in self._modules.items() if callable(getattr(module, method, None))]

    def at(self, path: Path, name: str) -> list[Layer]:
        """Return the layers of a parameter, by its name in the module at a path; PEFT may have copied it."""
        place = _path(".".join((*path, *plain_name(name).split("."))))
        return [layer for layer in self.within(place[:-1]) if layer.path == place]

    def class_names(self, path: Path) -> list[str]:
        """Return the names of the class of the module at a path and of its base classes; none without a model."""
        module = self.module(path)
        return [cls.__name__ for cls in type(module).__mro__] if module is not None else []


def _path(name: str) -> Path:
    """Return the place of a weight by its name: without "weight", which says nothing."""
    parts = name.split(".")
    return tuple(parts[:-1] if parts[-1] == "weight" and len(parts) > 1 else parts)


def vocabulary_tables(shapes: Sequence[Shape]) -> list[int]:
    """Return the positions of the (words, width) tables among parameters in the order of their model.

    No other matrix has a side of length `words`: the outputs of a Linear are the inputs of another, or a bias follows
    it. A vocabulary whose size is also a hidden size is not found, nor a small one that is tied to the head. The body
    of a model, an MLP, a classifier and adapters are never mistaken for a table.
    """
    matrices = [index for index, shape in enumerate(shapes) if len(shape) == 2 and 1 not in shape]
    distinct = dict.fromkeys(shape for shape in shapes if len(shape) > 1)
    found: list[int] = []
    for shape in dict.fromkeys(shapes[index] for index in matrices):
        places = [index for index in matrices if shapes[index] == shape]
        others = [other for other in distinct if other != shape]
        if len(places) <= 2 and _may_be_a_table(shape, others) and not _has_bias(shapes, places[0]):
            is_pair = places == [matrices[0], matrices[-1]]
            if is_pair or (places[0] != matrices[-1] and _is_large(shapes, matrices, places[0], others)):
                found += places
    return sorted(found)


def _may_be_a_table(shape: Shape, others: Iterable[Shape]) -> bool:
    """Return whether other matrices have the width of a (words, width) matrix, and none has its number of words."""
    words, width = shape
    has_width = any(width in other for other in others if len(other) == 2)
    return words != width and has_width and not any(words in other for other in others)


def _has_bias(shapes: Sequence[Shape], index: int) -> bool:
    """Return whether a bias follows the matrix."""
    return tuple(shapes[index + 1 : index + 2]) == (shapes[index][:1],)


def _is_large(shapes: Sequence[Shape], matrices: Sequence[int], index: int, others: Iterable[Shape]) -> bool:
    """Return whether a matrix has too many rows to be a hidden Linear."""
    words, width = shapes[index]
    sides = {width, *(side for other in others for side in other)}
    if any(words == times * side for times in _FUSED for side in sides):
        return False
    if words >= _MANY_WORDS:
        return words > _RATIO_OF_MANY * width
    number = matrices.index(index)
    is_fed = number > 0 and shapes[matrices[number - 1]][0] == width  # a classifier, or the second factor of a pair
    return words > _RATIO * width and not is_fed
