"""Give every rank the rows of weights that the other ranks have updated, if their state is sharded and they are not."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from muon_fsdp.comm.process_groups import Ranks
from muon_fsdp.comm.recorder import Recorder
from muon_fsdp.comm.transfers import start_all_gather
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.plan.slices import Bucket, make_buckets


class WeightGather:
    """The all-gathers that end a step with `shard_state=True`.

    Args:
        records: one per parameter; those whose state follows the parameter are left out.
        max_bytes: the bytes of a bucket of weights, unless one weight is larger.
    """

    def __init__(self, records: Sequence[ParameterRecord], max_bytes: int) -> None:
        self._records = records
        alike: dict[tuple[Ranks, torch.device, torch.dtype], list[ParameterRecord]] = defaultdict(list)
        for record in records:
            if record.shards_state and len(record.layout.ranks) > 1 and record.tensor.numel() > 0:
                alike[(record.layout.ranks, record.tensor.device, record.tensor.dtype)].append(record)
        self._buckets: list[tuple[Ranks, Bucket]] = [
            (ranks, bucket)
            for (ranks, _, dtype), members in alike.items()
            for bucket in make_buckets(
                [(record.position, record.shape) for record in members], len(ranks), max_bytes // dtype.itemsize
            )
        ]
        self.groups: list[tuple[Ranks, torch.device]] = [(ranks, device) for ranks, device, _ in alike]

    def tensors(self) -> list[Tensor]:
        """Return the weights, whose addresses a captured step keeps."""
        return [self._records[rows.position].tensor for _, bucket in self._buckets for rows in bucket.weights]

    def to_run(self, updated: Collection[int]) -> list[int]:
        """Return the numbers of the buckets with an updated parameter; ranks agree on these."""
        return [
            number
            for number, (_, bucket) in enumerate(self._buckets)
            if any(rows.position in updated for rows in bucket.weights)
        ]

    def run(self, numbers: Sequence[int], recorder: Recorder) -> None:
        """Exchange the rows of these buckets by all-gathers; while one bucket is on its way, the next is packed."""
        waiting: _Running | None = None
        for turn, number in enumerate(numbers):
            ranks, bucket = self._buckets[number]
            running = _Running(ranks, bucket, self._records, recorder, f"weights {turn % 2}")
            if waiting is not None:
                waiting.finish()
            waiting = running
        if waiting is not None:
            waiting.finish()


class _Running:
    """The all-gather of one bucket, which starts when the object is made."""

    def __init__(
        self, ranks: Ranks, bucket: Bucket, records: Sequence[ParameterRecord], recorder: Recorder, name: str
    ) -> None:
        self._bucket, self._records = bucket, records
        first = records[bucket.weights[0].position].tensor
        flat = recorder.buffer(name, len(ranks) * bucket.slice_numel, first.dtype, first.device)
        self._slices = flat.view(len(ranks), bucket.slice_numel)
        parts = [(rows.offset, records[rows.position].part()) for rows in bucket.weights]
        own = self._slices[records[bucket.weights[0].position].number_in_layout]
        slots = [own[offset : offset + part.numel()].view(part.shape) for offset, part in parts]
        torch._foreach_copy_(slots, [part for _, part in parts])
        self._gather = start_all_gather(ranks, "", flat, recorder)

    def finish(self) -> None:
        """Wait for the all-gather, and copy the rows of all ranks into the weights."""
        self._gather.finish()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for rows in self._bucket.weights:
            weight, size = self._records[rows.position].tensor, rows.rows_per_rank * rows.row_numel
            num_full = rows.shape[0] // rows.rows_per_rank  # ranks with as many rows as any other
            whole = (num_full, rows.rows_per_rank, *rows.shape[1:])
            targets.append(weight[: num_full * rows.rows_per_rank].view(whole))
            sources.append(self._slices[:num_full, rows.offset : rows.offset + size].view(whole))
            rest = (rows.shape[0] - num_full * rows.rows_per_rank, *rows.shape[1:])
            if rest[0] > 0:
                targets.append(weight[-rest[0] :])
                end = rows.offset + math.prod(rest)
                sources.append(self._slices[num_full, rows.offset : end].view(rest))
        torch._foreach_copy_(targets, sources)
