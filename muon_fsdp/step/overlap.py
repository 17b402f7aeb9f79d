"""Start stages in backward, and decide in `step()` which of their updates can be used."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from threading import Lock
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from muon_fsdp.comm.bucket_hook import listen
from muon_fsdp.comm.dtensors import is_replica, local
from muon_fsdp.comm.process_groups import are_claimed, claim_groups, num_ranks
from muon_fsdp.declarations.state import State
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.parameters.wrappers import ddp_wrappers
from muon_fsdp.plan.stages import Stage
from muon_fsdp.rules import RULES, Rule
from muon_fsdp.step.backward import PURPOSE, Round, RoundContext, RoundThread
from muon_fsdp.step.changes import Arrival
from muon_fsdp.step.fused import FusedStep
from muon_fsdp.step.inputs import StepInputs
from muon_fsdp.step.sources import StageResult, StepContext
from muon_fsdp.text import warn_user

# What a rank says about a parameter in the agreement is one of these plus the number of its gradient in backward. The
# largest of all ranks counts, so that all of them know who objects and which gradients come last.
CHANGED = 2**20  # what was started in backward is not what `step()` would compute
UNREADY = 2**21  # backward has not delivered the gradient in a form that can be used, so nothing should start next time


class BackwardOverlap:
    """Starts stages in backward for one plan.

    All ranks start the same stages between two steps, each once and in the same order. Both are agreed on in the step
    before: the stages of whose parameters every rank has got a gradient in backward, in the order of these gradients.

    Args:
        context: what all steps have in common.
        stages: the stages of the plan.
        counts: counts the stages whose results are used, and those that are discarded, for `metrics()`.
    """

    def __init__(self, context: StepContext, stages: Sequence[Stage], counts: Counter[str]) -> None:
        self._context = context
        records = self._records = context.records
        self._num_stages = sum(RULES[stage.rule].needs_matrices for stage in stages)
        replicas = [record for record in records if record.view is not None and record.is_plain and num_ranks() > 1]
        self._positions = {id(record.tensor): record.position for record in replicas}  # of what DDP may reduce
        unheard = watch_replicas(replicas, self)
        self._obstacles = {stage.number: obstacle_of(stage, records, unheard) for stage in stages}
        able = [stage for stage in stages if self._obstacles[stage.number] is None]
        for stage in able:
            if _device_of(stage, records) != _device_of(able[0], records):
                self._obstacles[stage.number] = "it lies on another device than the first stage"
        self._stages = [stage for stage in stages if self._obstacles[stage.number] is None]
        watched = {position for stage in self._stages for position in stage.positions}
        self._lock = Lock()  # the reductions of DDP may end in several threads
        self._thread = RoundThread()
        self._is_excluded = False  # another optimizer has the process groups of these stages
        self._arrivals: Counter[int] = Counter()  # since the last step, by position
        self._num_arrivals = 0
        self._order: dict[int, int] = {}  # by position, how many gradients had arrived before it
        self._expected: Mapping[int, int] | None = None  # arrivals before the last step; None before the first
        self._next: Sequence[Stage] = ()
        self._stream: Any = None
        self._found_changes = self._has_warned = False
        self.took_residuals = True  # whether the stages that were used have computed residuals for `metrics()`
        self._stage_counts = counts
        finalizer = weakref.finalize(self, self._thread.leave)
        finalizer.atexit = False  # when the program ends, `RoundThread.cancel` is called instead
        watched -= set(self._positions.values())
        watch([record for record in records if record.position in watched], self)

    @property
    def status(self) -> str:
        """Return how many stages start in backward, and why others do not."""
        reasons = Counter(reason for reason in self._obstacles.values() if reason)
        if self._is_excluded:
            reasons["another optimizer starts its own in backward, or an exchange there has failed"] = len(self._stages)
        others = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
        gathered = Counter(
            _after_weights(RULES[stage.rule]) for stage in self._round.stages if RULES[stage.rule].needs_weights
        )
        only = "".join(f"; {count} only gather: {reason}" for reason, count in gathered.items())
        return f"{len(self._round.stages)} of {self._num_stages} stage(s) start in the next backward{only}{others}"

    @property
    def _round(self) -> Round:
        return self._thread.round

    # ------------------------------------------------------------------------------------------------- in backward

    def arrived(self, position: int, parameter: Tensor) -> None:
        """Note that backward has written the gradient of a parameter. No kernel is launched here."""
        grad = parameter.grad
        with torch.no_grad():
            if self._counts(position, parameter) and grad is not None and is_usable(parameter, grad):
                arrival = Arrival(local(grad))
                arrival.write(grad)
                self._arrive(position, arrival)

    def reduced(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Note that DDP has reduced gradients, which it writes to `p.grad` at the end of backward."""
        with self._lock, torch.no_grad():
            for parameter, grad in gradients:
                position = self._positions.get(id(parameter))
                if position is not None and self._counts(position, parameter) and is_usable(parameter, grad):
                    self._arrive(position, Arrival(grad, parameter.grad))

    def written(self, parameters: Sequence[Tensor]) -> None:
        """Note that DDP has written the gradients of some parameters."""
        with torch.no_grad():
            for parameter in parameters:
                position = self._positions.get(id(parameter))
                # On a GPU values are not compared: a further backward would pass for the one that was read.
                if position is not None and self._is_last(position):
                    self._round.write(position, parameter.grad)

    def _counts(self, position: int, parameter: Tensor) -> bool:
        """Count a gradient, and return whether a stage may use it.

        If several backwards came before the last step, as many are waited for before this one.
        """
        if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # a replay will change the gradient without calling this
        self._arrivals[position] += 1
        self._order[position] = min(self._num_arrivals, CHANGED - 1)
        self._num_arrivals += 1
        return bool(self._round.stages) and self._is_last(position)

    def _arrive(self, position: int, arrival: Arrival) -> None:
        if self._round.arrive(position, arrival):
            self._thread.start()

    def _is_last(self, position: int) -> bool:
        """Return whether a gradient has arrived as often as before the last step."""
        return self._expected is not None and self._arrivals[position] == self._expected.get(position)

    # -------------------------------------------------------------------------------------------------- in step()

    def complete(self) -> None:
        """Start all stages of this round that have not started, because other ranks may have started them."""
        if self._round.is_orphaned():
            self._round.cancel()  # the thread may wait for its gradients
            self._thread.begin(Round())
            self._thread.claim = None
        self._round.complete()
        self._thread.start()

    def abandon(self) -> None:
        """Discard this round, because another plan takes the place of this one."""
        self.complete()
        self._thread.claim = None  # it is held until the round has ended
        self._stage_counts["discarded_stages"] += len(self._round.stages)

    def objections(self, groups: Sequence[Mapping[str, Any]], states: Mapping[Tensor, State]) -> dict[int, int]:
        """Return, by position, whether the updates of a parameter can be used and may be started next time.

        Args:
            groups: the parameter groups.
            states: the state of every parameter.

        Returns:
            For every parameter 0, `CHANGED` or `UNREADY`, plus the number of its gradient in backward.
        """
        running = {stage.number for stage in self._round.stages}
        # Two threads would start transfers in an order that differs between ranks. One rank that objects is enough.
        claim = self._thread.claim
        self._is_excluded = _any_travels(self._stages) and (are_claimed(PURPOSE) if claim is None else claim.is_broken)
        # Another rank may be able to start a stage that this one can't.
        found = {record.position: UNREADY for record in self._records}
        for stage in self._stages:
            of_stage = {position: self._objection(position, stage.number in running) for position in stage.positions}
            if stage.number in running and not self._round.is_current(stage, groups, states):
                of_stage = {position: max(number, CHANGED) for position, number in of_stage.items()}
            found |= {position: number + self._order.get(position, 0) for position, number in of_stage.items()}
        return found

    def _objection(self, position: int, is_running: bool) -> int:
        parameter = self._records[position].tensor
        if self._is_excluded:
            return UNREADY
        if not self._arrivals[position] or not is_usable(parameter, parameter.grad):
            return UNREADY
        if self._expected is None:  # this object may have been made in the middle of an accumulation
            return UNREADY
        if not is_running or self._round.has_read(position, parameter.grad):
            return 0
        # Else there was another backward, or a late one.
        if self._is_last(position) and self._round.has_arrived(position):
            self._found_changes = True
        return CHANGED

    def settle(self, objections: Mapping[int, int]) -> dict[int, Callable[[], StageResult]]:
        """Finish the round, and choose the stages that start in the next backward.

        Args:
            objections: those that ranks have agreed on, by position.

        Returns:
            For the stages whose results are used, by number: a function that waits for the result and returns it.
        """
        round_ = self._round
        largest = {stage.number: max(objections[position] for position in stage.positions) for stage in self._stages}
        used = [stage for stage in round_.stages if largest[stage.number] < CHANGED]
        self._stage_counts["overlapped_stages"] += len(used)
        self._stage_counts["discarded_stages"] += len(round_.stages) - len(used)
        self._next = early_order(
            [stage for stage in self._stages if largest[stage.number] < UNREADY],
            {
                stage.number: max(objections[position] % CHANGED for position in stage.positions)
                for stage in self._stages
            },
        )
        self._expected, self._arrivals = dict(self._arrivals), Counter()
        self._num_arrivals, self._order = 0, {}
        self.took_residuals = round_.took_residuals or not used
        self._thread.begin(Round())
        return {stage.number: partial(round_.result, stage) for stage in used}

    def begin(self, inputs: StepInputs, fused: FusedStep) -> None:
        """Prepare the next backward, after a step with these inputs.

        Args:
            inputs: the tensors and options of the step.
            fused: its fused lists.
        """
        self._warn()
        if not _any_travels(self._next):
            self._thread.claim = None
        elif self._thread.claim is None:
            self._thread.claim = claim_groups(PURPOSE)
        if not self._next:
            return
        device = _device_of(self._next[0], self._records)
        written = None
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            written = torch.cuda.current_stream(device).record_event()
        context = RoundContext(
            **vars(self._context),
            inputs=replace(inputs, gradients={}),
            fused=fused,
            device=device,
            stream=self._stream,
            written=written,
            num_threads=torch.get_num_threads(),
        )
        self._thread.begin(Round(self._next, context))

    def _warn(self) -> None:
        if not self._found_changes or self._has_warned:
            return
        self._has_warned = True
        warn_user(
            "overlap='backward' gains nothing: gradients of matrices have changed after backward, so what was started "
            "there is discarded and computed again. Clip only other parameters, with "
            "optimizer.clip_grad_norm_(max_norm, rules=('adamw',)), or pass overlap='step'"
        )


