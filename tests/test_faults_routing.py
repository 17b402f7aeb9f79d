"""Which parameter takes which rule."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, label
from tests.fault_cases import OPTIMIZERS
from tests.promises import promise
from tests.routing_cases import LanguageModel, mlp, rows, rules

# --------------------------------------------------------------------------------------------------------- fine-tuning


class ModulesToSave(nn.Module):
    """PEFT's wrapper of a module that is trained whole: the frozen original, and a copy per adapter."""

    def __init__(self, original: nn.Module, adapter: str = "default") -> None:
        super().__init__()
        self.original_module = original.requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({adapter: copy.deepcopy(original).requires_grad_(True)})


class LowRank(nn.Module):
    """PEFT's LoRA layer around a Linear or an Embedding."""

    def __init__(self, base: nn.Module, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        rows, cols = base.weight.shape
        if isinstance(base, nn.Embedding):
            self.lora_embedding_A = nn.ParameterDict({"default": nn.Parameter(torch.randn(rank, rows))})
            self.lora_embedding_B = nn.ParameterDict({"default": nn.Parameter(torch.randn(cols, rank))})
        else:
            self.lora_A = nn.ModuleDict({"default": nn.Linear(cols, rank, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, rows, bias=False)})


class TrainableTokens(nn.Module):
    """PEFT's wrapper of an embedding of which a few rows are trained."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.token_adapter = nn.Module()
        self.token_adapter.base_layer = base.requires_grad_(False)
        delta = nn.Parameter(torch.randn(3, base.weight.shape[1]))
        self.token_adapter.trainable_tokens_delta = nn.ParameterDict({"default": delta})


class PeftModel(nn.Module):
    """The names that PEFT puts before a model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model


PREFIX = "base_model.model."


def adapted(saved: Sequence[str] = (), adapter: str = "default", **options: object) -> PeftModel:
    """Make a frozen language model with low-rank adapters in its blocks and modules that are trained whole."""
    model = LanguageModel(**options).requires_grad_(False)
    for block in model.blocks:
        block[3] = LowRank(block[3])
    for name in saved:
        model.set_submodule(name, ModulesToSave(model.get_submodule(name), adapter))
    return PeftModel(model)


def both_ways(model: nn.Module) -> list[MuonOptimizer]:
    """Build optimizers that route by module and by name, each with `strict`."""
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [*(make(model, strict=True) for make in OPTIMIZERS), MuonOptimizer(trainable, strict=True)]


@promise(
    "PEFT trains `lm_head` or the embedding whole (`modules_to_save`)",
    "The trained copy uses AdamW, by module and by name; `strict=True` accepts it",
)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("adapter", ["default", "0"])
def test_modules_to_save_are_embeddings_and_heads(tied, adapter):
    model = adapted(["lm_head", "wte"], adapter, tied=tied)
    for optimizer in both_ways(model):
        found = rules(optimizer)
        assert found[f"{PREFIX}lm_head.modules_to_save.{adapter}.weight"] == "adamw"
        assert found[f"{PREFIX}wte.modules_to_save.{adapter}.weight"] == "adamw"
        assert found[f"{PREFIX}blocks.0.3.lora_A.default.weight"] == "muon"
        assert found[f"{PREFIX}blocks.1.3.lora_B.default.weight"] == "muon"
        assert not optimizer.routing_report().warnings


def test_a_copy_of_a_head_without_a_telling_name():
    """The trained copy is a head because its frozen original is tied to the embedding."""
    tied = MuonOptimizer(adapted(["proj"], head="proj", tied=True), strict=True)
    name = f"{PREFIX}proj.modules_to_save.default.weight"
    assert rows(tied)[name].reason == "output head"
    untied = adapted(["proj"], head="proj")  # the original and its copy are one candidate
    assert rows(MuonOptimizer(untied))[name].reason == "output head: the only Linear of the embedding's shape"
    with pytest.raises(ValueError, match=rf"strict: parameter '{name}' .* by a guess"):
        MuonOptimizer(untied, strict=True)
    adapters = untied.base_model.model.proj.modules_to_save
    adapters["second"] = copy.deepcopy(adapters["default"])
    found = rules(MuonOptimizer(untied))
    assert found[name] == found[name.replace("default", "second")] == "adamw"


@promise(
    "Frozen Linears have the shape of the embedding",
    "They are no candidates for the output head; a frozen embedding still tells the shape of one",
)
def test_frozen_parameters_are_no_candidates():
    model = LanguageModel(vocab=8, width=8, head="proj").requires_grad_(False)  # blocks have (8, 8) Linears too
    model.proj.requires_grad_(True)
    model.blocks[0][3].requires_grad_(True)
    for make in OPTIMIZERS:
        optimizer = make(model)
        assert rules(optimizer)["proj.weight"] == "adamw"
        assert not optimizer.routing_report().warnings
    frozen_embedding = LanguageModel()
    frozen_embedding.wte.requires_grad_(False)
    assert rules(MuonOptimizer(frozen_embedding, strict=True))["lm_head.weight"] == "adamw"
    everything = LanguageModel()  # held though it is frozen, to be trained later
    everything.lm_head.requires_grad_(False)
    held = FSDPMuonOptimizer(everything, list(everything.parameters()), strict=True)
    assert rules(held)["lm_head.weight"] == "adamw"


@promise(
    "An embedding or head under other wrappers: LoRA of an embedding, trained tokens, a parametrization, `.module`",
    "Recognized as if the wrapper were not there",
)
def test_wrapped_embeddings_and_heads():
    model = LanguageModel()
    model.extra, model.some = LowRank(nn.Embedding(50, 8)), nn.Module()
    model.some.embed_tokens = TrainableTokens(nn.Embedding(50, 8))
    model.lm_head = parametrizations.weight_norm(model.lm_head)
    model.wte = parametrizations.orthogonal(model.wte)
    inner, model.blocks[0] = model.blocks[0], nn.Module()
    model.blocks[0].module = inner
    for optimizer in both_ways(model):
        found = rules(optimizer)
        for name in (
            "extra.lora_embedding_A.default", "extra.lora_embedding_B.default",
            "some.embed_tokens.token_adapter.trainable_tokens_delta.default",
            "lm_head.parametrizations.weight.original0", "lm_head.parametrizations.weight.original1",
            "wte.parametrizations.weight.original",
        ):  # fmt: skip
            assert found[name] == "adamw", name
        assert found["blocks.0.module.1.weight"] == "muon"
    probes = nn.ModuleDict(  # of the shapes of adapters, which tell nothing about a head
        {
            "words": LowRank(nn.Embedding(50, 8)), "embed_tokens": TrainableTokens(nn.Embedding(50, 8)),
            "few": nn.Linear(8, 3), "thin": nn.Linear(2, 8), "body": nn.Linear(8, 8),
        }
    )  # fmt: skip
    found = rules(MuonOptimizer(probes, strict=True))
    assert (found["few.weight"], found["thin.weight"]) == ("muon", "muon")
    wrapped = [("lm_head.module.weight", nn.Parameter(torch.randn(6, 4))), ("a", nn.Parameter(torch.randn(3, 3)))]
    assert rules(MuonOptimizer(wrapped)) == {"lm_head.module.weight": "adamw", "a": "muon"}
    convolution = nn.Sequential(parametrizations.weight_norm(nn.Conv1d(6, 4, 3)))
    assert rows(MuonOptimizer(convolution))["0.parametrizations.weight.original1"].reason == "convolution"


@promise(
    "Routing is in doubt: a head of a shape that no embedding has, or several Linears of an embedding's shape",
    "`strict=True` refuses it, until an override or a group names the rule",
)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_strict_refuses_every_doubt(make):
    classifier = nn.ModuleDict({"wte": nn.Embedding(50, 8), "body": nn.Linear(8, 8), "classifier": nn.Linear(8, 3)})
    with pytest.raises(ValueError, match=r"strict: classifier.weight is named like an output head"):
        make(classifier, strict=True)
    for rule in ("adamw", "muon"):
        optimizer = make(classifier, strict=True, overrides={"classifier.weight": rule})
        assert rules(optimizer)["classifier.weight"] == rule
        assert not optimizer.routing_report().warnings
    several = LanguageModel(vocab=8, width=8, head="proj")
    with pytest.raises(ValueError, match=r"strict: 3 Linear layers have the shape of an embedding"):
        make(several, strict=True)
    with pytest.raises(ValueError, match=r"strict: 3 Linear layers"):  # the others are as unclear as before
        make(several, strict=True, overrides={"blocks.0.*": "muon"})
    for overrides in ({"proj.weight": "adamw"}, {"proj.weight": "muon", "blocks.*": "muon"}):
        assert not make(several, strict=True, overrides=overrides).routing_report().warnings
    chosen = FSDPMuonOptimizer(classifier, [classifier["body"].weight], strict=True)  # what is in doubt is not in it
    assert not chosen.routing_report().warnings


# ------------------------------------------------------------------------------------------------------------- vectors


@promise(
    "A parameter has one row or one column: `weight_norm`'s g, IA3, a gate, a stack of such",
    "It is a vector: it uses AdamW, and `FSDPMuonOptimizer` does not decay it",
)
@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((7, 1), "vector"), ((1, 7), "vector"), ((1, 1), "vector"), ((1, 1, 7), "vector"), ((7,), "vector"),
        ((), "scalar"), ((5, 7, 1), "stack of vectors"), ((5, 1, 7), "stack of vectors"),
        ((1, 3, 3, 3), "vector"), ((2, 7), None), ((7, 2), None), ((5, 7, 2), None), ((7, 1, 3, 3), None),
        ((7, 5, 1, 1), None), ((1, 5, 7), None),
    ],
)  # fmt: skip
def test_one_row_or_column_is_a_vector(shape, reason):
    model = nn.ParameterDict({"this": nn.Parameter(torch.randn(shape)), "body": nn.Parameter(torch.randn(3, 4))})
    bare = MuonOptimizer(model.parameters())
    for optimizer in (*both_ways(model), bare):
        row = next(row for row in optimizer.routing_report().rows if row.shape == shape)
        assert row.rule == ("muon" if reason is None else "adamw")
        assert reason is None or reason == row.reason
        assert (row.scale == "") == (reason is not None)
    decays = [group["weight_decay"] for group in FSDPMuonOptimizer(model).param_groups]
    assert decays == ([0.01] if reason is None else [0.01, 0.0])


