"""Logical matrices of fused, stacked, transposed and convolution weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muon_fsdp.declarations.views import matrix_view
from tests.comparisons import assert_same


def view(shape, kind="auto", **options):
    return matrix_view(shape, name="w", kind=kind, **options)


@pytest.mark.parametrize(
    ("shape", "options", "blocks"),
    [
        ((6, 8), {}, [(1, 6, 8)]),
        ((6, 8), {"transposed": True}, [(1, 8, 6)]),
        ((3, 6, 8), {}, [(3, 6, 8)]),
        ((3, 6, 8), {"kind": "flatten"}, [(1, 3, 48)]),
        ((5, 3, 2, 2), {}, [(1, 5, 12)]),
        ((5, 3, 2, 4), {"kind": "stacked"}, [(15, 2, 4)]),
        ((6, 8), {"kind": "attn"}, [(4, 6, 2)]),
        ((6, 8), {"num_heads": 3}, [(3, 2, 8)]),
        ((6, 8), {"split_sizes": (3, 2, 1)}, [(1, 3, 8), (1, 2, 8), (1, 1, 8)]),
        ((8, 6), {"transposed": True, "split_sizes": (4, 2)}, [(1, 4, 8), (1, 2, 8)]),
        ((2, 6, 8), {"split_sizes": (4, 2)}, [(2, 4, 8), (2, 2, 8)]),
        ((2, 6, 8), {"num_heads": 2}, [(4, 3, 8)]),
        ((3, 6, 8), {"transposed": True}, [(3, 8, 6)]),
        ((3, 6, 8), {"transposed": True, "split_sizes": (5, 3)}, [(3, 5, 6), (3, 3, 6)]),
        ((3, 6, 8), {"transposed": True, "num_heads": 2}, [(3, 4, 6), (3, 4, 6)]),
        ((1, 6, 8), {"transposed": True, "num_heads": 2}, [(2, 4, 6)]),
        ((2, 3, 4, 5), {"kind": "stacked", "transposed": True}, [(6, 5, 4)]),
    ],
)
def test_a_view_splits_a_parameter_into_blocks_that_share_its_memory(shape, options, blocks):
    tensor = torch.randn(shape)
    parameter_view = view(shape, **options)
    parts = parameter_view.split(tensor)
    assert [tuple(part.shape) for part in parts] == blocks == list(parameter_view.block_shapes)
    assert sorted(torch.cat([part.flatten() for part in parts]).tolist()) == sorted(tensor.flatten().tolist())
    if parameter_view.in_memory_order:
        assert_same(parts[0].flatten(), tensor.flatten())
    for part in parts:  # writing to a block writes to the parameter
        part.fill_(7.0)
    assert (tensor == 7.0).all()


def test_which_numbers_a_block_holds():
    p = torch.arange(48.0).reshape(6, 8)
    assert_same(view((6, 8), "attn").split(p)[0], p.view(4, 6, 2))
    assert_same(view((6, 8), num_heads=2).split(p)[0][1], p[3:])
    assert_same(view((6, 8), split_sizes=(2, 4)).split(p)[1][0], p[2:])
    assert_same(view((6, 8), transposed=True).split(p)[0][0], p.T)
    assert_same(view((6, 8), transposed=True, split_sizes=(3, 5)).split(p)[1][0], p.T[3:])
    experts = torch.arange(96.0).reshape(2, 6, 8)
    assert_same(view((2, 6, 8), transposed=True, num_heads=4).split(experts)[1][1], experts[1].T[2:4])


@given(st.permutations([0, 1, 2, 3]))
def test_memory_layout_does_not_matter(order):
    tensor = torch.randn(4, 3, 5, 2).permute(order)
    inverse = [order.index(i) for i in range(4)]
    strided = tensor.contiguous().permute(inverse)  # some stride order, logical shape (4, 3, 5, 2)
    parameter_view = view((4, 3, 5, 2))
    assert_same(parameter_view.split(strided)[0][0], strided.flatten(1))


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ((6,), {}, "not a matrix"),
        ((2, 3, 4), {"kind": "matrix"}, "'stacked' or 'flatten'"),
        ((3, 4), {"kind": "stacked"}, "at least 3"),
        ((3, 6), {"kind": "attn"}, r"\(d1, 4 \* d2\)"),
        ((6, 8), {"num_heads": 4}, "does not divide its 6 rows"),
        ((6, 8), {"split_sizes": (4, 4)}, "add up to 8, not to its 6 rows"),
        ((6, 8), {"num_heads": 2, "split_sizes": (4, 2)}, "not both"),
        ((6, 8), {"transposed": True, "num_heads": 3}, "does not divide its 8 rows"),
        ((2, 6, 8), {"transposed": True, "split_sizes": (2, 4)}, "add up to 6, not to its 8 rows"),
        ((6, 8), {"transposed": True, "kind": "attn"}, "needs view 'matrix' or 'stacked', and its view is 'attn'"),
        ((5, 3, 2, 2), {"transposed": True}, "its view is 'flatten'"),
    ],
)
def test_what_does_not_fit_names_the_parameter(shape, options, text):
    with pytest.raises(ValueError, match=f"parameter 'w'.*{text}"):
        view(shape, **options)
