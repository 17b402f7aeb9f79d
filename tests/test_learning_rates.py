"""Learning rates: AdamW's follows from that of the matrices, mistakes are recognised, and the defaults train well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments import default_lr
from muon_fsdp import FSDPMuonOptimizer, MuonOptimizer, SpectralSphereOptimizer, create_hybrid_optimizer
from tests import toy_rules  # noqa: F401  (registers rules of users)

ROOT = Path(__file__).parent.parent
RATIO = 0.15
ADAMW_LRS = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
FAR_LR = r"lr=.* (looks like a learning rate of AdamW|is far above the usual)"


class Net(nn.Module):
    """An embedding, a matrix and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.norm = nn.Embedding(20, 6), nn.Linear(6, 8), nn.LayerNorm(8)


def pair() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4))]


def lr_of(optimizer: torch.optim.Optimizer, rule: str = "adamw") -> float:
    (lr,) = {float(group["lr"]) for group in optimizer.param_groups if group["rule"] == rule}
    return lr


# ------------------------------------------------------------------------------------------------- adamw_lr follows lr


@pytest.mark.parametrize("make", [MuonOptimizer, FSDPMuonOptimizer, SpectralSphereOptimizer])
def test_adamw_lr_is_a_ratio_of_lr(make):
    assert lr_of(make(Net())) == pytest.approx(RATIO * 0.02)
    assert lr_of(make(Net(), lr=0.1)) == pytest.approx(RATIO * 0.1)
    assert lr_of(make(Net(), lr=0.1, adamw_lr=None)) == pytest.approx(RATIO * 0.1)
    assert lr_of(make(Net(), lr=0.1, adamw_lr=7e-3)) == 7e-3
    assert lr_of(make(Net(), lr=0.0)) == 0.0
    assert make.__init__.__signature__.parameters["adamw_lr"].default is None


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        *[(name, RATIO * 0.04) for name in ("original", "v2", "spectral", "v3")],
        *[(name, 0.04) for name in ("match_rms_adamw", "v4")],
        *[(value, 3e-4) for value in ("size", "v1", 0.7)],
    ],
)
def test_the_ratio_goes_by_the_scale_of_the_matrices(scale, expected):
    assert lr_of(MuonOptimizer(Net(), lr=0.04, scale=scale)) == pytest.approx(expected)
    assert lr_of(MuonOptimizer([{"params": pair(), "lr": 0.04, "scale": scale}])) == pytest.approx(expected)


def test_rules_of_users():
    assert lr_of(MuonOptimizer(Net(), lr=0.04, rule="normuon")) == pytest.approx(RATIO * 0.04)
    assert lr_of(MuonOptimizer(Net(), lr=0.04, rule="toy_that_waits")) == pytest.approx(RATIO * 0.04)  # extends Muon
    assert lr_of(MuonOptimizer(Net(), lr=0.04, rule="toy_signs")) == 3e-4  # says nothing about AdamW beside it
    # An element-wise rule with a learning rate of its own keeps it.
    assert lr_of(MuonOptimizer(Net(), lr=0.04, other_rule="toy_momentum"), "toy_momentum") == 0.02
    assert lr_of(MuonOptimizer(Net(), rule="adamw")) == 3e-4
    assert lr_of(create_hybrid_optimizer(Net(), muon_lr=0.1)) == 1e-3


def test_the_nearest_learning_rate_counts():
    groups = [
        {"params": pair(), "lr": 0.1},
        {"params": pair(), "lr": 0.1, "adamw_lr": 5e-3},
        {"params": pair(), "scale": "match_rms_adamw"},
        {"params": pair(), "adamw_lr": None},
        {"params": pair()[1:]},
        {"params": pair()[1:], "lr": 0.07},
        {"params": pair(), "rule": "spectral_sphere", "lr": 0.04},
    ]
    followed = [group["lr"] for group in MuonOptimizer(groups, lr=0.03).param_groups if group["rule"] == "adamw"]
    assert followed == pytest.approx([0.015, 5e-3, 0.03, 0.0045, 0.0045, 0.07, 0.006])
    fixed = [group["lr"] for group in MuonOptimizer(groups, lr=0.03, adamw_lr=0.5).param_groups]
    assert fixed[1::2][:2] == [0.5, 5e-3]
    overrides = {"embed.*": {"adamw_lr": 0.2}, "up.*": {"lr": 0.5}, "norm.weight": {"lr": 0.3}}
    optimizer = MuonOptimizer(Net(), overrides=overrides)
    by_name = {row.name: optimizer.param_groups[row.group]["lr"] for row in optimizer.routing_report().rows}
    assert by_name == {
        "embed.weight": 0.2,
        "up.weight": 0.5,
        "up.bias": pytest.approx(0.003),  # an override's lr is that of its matrices
        "norm.weight": 0.3,
        "norm.bias": pytest.approx(0.003),
    }


