"""Which of some bare shapes look like the embedding or the output head of a language model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Shape = tuple[int, ...]

# How many times the width of a model the words of a vocabulary are. Fused projections of gated MLPs and of state-space
# layers put out up to 8 times the width; published models with a ratio below 8 have many words.
_MANY_WORDS, _RATIO_OF_MANY, _RATIO = 30_000, 4, 8
_FUSED = (2, 3, 4)  # gate and up; query, key and value; the gates of an LSTM


def vocabulary_tables(shapes: Sequence[Shape]) -> list[int]:
    """Return the positions of the (words, width) tables among parameters in the order of their model.

    Shapes can tell because nothing else in a model has a side `words`: what a Linear puts out, another takes in, or a
    bias follows it. Small vocabularies whose size is also a hidden size, or that are tied to the head and not larger
    than a hidden size could be, are not found; a body, an MLP, a classifier or adapters are never taken for a table.
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
    """Whether other matrices have its width, and none its number of words."""
    words, width = shape
    has_width = any(width in other for other in others if len(other) == 2)
    return words != width and has_width and not any(words in other for other in others)


def _has_bias(shapes: Sequence[Shape], index: int) -> bool:
    return tuple(shapes[index + 1 : index + 2]) == (shapes[index][:1],)


def _is_large(shapes: Sequence[Shape], matrices: Sequence[int], index: int, others: Iterable[Shape]) -> bool:
    """Whether a matrix has too many rows for a Linear of a body."""
    words, width = shapes[index]
    sides = {width, *(side for other in others for side in other)}
    if any(words == times * side for times in _FUSED for side in sides):
        return False
    if words >= _MANY_WORDS:
        return words > _RATIO_OF_MANY * width
    number = matrices.index(index)
    is_fed = number > 0 and shapes[matrices[number - 1]][0] == width  # a classifier, or the second factor of a pair
    return words > _RATIO * width and not is_fed
