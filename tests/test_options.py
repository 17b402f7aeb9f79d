"""Options are never lost: each takes effect where it is given, or is an error that names the place and a valid name."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import tests.toy_rules  # noqa: F401 (registers them)
from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, SpectralSphereOptimizer, create_hybrid_optimizer
from muon_fsdp.declarations.settings import SETTINGS
from muon_fsdp.optimizers.elementwise import TritonMuon, TritonMuonW
from muon_fsdp.rules import RULES
from tests.comparisons import assert_same


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 4)
        self.fc = nn.Linear(4, 6)
        self.out = nn.Linear(6, 4)


def matrix(rows: int = 4, cols: int = 6) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, cols))


def vector() -> nn.Parameter:
    return nn.Parameter(torch.randn(5))


def group_of(optimizer: torch.optim.Optimizer, name: str) -> dict:
    return next(group for group in optimizer.param_groups if name in group["param_names"])


BOTH = pytest.mark.parametrize("make", [MuonOptimizer, FSDPMuonOptimizer])


# ------------------------------------------------------------------------------------------------ where lr and decay go


@BOTH
def test_an_override_of_matrices_and_vectors_sets_the_lr_of_the_matrices(make):
    optimizer = make(Net(), overrides={"fc.*": {"lr": 0.5}})
    assert group_of(optimizer, "fc.weight")["lr"] == 0.5
    assert group_of(optimizer, "fc.bias")["lr"] == 0.003
    assert group_of(optimizer, "out.weight")["lr"] == 0.02


@BOTH
def test_equal_options_under_two_patterns_are_two_places(make):
    """fc.* has a matrix, so its lr is the matrix's; out.bias has none, so its lr is the bias's."""
    optimizer = make(Net(), overrides={"fc.*": {"lr": 0.5}, "out.bias": {"lr": 0.5}})
    assert group_of(optimizer, "fc.bias")["lr"] == 0.003
    assert group_of(optimizer, "out.bias")["lr"] == 0.5


@BOTH
def test_what_an_override_means_does_not_depend_on_groups(make):
    """Groups with and without decay are common; the lr of fc.* is the matrix's in both."""
    model = Net()
    decay = [
        {"params": [("fc.weight", model.fc.weight)], "weight_decay": 0.1},
        {"params": [("fc.bias", model.fc.bias)]},
    ]
    args = (model, decay) if make is FSDPMuonOptimizer else (decay,)
    optimizer = make(*args, overrides={"fc.*": {"lr": 0.7}})
    assert [group["lr"] for group in optimizer.param_groups] == [0.7, 0.003]
    groups = [{"params": (pair for pair in group["params"])} for group in reversed(decay)]  # generators, vectors first
    optimizer = MuonOptimizer(groups, overrides={"fc.*": {"lr": 0.7}})
    assert [group["lr"] for group in optimizer.param_groups] == [0.003, 0.7]


@pytest.mark.parametrize("place", ["group", "override", "constructor"])
def test_decay_of_a_wrapped_model_leaves_vectors_alone(place):
    model = Net()
    if place == "group":
        optimizer = FSDPMuonOptimizer(model, [{"params": model.named_parameters(), "weight_decay": 0.3}])
    elif place == "override":
        optimizer = FSDPMuonOptimizer(model, overrides={"*": {"weight_decay": 0.3}})
    else:
        optimizer = FSDPMuonOptimizer(model, weight_decay=0.3)
    assert group_of(optimizer, "fc.weight")["weight_decay"] == 0.3
    assert group_of(optimizer, "fc.bias")["weight_decay"] == 0.0
    assert group_of(optimizer, "wte.weight")["weight_decay"] == (0.3 if place == "constructor" else 0.01)


@BOTH
def test_decay_of_vectors_by_their_own_name(make):
    model = Net()
    optimizer = (
        make(model, [{"params": [model.fc.bias], "weight_decay": 0.3}, {"params": [model.fc.weight]}])
        if make is FSDPMuonOptimizer
        else make([{"params": [model.fc.bias], "weight_decay": 0.3}, {"params": [model.fc.weight]}])
    )
    assert optimizer.param_groups[0]["weight_decay"] == 0.3
    optimizer = make(model, overrides={"*": {"adamw_weight_decay": 0.2}})
    assert group_of(optimizer, "fc.bias")["weight_decay"] == 0.2


