"""Rules of users: registering, what a class may declare, and mistakes that name the rule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tests.toy_rules  # noqa: F401 (registers them)
from muon_fsdp import MuonOptimizer, create_hybrid_optimizer
from muon_fsdp.rules import BUILT_IN, RULES, Muon, Option, PerMatrix, PerParameter, Rule, available, register
from tests.comparisons import assert_same


@pytest.fixture
def registry():
    before = dict(RULES)
    yield RULES
    RULES.clear()
    RULES.update(before)


def test_registering_again_replaces(registry):
    """A notebook cell that is run twice does this; a living optimizer uses the new rule at its next step."""

    def define(size: float) -> None:
        @register
        class Constant(Rule):
            name = "constant"

            def prepare(self, group, grads, states):
                return [torch.full_like(grad, size) for grad in grads]

    define(1.0)
    p = nn.Parameter(torch.zeros(3))
    optimizer = MuonOptimizer([p], rule="constant", other_rule="constant", constant_lr=1.0)
    p.grad = torch.ones(3)
    optimizer.step()
    define(10.0)
    optimizer.step()
    assert p.tolist() == [-11.0] * 3


def test_five_lines_are_a_rule(registry):
    @register
    class Signs(Rule):
        name = "signs"

        def direction(self, batch):
            batch.update = batch.matrices.sign()

    w, b = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(3))
    optimizer = MuonOptimizer([w, b], rule="signs", lr=0.5)
    w.grad, b.grad = torch.randn(3, 4), torch.randn(3)
    optimizer.step()
    assert_same(w, -0.5 * w.grad.sign())
    assert [row.rule for row in optimizer.routing_report().rows] == ["signs", "adamw"]
    assert RULES["signs"].display_name == "signs"
    # What extends Muon is not called Muon.
    assert [RULES[name].display_name for name in ("muon", "row_normed")] == ["Muon", "row_normed"]
    assert optimizer.plan_report(world_size=4).num_matrices == 1


def test_the_rule_of_other_parameters_can_be_chosen():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    optimizer = MuonOptimizer(model, other_rule="toy_momentum", toy_momentum_lr=0.5, toy_momentum_beta=0.25)
    assert [group["rule"] for group in optimizer.param_groups] == ["muon", "toy_momentum"]
    start = model[0].weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), start - 0.5 * (1 + 1.25))
    resumed = MuonOptimizer(model, other_rule="toy_momentum", toy_momentum_beta=0.25)
    resumed.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="saved with rule 'toy_momentum', but takes 'adamw' here"):
        MuonOptimizer(model).load_state_dict(optimizer.state_dict())


def test_an_element_wise_rule_takes_vectors_that_are_given_to_it():
    w, b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    optimizer = MuonOptimizer([{"params": [w]}, {"params": [b], "rule": "toy_momentum", "beta": 0.3}])
    assert [(g["rule"], g.get("beta")) for g in optimizer.param_groups] == [("muon", None), ("toy_momentum", 0.3)]
    assert [g["rule"] for g in MuonOptimizer([w, b], rule="toy_momentum").param_groups] == ["toy_momentum", "adamw"]
    optimizer = MuonOptimizer([w, b], other_rule="toy_momentum")
    assert [g["rule"] for g in MuonOptimizer(optimizer.param_groups).param_groups] == ["muon", "toy_momentum"]


def test_a_hybrid_with_another_element_wise_rule():
    model = nn.Linear(4, 3)
    optimizer = create_hybrid_optimizer(model, other_rule="toy_momentum", toy_momentum_lr=0.1)
    assert [(g["rule"], g["lr"]) for g in optimizer.param_groups] == [("muon", 0.02), ("toy_momentum", 0.1)]
    usual = create_hybrid_optimizer(model).param_groups[1]
    assert (usual["lr"], usual["weight_decay"]) == (1e-3, 0.01)


def test_a_checkpoint_of_a_rule_that_is_not_registered_says_so(registry):
    w = nn.Parameter(torch.randn(3, 4))
    optimizer = MuonOptimizer([w], rule="row_normed")
    w.grad = torch.randn(3, 4)
    optimizer.step()
    saved = optimizer.state_dict()
    del registry["row_normed"]
    with pytest.raises(RuntimeError, match="saved with rule 'row_normed', which is not registered: import the file"):
        MuonOptimizer([w]).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"Unknown rule 'row_normed'.*must be registered first"):
        MuonOptimizer([w], rule="row_normed")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"name": "bad name"}, "needs a name that is an identifier"),
        ({"options": (Option("lr", 0.1, "lr"),)}, "must include 'lr' as a per_step option"),
        ({"statistics": ("row_norm",)}, "unknown statistic 'row_norm'; did you mean 'row_norms'"),
        ({"state": (PerMatrix("a", "rows"), PerMatrix("a", "rows"))}, "'a' is declared twice"),
        ({"state": (*Muon.state, PerMatrix("a", "rows")), "diagnostics": ("a",)}, "'a' is declared twice"),
        ({"state": (*Muon.state, PerMatrix("a", "row"))}, "unknown kind 'row'; valid"),
        ({"state": (*Muon.state, PerParameter("a", "rows"))}, "unknown kind 'rows'; valid"),
        ({"diagnostics": "abc"}, "diagnostics must be a tuple"),
        ({"options": (*Muon.options, Option("strategy", "x", "x"))}, "'strategy' has a name that the optimizers use"),
        ({"options": (*Muon.options, Option("params", "x", "x"))}, "'params' has a name that the optimizers use"),
        ({"options": (*Muon.options, Option("micro_step", 1, "x"))}, "'micro_step' has a name that the optimizers use"),
        ({"options": (*Muon.options, Option("table", {}, "x"))}, "must be a number, a string, None or a sequence"),
        ({"state": (*Muon.state, PerMatrix("a", "rows", initial="row_norms"))}, "add it to statistics"),
        (
            {
                "state": (*Muon.state, PerMatrix("a", "rows", initial="frobenius_norm")),
                "statistics": ("frobenius_norm",),
            },
            "of kind 'rows' can't start from 'frobenius_norm'",
        ),
        ({"state": ()}, "kernels need the state 'momentum_buffer'"),
        (
            {"options": (*Muon.options, Option("x", 2.0, "x", check=lambda v: v < 1))},
            "default of an option is not valid",
        ),
    ],
)
def test_declarations_that_contradict_themselves_are_refused(registry, body, text):
    with pytest.raises((TypeError, ValueError), match=text):
        register(type("Bad", (Muon,), {"name": "bad", **body}))


def test_an_element_wise_rule_has_no_matrices(registry):
    with pytest.raises(ValueError, match="need a rule that defines direction"):
        register(type("Bad", (Rule,), {"name": "bad", "state": (PerMatrix("a", "rows"),)}))
    with pytest.raises(TypeError, match="needs a subclass of Rule"):
        register(object)


@pytest.mark.parametrize(
    "body",
    [
        {"statistics": ("frobenius_norm",)},
        {"factors": lambda self, numbers: (0.5, torch.tensor(2.0))},
        {"diagnostics": ("size",)},
    ],
)
def test_a_rule_without_state_of_matrices_may_have_the_others(registry, body):
    def direction(self, batch):
        Muon.direction(self, batch)
        if self.statistics:
            batch.update.mul_(batch.statistics["frobenius_norm"].view(-1, 1, 1))
        if self.diagnostics:
            batch.diagnostics["size"] = batch.update.abs().amax((-2, -1))

    def metrics(self, last, total):
        return {name: float(value.sum()) for name, value in last.items()}

    register(type("Lone", (Muon,), {"name": "lone", "direction": direction, "metrics": metrics, **body}))
    params = [nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
    plain = [nn.Parameter(p.detach().clone()) for p in params]
    starts = [p.detach().clone() for p in params]
    optimizer, muon = MuonOptimizer(params, rule="lone", lr=0.1), MuonOptimizer(plain, lr=0.1)
    for p, q in zip(params, plain, strict=True):
        p.grad = torch.randn(4, 3)
        q.grad = p.grad.clone()
    optimizer.step()
    muon.step()
    for p, q, start in zip(params, plain, starts, strict=True):
        update = start - q.detach()
        expected = start - update
        if "statistics" in body:
            expected = start - start.norm() * update
        elif "factors" in body:
            expected = 0.5 * start - 2 * update
        torch.testing.assert_close(p.detach(), expected)
    assert ("size" in optimizer.metrics()) == ("diagnostics" in body)


def test_blocks_of_one_parameter_may_have_factors_of_different_kinds(registry):
    @register
    class MixedKinds(Muon):
        name = "mixed_kinds"

        def factors(self, numbers):
            count = len(numbers.options["lr"])
            if numbers.rows > numbers.cols:
                return torch.arange(1.0, numbers.rows + 1).view(1, -1, 1).expand(count, -1, 1), 0.0
            return torch.arange(1.0, numbers.cols + 1).view(1, 1, -1).expand(count, 1, -1), 0.0

    w, thin = nn.Parameter(torch.randn(12, 4)), nn.Parameter(torch.randn(6, 1))
    starts = [w.detach().clone(), thin.detach().clone()]
    optimizer = MuonOptimizer(
        [{"params": [("w", w)], "split_sizes": (9, 3)}, {"params": [("thin", thin)], "split_sizes": (1, 5)}],
        rule="mixed_kinds",
        overrides={"thin": "mixed_kinds"},
    )
    for p in (w, thin):
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.testing.assert_close(w.detach()[:9], starts[0][:9] * torch.arange(1.0, 10.0)[:, None])
    torch.testing.assert_close(w.detach()[9:], starts[0][9:] * torch.arange(1.0, 5.0))
    torch.testing.assert_close(thin.detach()[1:], starts[1][1:] * torch.arange(1.0, 6.0)[:, None])


def test_state_that_factors_change_in_place_stays_where_nothing_is_updated(registry):
    @register
    class Counting(Muon):
        name = "counting"
        state = (*Muon.state, PerMatrix("steps", "scalar"))

        def factors(self, numbers):
            numbers.state["steps"].add_(1)
            return 1.0, 1.0

    params = [nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
    optimizer = MuonOptimizer(params, rule="counting")
    for step in range(3):
        params[0].grad = torch.randn(4, 3)
        params[1].grad = torch.randn(4, 3) if step == 1 else None
        optimizer.step()
    assert [optimizer.state[p]["steps"].tolist() for p in params] == [[3.0], [1.0]]


def test_what_factors_may_read_and_write(registry):
    seen = []

    def factors(self, numbers):
        numbers.state["a"] = numbers.state["a"] + numbers.options["lr"]  # float64, as options are
        return numbers.options["lr"] * 0 + 1, 1.0

    def direction(self, batch):
        Muon.direction(self, batch)
        seen.append(batch.state["a"].dtype)

    state = (*Muon.state, PerMatrix("a", "scalar"))
    step_with(registry, factors=factors, direction=direction, state=state)
    assert seen == [torch.float32]
    pair = Option("pair", (0.5, 0.5), "two numbers", per_step=True)
    with pytest.raises(KeyError, match=r"can't read 'pair'.*not a number"):
        step_with(registry, factors=lambda self, n: (n.options["pair"], 1.0), options=(*Muon.options, pair))
    with pytest.raises(KeyError, match="can't read 'lrr'"):
        step_with(registry, factors=lambda self, n: (n.options["lrr"], 1.0))

    def wrong_shape(self, numbers):
        numbers.state["a"] = torch.zeros(1, 2)
        return 1.0, 1.0

    def undeclared(self, numbers):
        numbers.diagnostics["b"] = torch.zeros(1)
        return 1.0, 1.0

    with pytest.raises(ValueError, match=r"left 'a' with shape \(1, 2\), expected \(1,\)"):
        step_with(registry, factors=wrong_shape, state=state)
    with pytest.raises(ValueError, match=r"diagnostics\['b'\], which it does not declare"):
        step_with(registry, factors=undeclared)


def step_with(registry, **body) -> None:
    register(type("Bad", (Muon,), {"name": "bad", **body}))
    w = nn.Parameter(torch.randn(3, 4))
    w.grad = torch.randn(3, 4)
    MuonOptimizer([w], rule="bad").step()


def test_mistakes_inside_a_rule_name_it(registry):
    def reads_momentum(self, batch):
        return batch.options["momentum"]

    def changes_shape(self, batch):
        Muon.direction(self, batch)
        batch.state["a"] = batch.state["a"][:, :1]

    def assigns_wrong_shape(self, batch):
        batch.update = torch.zeros(1, 2, 2)

    def undeclared(self, batch):
        batch.diagnostics["b"] = torch.zeros(1)

    state = (*Muon.state, PerMatrix("a", "rows"))
    with pytest.raises(KeyError, match="may change at every step"):
        step_with(registry, direction=reads_momentum)
    with pytest.raises(ValueError, match=r"left 'a' with shape \(1, 1\), expected \(1, 3\)"):
        step_with(registry, direction=changes_shape, state=state)
    with pytest.raises(ValueError, match=r"batch.update has shape \(1, 3, 4\), got \(1, 2, 2\)"):
        step_with(registry, direction=assigns_wrong_shape)
    with pytest.raises(ValueError, match="which it does not declare"):
        step_with(registry, direction=undeclared, state=state)
    with pytest.raises(KeyError, match="may change at every step"):
        step_with(registry, direction=lambda self, batch: batch.options.get("momentum", 0.9))
    with pytest.raises(KeyError, match="has no option 'scal'; did you mean 'scale'"):
        step_with(registry, direction=lambda self, batch: batch.options["scal"])
    with pytest.raises(ValueError, match="factors must return tensors"):
        step_with(registry, factors=lambda self, numbers: (torch.ones(3), torch.ones(1)))


def test_kernels_count_only_where_prepare_and_apply_are_theirs(registry):
    class OwnPrepare(Muon):
        name = "own_prepare"
        state = (PerParameter("extra"), *Muon.state)  # the order is free

        def prepare(self, group, grads, states):
            return super().prepare(group, [2 * grad for grad in grads], states)

    class OwnDirection(Muon):
        name = "own_direction"
        state = (PerParameter("extra"), *Muon.state)

        def direction(self, batch):
            super().direction(batch)

    assert OwnPrepare().fused is None
    assert OwnDirection().fused is Muon.kernels


def test_available_lists_built_in_and_registered_rules():
    @register
    class Listed(Muon):
        """Do what Muon does,
        under another name.

        Nothing else.
        """

        name = "listed"
        title = "Listed"
        paper = "arXiv 0000.00000"
        options = (*Muon.options, Option("loudness", 1.0, "how loud"))

    @register
    class Bare(Listed):
        name = "bare"

    try:
        by_name = {info.name: info for info in available()}
        listed, bare = by_name["listed"], by_name["bare"]
    finally:
        del RULES["listed"], RULES["bare"]
    assert list(by_name)[:2] == ["muon", "normuon"]
    for rule in BUILT_IN:
        info = by_name[rule.name]
        assert info.line.endswith(".")
        assert info.paper
        assert info.title == rule.title
    assert by_name["spectral_sphere"].paper == "arXiv 2601.08393"
    assert "cautious_weight_decay" in {option.name for option in by_name["adamw"].options}
    assert (listed.title, listed.line) == ("Listed", "Do what Muon does, under another name.")
    assert listed.paper == "arXiv 0000.00000"
    assert {"loudness", "num_heads"} <= {option.name for option in listed.options}
    assert (bare.title, bare.line, bare.paper) == ("bare", "", "")  # nothing is inherited
    assert "listed" not in {info.name for info in available()}
