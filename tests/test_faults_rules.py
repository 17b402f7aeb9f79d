"""Rules that users write."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from muon_fsdp import MuonOptimizer
from muon_fsdp.comm.dtensors import local
from muon_fsdp.rules import RULES, Muon, Option, PerMatrix, PerParameter, Rule, register
from tests import graph_cases
from tests.comparisons import assert_same
from tests.fault_cases import LIMIT, error_of, give_gradients, sharded
from tests.pool import RankPool
from tests.promises import promise


@pytest.fixture(autouse=True)
def _registry():
    """Forget the rules that a test registers."""
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def rule(base: type[Rule] = Muon, **body: Any) -> str:
    """Register a rule with this body, and return its name."""
    register(type("Own", (base,), {"name": "own", **body}))
    return "own"


def parameters(*shapes: tuple[int, ...]) -> list[tuple[str, nn.Parameter]]:
    """Return named parameters with gradients."""
    named = [(f"w{i}", nn.Parameter(torch.randn(shape))) for i, shape in enumerate(shapes)]
    for _, p in named:
        p.grad = torch.randn_like(p)
    return named


def step(name: str, *shapes: tuple[int, ...], steps: int = 1, **options: Any) -> MuonOptimizer:
    named = parameters(*(shapes or ((6, 6), (6, 6), (3, 5))))
    optimizer = MuonOptimizer(named, rule=name, **options)
    for _ in range(steps):
        optimizer.step()
    return optimizer


# ---------------------------------------------------------------------------------------------------- updates and names


def returns(self: Rule, batch: Any) -> Tensor:
    return batch.matrices.sign()


def forgets(self: Rule, batch: Any) -> None:
    pass


def changes_in_place(self: Rule, batch: Any) -> None:
    batch.update.clamp_(-1, 1)


def writes_a_part(self: Rule, batch: Any) -> None:
    batch.update[..., 1:] = batch.matrices[..., 1:]


def forgets_one_shape(self: Rule, batch: Any) -> None:
    if batch.matrices.shape[-1] == 6:
        batch.update = batch.matrices


@promise(
    "`direction` of a rule returns the update, never writes it, or writes a part of it",
    "The first step raises, and names the rule and `batch.update`",
)
@pytest.mark.parametrize("base", [Rule, Muon])
@pytest.mark.parametrize(
    ("direction", "text"),
    [
        (returns, r"direction must write the update.*returned a tensor.*assign it to batch\.update"),
        (forgets, r"direction has not written batch\.update"),
        (
            changes_in_place,
            r"direction left an update of 'w0', 'w1' that is not finite.*write all elements of batch\.update",
        ),
        (writes_a_part, r"direction left an update of 'w0', 'w1' that is not finite"),
        (forgets_one_shape, r"direction has not written batch\.update"),
    ],
)
def test_an_update_that_is_not_written_is_an_error(base, direction, text):
    with pytest.raises((TypeError, ValueError), match=f"rule 'own': {text}"):
        step(rule(base, direction=direction))


def test_an_update_is_missed_at_a_later_step_too():
    """`direction` that writes at its first call only is found without a look at values, so on GPUs too."""
    calls = []

    def direction(self: Rule, batch: Any) -> None:
        calls.append(1)
        if len(calls) <= 2:
            batch.update = batch.matrices

    with pytest.raises(ValueError, match=r"has not written batch\.update"):
        step(rule(direction=direction), steps=3)
    assert len(calls) == 3


def test_gradients_that_are_not_finite_do_not_blame_the_rule():
    named = parameters((4, 4))
    named[0][1].grad.fill_(torch.nan)
    MuonOptimizer(named).step()
    assert named[0][1].isnan().all()


@promise(
    "A rule is registered without a `name` of its own, or with the name of a built-in rule",
    "An error; the built-in rule stays",
)
@pytest.mark.parametrize("base", ["muon", "normuon", "adamw"])
def test_built_in_rules_are_not_replaced(base):
    kind = type(RULES[base])
    with pytest.raises(TypeError, match=f"Mine: a rule needs a name of its own; '{base}' is the name of its base"):
        register(type("Mine", (kind,), {}))
    with pytest.raises(ValueError, match=f"Mine: '{base}' is the name of a built-in rule: choose another"):
        register(type("Mine", (kind,), {"name": base}))
    with pytest.raises(ValueError, match="'sso' is the name of a built-in rule"):
        register(type("Mine", (kind,), {"name": "mine", "aliases": ("sso",)}))
    assert type(RULES[base]) is kind
    register(kind)  # itself again


# ------------------------------------------------------------------------------------------------ what is not declared


def prepare_with(change: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
    def prepare(self: Rule, group: Any, grads: Any, states: Any) -> Any:
        for state in states:
            change(state)
        return Muon.prepare(self, group, grads, states)

    return prepare


def direction_with(change: Callable[[Any], None]) -> Callable[..., None]:
    def direction(self: Rule, batch: Any) -> None:
        Muon.direction(self, batch)
        change(batch)

    return direction


def factors_with(change: Callable[[Any], None]) -> Callable[..., Any]:
    def factors(self: Rule, numbers: Any) -> Any:
        change(numbers)
        return 1.0, 1.0

    return factors


ONE = torch.ones(1)


@promise(
    "A rule writes state or diagnostics that it does not declare, or per-matrix state in `prepare`",
    "An error that says what to declare, or where to write it",
)
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prepare": prepare_with(lambda s: s.update(extra=ONE))}, r"prepare writes the state 'extra'.*PerParameter"),
        ({"direction": direction_with(lambda b: b.state.update(v=ONE))}, r"per-matrix state 'v'.*add PerMatrix\('v'"),
        ({"direction": direction_with(lambda b: b.diagnostics.update(x=ONE))}, r"diagnostics\['x'\].*add 'x' to"),
        ({"factors": factors_with(lambda n: n.state.update(v=ONE))}, r"per-matrix state 'v'.*add PerMatrix\('v'"),
        ({"factors": factors_with(lambda n: n.diagnostics.update(x=ONE))}, r"diagnostics\['x'\].*add 'x' to"),
        (
            {
                "state": (*Muon.state, PerMatrix("v", "scalar")),
                "prepare": prepare_with(lambda s: s["v"].add_(1)),
            },
            r"prepare writes the per-matrix state 'v'.*change it in direction or factors",
        ),
        (
            {
                "diagnostics": ("x",),
                "factors": factors_with(lambda n: n.diagnostics.update(x=ONE)),
                "direction": direction_with(lambda b: b.diagnostics.update(x=ONE)),
            },
            r"diagnostics\['x'\] in factors and in direction",
        ),
    ],
)
def test_what_is_not_declared_is_an_error(body, text):
    with pytest.raises(ValueError, match=text):
        step(rule(**body), (4, 3))


def test_state_of_others_is_no_ones_fault():
    named = parameters((4, 3))
    optimizer = MuonOptimizer(named, rule=rule(prepare=prepare_with(lambda s: None)))
    optimizer.step()
    optimizer.state[named[0][1]]["z"] = torch.ones(4, 3)
    optimizer.state[named[0][1]]["count"] = 3
    optimizer.step()
    assert optimizer.state[named[0][1]]["count"] == 3


def test_state_that_prepare_replaces_is_stored():
    class Averaged(Rule):
        name = "averaged"
        state = (PerParameter("average"), PerParameter("count", "scalar"))

        def prepare(self, group, grads, states):
            for grad, state in zip(grads, states, strict=True):
                state["average"] = 0.5 * state["average"] + grad
                state["count"] = state["count"] + 1
            return [state["average"] for state in states]

    register(Averaged)
    (_, p), = parameters((4,))  # fmt: skip
    optimizer = MuonOptimizer([p], rule="averaged", other_rule="averaged")
    optimizer.step()
    average = optimizer.state[p]["average"]
    optimizer.step()
    assert optimizer.state[p]["average"] is average
    assert_same(average, 1.5 * p.grad)
    assert optimizer.state[p]["count"] == 2


# ------------------------------------------------------------------------------------------- two element-wise rules


@promise(
    "`rule` is element-wise, and `other_rule` is another rule",
    "`rule` is the rule of matrices, always; `other_rule` and its options are used for all other parameters",
)
def test_an_element_wise_rule_of_matrices_leaves_the_others_to_other_rule():
    register(type("Plain", (Rule,), {"name": "plain"}))
    model = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 4), nn.LayerNorm(4))
    others = ["0.weight", "1.bias", "2.weight", "2.bias"]
    for names, lrs in ((("plain", "adamw"), (0.1, 0.2)), (("adamw", "plain"), (0.3, 0.4))):
        options = {f"{name}_lr": lr for name, lr in zip(names, lrs, strict=True)}
        optimizer = MuonOptimizer(model, rule=names[0], other_rule=names[1], **options)
        found = [(group["rule"], group["lr"], group["param_names"]) for group in optimizer.param_groups]
        assert found == [(names[0], lrs[0], ["1.weight"]), (names[1], lrs[1], others)]
    with pytest.raises(ValueError, match=r"'lr' has no effect; pass 'plain_lr'.*rules in use are 'plain', 'adamw'"):
        MuonOptimizer(model, rule="plain", lr=1e-4)
    with pytest.warns(UserWarning, match="plain has nothing to update.*pass other_rule='plain'"):
        MuonOptimizer(nn.LayerNorm(4), rule="plain")


# ----------------------------------------------------------------------------------------------------------- mistakes


@promise(
    "A method of a rule returns or reads something else than it should",
    "An error that names the rule, the method and what it should return",
)
@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            {"factors": lambda self, n: torch.ones(2)},
            r"factors must return two factors \(f, g\).*tensor of shape \(2,\)",
        ),
        ({"factors": lambda self, n: None}, r"factors must return two factors.*got None"),
        ({"factors": lambda self, n: (1.0, None)}, r"each of the two factors must be a number or a tensor, got None"),
        ({"factors": lambda self, n: (n.statistics["row_norms"], 1.0)}, "no statistic 'row_norms'.*Add it to"),
        ({"prepare": lambda self, g, grads, s: None}, "prepare must return a list of 2 tensors.*got None"),
        ({"prepare": lambda self, g, grads, s: grads[:1]}, "prepare must return a list of 2 tensors.*got 1"),
        ({"prepare": lambda self, g, grads, s: grads[0]}, "prepare must return a list of 2 tensors.*got a tensor"),
        ({"prepare": lambda self, g, grads, s: [1.0, 2.0]}, "prepare must return.*object of type float"),
        ({"prepare": lambda self, g, grads, s: [x.sum(0) for x in grads]}, r"for \(6, 6\) it returned \(6,\)"),
        (
            {"state": (*Muon.state, PerParameter("v")), "direction": lambda self, b: b.state["v"]},
            "no per-matrix state 'v'.*only `prepare` gets",
        ),
        ({"direction": lambda self, b: setattr(b, "update", None)}, r"batch\.update.*assigns None to it"),
        ({"direction": lambda self, b: setattr(b, "update", np.ones((2, 6, 6)))}, "type ndarray"),
        (
            {
                "state": (*Muon.state, PerMatrix("v", "scalar")),
                "direction": direction_with(lambda b: b.state.update(v=1)),
            },
            "left an object of type int as 'v': write a tensor of shape",
        ),
        ({"apply": lambda self, g, params, updates, factors=None: params}, "apply must change.*in place.*a list of 2"),
    ],
)
def test_mistakes_name_the_rule(body, text):
    with pytest.raises((TypeError, ValueError, KeyError), match=text) as error:
        step(rule(**body), (6, 6), (6, 6))
    assert "'own'" in str(error.value)


@pytest.mark.parametrize("value", [lambda g: g.norm(), lambda g: g.sum(0, keepdim=True), lambda g: g.sign().int()])
def test_an_element_wise_update_that_would_be_broadcast_or_cast_is_an_error(value):
    name = rule(Rule, prepare=lambda self, group, grads, states: [value(g) for g in grads])
    with pytest.raises((TypeError, ValueError), match="rule 'own': prepare must return a list of 1 tensors"):
        step(name, (6, 4))


def test_metrics_must_be_a_dict():
    name = rule(diagnostics=("x",), metrics=lambda self, last, total: None)
    with pytest.raises(TypeError, match="rule 'own': metrics must return a dict of numbers, got None"):
        step(name).metrics()


@pytest.mark.parametrize("option", ["view", "num_heads", "split_sizes"])
def test_an_option_may_not_be_named_like_one_of_views(option):
    for base in (Muon, Rule):
        with pytest.raises(ValueError, match=f"rule 'own': option '{option}' has the name of an option that says how"):
            rule(base, options=(*base.options, Option(option, 2, "own")))


@promise(
    'Under `nonfinite="raise"`, a rule makes a NaN from finite gradients',
    "That step raises, names the rule and the parameter, and does not apply the update. A step that is replayed as a "
    "CUDA graph raises at its end",
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_rule_that_makes_nan_is_blamed(value):
    calls = []

    def direction(self: Rule, batch: Any) -> None:
        Muon.direction(self, batch)
        calls.append(1)
        if len(calls) > 1:
            batch.update[-1, 0, 0] = value

    named = parameters((6, 4))
    optimizer = MuonOptimizer(named, rule=rule(direction=direction), nonfinite="raise")
    optimizer.step()
    before = named[0][1].detach().clone()
    with pytest.raises(
        ValueError, match="rule 'own': direction left an update of 'w0' that is not finite, though its m"
    ):
        optimizer.step()
    assert_same(named[0][1], before)
    RULES.pop("own")
    name = rule(Rule, prepare=lambda self, group, grads, states: [g * value for g in grads])
    with pytest.raises(ValueError, match="rule 'own': prepare returned an update of 'w0' that is not finite"):
        step(name, (6, 4), nonfinite="raise")


@promise(
    "`factors` of a rule checks the numbers that it gets",
    "It gets real ones only: there is no trial call",
)
def test_factors_get_real_numbers_only():
    seen: list[float] = []

    def factors(self: Rule, numbers: Any) -> Any:
        norms = numbers.statistics["frobenius_norm"]
        seen.extend(norms.tolist())
        assert norms.min() > 1, norms
        return torch.ones(len(norms), numbers.rows, 1), 1.0

    step(rule(statistics=("frobenius_norm",), factors=factors), (6, 6), (6, 6), (9, 4), steps=2)
    assert len(seen) == 6


def test_factors_keep_their_kind():
    calls = []

    def factors(self: Rule, numbers: Any) -> Any:
        calls.append(1)
        return (1.0 if len(calls) == 1 else torch.ones(1, 6, 1)), 1.0

    with pytest.raises(ValueError, match=r"rule 'own': factors must return tensors.*the same kind at every step"):
        step(rule(factors=factors), (6, 5), steps=2)


# ------------------------------------------------------------------------------------------------------------ metrics


class RowAdam(Muon):
    """Divides rows by a second moment, without correction of its start: the first update is much larger than others."""

    name = "row_adam"
    state = (*Muon.state, PerMatrix("v", "rows"))
    diagnostics = ("largest",)

    def direction(self, batch: Any) -> None:
        super().direction(batch)
        moment = batch.state["v"].lerp_(batch.update.square().mean(-1), 0.05)
        batch.update = batch.update / moment.sqrt().unsqueeze(-1)
        batch.diagnostics["largest"] = moment.amax(-1)

    def metrics(self, last: Any, total: Any) -> dict[str, float]:
        return {"largest": float(last["largest"].max())}


class Scaled(Muon):
    """Multiplies updates by a factor per row, and keeps no momentum under that name."""

    name = "scaled"
    state = (PerParameter("own_buffer"),)
    kernels = None
    statistics = ("row_norms",)

    def prepare(self, group: Any, grads: Any, states: Any) -> Any:
        for grad, state in zip(grads, states, strict=True):
            state["own_buffer"].mul_(0.5).add_(grad)
        return [state["own_buffer"] for state in states]

    def factors(self, numbers: Any) -> Any:
        return 1.0, numbers.statistics["row_norms"].unsqueeze(-1)


def changes_and_metrics(name: str, overlap: str = "step") -> tuple[list[float], list[dict[str, float]]]:
    """Train two matrices of different shapes, without any gradient for one of them in the end.

    Returns:
        The root mean squares of the last change of each, and the metrics before the first step and after the last.
    """
    for own in (RowAdam, Scaled):
        register(own)
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 12, bias=False), nn.Linear(12, 4, bias=False)]).double()
    if dist.is_initialized():
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = MuonOptimizer(model.named_parameters(), lr=0.1, rule=name, overlap=overlap)
    found = [optimizer.metrics()]
    params, changes = list(model.parameters()), [0.0, 0.0]
    for number in range(6):
        before = [whole(p) for p in params]
        optimizer.zero_grad()
        sum((p * (1 + number + p)).square().sum() for p in params).backward()
        if number == 5:
            params[1].grad = None
        optimizer.step()
        for index, p in enumerate(params):
            if p.grad is not None:
                changes[index] = float((whole(p) - before[index]).square().mean().sqrt())
    return changes, [*found, optimizer.metrics()]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@promise(
    "Metrics are asked for under a rule with per-matrix state, statistics or factors, on one device or on shards",
    "`update_rms` is what the step has subtracted, factor included. The rule's own `metrics` are called after a step",
)
@pytest.mark.parametrize("name", ["row_adam", "scaled"])
def test_metrics_are_those_of_the_step(ranks: RankPool, name):
    alone = changes_and_metrics(name)
    for world_size in (1, 2, 3):
        results = [alone] if world_size == 1 else ranks.run(world_size, changes_and_metrics, name)
        for changes, (before, after) in results:
            assert before == {"skipped_steps": 0.0}
            assert changes == pytest.approx(alone[0], rel=1e-6)
            # Each rank reports the mean of the matrices that it computes, if there are any.
            possible = [*changes, sum(changes) / 2]
            if "update_rms" in after:
                assert min(abs(after["update_rms"] / size - 1) for size in possible) < 1e-6
            assert ("largest" in after) == (name == "row_adam")
        assert any("update_rms" in after for _, (_, after) in results)
    changes, (_, after) = changes_and_metrics(name, overlap="backward")
    assert after["update_rms"] == pytest.approx(sum(changes) / 2)


def test_the_metrics_of_a_sphere_have_an_update():
    p = nn.Parameter(torch.randn(8, 8))
    optimizer = MuonOptimizer([p], rule="spectral_sphere", lr=0.1, radius_scaler=3.0, lambda_mode="zero")
    assert optimizer.metrics() == {"skipped_steps": 0.0}
    p.grad = torch.randn(8, 8)
    optimizer.step()
    assert optimizer.metrics()["update_rms"] == pytest.approx(0.1 * 3 / 8**0.5, rel=0.05)


# ---------------------------------------------------------------------------------------------------------- on ranks


def other_versions(difference: str) -> str:
    """Register another version of a rule on rank 1; return the error of a step, in which nothing changed."""
    body: dict[str, Any] = {}
    if dist.get_rank() == 1:
        body = {
            "state": {"state": (*Muon.state, PerMatrix("v", "scalar"))},
            "statistics": {"statistics": ("row_norms",)},
            "diagnostics": {"diagnostics": ("x",)},
            "options": {"options": (*Muon.options, Option("own", 1.0, "own"))},
            "methods": {"factors": lambda self, numbers: (1.0, 1.0)},
            "update_dtype": {"update_dtype": torch.float32},
            "kernels": {"kernels": None},
            "flops": {"flops": lambda self, options, rows, cols: 1e15 if rows > cols else 1.0},
            "scratch_bytes": {"scratch_bytes": lambda self, options, rows, cols, *itemsizes: 10**9},
        }[difference]
    named = sharded_parameters()
    before = [whole(p) for _, p in named]
    text = error_of(MuonOptimizer(named, rule=rule(**body)).step)
    assert_same([whole(p) for _, p in named], before)
    return text


def sharded_parameters(*shapes: tuple[int, ...]) -> list[tuple[str, nn.Parameter]]:
    """Return parameters with gradients, divided over all ranks by rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    named = [(f"w{i}", sharded(torch.randn(shape), mesh)) for i, shape in enumerate(shapes or ((9, 5), (6, 6), (5, 7)))]
    give_gradients([p for _, p in named])
    return named


