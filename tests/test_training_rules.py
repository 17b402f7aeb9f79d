"""Rules of the training program: flags and names from what rules declare, rules of users, and one-line mistakes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from muon_fsdp.rules import BUILT_IN, RULES, Option, Rule, register
from muon_fsdp.training import model, plugins, program, resuming
from muon_fsdp.training.config import COMMON_OPTIONS, TrainConfig, default_options, make_parser, parse
from muon_fsdp.training.model import GPT, GPTConfig
from muon_fsdp.training.optimizers import make_optimizer
from muon_fsdp.training.parallel import connect, place
from muon_fsdp.training.program import main
from tests.pool import RankPool

ROOT = Path(__file__).parent.parent
TINY = GPTConfig(num_layers=2, num_heads=2, d_model=32, sequence_length=16)

SIGN = """
import torch
from muon_fsdp.rules import Option, PerParameter, Rule, register
from shared import SIZE

@register
class RowSign(Rule):
    name, title, aliases = "row_sign", "RowSign", ("rs",)
    options = (*Rule.options, Option("row_beta", 0.9, "decay of the sum, 100% of it at 1", per_step=True),
               Option("steps", 3, "a name that the program has too"))
    state = (PerParameter("total"),)
    recipe = {"lr": 0.003}

    def prepare(self, group, grads, states):
        torch._foreach_mul_([state["total"] for state in states], group["row_beta"])
        torch._foreach_add_([state["total"] for state in states], grads)
        return [state["total"] for state in states]

    def direction(self, batch):
        batch.update = SIZE * batch.matrices.sum(-1, keepdim=True).sign() * batch.matrices.sign()