@promise(
    "A convolution whose kernel has one input channel (depthwise), or one output channel",
    "The first is flattened to (channels, taps), a matrix; the second is one row, a vector",
)
def test_a_view_decides_what_is_a_vector():
    model = nn.ModuleDict({"depthwise": nn.Conv1d(6, 6, 3, groups=6), "last": nn.Conv2d(6, 1, 3)})
    assert rules(MuonOptimizer(model, strict=True))["depthwise.weight"] == "muon"
    assert rules(MuonOptimizer(model, strict=True))["last.weight"] == "adamw"
    label(model["depthwise"], "stacked")  # six rows of three, as the user says
    body = nn.Parameter(torch.randn(3, 4))
    assert rules(MuonOptimizer(nn.ModuleList([model, mlp((3, 4))])))["0.depthwise.weight"] == "adamw"
    stack = nn.Parameter(torch.randn(6, 1, 3))
    for group in ({"params": [stack], "view": "flatten"}, {"params": [("w", stack)]}):
        overrides = None if "view" in group else {"w": {"view": "flatten"}, "b": {"lr": 0.1}}
        second = {"params": [("b", body)] if overrides else [body]}
        optimizer = MuonOptimizer([group, second], overrides=overrides)
        assert [row.rule for row in optimizer.routing_report().rows] == ["muon", "muon"]
    assert [row.rule for row in MuonOptimizer([stack, body], view="flatten").routing_report().rows] == ["muon"] * 2