@promise(
    "Ranks have different versions of a rule: other state, statistics, options, methods or costs",
    "All ranks raise before anything is changed, and say what differs",
)
@pytest.mark.parametrize(
    "difference",
    [
        "state",
        "statistics",
        "diagnostics",
        "options",
        "methods",
        "update_dtype",
        "kernels",
        "flops",
        "scratch_bytes",
    ],
)
def test_versions_of_a_rule_that_differ_are_told(ranks: RankPool, difference):
    for text in ranks.run(3, other_versions, difference, timeout=LIMIT):
        assert f"rank 1 has declared {difference}=" in text
        assert "parameter 'w0' of shape (9, 5)" in text
        assert "Import the same version of the rule on all ranks" in text


class Fragile(Muon):
    """Raises in one of its methods, on one rank and at one step. Counts the steps of its matrices."""

    name = "fragile"
    state = (*Muon.state, PerMatrix("steps", "scalar"))
    method, rank, number = "", 0, 0  # where and when it raises

    def _raise(self, method: str) -> None:
        if method == Fragile.method and dist.get_rank() == Fragile.rank and Fragile.number == 1:
            raise FloatingPointError("my own check failed")

    def prepare(self, group: Any, grads: Any, states: Any) -> Any:
        self._raise("prepare")
        return super().prepare(group, grads, states)

    def direction(self, batch: Any) -> None:
        super().direction(batch)
        batch.state["steps"].add_(1)
        self._raise("direction")

    def apply(self, group: Any, params: Any, updates: Any, factors: Any = None) -> None:
        self._raise("apply")
        super().apply(group, params, updates)


