"""Send shards to the ranks that compute whole matrices, and send the results back.

A stage passes through four phases:

1. Gather: every holder sends its boxes of a unit to the owner of the unit.
2. Compute: the caller computes the units that this rank owns.
3. Scatter: the owner sends each element of its results to one of the ranks that hold it.
4. Forward: the ranks that hold the same boxes exchange what they received.

Gather and scatter are one asynchronous all-to-all each, with unequal splits. Forward is one all-gather, in place. So
while one stage computes, the next is gathered and the previous one scattered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from muon_fsdp.comm.dtensors import device_of, layout_of, local, local_part
from muon_fsdp.comm.process_groups import Ranks, group_like, group_of, make_group, my_rank
from muon_fsdp.comm.recorder import Recorder
from muon_fsdp.plan.packing import Copies, Packing
from muon_fsdp.plan.stages import Stage, make_gather_stage

# A collective that is running, and its process group. `destroy_process_group` drops the group, and gloo would wait for
# the collective, which other ranks may never join.
_Work: TypeAlias = tuple[dist.Work, dist.ProcessGroup]
STAGES_IN_FLIGHT = 2  # stages that use one phase's buffers in turn: a buffer is reused after this many stages


class Collective:
    """A collective that runs asynchronously, which starts when the object is made.

    Args:
        call: issues the collective in a process group, and returns its `dist.Work`. It keeps the buffers alive.
        ranks: the ranks that take part.
        device: the device of the buffers.
        purpose: the purpose of the process group.
        recorder: records the calls for CUDA graphs.
    """

    def __init__(
        self,
        call: Callable[[dist.ProcessGroup], dist.Work | None],
        ranks: Ranks,
        device: torch.device,
        purpose: str,
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        # Holds the collective that is running. A list, because recorded calls must not keep this object alive.
        works: list[_Work] = []
        self._works = works

        def start() -> None:
            group = group_of(ranks, device, purpose)  # found at every replay: it may have been made anew
            work = call(group)
            assert work is not None
            works[:] = [(work, group)]

        recorder.host(start)

    def finish(self) -> None:
        """Wait for the collective; on a GPU the current stream waits, and the host does not."""
        works = self._works

        def wait() -> None:
            work, _group = works.pop()
            work.wait()

        self._recorder.host(wait)

    def is_completed(self) -> bool:
        """Return whether the collective has finished, without waiting for it."""
        return all(work.is_completed() for work, _ in self._works)


class Transfer:
    """One asynchronous `all_to_all_single`, which starts when the object is made.

    Args:
        ranks: the ranks that take part.
        source: the flat buffer to send from.
        outgoing: how its pieces lie in the messages to send.
        incoming: how pieces of the buffer that `finish` fills lie in the messages to receive.
        recorder: provides the buffers, and records the calls for CUDA graphs.
        name: the name of the buffers in the recorder.
        purpose: the purpose of the process group.
    """

    def __init__(
        self,
        ranks: Ranks,
        source: Tensor,
        outgoing: Packing,
        incoming: Packing,
        recorder: Recorder,
        name: str,
        purpose: str,
    ) -> None:
        self._incoming = incoming
        send = recorder.buffer(f"{name} send", outgoing.numel, source.dtype, source.device)
        _copy(outgoing.copies, outgoing.copies.in_second(send), outgoing.copies.in_first(source))
        received = recorder.buffer(f"{name} receive", incoming.numel, source.dtype, source.device)
        self._buffers: tuple[Tensor, ...] = (send, received)  # must not be freed before the transfer has finished
        sizes = list(incoming.sizes), list(outgoing.sizes)
        self._collective = Collective(
            lambda group: dist.all_to_all_single(received, send, *sizes, group=group, async_op=True),
            ranks,
            source.device,
            purpose,
            recorder,
        )

    def finish(self, target: Tensor) -> None:
        """Wait for the all-to-all, and copy what arrived into a flat buffer."""
        self._collective.finish()
        copies = self._incoming.copies
        _copy(copies, copies.in_first(target), copies.in_second(self._buffers[1]))
        self._buffers = ()

    def is_completed(self) -> bool:
        """Return whether the all-to-all has finished, without waiting for it."""
        return self._collective.is_completed()


def start_all_gather(ranks: Ranks, purpose: str, buffer: Tensor, recorder: Recorder) -> Collective:
    """Start one `all_gather_into_tensor` in place.

    Args:
        ranks: the ranks that take part, sorted.
        purpose: the purpose of their process group.
        buffer: a flat buffer from the recorder. It has one slice per rank, of which this rank has written its own.
        recorder: records the calls for CUDA graphs.
    """
    own = torch.chunk(buffer, len(ranks))[ranks.index(my_rank())]
    return Collective(
        lambda group: dist.all_gather_into_tensor(buffer, own, group=group, async_op=True),
        ranks,
        buffer.device,
        purpose,
        recorder,
    )


def start_sum(ranks: Ranks, purpose: str, buffer: Tensor, recorder: Recorder) -> Collective:
    """Start one `all_reduce` that sums a flat buffer from the recorder over ranks, in place."""
    return Collective(
        lambda group: dist.all_reduce(buffer, group=group, async_op=True), ranks, buffer.device, purpose, recorder
    )


def _copy(copies: Copies, targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy views of one buffer into views of another, the contiguous ones in one launch where that is possible."""
    num_dense = copies.num_dense
    if num_dense:
        torch._foreach_copy_(targets[:num_dense], sources[:num_dense])
    if num_dense < len(targets):  # by themselves: one view that is not contiguous would give each view a launch
        torch._foreach_copy_(targets[num_dense:], sources[num_dense:])


