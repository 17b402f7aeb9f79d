"""Transfers between ranks: assembling sharded matrices where they are computed, and scattering back.

One stage goes through four phases. *Gather*: every holder sends its boxes to whoever computes the unit. *Compute* is
the caller's. *Scatter*: results go to every holder in the replica of who computed them. *Forward*: each of these passes
its part on to those who hold the same in other replicas. A transfer is one all-to-all with unequal splits, started
asynchronously, so that the next stage is gathered and the last one scattered while this one computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from muon_fsdp.comm.process_groups import Ranks, group_like, group_of, make_group, my_rank
from muon_fsdp.kernels.recorder import Recorder
from muon_fsdp.plan.layout import Box, Layout, local_layout
from muon_fsdp.plan.stages import Exchange, Piece, Stage, make_gather_stage

__all__ = ["gather_full", "like", "local", "scatter_full"]

STAGES_IN_FLIGHT = 2  # of one kind of transfer: a buffer is free again after so many stages


# --------------------------------------------------------------------------------------------- tensors and layouts


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, sharing memory with it; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layout_of(parameter: Tensor, replica_ranks: Ranks | None) -> Layout:
    """Return how a parameter lies on ranks.

    A plain parameter is replicated over `replica_ranks`. It is this rank's own without them, or if DDP ignores it.
    """
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        ranks = tuple(mesh.mesh.flatten().tolist())
        return Layout(ranks, tuple(mesh.mesh.shape), tuple(parameter.placements))
    if replica_ranks is not None and not getattr(parameter, "_ddp_ignored", False):
        return Layout(replica_ranks, (len(replica_ranks),), local_layout(0).placements)
    return local_layout(my_rank())


def layouts_of(parameters: Sequence[Tensor], replica_ranks: Ranks | None) -> list[Layout]:
    """The layouts of parameters; equal ones are one object, which planning relies on to be fast."""
    known: dict[Layout, Layout] = {}
    return [known.setdefault(layout, layout) for layout in (layout_of(p, replica_ranks) for p in parameters)]


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """A tensor that is distributed as the parameter and whose local part is `part`; no communication."""
    if not isinstance(parameter, DTensor):
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def can_take_part(value: Tensor, parameter: Tensor) -> bool:
    """Return whether `local_part` needs no communication."""
    if not isinstance(value, DTensor):
        return True
    if isinstance(parameter, DTensor):
        return layout_of(value, None) == layout_of(parameter, None)
    return value.device_mesh.size() == 1


def local_part(value: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a value for the parameter: of a whole one, its box; of one that lies alike, the local one."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return local(value)
    return value[_own_box(parameter)]


def _own_box(parameter: DTensor) -> tuple[slice, ...]:
    layout = layout_of(parameter, None)
    box = layout.boxes(tuple(parameter.shape))[layout.ranks.index(my_rank())]
    return box.within(Box((0,) * parameter.ndim, tuple(parameter.shape)))


# ------------------------------------------------------------------------------------------------------- transfers


class Transfer:
    """One all-to-all: pieces are packed into one buffer, sent, and received in another."""

    def __init__(
        self,
        exchange: Exchange,
        outgoing: Sequence[Sequence[Tensor]],  # per rank, what to send to it
        incoming: Sequence[Sequence[Piece]],  # per rank, what it sends
        dtype: torch.dtype,
        device: torch.device,
        recorder: Recorder,
        name: str,
    ) -> None:
        me = exchange.me
        self._recorder = recorder
        self._incoming = [piece for other, pieces in enumerate(incoming) if other != me for piece in pieces]
        send_sizes = [sum(map(torch.numel, many)) if other != me else 0 for other, many in enumerate(outgoing)]
        receive_sizes = [
            sum(piece.numel for piece in many) if other != me else 0 for other, many in enumerate(incoming)
        ]
        flat = [tensor.reshape(-1).to(dtype) for other, many in enumerate(outgoing) if other != me for tensor in many]
        send = recorder.buffer(f"{name} send", sum(send_sizes), dtype, device)
        if flat:
            torch.cat(flat, out=send)
        received = recorder.buffer(f"{name} receive", sum(receive_sizes), dtype, device)
        self._buffers: tuple[Tensor, ...] = (send, received)  # kept until the transfer has ended
        works: list[dist.Work] = []  # the one under way; not of this object, which a recording outlives
        self._works = works
        group = group_of(exchange.ranks, device)

        def start() -> None:
            work = dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=group, async_op=True)
            works[:] = [work]

        recorder.host(start)

    def wait(self) -> list[tuple[Piece, Tensor]]:
        """The pieces that arrived. On a GPU this makes the stream wait, not the host."""
        works = self._works
        self._recorder.host(lambda: works.pop().wait())
        parts = torch.split(self._buffers[1], [piece.numel for piece in self._incoming])
        self._buffers = ()
        return [(piece, part.view(piece.shape)) for piece, part in zip(self._incoming, parts, strict=True)]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class StageExchange:
    """The transfers of a stage. `shards` is the flat buffer of this rank's shards, in the precision that travels.

    Nothing is kept longer than it is needed: shards until they are sent, buffers until they have arrived.
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
        self._forward: Transfer | None = None
        self._updates: Tensor | None = None
        self._kept: list[tuple[Piece, Tensor]] = []  # what stays on this rank: of its shards, then of the results

    def start_gather(self) -> None:
        exchange, shards = self._exchange, self._shards
        assert shards is not None

        self._kept = [(piece, self._in_shard(piece, shards)) for piece in exchange.gather_receive[exchange.me]]
        if exchange.gathers:
            outgoing = [[self._in_shard(piece, shards) for piece in pieces] for pieces in exchange.gather_send]
            self._gather = self._transfer("gather", outgoing, exchange.gather_receive)
        self._shards = None

    def finish_gather(self) -> Tensor:
        """The whole units that this rank computes, in one flat buffer."""
        arrived = (self._gather.wait() if self._gather is not None else []) + self._kept
        units = torch.empty(self._stage.unit_numel, dtype=self._wire, device=self._device)
        for piece, part in arrived:
            self._stage.unit_slots[piece.unit].of(units)[piece.in_unit].copy_(part)
        self._gather, self._kept = None, []
        return units

    def start_scatter(self, results: Tensor) -> None:
        exchange = self._exchange
        # Every holder gets the same numbers, this rank too: replicas must not drift apart by a rounding.
        sent = results.to(self._wire) if exchange.scatters else results
        slots = self._stage.unit_slots
        outgoing = [[slots[piece.unit].of(sent)[piece.in_unit] for piece in pieces] for pieces in exchange.scatter_send]
        self._kept = list(zip(exchange.scatter_receive[exchange.me], outgoing[exchange.me], strict=True))
        self._result_dtype = sent.dtype
        if exchange.scatters:
            self._scatter = self._transfer("scatter", outgoing, exchange.scatter_receive)

    def finish_scatter(self) -> None:
        """Take the updates that came from this replica, and pass them on where there are others."""
        exchange, updates = self._exchange, self._arrived()
        self._updates = updates
        if exchange.forwards:
            outgoing = [[self._in_shard(piece, updates) for piece in pieces] for pieces in exchange.forward_send]
            self._forward = self._transfer("forward", outgoing, exchange.forward_receive)

    def _arrived(self) -> Tensor:
        """The updates that came from this replica; buffers of the scatter are free when this has returned."""
        arrived = (self._scatter.wait() if self._scatter is not None else []) + self._kept
        updates = torch.empty(self._stage.shard_numel, dtype=self._result_dtype, device=self._device)
        for piece, part in arrived:
            self._in_shard(piece, updates).copy_(part)
        self._scatter, self._kept = None, []
        return updates

    def finish_forward(self) -> Tensor:
        """The updates of all shards, in one flat buffer."""
        updates, self._updates = self._updates, None
        assert updates is not None
        for piece, part in self._forward.wait() if self._forward is not None else ():
            self._in_shard(piece, updates).copy_(part)
        self._forward = None
        return updates

    def _in_shard(self, piece: Piece, shards: Tensor) -> Tensor:
        return self._stage.shard_slots[self._stage.units[piece.unit].position].of(shards)[piece.in_shard]

    def _transfer(
        self, kind: str, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[Sequence[Piece]]
    ) -> Transfer:
        name = f"{kind} {self._name}"
        return Transfer(self._exchange, outgoing, incoming, self._wire, self._device, self._recorder, name)