class FragileFactors(Fragile):
    name = "fragile_factors"

    def factors(self, numbers: Any) -> Any:
        self._raise("factors")
        return 1.0, 1.0

    def apply(self, group: Any, params: Any, updates: Any, factors: Any = None) -> None:
        Rule.apply(self, group, params, updates, factors)


def failing_rank(method: str, rank: int, options: dict[str, Any]) -> tuple[list[str], list[list[float]]]:
    """Let a rule raise on one rank at the second of four steps.

    Returns:
        The errors of the steps, and the steps that the state of matrices has counted after each.
    """
    for own in (Fragile, FragileFactors):
        register(own)
    Fragile.method, Fragile.rank = method, rank
    named = sharded_parameters((9, 5), (6, 6), (5, 7), (4,))
    params = [p for _, p in named]
    optimizer = MuonOptimizer(
        named, rule="fragile_factors" if method == "factors" else "fragile", max_stage_bytes=200, **options
    )
    texts, counts = [], []
    for Fragile.number in range(4):
        if "overlap" in options:
            optimizer.zero_grad()
            sum((p * p).full_tensor().sum() for p in params).backward()
        before = [local(p).detach().clone() for p in params]
        texts.append(error_of(optimizer.step))
        if Fragile.number == 2:
            assert_same([local(p) for p in params], before)
        counts.append([float(optimizer.state[p]["steps"]) for p in params[:3]])
    return texts, counts


