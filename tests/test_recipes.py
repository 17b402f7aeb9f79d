"""Published recipes: options that a model accepts, and schedules with the published values."""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import muon_fsdp
from muon_fsdp import MuonOptimizer
from muon_fsdp.rules.recipes import Phase, Recipe, RecipeScheduler, Schedule
from muon_fsdp.training.arguments import ConfigError
from muon_fsdp.training.config import TrainConfig
from muon_fsdp.training.program import main as train
from tests.training_cases import surroundings, text_fixture  # noqa: F401

# Of a run of 10,000 steps: step, and the learning rate of the matrices there.
LEARNING_RATES = {
    "moonlight": [(0, 4.2e-7), (999, 4.2e-4), (9122, 4.2e-5), (9222, 1e-4), (9999, 0.0)],
    "kimi_k2": [(499, 2e-4), (6451, 2e-4), (8225, 1.1e-4), (9999, 2e-5)],
    "glm_4_5": [(99, 2.5e-4), (9999, 2.5e-5)],
    "deepseek_v4": [(0, 2.7e-7), (999, 2.7e-4), (9999, 2.7e-5)],
    "deepseek_v4_1_flash": [(999, 2.6e-4), (6999, 2.6e-4), (9999, 2.6e-5)],
    "nanochat": [(39, 0.02), (3499, 0.02), (9999, 0.001)],
    "modded_nanogpt_track_3": [(0, 0.025), (2999, 0.025), (6499, 0.0125), (9999, 0.0)],
}


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=False,
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", muon_fsdp.recipes)
def test_a_recipe_trains_with_its_scheduler(name):
    recipe, model = muon_fsdp.recipes[name], tiny_model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = MuonOptimizer(model, **recipe.options)
    base = [group["lr"] for group in optimizer.param_groups]
    scheduler = recipe.scheduler(optimizer, total_steps=3)
    tokens = torch.randint(0, 24, (2, 8), generator=torch.Generator().manual_seed(0))
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    for step in range(3):
        factor = 1.0 if recipe.lr is None else recipe.lr.at(step, 3)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([lr * factor for lr in base])
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for key, p in model.named_parameters():
        assert torch.isfinite(p).all(), key
        assert not torch.equal(p, start[key]), key
    assert recipe.sources


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_learning_rates_of_a_run(name):
    recipe = muon_fsdp.recipes[name]
    for step, lr in LEARNING_RATES[name]:
        factor = 1.0 if recipe.lr is None else recipe.lr.at(step, 10_000)
        assert recipe.options["lr"] * factor == pytest.approx(lr, rel=1e-3, abs=1e-12), step


def test_every_recipe_has_learning_rates_here():
    assert list(muon_fsdp.recipes) == list(LEARNING_RATES)


def test_deepseek_scales_updates_by_018():
    options = muon_fsdp.recipes["deepseek_v4"].options
    w = nn.Parameter(torch.zeros(16, 64))
    given = {key: options[key] for key in ("scale", "ns_stepsize")}
    optimizer = MuonOptimizer([("w", w)], lr=1.0, orthogonalization="exact", **given)
    w.grad = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    torch.testing.assert_close(torch.linalg.matrix_norm(w, 2), torch.tensor(0.18 * 8))


def test_rules_and_options_of_groups():
    glm = MuonOptimizer(tiny_model(), **muon_fsdp.recipes["glm_4_5"].options)
    rules = {row.name: row.rule for row in glm.routing_report().rows}
    assert (rules["lm_head.weight"], rules["model.embed_tokens.weight"]) == ("muon", "adamw")
    v4 = MuonOptimizer(tiny_model(), **muon_fsdp.recipes["deepseek_v4"].options)
    adamw = next(group for group in v4.param_groups if group["rule"] == "adamw")
    assert (adamw["lr"], adamw["betas"], adamw["eps"], adamw["weight_decay"]) == (2.7e-4, (0.9, 0.95), 1e-20, 0.1)
    modded = MuonOptimizer(tiny_model(), **muon_fsdp.recipes["modded_nanogpt_track_3"].options)
    rows = {row.name: row for row in modded.routing_report().rows}
    found = {
        name: next(g["lr"] for g in modded.param_groups for n in g["param_names"] if n == name)
        for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    }
    assert list(found.values()) == [0.7, 0.004, 0.015]
    assert rows["lm_head.weight"].rule == "adamw"
    nesterov = {name: recipe.options["nesterov"] for name, recipe in muon_fsdp.recipes.items() if name != "glm_4_5"}
    assert nesterov == {name: name != "kimi_k2" for name in nesterov}  # GLM-4.5 does not say


def test_embeddings_that_are_matrices_keep_their_learning_rate():
    """ "*embed*" also matches the projection of patches, and the mapping of ALBERT's embedding."""
    for name, lr in (("nanochat", 0.3), ("modded_nanogpt_track_3", 0.7), ("deepseek_v4_1_flash", None)):
        recipe = muon_fsdp.recipes[name]
        model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(40, 8),
                "patch_embed": nn.Linear(8, 8, bias=False),
                "lm_head": nn.Linear(8, 40),
            }
        )
        optimizer = MuonOptimizer(model, **recipe.options)
        by_name = {n: group for group in optimizer.param_groups for n in group["param_names"]}
        patch, table = by_name["patch_embed.weight"], by_name["embed_tokens.weight"]
        assert (patch["rule"], patch["lr"]) == (recipe.options.get("rule", "muon"), recipe.options["lr"]), name
        assert table["rule"] == ("sinkhorn" if lr is None else "adamw")
        assert table["lr"] == (recipe.options["lr"] if lr is None else lr)