@pytest.mark.filterwarnings("ignore:step.. found no gradient")
def test_it_is_resolved_once():
    model = Net()
    optimizer = MuonOptimizer(model, lr=0.04)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    assert lr_of(optimizer) == pytest.approx(0.003)  # the schedule's, not 0.15 times that of the matrices again
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    assert lr_of(optimizer) == pytest.approx(0.003)
    optimizer.add_param_group({"params": pair()})
    assert [group["lr"] for group in optimizer.param_groups[2:]] == pytest.approx([0.04, 0.006])
    resumed = MuonOptimizer(Net(), lr=0.04, adamw_lr=None)
    resumed.add_param_group({"params": pair()})
    resumed.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in resumed.param_groups] == [group["lr"] for group in optimizer.param_groups]
    assert "lr began as" not in str(resumed.routing_report())


def test_a_tensor_gives_a_tensor_of_its_own_without_a_host_read():
    lr = torch.tensor(0.04)
    optimizer = MuonOptimizer(Net(), lr=lr)
    matrices, others = (group["lr"] for group in optimizer.param_groups)
    assert matrices is lr
    assert isinstance(others, torch.Tensor)
    torch.testing.assert_close(others, torch.tensor(0.006))
    lr.fill_(1.0)  # a scheduler
    torch.testing.assert_close(others, torch.tensor(0.006))
    optimizer.add_param_group({"params": pair()})
    assert [float(group["lr"]) for group in optimizer.param_groups[2:]] == pytest.approx([0.04, 0.006])
    unreadable = MuonOptimizer(Net(), lr=torch.tensor(0.04, device="meta")).param_groups[1]["lr"]
    assert unreadable.is_meta
    overrides = {"up.*": {"view": "matrix"}}  # a pattern that sets nothing for the bias does not divide its group
    assert len(FSDPMuonOptimizer(Net(), lr=torch.tensor(0.04), overrides=overrides).param_groups) == 3


def test_the_report_says_where_it_comes_from():
    def text(**options: object) -> str:
        return " ".join(str(MuonOptimizer(Net(), **options).routing_report().groups[1]).split())

    assert text().endswith("eps=1e-08, cautious_weight_decay=False; lr began as 0.15 x lr=0.02")
    assert text(scale="v4", lr=3e-3).endswith("lr began as lr=0.003 of the matrices")
    assert text(scale="size").endswith("lr began as the default")
    assert text(adamw_lr=0.1).endswith("lr began as adamw_lr of MuonOptimizer")
    assert text(overrides={"*": {"adamw_lr": 0.1}}).endswith("lr began as adamw_lr of overrides['*']")
    with pytest.warns(UserWarning, match="nothing to update"):
        vectors = MuonOptimizer(pair()[1:], lr=0.01)
    assert vectors.routing_report().groups[0].lr_origin == "lr of MuonOptimizer"


# --------------------------------------------------------------------------------------------------- without a matrix


@pytest.mark.parametrize(
    "make",
    [
        lambda lr: MuonOptimizer([nn.Parameter(torch.ones(3))], lr=lr),
        lambda lr: MuonOptimizer([{"params": [nn.Parameter(torch.ones(3))]}, {"params": []}], lr=lr),
        lambda lr: MuonOptimizer(nn.Embedding(5, 4), lr=lr),
        lambda lr: FSDPMuonOptimizer(nn.LayerNorm(4), lr=lr),
        lambda lr: SpectralSphereOptimizer(nn.LayerNorm(4), lr=lr),
        lambda lr: MuonOptimizer(nn.LayerNorm(4), lr=lr, rule="normuon"),
    ],
)
def test_lr_is_adamws_own_if_no_parameter_is_a_matrix(make):
    with pytest.warns(UserWarning, match="has nothing to update: .* AdamW uses lr as it is") as caught:
        optimizer = make(0.01)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert lr_of(optimizer) == 0.01
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


