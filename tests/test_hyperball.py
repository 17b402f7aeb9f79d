"""Rule "hyperball", statistics of updates and state in `apply`: against references, on shards and through faults."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from muon_fsdp.comm.agreement import Agreement
from tests import extending_cases as cases
from tests import graph_cases, toy_rules
from tests.pool import RankPool
from tests.reference import damping, polar


class ReferenceHyperball:
    """Hyperball for one matrix in float64."""

    def __init__(self, w: np.ndarray, momentum: float = 0.95, nesterov: bool = False) -> None:
        self.w, self.momentum, self.nesterov = w.copy(), momentum, nesterov
        self.buffer, self.radius = np.zeros_like(w), np.linalg.norm(w)

    def step(self, grad: np.ndarray, lr: float) -> np.ndarray:
        self.buffer = self.momentum * self.buffer + grad
        m = grad + self.momentum * self.buffer if self.nesterov else self.buffer
        direction = polar(m)
        if direction.any():
            direction = direction / np.linalg.norm(direction) * damping(m, 1e-7)
        moved = self.w - lr * self.radius * direction
        self.w = self.radius * moved / np.linalg.norm(moved)
        return self.w


def matrices(name: str, tensor: torch.Tensor) -> list[np.ndarray]:
    blocks = tensor.split((6, 4, 2)) if name == "qkv" else tensor if tensor.ndim == 3 else [tensor]
    return [block.detach().numpy() for block in blocks]


@pytest.mark.parametrize("nesterov", [False, True])
def test_follows_the_reference(nesterov):
    """Every expert and every block of a fused weight keeps its own norm, and lr changes."""
    torch.manual_seed(0)
    shapes = {"w": (6, 9), "tall": (9, 4), "experts": (3, 7, 5), "qkv": (12, 8)}
    params = {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    optimizer = MuonOptimizer(
        params.items(), lr=0.1, rule="hyperball", nesterov=nesterov, orthogonalization="exact",
        overrides={"qkv": {"split_sizes": (6, 4, 2)}},
    )  # fmt: skip
    references = {
        name: [ReferenceHyperball(m, nesterov=nesterov) for m in matrices(name, p)] for name, p in params.items()
    }
    for step in range(6):
        lr = 0.3 * 0.7**step
        for group in optimizer.param_groups:
            group["lr"] = lr
        for name, p in params.items():
            p.grad = torch.randn_like(p)
            if name == "w" and step == 2:
                p.grad = None
                continue
            for reference, grad in zip(references[name], matrices(name, p.grad), strict=True):
                reference.step(grad, lr)
        optimizer.step()
    for name, p in params.items():
        for found, reference in zip(matrices(name, p), references[name], strict=True):
            np.testing.assert_allclose(found, reference.w, atol=1e-10, err_msg=name)
        radii = [reference.radius for reference in references[name]]
        np.testing.assert_allclose(optimizer.state[p]["radius"].numpy(), radii, rtol=1e-12)
    numbers = optimizer.metrics()
    assert numbers["frobenius_norm_over_radius_max"] == pytest.approx(1, abs=1e-12)
    assert 0 < numbers["update_rms"] < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_stays_in_lower_precision(dtype):
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(32, 48, dtype=dtype))
    optimizer, radius = MuonOptimizer([w], lr=0.05, rule="hyperball"), float(w.detach().double().norm())
    for _ in range(20):
        w.grad = torch.randn_like(w)
        optimizer.step()
    assert float(w.detach().double().norm()) == pytest.approx(radius, rel=1e-5 if dtype == torch.float32 else 3e-3)


def test_an_idle_matrix_stops():
    """A gradient of zeros forever: momentum decays below momentum_eps, and the matrix no longer turns."""
    w = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))
    optimizer = MuonOptimizer([w], lr=0.1, rule="hyperball", momentum=0.5, orthogonalization="exact")
    reference = ReferenceHyperball(w.detach().numpy(), momentum=0.5)
    for step in range(60):
        w.grad = torch.randn_like(w) if step == 0 else torch.zeros_like(w)
        reference.step(w.grad.numpy(), 0.1)
        optimizer.step()
    np.testing.assert_allclose(w.detach().numpy(), reference.w, atol=1e-10)
    before = w.detach().clone()
    optimizer.step()
    assert (w - before).abs().max() < 1e-9


def test_a_zero_gradient_from_the_start_moves_nothing():
    w = nn.Parameter(torch.randn(6, 4))
    optimizer, before = MuonOptimizer([w], rule="hyperball"), w.detach().clone()
    w.grad = torch.zeros_like(w)
    optimizer.step()
    torch.testing.assert_close(w.detach(), before)


def test_a_zero_matrix_is_an_error_that_names_it():
    good, bad = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.zeros(6, 4))
    optimizer = MuonOptimizer([("good", good), ("bad", bad)], rule="hyperball")
    before, good.grad = good.detach().clone(), torch.randn(6, 4)
    optimizer.step()  # the bad one takes no part yet
    assert not torch.equal(good, before)
    before, bad.grad = good.detach().clone(), torch.randn(6, 4)
    for _ in range(2):  # a caught error is no permission to go on with zeros
        with pytest.raises(ValueError, match=r"frobenius_norm of 'bad' must not be zero: .* rule with overrides"):
            optimizer.step()
    assert torch.equal(good, before)
    assert not bad.any()
    routed = MuonOptimizer([("good", good), ("bad", bad)], rule="hyperball", overrides={"bad": "muon"})
    routed.step()
    assert bad.any()


class Residual(nn.Module):
    """Layers of which two start from zero, as residual branches often do, and take part only where they are asked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branch, self.last, self.other = (nn.Linear(6, 6) for _ in range(4))
        nn.init.zeros_(self.branch.weight)
        nn.init.zeros_(self.other.weight)

    def forward(self, x: torch.Tensor, *, has_branches: bool) -> torch.Tensor:
        x = self.first(x)
        if has_branches:
            x = x + self.branch(x) + self.other(x)
        return self.last(x)


