"""Steps are captured by default, and nobody notices: the same bits as without, whatever happens between steps."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.comm.recorder import CudaSegments
from muon_fsdp.step import graph
from muon_fsdp.step.graph import MEMORY_LIMIT
from tests.comparisons import assert_same
from tests.gpu import nccl_cases
from tests.gpu.nccl_cases import failing_segment
from tests.gpu.test_graph import curve
from tests.gpu.test_nccl import nccl  # noqa: F401 - a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(96, 64), (64, 96), (96, 64), (160, 128), (33, 70), (64,)]
RULES = [("muon", {}), ("normuon", {}), ("spectral_sphere", {"lambda_mode": "projection"})]


class Training:
    """Parameters with gradients that depend on the step alone, and their optimizer."""

    def __init__(self, rule: str = "muon", *, cuda_graph="auto", **options) -> None:
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(shape, generator=generator) / 8 for shape in SHAPES]
        self.params = [nn.Parameter(weight.cuda()) for weight in weights]
        named = [(f"w{index}", p) for index, p in enumerate(self.params)]
        self.optimizer = MuonOptimizer(named, lr=0.02, rule=rule, cuda_graph=cuda_graph, **options)
        self.num_steps = 0
        self.statuses: list[str] = []

    def step(self, without: tuple[int, ...] = ()) -> None:
        """Take a step in which some parameters have no gradient."""
        generator = torch.Generator().manual_seed(1 + self.num_steps)
        self.num_steps += 1
        for index, p in enumerate(self.params):
            grad = torch.randn(p.shape, generator=generator).to(p)
            p.grad = None if index in without else grad
        self.optimizer.step()
        self.statuses.append(self.optimizer.plan_report().cuda_graph)

    @property
    def is_captured(self) -> bool:
        return self.optimizer._planned is not None and self.optimizer._planned.graph is not None

    @property
    def num_captures(self) -> int:
        return self.optimizer._planned.captured._num_captures

    @property
    def tensors(self) -> list[Tensor]:
        """Copies of all parameters and of their state, in a fixed order."""
        states = [self.optimizer.state[p] for p in self.params]
        values = [v for p, s in zip(self.params, states, strict=True) for v in (p, *(s[k] for k in sorted(s)))]
        return [value.detach().cpu().clone() for value in values]


def both(train, rule="muon", **options) -> tuple[Training, Training]:
    """Train with the default and without a graph, and check that everything is the same to the last bit."""
    found, expected = Training(rule, **options), Training(rule, cuda_graph=False, **options)
    for training in (found, expected):
        train(training)
    assert_same(found.tensors, expected.tensors, f"{rule}: with and without a graph")
    assert expected.optimizer._planned.graph is None
    return found, expected


def steps(number: int, **options):
    def train(training: Training) -> None:
        for _ in range(number):
            training.step(**options)

    return train


# --------------------------------------------------------------------------------------------------- the default


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_curve_of_the_default_is_the_same(dtype):
    expected, _ = curve(dtype=dtype)
    losses, optimizer = curve(dtype=dtype, cuda_graph="auto")
    assert optimizer._planned.graph is not None
    assert losses == expected
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_the_default_is_captured_after_a_few_steps(rule, options):
    found, expected = both(steps(9), rule, **options)
    assert found.statuses[0].startswith("not captured yet: ")
    assert found.statuses[-1] == "captured"
    assert found.num_captures == 1
    assert set(expected.statuses) == {"off: cuda_graph=False"}


def test_reasons_are_reported():
    found = Training(orthogonalization="exact")
    found.step()
    assert found.statuses == ["not captured: parameter 'w0': orthogonalization='exact' waits for the host"]
    found = Training()
    found.params[0].data = found.params[0].data.double()
    found.step()
    assert found.statuses == ["not captured: parameter 'w0': there are no kernels for torch.float64"]


# ------------------------------------------------------------------------------------------ what may happen between


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_options_change_at_every_step(rule, options):
    def train(training: Training) -> None:
        for step in range(10):
            for group in training.optimizer.param_groups:
                group["lr"] *= 0.9
                group["weight_decay"] = 0.01 * (step % 3)
                if "momentum" in group:
                    group["momentum"] = 0.9 + 0.01 * (step % 4)
            training.step()

    found, _ = both(train, rule, **options)
    assert found.num_captures == 1


def test_planned_options_change():
    def train(training: Training) -> None:
        for step in range(14):
            if step == 6:
                training.optimizer.param_groups[0]["nesterov"] = False
            training.step()

    found, _ = both(train)
    assert found.is_captured


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_gradients_disappear_one_by_one_by_stage_and_all(rule, options):
    missing = [(), (), (), (), (), (), (1,), (), (3,), (), (0, 1, 2, 3, 4), (), tuple(range(6)), (5,), (), ()]

    def train(training: Training) -> None:
        for without in missing:
            training.step(without)

    found, expected = both(train, rule, max_stage_bytes=20_000, **options)
    assert len(found.optimizer._planned.plan.stages) > 3
    assert any("another one" in status for status in found.statuses)
    assert found.num_captures == 1
    assert found.statuses[-1] == "captured"
    assert found.optimizer.metrics() == expected.optimizer.metrics()


def test_a_stage_that_stays_frozen_is_captured_without_it():
    def train(training: Training) -> None:
        steps(5)(training)
        steps(5, without=(3,))(training)

    found, _ = both(train, max_stage_bytes=20_000)
    assert found.num_captures == 2
    assert found.statuses[-1] == "captured"


def moved(optimizer: MuonOptimizer, device: str) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.to(device)


def moved_in_place(optimizer: MuonOptimizer, device: str) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.to(device)


@pytest.mark.parametrize("move", [moved, moved_in_place])
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_state_is_moved_to_the_cpu_and_back(rule, options, move):
    taken: list[Tensor] = []

    def train(training: Training) -> None:
        steps(7)(training)
        before = training.tensors
        move(training.optimizer, "cpu")
        taken.append(torch.full((1_000_000,), torch.nan, device="cuda"))  # what was free is used for something else
        with pytest.raises(RuntimeError, match="is on cpu and the parameter on cuda:0: move the state back"):
            training.step()
        training.num_steps -= 1
        move(training.optimizer, "cuda")
        assert_same(training.tensors, before, "a step that was refused")
        steps(9)(training)

    found, _ = both(train, rule, **options)
    assert found.statuses[-1] == "captured"


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_state_is_loaded_and_parameters_are_swapped(rule, options):
    kept: list[Tensor] = []

    def train(training: Training) -> None:
        steps(7)(training)
        training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
        steps(7)(training)
        for p in training.params:
            kept.append(p.data)
            p.data = p.data.clone()
            kept[-1].fill_(torch.nan)
        steps(7)(training)

    found, _ = both(train, rule, **options)
    assert found.statuses[-1] == "captured"


def test_several_optimizers_live_beside_each_other():
    def train(rules, **options) -> list[Tensor]:
        trainings = [Training(rule, **more, **options) for rule, more in rules]
        for _ in range(8):
            for training in trainings:
                training.step()
        if not options:
            assert all(training.is_captured for training in trainings)
        return [tensor for training in trainings for tensor in training.tensors]

    rules = [*RULES, RULES[0]]
    assert_same(train(rules), train(rules, cuda_graph=False))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_by_hand_is_refused_and_changes_nothing():
    found = Training()
    steps(6)(found)
    before = found.tensors
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="graph that you capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        found.optimizer.step()
    assert_same(found.tensors, before)
    expected = Training(cuda_graph=False)
    for training in (found, expected):
        steps(9 - training.num_steps)(training)
    assert_same(found.tensors, expected.tensors)


def test_random_numbers_stay_the_same():
    def draws(cuda_graph) -> list[Tensor]:
        torch.cuda.manual_seed(3)
        training = Training(cuda_graph=cuda_graph)
        found = []
        for _ in range(7):
            training.step()
            found.append(torch.randn(8, device="cuda"))
        return found

    assert_same(draws("auto"), draws(False))


# ------------------------------------------------------------------------------------------------------------ memory


def test_a_deleted_optimizer_frees_its_graph():
    steps(9)(Training("spectral_sphere", lambda_mode="projection"))  # some tensors are made once and kept
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    training = Training("spectral_sphere", lambda_mode="projection")
    steps(9)(training)
    known = weakref.ref(training.optimizer._planned.graph)
    assert known() is not None
    del training
    gc.collect()
    torch.cuda.empty_cache()
    assert known() is None
    assert torch.cuda.memory_reserved() <= before + 2 * 2**20


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def peak_reserved(tokens: int, **options) -> tuple[int, str]:
    """Measure the peak of reserved memory of whole training steps, and return how steps ran at the end."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(512) for _ in range(8)]).cuda()
    optimizer = MuonOptimizer(model, **options)
    x = torch.randn(tokens, 512, device="cuda")
    for _ in range(8):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return torch.cuda.max_memory_reserved(), optimizer.plan_report().cuda_graph