# ------------------------------------------------------------------------------------------- learning rates of mistakes


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: MuonOptimizer(Net(), lr=1e-3), "lr=0.001 looks like .* about lr.*lr=0.02.*'match_rms_adamw'"),
        (lambda: FSDPMuonOptimizer(Net(), lr=1.9e-3, strict=True), "lr=0.0019 looks like"),
        (lambda: MuonOptimizer(Net(), lr=1e-3, scale="v3", rule="normuon"), "With scale='v3'"),
        (lambda: create_hybrid_optimizer(Net(), muon_lr=3e-4), "lr=0.0003 looks like"),
        (
            lambda: SpectralSphereOptimizer(Net(), lr=3e-4),
            r"lr=0.0003 looks like .* times the radius.* Pass lr=0.02\.$",
        ),
        (lambda: MuonOptimizer(Net(), lr=3e-4, rule="hyperball"), "lr=0.0003 looks like .* norm of its matrix"),
        (lambda: MuonOptimizer(Net(), lr=0.31, strict=True), "lr=0.31 is far above the usual 0.02"),
        (lambda: MuonOptimizer([{"params": pair(), "lr": 0.001 * i} for i in (1, 2, 0.5)], lr=0.02), "lr=0.001 looks"),
    ],
)
def test_an_unusual_learning_rate_is_warned_about_once(make, text):
    with pytest.warns(UserWarning, match=text) as caught:
        optimizer = make()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert any(text in str(caught[0].message) for text in optimizer.routing_report().warnings)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MuonOptimizer(Net(), lr=2e-3),
        lambda: MuonOptimizer(Net(), lr=0.3),
        lambda: MuonOptimizer(Net(), lr=0.0),
        lambda: MuonOptimizer(Net(), lr=torch.tensor(1e-4)),
        lambda: MuonOptimizer(Net(), lr=3e-4, scale="match_rms_adamw"),
        lambda: MuonOptimizer(Net(), lr=3e-4, scale="size"),
        lambda: MuonOptimizer(Net(), lr=3e-4, scale=20.0),
        lambda: SpectralSphereOptimizer(Net(), lr=2e-3),
        lambda: SpectralSphereOptimizer(Net(), lr=1.0),
        lambda: MuonOptimizer(Net(), lr=0.5, rule="hyperball"),
        lambda: MuonOptimizer(Net(), rule="adamw", adamw_lr=1e-4),
        lambda: MuonOptimizer([{"params": pair(), "lr": 1e-6, "initial_lr": 0.02}]),
    ],
)
def test_a_usual_learning_rate_is_not(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make()


# ----------------------------------------------------------------------------------------------------- names of scales


@pytest.mark.parametrize(
    ("name", "version"), [("size", "v1"), ("original", "v2"), ("spectral", "v3"), ("match_rms_adamw", "v4")]
)
def test_scales_have_names(name, version):
    def update(scale: str) -> torch.Tensor:
        torch.manual_seed(0)
        w = nn.Parameter(torch.zeros(6, 24))
        w.grad = torch.randn_like(w)
        MuonOptimizer([w], scale=scale).step()
        return w.detach()

    torch.testing.assert_close(update(name), update(version), rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------- what is worth


def line_of_the_readme() -> str:
    """Return what the README's first snippet builds."""
    found = re.search(r"```python\n.*?\noptimizer = ([^#\n]*)", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert found is not None
    return found[1].strip()


def test_the_line_of_the_readme_trains_better_than_tuned_adamw():
    """AdamW has the best of the learning rates that experiments.default_lr has searched."""
    (model,) = [model for model in default_lr.MODELS if model.name == "demo"]
    runs = [run for run in default_lr.read_runs(ROOT / default_lr.FILE) if run.model == model.name and run.seed == 0]
    searched = sorted((run.loss, run.line) for run in runs if run.line.startswith("torch.optim.AdamW("))
    assert len(searched) >= 4
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        adamw = default_lr.train(model, searched[0][1], seed=0)
        ours = default_lr.train(model, line_of_the_readme(), seed=0)
    finally:
        torch.set_num_threads(threads)
    assert ours < adamw - 0.1, f"{line_of_the_readme()}: {ours:.3f}, {searched[0][1]}: {adamw:.3f}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trainers_adapter_trains_better_than_tuned_adamw(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from muon_fsdp.integrations import trainer_optimizer
    from muon_fsdp.training.data import load_tokens

    rows = load_tokens()[: 512 * 128].view(512, 128).long()
    dataset = [{"input_ids": row, "labels": row} for row in rows]

    def final_loss(**options: object) -> float:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=128, n_embd=96, n_layer=3, n_head=4))
        arguments = TrainingArguments(
            str(tmp_path), max_steps=80, per_device_train_batch_size=8, warmup_steps=8, lr_scheduler_type="cosine",
            logging_steps=20, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=dataset, optimizer_cls_and_kwargs=options["optimizer"])
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]

    adamw = {lr: final_loss(optimizer=(torch.optim.AdamW, {"lr": lr})) for lr in ADAMW_LRS}
    ours = final_loss(optimizer=trainer_optimizer(MuonOptimizer, lr=0.02))
    print(f"\nTrainer, tiny GPT-2: AdamW {adamw}, MuonOptimizer(lr=0.02) {ours:.3f}")
    assert ours < min(adamw.values())


@pytest.mark.slow
def test_the_quick_start_trains_better_than_tuned_adamw(tmp_path):
    program = (ROOT / "examples" / "quickstart.py").read_text()

    def final_loss(source: str) -> float:
        file = tmp_path / "program.py"
        file.write_text(source)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return float(re.findall(r"loss (.*)$", done.stdout, flags=re.MULTILINE)[-1])

    def with_adamw(lr: float) -> str:
        line = f"optimizer = torch.optim.AdamW(model.parameters(), lr={lr})"
        changed = re.sub(r"^optimizer = FSDPMuonOptimizer.*$", line, program, flags=re.MULTILINE)
        return changed.replace("optimizer.routing_report()", "''")

    adamw = {lr: final_loss(with_adamw(lr)) for lr in ADAMW_LRS}
    ours = final_loss(program)
    print(f"\nquick start: AdamW {adamw}, FSDPMuonOptimizer {ours:.2f}")
    assert ours < min(adamw.values())
