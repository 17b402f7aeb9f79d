"""Define chains of Newton-Schulz steps of degree 5 to 33, whose polynomials need one to four products.

One step maps every singular value x of X to p(x) = x (Z(x^2) + identity) and does not change the singular vectors. A
step of a higher degree is cheaper than two steps of a lower one, because it forms the Gram matrix R = X X^T once.
"""

from __future__ import annotations

from typing import NamedTuple


class Step(NamedTuple):
    """One step X <- (Z + identity * I) X, where Z is a polynomial in R = X X^T computed by symmetric products.

    With (alpha, beta, gamma) of one product after the other:

    - degree 5: Z = alpha R R + beta R
    - degree 9: U = alpha R R + beta R, then Z = alpha U U + beta U + gamma R
    - degree 17: U and V as U and Z of degree 9, then Z = alpha V V + beta V + gamma U
    - degree 33: U, V and W as U, V and Z of degree 17, then Z = alpha W W + beta W + gamma V
    """

    degree: int  # of the odd polynomial that acts on singular values
    products: tuple[tuple[float, float, float], ...]  # one (alpha, beta, gamma) per product
    identity: float


class Chain(NamedTuple):
    """Steps, and the numbers (from 1) of those after which X is computed and its Gram matrix formed again."""

    steps: tuple[Step, ...]
    refreshes: frozenset[int]


# Source: solve((17, 17, 9), 4e-3) of experiments/chains.py. For a = n/m and symmetric products
# counted half, it costs 4.5 a + 4 products of size m.
SQUARE_CHAIN = Chain(
    steps=(
        Step(
            17,
            (
                (1.9219606889656324, -2.1044732088709015, 0.0),
                (8.0, 5.545132245357743, 0.12701253324149606),
                (57.285686684620906, 77.16489464079767, 0.5511395698227907),
            ),
            26.44617032084537,
        ),
        Step(
            17,
            (
                (0.14927077514580564, -0.7414329451471904, 0.0),
                (2.0, 2.373381816428445, 0.03941555230080076),
                (21.74713074901424, 22.322293921350017, 1.0012484152270453),
            ),
            7.109097653402697,
        ),
        Step(
            9,
            (
                (0.3573622518977495, -0.9815270391776493, 0.0),
                (2.214020562606093, 3.409529709824533, -0.31909843570975316),
            ),
            2.5841438554681218,
        ),
    ),
    refreshes=frozenset({1, 2, 3}),
)
# Source: solve((5, 17, 5, 9), 4e-3, cushion=0.05). It costs 3 a + 6.5 products and is the cheaper one from a = 5/3 on.
WIDE_CHAIN = Chain(
    steps=(
        Step(
            5,
            ((14.921917227404633, -21.060852111724838, 0.0),),
            7.905261743913769,
        ),
        Step(
            17,
            (
                (0.12802903152205833, -0.5537809587784469, 0.0),
                (4.0, 2.926403119340356, 0.022432340141673227),
                (72.19078240236608, 54.64746965576332, 0.8633818351311515),
            ),
            11.097113131420079,
        ),
        Step(
            5,
            ((0.4168739176142185, -1.7918444503470516, 0.0),),
            2.4792884584544104,
        ),
        Step(
            9,
            (
                (0.46593260733840974, -1.240084740126778, 0.0),
                (1.281016351849201, 2.5345060319307384, -0.3277949586512513),
            ),
            2.5220893803504993,
        ),
    ),
    refreshes=frozenset({2, 4}),
)
# Source: widest((33, 33), 0.35) of experiments/chains.py. Singular values above 1.04e-3 of the Frobenius norm end
# between 0.65 and 1.35, and the slope at zero is 656. It costs 3 a + 4 products.
FAST_CHAIN = Chain(
    steps=(
        Step(
            33,
            (
                (1.9219606889656324, -2.165114768781797, 0.0),
                (8.0, 5.3562753518387245, 0.04172600373018286),
                (2.0, 2.1764742915354387, -0.19040642304405958),
                (302.3364669468139, 247.7716560390736, 0.34461556426112655),
            ),
            51.19652563113846,
        ),
        Step(
            33,
            (
                (0.13377479217558877, -0.5747238768157622, 0.0),
                (4.0, 3.173484969751498, -0.05881780746478344),
                (2.0, 2.18275681453575, -0.2914848346654991),
                (65.00491141248641, 52.33419996548391, 2.465901057268147),
            ),
            12.822218221969282,
        ),
    ),
    refreshes=frozenset({1, 2}),
)


class StoredChains(NamedTuple):
    """The chains of a method whose steps are made for each other."""

    square: Chain
    wide: Chain  # for matrices that are wide enough to be worth fewer refreshes


STORED_CHAINS: dict[str, StoredChains] = {
    "accurate": StoredChains(SQUARE_CHAIN, WIDE_CHAIN),
    "fast": StoredChains(FAST_CHAIN, FAST_CHAIN),
}