@promise(
    "A rule raises on one rank only, while other ranks compute or wait for its matrices",
    "No rank waits: this rank sends zeros, applies nothing of that stage and raises an error that says that the step "
    "was applied in part. The others raise it at their next step",
)
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("direction", {"strategy": "owner"}),
        ("direction", {"strategy": "replicate"}),
        ("direction", {"strategy": "owner", "overlap": "backward"}),
        ("prepare", {"strategy": "owner", "overlap": "backward"}),
        ("prepare", {"strategy": "owner"}),
        ("apply", {"strategy": "owner"}),
        ("factors", {"strategy": "owner"}),
    ],
)
def test_a_rule_that_raises_on_one_rank_leaves_no_rank_waiting(ranks: RankPool, method, options):
    for rank in (0, 2):
        results = ranks.run(3, failing_rank, method, rank, options, timeout=LIMIT)
        for number, (texts, counts) in enumerate(results):
            assert [texts[0], texts[3]] == ["", ""]
            name = "fragile_factors" if method == "factors" else "fragile"
            reason = f"{method} of rule {name!r} failed on rank {rank} with FloatingPointError: my own check"
            assert (texts[1] != "") == (number == rank)
            if number == rank:
                assert texts[1].startswith(f"This step was applied in part: {reason}")
                assert "resume all ranks from a checkpoint" in texts[1]
            assert texts[2].startswith(
                f"Rank {rank} cannot take this step, so no rank does: its last step was applied in part: {reason}"
            )
            assert counts == results[0][1]  # state is the same on all ranks
            for before, after in zip(counts[0], counts[1], strict=True):
                assert after in (before, before + 1)
            assert counts[1] == counts[2]


