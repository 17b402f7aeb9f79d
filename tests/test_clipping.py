"""clip_grad_norm_: norms of all parameters, of rules and of groups, in every layout, against torch and float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from tests import distributed_cases as cases
from tests.comparisons import assert_near, assert_same
from tests.pool import RankPool
from tests.test_distributed import LAYOUTS, model_options


def network() -> nn.Sequential:
    """Return two layers with gradients, of which the biases use AdamW."""
    layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    layers(torch.randn(3, 6)).square().sum().backward()
    return layers


def norm_of(gradients: list[Tensor]) -> float:
    """Return the norm of whole gradients, in float64."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


# ---------------------------------------------------------------------------------------------------------- one device


@pytest.mark.parametrize("max_norm", [0.01, 1e3])
def test_one_norm_over_all_parameters_is_that_of_torch(max_norm):
    layers, others = network(), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    for parameter, other in zip(layers.parameters(), others.parameters(), strict=True):
        other.grad = parameter.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(others.parameters(), max_norm)
    found = MuonOptimizer(layers).clip_grad_norm_(max_norm)
    assert found.keys() == {"all"}
    assert_near(found["all"], expected, rtol=1e-6)
    for parameter, other in zip(layers.parameters(), others.parameters(), strict=True):
        assert_near(parameter.grad, other.grad, rtol=1e-5, atol=1e-7)


def test_each_rule_is_clipped_by_its_own_norm():
    layers = network()
    before = {name: p.grad.clone() for name, p in layers.named_parameters()}
    norms = MuonOptimizer(layers).clip_grad_norm_(0.1, rules=("adamw", "muon"))
    for rule, kind in (("adamw", "bias"), ("muon", "weight")):
        gradients = {name: grad for name, grad in before.items() if name.endswith(kind)}
        expected = norm_of(list(gradients.values()))
        assert float(norms[rule]) == pytest.approx(expected, rel=1e-6)
        for name, grad in gradients.items():
            assert_near(
                dict(layers.named_parameters())[name].grad, grad * 0.1 / (expected + 1e-6), name, rtol=1e-5, atol=1e-7
            )


def test_a_group_is_clipped_and_the_others_are_not():
    layers = network()
    groups = [{"params": [p]} for p in layers.parameters()]
    before = [p.grad.clone() for p in layers.parameters()]
    norms = MuonOptimizer(groups).clip_grad_norm_(1e-3, groups=[1])
    assert norms.keys() == {1}
    assert float(norms[1]) == pytest.approx(norm_of([before[1]]), rel=1e-6)
    for index, (parameter, grad) in enumerate(zip(layers.parameters(), before, strict=True)):
        if index != 1:
            assert_same(parameter.grad, grad)
    assert float(list(layers.parameters())[1].grad.norm()) == pytest.approx(1e-3, rel=1e-2)


def test_clipping_of_orthogonalized_gradients_changes_only_what_momentum_remembers():
    """The first update of a matrix does not depend on the norm of its gradient."""
    clipped, free = network(), nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    free.load_state_dict(clipped.state_dict())
    for parameter, other in zip(clipped.parameters(), free.parameters(), strict=True):
        other.grad = parameter.grad.clone()
    optimizers = [MuonOptimizer(clipped, rule="muon"), MuonOptimizer(free, rule="muon")]
    optimizers[0].clip_grad_norm_(1e-2, rules=("muon",))
    for optimizer in optimizers:
        optimizer.step()
    assert_near(clipped[0].weight, free[0].weight, atol=1e-5)


def test_parameters_without_a_gradient_count_as_zero():
    layers = network()
    layers[0].weight.grad = None
    expected = norm_of([layers[2].weight.grad])
    (norm,) = MuonOptimizer(layers).clip_grad_norm_(1e-3, rules=("muon",)).values()
    assert float(norm) == pytest.approx(expected, rel=1e-5)
    assert layers[0].weight.grad is None


def test_half_precision_gradients_do_not_overflow():
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.float16))
    weight.grad = torch.full_like(weight, 3e4)
    norms = MuonOptimizer([weight]).clip_grad_norm_(1.0)
    assert float(norms["all"]) == pytest.approx(3e4 * 64, rel=1e-5)
    assert torch.isfinite(weight.grad).all()