class StageExchange:
    """The transfers of one stage: gather, scatter and forward.

    It drops every buffer as soon as possible: shards once they are sent, receive buffers once they are copied out.

    Args:
        stage: what this rank sends, receives and computes.
        shards: (stage.shard_numel,), this rank's shards, in the precision in which tensors are sent.
        recorder: records the calls for CUDA graphs; by default they only run.
        number: the number of the stage in the step, which selects the buffers.
    """

    def __init__(self, stage: Stage, shards: Tensor, recorder: Recorder | None = None, number: int = 0) -> None:
        assert stage.exchange is not None
        self._stage, self._exchange = stage, stage.exchange
        self._shards: Tensor | None = shards
        self._device, self._wire = shards.device, shards.dtype
        self._recorder = recorder or Recorder()
        self._name = f"{number % STAGES_IN_FLIGHT}"
        self._gather: Transfer | None = None
        self._scatter: Transfer | None = None
        self._forward: Collective | None = None
        self._updates: Tensor | None = None
        self._kept: list[Tensor] = []  # pieces that need no transfer: first of shards, then of results

    def start_gather(self) -> None:
        """Start sending this rank's shards to the owners of their units."""
        exchange, shards = self._exchange, self._shards
        assert shards is not None
        packings = self._stage.packings
        self._kept = packings.gather_own.in_first(shards)
        if exchange.gathers:
            self._gather = self._transfer("gather", shards, packings.gather_send, packings.gather_receive)
        self._shards = None

    def finish_gather(self) -> Tensor:
        """Wait for the gather.

        Returns:
            (stage.unit_numel,), the whole units that this rank computes.
        """
        units = torch.empty(self._stage.unit_numel, dtype=self._wire, device=self._device)
        if self._gather is not None:
            self._gather.finish(units)
        own = self._stage.packings.gather_own
        _copy(own, own.in_second(units), self._kept)
        self._gather, self._kept = None, []
        return units

    def start_scatter(self, results: Tensor) -> None:
        """Start sending results to the ranks that hold them.

        Args:
            results: (stage.unit_numel,), the updates of the units that this rank computes.
        """
        exchange = self._exchange
        # This rank rounds its own results too. Otherwise replicas would drift apart by the rounding of the transfer.
        sent = results.to(self._wire) if exchange.scatters else results
        packings = self._stage.packings
        self._kept = packings.scatter_own.in_second(sent)
        self._result_dtype = sent.dtype
        if exchange.scatters:
            self._scatter = self._transfer("scatter", sent, packings.scatter_send, packings.scatter_receive)

    def finish_scatter(self) -> None:
        """Wait for the scatter, and start exchanging slices with the ranks that hold the same shards, if any do."""
        exchange, numel = self._exchange, self._stage.update_numel
        if exchange.forwards:
            updates = self._recorder.buffer(f"updates {self._name}", numel, self._result_dtype, self._device)
        else:
            updates = torch.empty(numel, dtype=self._result_dtype, device=self._device)
        if self._scatter is not None:
            self._scatter.finish(updates)
        own = self._stage.packings.scatter_own
        _copy(own, own.in_first(updates), self._kept)
        self._scatter, self._kept, self._updates = None, [], updates
        if exchange.forwards:
            self._forward = start_all_gather(exchange.peers, exchange.forward_purpose, updates, self._recorder)

    def finish_forward(self) -> Tensor:
        """Wait for the forward.

        Returns:
            (stage.update_numel,), the updates of all shards of this rank.
        """
        updates, self._updates = self._updates, None
        assert updates is not None
        if self._forward is not None:
            self._forward.finish()
        self._forward = None
        return updates

    def _transfer(self, kind: str, source: Tensor, outgoing: Packing, incoming: Packing) -> Transfer:
        """Start the all-to-all of one phase."""
        exchange, name = self._exchange, f"{kind} {self._name}"
        purpose = exchange.scatter_purpose if kind == "scatter" else ""
        return Transfer(exchange.ranks, source, outgoing, incoming, self._recorder, name, purpose)


