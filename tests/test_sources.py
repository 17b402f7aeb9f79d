"""Two toy ways to store state, each one class: everything else of a step takes state from there."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from threading import Lock
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from muon_fsdp.comm.dtensors import local
from muon_fsdp.declarations.state import State
from muon_fsdp.parameters.records import ParameterRecord
from muon_fsdp.plan.stages import Stage
from muon_fsdp.rules import RULES
from muon_fsdp.rules.muon import MuonKernels
from muon_fsdp.step import planned_step
from muon_fsdp.step.random_numbers import RandomNumbers
from muon_fsdp.step.sources import StateStore
from tests.comparisons import assert_near, assert_same
from tests.distributed_cases import OPTIONS, lay_out, make_model, train
from tests.fault_cases import LIMIT
from tests.kernel_cases import DEVICE, kernels_fixture  # noqa: F401
from tests.pool import RankPool

NUM_STEPS = 6


class ToyStore(StateStore):
    """Keeps moments in a dictionary of its own; those in `optimizer.state` are NaN, for whoever reads them.

    It counts for how many stages there are working tensors at a time.
    """

    def __init__(self, records: Sequence[ParameterRecord]) -> None:
        super().__init__(records)
        self.moments: dict[tuple[int, str], Tensor] = {}
        self.most = 0  # stages with working tensors at a time
        self.lent: set[int] = set()
        self._working: Counter[int] = Counter()  # tensors that exist, by number of the stage
        self._lock = Lock()
        stores.append(self)

    def encode(self, value: Tensor) -> Tensor:
        return value.clone()

    def decode(self, value: Tensor) -> Tensor:
        return value.clone()

    def return_lent(self, value: Tensor) -> None:
        """Do something to a working tensor that was taken back."""

    def stored(self, position: int, state: State) -> State:
        return {**state, **{name: self._moment(position, name, state) for name in self._names(position)}}

    def lend(
        self, stage: Stage, states: Mapping[int, State], listed: Sequence[int], fused: Collection[int]
    ) -> dict[int, State]:
        assert not fused
        assert stage.number not in self.lent, "lent twice"
        self.lent.add(stage.number)
        return self._decoded(stage, states, listed)

    def take_back(
        self, stage: Stage, states: Mapping[int, State], lent: Mapping[int, State], random: RandomNumbers
    ) -> None:
        self.lent.remove(stage.number)
        for position, state in lent.items():
            for name in self._names(position):
                assert state[name].isfinite().all(), "used before it was fetched"
                self._moment(position, name, states[position]).copy_(self.encode(state[name]))
                self.return_lent(state[name])

    def copies(
        self, stage: Stage, states: Mapping[int, State], listed: Sequence[int], fused: Collection[int]
    ) -> dict[int, State]:
        assert not fused
        decoded = self._decoded(stage, states, listed)
        return {i: {name: value.clone() if name not in self._names(i) else value for name, value in state.items()}
                for i, state in decoded.items()}  # fmt: skip

    def _decoded(self, stage: Stage, states: Mapping[int, State], positions: Sequence[int]) -> dict[int, State]:
        found = {}
        for position in positions:
            found[position] = {name: local(value) for name, value in states[position].items()}
            for name in self._names(position):
                working = found[position][name] = self.decode(self._moment(position, name, states[position]))
                with self._lock:
                    self._working[stage.number] += 1
                weakref.finalize(working, self._forget, stage.number)
        with self._lock:
            self.most = max(self.most, sum(count > 0 for count in self._working.values()))
        return found

    def _forget(self, number: int) -> None:
        with self._lock:
            self._working[number] -= 1

    def _names(self, position: int) -> list[str]:
        return [spec.name for spec in self._records[position].rule.all_state if spec.is_sharded]

    def _moment(self, position: int, name: str, state: State) -> Tensor:
        if (position, name) not in self.moments:
            live = local(state[name])
            self.moments[position, name] = self.encode(live)
            live.fill_(torch.nan)
        return self.moments[position, name]


class Bfloat16Store(ToyStore):
    """Stores moments in bfloat16."""

    def encode(self, value: Tensor) -> Tensor:
        return value.bfloat16()

    def decode(self, value: Tensor) -> Tensor:
        return value.float()


class HostStore(ToyStore):
    """Keeps moments on the host, as it were: what was fetched for a stage is useless once it was taken back."""

    def return_lent(self, value: Tensor) -> None:
        value.fill_(torch.nan)


stores: list[ToyStore] = []


def trained(kind: type[StateStore], overlap: str, rule: str) -> tuple[list[float], dict[str, Tensor], int, int]:
    """Train on this rank, alone or with FSDP2.

    Returns:
        The losses, the weights, the stages whose results from backward were used, and the stages with working tensors
        at a time.
    """
    stores.clear()
    options = {**OPTIONS, "weight_decay": 0.0, "max_stage_bytes": 600, "overlap": overlap, "rule": rule}
    with patch.object(planned_step, "StateStore", kind):
        if dist.is_initialized():
            model, *data = lay_out(make_model(), "fsdp")
            optimizer: MuonOptimizer = FSDPMuonOptimizer(model, **options)
        else:
            model, data = make_model(), []
            optimizer = MuonOptimizer(model, **options)
        losses = train(model, optimizer, range(NUM_STEPS), *data)
    metrics = optimizer.metrics()
    weights = {name: local(p).detach().clone() for name, p in model.named_parameters()}
    if optimizer._planned is not None and optimizer._planned.overlap is not None:
        optimizer._planned.overlap.complete()
        optimizer._planned.overlap._round.wait()
    assert not any(store.lent for store in stores)
    return losses, weights, int(metrics.get("overlapped_stages", 0)), max((store.most for store in stores), default=0)


def check_stores(overlap: str, rule: str) -> None:
    """Check on this rank that toy stores give the curve of live state."""
    losses, expected, used, _ = trained(StateStore, overlap, rule)
    assert (used > 0) == (overlap == "backward")
    assert len(set(losses)) == NUM_STEPS
    on_host, weights, same_used, most = trained(HostStore, overlap, rule)
    assert on_host == losses
    assert_same(weights, expected)
    assert same_used == used
    assert 1 <= most <= 3
    rounded, weights, same_used, most = trained(Bfloat16Store, overlap, rule)
    assert rounded != losses
    assert_near(torch.tensor(rounded), torch.tensor(losses), rtol=2e-2)
    assert_near(weights, expected, atol=0.1)
    assert same_used == used
    assert 1 <= most <= 3
    gc.collect()


@pytest.mark.parametrize(
    ("rule", "overlap"),
    [("muon", "step"), ("muon", "backward"), ("normuon", "step"), ("normuon", "backward"), ("spectral_sphere", "step")],
)
def test_toy_stores_on_one_device(rule: str, overlap: str):
    check_stores(overlap, rule)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_toy_stores_on_shards(ranks: RankPool, world_size: int, overlap: str):
    for rule in ("muon", "normuon", "spectral_sphere"):
        ranks.run(world_size, check_stores, overlap, rule, timeout=LIMIT)


class LoggedStore(StateStore):
    """Notes for which rules state was lent, with the number of open loans."""

    log: ClassVar[list[tuple[str, int]]] = []
    open_loans: ClassVar[list[int]] = []

    def lend(
        self, stage: Stage, states: Mapping[int, State], listed: Sequence[int], fused: Collection[int]
    ) -> dict[int, State]:
        assert not listed
        assert fused
        self.open_loans.append(stage.number)
        self.log.append((stage.rule, len(self.open_loans)))
        return super().lend(stage, states, listed, fused)

    def take_back(
        self, stage: Stage, states: Mapping[int, State], lent: Mapping[int, State], random: RandomNumbers
    ) -> None:
        self.open_loans.remove(stage.number)


@pytest.mark.parametrize("in_apply", [False, True])
@pytest.mark.parametrize("overlap", ["step", "backward"])
def test_state_is_lent_to_apply_if_kernels_declare_it(monkeypatch, kernels_everywhere, overlap: str, in_apply: bool):
    """A rule of matrices gets it again; an element-wise rule has one loan for `prepare` and `apply`."""
    monkeypatch.setattr(planned_step, "StateStore", LoggedStore)
    monkeypatch.setattr(MuonKernels, "state_in_apply", in_apply)
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in ((8, 16), (16,))]
    optimizer = MuonOptimizer(params, lr=0.05, ns_steps=1, overlap=overlap, cuda_graph=False)
    for _ in range(3):
        LoggedStore.log.clear()
        sum((p * p).sum() for p in params).backward()
        if optimizer._planned is not None and optimizer._planned.overlap is not None:
            optimizer._planned.overlap._round.wait()  # Triton's interpreter runs one kernel at a time
        optimizer.step()
        optimizer.zero_grad()
        assert sorted(LoggedStore.log) == [("adamw", 1), *[("muon", 1)] * (1 + in_apply)]
        assert not LoggedStore.open_loans
    assert optimizer.metrics().get("overlapped_stages", 0) == (overlap == "backward")


def test_a_loan_ends_when_a_rule_raises(monkeypatch):
    """Alone, step() raises at once; the state is taken back before that."""
    monkeypatch.setattr(planned_step, "StateStore", HostStore)
    stores.clear()
    optimizer = MuonOptimizer([nn.Parameter(torch.randn(8, 16))], lr=0.05)

    def prepare(*_: object) -> None:
        raise ArithmeticError("no momentum")

    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.randn_like(param)
    optimizer.step()
    monkeypatch.setattr(type(RULES["muon"]), "prepare", prepare)
    with pytest.raises(ArithmeticError, match="no momentum"):
        optimizer.step()
    assert not stores[0].lent


def test_replaced_state_is_freed():
    """Nothing keeps the state of the last step alive: users replace it to free memory."""
    params = [nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16))]
    optimizer = MuonOptimizer(params, lr=0.05, rule="normuon")
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    moments = [weakref.ref(optimizer.state[param]["momentum_buffer"]) for param in params]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    gc.collect()
    assert [moment() for moment in moments] == [None, None]
