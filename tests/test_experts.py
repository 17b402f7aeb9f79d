"""Mixtures of experts: routers, experts stored (experts, in, out), and the option `transposed`."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
from torch import nn

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, label
from muon_fsdp.benchmarks.public_models import PUBLIC_MODELS
from tests import expert_cases as cases
from tests.expert_cases import Experts, Mixture
from tests.pool import RankPool
from tests.routing_cases import rows, rules
from tests.test_optimizer_views import expected_update

SPLIT = {"*gate_up_proj": {"split_sizes": (18, 18)}, "*down_proj": {"split_sizes": (7, 5)}}


# ------------------------------------------------------------------------------------------------- transposed storage


@pytest.mark.parametrize("overrides", [{}, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("rule", ["muon", "normuon"])
def test_transposed_experts_follow_the_float64_reference(rule, overrides):
    cases.follow_reference(None, rule, overrides)


def test_transposed_experts_on_the_spectral_sphere():
    cases.follow_reference(None, "spectral_sphere", {})


@pytest.mark.parametrize(
    ("world_size", "dim", "rule", "overrides"),
    [
        (2, 0, "muon", SPLIT),
        (2, 1, "normuon", SPLIT),
        (2, 2, "spectral_sphere", {}),
        (3, 0, "spectral_sphere", {}),
        (3, 1, "muon", SPLIT),
        (3, 2, "normuon", {"*down_proj": {"num_heads": 3}}),
    ],
)
def test_transposed_experts_in_every_layout(ranks: RankPool, world_size, dim, rule, overrides):
    ranks.run(world_size, cases.follow_reference, dim, rule, overrides)


def test_transposed_by_group_by_override_and_for_all():
    weight = torch.randn(3, 8, 5, dtype=torch.float64)
    flat = torch.randn(6, 9, dtype=torch.float64)
    exact = {"lr": 1.0, "orthogonalization": "exact", "scale": "v3"}
    for build in (
        lambda a, b: MuonOptimizer([{"params": [a, b], "transposed": True}], **exact),
        lambda a, b: MuonOptimizer([("a", a), ("b", b)], overrides={"?": {"transposed": True}}, **exact),
        lambda a, b: MuonOptimizer([a, b], transposed=True, **exact),
    ):
        stack, matrix = nn.Parameter(torch.zeros_like(weight)), nn.Parameter(torch.zeros_like(flat))
        stack.grad, matrix.grad = weight.clone(), flat.clone()
        optimizer = build(stack, matrix)
        assert {row.scale for row in optimizer.routing_report().rows} == {"0.7906", "1.225"}  # 5/8, 9/6
        optimizer.step()
        torch.testing.assert_close(-stack.detach(), torch.stack([expected_update(g.T, scale="v3").T for g in weight]))
        torch.testing.assert_close(-matrix.detach(), expected_update(flat.T, scale="v3").T)


def test_transposed_false_beats_what_was_detected():
    model = Mixture()
    assert rows(MuonOptimizer(model))["experts.gate_up_proj"].scale == "1.732"  # (36, 12)
    assert rows(MuonOptimizer(model, transposed=False))["experts.gate_up_proj"].scale == "1"
    overridden = MuonOptimizer(model, overrides={"*down_proj": {"transposed": False}})
    assert [group.get("transposed") for group in overridden.param_groups] == [None, False, None]
    restored = MuonOptimizer(Mixture(), overrides={"*down_proj": {"lr": 0.5}})
    restored.load_state_dict(overridden.state_dict())  # an option of a group is part of a checkpoint
    assert rows(restored)["experts.down_proj"].scale == rows(overridden)["experts.down_proj"].scale == "1.225"


def test_transposed_where_it_means_nothing_is_an_error():
    for parameter, view, shown in ((torch.randn(4, 3, 2, 2), "auto", "flatten"), (torch.randn(4, 8), "attn", "attn")):
        group = {"params": [("w", nn.Parameter(parameter))], "transposed": True, "view": view}
        with pytest.raises(ValueError, match=rf"parameter 'w' .*transposed=True needs .* its view is '{shown}'"):
            MuonOptimizer([group])
    with pytest.raises(TypeError, match=r"transposed.*must be True or False"):
        MuonOptimizer([nn.Parameter(torch.randn(4, 3))], transposed="yes")


def is_transposed(model: nn.Module | list) -> dict[str, bool]:
    found = rows(MuonOptimizer(model)).values()
    return {row.name: row.reason.endswith("stored (in, out)") for row in found if len(row.shape) == 3}


def stack(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


@pytest.mark.parametrize("transposed", [True, False])
def test_fused_experts_show_how_they_are_stored(transposed):
    """Gate and up are twice as long as down in one dimension, so no name of a class is needed."""
    for model in (Mixture(transposed), Experts(transposed), Mixture(transposed, count=3, width=6, hidden=6)):
        assert set(is_transposed(model).values()) == {transposed}
        assert set(is_transposed(list(model.named_parameters())).values()) == {transposed}


@pytest.mark.parametrize("names", [("w1", "w2", "w3"), ("gate_proj", "down_proj", "up_proj"), ("wi_0", "wo", "wi_1")])
@pytest.mark.parametrize("transposed", [True, False])
def test_the_router_tells_the_inputs_of_separate_experts(names, transposed):
    first, last, second = names
    up, down = ((8, 20), (20, 8)) if transposed else ((20, 8), (8, 20))
    model = nn.ModuleDict(
        {
            "experts": nn.ParameterDict({first: stack(4, *up), last: stack(4, *down), second: stack(4, *up)}),
            "router": nn.ModuleDict({"gate": nn.Linear(8, 4)}),
        }
    )
    assert set(is_transposed(model).values()) == {transposed}
    del model["router"]
    assert set(is_transposed(model).values()) == {False}  # nothing shows it


def test_what_a_class_notes_decides():
    model = Mixture(transposed=True, width=6, hidden=6)
    model.experts.is_transposed = False  # as Transformers notes it on classes of experts
    assert set(is_transposed(model).values()) == {False}
    unfused = nn.ModuleDict({"experts": nn.ParameterDict({"weight": stack(3, 6, 6)})})
    unfused["experts"].is_transposed = True
    assert is_transposed(unfused) == {"experts.weight": True}
    label(unfused["experts"], "flatten")  # the user's view has no matrices that could be transposed
    assert rows(MuonOptimizer(unfused))["experts.weight"].reason == "3D weight"


SMALL = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "num_local_experts": 4,
}  # fmt: skip


def causal_model(name: str, config: str, **sizes: object) -> nn.Module:
    """Build a model of Transformers on the meta device."""
    with torch.device("meta"):
        return getattr(transformers, name)(getattr(transformers, config)(**sizes))


@pytest.mark.parametrize(
    ("name", "config", "sizes", "transposed", "split"),
    [
        # Rows of gate and up alternate: no option splits them.
        ("GptOssForCausalLM", "GptOssConfig", {}, True, {}),
        ("Llama4ForCausalLM", "Llama4TextConfig", {"interleave_moe_layer_step": 1}, True, {"split_sizes": (24, 24)}),
        ("MixtralForCausalLM", "MixtralConfig", {}, False, {"split_sizes": (24, 24)}),
        (
            "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 24}, False,
            {"split_sizes": (24, 24)},
        ),
    ],
    ids=["gpt-oss", "llama 4", "mixtral", "qwen3"],
)  # fmt: skip
def test_experts_of_transformers(name, config, sizes, transposed, split):
    model = causal_model(name, config, **{**SMALL, **sizes})
    whole = MuonOptimizer(model, attention="whole").routing_report().rows
    found = {row.name.removeprefix("model.layers.0."): row for row in whole}
    (gate_up,) = [
        row for place, row in found.items() if place.endswith("experts.gate_up_proj") and "layers" not in place
    ]
    (down,) = [row for place, row in found.items() if place.endswith("experts.down_proj") and "layers" not in place]
    assert gate_up.scale == f"{(48 / 32) ** 0.5:.4g}"
    assert down.scale == f"{(32 / 24) ** 0.5:.4g}"
    assert down.reason.endswith("stored (in, out)") == transposed
    assert (bool(gate_up.fused), gate_up.split_by) == (bool(split), split)
    assert [row.rule for row in found.values() if row.reason == "router of 4 experts"] == ["adamw"] * 2
    by_name = rows(MuonOptimizer(model.named_parameters()))
    assert by_name[down.name].scale == down.scale
    by_default = rows(MuonOptimizer(model))[gate_up.name]
    assert by_default.matrices == ("4 of 48x32" if transposed else "8 of 24x32")  # such rows may alternate
    assert by_name[gate_up.name].split_by == (split if not transposed else {})  # names do not tell how rows alternate


def test_the_planned_gpt_oss_is_the_one_of_transformers():
    """`muon-fsdp plan gpt-oss-20b` and the optimizer agree about rules, scales and matrices."""
    model = causal_model(
        "GptOssForCausalLM", "GptOssConfig", num_hidden_layers=24, num_local_experts=32, hidden_size=2880,
        intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64, vocab_size=201088,
        layer_types=["full_attention"] * 24,
    )  # fmt: skip
    with torch.device("meta"):
        planned = PUBLIC_MODELS["gpt-oss-20b"]()
    ours, theirs = MuonOptimizer(planned), MuonOptimizer(model)
    found = [
        Counter((row.shape, row.rule, row.reason, row.scale) for row in optimizer.routing_report().rows)
        for optimizer in (ours, theirs)
    ]
    assert found[0] == found[1]
    assert found[0][((32, 2880, 5760), "muon", "3D weight, stored (in, out)", "1.414")] == 24
    assert ours.plan_report(world_size=16).rows == theirs.plan_report(world_size=16).rows


# ------------------------------------------------------------------------------------------------------------ routers


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int, names: tuple[str, str, str] = ("gate", "up", "down")) -> None:
        super().__init__()
        gate, up, down = names
        self.add_module(gate, nn.Linear(width, hidden, bias=False))
        self.add_module(up, nn.Linear(width, hidden, bias=False))
        self.add_module(down, nn.Linear(hidden, width, bias=False))


class Scores(nn.Module):
    """A router without a Linear, as in Transformers."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width))