def gather_full(parameter: Tensor) -> Tensor:
    """Gather a sharded parameter into a new plain tensor of its whole shape and dtype, on every rank of its mesh.

    This is a collective: all ranks of the parameter's device mesh must call it.
    """
    shard = local(parameter).detach()
    if not isinstance(parameter, DTensor):
        return shard.clone()
    layout = layout_of(parameter, None)
    device = device_of(parameter)
    if len(layout.ranks) > 1:
        make_group(tuple(sorted(layout.ranks)), device, group_like(parameter, None))
    stage = make_gather_stage(tuple(parameter.shape), layout, my_rank())
    exchange = StageExchange(stage, shard.to(device).reshape(-1))
    exchange.start_gather()
    return stage.unit_slots[0].of(exchange.finish_gather()).to(shard.device)


def scatter_full(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's box of `whole` into the parameter, in place and without communication.

    Args:
        parameter: a DTensor or a plain tensor.
        whole: a plain tensor of the parameter's whole shape, equal on all ranks.
    """
    local(parameter).copy_(local_part(whole, parameter))


def add_up(tensors: Sequence[Tensor], ranks: tuple[int, ...], recorder: Recorder) -> list[Tensor]:
    """Sum tensors over ranks by one all-reduce.

    Args:
        tensors: of any shapes, all of one dtype and on one device.
        ranks: the ranks of a group that `make_group` has made.
        recorder: provides the buffer, and records the call for CUDA graphs.

    Returns:
        The sums, new tensors of the same shapes.
    """
    sizes = [tensor.numel() for tensor in tensors]
    flat = recorder.buffer("sums", sum(sizes), tensors[0].dtype, tensors[0].device)
    torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat)
    recorder.host(lambda: dist.all_reduce(flat, group=group_of(ranks, flat.device)))
    parts = torch.split(flat.clone(), sizes)  # a copy, because the next call overwrites the buffer
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def largest_of(numbers: Tensor, ranks: Ranks, purpose: str = "") -> Tensor:
    """Return the element-wise maximum over ranks, by one all-reduce in the group that `make_group` has made."""
    largest = numbers.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group_of(ranks, numbers.device, purpose))
    return largest


def of_all(numbers: Tensor, ranks: Ranks, purpose: str = "") -> Tensor:
    """Return the numbers of all ranks, stacked in ascending order of ranks, by one all-reduce of zeros and own ones."""
    table = numbers.new_zeros(len(ranks), *numbers.shape)
    table[sorted(ranks).index(my_rank())] = numbers
    dist.all_reduce(table, group=group_of(ranks, numbers.device, purpose))
    return table


def texts_of_all(texts: list[str], ranks: Ranks, device: torch.device) -> list[list[str]]:
    """Return the texts of all ranks in ascending order of ranks, through the group that `make_group` has made."""
    table: list[list[str]] = [[] for _ in ranks]
    dist.all_gather_object(table, texts, group=group_of(ranks, device))
    return table


def sum_over_axis(values: Tensor, mesh: DeviceMesh, axis: int) -> None:
    """Sum values in place over the ranks along one axis of a mesh."""
    dist.all_reduce(values, group=mesh.get_group(axis))