@promise(
    "An override gives the rule of matrices to an n x 1 parameter by its full name",
    "Obeyed: the update is the gradient at norm 1 times the scale. Patterns and groups leave vectors out",
)
@pytest.mark.parametrize("shape", [(7, 1), (1, 7), (5, 7, 1), (1, 1, 7)])
def test_a_full_name_makes_a_matrix_of_a_vector(shape):
    start, grad = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    this, body = nn.Parameter(start.clone()), nn.Parameter(torch.randn(3, 4))
    pairs = [("this", this), ("body", body)]
    optimizer = MuonOptimizer(pairs, lr=0.5, momentum=0.0, orthogonalization="exact", overrides={"this": "muon"})
    this.grad = grad.clone()
    optimizer.step()
    scale = math.sqrt(7) if shape[-1] == 1 else 1.0
    expected = start - 0.5 * scale * grad / torch.linalg.vector_norm(grad, dim=(-2, -1), keepdim=True)
    torch.testing.assert_close(this.detach(), expected, rtol=0, atol=1e-12)
    assert rules(MuonOptimizer(pairs, overrides={"*": "muon"})) == {"this": "adamw", "body": "muon"}
    assert rules(MuonOptimizer([{"params": pairs, "rule": "muon"}])) == {"this": "adamw", "body": "muon"}
    again = MuonOptimizer(optimizer.param_groups)  # its groups are divided: each rule is that of all its parameters
    assert rules(again) == rules(optimizer)