"""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A preset that trains in a moment, and rules, modules and folders to search as they were."""
    monkeypatch.setitem(model.PRESETS, "small", TINY)
    monkeypatch.setattr(plugins, "_LOADED", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    rules, modules = dict(RULES), set(sys.modules)
    for name in RULES.keys() - {rule.name for rule in BUILT_IN}:  # those of other tests
        del RULES[name]
    yield
    RULES.clear()
    RULES.update(rules)
    for name in set(sys.modules) - modules:
        if name == "shared" or "plugin" in name:
            del sys.modules[name]


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    folder = tmp_path / "rules"
    folder.mkdir()
    (folder / "shared.py").write_text("SIZE = 1.0")
    (folder / "my_plugin.py").write_text(SIGN)
    return folder / "my_plugin.py"


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        main(list(arguments))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


# ------------------------------------------------------------------------------------------------- flags of options


def test_flags_of_common_options_follow_from_the_declarations() -> None:
    shown = " ".join(make_parser("x").format_help().split())
    for name in COMMON_OPTIONS:
        owners = [rule for rule in RULES.values() if name in rule.all_options]
        assert len({(rule.all_options[name].doc, default_options(rule)[name]) for rule in owners}) == 1  # one help text
    assert (
        "--nesterov, --no-nesterov use Nesterov momentum: orthogonalize grad + momentum * buffer (default: true; muon, "
        in shown
    )
    assert "--betas X,X decay of the first and of the second moment, each in [0, 1) (default: 0.9,0.95; adamw)" in shown
    rules = "muon, normuon, spectral_sphere, hyperball"
    assert f"--lr X learning rate of the hidden matrices (default: 0.02 for {rules}; " in shown
    assert "--optimizer muon|normuon|spectral_sphere|sso|hyperball|sinkhorn|adamw" in shown


@pytest.mark.parametrize(
    ("arguments", "optimizer", "options"),
    [
        ([], "muon", {}),
        (["--momentum", "0.9", "--no-nesterov", "--set", "ns_steps=3"], "muon",
         {"momentum": 0.9, "nesterov": False, "ns_steps": 3}),
        (["--set", "scale=0.5", "--nesterov"], "muon", {"scale": 0.5, "nesterov": True}),
        (["--set", "scale=v4", "--optimizer", "normuon", "--beta2", "0.9"], "normuon", {"scale": "v4", "beta2": 0.9}),
        (["--momentum", "0.9", "--set", "momentum=0"], "muon", {"momentum": 0.0}),
        (["--optimizer", "sso", "--lambda-mode", "zero"], "spectral_sphere", {"lambda_mode": "zero"}),
        (["--optimizer", "adamw", "--betas", "0.8,0.9", "--set", "eps=1e-6"], "adamw",
         {"betas": (0.8, 0.9), "eps": 1e-6}),
    ],
)  # fmt: skip
def test_only_what_was_given_is_an_option(arguments: list[str], optimizer: str, options: dict[str, Any]) -> None:
    config, _ = parse(arguments, "x")
    assert config == TrainConfig(optimizer=optimizer, options=options)
    assert config.folder == Path(f"runs/small-{optimizer}")
    assert config.label == RULES[optimizer].display_name
    assert hash(config) == hash(TrainConfig(optimizer=optimizer, options=options))
    saved = config.as_json()
    assert json.loads(json.dumps(saved)) == saved
    assert config.matrix_options == default_options(RULES[optimizer]) | options


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lambda-mode", "zero"], "option 'lambda_mode' is not an option of rule 'muon': only 'spectral_sphere' has"),
        (["--betas", "0,0"], "option 'betas' is not an option of rule 'muon': only 'adamw' has it; leave it out"),
        (["--set", "scale=v2", "--optimizer", "sso"], "option 'scale': rule 'spectral_sphere' has no scale: the rad"),
        (["--set", "momentun=0.9"], "option 'momentun' is not an option of rule 'muon': no rule has it; did you mean"),
        (["--set", "lr=0.9"], "'lr' is a field of TrainConfig, not an option: pass lr=0.9, or --lr 0.9"),
        (["--set", "momentum"], "argument --set: must be NAME=VALUE, got 'momentum'"),
        (["--momentum", "1.5"], "Invalid momentum: 1.5 (option 'momentum' must be a finite number in [0"),
        (["--momentum", "high"], "Invalid momentum: 'high' (option 'momentum' must be a number in [0"),
        (["--set", "ns_steps=2.5"], "Invalid ns_steps: 2.5 (option 'ns_steps' must be an int"),
        (["--set", "ns_steps=0"], "Invalid ns_steps: 0"),
        (["--set", "scale=v9"], "Unknown scale 'v9'; valid names are"),
        (["--set", "orthogonalization=x"], "Unknown orthogonalization 'x'; valid names are "),
        (["--betas", "0.9", "--optimizer", "adamw"], "Invalid betas: 0.9"),
        (["--optimizer", "sgd"], "unknown rule 'sgd'; available rules: muon, normuon, spectral_sphere (sso), "
         "hyperball, sinkhorn, adamw; pass --plugin FILE to load a rule of your own"),
        (["--optimizer", "nomuon"], "unknown rule 'nomuon'; did you mean 'normuon'? Available rules: muon"),
        (["--cuda-graph", "--set", "orthogonalization=exact"], "--cuda-graph cannot capture this optimizer's step: or"),
    ],
)  # fmt: skip
def test_options_that_can_not_be(arguments: list[str], says: str, capsys) -> None:
    assert says in error_of(capsys, *arguments)


def test_options_without_a_command_line() -> None:
    assert TrainConfig(optimizer="sso").optimizer == "spectral_sphere"
    with pytest.raises(
        ValueError, match="option 'momentun' is not an option of rule 'muon': no rule has it; did you mean"
    ):
        TrainConfig(options={"momentun": 0.9})
    with pytest.raises(ValueError, match=r"'lr' is a field of TrainConfig, not an option: pass lr=0\.1"):
        TrainConfig(options={"lr": 0.1})
    with pytest.raises(ValueError, match=r"Invalid momentum: 2\.0"):
        TrainConfig(options={"momentum": 2.0})


def test_options_of_every_kind(capsys) -> None:
    @register
    class Odd(Rule):
        name = "odd"
        options = (
            *Rule.options,
            Option("momentum", True, "a switch here, a number elsewhere"),
            Option("limit", None, "anything"),
            Option("word", "a", "any name"),
            Option("pair", (1, 2), "whole numbers"),
            Option("seed", 0, "a name that the program has"),
        )

    def options(*settings: str) -> Any:
        return parse(["--optimizer", "odd", "--seed", "1", *(f"--set={setting}" for setting in settings)], "x")[
            0
        ].options

    assert options("momentum=false", "word=5", "pair=3,4", "seed=7") == {
        "momentum": False, "word": "5", "pair": (3, 4), "seed": 7,
    }  # fmt: skip
    for text, value in (("none", None), ("3", 3), ("-1", -1), ("0.5", 0.5), ("1,x", (1, "x")), ("a=b", "a=b")):
        assert options(f"limit={text}") == {"limit": value}
    for wrong in ("momentum=0.9", "seed=0.5", "pair=3"):
        with pytest.raises(SystemExit):
            options(wrong)
        assert "must be like its default" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------- groups and their rules

