"""The command `muon-fsdp`: figures against arithmetic by hand, mistakes as one line, stdout that is JSON alone."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from typer.main import get_command
from typer.testing import CliRunner

import muon_fsdp
from muon_fsdp import MuonOptimizer
from muon_fsdp.benchmarks import pair, peers, ranks, sphere, steps, trace
from muon_fsdp.benchmarks.machine import Ceilings
from muon_fsdp.benchmarks.processes import run_on_ranks
from muon_fsdp.benchmarks.public_models import PUBLIC_MODELS, matrix_shapes
from muon_fsdp.cli import checks, main, output, two_ranks
from muon_fsdp.cli.app import app
from muon_fsdp.cli.loading import named_models
from muon_fsdp.rules import RULES
from muon_fsdp.training import plugins
from muon_fsdp.training.model import PRESETS

ROOT = Path(__file__).parent.parent


def run(*args: str, code: int = 0):
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def plan(*args: str) -> dict:
    result = run("plan", *args, "--json")
    assert result.stderr == ""
    return json.loads(result.stdout)


def error_of(*args: str) -> str:
    """Run the command line with a mistake; return the one line of its error."""
    result = run(*args, code=2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to an empty folder, from which modules can be imported during the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def subprocess_run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


# -------------------------------------------------------------------------------------------------------- the entry


def test_help_does_not_import_torch():
    code = "import sys; from muon_fsdp.cli import main; sys.argv = ['muon-fsdp', '--help']\ntry: main()\nfinally: "
    done = subprocess_run("-c", code + "print('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
    assert all(command in done.stdout for command in ("plan", "doctor", "bench"))


def test_the_package_gives_its_names_when_asked():
    assert set(muon_fsdp.__all__) <= set(dir(muon_fsdp))
    for name in muon_fsdp.__all__:
        assert getattr(muon_fsdp, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Muon'"):
        muon_fsdp.Muon  # noqa: B018


def test_without_the_extra_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "typer", None)
    assert main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == 'error: muon-fsdp needs typer; install with: pip install -e ".[cli]"\n'


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["plan", "gtp2-124m", "--world-size", "8"], "unknown model 'gtp2-124m'; did you mean gpt2-124m?"),
        (["plan", "gpt2-124m", "--world-size", "many"], "Invalid value for '--world-size': "),
        (["plan"], "Missing argument 'model' (see muon-fsdp plan --help)"),
        (["doctor", "--jsn"], "No such option: --jsn"),
        (["plam"], "No such command 'plam'"),
    ],
)
def test_the_entry_point_exits_with_2_after_a_mistake(monkeypatch, capsys, args, says):
    monkeypatch.setattr(sys, "argv", ["muon-fsdp", *args])
    assert main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.lower().startswith(f"error: {says}".lower())


def test_help_and_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["muon-fsdp", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == f"muon_fsdp {muon_fsdp.__version__}\n"
    monkeypatch.setattr(sys, "argv", ["muon-fsdp"])
    assert main() == 0
    assert "Usage: muon-fsdp" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- plan

# As published with the weights (of DeepSeek-V3 without the module that predicts further tokens).
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "moonlight-16b-a3b": 15.96e9,
    "deepseek-v3": 671.03e9,
    "kimi-k2": 1.03e12,
}


def test_models_have_the_published_sizes():
    models = named_models()
    assert set(models) == {*PUBLISHED, *PRESETS}
    for name, published in PUBLISHED.items():
        with torch.device("meta"):
            total = sum(parameter.numel() for parameter in models[name]().parameters())
        assert total == pytest.approx(published, rel=0 if isinstance(published, int) else 5e-3), name


@pytest.mark.parametrize("name", PUBLIC_MODELS)
def test_muon_takes_the_matrices_of_the_layers(name):
    with torch.device("meta"):
        optimizer = MuonOptimizer(named_models()[name]())
    routed = Counter(row.shape for row in optimizer.routing_report().rows if row.rule == "muon")
    assert routed == Counter(matrix_shapes(PUBLIC_MODELS[name]))


def test_matrices_by_hand():
    """From the published configurations, and not from the modules that are built from them."""
    assert matrix_shapes(PUBLIC_MODELS["gpt2-124m"]) == 12 * [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
    attention = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
    mlp = [(14336, 4096), (14336, 4096), (4096, 14336)]
    assert matrix_shapes(PUBLIC_MODELS["llama-3-8b"]) == 32 * [*attention, *mlp]
    latent = [(1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)]
    dense = [(18432, 7168), (18432, 7168), (7168, 18432)]
    expert = [(2048, 7168), (2048, 7168), (7168, 2048)]
    mixture = [(256, 7168), *((256, *shape) for shape in expert), *expert]
    assert matrix_shapes(PUBLIC_MODELS["deepseek-v3"]) == 3 * [*latent, *dense] + 58 * [*latent, *mixture]


def test_memory_of_llama_by_hand():
    """Every dimension is a multiple of 8, so every rank has an eighth of everything."""
    found = plan("llama-3-8b", "--world-size", "8")
    total, others = 8_030_261_248, 2 * 128256 * 4096 + 65 * 4096
    others_count, count = 2 + 65, 2 + 65 + 7 * 32
    memory = found["memory"]
    assert memory["weights"] == memory["gradients"] == total * 4 // 8
    assert memory["state"] == ((total - others) * 4 + others * 8) // 8 + 4 * others_count
    assert memory["adamw_state"] == total * 8 // 8 + 4 * count  # and a counter of steps for every tensor
    assert memory["total"] == 2 * memory["weights"] + memory["state"] + memory["scratch"]
    assert memory["adamw_total"] == 2 * memory["weights"] + memory["adamw_state"]
    routing = {(row["rule"], row["reason"]): row for row in found["routing"]}
    assert routing[("muon", "matrix")]["elements"] == total - others
    assert routing[("adamw", "vector")] == {
        "rule": "adamw",
        "reason": "vector",
        "parameters": 65,
        "elements": 65 * 4096,
    }
    half = plan("llama-3-8b", "--world-size", "8", "--dtype", "bfloat16")["memory"]
    assert half["weights"] == total * 2 // 8
    assert half["state"] == memory["state"]  # moments stay in float32


SQUARES = """
from torch import nn

