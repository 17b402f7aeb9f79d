"""Writes docs/contributing/faults.md from the promises in tests/test_faults_*.py; the introduction is written by hand.

python docs/generate_faults.py            # write the page
python docs/generate_faults.py --check    # exit with 1 if the page is not what would be written
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from generated_page import write_or_check

PAGE = Path(__file__).with_name("contributing") / "faults.md"
TESTS = Path(__file__).parents[1] / "tests"

INTRODUCTION = """\
# What can go wrong, and what happens

Users look up messages in [errors.md](../errors.md).

## What is noticed, when and how

| what | when | how |
|---|---|---|
| Parameters, options, rules or their declarations that differ between ranks | before every step, in one small reduction | all ranks raise, and nothing has changed |
| Gradients that are not finite | before every step | all ranks do what `nonfinite` says |
| Replicas whose weights, state or gradients differ | before the first update, and before the first one after `load_state_dict` | all ranks raise |
| Per-matrix state that was written differently on ranks | before the next step | all ranks raise |
| A state dict of another rank's shards | in `load_state_dict` | an error |
| A checkpoint that some ranks have loaded and others not | before the next step | a warning |
| A learning rate of AdamW for matrices | when the optimizer is built, and when a group is added | a warning |
| A key that resembles an option | in constructors, groups and overrides; before the next step if it was written into a group | an error; a warning |
| Steps without any gradient | at the second in succession | a warning, once |
| Gradients that vanish while they accumulate | in the next call of `step()` | a warning, once |
| Another optimizer with the same parameters | between the first step and the second | a warning, once |
| What a rule leaves out, returns or does not declare | in the first step of a plan; declarations in `register` | an error that names the rule and the method |
| A rule that raises on one rank | at the end of this step there, before the next step elsewhere | all ranks raise. The step was applied in part |
| Updates that are not finite though gradients are | in the first step of a plan; with `nonfinite="raise"` in every step | an error that names the rule |
| Random numbers of torch where several ranks compute one matrix | in the first step of a plan | an error |
| Gradients, state or options that changed between backward and `step()`, with `overlap="backward"` | in `step()` | what was computed in backward is discarded, and computed again |
| Parameters or state with another shape, precision or device | before every step | the step is planned anew, or an error |
| A kernel that this GPU or this Triton can't run | at its first use, by a small product | a warning, once; PyTorch's library computes instead |
| Matrices whose gradients are zero | in every step, from the norm of their momentum | `momentum_eps` scales their updates down |

A test checks each of the lines below; its name is in the last column.

<!-- Written by docs/generate_faults.py from tests/test_faults_*.py: edit those, then run it. -->
"""


def promises(file: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (when, then, name of the test) for every promise in a file of tests."""
    for node in ast.parse(file.read_text()).body:
        for call in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "promise":
                when, then = (ast.literal_eval(argument) for argument in call.args)
                yield when, then, node.name


def section(file: Path) -> str:
    """Return the heading of a file, from the first line of its docstring, and its table."""
    docstring = ast.get_docstring(ast.parse(file.read_text()))
    if not docstring:
        raise ValueError(f"{file.name} needs a docstring: its first line is a heading of docs/contributing/faults.md")
    lines = [f"## {docstring.splitlines()[0].rstrip('.')}", "", "| when | what happens | test |", "|---|---|---|"]
    for when, then, test in promises(file):
        lines.append(f"| {when} | {then} | `{test}` |")
    return "\n".join(lines)


def page() -> str:
    """Return the whole page."""
    sections = [section(file) for file in sorted(TESTS.glob("test_faults_*.py"))]
    return "\n\n".join([INTRODUCTION.rstrip(), *sections]) + "\n"


def main(argv: Sequence[str] | None = None, path: Path = PAGE) -> int:
    """Write the page, or check it, and return the exit status."""
    return write_or_check(path, page(), argv)


if __name__ == "__main__":
    raise SystemExit(main())