def scheduled(steps: int) -> tuple[MuonOptimizer, RecipeScheduler]:
    optimizer = MuonOptimizer(tiny_model(), **muon_fsdp.recipes["nanochat"].options)
    scheduler = muon_fsdp.recipes["nanochat"].scheduler(optimizer, 1000)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


def test_momentum_follows_the_schedule_of_nanochat():
    """The first phase is 100 steps here instead of 400: a tenth of the run."""
    at = muon_fsdp.recipes["nanochat"].momentum.at
    assert [at(step, 10_000) for step in (399, 3499, 9999)] == pytest.approx([0.97, 0.97, 0.90])
    optimizer, _ = scheduled(50)
    momenta = {group["rule"]: group.get("momentum") for group in optimizer.param_groups}
    assert momenta == {"normuon": pytest.approx(0.85 + 0.12 * 51 / 100), "adamw": None}


def test_a_scheduler_resumes():
    first, scheduler = scheduled(30)
    saved = pickle.loads(pickle.dumps(scheduler.state_dict()))
    second, resumed = scheduled(0)
    resumed.load_state_dict(saved)
    assert [group["lr"] for group in second.param_groups] == [group["lr"] for group in first.param_groups]
    assert second.param_groups[0]["momentum"] == first.param_groups[0]["momentum"]
    for each, its in ((first, scheduler), (second, resumed)):
        each.step()
        its.step()
    for one, other in zip(first.param_groups, second.param_groups, strict=True):
        assert (one["lr"], one.get("momentum")) == (other["lr"], other.get("momentum"))
    other = muon_fsdp.recipes["moonlight"].scheduler(MuonOptimizer(tiny_model()), 10)
    with pytest.raises(ValueError, match="follows the recipe 'moonlight', and the saved one 'nanochat'"):
        other.load_state_dict(saved)


def test_a_schedule_of_weight_decay_multiplies_that_of_every_group():
    recipe = Recipe("mine", {}, ("here",), weight_decay=Schedule(1.0, (Phase(1.0, 0.0),)))
    optimizer = MuonOptimizer(tiny_model(), weight_decay=0.2, adamw_weight_decay=0.1)
    recipe.scheduler(optimizer, 4)
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.15, 0.075])


@pytest.mark.parametrize("total_steps", [0, -1, 1.5, True])
def test_a_run_has_steps(total_steps):
    with pytest.raises(ValueError, match="total_steps must be an int of at least 1"):
        muon_fsdp.recipes["moonlight"].scheduler(MuonOptimizer(tiny_model()), total_steps)


def test_an_unknown_recipe_lists_the_names():
    with pytest.raises(KeyError, match=r"unknown recipe 'moonligt'; valid names are moonlight, .*did you mean"):
        muon_fsdp.recipes["moonligt"]


@pytest.mark.parametrize("name", muon_fsdp.recipes)
def test_the_page_has_every_value_with_its_source(name):
    page = (Path(__file__).parent.parent / "docs" / "guides" / "recipes.md").read_text()
    section = page.partition(f'`recipes["{name}"]`')[2].partition("\n#")[0]
    recipe = muon_fsdp.recipes[name]
    for text in (*recipe.sources, *recipe.left_out, *(f"`{key}={value!r}`" for key, value in recipe.options.items())):
        assert text in section, text


# ---- in the training program


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.usefixtures("surroundings")
def test_the_program_follows_a_recipe_also_when_it_resumes(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe, steps, seen = muon_fsdp.recipes["nanochat"], 40, []
    step = MuonOptimizer.step

    def noted(optimizer: MuonOptimizer, closure: None = None) -> None:
        if optimizer.param_groups[0]["lr"]:  # not the step in which torch.distributed.checkpoint creates state
            seen.append([(group["rule"], group["lr"], group.get("momentum")) for group in optimizer.param_groups])
        step(optimizer, closure)

    monkeypatch.setattr(MuonOptimizer, "step", noted)
    flags = ["--data", str(text), "--steps", str(steps), "--batch-size", "2", "--eval-windows", "2", "--device", "cpu"]
    flags += ["--recipe", "nanochat", "--output", str(tmp_path / "run"), "--save-every", "35", "--log-every", "5"]
    assert train(flags) == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000040")
    assert train([*flags, "--resume"]) == 0
    assert len(seen) == steps + 5
    for number, groups in enumerate([*seen[:steps], *seen[35:40]]):
        done = number if number < steps else number - 5
        factor = recipe.lr.at(done, steps)
        by_rule = {rule: momentum for rule, _, momentum in groups}
        assert by_rule["normuon"] == pytest.approx(recipe.momentum.at(done, steps))
        assert {round(lr / factor, 9) for _, lr, _ in groups} == {
            0.02,
            0.3,
            0.003,
            0.008,
        }  # matrices, wte, vectors, head
    assert seen[steps:] == seen[35:40]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "nanocat"}, "unknown --recipe nanocat; .* did you mean 'nanochat'"),
        ({"recipe": "moonlight", "lr": 0.1, "schedule": "trapezoid"}, "leave out --lr, --schedule"),
        ({"recipe": "moonlight", "optimizer": "normuon"}, "leave out --optimizer"),
        ({"recipe": "moonlight", "options": {"ns_steps": 3}}, "leave out --set ns_steps"),
    ],
)
def test_mistakes_about_recipes_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**options)
    assert TrainConfig(recipe="nanochat", optimizer="normuon").label == "nanochat"  # as a configuration is copied