def gather_full(parameter: Tensor) -> Tensor:
    """The whole of a parameter as a new plain tensor, on every rank that holds it and in its own precision.

    A collective: all ranks of the parameter's mesh must call it.
    """
    shard = local(parameter).detach()
    if not isinstance(parameter, DTensor):
        return shard.clone()
    layout = layout_of(parameter, None)
    if len(layout.ranks) > 1:
        make_group(tuple(sorted(layout.ranks)), shard.device, group_like(parameter, None))
    stage = make_gather_stage(tuple(parameter.shape), layout, my_rank())
    exchange = StageExchange(stage, shard.reshape(-1))
    exchange.start_gather()
    return stage.unit_slots[0].of(exchange.finish_gather())


def scatter_full(parameter: Tensor, whole: Tensor) -> None:
    """Write this rank's box of `whole` into a parameter; no communication."""
    local(parameter).copy_(local_part(whole, parameter))


def add_up(tensors: Sequence[Tensor], ranks: tuple[int, ...], recorder: Recorder) -> list[Tensor]:
    """The sums of tensors over ranks, by one collective; all of them of one precision and on one device."""
    sizes = [tensor.numel() for tensor in tensors]
    flat = recorder.buffer("sums", sum(sizes), tensors[0].dtype, tensors[0].device)
    torch.cat([tensor.reshape(-1) for tensor in tensors], out=flat)
    group = group_of(ranks, flat.device)
    recorder.host(lambda: dist.all_reduce(flat, group=group))
    parts = torch.split(flat.clone(), sizes)  # the buffer is used again
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
