"""Prints the memory of one step beside AdamW's: `python -m tests.gpu.memory_table` on a GPU."""

from __future__ import annotations

from tests.gpu import nccl_cases
from tests.pool import RankPool

MIB = 2**20


def main() -> None:
    pool = RankPool("nccl")
    print(f"{'optimizer':14} {'max_stage_bytes':>16} {'weights MiB':>12} {'state MiB':>10} {'peak of step MiB':>17}")
    rows = [("adamw", None), ("adamw fused", None), *(("muon", bound) for bound in (None, 256 * MIB, 64 * MIB))]
    for kind, bound in rows:
        result = pool.run(2, nccl_cases.peak_of_step, kind, 2048, 12, bound)[0]
        values = [result[name] / MIB for name in ("weights", "state", "peak of step")]
        shown = f"{bound // MIB} MiB" if bound else "chosen" if kind == "muon" else "-"
        print(f"{kind:14} {shown:>16} {values[0]:12.0f} {values[1]:10.0f} {values[2]:17.0f}", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