def test_peak_reserved_memory_grows_by_a_tenth_at_most():
    expected, _ = peak_reserved(32768, cuda_graph=False)
    found, status = peak_reserved(32768)
    assert status == "captured"
    assert found <= MEMORY_LIMIT * expected


def test_a_graph_that_would_keep_too_much_memory_is_dropped(monkeypatch):
    monkeypatch.setattr(graph, "MEMORY_LIMIT", 1.0)
    monkeypatch.setattr(graph, "SMALL_POOL", 0)
    expected, _ = peak_reserved(2048, cuda_graph=False)
    found, status = peak_reserved(2048)
    assert status.startswith("not captured: it would keep")
    assert found <= MEMORY_LIMIT * expected + 64 * 2**20


# ---------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("invalidates", [False, True])
@pytest.mark.parametrize(("rule", "options"), RULES)
def test_a_failure_in_any_segment_leaves_no_trace(rule, options, invalidates):
    with failing_segment(-1, invalidates) as segments:
        expected, _ = both(steps(8), rule, **options)
    assert expected.is_captured
    assert segments.count > 0
    for number in range(segments.count):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        found = Training(rule, **options)
        with (
            failing_segment(number, invalidates),
            pytest.warns(RuntimeWarning, match="not captured as a CUDA graph: the capture failed with"),
        ):
            steps(8)(found)
        assert_same(found.tensors, expected.tensors, f"failure in segment {number}")
        assert not found.is_captured
        assert "the capture failed" in found.statuses[-1]
        torch.randn(4, device="cuda")
        del found
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= before + 2 * 2**20


def test_a_capture_without_memory_runs_eagerly(monkeypatch):
    def out_of_memory(self):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    expected = Training(cuda_graph=False)
    steps(6)(expected)
    monkeypatch.setattr(CudaSegments, "end", out_of_memory)
    found = Training()
    with pytest.warns(RuntimeWarning, match="CUDA out of memory"):
        steps(6)(found)
    assert_same(found.tensors, expected.tensors)


@pytest.mark.parametrize("rule", ["muon", "spectral_sphere"])
def test_one_of_two_ranks_fails_to_capture(nccl, rule):  # noqa: F811
    for texts in nccl.run(2, nccl_cases.failing_captures, rule, timeout=120):
        assert texts == []


@pytest.mark.parametrize("world_size", [2])
def test_ranks_capture_by_default(nccl, world_size):  # noqa: F811
    expected = nccl.run(world_size, nccl_cases.curve, "owner")
    assert nccl.run(world_size, nccl_cases.curve, "owner", "auto") == expected