def test_a_sparse_gradient_is_clipped_too():
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()  # row 1 twice
    expected = norm_of([embedding.weight.grad.to_dense()])
    norms = MuonOptimizer(embedding, overrides={"weight": "adamw"}).clip_grad_norm_(0.5)
    assert float(norms["all"]) == pytest.approx(expected, rel=1e-6)
    assert norm_of([embedding.weight.grad.to_dense()]) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("one", "several"),
    [
        ({"groups": 0}, {"groups": [0]}),
        ({"groups": 1}, {"groups": [1]}),
        ({"rules": "adamw"}, {"rules": ["adamw"]}),
        ({"groups": []}, {"groups": ()}),  # a list that a program has filtered: there is nothing to clip
        ({"rules": []}, {"rules": ()}),
    ],
)
def test_one_rule_or_group_need_not_be_a_list(one, several):
    results = []
    for options in (one, several):
        model = network()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        norms = MuonOptimizer(model).clip_grad_norm_(0.5, **options)
        results.append(({key: float(norm) for key, norm in norms.items()}, [p.grad for p in model.parameters()]))
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1])
    is_clipped = [not bool((grad == 1).all()) for grad in results[0][1]]
    assert any(is_clipped) == bool(results[0][0])
    assert not all(is_clipped)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": 0.0}, "max_norm must be positive"),
        ({"max_norm": math.nan}, "max_norm must be positive"),
        ({"max_norm": 1.0, "rules": ("muon",), "groups": (0,)}, "pass rules or groups, not both"),
        (
            {"max_norm": 1.0, "rules": ("normuon",)},
            "has rule 'normuon'; pass one of the rules in use, 'adamw'",
        ),
        ({"max_norm": 1.0, "groups": (7,)}, "no parameter has group 7"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        MuonOptimizer(network()).clip_grad_norm_(**options)


# --------------------------------------------------------------------------------------------------------------- ranks


def whole(tensor: Tensor) -> Tensor:
    """Return a gradient whole, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def clip_in_layout(layout: str) -> None:
    """Clip AdamW's gradients and then all of them, and compare with whole gradients in float64."""
    model = cases.make_model(**model_options(layout))
    laid_out, rank, size = cases.lay_out(model, layout)
    optimizer = FSDPMuonOptimizer(laid_out)
    tokens, targets = cases.batch(0)
    part = slice(rank * len(tokens) // size, (rank + 1) * len(tokens) // size)
    nn.functional.cross_entropy(laid_out(tokens[part]), targets[part]).backward()
    rules = {row.name: row.rule for row in optimizer.routing_report().rows}
    named = {name: p for name, p in model.named_parameters() if p.grad is not None}
    before = {name: whole(p.grad) for name, p in named.items()}
    norms = optimizer.clip_grad_norm_(1e-2, rules=("adamw", "muon"))
    for rule, norm in norms.items():
        expected = norm_of([grad for name, grad in before.items() if rules[name] == rule])
        assert float(norm) == pytest.approx(expected, rel=1e-5), rule
        for name, parameter in named.items():
            if rules[name] == rule:
                factor = min(1.0, 1e-2 / (expected + 1e-6))
                assert_near(whole(parameter.grad), before[name] * factor, name, rtol=1e-5, atol=1e-7)
    again = {name: whole(p.grad) for name, p in named.items()}
    (total,) = optimizer.clip_grad_norm_(1.0).values()
    assert float(total) == pytest.approx(norm_of(list(again.values())), rel=1e-5)


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
def test_norms_are_those_of_whole_gradients_in_every_layout(layout, world_size, ranks: RankPool):
    ranks.run(world_size, clip_in_layout, layout)


def partial_and_missing() -> list[float]:
    """Clip a gradient of partial sums, and one that only rank 1 has; return the norms and a gradient's size."""
    mesh = init_device_mesh("cpu", (2,))
    first = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    second = nn.Parameter(distribute_tensor(torch.ones(4, 6), mesh, [cases.Shard(0)]))
    first.grad = DTensor.from_local(torch.full((4, 4), 1.0 + dist.get_rank()), mesh, [Partial()])  # 3 in all
    if dist.get_rank() == 1:
        second.grad = DTensor.from_local(torch.full((2, 6), 2.0), mesh, [cases.Shard(0)])
    optimizer = MuonOptimizer([("first", first), ("second", second)])
    norm = float(optimizer.clip_grad_norm_(1.0)["all"])
    return [norm, float(first.grad.full_tensor().norm())]


def test_partial_sums_count_as_their_sum_and_a_missing_gradient_as_zero(ranks: RankPool):
    expected = math.sqrt(16 * 9 + 12 * 4)
    for norm, size in ranks.run(2, partial_and_missing):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert size == pytest.approx(12 / (expected + 1e-6), rel=1e-6)


def one_row_on_two_ranks() -> float:
    """Clip a matrix of which rank 0 holds the only row and rank 1 holds nothing; return the norm."""
    mesh = init_device_mesh("cpu", (2,))
    row = nn.Parameter(distribute_tensor(torch.ones(1, 9), mesh, [cases.Shard(0)]))
    row.grad = distribute_tensor(torch.full((1, 9), 2.0), mesh, [cases.Shard(0)])
    return float(MuonOptimizer([("row", row)], rule="adamw").clip_grad_norm_(1.0)["all"])


def test_a_parameter_that_one_rank_holds_whole_is_reduced_by_all(ranks: RankPool):
    assert ranks.run(2, one_row_on_two_ranks, timeout=60) == [6.0, 6.0]


class OwnExpert(nn.Module):
    """A layer that all ranks share, and an expert that differs from rank to rank and has the same name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.expert = nn.Linear(6, 6), nn.Linear(6, 6)
        with torch.no_grad():
            self.expert.weight.mul_(1 + 3 * dist.get_rank())

    def forward(self, x: Tensor) -> Tensor:
        return self.expert(torch.tanh(self.shared(x)))


def of_all_ranks(value: object) -> list:
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def clip_local_experts(layout: str) -> float:
    """Clip a model whose experts lie on one rank each; check norm and gradients by float64; return the norm."""
    net = OwnExpert()
    model: nn.Module = net
    if layout == "ddp":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["expert.weight", "expert.bias"])
        model = DistributedDataParallel(net)
    else:
        fully_shard(net.shared, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = MuonOptimizer(model, lr=0.1, adamw_lr=0.1)
    total = 0.0
    for step in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        shared = [whole(p.grad) for p in net.shared.parameters()]
        experts = [grad for grads in of_all_ranks([p.grad for p in net.expert.parameters()]) for grad in grads]
        expected = norm_of([*shared, *experts])
        total = float(optimizer.clip_grad_norm_(0.05)["all"])
        assert total == pytest.approx(expected, rel=1e-6)
        for p, before in zip(net.shared.parameters(), shared, strict=True):
            assert_near(whole(p.grad), before * 0.05 / (expected + 1e-6), rtol=1e-5, atol=1e-8)
        optimizer.step()
    (norm,) = optimizer.clip_grad_norm_(1.0, rules="muon").values()
    weights = [whole(net.shared.weight.grad), *of_all_ranks(net.expert.weight.grad)]
    assert float(norm) == pytest.approx(norm_of(weights), rel=1e-6)
    return total


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_experts_of_all_ranks_count_in_one_norm(layout, ranks: RankPool):
    first, second = ranks.run(2, clip_local_experts, layout, timeout=60)
    assert first == second


def siblings_and_experts(spoiled: bool) -> float:
    """Clip matrices on submeshes: one that siblings have in common up to rounding, and one that each has alone.

    Args:
        spoiled: whether one sibling has a gradient that is not finite.

    Returns:
        The ratio of the norm to that of whole gradients in float64.
    """
    mesh, side = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), dist.get_rank() % 2
    generator = torch.Generator().manual_seed(0)
    grads = {name: torch.randn(7, 5, generator=generator) for name in ("common", "own 0", "own 1", "tied")}
    rows = [cases.Shard(0)]
    places = {"common": (mesh["dp"], rows), "own": (mesh["dp"], rows), "tied": (mesh, [*rows, cases.Shard(1)])}
    parameters = {}
    for name, (on, placements) in places.items():
        grad = grads[f"own {side}" if name == "own" else name] * (1 + 1e-6 * side)
        if spoiled and name == "common" and side == 1:
            grad[0, 0] = torch.inf
        p = nn.Parameter(distribute_tensor(torch.ones(7, 5), on, placements, src_data_rank=None))
        p.grad = distribute_tensor(grad, on, placements, src_data_rank=None)
        parameters[name] = p
    norm = MuonOptimizer(list(parameters.items())).clip_grad_norm_(1.0)["all"]
    return float(norm) / norm_of(list(grads.values()))


def test_equal_gradients_of_siblings_count_once_and_others_each(ranks: RankPool):
    assert ranks.run(4, siblings_and_experts, False, timeout=60) == [pytest.approx(1.0, rel=1e-5)] * 4
    assert ranks.run(4, siblings_and_experts, True, timeout=60) == [math.inf] * 4


def partial_on_one_rank() -> list[float]:
    """Clip a gradient of partial sums that only rank 1 has, with all others and by its rule; return both norms."""
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    if dist.get_rank() == 1:
        weight.grad = DTensor.from_local(torch.full((4, 4), 3.0), mesh, [Partial()])
    optimizer = MuonOptimizer([("weight", weight)])
    norms = [*optimizer.clip_grad_norm_(100.0).values(), *optimizer.clip_grad_norm_(6.0, rules="muon").values()]
    if dist.get_rank() == 1:
        assert_near(weight.grad.to_local(), torch.full((4, 4), 1.5), rtol=1e-6)
    else:
        assert weight.grad is None
    return [float(norm) for norm in norms]


def test_partial_sums_that_some_ranks_lack(ranks: RankPool):
    assert ranks.run(2, partial_on_one_rank, timeout=60) == [[12.0, 12.0]] * 2


def mistake_on_one_rank() -> str:
    """Name another rule on rank 1 than the one that it has; return the error."""
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [cases.Shard(0)]))
    weight.grad = torch.ones_like(weight)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        MuonOptimizer([("weight", weight)]).clip_grad_norm_(1.0, rules="adamw" if dist.get_rank() == 1 else "muon")
    return str(caught.value)


def test_a_mistake_on_one_rank_is_told_to_all(ranks: RankPool):
    first, second = ranks.run(2, mistake_on_one_rank, timeout=60)
    assert second in first
    assert "no parameter has rule 'adamw'" in second