LAYOUTS = {  # how the model lies on two ranks
    "fsdp": {},
    "hsdp": {},
    "ddp": {},
    "shard_state": {"shard_state": True},
    "tp": {},
}


@pytest.mark.parametrize("how", ["clear", "delete", "replace"])
def test_a_matrix_that_is_zero_when_its_state_starts_anew_is_refused(how):
    w = nn.Parameter(torch.randn(8, 8))
    optimizer = MuonOptimizer([("w", w)], lr=0.02, rule="hyperball")
    w.grad = torch.randn(8, 8)
    optimizer.step()
    if how == "clear":
        optimizer.state.clear()
    elif how == "delete":
        del optimizer.state[w]
    else:
        optimizer.state[w]["radius"] = torch.zeros(1)
    w.detach().zero_()
    with pytest.raises(ValueError, match="frobenius_norm of 'w' must not be zero"):
        optimizer.step()
    assert not w.any()


def laid_out(model: nn.Module, layout: str | None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    if layout == "fsdp":
        return fully_shard(model)
    if layout == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    if layout in ("ddp", "shard_state"):
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if layout == "tp":
        plan = dict.fromkeys(("first", "branch", "last", "other"), ColwiseParallel(output_layouts=Replicate()))
        return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    return model


def everything(optimizer: MuonOptimizer) -> dict[tuple[object, str], object]:
    """Return copies of all parameters and all state of this rank, and the counters and options of groups."""
    found: dict[tuple[object, str], object] = {}
    for number, group in enumerate(optimizer.param_groups):
        found |= {(number, name): value for name, value in group.items() if name != "params"}
        for p in group["params"]:
            for name, value in {"weight": p, **optimizer.state.get(p, {})}.items():
                found[p, name] = getattr(value.detach(), "_local_tensor", value.detach()).clone()
    return found


def assert_unchanged(optimizer: MuonOptimizer, before: dict[tuple[object, str], object]) -> None:
    """Check every bit; a step that is refused may have created state, which is zero."""
    after = everything(optimizer)
    assert before.keys() <= after.keys()
    for (of, name), value in after.items():
        expected = before.get((of, name), torch.zeros(()))
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, expected.expand_as(value).to(value.dtype)), name
        else:
            assert value == expected, name