class Held(nn.Module):
    """Stacked experts and their router in one module."""

    def __init__(self, **parameters: nn.Parameter) -> None:
        super().__init__()
        self.w1, self.w2 = stack(4, 20, 8), stack(4, 8, 20)
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)


def listed(count: int = 4, **names: object) -> nn.ModuleList:
    return nn.ModuleList(MLP(8, 20, **names) for _ in range(count))


def block(**modules: nn.Module) -> nn.Module:
    """Make a model of one block with these modules, beside attention."""
    attention = nn.ModuleDict({"q_proj": nn.Linear(8, 8), "o_proj": nn.Linear(8, 8)})
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"attn": attention, "mlp": nn.ModuleDict(modules)})])})


MIXTURES = {
    "a Linear beside a ModuleList": (block(router=nn.Linear(8, 4), experts=listed()), "router"),
    "gate": (block(gate=nn.Linear(8, 4), experts=listed()), "gate"),
    "no name that says it": (block(selector=nn.Linear(8, 4), experts=listed()), "selector"),
    "no name of experts": (block(router=nn.Linear(8, 4), branches=listed()), "router"),
    "a bare weight": (block(gate=Scores(8, 4), experts=Experts(True, 4, 8, 20)), "gate"),
    "deeper": (block(router=nn.ModuleDict({"gate": nn.Linear(8, 4)}), experts=Experts(False, 4, 8, 20)), "router.gate"),
    "the last of two": (block(gate=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), experts=listed()), "gate.1"),
    "experts by name": (
        block(router=nn.Linear(8, 4), experts=nn.ModuleDict({f"expert_{i}": MLP(8, 20) for i in range(4)})), "router",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("model", "router"), MIXTURES.values(), ids=MIXTURES)
