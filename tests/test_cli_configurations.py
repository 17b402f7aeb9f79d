"""`muon-fsdp plan` of a configuration of Transformers: which class is built, without weights and without a network."""

from __future__ import annotations

import importlib.metadata
import json
import socket
import sys

import pytest

from tests.cli_cases import PUBLISHED, error_of, folder_fixture, plan, run, subprocess_run  # noqa: F401

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def test_a_configuration_of_transformers_by_the_real_command(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA))
    done = subprocess_run("-m", "muon_fsdp.cli", "plan", str(folder), "--world-size", "4", "--json")
    assert (done.returncode, done.stderr) == (0, "muon-fsdp plan: importing PyTorch ...\n")
    found = json.loads(done.stdout)
    block = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64
    assert found["elements"] == 2 * 128 * 64 + 2 * (block + 2 * 64) + 64
    assert found["dtypes"] == ["float32"]
    assert {(row["rule"], row["reason"]): row["elements"] for row in found["routing"]} == {
        ("muon", "matrix"): 2 * block,
        ("adamw", "embedding"): 128 * 64,
        ("adamw", "output head"): 128 * 64,
        ("adamw", "vector"): 5 * 64,
    }


def test_transformers_is_named_when_it_is_missing(folder, monkeypatch):
    (folder / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setitem(sys.modules, "transformers", None)
    line = error_of("plan", "config.json", "--world-size", "4")
    assert 'pip install "muon_fsdp[integrations]"' in line


VIT = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
T5 = {"model_type": "t5", "d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 128}
BERT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 128}
LAYER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
WHISPER = {"model_type": "whisper", "d_model": 48, "encoder_layers": 1, "decoder_layers": 1}
CLIP = {"model_type": "clip", "text_config": LAYER, "vision_config": {**LAYER, "image_size": 64}}
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 128}
QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
GEMMA = {**LAYER, "model_type": "gemma", "head_dim": 16}
SPEECH = {"model_type": "wav2vec2", **LAYER, "num_conv_pos_embedding_groups": 2}


@pytest.fixture
def offline(monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError(f"a connection was opened: {args}")

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize(
    ("config", "architecture", "built", "parameter", "route"),
    [
        (T5, "T5ForConditionalGeneration", "T5ForConditionalGeneration", "SelfAttention.q.weight", "muon: matrix"),
        (T5, "T5WithLMHeadModel", "T5Model", "shared.weight", "adamw: embedding"),  # a name of old releases
        (T5, None, "T5Model", "shared.weight", "adamw: embedding"),
        (
            BERT,
            "BertForMaskedLM",
            "BertForMaskedLM",
            "word_embeddings.weight",
            "adamw: embedding tied to the output head",
        ),
        (BERT, None, "BertLMHeadModel", "intermediate.dense.weight", "muon: matrix"),
        (VIT, "ViTForImageClassification", "ViTForImageClassification", "projection.weight", "muon: convolution"),
        (VIT, "LlamaForCausalLM", "ViTModel", "projection.weight", "muon: convolution"),
        (VIT, "pipeline", "ViTModel", "projection.weight", "muon: convolution"),
        (
            WHISPER,
            "WhisperForConditionalGeneration",
            "WhisperForConditionalGeneration",
            "conv1.weight",
            "muon: convolution",
        ),
        (CLIP, "CLIPModel", "CLIPModel", "text_projection.weight", "muon: matrix"),
        (MAMBA, "MambaForCausalLM", "MambaForCausalLM", "mixer.A_log", "adamw: decay rates, by name"),
        (MAMBA, None, "MambaForCausalLM", "mixer.conv1d.weight", "muon: convolution"),
        (GEMMA, None, "GemmaForCausalLM", "down_proj.weight", "muon: matrix"),
        (SPEECH, "Wav2Vec2ForCTC", "Wav2Vec2ForCTC", "masked_spec_embed", "adamw: vector"),
    ],
)
def test_what_a_configuration_names_is_built(folder, offline, config, architecture, built, parameter, route):
    (folder / "config.json").write_text(json.dumps({**config, "architectures": architecture and [architecture]}))
    found = plan("config.json", "--world-size", "2", "--routing")
    assert found["class"] == built
    routes = [f"{row['rule']}: {row['reason']}" for row in found["parameters"] if row["name"].endswith(parameter)]
    assert set(routes) == {route}


def test_large_configurations_take_no_memory(folder, offline):
    (folder / "config.json").write_text(json.dumps(QWEN))
    found = plan("config.json", "--world-size", "64")
    assert (found["class"], found["elements"]) == ("Qwen3MoeForCausalLM", PUBLISHED["qwen3-30b-a3b"])


def test_the_text_names_the_class_and_wraps_its_warnings(folder, offline):
    (folder / "vit.json").write_text(json.dumps({**VIT, "architectures": ["ViTForImageClassification"]}))
    title, built, *_ = text = run("plan", "vit.json", "--world-size", "1").stdout.splitlines()
    assert title.endswith("parameters in float32, FSDP2, 1 shard")
    assert built == "built by Transformers as ViTForImageClassification"
    assert any(line.startswith("warning: classifier.weight is named like an output head") for line in text)
    assert max(map(len, text)) <= 80


def test_a_type_that_transformers_does_not_know(folder, offline):
    (folder / "config.json").write_text('{"model_type": "martian"}')
    version = importlib.metadata.version("transformers")
    assert error_of("plan", "config.json", "--world-size", "4") == (
        f"error: Transformers {version} does not know the model type 'martian' of config.json: install a newer "
        "version, or pass package.module:callable for your own model."
    )


def test_a_configuration_that_can_not_be_built(folder, offline):
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_attention_heads": 0}))
    line = error_of("plan", "config.json", "--world-size", "4")
    assert "can't build a model of type 'llama' from config.json: ZeroDivisionError: " in line
    assert line.endswith("Pass package.module:callable for your own model.")