# Rule, lr, weight decay and what else there is of the hidden matrices.
EXPECTED = {
    "muon": {"lr": 0.02, "weight_decay": 0.01, "momentum": 0.95, "nesterov": True, "scale": "original", "ns_steps": 5},
    "normuon": {"lr": 0.02, "weight_decay": 0.01, "momentum": 0.95, "nesterov": True, "beta2": 0.95, "eps": 1e-8},
    "spectral_sphere": {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95, "nesterov": True, "radius_scaler": 1.0},
    "sinkhorn": {"lr": 2.6e-4, "weight_decay": 0.0, "momentum": 0.95, "sinkhorn_steps": 11, "gamma": 0.18},
    "adamw": {"lr": 2e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8},
}


def groups_of(parallel: str) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for optimizer in EXPECTED:
        config = TrainConfig(optimizer=optimizer, parallel=parallel, device="cpu")
        with connect(config) as world:
            gpt = place(GPT(TINY), config, world)
            groups = make_optimizer(gpt, config).param_groups
        found[optimizer] = [{**group, "params": len(group["params"])} for group in groups]
    return found


def check_groups(found: dict[str, list[dict[str, Any]]]) -> None:
    for optimizer, (hidden, rest) in found.items():
        assert hidden.items() >= {"rule": optimizer, **EXPECTED[optimizer]}.items()
        assert all(name.startswith("blocks.") and "norm" not in name for name in hidden["param_names"])
        assert (hidden["params"], rest["params"]) == (12, 11)
        assert rest.items() >= {"rule": "adamw", "lr": 4e-3, "weight_decay": 0.0, "betas": (0.9, 0.95)}.items()


def test_hidden_matrices_take_the_rule_and_the_rest_adamw(ranks: RankPool) -> None:
    check_groups(groups_of("none"))
    for parallel in ("fsdp", "ddp"):
        for found in ranks.run(2, groups_of, parallel):
            check_groups(found)


def test_adamw_is_that_of_torch() -> None:
    def gpt() -> GPT:
        torch.manual_seed(0)
        return GPT(TINY)

    ours, theirs = gpt(), gpt()
    matrices = [p for p in theirs.blocks.parameters() if p.ndim == 2]
    rest = [p for p in theirs.parameters() if not any(p is matrix for matrix in matrices)]
    groups = [{"params": matrices, "lr": 2e-3, "weight_decay": 0.1}, {"params": rest, "lr": 4e-3, "weight_decay": 0.0}]
    optimizers = [
        make_optimizer(ours, TrainConfig(optimizer="adamw")),
        torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8),
    ]
    tokens = torch.randint(256, (4, 16))
    for _ in range(4):
        for network, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            network(tokens, tokens)[1].backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------------- plugins


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog.\n" * 400)
    return ["--data", str(text), "--output", str(tmp_path / "out"), "--batch-size", "8", "--device", "cpu",
            "--model", "demo", "--sequence-length", "16", "--eval-windows", "4"]  # fmt: skip


