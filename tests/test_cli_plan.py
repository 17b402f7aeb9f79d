"""`muon-fsdp plan`: figures against arithmetic by hand, mistakes as one line, stdout that is JSON alone."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections import Counter
from contextlib import redirect_stdout

import pytest
import torch
from torch import nn
from typer.main import get_command

from muon_fsdp import MuonOptimizer
from muon_fsdp.benchmarks.public_models import PUBLIC_MODELS, matrix_shapes
from muon_fsdp.cli.app import app
from muon_fsdp.cli.flags import PlanFlags
from muon_fsdp.cli.loading import named_models
from muon_fsdp.cli.planned import StepPreview, estimate_time
from muon_fsdp.plan import outline, speeds
from muon_fsdp.plan.layout import fsdp_layout
from muon_fsdp.plan.stage_limits import HARDLY_LONGER
from muon_fsdp.rules import RULES
from muon_fsdp.training import plugins
from muon_fsdp.training.model import PRESETS
from tests.cli_cases import PUBLISHED, ROOT, error_of, folder_fixture, plan, run  # noqa: F401


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
    mixture = [*((256, *shape) for shape in expert), *expert]
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
    matrix, flops = 64 * 64, 28 * 64**3  # fourteen products, symmetric ones counted in full
    each = 2 * matrix * 3 // 4 * 2  # a rank assembles two matrices, of which it has a quarter, in bfloat16
    assert found["bytes_per_rank"] == {
        "gather_mean": each,
        "gather_busiest": each,
        "scatter_mean": each,
        "scatter_busiest": each,
        "weights": 0,
        "settled": 0,
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
    late = speeds.FIXED_SECONDS  # of every transfer
    assert time["step"] == pytest.approx(whole + 2 * late)  # one stage: there is nothing to overlap with
    assert (time["waiting"], time["overlapped"]) == (pytest.approx(2 * late), 0)
    staged = run("plan", "my_nets:squares", "--world-size", "4", "--json", *args, "--max-stage-bytes", "8KiB")
    time = json.loads(staged.stdout)["time"]
    assert time["num_stages"] == 2
    gather, scatter = (time[name] / 2 + late for name in ("gather", "scatter"))
    compute = time["orthogonalize"] / 2
    # Both gathers come first. The first scatter waits for them and for its matrices, the second for the first.
    first = max(2 * gather, gather + compute) + scatter
    second = max(first, gather + 2 * compute) + scatter
    assert time["step"] == pytest.approx(time["elementwise"] + second)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("gpt2-124m", ["--mesh", "8"]),
        ("gpt2-124m", ["--mesh", "2,4", "--device-memory", "1GiB"]),
        ("gpt2-124m", ["--mesh", "8,1"]),
        ("gpt2-774m", ["--mesh", "8,1", "--shard-state"]),
        ("llama-3-8b", ["--mesh", "64"]),
        ("llama-3-8b", ["--mesh", "8", "--max-stage-bytes", "256MiB"]),
        ("llama-3-70b", ["--mesh", "8,64"]),
        ("llama-3-8b", ["--mesh", "2,4", "--strategy", "replicate"]),
        ("llama-3-8b", ["--mesh", "8", "--offload-state"]),
        ("gpt-oss-20b", ["--mesh", "3,7"]),
        ("demo", ["--mesh", "1"]),
        ("demo", ["--mesh", "4", "--rule", "adamw"]),
    ],
)
def test_the_parts_of_a_step_add_up(name, args):
    time = plan(name, *args)["time"]
    lines = ("orthogonalize", "elementwise", "gather", "scatter", "weights", "waiting", "host")
    parts = sum(time[line] for line in lines)
    assert parts - time["overlapped"] == pytest.approx(time["step"], rel=1e-12)
    assert time["waiting"] >= -1e-12
    assert 0 <= time["overlapped"] <= time["orthogonalize"] + 1e-12


def test_stages_that_leave_ranks_idle_take_longer(folder):
    """Two matrices a stage on four ranks: a third stage begins when the first has been sent."""
    (folder / "my_nets.py").write_text(SQUARES)
    args = ("--tflops", "1e-3", "--bandwidth", "1e9", "--memory-bandwidth", "1e9", "--strategy", "owner", "--json")
    whole = plan_of(run("plan", "my_nets:squares", "--mesh", "4,2", *args, "--max-stage-bytes", "1GiB"))
    staged = plan_of(run("plan", "my_nets:squares", "--mesh", "4,2", *args, "--max-stage-bytes", "8KiB"))
    assert (whole["num_stages"], staged["num_stages"]) == (1, 4)
    assert whole["time"]["step"] == pytest.approx(whole["time"]["orthogonalize"], rel=0.1)
    assert staged["time"]["step"] == pytest.approx(2 * whole["time"]["step"], rel=0.1)


def test_sharded_state_by_hand(folder):
    (folder / "my_nets.py").write_text(SQUARES)
    arguments = ("plan", "my_nets:squares", "--mesh", "4,1", "--strategy", "owner", "--json")
    whole, sharded = plan_of(run(*arguments)), plan_of(run(*arguments, "--shard-state"))
    assert sharded["memory"]["weights"] == whole["memory"]["weights"]
    assert 4 * sharded["memory"]["state"] == whole["memory"]["state"]
    # Every rank receives three quarters of all weights, in float32.
    assert sharded["bytes_per_rank"]["weights"] == 3 * sharded["elements"] // 4 * 4
    assert sharded["time"]["weights"] > 0 == whole["time"]["weights"]
    assert sharded["shard_state"]
    text = run(*arguments[:-1], "--shard-state").output
    assert "DDP, 4 replicas, sharded state" in text
    assert "all-gather of weights" in text


def test_sharded_state_is_for_replicas(folder):
    (folder / "my_nets.py").write_text(SQUARES)
    for mesh in ("4", "2,4"):
        result = run("plan", "my_nets:squares", "--mesh", mesh, "--shard-state", code=2)
        assert "--shard-state is for DDP: pass --mesh REPLICAS,1" in result.output


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
    assert found["flops"]["busiest_rank"] == 8 * 28 * 64**3
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


def test_the_scratch_of_two_ranks():
    """The second stage, half as large, computes while the first is scattered: results, two buffers and the shards."""
    parameters = [nn.Parameter(torch.empty(2048, 8192, device="meta")) for _ in range(24)]
    optimizer = MuonOptimizer(parameters, max_stage_bytes=2**28)
    first, second = (report := optimizer.plan_report(world_size=2)).stages
    assert (first.units, second.units, second.scratch) == (2**28, 2**27, (4 * 4 * 2048**2 + 2048 * 8192) * 2)
    assert report.scratch_bytes == first.scattering + second.computing == 4 * 2**28 + 4 * 2**27


def test_text_for_a_pipe(folder):
    (folder / "my_nets.py").write_text(SQUARES)
    text = run("plan", "my_nets:Narrow", "--world-size", "16").stdout
    assert "the first rank holds 8.0 times the mean of weights" in text
    assert max(map(len, text.splitlines())) <= 80
    text = run("plan", "llama-3-8b", "--mesh", "4,8").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "8.03B parameters in float32, FSDP2, 4 replicas x 8 shards" in text
    assert "Assumed: 900 TFLOP/s (--tflops), 50 GB/s" in text
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


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ("1", "FSDP2, 1 shard"),
        ("2", "FSDP2, 2 shards"),
        ("1,1", "FSDP2, 1 replica x 1 shard"),
        ("2,3", "FSDP2, 2 replicas x 3 shards"),
        ("2,1", "DDP, 2 replicas"),
    ],
)
def test_the_first_line_names_the_layout(mesh, how):
    assert run("plan", "demo", "--mesh", mesh).stdout.splitlines()[0].endswith(f"float32, {how}")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["llama-3-8"], "did you mean llama-3-8b? The names are gpt2-124m"),
        (["xyz"], "unknown model 'xyz'. The names are gpt2-124m"),
        (["demo", "--mesh", "3,x"], "--mesh 3,x is not SHARDS or REPLICAS,SHARDS"),
        (["demo", "--mesh", "2,2,2"], "--mesh 2,2,2 is not"),
        (["demo", "--mesh", "3,3"], "has 9 ranks and --world-size is 8"),
        (["demo", "--mesh", "0,8"], "--mesh 0,8 is not"),
        (["demo", "--strategy", "fast"], "--strategy fast is not one of auto, owner, replicate"),
        (
            ["demo", "--rule", "sgd"],
            "unknown rule 'sgd'; available rules: muon, normuon, spectral_sphere (sso), hyperball, sinkhorn, adamw",
        ),
        (["demo", "--plugin", "nowhere.py"], "--plugin nowhere.py: no such file; pass the path of a Python file"),
        (["demo", "--dtype", "int8"], "--dtype int8 is not one of float32"),
        (["demo", "--comm-dtype", "x"], "--comm-dtype x is not one of"),
        (["demo", "--max-stage-bytes", "lots"], "--max-stage-bytes lots is not a number of bytes"),
        (["demo", "--device-memory", "0"], "--device-memory 0 is not a number of bytes"),
        (["demo", "--rounding", "random"], "--rounding random is not one of nearest, stochastic, remainder"),
        (["demo", "--rounding", "remainder"], "--rounding remainder is not for float32 weights: pass --dtype bfloat16"),
        (["demo", "--state-dtype", "int4"], "--state-dtype int4 is not one of float32, bfloat16, int8"),
        (["demo", "--attention", "heads"], "--attention heads is not one of split, whole, per_head"),
        (["demo", "--device-memory", "80"], "--device-memory 80 is less than 1 MiB; pass for example 80GiB"),
        (["demo", "--tflops", "0"], "--tflops 0 is no speed; pass at least 1e-6"),
        (["demo", "--memory-bandwidth", "nan"], "--memory-bandwidth nan is no speed"),
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
        (["empty"], "no such file: empty/config.json; pass the folder of a Hugging Face model"),
        (["nowhere/config.json"], "no such file or folder: nowhere/config.json; models are not downloaded"),
        (["org/model"], "no such file or folder: org/model"),
    ],
)
def test_mistakes(folder, args, says):
    (folder / "my_nets.py").write_text(SQUARES)
    (folder / "broken.json").write_text("{")
    (folder / "list.json").write_text("[]")
    (folder / "empty").mkdir()
    assert says in error_of("plan", *args, "--world-size", "8")


def test_the_model_may_only_be_left_out_for_a_list(folder):
    assert "pass a model, such as gpt2-124m; muon-fsdp plan --list shows all" in error_of("plan", "--world-size", "8")
    text = run("plan", "--list").stdout
    assert [line.split()[0] for line in text.splitlines()[3:] if line] == list(named_models())
    assert "llama-3-70b            70.55B" in text
    assert json.loads(run("plan", "--list", "--json").stdout)["llama-3-8b"] == 8_030_261_248


@pytest.mark.parametrize("args", [["--mesh", "99999999999999,9999999"], ["--world-size", "99999999"]])
def test_more_ranks_than_can_be_planned(args):
    assert "ranks are more than the 65536 that can be planned" in error_of("plan", "demo", *args)


def test_the_number_of_ranks_must_be_said():
    assert "--world-size 512" in error_of("plan", "demo")


def test_sizes_are_read():
    assert plan("demo", "--world-size", "2", "--max-stage-bytes", "64MiB")["max_stage_bytes"] == 64 * 2**20
    assert plan("demo", "--world-size", "2", "--max-stage-bytes", "1.5kB")["max_stage_bytes"] == 1500


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt2-124m", "8,1"),
        ("gpt2-124m", "1,8"),
        ("llama-3.2-1b", "512,1"),
        ("llama-3-8b", "1,64"),
    ],
)
def test_auto_chooses_the_strategy_that_the_estimate_finds_faster(name, mesh):
    """Under DDP an owner would send its results to every rank, which takes longer than to compute them everywhere."""
    times = {
        strategy: plan(name, "--mesh", mesh, "--strategy", strategy)["time"]["step"]
        for strategy in ("auto", "owner", "replicate")
    }
    assert times["auto"] <= 1.4 * min(times.values()), times


@pytest.mark.parametrize("mesh", [(1024,), (4, 256)])
def test_experts_are_moved_only_if_that_is_faster(monkeypatch, mesh):
    """256 ranks of 1,024 hold an expert of every stack, and the others wait for them, or for the network."""
    experts = nn.ParameterList([nn.Parameter(torch.empty(256, 2048, 7168, device="meta")) for _ in range(6)])
    layout = fsdp_layout(1024, None)
    times = {}
    for name, seconds in (("chosen", None), ("moved", 0.0), ("kept", math.inf)):
        with monkeypatch.context() as patch:
            if seconds is not None:
                patch.setattr(outline, "seconds_to_move", lambda *_, seconds=seconds: seconds)
            optimizer = MuonOptimizer(experts)
            report = optimizer.plan_report(mesh=mesh)
            times[name] = estimate_time(optimizer, report, layout, speeds.Speeds())["step"]
    assert times["moved"] > 1.5 * times["kept"] or len(mesh) == 2
    assert times["chosen"] <= 1.02 * min(times.values())


# ----------------------------------------------------------------------------------------------------------- stages


DENSE = ["gpt2-124m", "gpt2-774m", "llama-3.2-1b", "llama-3-8b", "llama-3-70b", "llama-3-405b", "qwen3-8b"]


@pytest.mark.parametrize(("world_size", "device_memory"), [("8", 80 * 2**30), ("64", 16 * 2**30), ("512", 80 * 2**30)])
@pytest.mark.parametrize("name", DENSE)
def test_stages_are_fast_within_a_twentieth_of_the_device(name, world_size, device_memory):
    """No stages of 256 MiB are faster that need no more memory than the limit, or than the chosen ones."""
    chosen = plan(name, "--world-size", world_size, "--device-memory", str(device_memory))
    fixed = plan(name, "--world-size", world_size, "--max-stage-bytes", "256MiB")
    limit, scratch = device_memory // 20, chosen["memory"]["scratch"]
    if chosen["memory"]["least_scratch"] <= limit:
        assert scratch <= limit
    if fixed["memory"]["scratch"] <= max(limit, scratch):
        assert chosen["time"]["step"] <= HARDLY_LONGER * fixed["time"]["step"]
    assert chosen["assumed"]["device_memory"] == device_memory


@pytest.mark.parametrize(("mesh", "milliseconds", "scratch"), [("8", 1.23, 88.5e6), ("2,4", 1.74, 108.5e6)])
def test_gpt2_is_not_slowed_to_save_memory_that_nobody_lacks(mesh, milliseconds, scratch):
    """Stages that took no more than the smaller state saves made the step 1.92 and 2.27 ms long."""
    usual, small = (plan("gpt2-124m", "--mesh", mesh, "--device-memory", memory) for memory in ("80GiB", "1GiB"))
    assert usual["time"]["step"] == pytest.approx(milliseconds * 1e-3, rel=5e-3)
    assert usual["memory"]["scratch"] == pytest.approx(scratch, rel=5e-3)
    assert small["memory"]["scratch"] <= 64 * 2**20
    assert small["time"]["step"] > 1.2 * usual["time"]["step"]


def test_stages_of_llama_overlap():
    """On 64 ranks, 32 of them compute two of the 96 large matrices each. A bound of 256 MiB makes one stage."""
    chosen = plan("llama-3-8b", "--world-size", "64")
    fixed = plan("llama-3-8b", "--world-size", "64", "--max-stage-bytes", "256MiB")
    assert (chosen["num_stages"], fixed["num_stages"]) == (3, 1)
    large = 2 * 14336 * 4096 / speeds.BYTES_PER_SECOND  # seconds in which one large matrix reaches its owner
    # Nothing can be computed before the first large matrix has arrived, and the last result travels alone.
    least = 2 * large * 63 / 64 + chosen["time"]["orthogonalize"] + chosen["time"]["elementwise"]
    assert least <= chosen["time"]["step"] <= 1.05 * least
    assert fixed["time"]["step"] > 1.3 * chosen["time"]["step"]


def test_the_plan_says_what_memory_exceeds():
    def text_of(*args):
        return " ".join(run("plan", *args).stdout.split())

    text = text_of("llama-3-8b", "--world-size", "64")
    assert "3 stages; gathers and scatters overlap with computation." in text
    assert "note: the sum is 671.1 MB more than with AdamW. Steps that need less scratch take longer" in text
    assert "exceeds its limit" not in text
    assert "devices of 80GiB (--device-memory), of which scratch may take 5%" in text
    # Matrix and result, and for a sample of it two copies and four Gram matrices, in half precision.
    needs = 2 * (4 * 14336 * 4096 + 4 * 4096**2) / 1e6
    text = text_of("llama-3-8b", "--world-size", "64", "--device-memory", "10GB")
    assert "note: scratch exceeds its limit of 500 MB, 5% of --device-memory: a parameter of shape 14336x4096" in text
    assert f"alone needs {needs:.4g} MB." in text
    text = text_of("gpt2-774m", "--world-size", "8", "--max-stage-bytes", "1GiB")
    assert "more than with AdamW." in text
    assert "pass --max-stage-bytes" not in text
    assert "stages, one after the other, to save memory." in text_of(
        "gpt2-124m", "--mesh", "4", "--device-memory", "1GB"
    )
    assert "more than with AdamW" not in text_of("llama-3-8b", "--world-size", "8")


# -------------------------------------------------------------------------------------------------------- DDP


def test_small_models_are_computed_on_every_replica_and_large_ones_once():
    """Check what the pages say about DDP and `strategy="auto"`."""
    small, large = (plan(name, "--mesh", "8,1") for name in ("gpt2-124m", "llama-3-8b"))
    assert {row["strategy"] for row in small["shapes"]} == {"replicate"}
    assert small["num_stages"] == 1  # as on one device: nothing is sent, so stages would hide nothing
    assert small["time"]["step"] < plan("gpt2-124m", "--mesh", "8,1", "--strategy", "owner")["time"]["step"]
    assert {row["strategy"] for row in large["shapes"]} == {"owner"}
    assert large["balance"] < 1.15
    text = " ".join(run("plan", "gpt2-124m", "--mesh", "8,1").stdout.split())
    assert "Every rank computes what is marked replicate, because sending results would take longer." in text
    assert "marked replicate" not in run("plan", "gpt2-124m", "--mesh", "8").stdout


# -------------------------------------------------------------------------------------------------------- width


def words_of(text: str) -> Counter[str]:
    """Count words, without the lines of tables."""
    return Counter(word for word in re.sub("[\u2500-\u257f]", " ", text).split() if set(word) != {"-"})


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("name", "mesh", "rule"),
    [("gpt2-124m", (8, 1), "muon"), ("llama-3-70b", (8, 64), "spectral_sphere"), ("qwen3-235b-a22b", (4096,), "muon")],
)
def test_every_line_fits_the_terminal_and_no_word_is_cut(name, mesh, rule, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    planned = StepPreview(PlanFlags(name, shard_state=mesh == (8, 1)), mesh, rule, None, 10**9)
    whole = None
    for columns, stream in itertools.product((300, 120, 80, 60), (io.StringIO, Terminal)):
        monkeypatch.setenv("COLUMNS", str(columns))
        with redirect_stdout(stream()) as shown:
            planned.show(routing=False)
        text = re.sub("\x1b.*?m", "", shown.getvalue())
        assert max(map(len, text.splitlines())) <= columns
        whole = whole or words_of(text)
        assert words_of(text) == whole, (columns, stream)


def test_state_on_the_host_is_counted_apart():
    """The device has the state of three stages; copies take as long as their bytes at the assumed speed."""
    args = ("llama-3-8b", "--mesh", "1", "--dtype", "bfloat16")
    whole, streamed = plan(*args), plan(*args, "--offload-state")
    assert whole["memory"]["host_state"] == 0
    assert streamed["memory"]["host_state"] == pytest.approx(whole["memory"]["state"], rel=1e-6)
    assert streamed["memory"]["state"] < 0.05 * whole["memory"]["state"]
    saved = sum(whole["memory"][part] - streamed["memory"][part] for part in ("state", "scratch"))
    assert whole["memory"]["total"] - streamed["memory"]["total"] == saved
    assert streamed["time"]["step"] == pytest.approx(max(whole["time"]["step"], whole["memory"]["state"] / 5e10))