@BOTH
@pytest.mark.parametrize("place", ["constructor", "group", "override"])
def test_normuon_has_a_second_moment_of_its_own(make, place):
    model, own = Net(), {"beta2": 0.7, "eps": 1e-5}
    others = {"adamw_betas": (0.8, 0.6), "adamw_eps": 1e-4}
    if place == "constructor":
        optimizer = make(model, rule="normuon", **own, **others)
    elif place == "group":
        groups = [{"params": model.named_parameters(), **own, **others}]
        optimizer = make(groups, rule="normuon") if make is MuonOptimizer else make(model, groups, rule="normuon")
    else:
        optimizer = make(model, rule="normuon", overrides={"*": {**own, **others}})
    normuon, adamw = group_of(optimizer, "fc.weight"), group_of(optimizer, "fc.bias")
    assert (normuon["beta2"], normuon["eps"]) == (0.7, 1e-5)
    assert (adamw["betas"], adamw["eps"]) == ((0.8, 0.6), 1e-4)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_unprefixed_options_of_the_others_in_a_mixed_group():
    optimizer = MuonOptimizer([{"params": [matrix(), vector()], "lr": 0.5, "betas": (0.5, 0.6)}])
    muon, adamw = optimizer.param_groups
    assert (muon["lr"], adamw["lr"], adamw["betas"]) == (0.5, 0.075, (0.5, 0.6))


def test_a_registered_rule_keeps_the_defaults_that_it_declares():
    """FSDPMuonOptimizer has defaults of its own for the options of built-in rules."""
    model = Net()
    optimizer = FSDPMuonOptimizer(model, rule="toy_second_moment")
    group = group_of(optimizer, "fc.weight")
    assert (group["beta2"], group["nesterov"], group["weight_decay"]) == (0.75, True, 0.01)
    optimizer = FSDPMuonOptimizer(model, rule="toy_second_moment", beta2=0.5)
    assert group_of(optimizer, "fc.weight")["beta2"] == 0.5


def test_a_wrapped_model_with_adamw_for_everything():
    optimizer = FSDPMuonOptimizer(Net(), rule="adamw", adamw_lr=1e-3)
    assert {group["rule"] for group in optimizer.param_groups} == {"adamw"}
    assert group_of(optimizer, "fc.weight")["weight_decay"] == 0.01
    assert group_of(optimizer, "fc.bias")["weight_decay"] == 0.0
    optimizer = FSDPMuonOptimizer(Net(), rule="adamw", weight_decay=0.2)
    assert group_of(optimizer, "wte.weight")["weight_decay"] == 0.2


