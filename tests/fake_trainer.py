"""Stand in for the training program in tests of searches: writes the metrics of a made-up run within milliseconds.

A file `calls` beside the folder of runs lists every call. The run whose name contains the text of the file `slow` there
never ends, and ends the search. The run whose name contains the first word of the file `fault` fails: the second word
is its exit code, and the others are its error.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path


def main(flags: list[str]) -> int:
    """Write metrics whose loss depends on the flags, and return an exit code."""
    values = dict(zip(flags[::2], flags[1::2], strict=False))
    output, steps, seed = Path(values["--output"]), int(values["--steps"]), int(values["--seed"])
    root = output.parent.parent
    with (root / "calls").open("a") as stream:
        stream.write(f"{output.name}{' resumed' if '--resume' in flags else ''}\n")
    (output / "checkpoints").mkdir(parents=True, exist_ok=True)
    if (root / "slow").exists() and (root / "slow").read_text() in output.name:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(stop(output)))
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)
    optimizer, chain = values["--optimizer"].removesuffix("_frontier"), values.get("--set", "").partition("=")[2]
    best = {"adamw": 0.004, "muon": 0.02, "normuon": 0.08}.get(optimizer, 0.02)
    loss = 2.0 + 0.1 * math.log2(float(values["--lr"]) / best) ** 2
    loss += 0.05 * math.log2(float(values["--rest-lr"]) / 0.002) ** 2 + 0.01 * seed
    loss += {"adamw": 0.3, "muon": 0.0, "normuon": -0.1}.get(optimizer, 0.1)
    loss += {"keller": 0.002, "17-17": 0.01, "fast": 0.0005 + 0.001 * (-1) ** seed}.get(chain, 0.0)
    loss -= 0.05 if values.get("--attention") == "per_head" else 0.0
    loss -= 0.02 if values["--rest-betas"] == "0.9,0.99" else 0.0
    write_metrics(output, steps, loss)
    fault = (root / "fault").read_text().split() if (root / "fault").exists() else ["none", "0"]
    if fault[0] in output.name:
        print(f"warning: first\nerror: {' '.join(fault[2:])}", file=sys.stderr)
        return int(fault[1])
    return 0


def stop(output: Path) -> int:
    """Leave a checkpoint as a run that is stopped does, and return its exit code."""
    (output / "checkpoints" / "step-1").mkdir()
    return 130


def write_metrics(output: Path, steps: int, loss: float) -> None:
    """Write `metrics.jsonl` with three validations that fall to `loss`."""
    facts = {"config": {"batch_size": 2}, "model": {"sequence_length": 8}, "training_tokens": 1000, "device": "cpu"}
    facts |= {"num_parameters": 10, "steps": steps, "name": "fake", "groups": [], "resumed_from": None}
    lines = [{"kind": "start", **facts}]
    for step in range(1, steps + 1):
        times = {"seconds": 0.5, "optimizer_seconds": 0.1}
        lines.append({"kind": "train", "step": step, "loss": loss, "gradient_norm": 1.0, "lr": 1.0, **times})
    points = (0, steps // 2, steps)
    lines += [{"kind": "validation", "step": step, "loss": loss + 1 - step / steps} for step in points]
    (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
