"""Recognize the embedding or output head of a language model by shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from muon_fsdp.plan.layout import Shape

# The least ratio of vocabulary to width. Fused projections of gated MLPs and state-space layers have up to 8 times the
# width as outputs; published models with a smaller ratio have large vocabularies.
_MANY_WORDS, _RATIO_OF_MANY, _RATIO = 30_000, 4, 8
_FUSED = (2, 3, 4)  # gate and up; query, key and value; the gates of an LSTM


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