def failing_rank_that_stops(ends: bool) -> tuple[str, float]:
    """Let a rule raise on rank 0, which takes no further step; return the error of the next step elsewhere.

    Args:
        ends: whether rank 0 does what it does at the end of its program.

    Returns:
        The last error of this rank, and the seconds that rank 0 needed to end.
    """
    register(Fragile)
    Fragile.method, Fragile.rank, Fragile.number = "direction", 0, 1
    optimizer = MuonOptimizer(sharded_parameters(), rule="fragile", strategy="replicate")
    text, begin = error_of(optimizer.step), time.perf_counter()
    if dist.get_rank() != 0:
        return error_of(optimizer.step), 0.0
    if ends:
        agreement = optimizer._agreement._agreement
        assert agreement is not None
        assert agreement._report is not None
        agreement._report._end()
    return text, time.perf_counter() - begin


@pytest.mark.parametrize("ends", [False, True])
def test_a_rank_that_raised_and_stops_leaves_no_rank_waiting(ranks: RankPool, ends):
    (first, seconds), *others = ranks.run(3, failing_rank_that_stops, ends, timeout=LIMIT)
    assert "This step was applied in part" in first
    assert seconds < 60  # Gloo would wait until the time limit of half an hour
    for error, _ in others:  # if that rank has ended, they may come too late to hear of its reason
        assert "its last step was applied in part" in error or (ends and "can't be reached" in error)


