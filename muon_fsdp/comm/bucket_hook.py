"""Tell listeners about gradients that DistributedDataParallel has reduced, while backward still runs.

DDP writes `p.grad` when backward ends. Before that, only a communication hook knows when a bucket of gradients has been
reduced. Ours reduces a bucket as DDP itself does, operation by operation, so that gradients are the same bit for bit.

`from __future__ import annotations` is left out, because DDP compares the annotations of a hook with classes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

HAS_HOOK = "DistributedDataParallel has another communication hook"


class Listener(Protocol):
    """An object that is told about the gradients of DDP."""

    def reduced(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Note parameters with their reduced gradients, views of a bucket; called in any thread.

        On a GPU the current stream waits for the reduction. No kernel should be launched on it.
        """

    def written(self, parameters: Sequence[Tensor]) -> None:
        """Note that DDP has written the gradients of some parameters to `p.grad`; called at the end of backward."""


class BucketHook:
    """The communication hook of one DDP wrapper. It stays there: DDP can't remove a hook.

    Args:
        wrapper: the wrapper; None for a copy of a wrapper, whose hook is never called.
    """

    def __init__(self, wrapper: DistributedDataParallel | None = None) -> None:
        self._wrapper = ref(wrapper) if wrapper is not None else None
        self._group: dist.ProcessGroup | None = wrapper.process_group if wrapper is not None else None
        self.listeners: WeakSet[Any] = WeakSet()
        self._parameters: list[Tensor] = []  # those whose gradients are being reduced in this backward

    def __reduce__(self) -> tuple[type["BucketHook"], tuple[()]]:
        """Return how to copy or unpickle this object. DDP does not register the hooks of a wrapper in its copy."""
        return BucketHook, ()

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start the all-reduce of a `dist.GradBucket`, and return the future of the mean."""
        assert self._group is not None
        assert self._wrapper is not None
        wrapper = self._wrapper()
        if wrapper is not None and wrapper._join_config.enable:  # every rank raises, before any of them has joined
            raise RuntimeError(
                "DistributedDataParallel.join() can't be combined with overlap='backward': ranks that have run out of "
                "batches do not call step(), for which all others wait. Give all ranks the same number of batches"
            )
        self._parameters += bucket.parameters()
        buffer = bucket.buffer()
        gradients: list[tuple[Tensor, Tensor]] = []
        if buffer.layout == torch.strided:
            gradients += zip(bucket.parameters(), bucket.gradients(), strict=True)
            buffer.mul_(1 / self._group.size())  # DDP multiplies too; on 3 ranks a division would be rounded otherwise
        else:
            buffer.div_(self._group.size())  # and divides sparse gradients
        if bucket.is_last():
            # DDP queues its own callback, which writes `p.grad`, after this one. What a callback queues comes last.
            _call_at_the_end(lambda: _call_at_the_end(self._tell_written))
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        mean: torch.futures.Future[Tensor] = work.get_future().then(_telling(self.listeners, gradients))
        return mean

    def _tell_written(self) -> None:
        parameters, self._parameters = self._parameters, []
        for listener in list(self.listeners):
            listener.written(parameters)


def _telling(
    listeners: WeakSet[Any], gradients: list[tuple[Tensor, Tensor]]
) -> Callable[[torch.futures.Future[list[Tensor]]], Tensor]:
    """Return a function for a thread of gloo, which tells listeners about gradients and returns the bucket.

    The thread frees it late, and must not own the process group then: a group that one of its own threads frees aborts
    the process.
    """

    def tell(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        for listener in list(listeners):
            listener.reduced(gradients)
        gradients.clear()
        return future.value()[0]

    return tell


_hooks: WeakKeyDictionary[DistributedDataParallel, BucketHook] = WeakKeyDictionary()


def _reduce(state: BucketHook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Call the hook of a wrapper."""
    return state.reduce(bucket)


def listen(wrapper: DistributedDataParallel, listener: Listener) -> str | None:
    """Tell a listener about all gradients of a wrapper, as long as the listener exists.

    Returns:
        Why that is not possible; None if it is.
    """
    hook = _hooks.get(wrapper)
    if hook is None:
        obstacle = _obstacle(wrapper)
        if obstacle is not None:
            return obstacle
        hook = BucketHook(wrapper)
        try:
            wrapper.register_comm_hook(hook, _reduce)
        except RuntimeError:  # a built-in hook, which DDP registers without a trace
            return HAS_HOOK
        _hooks[wrapper] = hook
    hook.listeners.add(listener)
    return None


def _obstacle(wrapper: DistributedDataParallel) -> str | None:
    """Return why our hook can't be registered, or would not reduce gradients as DDP itself does; None if it can.

    Three attributes of DDP are private. tests/test_faults_overlap.py fails if they change.
    """
    if wrapper._comm_hooks:
        return HAS_HOOK
    if wrapper._use_python_reducer:
        return "torch.compile reduces the gradients of DistributedDataParallel (optimize_ddp='python_reducer')"
    num_ranks = wrapper.process_group.size()
    if wrapper.gradient_as_bucket_view and num_ranks & (num_ranks - 1):
        # It multiplies by 1 / num_ranks, or divides if `p.grad` was in the bucket already. A hook can't see which.
        return f"with gradient_as_bucket_view=True, DistributedDataParallel rounds in two ways on {num_ranks} ranks"
    return None


def _call_at_the_end(function: Callable[[], None]) -> None:
    """Call a function at the end of this backward, after those that were queued before, as FSDP2 and DDP do."""
    Variable._execution_engine.queue_callback(function)
