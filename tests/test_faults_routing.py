"""Which parameter takes which rule."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaModel,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, label
from muon_fsdp.cli.loading import named_models
from muon_fsdp.parameters.routing import RoutingRow
from muon_fsdp.parameters.vocabulary import vocabulary_tables
from tests.promises import promise

OPTIMIZERS = [MuonOptimizer, FSDPMuonOptimizer]
Shape = tuple[int, ...]


def rows(optimizer: MuonOptimizer) -> dict[str, RoutingRow]:
    """Return the rows of the routing report by name; check that no name comes twice."""
    report = optimizer.routing_report().rows
    found = {row.name: row for row in report}
    assert len(found) == len(report)
    return found


def rules(optimizer: MuonOptimizer) -> dict[str, str]:
    return {name: row.rule for name, row in rows(optimizer).items()}


def shapes_of(model: nn.Module) -> list[Shape]:
    return [tuple(p.shape) for p in model.parameters()]


# ---------------------------------------------------------------------------------------------------- bare parameters


class LanguageModel(nn.Module):
    def __init__(self, vocab: int = 50, width: int = 8, layers: int = 2, tied: bool = False, head: str = "lm_head"):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width),
                nn.Linear(width, 4 * width), nn.Linear(4 * width, width),
            )
            for _ in range(layers)
        )  # fmt: skip
        self.add_module(head, nn.Linear(width, vocab, bias=False))
        if tied:
            self.get_submodule(head).weight = self.wte.weight


def mlp(widths: Sequence[int], bias: bool = True) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(a, b, bias=bias) for a, b in pairwise(widths)])


@promise(
    "`MuonOptimizer(model.parameters())` of a language model",
    "One warning, also in `routing_report()`, names the matrices that look like its embedding and head",
)
@pytest.mark.parametrize(
    ("model", "tables"),
    [
        (LanguageModel(), ["param[0]", "param[21]"]),
        (LanguageModel(vocab=100, tied=True), ["param[0]"]),
        (LanguageModel(vocab=65, width=96), ["param[0]", "param[21]"]),  # fewer words than the model is wide
        (LanguageModel(vocab=40, layers=1), ["param[0]", "param[11]"]),
    ],
)
def test_bare_parameters_of_a_language_model_are_told(model, tables):
    with pytest.warns(UserWarning, match="embedding or output head") as caught:
        optimizer = MuonOptimizer(model.parameters())
    (warning,) = [str(w.message) for w in caught]
    assert optimizer.routing_report().warnings == (warning,)
    assert [name for name in tables if f"'{name}'" not in warning] == []
    assert warning.count("param[") == len(tables)
    assert str(tuple(model.wte.weight.shape)) in warning
    assert "named_parameters()" in warning
    assert "rule='adamw'" in warning


@promise("The same with `strict=True`", "Refused, with the same words")
def test_bare_parameters_of_a_language_model_are_refused_by_strict():
    with pytest.raises(ValueError, match=r"strict: .*'param\[0\]'.*named_parameters\(\)"):
        MuonOptimizer(LanguageModel().parameters(), strict=True)
    MuonOptimizer(mlp((8, 16, 4)).parameters(), strict=True)


@promise(
    "Bare parameters in groups, of which embedding and head name a rule",
    "No warning: the user has said it; one that is forgotten is still told",
)
@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_a_group_that_names_its_rule_is_not_warned_about(rule):
    model = LanguageModel()
    tables = {"params": [model.wte.weight, model.lm_head.weight], "rule": rule}
    optimizer = MuonOptimizer([tables, {"params": model.blocks.parameters()}], strict=True)
    assert not optimizer.routing_report().warnings
    forgotten = [
        {"params": [model.wte.weight], "rule": rule},
        {"params": [*model.blocks.parameters(), model.lm_head.weight]},
    ]
    with pytest.warns(UserWarning, match=r"'param\[21\]'") as caught:
        MuonOptimizer(forgotten)
    assert "param[0]" not in str(caught[0].message)
    wide = LanguageModel(vocab=100)
    apart = [{"params": [wide.wte.weight, wide.lm_head.weight], "lr": 0.1}, {"params": wide.blocks.parameters()}]
    with pytest.warns(UserWarning, match=r"'param\[0\]' .*'param\[1\]' "):
        MuonOptimizer(apart)


@promise(
    "Bare parameters of a language model, and the optimizer knows the model or their names",
    "No warning: embedding and head take AdamW",
)
def test_a_model_or_names_beside_bare_parameters_are_enough():
    model = LanguageModel()
    for optimizer in (
        FSDPMuonOptimizer(model, list(model.parameters()), strict=True),
        FSDPMuonOptimizer(model, [{"params": list(model.parameters()), "lr": 0.1}], strict=True),
        MuonOptimizer(model.named_parameters(), strict=True),
        MuonOptimizer(model, strict=True),
    ):
        assert rules(optimizer)["wte.weight"] == rules(optimizer)["lm_head.weight"] == "adamw"
        assert not optimizer.routing_report().warnings


@promise("Bare parameters of published language models", "Their embeddings and heads are found, and nothing else")
@pytest.mark.parametrize("name", sorted(named_models()))
def test_tables_of_published_models_are_found(name):
    with torch.device("meta"):
        model = named_models()[name]()
    tables = {"embed_tokens", "lm_head", "wte"}
    expected = [
        index
        for index, (parameter, _) in enumerate(model.named_parameters())
        if parameter.split(".")[-2] in tables and "wpe" not in parameter
    ]
    assert expected
    assert vocabulary_tables(shapes_of(model)) == expected


def transformers_models() -> dict[str, tuple[Callable[[], nn.Module], set[str]]]:
    """Make small models of every kind, with the names of their vocabulary tables."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    image = {"image_size": 32, "num_labels": 1000}
    vit = ViTConfig(**sizes, **image, patch_size=8)
    swin = SwinConfig(embed_dim=24, depths=[2, 2], num_heads=[3, 6], window_size=4, patch_size=4, **image)
    t5 = T5Config(vocab_size=1000, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    speech = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 16, "max_source_positions": 20}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    whisper = WhisperConfig(vocab_size=51_865, max_target_positions=16, **speech, **heads, **ids)
    gpt2 = GPT2Config(vocab_size=999, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    small = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=1000)
    mamba = MambaConfig(vocab_size=999, hidden_size=32, num_hidden_layers=2, state_size=8)
    bert = BertConfig(vocab_size=999, **sizes)
    return {
        "gpt2": (lambda: GPT2LMHeadModel(gpt2), {"transformer.wte.weight"}),
        "bert": (lambda: BertForMaskedLM(bert), {"bert.embeddings.word_embeddings.weight"}),
        "t5": (lambda: T5ForConditionalGeneration(t5), {"shared.weight"}),
        "whisper": (lambda: WhisperForConditionalGeneration(whisper), {"model.decoder.embed_tokens.weight"}),
        "mamba": (lambda: MambaModel(mamba), {"embeddings.weight"}),
        "vit": (lambda: ViTForImageClassification(vit), set()),
        "swin": (lambda: SwinForImageClassification(swin), set()),
        "resnet": (lambda: ResNetForImageClassification(small), set()),
    }