def squares():
    print("built")
    return nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])

class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(4096, 2)

def wrong(): return 3
def needs(argument): pass
def nothing(): return nn.Module()
def long(): raise ValueError("wrong field:\\n\\n  the reason.\\nand more")
def placed():
    import torch
    return nn.Linear(2, 2, device="cpu")
number = 5
"""


def test_bytes_and_time_by_hand(folder):
    (folder / "my_nets.py").write_text(SQUARES)
    args = ["--tflops", "2", "--bandwidth", "4", "--memory-bandwidth", "0.001", "--strategy", "owner"]
    result = run("plan", "my_nets:squares", "--world-size", "4", "--json", *args)
    assert result.stderr == "built\n"  # and so not in the JSON
    found = json.loads(result.stdout)
    matrix, flops = 64 * 64, 30 * 64**3  # five steps of three products
    each = 2 * matrix * 3 // 4 * 2  # a rank assembles two matrices, of which it has a quarter, in bfloat16
    assert found["bytes_per_rank"] == {
        "gather_mean": each,
        "gather_busiest": each,
        "scatter_mean": each,
        "scatter_busiest": each,
    }
    assert found["flops"] == {"busiest_rank": 2 * flops, "mean": 2 * flops}
    assert found["balance"] == 1
    (row,) = found["shapes"]
    assert (row["shape"], row["num_matrices"], row["num_owners"], row["strategy"]) == ([64, 64], 8, 4, "owner")
    time = found["time"]
    assert time["orthogonalize"] == pytest.approx(2 * flops / 2e12)
    assert time["gather"] == pytest.approx(each / 4e9)
    assert time["elementwise"] == pytest.approx(24 * 2 * matrix / 1e9)
    whole = time["orthogonalize"] + time["elementwise"] + time["gather"] + time["scatter"]
    assert time["step"] == pytest.approx(whole)  # one stage: there is nothing to overlap with
    staged = run("plan", "my_nets:squares", "--world-size", "4", "--json", *args, "--max-stage-bytes", "8KiB")
    time = json.loads(staged.stdout)["time"]
    assert time["num_stages"] == 2
    gather, scatter, compute = (time[name] / 2 for name in ("gather", "scatter", "orthogonalize"))
    # Both gathers come first. The first scatter waits for them and for its matrices, the second for the first.
    first = max(2 * gather, gather + compute) + scatter
    second = max(first, gather + 2 * compute) + scatter
    assert time["step"] == pytest.approx(time["elementwise"] + second)


def test_stages_that_leave_ranks_idle_take_longer(folder):
    """Two matrices a stage on four ranks: a third stage begins when the first has been sent."""
    (folder / "my_nets.py").write_text(SQUARES)
    args = ("--bandwidth", "1e9", "--memory-bandwidth", "1e9", "--strategy", "owner", "--json")
    whole = plan_of(run("plan", "my_nets:squares", "--mesh", "4,2", *args))
    staged = plan_of(run("plan", "my_nets:squares", "--mesh", "4,2", *args, "--max-stage-bytes", "8KiB"))
    assert (whole["num_stages"], staged["num_stages"]) == (1, 4)
    assert whole["time"]["step"] == pytest.approx(whole["time"]["orthogonalize"], rel=1e-3)
    assert staged["time"]["step"] == pytest.approx(2 * whole["time"]["step"], rel=1e-3)


def test_replicas_and_everywhere_by_hand(folder):
    (folder / "my_nets.py").write_text(SQUARES)
    found = plan_of(run("plan", "my_nets:squares", "--mesh", "2,4", "--strategy", "owner", "--json"))
    matrix = 64 * 64
    assert found["world_size"] == 8
    # One matrix each: a quarter is there, and both replicas need the result.
    assert found["bytes_per_rank"]["gather_busiest"] == matrix * 3 // 4 * 2
    assert found["bytes_per_rank"]["scatter_busiest"] == (2 * matrix - matrix // 4) * 2
    assert found["memory"]["weights"] == 8 * matrix * 4 // 4
    found = plan_of(run("plan", "my_nets:squares", "--world-size", "4", "--strategy", "replicate", "--json"))
    assert found["bytes_per_rank"]["gather_busiest"] == 8 * matrix * 3 // 4 * 2
    assert found["bytes_per_rank"]["scatter_busiest"] == 0
    assert found["flops"]["busiest_rank"] == 8 * 30 * 64**3
    found = plan_of(run("plan", "my_nets:squares", "--world-size", "4", "--rule", "adamw", "--json"))
    assert (found["shapes"], found["num_stages"], found["memory"]["scratch"]) == ([], 0, 0)
    assert found["memory"]["state"] == found["memory"]["adamw_state"]
    assert "No parameter is orthogonalized" in run("plan", "my_nets:squares", "--mesh", "4", "--rule", "adamw").stdout


PLUGIN = """
print("loaded")
from muon_fsdp.rules import Rule, register