# ------------------------------------------------------------------------------------------------ no effect is an error


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: MuonOptimizer(Net(), learning_rate=0.1), "'learning_rate' in MuonOptimizer; did you mean 'lr'"),
        (lambda: FSDPMuonOptimizer(Net(), momentun=0.1), "'momentun' in FSDPMuonOptimizer; did you mean 'momentum'"),
        (lambda: create_hybrid_optimizer(Net(), wd=0.1), "'wd' in MuonOptimizer; did you mean 'weight_decay'"),
        (lambda: MuonOptimizer(Net(), stratgy="owner"), "'stratgy' in MuonOptimizer; did you mean 'strategy'"),
        (lambda: MuonOptimizer(Net(), rule="sso"), "Unknown rule 'sso'; .*; did you mean 'spectral_sphere'"),
        (lambda: MuonOptimizer(Net(), rule=3), "Unknown rule 3; valid names are"),
        (lambda: MuonOptimizer(Net(), scale=torch.ones(3)), r"Invalid scale: a tensor of shape \(3,\)"),
        (lambda: MuonOptimizer(Net(), betas=(0.9, 0.9)), "'betas' has no effect; pass 'adamw_betas'"),
        (lambda: MuonOptimizer(Net(), radius_mode="identity"), "'radius_mode' has no effect.*'spectral_sphere'"),
        (lambda: MuonOptimizer(Net(), beta2=0.9), "'beta2' has no effect.*'normuon'"),
        (lambda: MuonOptimizer(Net(), toy_momentum_lr=0.9), "'toy_momentum_lr' has no effect"),
        (lambda: SpectralSphereOptimizer(Net(), ns_stepsize=0.5), "has no ns_stepsize: the radius"),
        (lambda: SpectralSphereOptimizer(Net(), scale="v2"), "has no scale: the radius"),
        (lambda: MuonOptimizer(Net(), rule="adamw", lr=0.02), "'lr' has no effect; pass 'adamw_lr'"),
        (lambda: MuonOptimizer(Net(), rule="adamw", momentum=0.9), "'momentum' has no effect"),
        (
            lambda: MuonOptimizer([vector()], lr=0.02, adamw_lr=0.1),
            "'lr' has no effect; pass 'adamw_lr' alone: .* 'adamw'$",
        ),
        (lambda: MuonOptimizer(Net(), lr=0.02, overrides={"*": "adamw"}), "'lr' has no effect; pass 'adamw_lr'"),
        (lambda: create_hybrid_optimizer(nn.LayerNorm(4), muon_lr=0.1), "'lr' has no effect; pass 'adamw_lr'"),
        (lambda: MuonOptimizer([{"params": [matrix()], "adamw_lr": 0.1}]), "a parameter group: .*'adamw_lr' has no"),
        (lambda: MuonOptimizer([{"params": [vector()], "momentum": 0.1}]), "a parameter group: .*'momentum' has no"),
        (lambda: MuonOptimizer([{"params": [vector()], "view": "attn"}]), "a parameter group: .*'view' has no effect"),
        (
            lambda: MuonOptimizer([{"params": [matrix()], "rule": "adamw", "scale": "v1"}]),
            "a parameter group: .*'scale' has no effect",
        ),
        (
            lambda: MuonOptimizer([{"params": [vector()], "lr": 0.1, "adamw_lr": 0.2}]),
            "a parameter group: 'lr' and 'adamw_lr' mean the same",
        ),
        (
            lambda: MuonOptimizer(Net(), overrides={"fc.bias": {"momentum": 0.5}}),
            r"overrides\['fc.bias'\]: .*'momentum'",
        ),
        (
            lambda: MuonOptimizer(Net(), overrides={"fc.*": {"lrr": 0.5}}),
            r"'lrr' in overrides\['fc.\*'\]; did you mean",
        ),
        (
            lambda: MuonOptimizer(Net(), overrides={"fc.*": {"lr": -1}}),
            r"overrides\['fc.\*'\]: Invalid learning rate: -1",
        ),
        (lambda: MuonOptimizer(Net(), other_rule="normuon"), "other_rule='normuon' works on whole matrices"),
        (lambda: MuonOptimizer(Net(), other_rule="toy_momentum", adamw_lr=0.1), "'adamw_lr' has no effect"),
        (lambda: FSDPMuonOptimizer(Net(), other_rule="toy_momentum", beta2=0.9), "'beta2' has no effect"),
    ],
)
def test_an_option_without_effect_is_an_error(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_add_param_group_refuses_too():
    optimizer = MuonOptimizer([matrix()])
    with pytest.raises(ValueError, match="Unknown option 'momentun' in a parameter group; did you mean 'momentum'"):
        optimizer.add_param_group({"params": [matrix()], "momentun": 0.9})
    with pytest.raises(ValueError, match="'radius_scaler' has no effect"):
        optimizer.add_param_group({"params": [matrix()], "radius_scaler": 2.0})
    with pytest.raises(ValueError, match="a parameter group: Unknown rule 'moun'"):
        optimizer.add_param_group({"params": [matrix()], "rule": "moun"})
    with pytest.raises(ValueError, match="a parameter group: 'strategy' is a setting of the whole optimizer"):
        optimizer.add_param_group({"params": [matrix()], "strategy": "owner"})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [matrix()], "rule": "spectral_sphere", "radius_scaler": 2.0})
    assert optimizer.param_groups[1]["radius_scaler"] == 2.0


