"""Give every rank the rows of weights that the other ranks have updated, if their state is sharded and they are not."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

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
        waiting: Iterator[None] = iter(())
        for turn, number in enumerate(numbers):
            running = self._exchange(*self._buckets[number], recorder, f"weights {turn % 2}")
            next(running)
            next(waiting, None)
            waiting = running
        next(waiting, None)

    def _exchange(self, ranks: Ranks, bucket: Bucket, recorder: Recorder, name: str) -> Iterator[None]:
        """Start the all-gather of one bucket; then wait for it, and copy the rows of all ranks into the weights."""
        records = [self._records[rows.position] for rows in bucket.weights]
        first = records[0]
        flat = recorder.buffer(name, len(ranks) * bucket.slice_numel, first.tensor.dtype, first.tensor.device)
        slices = flat.view(len(ranks), bucket.slice_numel)
        own, parts = slices[first.number_in_layout], [record.part() for record in records]
        slots = [
            own[rows.offset : rows.offset + part.numel()].view(part.shape)
            for rows, part in zip(bucket.weights, parts, strict=True)
        ]
        torch._foreach_copy_(slots, parts)
        gather = start_all_gather(ranks, "", flat, recorder)
        yield
        gather.finish()
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for rows, record in zip(bucket.weights, records, strict=True):
            weight, size = record.tensor, rows.rows_per_rank * rows.row_numel
            num_full = rows.shape[0] // rows.rows_per_rank  # ranks with as many rows as any other
            whole = (num_full, rows.rows_per_rank, *rows.shape[1:])
            targets.append(weight[: num_full * rows.rows_per_rank].view(whole))
            sources.append(slices[:num_full, rows.offset : rows.offset + size].view(whole))
            rest = (rows.shape[0] - num_full * rows.rows_per_rank, *rows.shape[1:])
            if rest[0] > 0:
                targets.append(weight[-rest[0] :])
                end = rows.offset + math.prod(rest)
                sources.append(slices[num_full, rows.offset : end].view(rest))
        torch._foreach_copy_(targets, sources)