@register
class Plain(Rule):
    name, aliases = "plain", ("pl",)
    def direction(self, batch):
        batch.update = batch.matrices
    def flops(self, options, rows, cols):
        return 7.0 * rows
"""


def test_a_plan_for_a_rule_of_a_user(folder, monkeypatch):
    monkeypatch.setattr(plugins, "_LOADED", {})
    (folder / "my_nets.py").write_text(SQUARES)
    (folder / "plain_plugin.py").write_text(PLUGIN)
    args = ("plan", "my_nets:squares", "--world-size", "1", "--json")
    try:
        found = plan_of(run(*args, "--rule", "pl", "--plugin", "plain_plugin.py"))
    finally:
        RULES.pop("plain", None)
    assert (found["rule"], found["flops"]["busiest_rank"], found["memory"]["state"]) == ("plain", 8 * 7 * 64, 0)
    assert plan_of(run(*args, "--rule", "sso"))["rule"] == "spectral_sphere"
    assert plan_of(run(*args))["rule"] == "muon"


def plan_of(result) -> dict:
    return json.loads(result.stdout)


def test_scratch_is_a_bound_and_not_a_loose_one():
    """1,664 MiB were measured for this on two ranks (docs/performance.md)."""
    optimizer = MuonOptimizer([nn.Parameter(torch.empty(2048, 8192, device="meta")) for _ in range(24)])
    assert 1664 <= optimizer.plan_report(world_size=2).scratch_bytes / 2**20 <= 1.1 * 1664


def test_text_for_a_pipe(folder):
    (folder / "my_nets.py").write_text(SQUARES)
    text = run("plan", "my_nets:Narrow", "--world-size", "16").stdout
    assert "the first rank holds 8.0 times the mean of weights" in text
    assert max(map(len, text.splitlines())) <= 80
    text = run("plan", "llama-3-8b", "--mesh", "4,8").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "8.03B parameters in float32, FSDP2, 4 replicas x 8 shards" in text
    assert "Assumed: 800 TFLOP/s (--tflops), 50 GB/s" in text
    assert "layers.31.mlp.down_proj.weight" not in text
    text = run("plan", "llama-3-8b", "--mesh", "4,8", "--routing").stdout
    assert "layers.31.mlp.down_proj.weight" in text
    rows = plan("demo", "--world-size", "2", "--routing")["parameters"]
    assert {
        "name": "lm_head.weight",
        "shape": [256, 160],
        "rule": "adamw",
        "scale": "",
        "reason": "output head",
    } in rows


def test_the_page_of_the_command_is_true():
    page = (ROOT / "docs" / "cli.md").read_text()
    assert run("plan", "llama-3-70b", "--mesh", "8,64").stdout.strip() in page
    assert [name for name in named_models() if name not in PRESETS and f"`{name}`" not in page] == []
    for command in ("plan", "doctor", "bench"):
        options = get_command(app).commands[command].params
        named = [name for option in options for name in option.opts if name.startswith("--")]
        assert [name for name in named if name not in page] == []


def test_large_jobs_are_planned_at_once():
    found = plan("llama-3-70b", "--world-size", "512")
    assert found["balance"] < 1.15
    assert found["memory"]["weights"] == pytest.approx(70.55e9 * 4 / 512, rel=1e-2)


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
    assert (done.returncode, done.stderr) == (0, "")
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
    assert 'pip install -e ".[integrations]"' in line


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


@pytest.mark.parametrize(
    ("mesh", "how"),
    [("1", "1 shard"), ("2", "2 shards"), ("1,1", "1 replica x 1 shard"), ("2,1", "2 replicas x 1 shard")],
)
def test_one_shard_is_singular(mesh, how):
    assert run("plan", "demo", "--mesh", mesh).stdout.splitlines()[0].endswith(f"FSDP2, {how}")


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


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["llama-3-8"], "did you mean llama-3-8b? The names are gpt2-124m"),
        (["xyz"], "unknown model 'xyz'. The names are gpt2-124m"),
        (["demo", "--mesh", "3,x"], "--mesh 3,x is not SHARDS or REPLICAS,SHARDS"),
        (["demo", "--mesh", "2,2,2"], "--mesh 2,2,2 is not"),
        (["demo", "--mesh", "3,3"], "has 9 ranks and --world-size is 8"),
        (["demo", "--mesh", "0,8"], "--mesh 0,8 is not"),
        (["demo", "--strategy", "fast"], "Unknown strategy 'fast'; valid names are auto, owner, replicate"),
        (
            ["demo", "--rule", "sgd"],
            "unknown rule 'sgd'; available rules: muon, normuon, spectral_sphere (sso), adamw",
        ),
        (["demo", "--plugin", "nowhere.py"], "--plugin nowhere.py: no such file; pass the path of a Python file"),
        (["demo", "--dtype", "int8"], "--dtype int8 is not one of float32"),
        (["demo", "--comm-dtype", "x"], "--comm-dtype x is not one of"),
        (["demo", "--max-stage-bytes", "lots"], "--max-stage-bytes lots is not a number of bytes"),
        (["no.such.module:make"], "can't import 'no.such.module'"),
        (["my_nets:nobody"], "module 'my_nets' has no 'nobody'"),
        (["my_nets:number"], "is an object of type int, not a class or a function"),
        (["my_nets:wrong"], "returned an object of type int, not a torch.nn.Module"),
        (["my_nets:needs"], "failed with TypeError"),
        (["my_nets:long"], "failed with ValueError: wrong field: the reason. It is called without"),
        (["my_nets:nothing"], "empty parameter list"),
        (["my_nets:placed"], "puts its parameter 'weight' on a device of its own"),
        (["broken.json"], "is not JSON"),
        (["list.json"], "has no 'model_type'"),
        (["empty"], "can't read empty/config.json"),
    ],
)
def test_mistakes(folder, args, says):
    (folder / "my_nets.py").write_text(SQUARES)
    (folder / "broken.json").write_text("{")
    (folder / "list.json").write_text("[]")
    (folder / "empty").mkdir()
    assert says in error_of("plan", *args, "--world-size", "8")


@pytest.mark.parametrize("args", [["--mesh", "99999999999999,9999999"], ["--world-size", "99999999"]])
def test_more_ranks_than_can_be_planned(args):
    assert "ranks are more than the 65536 that can be planned" in error_of("plan", "demo", *args)


def test_the_number_of_ranks_must_be_said():
    assert "--world-size 512" in error_of("plan", "demo")


def test_sizes_are_read():
    assert plan("demo", "--world-size", "2", "--max-stage-bytes", "64MiB")["max_stage_bytes"] == 64 * 2**20
    assert plan("demo", "--world-size", "2", "--max-stage-bytes", "1.5kB")["max_stage_bytes"] == 1500


def test_tables_for_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    output.print_table("Title [x]", ("name", "number"), [("[red]a", "1")])
    text = capsys.readouterr().out
    assert "Title [x]" in text
    assert "│ [red]a │      1 │" in text


def test_a_status_line_for_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with output.status("working"):
        pass
    assert capsys.readouterr().out == ""


# ----------------------------------------------------------------------------------------------------------- doctor


@pytest.fixture
def no_processes(monkeypatch):
    """Replace the probes in other processes by answers that can be set."""
    codes = {None: 0, checks.ISA_WITHOUT_AMX: 0}
    monkeypatch.delenv(checks.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(checks, "run_bf16_product", codes.__getitem__)
    return codes


@pytest.fixture
def only_processes(monkeypatch):
    """Leave out the self-tests of this process."""
    ok = checks.Finding("self-test", "ok", "left out")
    monkeypatch.setattr(checks, "check_torch", lambda: ok)
    monkeypatch.setattr(checks, "check_settings", list)
    monkeypatch.setattr(checks, "check_orthogonalization", list)
    monkeypatch.setattr(checks, "check_step", lambda device: ok)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_doctor_on_this_machine(no_processes, monkeypatch):
    monkeypatch.setenv(checks.KERNELS_VARIABLE, "auto")
    result = run("doctor", "--quick")
    assert result.stdout.endswith("Everything works.\n")
    assert f"torch          {torch.__version__}" in result.stdout
    assert f"{checks.KERNELS_VARIABLE}=auto" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    content = json.loads(run("doctor", "--quick", "--json").stdout)
    assert content["ok"] is True
    assert content["backends"]["gloo"] is True
    assert {choice["why"] for choice in content["kernels"]}
    errors = [float(f["detail"].split()[0]) for f in content["findings"] if f["name"].startswith("orthogonalization")]
    assert len(errors) >= 2
    assert min(errors) > 1e-3  # five steps leave 1.75e-3, so zero would mean that nothing was computed
    assert max(errors) < 2e-2


def test_doctor_sees_a_wrong_iteration(no_processes, monkeypatch):
    monkeypatch.setattr(checks, "orthogonalize", lambda x: 1.01 * checks.polar(x.double()).to(x.dtype))
    result = run("doctor", "--quick", "--json", code=1)
    wrong = [f for f in json.loads(result.stdout)["findings"] if f["status"] == "wrong"]
    assert {f["name"] for f in wrong} == {"orthogonalization, float64", "orthogonalization, float32"}
    assert all(f["detail"].startswith("1.00e-02 ") and "report" in f["advice"] for f in wrong)


def test_doctor_sees_a_wrong_step(no_processes, monkeypatch):
    monkeypatch.setattr(checks, "MuonOptimizer", lambda weights, **options: MuonOptimizer(weights, lr=options["lr"]))
    assert checks.check_step(torch.device("cpu")).status == "wrong"
    monkeypatch.setattr(checks, "MuonOptimizer", lambda weights, **options: 1 / 0)
    finding = checks.check_step(torch.device("cpu"))
    assert (finding.status, finding.detail) == ("wrong", "ZeroDivisionError: division by zero")


def test_products_are_checked(monkeypatch):
    assert checks.check_kernels(torch.device("cpu")).status == "ok"
    monkeypatch.setattr(checks, "symmetric_product", lambda a, b: 1.1 * (a @ b.mT))
    assert checks.check_kernels(torch.device("cpu")).status == "wrong"


ILLEGAL = -signal.SIGILL


@pytest.mark.parametrize(
    ("given", "codes", "status", "says"),
    [
        (None, {None: 0}, "ok", "they run"),
        (None, {None: ILLEGAL, "AVX512_CORE_FP16": 0}, "wrong", "export ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"),
        (None, {None: ILLEGAL, "AVX512_CORE_FP16": ILLEGAL}, "wrong", "float32"),
        ("AVX512_CORE_FP16", {"AVX512_CORE_FP16": 0, None: 0}, "ok", "and without it"),
        ("AVX512_CORE_FP16", {"AVX512_CORE_FP16": 0, None: ILLEGAL}, "ok", "Keep ONEDNN_MAX_CPU_ISA set"),
        ("AVX512_CORE_FP16", {"AVX512_CORE_FP16": 1, None: 1}, "wrong", "exit status 1"),
        ("AVX512_CORE_AMX", {"AVX512_CORE_AMX": ILLEGAL, None: ILLEGAL}, "wrong", "Try: export"),
    ],
)
def test_bf16_that_dies(no_processes, monkeypatch, given, codes, status, says):
    no_processes.clear()
    no_processes.update(codes)
    if given is not None:
        monkeypatch.setenv(checks.ISA_VARIABLE, given)
    finding = checks.check_cpu_bf16()
    assert finding.status == status
    assert says in finding.detail + finding.advice
    assert ("illegal instruction" in finding.detail) == (ILLEGAL in codes.values())


def test_the_exit_status_tells_of_bf16(no_processes, only_processes):
    assert run("doctor", "--quick").stdout.endswith("Everything works.\n")
    no_processes[None] = ILLEGAL
    result = run("doctor", "--quick", "--json", code=1)
    *_, finding = json.loads(result.stdout)["findings"]
    assert finding["status"] == "wrong"


def test_the_bf16_product_runs_in_a_process(monkeypatch):
    assert checks.run_bf16_product(checks.ISA_WITHOUT_AMX) == 0
    monkeypatch.setattr(checks, "_BF16_PRODUCT", "import os; os.kill(os.getpid(), 4)")
    assert checks.run_bf16_product(None) == -signal.SIGILL


def test_two_ranks_are_tried(no_processes, only_processes, monkeypatch):
    finding = checks.check_two_ranks()
    assert finding.status == "ok", finding
    monkeypatch.setattr(checks, "_two_ranks", lambda: (1.0, 1e-5, "off"))
    result = run("doctor", code=1)
    assert "wrong    two ranks, gloo: 1.00e+00 off" in result.stdout
    assert "Something is wrong" in result.stdout
    monkeypatch.setattr(checks, "backends", lambda: {"gloo": False, "nccl": False})
    assert checks.check_two_ranks().status == "warning"


def test_a_rank_sees_a_difference(tmp_path, monkeypatch):
    """On one rank nothing is sent, and the comparison is the same."""
    assert two_ranks.main(0, str(tmp_path / "one"), world_size=1) < 1e-6
    rates = iter((0.02, 0.03))
    monkeypatch.setattr(two_ranks, "MuonOptimizer", lambda p, **options: MuonOptimizer(p, lr=next(rates), **options))
    assert two_ranks.main(0, str(tmp_path / "two"), world_size=1) > 1e-3


def test_a_rank_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(checks.sys, "executable", "/bin/false")
    finding = checks.check_two_ranks()
    assert (finding.status, finding.detail) == ("wrong", "RuntimeError: rank 0 failed: exit status 1")


def test_a_build_for_gpus_that_sees_none(no_processes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    text = run("doctor", "--quick").stdout
    assert "warning  GPU: none visible to torch, a build for CUDA 12.8\n         -> If there is one, check " in text
    assert text.endswith("Everything works.\n")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert checks.check_settings() == []


def test_settings_that_leave_a_gpu_unused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(checks, "backends", lambda: {"gloo": False, "nccl": False})
    monkeypatch.setenv(checks.KERNELS_VARIABLE, "torch")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = checks.check_settings()
    assert [finding.name for finding in found] == ["gloo", "NCCL", "kernels", "kernels"]
    assert {finding.status for finding in found} == {"warning"}
    assert found[2].advice == f"Unset {checks.KERNELS_VARIABLE} to use them."


def test_processes_that_do_not_end(monkeypatch):
    monkeypatch.setattr(checks, "PATIENCE_SECONDS", 0.05)
    finding = checks.check_two_ranks()
    assert (finding.status, finding.detail) == ("wrong", "RuntimeError: the ranks did not end within 0.05 s")
    finding = checks.check_cpu_bf16()
    assert (finding.status, finding.detail) == ("warning", "unknown: the process did not end within 0.05 s")


def test_an_old_torch(monkeypatch):
    assert checks.check_torch().status == "ok"
    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    finding = checks.check_torch()
    assert (finding.status, finding.advice) == ("wrong", 'Install a newer version: pip install "torch>=2.10".')


def test_no_path_of_the_user_is_shown(no_processes, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(checks.platform, "release", lambda: "6.1.2-somebody-s-machine")

    def fails(*args: object) -> None:
        raise OSError("can't read /home/somebody/secret/file")

    monkeypatch.setattr(checks, "_step", fails)
    for args in (["--json"], []):
        text = run("doctor", "--quick", *args, code=1).stdout
        assert "somebody" not in text
        assert "~/secret/file" in text


# ------------------------------------------------------------------------------------------------------------ bench


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(Ceilings, "measure", classmethod(lambda cls, device: cls(1e11, 1e10)))
    monkeypatch.setattr(steps, "CPU_MODELS", {"tiny, 1 layer": [(16, 8), (8, 16)]})
    monkeypatch.setattr(pair, "CPU_SIZES", {"small": 2 * [(8, 8)]})


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_bench(small, tmp_path):
    file = tmp_path / "figures.json"
    args = ["bench", "--repeats", "1", "--shapes", "2x16x32,1x8x8", "--threads", "1"]
    result = run(*args, "--json", str(file))
    figures = json.loads(file.read_text())
    assert [entry["shape"] for entry in figures["orthogonalization"]] == ["2 x 16 x 32", "1 x 8 x 8"]
    (step,) = figures["step"]
    assert {"muon_fsdp", "torch.optim.AdamW(fused)", "torch.optim.Muon"} <= set(step["optimizers"])
    assert all(one["milliseconds"] > 0 for one in step["optimizers"].values())
    assert {"TritonMuon", "torch.optim.Adam"} <= set(figures["pair"][0]["optimizers"])
    for title in ("Orthogonalization, five steps", "One step", "The element-wise pair"):
        assert title in result.stdout
    assert "2 x 16 x 32:" in result.stderr
    floor = 2 * (2 * 16**3 * min(5 * (1.5 * 2 + 0.5), 3 * 2 + 1.4 * 5)) / 1e11 + 2 * (2 * 16 * 32 * 4) / 1e10
    assert figures["orthogonalization"][0]["floor_milliseconds"] == pytest.approx(1e3 * floor)
    result = run(*args, "--tables", "step", "--models", "tiny", "--json", "-")
    assert set(json.loads(result.stdout)) == {"date", "device", "torch", "ceilings", "step"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_threads_of_bench(small, monkeypatch):
    def threads(*args: str) -> str:
        result = run(
            "bench", "--tables", "orthogonalization", "--shapes", "1x8x8", "--repeats", "1", "--json", "-", *args
        )
        return json.loads(result.stdout)["device"].partition("CPU, ")[2]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads() == "2 threads"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)  # as PyTorch does at its start
    assert threads() == "1 thread"
    assert threads("--threads", "2") == "2 threads"


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_the_real_bench_has_the_threads_of_openmp():
    args = ["--tables", "orthogonalization", "--shapes", "1x8x8", "--repeats", "1"]
    done = subprocess_run("-m", "muon_fsdp.cli", "bench", *args, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert " CPU, 1 thread, " in done.stdout.splitlines()[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_a_peer_that_does_not_run_is_left_out_and_ours_is_not(small, monkeypatch):
    def broken(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        raise RuntimeError("not here")

    monkeypatch.setattr(steps, "optimizers", lambda device: {"peer": broken})
    result = run("bench", "--tables", "step", "--repeats", "1", "--json", "-")
    assert "tiny, 1 layer, peer: RuntimeError: not here" in result.stderr
    assert list(json.loads(result.stdout)["step"][0]["optimizers"]) == ["muon_fsdp"]
    monkeypatch.setattr(steps, "ours", lambda device: {"muon_fsdp": broken})
    assert isinstance(CliRunner().invoke(app, ["bench", "--tables", "step"]).exception, RuntimeError)


def test_the_plain_iteration_is_the_published_one():
    """Its singular values are those of the polynomial, applied five times."""
    x = torch.randn(2, 12, 20, generator=torch.Generator().manual_seed(0))
    found = torch.linalg.svdvals(peers.plain_newton_schulz(x.mT).float())
    values = torch.linalg.svdvals(x.double())
    values = values / values.norm(dim=-1, keepdim=True)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    torch.testing.assert_close(found.double().sort().values, values.sort().values, rtol=0, atol=0.05)


def test_other_libraries_take_part_where_they_are_installed(monkeypatch):
    class Other:
        def __init__(self, params, lr, **options):
            self.seen = (params, lr, options)

    for name in ("dion", "dion.newton_schulz_triton", "gram_newton_schulz"):
        monkeypatch.setitem(sys.modules, name, None)
    alone = set(peers.orthogonalizers("cuda")), set(peers.optimizers("cuda"))
    assert alone == (set(peers.orthogonalizers("cpu")), set(peers.optimizers("cpu")))
    monkeypatch.setitem(sys.modules, "dion", SimpleNamespace(Muon=Other))
    monkeypatch.setitem(sys.modules, "dion.newton_schulz_triton", SimpleNamespace(newton_schulz_triton=abs))
    gram = SimpleNamespace(Muon=Other, POLAR_EXPRESS_COEFFICIENTS=(), GramNewtonSchulz=lambda **options: abs)
    monkeypatch.setitem(sys.modules, "gram_newton_schulz", gram)
    assert {*peers.orthogonalizers("cuda")} - alone[0] == {"dion Triton", "gram-newton-schulz"}
    more = peers.optimizers("cuda")
    assert {*more} - alone[1] == {"dion Muon (Triton)", "dion Muon (Gram)", "gram-newton-schulz Muon"}
    assert more["dion Muon (Triton)"]([]).seen == ([], 0.02, {"use_triton": True})


def test_ceilings_are_measured(monkeypatch):
    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: real(*(min(64, size) for size in shape), **options))
    ceilings = Ceilings.measure("cpu")
    assert math.isfinite(ceilings.flops)
    assert ceilings.flops > 0
    assert ceilings.bytes > 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--tables", "speed"], "--tables: 'speed' is not one of orthogonalization, step, pair"),
        (["--tables", ","], "--tables: pass some of"),
        (["--shapes", "3x4"], "--shapes: shape '3x4' is not BATCHxROWSxCOLUMNS"),
        (["--models", "gpt9"], "--models: 'gpt9' is not one of gpt2-124m"),
        (["--json", "no/such/folder/file.json"], "--json: the folder of no/such/folder/file.json does not exist"),
    ],
)
def test_mistakes_of_bench(args, says):
    assert says in error_of("bench", *args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_spheres_are_measured_beside_muon(small, capsys):
    sphere.main(["--modes", "zero", "--repeats", "1"])
    names = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[3:]]
    assert names == ["Muon", "SSO, zero"]


def test_steps_on_ranks_are_measured(capsys):
    ranks.main([2], [(16, 8), (8, 16)])
    header, _, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["ranks", "owner", "s", "replicate", "s"]
    assert row.split()[0] == "2"


def test_a_rank_that_fails_ends_the_run():
    with pytest.raises(ProcessRaisedException, match="could not convert string to float"):
        run_on_ranks(2, float, "one")


def test_a_timeline_is_drawn(tmp_path):
    lanes = [("host", "gather stage 1"), ("GPU, NCCL stream", "ncclKernel"), ("GPU, computing stream", "gemm")]
    trace.draw([(lane, name, start, 1.0) for start, (lane, name) in enumerate(lanes)], str(tmp_path / "trace.png"))
    assert (tmp_path / "trace.png").stat().st_size > 10_000
