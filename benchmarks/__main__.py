"""Speed of orthogonalization, of whole steps and of the element-wise pair, beside PyTorch's and other libraries."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks import orthogonalization, pair, steps
from benchmarks.timing import Ceilings, describe_machine

TABLES = ("orthogonalization", "step", "pair")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES), help="what to measure")
    parser.add_argument("--shapes", nargs="+", help="only these, as 48x768x768")
    parser.add_argument("--models", nargs="+", help="only these: gpt2-124m, 1.3b, llama-8b")
    parser.add_argument("--repeats", type=int, default=10 if device == "cuda" else 3, help="timings; medians are shown")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads, where there is no GPU")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    if device == "cpu":
        torch.set_num_threads(args.threads)
    machine = describe_machine(device, args.threads)
    print(", ".join(machine.values()), flush=True)
    ceilings = Ceilings.measure(device)
    print(f"ceilings: {ceilings.flops / 1e12:.2f} TFLOP/s, {ceilings.bytes / 1e12:.3f} TB/s", flush=True)
    report: dict[str, object] = {**machine, "ceilings": {"flops": ceilings.flops, "bytes": ceilings.bytes}}
    texts = []
    if "orthogonalization" in args.tables:
        results = orthogonalization.measure(device, ceilings, args.repeats, args.shapes)
        report["orthogonalization"] = results
        texts.append("Orthogonalization, five steps\n" + orthogonalization.show(results))
    if "step" in args.tables:
        results = steps.measure(device, ceilings, args.repeats, args.models)
        report["step"] = results
        texts.append("One step\n" + steps.show(results))
    if "pair" in args.tables:
        results = pair.measure(device, ceilings, args.repeats)
        report["pair"] = results
        texts.append("The element-wise pair\n" + pair.show(results))
    print("\n" + "\n\n".join(texts))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
