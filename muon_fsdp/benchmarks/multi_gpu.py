"""Compare optimizers on several ranks: `torchrun ... -m muon_fsdp.cli bench --multi-gpu`."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muon_fsdp.benchmarks.contestants import OURS
from muon_fsdp.benchmarks.live import LiveLine
from muon_fsdp.benchmarks.ranks import Ranks, RanksError
from muon_fsdp.benchmarks.sharded_contestants import contestants
from muon_fsdp.benchmarks.sharded_training import Workload, measure, measure_network, workloads_on
from muon_fsdp.text import plain_table

NETWORK_BYTES = {"cuda": 2**28, "cpu": 2**20}  # that a rank exchanges to measure the network
SHARED_GPU = "Ranks share a GPU and exchange data over sockets: the figures show that it runs, not how fast it is."


class MultiGpu:
    """A comparison on the ranks of a job; every rank makes one and runs it.

    Args:
        ranks: all ranks of the job.
        device: "cuda" or "cpu".
        models: short names of the models to measure; none stands for all.
        repeats: how many steps are timed for each figure.
        save: called with all figures so far whenever there is a new one.
        show: called with a text whenever a part has been measured.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: str,
        models: Sequence[str],
        repeats: int,
        save: Callable[[Mapping[str, Any]], None],
        show: Callable[[str], None],
    ) -> None:
        self.figures: dict[str, Any] = {"world_size": ranks.place.size, "repeats": repeats}
        self._ranks, self._repeats, self._save, self._show = ranks, repeats, save, show
        self._device, self._live = device, LiveLine(None if ranks.place.rank == 0 else io.StringIO())
        workloads = workloads_on(device)
        self._workloads = {name: it for name, it in workloads.items() if not models or name.split(",")[0] in models}

    def run(self) -> None:
        """Measure the network and every contestant on every model, and pass on each figure at once."""
        names: list[str] = self._ranks.from_first(list(contestants(self._device)))
        self._measure_network()
        entries = self.figures["models"] = []
        for number, (model, workload) in enumerate(self._workloads.items(), start=1):
            self._live.begin("multi-gpu", number, len(self._workloads), model)
            entry: dict[str, Any] = {"model": model, "optimizers": {}, "notes": {}}
            entries.append(entry)
            for name in names:
                self._live.running(name)
                try:
                    by_rank = self._ranks.run(measure, workload, name, self._repeats)
                except RanksError as failure:  # the others are still measured
                    entry["notes"][name] = f"fails: {failure}"
                else:
                    entry["optimizers"][name] = combine(by_rank, workload)
                self._save(self.figures)
            self._live.clear()
            self._show(table(entry))

    def _measure_network(self) -> None:
        self._live.show("network ...")
        try:
            speeds = self._ranks.run(measure_network, NETWORK_BYTES[self._device])
        except RanksError as failure:
            self.figures["network_note"] = f"fails: {failure}"
            self._show(f"The network could not be measured: {failure}")
        else:
            if None not in speeds:
                self.figures["network_gigabytes_per_second"] = min(speeds)
                self._show(f"network: the slowest rank sends {min(speeds):.3g} GB/s in an all-to-all")
        self._save(self.figures)

    @property
    def ours_failed(self) -> bool:
        """Return whether one of our own optimizers failed on some model."""
        return any(name.startswith(OURS) for entry in self.figures["models"] for name in entry["notes"])


def combine(by_rank: Sequence[Mapping[str, Any]], workload: Workload) -> dict[str, Any]:
    """Combine what the ranks measured. The slowest rank decides about times, and the fullest one about memory.

    Args:
        by_rank: the results of `measure`.
        workload: what was measured.
    """
    training = _slowest(by_rank, "training_milliseconds")
    without = _slowest(by_rank, "backward_milliseconds")
    tokens = len(by_rank) * workload.sequences * workload.config.sequence_length
    found: dict[str, Any] = {
        "training_milliseconds": training,
        "tokens_per_second": 1e3 * tokens / training,
        "optimizer_share": max(0.0, 1 - without / training),
        "first_step_seconds": max(one["first_step_seconds"] for one in by_rank),
    }
    if "step_milliseconds" in by_rank[0]:
        found["step_milliseconds"] = _slowest(by_rank, "step_milliseconds")
        found["step_milliseconds_by_rank"] = [statistics.median(one["step_milliseconds"]) for one in by_rank]
    for name in ("peak_allocated_gigabytes", "peak_reserved_gigabytes"):
        if name in by_rank[0]:
            found[name] = max(one[name] for one in by_rank)
    return found


def _slowest(by_rank: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the median of a time over repetitions, each of which takes as long as its slowest rank."""
    slowest: list[float] = [max(times) for times in zip(*(one[name] for one in by_rank), strict=True)]
    return statistics.median(slowest)


def table(entry: Mapping[str, Any]) -> str:
    """Return the figures of one model as a text table, with a line for each contestant that failed."""
    header = ["optimizer", "step ms", "ranks, ms", "training ms", "tokens/s", "optimizer %", "peak GB", "first s"]
    rows = []
    for name, one in entry["optimizers"].items():
        by_rank = one.get("step_milliseconds_by_rank")
        peak = one.get("peak_allocated_gigabytes")
        rows.append(
            [
                name,
                f"{one['step_milliseconds']:.2f}" if by_rank else "-",
                f"{min(by_rank):.2f} to {max(by_rank):.2f}" if by_rank else "-",
                f"{one['training_milliseconds']:.1f}",
                f"{one['tokens_per_second']:,.0f}",
                f"{100 * one['optimizer_share']:.1f}",
                "-" if peak is None else f"{peak:.2f}",
                f"{one['first_step_seconds']:.2f}",
            ]
        )
    notes = [f"{name}: {note}" for name, note in entry["notes"].items()]
    return "\n".join([entry["model"], plain_table(header, rows), *notes])