def errors_of_zeros(
    layout: str | None, overlap: str = "step", later: bool = False, **options: object
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Take steps while two matrices are zero, then initialize them and train on; return errors and weights."""
    torch.manual_seed(0)
    model = laid_out(Residual(), layout)
    optimizer = MuonOptimizer(model, rule="hyperball", lr=0.05, max_stage_bytes=100, overlap=overlap, **options)

    def compute(step: int, has_branches: bool = True) -> None:
        optimizer.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        model(x, has_branches=has_branches).square().mean().backward()

    errors = []
    for step in range(2 * later):
        compute(step, has_branches=False)
        optimizer.step()
    for step in range(2, 5):
        compute(step)
        before = everything(optimizer)
        with pytest.raises(ValueError, match="must not be zero") as raised:
            optimizer.step()
        errors.append(str(raised.value))
        assert_unchanged(optimizer, before)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not cases.whole(p).any():
                assert name.endswith("weight")
                nn.init.constant_(getattr(p, "_local_tensor", p), 0.1)
    for step in range(5, 8):
        compute(step)
        optimizer.step()
    return errors, {name.removeprefix("module."): cases.whole(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("overlap", ["step", "backward"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_matrices_on_ranks(ranks: RankPool, layout, overlap, later):
    """Every rank raises the error of one device before anything changes, and trains once no matrix is zero."""
    alone, weights = errors_of_zeros(None, overlap, later)
    assert all("frobenius_norm of 'branch.weight', 'other.weight' must not be zero: " in text for text in alone)
    for errors, found in ranks.run(2, errors_of_layout, layout, overlap, later):
        assert [text.replace("module.", "") for text in errors] == alone
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def errors_of_layout(layout: str, overlap: str, later: bool) -> tuple[list[str], dict[str, torch.Tensor]]:
    return errors_of_zeros(layout, overlap, later, **LAYOUTS[layout])


def test_replicas_are_compared_again_after_the_error(ranks: RankPool):
    """The remedy may give every replica other weights."""
    ranks.run(2, unequal_remedy)


def unequal_remedy() -> None:
    import torch.distributed as dist

    model = laid_out(Residual(), "ddp")
    optimizer = MuonOptimizer(model, rule="hyperball")
    model(torch.ones(2, 6), has_branches=True).square().mean().backward()
    with pytest.raises(ValueError, match="must not be zero"):
        optimizer.step()
    for layer in (model.module.branch, model.module.other):
        nn.init.constant_(layer.weight, 1.0 + dist.get_rank())
    before = everything(optimizer)
    with pytest.raises(RuntimeError, match="differ in its values"):
        optimizer.step()
    assert_unchanged(optimizer, before)


def test_a_zero_matrix_between_replays(ranks: RankPool):
    """With a captured step too, ranks hear of a matrix that is zero when it takes part for the first time."""
    ranks.run(2, zeros_between_replays)


def zeros_between_replays() -> None:
    numbers = []

    def refused(optimizer: MuonOptimizer, step: int) -> None:
        late = optimizer.param_groups[0]["params"][1]
        if step < 3:
            late.grad = None
        if step == 3:
            weight = late.detach().clone()
            late.detach().zero_()
            before = everything(optimizer)
            with pytest.raises(ValueError, match=r"frobenius_norm of 'param\[1\]' must not be zero"):
                optimizer.step()
            assert_unchanged(optimizer, before)
            late.detach().copy_(weight)
            numbers.append(optimizer.plan_report().cuda_graph)

    expected = graph_cases.Recorded("hyperball", False).train(refused)
    assert all(map(torch.equal, graph_cases.Recorded("hyperball", True).train(refused), expected))
    assert numbers[1].startswith("captured")


@pytest.mark.parametrize("shares_gradient", [False, True])
def test_a_zero_matrix_that_one_rank_holds(ranks: RankPool, shares_gradient):
    """The other rank hears of it before anything changes, also if the expert has the only gradient."""
    first, second = ranks.run(2, errors_of_an_expert, shares_gradient)
    reason = "rule 'hyperball': frobenius_norm of 'expert' must not be zero: such a matrix can't keep its norm. "
    reason += "Initialize it, or give it another rule with overrides"
    assert second == [("ValueError", reason)] * 2
    assert first == [("RuntimeError", f"Rank 1 cannot take this step, so no rank does: {reason}")] * 2


def errors_of_an_expert(shares_gradient: bool) -> list[tuple[str, str]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    params = {
        "shared": nn.Parameter(distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])),
        "norm": nn.Parameter(distribute_tensor(torch.randn(6), mesh, [Shard(0)])),
    }
    if dist.get_rank() == 1:
        params["expert"] = nn.Parameter(torch.zeros(6, 4))
    optimizer = MuonOptimizer(params.items(), rule="hyperball")
    errors = []
    for name, p in params.items():
        p.grad = torch.ones_like(p) if shares_gradient or name == "expert" else None
    for _ in range(2):
        before = everything(optimizer)
        with pytest.raises((ValueError, RuntimeError)) as raised:
            optimizer.step()
        errors.append((type(raised.value).__name__, str(raised.value)))
        assert_unchanged(optimizer, before)
    if "expert" in params:
        nn.init.eye_(params["expert"])
    optimizer.step()
    assert "expert" not in params or not torch.equal(params["expert"], torch.eye(6, 4))
    return errors


def test_a_matrix_is_checked_once(ranks: RankPool):
    """Steps after the first agree once, and rules that do not ask agree once in every step."""
    assert ranks.run(2, reductions_of_steps, "hyperball") == [[2, 1, 1]] * 2
    assert ranks.run(2, reductions_of_steps, "muon") == [[1, 1, 1]] * 2


def reductions_of_steps(rule: str) -> list[int]:
    model = laid_out(nn.Linear(6, 6), "fsdp")
    optimizer = MuonOptimizer(model, rule=rule)
    counts, reduce = [], Agreement._reduce

    def counted(self: Agreement, *args: object) -> list[int]:
        counts[-1] += 1
        return reduce(self, *args)

    Agreement._reduce = counted
    try:
        for _ in range(3):
            counts.append(0)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
    finally:
        Agreement._reduce = reduce
    return counts


def test_weight_decay_and_scale_have_no_place():
    w = nn.Parameter(torch.randn(6, 4))
    with pytest.warns(UserWarning, match="weight_decay has no effect on matrices with rule='hyperball'"):
        MuonOptimizer([w], rule="hyperball", weight_decay=0.1)
    with pytest.raises((TypeError, ValueError), match="the norm of each matrix replaces it"):
        MuonOptimizer([w], rule="hyperball", scale="v4")


def test_one_rank_and_overlap(ranks: RankPool):
    """Several stages on two ranks, in step and beside backward, end with the same bits."""
    whole, early = (ranks.run(2, trained_in_stages, overlap) for overlap in ("step", "backward"))
    for rank in range(2):
        for name, value in whole[rank].items():
            assert torch.equal(value, early[rank][name]), name
    alone = trained_in_stages("step", is_alone=True)
    for name, value in alone.items():
        torch.testing.assert_close(whole[0][name], value, rtol=1e-5, atol=1e-6)


def trained_in_stages(overlap: str, is_alone: bool = False) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(6)))
    if not is_alone:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = FSDPMuonOptimizer(
        model, rule="hyperball", weight_decay=0, lr=0.05, max_stage_bytes=24 * 24 * 4, overlap=overlap
    )
    for step in range(4):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert is_alone or len(optimizer.plan_report().stages) >= 3
    return {name: cases.whole(p) for name, p in model.named_parameters()}


# ---- statistics of updates


def test_statistics_of_the_update_follow_a_reference():
    torch.manual_seed(0)
    w, stack = (nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((5, 7), (2, 4, 6)))
    optimizer = MuonOptimizer([w, stack], lr=0.1, rule="toy_turn", orthogonalization="exact")
    buffers = [np.zeros((5, 7)), np.zeros((4, 6)), np.zeros((4, 6))]
    weights = [w.detach().numpy().copy(), *stack.detach().numpy().copy()]
    turned = np.zeros(3)
    for _ in range(4):
        w.grad, stack.grad = torch.randn_like(w), torch.randn_like(stack)
        for i, grad in enumerate((w.grad.numpy(), *stack.grad.numpy())):
            buffers[i] = 0.95 * buffers[i] + grad
            update = polar(buffers[i])
            cosine = (weights[i] * update).sum() / np.linalg.norm(weights[i]) / np.linalg.norm(update)
            turned[i] += abs(cosine)
            weights[i] = (1 - 0.1 * cosine**2) * weights[i] - 0.1 * (1 - cosine**2) * update
        optimizer.step()
    np.testing.assert_allclose(w.detach().numpy(), weights[0], atol=1e-10)
    np.testing.assert_allclose(stack.detach().numpy(), np.stack(weights[1:]), atol=1e-10)
    found = np.concatenate([optimizer.state[p]["turned"].numpy() for p in (w, stack)])
    np.testing.assert_allclose(found, turned, atol=1e-10)
    assert optimizer.state[stack]["calls"].tolist() == [4, 4]  # what direction changed is stored too
    assert optimizer.metrics()["calls"] == 4


def test_factors_that_raise_leave_weights_and_state(monkeypatch):
    w = nn.Parameter(torch.randn(5, 7))
    optimizer = MuonOptimizer([w], rule="toy_turn")
    w.grad = torch.randn_like(w)
    optimizer.step()
    before, turned = w.detach().clone(), optimizer.state[w]["turned"].clone()

    def broken(self, values):
        values.state["turned"] += 1
        raise ArithmeticError("broken")

    monkeypatch.setattr(toy_rules.ToyTurn, "factors", broken)
    with pytest.raises(ArithmeticError, match="broken"):
        optimizer.step()
    assert torch.equal(w, before)
    assert torch.equal(optimizer.state[w]["turned"], turned)


def test_factors_of_rows_are_refused_with_statistics_of_the_update(monkeypatch):
    w = nn.Parameter(torch.randn(5, 7))
    optimizer = MuonOptimizer([w], rule="toy_turn")
    w.grad = torch.randn_like(w)
    monkeypatch.setattr(toy_rules.ToyTurn, "factors", lambda self, values: (torch.ones(1, 5, 1), 1.0))
    with pytest.raises(ValueError, match=r"with update_statistics must return numbers or tensors \(B,\)"):
        optimizer.step()


# ---- state in apply


def test_a_second_moment_in_apply_follows_a_reference():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5, 7, dtype=torch.float64))
    optimizer = MuonOptimizer([w], lr=0.1, weight_decay=0.2, rule="toy_adamuon", orthogonalization="exact")
    weight, buffer, moment = w.detach().numpy().copy(), np.zeros((5, 7)), np.zeros((5, 7))
    for _ in range(4):
        w.grad = torch.randn_like(w)
        buffer = 0.95 * buffer + w.grad.numpy()
        update = polar(buffer)
        moment = 0.9 * moment + 0.1 * update**2
        weight = weight * (1 - 0.1 * 0.2) - 0.1 * update / (np.sqrt(moment) + 1e-8)
        optimizer.step()
    np.testing.assert_allclose(w.detach().numpy(), weight, atol=1e-10)
    np.testing.assert_allclose(optimizer.state[w]["second_moment"].numpy(), moment, atol=1e-12)


def test_state_that_apply_does_not_declare_is_an_error(monkeypatch):
    w = nn.Parameter(torch.randn(5, 7))
    optimizer = MuonOptimizer([w], rule="toy_adamuon")
    w.grad = torch.randn_like(w)

    def writes(self, group, params, updates, factors=None, states=None):
        states[0]["other"] = torch.zeros(())

    monkeypatch.setattr(toy_rules.ToyAdaMuon, "apply", writes)
    with pytest.raises(ValueError, match="apply writes the state 'other', which it does not declare"):
        optimizer.step()


# ---- state as large as a matrix


def test_shampoo_follows_a_reference():
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(5, 7, dtype=torch.float64))
    optimizer = MuonOptimizer([w], lr=0.1, rule="toy_shampoo")
    weight, left, right, mean = w.detach().numpy().copy(), np.zeros((5, 5)), np.zeros((7, 7)), np.zeros((5, 7))

    def root(matrix: np.ndarray) -> np.ndarray:
        values, vectors = np.linalg.eigh(matrix)
        return vectors @ np.diag((np.maximum(values, 0) + 1e-4) ** -0.25) @ vectors.T

    for _ in range(4):
        w.grad = torch.randn_like(w)
        grad = w.grad.numpy()
        left, right = 0.9 * left + grad @ grad.T, 0.9 * right + grad.T @ grad
        mean = 0.5 * mean + 0.5 * root(left) @ grad @ root(right)
        weight -= 0.1 * mean
        optimizer.step()
    np.testing.assert_allclose(w.detach().numpy(), weight, atol=1e-10)
    np.testing.assert_allclose(optimizer.state[w]["left"].view(5, 5).numpy(), left, atol=1e-10)


def test_the_plan_counts_large_state_and_its_traffic():
    """Every rank holds it whole and adds it up after a step; state of one number per row is no reason to warn."""
    model = nn.Linear(40, 24, bias=False)
    report = MuonOptimizer(model, rule="toy_shampoo").plan_report(world_size=4)
    assert report.settled_bytes == 4 * (24 * 24 + 40 * 40 + 24 * 40)
    assert report.large_state == ("toy_shampoo",)
    assert "rule 'toy_shampoo' keeps state as large as matrices, whole on every rank, and adds up 12.54 kB" in str(
        report
    )
    assert MuonOptimizer(model, rule="toy_shampoo").plan_report(world_size=1).settled_bytes == 0
    small = MuonOptimizer(model, rule="normuon").plan_report(world_size=4)
    assert (small.settled_bytes, small.large_state) == (4 * 24, ())
