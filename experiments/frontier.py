"""Find the chains with the largest slope at zero for their cost, among those that leave singular values near 1.

python -m experiments.frontier

Prints a table and writes docs/experiments/frontier.csv and its plot. Chains that the file holds already are not solved
again, so a run that was stopped resumes where it was. `docs/numerics.md` explains the table.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from experiments.chains import evaluate, num_products, widest
from experiments.emulation import kernels_in_half_precision
from experiments.plots import Panel, draw_panels
from muon_fsdp.benchmarks.accuracy import make_probe, measure_accuracy
from muon_fsdp.linalg.chains import Chain, Step
from muon_fsdp.linalg.coefficients import NORM_MARGINS, coefficients
from muon_fsdp.linalg.iteration import Exact, Operand, iterate, scaled_steps, x_scale
from muon_fsdp.linalg.newton_schulz import normalize

ERROR = 0.35  # singular values end within this of 1
# By cost. Each degree multiplies the slope by at most 4.25, 7.6, 14.3, 26.6 or 49 (5 to 65), and the last one by less.
# The other chains of these costs have smaller products of these numbers, or the same in another order.
CHAINS = (
    *((17, 17), (33, 9), (65, 5)),
    *((33, 17), (65, 9)),
    *((33, 33), (65, 17), (17, 5, 5)),
    *((65, 33), (17, 9, 5), (5, 17, 9), (9, 9, 9)),
    *((65, 65), (17, 17, 5), (33, 9, 5)),
    *((17, 17, 9), (33, 17, 5)),
)
PUBLISHED = {
    "keller": "Keller's quintic",
    "polar_express": "Polar Express",
    "cans": "CANS",
    "deepseek_v4": "DeepSeek-V4",
}
# arXiv 2606.00371, five cubic steps: products for a square matrix, and the slope at zero.
CUBIC5 = (7.5, 119.0)
COLUMNS = (
    "chain",
    "largest_degree",
    "cost",
    "lower",
    "slope",
    "low",
    "high",
    "low_half",
    "high_half",
    "low_twice",
    "high_twice",
)
MOST_EXCESS = 1.01  # what rounding may add before every step

Row = dict[str, str]


def cost(degrees: Sequence[int]) -> float:
    """Return the products of size m for a square matrix, symmetric ones counted half; wide ones cost 3 (a - 1) more."""
    return sum(num_products(degree) for degree in degrees) / 2 + 1.5 * len(degrees)


def slope(steps: Sequence[Step]) -> float:
    """Return the factor of singular values near zero."""
    return math.prod(step.identity for step in steps)


def band(steps: Sequence[Step], excess: float = 1.0) -> tuple[float, float, float]:
    """Return where singular values end that are large enough to reach the band.

    Args:
        steps: the chain.
        excess: what every singular value is multiplied by before every step.

    Returns:
        The smallest singular value from which on all end in the band, and the lowest and highest end.
    """
    x = torch.cat([torch.logspace(-5, -1, 100_000, dtype=torch.float64), torch.linspace(0.1, 1, 100_000).double()])
    values = x
    for step in steps:
        values = evaluate(step, values * excess)
    from_here = values.flip(0).cummin(0).values.flip(0) >= 1 - ERROR
    first = int(from_here.nonzero()[0])
    return x[first].item(), values[first:].min().item(), values.max().item()


def in_half_precision(chain: Chain) -> tuple[float, float]:
    """Return the smallest and largest singular value that rounding leaves: of spectra, of rank one and of few rows."""

    def run(matrices: Tensor) -> Tensor:
        x, exact, _ = normalize(matrices, NORM_MARGINS["fast"] / x_scale(True), torch.float16)
        out = torch.empty_like(matrices)
        operand = Operand(x, Exact(exact.matrices), 1.0, out)
        iterate([operand], scaled_steps(chain, half=True))
        if not out.isfinite().all():
            raise FloatingPointError
        return out

    generator = torch.Generator().manual_seed(0)
    lows, highs = [], []
    with kernels_in_half_precision():
        for shape in ((65, 65), (128, 512), (256, 256)):
            accuracy = measure_accuracy(run, make_probe(*shape, "cpu", torch.float32))
            lows.append(accuracy["low"])
            highs.append(accuracy["high"])
            for num_rows in (1, 2, 3, 8):
                matrix = torch.zeros(1, *shape)
                matrix[:, :num_rows] = torch.randn(num_rows, shape[1], generator=generator)
                for size in (1.0, 1e-30):
                    values = torch.linalg.svdvals(run(matrix * size)[0].double())[:num_rows]
                    lows.append(values.min().item())
                    highs.append(values.max().item())
    return min(lows), max(highs)


def rounded_band(chain: Chain) -> tuple[float, float]:
    """Return what `in_half_precision` returns, or 0 and infinity if the chain diverges."""
    try:
        return in_half_precision(chain)
    except FloatingPointError:
        return 0.0, math.inf


def solve_row(degrees: tuple[int, ...]) -> Row:
    """Return the line of the table for a chain of these degrees."""
    steps = widest(degrees, ERROR)
    lower, low, high = band(steps)
    if band(steps, MOST_EXCESS)[2] > 1 + ERROR + 1e-3:
        raise AssertionError(f"{degrees}: 1% of rounding leaves the band")
    half = rounded_band(Chain(steps, frozenset(range(1, len(steps) + 1))))
    last = len(steps)
    twice = [rounded_band(Chain(steps, frozenset({first, last}))) for first in range(1, last)] if last > 2 else [half]
    numbers = (lower, slope(steps), low, high, *half, *min(twice, key=lambda ends: max(1 - ends[0], ends[1] - 1)))
    name = "|".join(map(str, degrees))
    return dict(
        zip(COLUMNS, [name, str(max(degrees)), f"{cost(degrees):g}", *(f"{x:.5g}" for x in numbers)], strict=True)
    )


def read(path: Path) -> list[Row]:
    """Return the lines of the file, none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write the lines of the table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def best(rows: Sequence[Row], largest_degree: int) -> list[Row]:
    """Return the chains of degrees up to a limit that hold in float16 and have a larger slope than all cheaper ones."""
    found: list[Row] = []
    allowed = [row for row in rows if int(row["largest_degree"]) <= largest_degree and float(row["high_half"]) < 1.36]
    for row in sorted(allowed, key=lambda row: (float(row["cost"]), -float(row["slope"]))):
        if not found or float(row["slope"]) > float(found[-1]["slope"]):
            found.append(row)
    return found