@promise(
    'A group says `rule="muon"` and holds vectors only, or an override\'s pattern matches vectors only',
    "An error names the parameter and its shape. A group that also has matrices is divided: its vectors use AdamW",
)
@pytest.mark.parametrize("shape", [(4,), (), (4, 1), (1, 1, 4)])
@pytest.mark.parametrize("rule", ["muon", "normuon", "spectral_sphere"])
def test_a_rule_that_no_parameter_of_a_group_can_take_is_an_error(shape, rule):
    vector, matrix = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(4, 4))
    text = rf"a parameter group: .*rule '{rule}'.*'fc.bias' of shape {tuple(shape)}.*rule='adamw'"
    for group in ({"params": [("fc.bias", vector)], "rule": rule},):
        with pytest.raises(ValueError, match=text.replace("(", r"\(").replace(")", r"\)")):
            MuonOptimizer([{"params": [("fc.weight", matrix)]}, group])
        optimizer = MuonOptimizer([("fc.weight", matrix)])
        with pytest.raises(ValueError, match=rule):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1
    mixed = MuonOptimizer([{"params": [("fc.weight", matrix), ("fc.bias", vector)], "rule": rule}])
    assert rules(mixed) == {"fc.weight": rule, "fc.bias": "adamw"}
    pairs = [("fc.weight", matrix), ("fc.bias", vector)]
    with pytest.raises(ValueError, match=rf"overrides\['\*.bias'\]: .*rule '{rule}'.*'fc.bias'"):
        MuonOptimizer(pairs, overrides={"*.bias": rule})
    assert rules(MuonOptimizer(pairs, overrides={"fc.*": rule})) == {"fc.weight": rule, "fc.bias": "adamw"}


# ----------------------------------------------------------------------------------------------------------- unfreezing


@promise(
    "Parameters are unfrozen and added with `add_param_group`",
    "They are routed by the model as the others are, and the report lists each once",
)
@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("named", [False, True])
def test_what_is_unfrozen_and_added_is_listed_once_and_routed_by_the_model(make, named):
    model = LanguageModel()
    model.lm_head.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    optimizer = make(model, strict=True)
    assert rules(optimizer)["lm_head.weight"] == rules(optimizer)["blocks.1.3.weight"] == "none"
    for module, prefix in ((model.lm_head, "lm_head"), (model.blocks[1][3], "blocks.1.3")):
        module.requires_grad_(True)
        params = module.named_parameters() if named else module.parameters()  # named "weight", not from the root
        optimizer.add_param_group({"params": params})
        assert rows(optimizer)[f"{prefix}.weight"].reason != "frozen (requires_grad is False)"
    found = rules(optimizer)
    assert found["lm_head.weight"] == "adamw"
    assert found["blocks.1.3.weight"] == "muon"
    assert found["blocks.1.4.weight"] == "none"
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())


def test_a_frozen_parameter_that_is_held_is_listed_once():
    model = mlp((4, 5, 6))
    model[1].requires_grad_(False)
    optimizer = FSDPMuonOptimizer(model, list(model.parameters()))
    assert rules(optimizer) == {"0.weight": "muon", "0.bias": "adamw", "1.weight": "muon", "1.bias": "adamw"}
    copied = copy.deepcopy(optimizer)
    assert rules(copied) == rules(optimizer)


# ----------------------------------------------------------------------------------------------------- experts and QKV


class ExpertModel(nn.Module):
    """A language model with attention in one weight, and experts that are stored (experts, in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.layers = nn.ModuleList()
        for _ in range(2):
            experts = nn.ParameterDict({"gate_up_proj": torch.randn(4, 8, 24), "down_proj": torch.randn(4, 12, 8)})
            layer = {"attn": nn.MultiheadAttention(8, 2), "gate": nn.Linear(8, 4), "experts": experts}
            self.layers.append(nn.ModuleDict(layer))


ANSWERS = {
    "*.gate_up_proj": {"split_sizes": (12, 12)},
    "*.gate.weight": "adamw",
}


@promise(
    "A weight holds Q, K and V, or gate and up; a Linear has one row for each expert beside it",
    "The first is split if the model tells its layout, else the report marks it with the option that splits it; AdamW "
    "updates the second; `strict` asks about both",
)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_strict_asks_about_fused_weights_and_routers(make):
    with pytest.raises(ValueError, match="strict") as error:
        make(ExpertModel(), strict=True)
    assert "in_proj_weight" not in str(error.value)  # torch's own layout is known
    for pattern in ("layers.*.experts.gate_up_proj", "layers.*.gate.weight"):
        assert f"{pattern!r}: " in str(error.value)
    optimizer = make(ExpertModel(), strict=True, overrides=ANSWERS)
    assert not optimizer.routing_report().warnings
    assert rules(optimizer)["layers.1.gate.weight"] == "adamw"


@promise(
    "Experts are stored (experts, in, out)",
    "Detected where the shapes, the module or the router show it: scale and rows are those of the transposes",
)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_transposed_experts_have_the_scale_of_their_transposes(make):
    found = rows(make(ExpertModel(), overrides=ANSWERS))
    assert found["layers.0.experts.gate_up_proj"].scale == f"{(12 / 8) ** 0.5:.4g}"
    assert found["layers.0.experts.down_proj"].scale == "1"  # (8, 12)
    assert found["layers.0.experts.down_proj"].reason == "3D weight, stored (in, out)"