class Gamma(Muon):
    """Multiplies weights by a number per matrix that users write, as in MuonClip."""

    name = "gamma"
    state = (*Muon.state, PerMatrix("gamma", "scalar"))

    def factors(self, numbers: Any) -> Any:
        gamma = numbers.state["gamma"]
        return torch.where(gamma == 0, 1.0, gamma), 1.0


WRITES: dict[str, Callable[[dict[str, Tensor], str, float], object]] = {
    "in place": lambda state, name, value: state[name].fill_(value),
    "data": lambda state, name, value: state[name].data.fill_(value),
    "replaced": lambda state, name, value: state.update({name: torch.full_like(state[name], value)}),
    "one element": lambda state, name, value: state[name][-1:].fill_(value),
}


def written_state(how: str, own_rule: str, name: str) -> list[str]:
    """Write state differently on ranks, then equally, then on one rank only; return the errors of these steps."""
    register(Gamma)
    named = sharded_parameters((9, 5), (2, 6, 6), (4,))
    optimizer = MuonOptimizer(named, rule=own_rule, lr=0.0, adamw_lr=0.0)
    optimizer.step()
    optimizer.step()
    state, write = optimizer.state[named[1][1]], WRITES[how]
    before = [whole(p) for _, p in named]
    texts = []
    for values in ((0.5, 0.75, 0.5), (0.5, 0.75, 0.5), (2.0, 2.0, 2.0), (3.0, None, None), (5.0, 5.0, 5.0)):
        value = values[dist.get_rank()]
        if value is not None:
            write(state, name, value)
        texts.append(error_of(optimizer.step))
        if texts[-1]:
            assert_same([whole(p) for _, p in named], before)
        before = [whole(p) for _, p in named]
    return texts