@pytest.mark.filterwarnings("ignore:overrides .* match no parameter")
def test_an_override_of_a_parameter_that_comes_later():
    optimizer = MuonOptimizer([("a", matrix())], overrides={"late*": {"beta2": 0.5}})
    with pytest.raises(ValueError, match=r"overrides\['late\*'\]: option 'beta2' has no effect"):
        optimizer.add_param_group({"params": [("late1", matrix())]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("late1", matrix())], "rule": "normuon"})
    assert optimizer.param_groups[1]["beta2"] == 0.5


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.needs_matrices])
@pytest.mark.parametrize("place", ["constructor", "group", "override", "add_param_group"])
@pytest.mark.filterwarnings("ignore:weight_decay has no effect")
def test_every_option_of_every_rule_arrives_from_every_place(rule, place):
    others = {"v1", "bracketed", "keller"}
    for name, option in RULES[rule].all_options.items():
        if name in ("num_heads", "split_sizes", "view", "transposed"):
            value = {"num_heads": 2, "split_sizes": (3, 1), "view": "matrix", "transposed": True}[name]
        elif option.choices:
            value = next((c for c in option.choices if c != option.default and c not in others), option.choices[-1])
        elif isinstance(option.default, bool):
            value = not option.default
        else:
            value = option.default * 3 if isinstance(option.default, int) else option.default / 2 + 1e-3
        if name == "cautious_weight_decay" and RULES[rule].multiplies_weights:
            value = False  # True is an error, which another test looks at
        half = name == "rounding"  # which float32 weights refuse
        w = nn.Parameter(matrix().detach().bfloat16()) if half else matrix()
        given = {name: value}
        if place == "constructor":
            optimizer = MuonOptimizer([("w", w)], rule=rule, **given)
        elif place == "override":
            optimizer = MuonOptimizer([("w", w)], rule=rule, overrides={"w": given})
        elif place == "group":
            optimizer = MuonOptimizer([{"params": [w], **given}], rule=rule)
        else:
            optimizer = MuonOptimizer([matrix()], rule=rule)
            optimizer.add_param_group({"params": [w], **given})
        assert optimizer.param_groups[-1][name] == value, name


# ---------------------------------------------------------------------------------------------------- keyword arguments


@pytest.mark.parametrize(
    "make",
    [
        lambda *args: MuonOptimizer([matrix()], 0.02, *args),
        lambda *args: SpectralSphereOptimizer([matrix()], 0.02, *args),
        lambda *args: FSDPMuonOptimizer(Net(), None, 0.02, *args),
        lambda *args: create_hybrid_optimizer(Net(), 0.02, *args),
        lambda *args: TritonMuon([matrix()], 0.02, *args),
        lambda *args: TritonMuonW([matrix()], 0.02, *args),
    ],
)
def test_everything_after_lr_is_keyword_only(make):
    """torch's and Keller Jordan's Muon have weight decay where ours would have momentum."""
    make()
    with pytest.raises(TypeError, match="positional argument"):
        make(0.1)


@pytest.mark.parametrize(
    ("owner", "expected"),
    [
        (MuonOptimizer, {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "nesterov": False, "ns_steps": 5}),
        (
            SpectralSphereOptimizer,
            {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "nesterov": False, "ns_steps": 5,
             "power_iteration_steps": 10, "radius_mode": "spectral_mup", "radius_scaler": 1.0, "retract_mode": "hard"},
        ),
    ],
)  # fmt: skip
def test_signatures_and_docstrings_show_the_options(owner, expected):
    hybrid = inspect.signature(create_hybrid_optimizer).parameters
    assert [hybrid[name].default for name in ("muon_lr", "adamw_lr", "adamw_weight_decay")] == [0.02, 1e-3, 0.01]
    parameters = inspect.signature(owner).parameters
    assert {name: parameters[name].default for name in expected} == expected
    for name in parameters:
        assert f"{name}: " in owner.__doc__ or owner is not MuonOptimizer, name
    assert "{options}" not in owner.__doc__


# ------------------------------------------------------------------------------------------------- groups of frameworks


def test_groups_of_an_optimizer_make_another():
    model = Net()
    first = FSDPMuonOptimizer(model, lr=0.05, rule="normuon", adamw_lr=1e-3, overrides={"fc.*": {"lr": 0.1}})
    torch.optim.lr_scheduler.OneCycleLR(first, max_lr=[group["lr"] for group in first.param_groups], total_steps=10)
    second = MuonOptimizer(first.param_groups)
    for a, b in zip(first.param_groups, second.param_groups, strict=True):
        assert a.keys() == b.keys()
        assert {**a, "params": None} == {**b, "params": None}
        assert list(map(id, a["params"])) == list(map(id, b["params"]))


