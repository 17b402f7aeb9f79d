"""Parameters without their model."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
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

from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer
from muon_fsdp.cli.loading import named_models
from muon_fsdp.parameters.facts import vocabulary_tables
from tests.promises import promise
from tests.routing_cases import LanguageModel, mlp, rules

Shape = tuple[int, ...]


def shapes_of(model: nn.Module) -> list[Shape]:
    return [tuple(p.shape) for p in model.parameters()]


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


@promise("The same with `strict=True`", "An error with the same text")
def test_bare_parameters_of_a_language_model_are_refused_by_strict():
    with pytest.raises(ValueError, match=r"strict: .*'param\[0\]'.*named_parameters\(\)"):
        MuonOptimizer(LanguageModel().parameters(), strict=True)
    MuonOptimizer(mlp((8, 16, 4)).parameters(), strict=True)


@promise(
    "Bare parameters in groups, of which embedding and head name a rule",
    "No warning about these. A warning still names those that were forgotten",
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
    "No warning: embedding and head use AdamW",
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
        with pytest.warns(UserWarning, match="has nothing to update: every parameter is a vector") as caught:
            optimizer = MuonOptimizer(listed)
        assert len(caught) == 1
        assert len(optimizer.routing_report().warnings) == 1
        with pytest.raises(ValueError, match="strict: Muon has nothing to update"):
            MuonOptimizer(listed, strict=True)
    with warnings.catch_warnings():  # what the user has asked for
        warnings.simplefilter("error")
        MuonOptimizer(nn.LayerNorm(4), rule="adamw")
        MuonOptimizer([{"params": nn.LayerNorm(4).parameters(), "rule": "adamw"}])
        MuonOptimizer(nn.Linear(3, 3), overrides={"weight": "adamw"})
