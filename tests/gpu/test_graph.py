"""A captured step behaves as one that is not: gradients move, options change, state is loaded, ranks take part."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from muon_fsdp.optimizers.elementwise import TritonMuon
from tests.comparisons import assert_changed, assert_same
from tests.gpu import nccl_cases
from tests.gpu.test_nccl import nccl  # noqa: F401 - a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [
        nn.Embedding(64, 96),
        nn.Linear(96, 288),
        nn.GELU(),
        nn.Linear(288, 96),
        nn.LayerNorm(96),
        nn.Linear(96, 64),
    ]
    return nn.Sequential(*layers).to("cuda", dtype)


def backward(model, step):
    tokens = torch.randint(0, 64, (128,), generator=torch.Generator().manual_seed(step)).cuda()
    loss = nn.functional.cross_entropy(model(tokens).float(), (5 * tokens + 3) % 64)
    loss.backward()
    return loss.item()


def curve(steps=20, change=None, dtype=torch.float32, cuda_graph=False, **options):
    model = make_model(dtype)
    options = {"nesterov": True, "weight_decay": 0.05, "adamw_lr": 0.01, "cuda_graph": cuda_graph, **options}
    optimizer = MuonOptimizer(model, lr=0.02, **options)
    keep = []  # memory that is taken away moves the gradients
    losses = []
    for step in range(steps):
        if change is not None:
            optimizer = change(step, model, optimizer) or optimizer
        optimizer.zero_grad(set_to_none=True)
        losses.append(backward(model, step))
        keep.append(torch.empty(10_000 * (step + 1), device="cuda"))
        optimizer.step()
    return losses, optimizer


def captured(optimizer):
    return optimizer._planned is not None and optimizer._planned.graph is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_curve_is_the_same(dtype):
    expected, _ = curve(dtype=dtype)
    losses, optimizer = curve(dtype=dtype, cuda_graph=True)
    assert captured(optimizer)
    assert losses == expected
    assert losses[-1] < 0.5 * losses[0]


def test_kernels_on_and_off_and_chunked_and_not(monkeypatch):
    expected, _ = curve()
    chunked, optimizer = curve(max_stage_bytes=20_000, cuda_graph=True)
    assert len(optimizer._planned.plan.stages) > 3
    assert chunked == pytest.approx(expected, rel=1e-2)
    monkeypatch.setenv("MUON_FSDP_KERNELS", "torch")
    plain, _ = curve()
    assert plain == pytest.approx(expected, rel=2e-2)
    with pytest.raises(RuntimeError, match=r"cuda_graph=True can't capture.*MUON_FSDP_KERNELS=torch"):
        curve(cuda_graph=True)


def test_options_change_without_a_new_capture():
    graphs = set()

    def change(step, model, optimizer):
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
            group["weight_decay"] = 0.01 * (step % 3)
            group["momentum"] = 0.9 + 0.005 * (step % 4)
        if captured(optimizer):
            graphs.add(id(optimizer._planned.graph))

    expected, _ = curve(change=change)
    losses, _ = curve(change=change, cuda_graph=True)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert len(graphs) == 1


def test_what_changes_launches_is_captured_anew():
    def change(step, model, optimizer):
        if step == 6:
            optimizer.param_groups[0]["nesterov"] = False
        if step == 10:
            optimizer.param_groups[0]["ns_steps"] = 4
        if step == 14:
            torch.manual_seed(1)
            extra = nn.Parameter(torch.randn(96, 96, device="cuda") * 0.01)
            extra.grad = torch.ones_like(extra)
            optimizer.add_param_group({"params": [extra], "rule": "muon"})

    expected, _ = curve(change=change)
    losses, optimizer = curve(change=change, cuda_graph=True)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert captured(optimizer)


def test_state_is_loaded_and_copied():
    def change(step, model, optimizer):
        if step == 8:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
        if step == 12:
            options = {"lr": 0.02, "nesterov": True, "weight_decay": 0.05, "adamw_lr": 0.01}
            other = MuonOptimizer(model, **options, cuda_graph=optimizer._settings.cuda_graph)
            other.load_state_dict(optimizer.state_dict())
            return other
        if step == 16:
            copied = copy.deepcopy(optimizer)
            assert copied._planned is None
        return None

    expected, _ = curve(change=change)
    losses, optimizer = curve(change=change, cuda_graph=True)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert captured(optimizer)


def test_missing_gradients_leave_parameters_alone():
    model = make_model()
    optimizer = MuonOptimizer(model, lr=0.02, weight_decay=0.5, cuda_graph=True)
    for step in range(6):
        optimizer.zero_grad()
        backward(model, step)
        weight, bias = model[1].weight, model[1].bias
        if step >= 3:
            weight.grad = bias.grad = None
        before = [t.clone() for p in (weight, bias) for t in (p.detach(), *optimizer.state[p].values())]
        moved = model[3].weight.detach().clone()
        optimizer.step()
        after = [t for p in (weight, bias) for t in (p.detach(), *optimizer.state[p].values())]
        if step >= 3:
            assert_same(after, before, f"weight, bias and their states at step {step}")
        assert_changed(model[3].weight, moved, f"step {step}")
    assert captured(optimizer)


def test_scheduler_scaler_hooks_and_closure():
    model = make_model()
    optimizer = MuonOptimizer(model, lr=torch.tensor(0.02, device="cuda"), adamw_lr=0.01, cuda_graph=True)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    losses = []
    for step in range(20):
        optimizer.zero_grad()
        tokens = torch.randint(0, 64, (128,), generator=torch.Generator().manual_seed(step)).cuda()
        loss = nn.functional.cross_entropy(model(tokens), (5 * tokens + 3) % 64)
        scaler.scale(loss).backward()
        if step == 10:
            model[1].weight.grad[0, 0] = torch.inf
        before = model[1].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        compare = assert_same if step == 10 else assert_changed
        compare(model[1].weight, before, f"step {step}")
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert calls == ["pre", "post"] * 19
    assert captured(optimizer)
    optimizer.zero_grad()
    assert optimizer.step(lambda: backward(model, 0)) > 0


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda model, groups: model[1].double(), "float64"),
        (lambda model, groups: groups.update(orthogonalization="exact"), "'exact' waits for the host"),
        (lambda model, groups: model[1].cpu(), "cpu"),
    ],
)
def test_what_has_no_graph_is_refused_by_name(prepare, text):
    model, options = make_model(), {}
    prepare(model, options)
    optimizer = MuonOptimizer(model, cuda_graph=True, **options)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    with pytest.raises(RuntimeError, match=rf"cuda_graph=True can't capture the step: parameter '1.weight'.*{text}"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("make", [MuonOptimizer, lambda model: TritonMuon(model.parameters())])
def test_a_capture_by_hand_is_refused(make):
    model = make_model()
    optimizer = make(model)
    backward(model, 0)
    optimizer.step()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="graph that you capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


def test_memory_is_bounded_and_host_time_is_short():
    shapes = 24 * [(1024, 1024)] + 6 * [(1024, 4096)]
    params = [nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for shape in shapes]
    bound = 16 * 2**20
    for cuda_graph in (False, True):
        torch.cuda.empty_cache()
        optimizer = MuonOptimizer(params, nesterov=True, max_stage_bytes=bound, cuda_graph=cuda_graph)
        times = []
        for _ in range(12):
            for p in params:
                p.grad = torch.randn_like(p)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - start)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        # Staging and results of a stage, and two of its size and five Gram matrices while it is orthogonalized.
        assert peak < 10 * bound
        if cuda_graph:
            assert sorted(times)[len(times) // 2] < 3e-3
        del optimizer


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks(nccl, world_size):  # noqa: F811
    expected = nccl.run(world_size, nccl_cases.curve, "owner")
    losses = nccl.run(world_size, nccl_cases.curve, "owner", True)  # the process group is destroyed after it
    assert losses == expected
