"""Chains of steps, families of matrices and a float64 reference for the tests of the kernel for small matrices."""

from __future__ import annotations

import torch

from muon_fsdp.linalg.chains import FAST_CHAIN
from muon_fsdp.linalg.coefficients import coefficients

MARGIN = 1.01
QUINTICS = tuple((5, ((c, b),), a) for a, b, c in coefficients("default", 5))
# Minimax chains for singular values in [4e-3, 1]: (degree, (alpha, beta, gamma) of every product, identity).
_FIRST_9 = (9, ((1.92196069, -2.25435926, 0.0), (65.5153585, 61.4025798, -0.0808786107)), 14.5217597)
_FIRST_17 = (17, ((1.92196, -2.10447, 0.0), (8.0, 5.54513, 0.127013), (57.2857, 77.1649, 0.551140)), 26.4462)
NINES = (
    _FIRST_9,
    (9, ((0.13515046, -0.602260509, 0.0), (23.9847735, 23.2624815, -0.0651330897)), 6.05315515),
    (9, ((0.25855491, -0.90552116, 0.0), (4.54857041, 6.22350841, -0.231121848)), 3.28863392),
    (5, ((0.37567222, -1.25671587, 0.0),), 1.881059),
)
SEVENTEENS = (
    _FIRST_17,
    (17, ((0.149271, -0.741433, 0.0), (2.0, 2.37338, 0.0394156), (21.7471, 22.3223, 1.00125)), 7.1091),
    (9, ((0.357362, -0.981527, 0.0), (2.21402, 3.40953, -0.319098)), 2.58414),
)
WITH_13 = (
    _FIRST_9,
    (
        17,
        ((0.13515046, -0.603434902, 0.0), (4.0, 3.38553132, 0.0423697739), (31.688987, 32.1515474, 1.11242468)),
        9.2613542,
    ),
    (
        13,
        ((0.422848687, -1.19179775, 0.0), (4.0, 1.60412375, -0.354326464), (0.825852684, 1.52822246, 3.9704067)),
        3.36115503,
    ),
)
CHAINS = {
    "5,5|5,5,5": (QUINTICS, frozenset({2})),
    "5|5|5|5|5": (QUINTICS, frozenset({1, 2, 3, 4, 5})),
    "5,5": (QUINTICS[:2], frozenset()),
    "9,9|9,5": (NINES, frozenset({2, 4})),
    "17|17,9": (SEVENTEENS, frozenset({1})),
    "9,17|13": (WITH_13, frozenset({2})),
    "33|33": (FAST_CHAIN.steps, frozenset({1})),
}


def reference(batch, steps, margin=MARGIN):
    """Evaluate the chain in float64: every step on the iterate itself, without the Gram form."""
    x = batch.double()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    norms = torch.linalg.matrix_norm(x, keepdim=True)
    x = x / (margin * torch.where(norms == 0, 1.0, norms))
    for degree, products, identity in steps:
        r = x @ x.mT
        u = products[0][0] * r @ r + products[0][1] * r
        z = u
        if degree > 5:
            v = products[1][0] * u @ u + products[1][1] * u + products[1][2] * r
            z = v
        if degree > 9:
            z = w = products[2][0] * v @ (u if degree == 13 else v) + products[2][1] * v + products[2][2] * u
        if degree > 17:
            z = products[3][0] * w @ w + products[3][1] * w + products[3][2] * v
        x = z @ x + identity * x
    return x.mT if tall else x


def families(rows, cols, device):
    """Make a batch with one matrix of every kind, (7, rows, cols), and the names of the kinds."""
    generator = torch.Generator(device).manual_seed(rows * cols)

    def randn(*shape):
        return torch.randn(*shape, device=device, generator=generator)

    small = min(rows, cols)
    left, right = torch.linalg.qr(randn(rows, small))[0], torch.linalg.qr(randn(cols, small))[0]
    late, empty, spiked = randn(rows, cols), randn(rows, cols), randn(rows, cols)
    spiked[-1, -1] = 1e6
    late[: rows // 2, : cols // 2] *= 1e-4
    # The kernel estimates the size of a matrix from its first columns, or rows if it is tall.
    if rows > cols:
        empty[:-1] = 0
    else:
        empty[:, :-1] = 0
    kinds = {
        "gaussian": randn(rows, cols),
        "rank 1": randn(rows, 1) @ randn(1, cols),
        "log-uniform": (left * torch.logspace(0, -4, small, device=device)) @ right.mT,
        "zero": torch.zeros(rows, cols, device=device),
        "small first entries": late,
        "one column": empty,
        "one large entry": spiked,
    }
    return torch.stack(list(kinds.values())), list(kinds)


def errors(result, expected):
    """Return the error of every matrix relative to the norm of the expected one."""
    sizes = torch.linalg.matrix_norm(expected)
    return torch.linalg.matrix_norm(result.double() - expected) / torch.where(sizes == 0, 1.0, sizes)