def table(rows: Sequence[Row]) -> str:
    """Return the lines as a Markdown table, by cost and slope; bold ones are best for their cost."""
    leading = [row["chain"] for row in best(rows, 65)]
    lines = [
        "| chain | cost, square | cost, wide | slope at zero | band from | exact | float16 | float16, wide |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (float(row["cost"]), -float(row["slope"]))):
        name = row["chain"].replace("|", " \\| ")
        name = f"**{name}**" if row["chain"] in leading else name
        ends = [_ends(row[f"low{kind}"], row[f"high{kind}"]) for kind in ("", "_half", "_twice")]
        wide = f"3a + {float(row['cost']) - 3:g}"
        numbers = [row["cost"], wide, f"{float(row['slope']):.0f}", f"{float(row['lower']):.2e}", *ends]
        lines.append(f"| {name} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def _ends(low: str, high: str) -> str:
    return f"{float(low):.3f} to {float(high):.3f}" if float(high) < math.inf else "diverges"


def write_plot(rows: Sequence[Row], path_stem: Path) -> list[Path]:
    """Plot the slope against the cost, with published sets as points."""
    curves = {}
    for limit in (17, 33, 65):
        frontier = best(rows, limit)
        slopes = [float(row["slope"]) for row in frontier]
        label = f"degrees up to {limit}"
        curves[label] = (label, [float(row["cost"]) for row in frontier], slopes, slopes, slopes)
    points = {"cubic5": CUBIC5}
    for name, label in PUBLISHED.items():
        quintics = coefficients(name, 5)
        points[label] = (2.0 * len(quintics), math.prod(a for a, _, _ in quintics))
    for label, (place, height) in points.items():
        curves[label] = (label, [place], [height], [height], [height])
    ticks = {cost: f"{cost:g}" for cost in (6.0, 7.0, 8.0, 10.0, 20.0)}
    panel = Panel(
        curves,
        x_label="products of size m for a square matrix",
        y_label="slope at zero",
        x_scale="log",
        y_scale="log",
        x_ticks=ticks,
        markers=True,
    )
    return draw_panels(path_stem, [panel], title="How far tiny singular values are lifted, by cost")


def main(argv: Sequence[str] | None = None) -> None:
    """Add what is missing to the file, print the table and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=Path("docs/experiments/frontier.csv"), help="file of the results")
    path: Path = parser.parse_args(argv).csv
    rows = read(path)
    known = {row["chain"] for row in rows}
    for number, degrees in enumerate(CHAINS, start=1):
        name = "|".join(map(str, degrees))
        if name in known:
            continue
        print(f"{number}/{len(CHAINS)}: {name} ...", flush=True)
        rows.append(solve_row(degrees))
        write(path, rows)
    print(table(rows))
    write_plot(rows, path.with_suffix(""))


if __name__ == "__main__":
    main()
