"""`muon-fsdp doctor`: show versions, devices, kernels and self-tests, to be pasted into a bug report."""

from __future__ import annotations

import sys
import textwrap
from collections import defaultdict
from dataclasses import asdict
from typing import Annotated, Any

import typer

from muon_fsdp.cli.output import print_json, status
from muon_fsdp.training.terminal import Color, colored, import_torch, print_table

_COLORS: dict[str, Color] = {"ok": "green", "warning": "yellow", "wrong": "red"}


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Skip the step on two processes.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Check what is installed, which kernels run, and whether results are right.

    Each finding says what to do. The exit status is 1 if something is wrong. No network but loopback is used.
    """
    import_torch("muon-fsdp doctor")
    from muon_fsdp.benchmarks.machine import best_device, describe, without_home
    from muon_fsdp.cli import checks

    with status("checking this machine ..."):
        found = checks.findings(quick=quick)
        content: dict[str, Any] = without_home(
            {
                **describe(),
                "kernels": checks.kernel_choices(best_device()),
                "findings": [asdict(finding) for finding in found],
                "ok": not any(finding.status == "wrong" for finding in found),
            }
        )
    if json:
        print_json(content)
    else:
        _show(content)
    if not content["ok"]:
        raise typer.Exit(1)


def _show(content: dict[str, Any]) -> None:
    """Print the report as text."""
    print_table("Versions", ("package", "version"), list(content["versions"].items()), left=2)
    for device in content["devices"]:
        print(device)
    available = [name for name, there in content["backends"].items() if there]
    print(f"backends of torch.distributed: {', '.join(available) or 'none'}")
    for name, value in content["environment"].items():
        print(f"{name}={value}")
    print()
    print("Which kernel computes a product, and why")
    products: dict[str, list[str]] = defaultdict(list)
    for choice in content["kernels"]:
        products[f"{choice['kernel']}: {choice['why']}"].append(f"{choice['product']}, {choice['dtype']}")
    for why, those in products.items():
        _print_wrapped("", why)
        print("\n".join(f"    {product}" for product in those))
    print("\nFindings")
    for finding in content["findings"]:
        _print_wrapped(f"{finding['status']:8} ", f"{finding['name']}: {finding['detail']}", _COLORS[finding["status"]])
        if finding["advice"]:
            _print_wrapped("", f"-> {finding['advice']}")
    wrong = [finding["name"] for finding in content["findings"] if finding["status"] == "wrong"]
    if content["ok"]:
        print(f"\n{colored('Everything works.', 'green', sys.stdout)}")
    else:
        print(f"\n{colored('Something is wrong:', 'red', sys.stdout)} {'; '.join(wrong)}")


def _print_wrapped(label: str, text: str, color: Color | None = None) -> None:
    """Print a text after a label, which may be coloured, wrapped to 80 columns, with further lines indented."""
    indent = 9 * " " if label or text.startswith("->") else "  "
    lines = textwrap.fill(text, 80, initial_indent=label or indent, subsequent_indent=indent, break_long_words=False)
    print(lines if color is None else colored(label, color, sys.stdout) + lines.removeprefix(label))