@promise(
    "Per-matrix state is written by hand, and differs between ranks",
    "All ranks raise before anything is changed; the error names the parameter, the state and its values",
)
@pytest.mark.parametrize("how", WRITES)
def test_written_state_that_differs_is_told(ranks: RankPool, how):
    for own_rule, name in (("gamma", "gamma"), ("normuon", "second_moment")):
        for texts in ranks.run(3, written_state, how, own_rule, name, timeout=LIMIT):
            assert [bool(text) for text in texts] == [True, True, False, True, False]
            for text in (texts[0], texts[1], texts[3]):
                assert "parameter 'w1' of shape (2, 6, 6)" in text
                assert f"state {name!r}=[" in text
                assert "Write the same numbers on all ranks" in text


def drawing(strategy: str) -> str:
    """Take a step with a rule that draws from torch's generator; return the error."""

    def direction(self: Rule, batch: Any) -> None:
        batch.update = torch.randn_like(batch.matrices)

    own = rule(Rule, direction=direction)
    optimizer = MuonOptimizer(sharded_parameters(), rule=own, strategy=strategy)
    return error_of(optimizer.step)


@promise(
    "`direction` draws random numbers from torch's generator, and several ranks compute the same matrix",
    "Each would get other numbers: an error names `batch.random`, which gives the same on every rank",
)
def test_numbers_that_differ_between_ranks_are_an_error(ranks: RankPool):
    for text in ranks.run(2, drawing, "replicate", timeout=LIMIT):
        assert "rule 'own': direction draws random numbers from torch's generator" in text
        assert "Draw them with batch.random" in text
    assert ranks.run(2, drawing, "owner", timeout=LIMIT) == ["", ""]  # each matrix is computed once