def test_a_rule_of_a_user_on_two_ranks_and_resumed_on_one(
    plugin: Path, flags: list[str], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ["--optimizer", "rs", "--plugin", str(plugin), "--set", "row_beta=0.5", "--set", "steps=4"]
    command = [sys.executable, "-m", "muon_fsdp.training", *flags, *own, "--steps", "3", "--processes", "2", "--fsdp"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        f"{who}: importing PyTorch ..." for who in ("python -m muon_fsdp.training", "rank 0")
    ]
    assert "RowSign: demo" in done.stdout
    assert "row_sign on 24 tensors, 1,228,800 parameters, lr 0.003, weight decay 0" in done.stdout
    start = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert start["config"]["options"] == {"row_beta": 0.5, "steps": 4}

    assert main([*flags, "--resume", "--steps", "4"]) == 2
    expected = f"with rule 'row_sign', which is not registered: pass --plugin {plugin} --optimizer row_sign\n"
    assert capsys.readouterr().err == f"error: the checkpoint was trained {expected}"
    made = []
    monkeypatch.setattr(program, "make_optimizer", lambda *of: made.append(make_optimizer(*of)) or made[-1])
    changed = ["row_beta=0.25" if flag == "row_beta=0.5" else flag for flag in own]
    assert main([*flags, *changed, "--resume", "--steps", "4", "--rest-lr", "0.001"]) == 0
    printed = capsys.readouterr().out
    assert (
        "note: settings that differ from the checkpoint's: steps 3 -> 4, rest_lr None -> 0.001, row_beta 0.5 -> 0.25\n"
        in printed
    )
    assert "resuming from step 3" in printed
    hidden, rest = made[0].param_groups
    assert (hidden["row_beta"], hidden["steps"], rest["rule"]) == (0.25, 4, "adamw")  # and not the checkpoint's


def test_options_that_differ_from_the_checkpoint_are_named(capsys) -> None:
    saved = TrainConfig(options={"momentum": 0.95, "scale": "v4", "num_heads": 2}).as_json()
    resuming.print_changes({"config": saved}, TrainConfig(options={"view": "matrix"}))
    changes = "scale v4 -> original, num_heads 2 -> None, view None -> matrix"
    assert capsys.readouterr().out == f"note: settings that differ from the checkpoint's: {changes}\n"


def test_the_plugin_of_the_documentation(tmp_path: Path, flags: list[str], capsys) -> None:
    text = (ROOT / "docs" / "training.md").read_text()
    (command,) = re.findall(r"^muon-fsdp train (.* --plugin .*) --processes", text, flags=re.MULTILINE)
    (tmp_path / "my_plugin.py").write_text(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0])
    own = command.replace("my_rules.py", str(tmp_path / "my_plugin.py")).split()
    assert main([*flags, *own, "--model", "small", "--steps", "2"]) == 0
    assert "sign on 12 tensors, 24,576 parameters, lr 0.002, weight decay 0.1" in capsys.readouterr().out


def test_a_plugin_by_file_and_by_module(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of a module in the current folder, too, and as often as one likes."""
    monkeypatch.chdir(plugin.parent)
    for name in (str(plugin), str(plugin), "my_plugin", "my_plugin"):
        config, _ = parse(["--plugin", name, "--optimizer", "rs", "--set", "row_beta=0.5"], "x")
        assert (config.label, config.options) == ("RowSign", {"row_beta": 0.5})
        assert config.matrix_options["lr"] == 0.003
        RULES.pop("row_sign")  # as another notebook cell may do
    assert TrainConfig(optimizer="rs", plugin=["my_plugin"]).plugin == ("my_plugin",)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.py", None, "no such file; pass the path of a Python file, or package.module"),
        ("no_such.module", None, "no such file, and no module of this name in the current folder or installed"),
        (".", None, "this is a folder; pass the path of a Python file"),
        ("rule.txt", "", "this is not a Python file; its name must end in .py"),
        ("a_plugin.py", "x = 1\n", "it registers no rule; write @register, from muon_fsdp.rules, above your class"),
        ("a_plugin.py", "x = 1\ny = z\n", "line 2: NameError: name 'z' is not defined"),
        ("a_plugin.py", "import no_such\n", "line 1: ModuleNotFoundError: No module named 'no_such'"),
        ("a_plugin.py", "def f(:\n", "line 1: SyntaxError: invalid syntax"),
        ("a_plugin.py", "raise SystemExit(3)\n", "it ends the program; call sys.exit only under"),
        ("b_plugin", "y = z\n", "NameError: name 'z' is not defined"),
    ],
)
def test_a_plugin_that_can_not_be_used(
    name: str, content: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / (name if "." in name else f"{name}.py")).write_text(content)
    assert error_of(capsys, "--plugin", name, "--optimizer", "mine").startswith(f"error: --plugin {name}: {says}")


def test_a_plugin_without_a_name(capsys) -> None:
    assert "argument --plugin: expected one argument" in error_of(capsys, "--plugin")