@pytest.mark.parametrize("rule", ["muon", "spectral_sphere"])
def test_a_cyclic_scheduler_moves_momentum(rule):
    model = Net()
    optimizer = MuonOptimizer(model, rule=rule)
    lrs = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, lrs, [2 * lr for lr in lrs], step_size_up=4)
    seen = set()
    for _ in range(4):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        scheduler.step()
        seen.add(optimizer.param_groups[0]["momentum"])
    assert len(seen) == 4
    MuonOptimizer(optimizer.param_groups)
    resumed = MuonOptimizer(model, rule=rule)
    resumed.load_state_dict(optimizer.state_dict())


def test_names_in_some_groups_only():
    optimizer = MuonOptimizer([{"params": [matrix()]}, {"params": [("named", matrix())]}])
    assert [group["param_names"] for group in optimizer.param_groups] == [["param[0]"], ["named"]]
    optimizer = MuonOptimizer([matrix()])
    optimizer.add_param_group({"params": [("late", matrix()), ("later", vector())]})
    assert [group["param_names"] for group in optimizer.param_groups] == [["param[0]"], ["late"], ["later"]]


def test_the_rule_of_a_group_may_be_changed_by_hand():
    w = matrix()
    optimizer = MuonOptimizer([w])
    w.grad = torch.randn_like(w)
    optimizer.step()
    optimizer.param_groups[0]["rule"] = "normuon"
    optimizer.step()
    assert optimizer.param_groups[0]["beta2"] == 0.95
    assert optimizer.state[w]["second_moment"].shape == (4,)
    optimizer.param_groups[0]["rule"] = "adamw"  # whose second moment has another shape
    with pytest.warns(UserWarning, match=r"'second_moment' of parameter 'param\[0\]' starts anew"):
        optimizer.step()
    assert optimizer.state[w]["second_moment"].shape == (4, 6)


def test_options_changed_between_steps_take_effect():
    w = matrix()
    optimizer = MuonOptimizer([w])
    w.grad = torch.randn_like(w)
    optimizer.step()
    optimizer.param_groups[0]["ns_stepsize"] = 0.0
    before = w.detach().clone()
    optimizer.step()
    assert_same(w, before)


def test_options_changed_between_steps_are_checked_and_made_plain():
    w = matrix()
    optimizer = MuonOptimizer([w], rule="normuon")
    w.grad = torch.randn_like(w)
    optimizer.step()
    optimizer.param_groups[0]["split_sizes"] = [3, 1]  # a list, where the constructor would have made a tuple
    optimizer.step()
    assert optimizer.param_groups[0]["split_sizes"] == (3, 1)
    optimizer.param_groups[0]["ns_steps"] = 0
    with pytest.raises(ValueError, match=r"param_groups\[0\]: Invalid ns_steps: 0"):
        optimizer.step()


# ------------------------------------------------------------------------------------------------------------- the pair


@pytest.mark.parametrize("make", [TritonMuon, TritonMuonW])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"lr": "0.1"}, TypeError, "Invalid learning rate: '0.1'"),
        ({"momentum": 1.0}, ValueError, "Invalid momentum parameter: 1.0"),
        ({"nesterov": 1}, TypeError, "Invalid nesterov: 1"),
        ({"velocty": 0.9}, ValueError, "Unknown option 'velocty' in a parameter group; did you mean 'velocity'"),
        ({"learning_rate": 0.9}, ValueError, "'learning_rate' in a parameter group; did you mean 'lr'"),
    ],
)
def test_groups_of_the_pair_are_checked(make, options, error, text):
    with pytest.raises(error, match=text):
        make([{"params": [matrix()], **options}])
    optimizer = make([{"params": [matrix()], "initial_lr": 0.1, "name": "body"}])
    with pytest.raises(error, match=text):
        optimizer.add_param_group({"params": [matrix()], **options})


def test_settings_have_the_defaults_of_the_constructor():
    parameters = inspect.signature(MuonOptimizer.__init__).parameters
    assert {option.name: parameters[option.name].default for option in SETTINGS} == {
        option.name: option.default for option in SETTINGS
    }
    assert parameters["cuda_graph"].default == "auto"