def not_finite_in_a_graph() -> list[str]:
    """Make a NaN in the last of some captured steps, without an error in eager ones; return the errors of all steps."""
    register(type("Spoiled", (Muon,), {"name": "spoiled", "direction": direction_with(lambda b: b.update.mul_(SPOIL))}))
    SPOIL.fill_(1.0)
    training = graph_cases.Recorded("spoiled", True)
    original, texts = training.optimizer.step, []

    def step() -> None:
        if len(texts) == graph_cases.NUM_STEPS - 1:
            SPOIL.fill_(torch.nan)
        texts.append(error_of(original))

    training.optimizer._settings = replace(training.optimizer._settings, nonfinite="raise")
    training.optimizer.step = step  # type: ignore[method-assign]
    training.train()
    assert training.optimizer.plan_report().cuda_graph == "captured"
    return texts


SPOIL = torch.ones(())


def test_a_replayed_step_that_makes_nan_is_blamed(ranks: RankPool):
    for texts in ranks.run(2, not_finite_in_a_graph, timeout=LIMIT):
        assert texts[:-1] == [""] * (graph_cases.NUM_STEPS - 1)
        assert "direction of rule 'spoiled' left an update of" in texts[-1]
        assert "It was applied: resume from a checkpoint" in texts[-1]
