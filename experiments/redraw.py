"""Draw the plots of docs/experiments again from the committed CSV files, without a training run.

python -m experiments.redraw
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments import curves, finetuning, frontier, memory, search_report, stability

# The CSV file of whole runs, the title of its plot, and whether only the best run of each optimizer is shown.
CURVES = {
    "curves_gpt2": ("GPT-2, 124M parameters, 300 steps of 65,536 tokens", True),
    "curves_ranks": ("GPT of 10.8M parameters, float32, on one, two and four ranks", False),
}
SEARCHES = ("search_small", "storage_small", "rules_small")
TITLE_OF_SEARCHES = "GPT of 10.8M parameters, 600 steps of 8,192 tokens"
TITLE_OF_CHAINS = "GPT of 10.8M parameters, 800 steps of 16,384 tokens"


def main(argv: Sequence[str] | None = None) -> None:
    """Draw every plot whose CSV file is in the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("docs/experiments"), help="folder of the CSV files")
    folder: Path = parser.parse_args(argv).folder
    for name, (title, is_best) in CURVES.items():
        if (path := folder / f"{name}.csv").exists():
            curves.write_plot(path, title, is_best)
    for name in SEARCHES:
        if (folder / f"{name}_curves.csv").exists():
            search_report.write_plot(folder / name, TITLE_OF_SEARCHES)
    if (folder / "chains_small_means.csv").exists():
        search_report.write_plot_of_chains(folder / "chains_small", TITLE_OF_CHAINS)
    for name, size in finetuning.SIZES.items():
        if (path := folder / f"finetuning_{name}.csv").exists():
            finetuning.write_plot(finetuning.read_csv(path), path.with_suffix(""), finetuning.title_of(size))
    if (path := folder / "frontier.csv").exists():
        frontier.write_plot(frontier.read(path), path.with_suffix(""))
    if (path := folder / "memory_llama.csv").exists():
        memory.write_plot(memory.read(path), path.with_suffix(""))
    if (path := folder / "sso_stability.csv").exists():
        rows = stability.read_csv(path)
        title = stability.title_of(stability.SMALL, int(rows[0]["steps"]))  # the committed runs were on a CPU
        stability.write_plot(rows, path.with_suffix(""), title)


if __name__ == "__main__":
    main()