def test_a_row_per_expert_of_a_sibling_makes_a_router(model, router):
    name = f"layers.0.mlp.{router}.weight"
    for params in (model, model.named_parameters()):
        found = rows(MuonOptimizer(params))
        assert (found[name].rule, found[name].reason) == ("adamw", "router of 4 experts")
        others = {row.rule for row in found.values() if len(row.shape) > 1 and row.name != name}
        assert others == {"muon"}
    with pytest.raises(
        ValueError, match=rf"(?s)strict: .*{name}.* would get rule 'adamw' by a guess \(router of 4 experts\)"
    ):
        FSDPMuonOptimizer(model, strict=True)


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_an_override_answers_strict(rule):
    model = block(router=nn.Linear(8, 4), experts=listed())
    optimizer = MuonOptimizer(model, strict=True, overrides={"*.router.weight": rule})
    assert rules(optimizer)["layers.0.mlp.router.weight"] == rule
    assert not optimizer.routing_report().warnings


NO_ROUTERS = {
    "an MLP's gate": block(gate=nn.Linear(8, 20), up=nn.Linear(8, 20), down=nn.Linear(20, 8)),
    "gate_proj": block(gate_proj=nn.Linear(8, 4), up_proj=nn.Linear(8, 4), down_proj=nn.Linear(4, 8), experts=listed()),
    "w_gate": block(w_gate=nn.Linear(8, 4), experts=listed()),
    "gates in experts": block(experts=nn.ModuleList(MLP(8, 4) for _ in range(4))),
    "a layer that another reads": block(inner=nn.Linear(8, 4), outer=nn.Linear(4, 8), experts=listed()),
    "a gate beside blocks": nn.ModuleDict({"layers": listed(2), "gate": nn.Linear(8, 2)}),
    "another number": block(gate=nn.Linear(8, 5), experts=listed()),
}  # fmt: skip


