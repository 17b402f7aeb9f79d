"""Provide the chains that training compares: points of the frontier that the package lacks, and facts about all."""

from __future__ import annotations

from experiments.frontier import cost, slope
from muon_fsdp.linalg.chains import STORED_CHAINS, Chain, Step
from muon_fsdp.linalg.coefficients import DEFAULT_STEPS, coefficients

# Source: widest(degrees, 0.35) of experiments/chains.py, which takes up to a minute.
FRONTIER_CHAINS = {
    "17-17": Chain(
        steps=(
            Step(
                17,
                (
                    (1.9219606889656324, -2.1026622983337, 0.0),
                    (8.0, 5.53130209610194, 0.12495545047218398),
                    (58.831086581816734, 78.80660560013499, 0.4599727043097132),
                ),
                26.77471172743489,
            ),
            Step(
                17,
                (
                    (0.14380571974014414, -0.6917009840398963, 0.0),
                    (2.0, 2.1626781901794523, 0.04235452522333293),
                    (37.5084579268546, 31.082010978614534, 1.0435625029720463),
                ),
                7.736687897762685,
            ),
        ),
        refreshes=frozenset({1, 2}),
    ),
    "33-17": Chain(
        steps=(
            Step(
                33,
                (
                    (1.9219606889656324, -2.1679710877946756, 0.0),
                    (8.0, 5.3860221615614785, 0.043581427378998505),
                    (2.0, 2.204640305043935, -0.19964048257243588),
                    (278.1167232826395, 233.97956720061762, 0.5623857778571127),
                ),
                49.926529118009896,
            ),
            Step(
                17,
                (
                    (0.14379952667609103, -0.6916424802008312, 0.0),
                    (2.0, 2.162406579064091, 0.04235092452421004),
                    (37.534488817254186, 31.09503340999834, 1.0436135318533848),
                ),
                7.737508575187786,
            ),
        ),
        refreshes=frozenset({1, 2}),
    ),
    "65-65": Chain(
        steps=(
            Step(
                65,
                (
                    (1.9219606889656324, -2.0866419800718496, 0.0),
                    (8.0, 5.277986462870886, 0.23622420370936775),
                    (4.0, 3.623903611312425, 0.012734393768755523),
                    (2.0, 2.1386480025461525, -0.14331770236229596),
                    (618.1494603501661, 486.87802363438834, 0.3885053953981364),
                ),
                96.33023958501198,
            ),
            Step(
                65,
                (
                    (0.12768409378184106, -0.5960742104850231, 0.0),
                    (4.0, 3.3537275912594495, 0.06075327504600906),
                    (4.0, 3.4548144779116874, 0.39393821449963495),
                    (2.0, 2.574847193470213, -0.30454836334795915),
                    (56.39723295021308, 64.46419363777733, 3.814667509906931),
                ),
                22.477758506755947,
            ),
        ),
        refreshes=frozenset({1, 2}),
    ),
}


def cost_and_slope(method: str) -> tuple[float, float]:
    """Return the products of size m for a square matrix, symmetric ones counted half, and the slope at zero."""
    if method in FRONTIER_CHAINS:
        steps = FRONTIER_CHAINS[method].steps
    elif method in STORED_CHAINS:
        steps = STORED_CHAINS[method].square.steps
    else:
        steps = tuple(Step(5, ((c, b, 0.0),), a) for a, b, c in coefficients(method, DEFAULT_STEPS))
    return cost([step.degree for step in steps]), slope(steps)
