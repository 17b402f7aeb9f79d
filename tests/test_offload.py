"""State in the memory of the host: the bits of state on the device, on every layout; weights there, too."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.comm import host_memory
from muon_fsdp.comm.host_memory import HostArena
from muon_fsdp.plan.costs import NUM_SLOTS
from muon_fsdp.rules import RULES
from muon_fsdp.step import planned_step
from muon_fsdp.step.streaming import StreamedStore
from tests import offload_cases as cases
from tests.comparisons import assert_same
from tests.fault_cases import LIMIT
from tests.kernel_cases import DEVICE, kernels_fixture  # noqa: F401
from tests.pool import RankPool
from tests.test_storage import model_of, train

FLOAT, HALF = torch.float32, torch.bfloat16
# Rules, forms of state, rounding and overlap, dealt out.
DEALT = [
    (FLOAT, {"rule": "muon", "state_dtype": "float32"}),
    (FLOAT, {"rule": "muon", "state_dtype": "int8", "overlap": "backward"}),
    (FLOAT, {"rule": "normuon", "state_dtype": "bfloat16", "overlap": "backward"}),
    (FLOAT, {"rule": "normuon", "state_dtype": "int8"}),
    (FLOAT, {"rule": "spectral_sphere", "overlap": "backward"}),
    (FLOAT, {"rule": "hyperball", "state_dtype": "bfloat16"}),
    (FLOAT, {"rule": "spectral_sphere", "state_dtype": "int8"}),
    (HALF, {"rule": "muon", "rounding": "stochastic", "state_dtype": "int8"}),
    (HALF, {"rule": "normuon", "rounding": "stochastic"}),
    (HALF, {"rule": "muon", "rounding": "remainder", "state_dtype": "bfloat16"}),
    (HALF, {"rule": "normuon", "rounding": "remainder", "overlap": "backward"}),
]


@pytest.mark.parametrize(("dtype", "options"), DEALT)
def test_one_device(dtype, options):
    cases.check_same(None, dtype, options)


@pytest.mark.parametrize(
    ("layout", "world_size", "number"),
    [
        ("fsdp", 2, 1),
        ("fsdp", 3, 7),
        ("fsdp_columns", 2, 3),
        ("hsdp", 4, 2),
        ("fsdp_tp", 4, 0),
        ("tp", 2, 10),
        ("experts_inside", 2, 8),
        ("two_meshes", 4, 5),
        ("ddp", 2, 4),
        ("ddp_sharded", 3, 9),
        ("whole", 3, 6),
    ],
)
def test_every_layout(ranks: RankPool, layout, world_size, number):
    ranks.run(world_size, cases.check_same, layout, *DEALT[number], timeout=LIMIT)


@pytest.mark.parametrize(
    ("layout", "world_size", "number"), [(None, 1, 7), (None, 1, 4), (None, 1, 9), ("fsdp", 2, 10), ("hsdp", 4, 5)]
)
def test_weights_on_the_host(ranks: RankPool, layout, world_size, number):
    """With overlap in backward nothing starts there: gradients are complete when backward ends."""
    if layout is None:
        cases.check_weights_on_host(layout, *DEALT[number])
    else:
        ranks.run(world_size, cases.check_weights_on_host, layout, *DEALT[number], timeout=LIMIT)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"offload_state": True}, {"offload_state": False}),
        ({"offload_state": False, "state_dtype": "int8"}, {"offload_state": True, "state_dtype": "int8"}),
    ],
)
def test_checkpoints_do_not_depend_on_where_state_is(ranks: RankPool, first, second):
    ranks.run(2, cases.save_and_load, first, second, timeout=LIMIT)


def test_rows_of_one_parameter_count_steps_once():
    """Several stages update an embedding, and each counts from the same number."""
    with cases.watched():
        found, optimizer = cases.embedding_and_vectors()
        expected = [nn.Parameter(p.detach().clone()) for p in found]
        whole = MuonOptimizer(expected, rule="adamw", adamw_lr=0.1)
        for step in range(4):
            for p, q in zip(found, expected, strict=True):
                p.grad = None if (step, p.ndim) == (1, 3) else torch.randn_like(p)
                q.grad = p.grad.clone() if p.grad is not None else None
            optimizer.step()
            whole.step()
    assert cases.WatchedStore.made[0].pieces > 10
    for p, q in zip(found, expected, strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p]["step"] == whole.state[q]["step"] == (3 if p.ndim == 3 else 4)


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "rounded"),
    [
        (FLOAT, "float32", "nearest"),
        (FLOAT, "int8", "nearest"),
        (HALF, "int8", "stochastic"),
        (HALF, "float32", "remainder"),
    ],
)
def test_kernels_work_on_slots(request, monkeypatch, dtype, state_dtype, rounded):
    """Kernels find state in the slots, and the rows of a stage in parameters and gradients."""
    launched = request.getfixturevalue("kernels_everywhere")
    results = []
    for offload_state in (False, True):
        torch.manual_seed(0)
        shapes = [(100, 130), (130,), (96, 160), (64, 64), (7,)]
        parameters = [nn.Parameter((torch.randn(shape) * 0.1).to(DEVICE, dtype)) for shape in shapes]
        groups = [{"params": parameters[2:4]}, {"params": [*parameters[:2], parameters[4]], "rule": "adamw"}]
        with monkeypatch.context() as patch:
            patch.setattr(planned_step, "STREAMED_BYTES", 20_000)
            optimizer = MuonOptimizer(
                groups, lr=0.02, orthogonalization="exact", max_stage_bytes=60_000, state_dtype=state_dtype,
                rounding=rounded, offload_state=offload_state, cuda_graph=False,
            )  # fmt: skip
            for step in range(3):
                for index, parameter in enumerate(parameters):
                    grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * step + index))
                    parameter.grad = None if (step, index) == (1, 0) else grad.to(DEVICE, dtype)
                optimizer.step()
        states = [{name: value.cpu() for name, value in optimizer.state[p].items()} for p in parameters]
        results.append((parameters, states, optimizer))
    assert {"_muon_prepare_kernel", "_adamw_kernel"} <= set(launched)
    assert any(stage.rows for stage in results[1][2]._planned.plan.stages)
    for one, other in zip(*(parameters for parameters, _, _ in results), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(*(states for _, states, _ in results), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def test_all_slots_are_made_before_stages_run():
    """One that is made in the middle of a step could have memory that kernels queued before it still use."""
    optimizer = MuonOptimizer(model_of(torch.float32), offload_state=True, max_stage_bytes=2**12)
    planned = optimizer._current_plan()
    store = StreamedStore(planned.records, planned.plan.stages)
    store.begin([], {}, ())
    assert len(store._slots) == NUM_SLOTS < len(planned.plan.stages)
    store.end()


def test_measured_steps_are_those_of_state_on_the_device():
    """Several stages update the embedding; its angle is that of the whole matrix."""
    numbers = []
    for offload_state in (False, True):
        with cases.watched():
            model = model_of()
            optimizer = MuonOptimizer(model, lr=0.02, offload_state=offload_state)
            optimizer.metrics()
            train(model, optimizer, range(1))
            numbers.append(optimizer.metrics(per_matrix=True))
    assert numbers[0] == numbers[1]
    assert "update_angle/0.weight" in numbers[0]


def test_a_step_that_fails_halfway_leaves_the_state_of_state_on_the_device(monkeypatch):
    """The host has what the stages before the failure have computed, and training can go on."""
    directions, calls = RULES["muon"].directions, []

    def failing(batches):
        calls.append(batches)
        if len(calls) == 2:
            raise ZeroDivisionError
        return directions(batches)

    states, weights = [], []
    for offload_state in (False, True):
        with cases.watched(), monkeypatch.context() as patch:
            calls.clear()
            model = model_of()
            optimizer = MuonOptimizer(model, lr=0.02, offload_state=offload_state, max_stage_bytes=1)
            patch.setattr(RULES["muon"], "directions", failing)
            with pytest.raises(ZeroDivisionError):
                train(model, optimizer, range(1))
            assert len(calls) == 2
            states.append(copy.deepcopy(optimizer.state_dict()["state"]))
            train(model, optimizer, range(1, 3))
            weights.append([parameter.detach() for parameter in model.parameters()])
    assert_same(*states)
    assert_same(*weights)


def test_a_step_that_is_refused_leaves_state_that_can_be_read():
    """Nothing has changed on the host."""
    with cases.watched():
        model = model_of()
        optimizer = MuonOptimizer(model, lr=0.02, offload_state=True, nonfinite="raise")
        train(model, optimizer, range(2))
        before = copy.deepcopy(optimizer.state_dict()["state"])
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan)
        with pytest.raises(RuntimeError, match="not finite"):
            optimizer.step()
        for key, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                assert torch.equal(value, before[key][name])
        train(model, optimizer, range(2, 4))


def test_loading_copies_into_the_memory_that_is_there():
    """There may be no room for the state twice; and nothing keeps what was loaded alive."""
    model = model_of()
    optimizer = MuonOptimizer(model, lr=0.02, offload_state=True, state_dtype="int8")
    train(model, optimizer, range(2))
    weight = model[1].weight
    address = optimizer.state[weight]["momentum_buffer"].data_ptr()
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    losses = train(model, optimizer, range(2, 4))
    kept = weakref.ref(saved["state"][1]["momentum_buffer"])
    optimizer.load_state_dict(saved)
    assert optimizer.state[weight]["momentum_buffer"].data_ptr() == address
    for key, state in saved["state"].items():
        for name, value in state.items():
            assert torch.equal(optimizer.state_dict()["state"][key][name], value)
    model.load_state_dict(weights)
    assert train(model, optimizer, range(2, 4)) == losses  # and not from what a slot still has
    del saved, state, value
    gc.collect()
    assert kept() is None


def test_a_copy_of_the_optimizer_works():
    model = model_of()
    optimizer = MuonOptimizer(model, lr=0.02, offload_state=True)
    train(model, optimizer, range(2))
    model, optimizer = copy.deepcopy((model, optimizer))
    losses = train(model, optimizer, range(2, 5))
    assert len(set(losses)) == 3


def test_a_mesh_of_gpus_leaves_on_the_host_what_is_there(ranks: RankPool):
    ranks.run(2, cases.check_like_on_the_host, timeout=LIMIT)


def test_state_shares_few_blocks():
    shapes = [(1000,), (30, 30), (7,), (0, 4), ()]
    arena = HostArena(sum(HostArena.bytes_of(shape, FLOAT) for shape in shapes), torch.device("cpu"))
    tensors = [arena.zeros(torch.Size(shape), FLOAT) for shape in shapes]
    assert [tensor.shape for tensor in tensors] == [torch.Size(shape) for shape in shapes]
    del tensors[3]  # it needs no memory
    places = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors]
    assert places == [0, 4096, 4096 + 3840, 4096 + 3840 + 256]
    for number, tensor in enumerate(tensors):
        assert not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    assert [float(tensor.sum() / tensor.numel()) for tensor in tensors] == [0, 1, 2, 3]


def test_blocks_that_are_locked_are_powers_of_two(monkeypatch):
    """PyTorch rounds them up, which could take twice the memory."""
    sizes = []

    def zeros(size, *, dtype, pin_memory=False):
        assert pin_memory
        sizes.append(size)
        return torch.empty(size, dtype=dtype)

    monkeypatch.setattr(host_memory.torch, "zeros", zeros)
    lengths = [2**20, 3 * 2**18, 2**18, 5, 7]
    total = sum(HostArena.bytes_of((length,), FLOAT) for length in lengths)
    arena = HostArena(total, torch.device("cuda"))
    for length in lengths:
        arena.zeros(torch.Size((length,)), FLOAT)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert total <= sum(sizes) <= 1.01 * total


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_state_on_the_host_can_be_pickled(state_dtype):
    """torch.save refuses tensors of several dtypes that share memory: codes and scales, moments of both precisions."""
    model = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 70))
    if state_dtype == "float32":
        model[1].double()
    optimizer = MuonOptimizer(model, lr=0.02, state_dtype=state_dtype, offload_state=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for value in (optimizer.state_dict(), optimizer):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        expected, found = (each if isinstance(each, dict) else each.state_dict() for each in (value, loaded))
        for key, state in expected["state"].items():
            assert_same(found["state"][key], state)


def test_sharded_state_on_the_host_can_be_copied(ranks: RankPool):
    ranks.run(2, cases.copy_state, timeout=LIMIT)


def test_too_little_locked_memory_is_reported_once(monkeypatch):
    def zeros(size, *, dtype, pin_memory=False):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return torch.empty(size, dtype=dtype)

    monkeypatch.setattr(host_memory.torch, "zeros", zeros)
    arena = HostArena(0, torch.device("cuda"))
    with pytest.warns(UserWarning, match="can't be page-locked .CUDA error: out of memory.*state_dtype='int8'"):
        first = arena.zeros(torch.Size((5,)), FLOAT)
    assert first.shape == arena.zeros(torch.Size((5,)), FLOAT).shape  # no second warning, which would be an error


def test_a_step_is_not_captured():
    model = model_of()
    with pytest.raises(ValueError, match="offload_state=True can't be combined with cuda_graph=True"):
        MuonOptimizer(model, offload_state=True, cuda_graph=True)
    with pytest.raises(TypeError, match="offload_state"):
        MuonOptimizer(model, offload_state="yes")