@pytest.mark.parametrize("model", NO_ROUTERS.values(), ids=NO_ROUTERS)
def test_other_layers_stay_matrices(model):
    for params in (model, model.named_parameters()):
        assert {row.rule for row in rows(MuonOptimizer(params)).values() if len(row.shape) > 1} == {"muon"}


def test_a_router_that_is_a_parameter_of_the_experts():
    biased = Held(router=stack(4, 8), b1=stack(4, 20), other=stack(4, 7), scale=stack(2, 8))
    found = rows(MuonOptimizer(biased))
    assert (found["router"].rule, found["router"].reason) == ("adamw", "router of 4 experts")
    assert (found["b1"].rule, found["b1"].reason) == ("adamw", "one vector per stacked matrix")
    assert found["other"].rule == found["scale"].rule == found["w1"].rule == "muon"
    turned = rows(MuonOptimizer(Held(gating=stack(8, 4), w_gate=stack(8, 4))))
    assert (turned["gating"].rule, turned["w_gate"].rule) == ("adamw", "muon")


@pytest.mark.parametrize("has_numbers", [True, False])
def test_experts_whose_rows_follow_each_other_are_cut(has_numbers):
    """As in MegaBlocks and DBRX: (experts * ffn, hidden) in one weight, in a module that says both numbers."""
    experts = nn.Module()
    experts.w1, experts.w2 = (nn.Parameter(torch.randn(4 * 6, 10)) for _ in range(2))
    if has_numbers:
        experts.moe_num_experts, experts.ffn_hidden_size = 4, 6
    router = nn.ModuleDict({"layer": nn.Linear(10, 4, bias=False)})
    model = nn.ModuleDict({"ffn": nn.ModuleDict({"router": router, "experts": nn.ModuleDict({"mlp": experts})})})
    optimizer = MuonOptimizer(model)
    found = rows(optimizer)
    assert {found[f"ffn.experts.mlp.{name}"].matrices for name in ("w1", "w2")} == {
        "4 of 6x10" if has_numbers else "24x10"
    }
    assert rules(optimizer)["ffn.router.layer.weight"] == ("adamw" if has_numbers else "muon")