def watch(records: Iterable[ParameterRecord], receiver: BackwardOverlap) -> None:
    """Call `receiver.arrived` in backward whenever the gradient of a parameter is complete, as long as it exists.

    FSDP2 calls these hooks after it has reduced the gradient, on the stream of the reduction. They must not launch
    anything there, because later reductions would wait for it.
    """
    known = weakref.ref(receiver)

    def hook_of(position: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            alive = known()
            if alive is not None:
                alive.arrived(position, parameter)

        return hook

    handles = []
    for record in records:
        hook = hook_of(record.position)
        handles.append(record.tensor.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
    weakref.finalize(receiver, _remove, handles)


def watch_replicas(records: Sequence[ParameterRecord], receiver: BackwardOverlap) -> dict[int, str]:
    """Tell the receiver about the gradients of plain tensors in a job of several ranks, which DDP reduces.

    A hook on such a parameter is called before its gradient is reduced.

    Returns:
        By position, why the receiver is not told about a gradient.
    """
    if not records:
        return {}
    found: dict[int, str | None] = dict.fromkeys(
        (record.position for record in records),
        "no DistributedDataParallel wraps a plain tensor, so its gradient may be reduced after backward",
    )
    for wrapper, ids in ddp_wrappers(record.tensor for record in records):
        obstacle = listen(wrapper, receiver)
        for record in records:
            if id(record.tensor) in ids:
                found[record.position] = obstacle or _unlike_bucket(record.tensor)
    return {position: reason for position, reason in found.items() if reason is not None}


def _unlike_bucket(parameter: Tensor) -> str | None:
    """Return why a bucket of DDP does not have the gradient of a parameter as `p.grad` will have it; None if it does.

    `GradBucket.gradients` returns the elements in the order of memory.
    """
    if not is_replica(parameter):
        return "DistributedDataParallel was told to ignore a parameter"
    return None if parameter.is_contiguous() else "a parameter is not contiguous"


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def is_usable(parameter: Tensor, grad: Tensor | None) -> bool:
    """Return whether a gradient can be read in backward: dense, complete, and in the layout of its parameter."""
    if grad is None or grad.layout != torch.strided:
        return False
    if isinstance(parameter, DTensor) and not (isinstance(grad, DTensor) and grad.placements == parameter.placements):
        return False
    return type(local(grad)) in (Tensor, nn.Parameter)  # an AsyncCollectiveTensor is still being reduced


def early_order(stages: Sequence[Stage], completed: Mapping[int, int]) -> list[Stage]:
    """Return stages in the order in which they start in backward, which is the same on all of their ranks.

    Only stages of the same ranks are reordered. If stages of different sets of ranks alternated, ranks would start the
    transfers of one set in different orders.

    Args:
        stages: in the order of the plan.
        completed: by number of the stage, when its last gradient arrives.
    """
    ordered: list[Stage] = []
    for _, run in groupby(stages, key=lambda stage: stage.exchange.ranks if stage.exchange is not None else ()):
        ordered += sorted(run, key=lambda stage: completed[stage.number])
    return ordered


def obstacle_of(stage: Stage, records: Sequence[ParameterRecord], unheard: Mapping[int, str]) -> str | None:
    """Return why a stage can't start in backward.

    Args:
        stage: a stage of the plan.
        records: one per parameter.
        unheard: by position, why nobody tells about the gradient of a plain tensor.

    Returns:
        None if it can start; an empty text for an element-wise rule, which has no need to.
    """
    rule = RULES[stage.rule]
    if not rule.needs_matrices:
        return ""
    if rule.needs_weights and (stage.exchange is None or not stage.exchange.gathers):
        return f"{_after_weights(rule)}, and there is nothing to gather before"
    members = [records[position] for position in stage.positions]
    if not members:
        return ""
    for record in members:
        if record.position in unheard:
            return unheard[record.position]
        if record.is_on_host:
            return "FSDP2 keeps its parameters on the host, where gradients are complete when backward ends"
    if not all(record.tensor.requires_grad and record.tensor.is_leaf for record in members):
        return "a parameter is frozen or not a leaf"
    return None


def _after_weights(rule: Rule) -> str:
    """Return why `direction` of a rule that needs weights does not run in backward."""
    return f"rule {rule.name!r} needs statistics or factors of the weights, which step() computes"


def _any_travels(stages: Sequence[Stage]) -> bool:
    """Return whether some stages exchange matrices with other ranks."""
    return any(stage.exchange is not None for stage in stages)


def _device_of(stage: Stage, records: Sequence[ParameterRecord]) -> torch.device:
    return next((records[position].device for position in stage.positions), torch.device("cpu"))


def refuse_grad_scaler() -> None:
    """Raise if a GradScaler calls `step()`: it changes all gradients after backward, and skips steps by itself."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            raise RuntimeError(
                "overlap='backward' can't be combined with GradScaler, which unscales gradients after backward: train "
                "in bfloat16 without a scaler, or pass overlap='step'"
            )
        frame = frame.f_back