@promise("Bare parameters of vision models (ViT, Swin, ResNet), classifier of 1,000 classes included", "No warning")
@pytest.mark.parametrize("name", transformers_models())
def test_models_of_transformers(name):
    make, expected = transformers_models()[name]
    model = make()
    names = [key for key, _ in model.named_parameters()]
    assert {names[index] for index in vocabulary_tables(shapes_of(model))} == expected


@promise("Bare parameters of a plain MLP, whatever its widths", "No warning")
@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 8, 16, 64, 1000, 50_000]), min_size=2, max_size=6), st.booleans())
def test_a_plain_mlp_has_no_vocabulary(widths, bias):
    with torch.device("meta"):
        assert vocabulary_tables(shapes_of(mlp(widths, bias))) == []


@pytest.mark.parametrize(
    "shapes",
    [
        [(192, 64), (64, 64), (256, 64), (64, 256)],  # one block
        [(192, 64), (64, 64), (256, 64), (64, 256)] * 2,
        [(96, 64), (64, 64), (1024, 64), (64, 512)],  # grouped queries and a gated MLP, fused
        [(512, 64), (64, 512), (512, 64)],  # a gated MLP as Llama's code orders it
        [(8, 64), (4, 64, 96), (4, 96, 64)],  # a router and its experts
        [(16, 512), (4096, 16), (16, 512), (128, 16)],  # low-rank adapters
        [(512, 128), (512,), (512, 128), (512,), (10, 128), (10,)],  # an LSTM and its classifier
        [(64, 10), (64, 64), (1000, 64), (5, 64)],  # two classifiers on one trunk
        [(6272, 100), (128, 64, 4, 4), (64, 3, 4, 4), (10, 64)],  # a generator of images
        [(32, 10), (32,), (400, 10), (400,), (64, 432), (64,)],  # two branches from one input
        [(544, 64), (64, 64)] * 3,  # a wide projection in every block
        [(3352, 768), (1536, 1, 4), (768, 1536)],  # Mamba 2
    ],
)
def test_bodies_and_adapters_have_no_vocabulary(shapes):
    assert vocabulary_tables(shapes) == []


@promise("All parameters are vectors, or embeddings, so that Muon updates nothing", "A warning; `strict=True` refuses")
def test_an_optimizer_without_any_matrix_warns():
    for params in ([nn.Parameter(torch.randn(3))], nn.LayerNorm(4), nn.Embedding(5, 3)):
        listed = params if isinstance(params, nn.Module) else list(params)
        with pytest.warns(UserWarning, match="no parameter has a rule of matrices") as caught:
            optimizer = MuonOptimizer(listed)
        assert len(caught) == 1
        assert len(optimizer.routing_report().warnings) == 1
        with pytest.raises(ValueError, match="strict: no parameter has a rule of matrices"):
            MuonOptimizer(listed, strict=True)
    with warnings.catch_warnings():  # what the user has asked for
        warnings.simplefilter("error")
        MuonOptimizer(nn.LayerNorm(4), rule="adamw")
        MuonOptimizer([{"params": nn.LayerNorm(4).parameters(), "rule": "adamw"}])
        MuonOptimizer(nn.Linear(3, 3), overrides={"weight": "adamw"})


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
    "The trained copy takes AdamW, by module and by name; `strict=True` accepts it",
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
    "A vector: it takes AdamW, and `FSDPMuonOptimizer` does not decay it",
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
    "An error names the parameter and its shape. A group with matrices too is divided: its vectors take AdamW",
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