def test_a_mixture_has_its_routers_in_one_place():
    model = nn.ModuleDict(
        {"moe": nn.ModuleDict({"gate": nn.Linear(8, 4), "experts": listed()}), "probe": nn.Linear(8, 4)}
    )
    assert rules(MuonOptimizer(model))["moe.gate.weight"] == "adamw"
    assert rules(MuonOptimizer(model))["probe.weight"] == "muon"  # as many classes as experts
    noisy = block(gate=nn.Linear(8, 4), noise_gate=nn.Linear(8, 4), experts=listed())
    assert rules(MuonOptimizer(noisy))["layers.0.mlp.gate.weight"] == "adamw"


class OwnMoE(nn.Module):
    """A whole model whose class is named like one layer of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"gate": nn.Linear(8, 4), "experts": listed()}) for _ in range(3))
        self.probe = nn.Linear(8, 3)


def test_a_list_of_layers_is_no_list_of_experts():
    found = rules(MuonOptimizer(OwnMoE()))
    assert found["probe.weight"] == "muon"  # as many classes as layers
    assert found["layers.2.gate.weight"] == "adamw"


def test_experts_in_two_modules_share_a_router():
    up, down = (nn.ParameterDict({"weight": stack(4, *shape)}) for shape in ((8, 20), (20, 8)))
    model = nn.ModuleDict(
        {"up": nn.ModuleDict({"e": up}), "down": nn.ModuleDict({"e": down}), "router": nn.Linear(8, 4)}
    )
    assert rules(MuonOptimizer(model))["router.weight"] == "adamw"


def test_a_router_of_experts_on_other_ranks():
    """A rank that holds two of eight experts knows all of them by the number that its module notes."""
    model = block(gate=nn.Linear(8, 8), experts=Experts(False, 2, 8, 20))
    assert rules(MuonOptimizer(model))["layers.0.mlp.gate.weight"] == "muon"
    model.layers[0]["mlp"]["experts"].num_experts = 8
    assert rows(MuonOptimizer(model))["layers.0.mlp.gate.weight"].reason == "router of 8 experts"


def test_adapters_of_a_router_are_matrices():
    model = block(router=nn.Linear(8, 4), experts=listed())
    mlp = model.layers[0]["mlp"]
    mlp["router"] = nn.ModuleDict({"base_layer": mlp["router"], "lora_B": nn.ModuleDict({"default": nn.Linear(2, 4)})})
    found = rules(MuonOptimizer(model))
    assert found["layers.0.mlp.router.base_layer.weight"] == "adamw"
    assert found["layers.0.mlp.router.lora_B.default.weight"] == "muon"


def test_wrappers_hide_no_router():
    plain = Mixture()
    for model in (nn.DataParallel(plain), torch.compile(plain, backend="eager")):
        found = rows(MuonOptimizer(model))
        assert found["router.weight"].reason == "router of 5 experts"
        assert found["experts.down_proj"].reason == "3D weight, stored (in, out)"


def test_experts_that_are_added_later_by_name():
    model = Mixture()
    optimizer = MuonOptimizer([("experts.gate_up_proj", model.experts.gate_up_proj)])
    optimizer.add_param_group({"params": iter([("experts.down_proj", model.experts.down_proj)])})
    optimizer.add_param_group({"params": [("router.weight", model.router.weight)]})
    found = rows(optimizer)
    assert found["router.weight"].reason == "router of 5 experts"
    assert found["experts.down_proj"].reason == "3D weight, stored (in, out)"
