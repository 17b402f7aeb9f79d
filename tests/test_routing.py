"""Routing: which rule every parameter of a model takes, strict mode, labels and overrides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer, create_hybrid_optimizer, label


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp = nn.Linear(width, 4 * width)


class Model(nn.Module):
    def __init__(self, vocab: int = 50, width: int = 8, head: str = "lm_head", tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(16, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.add_module(head, nn.Linear(width, vocab, bias=False))
        if tied:
            self.get_submodule(head).weight = self.wte.weight


def rules(optimizer: MuonOptimizer) -> dict[str, str]:
    return {row.name: row.rule for row in optimizer.routing_report().rows}


def reasons(optimizer: MuonOptimizer) -> dict[str, str]:
    return {row.name: row.reason for row in optimizer.routing_report().rows}


BODY = {
    f"blocks.{i}.{name}": rule
    for i in range(2)
    for name, rule in [
        ("norm.weight", "adamw"),
        ("norm.bias", "adamw"),
        ("output.weight", "muon"),
        ("mlp.weight", "muon"),
        ("mlp.bias", "adamw"),
    ]
}


@pytest.mark.parametrize("head", ["lm_head", "head", "output", "unembed", "to_logits"])
def test_a_named_head(head):
    optimizer = create_hybrid_optimizer(Model(head=head), strict=True)
    assert rules(optimizer) == {"wte.weight": "adamw", "wpe.weight": "adamw", f"{head}.weight": "adamw", **BODY}
    assert reasons(optimizer)[f"{head}.weight"] == "output head"
    assert reasons(optimizer)["wte.weight"] == "embedding"


def test_a_tied_head():
    optimizer = create_hybrid_optimizer(Model(tied=True), strict=True)
    assert rules(optimizer) == {"wte.weight": "adamw", "wpe.weight": "adamw", **BODY}
    assert "tied" in reasons(optimizer)["wte.weight"]


def test_the_only_linear_of_the_shape_is_a_guess():
    model = Model(head="proj")
    optimizer = create_hybrid_optimizer(model)
    assert rules(optimizer)["proj.weight"] == "adamw"
    assert "only Linear" in reasons(optimizer)["proj.weight"]
    with pytest.raises(ValueError, match=r"strict.*'proj.weight'.*overrides"):
        create_hybrid_optimizer(model, strict=True)
    for rule in ("adamw", "muon"):
        assert (
            rules(create_hybrid_optimizer(model, strict=True, overrides={"proj.weight": rule}))["proj.weight"] == rule
        )


def test_several_unnamed_candidates_are_no_head():
    model = Model(vocab=8, width=8, head="proj")  # every (8, 8) Linear has the embedding's shape
    optimizer = create_hybrid_optimizer(model)
    assert rules(optimizer)["proj.weight"] == "muon"
    assert rules(optimizer)["blocks.0.output.weight"] == "muon"  # called output, but inside a repeated block
    (warning,) = optimizer.routing_report().warnings
    assert "3 Linear layers" in warning
    assert "warning: 3 Linear" in str(optimizer.routing_report())
    named = create_hybrid_optimizer(Model(vocab=8, width=8))
    assert rules(named)["lm_head.weight"] == "adamw"
    assert rules(named)["blocks.0.output.weight"] == "muon"
    assert not named.routing_report().warnings


def test_a_position_embedding_does_not_make_a_head():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.wpe = nn.Embedding(32, 8)
            self.mlp = nn.Linear(8, 32)

    assert rules(create_hybrid_optimizer(Small()))["mlp.weight"] == "muon"


def test_bare_parameters_by_dimension_and_named_ones_also_by_name():
    model = Model()
    with pytest.warns(UserWarning, match="embedding or output head"):
        bare = MuonOptimizer(model.parameters())
    assert [row.rule for row in bare.routing_report().rows].count("muon") == 7
    named = MuonOptimizer(model.named_parameters(), strict=True)
    assert rules(named) == {"wte.weight": "adamw", "wpe.weight": "adamw", "lm_head.weight": "adamw", **BODY}
    assert reasons(named)["wte.weight"] == "embedding, by name"


@pytest.mark.parametrize(
    ("name", "shape", "rule"),
    [
        ("model.embed_tokens.weight", (50, 8), "adamw"),
        ("embeddings.word_embeddings.weight", (50, 8), "adamw"),
        ("tok_embeddings.weight", (50, 8), "adamw"),
        ("pos_embed", (1, 16, 8), "adamw"),
        ("cls_token", (1, 1, 8), "adamw"),
        ("vit.reg_token", (1, 4, 8), "adamw"),
        ("embeddings.register_tokens", (1, 4, 8), "adamw"),
        ("query_tokens", (1, 32, 8), "adamw"),
        ("resampler.latents", (32, 8), "adamw"),
        ("decoder.object_queries", (9, 8), "adamw"),
        ("prefix.soft_prompt", (9, 8), "adamw"),
        ("pos", (16, 8), "adamw"),
        ("blocks.0.attn.rel_pos_h", (15, 8), "adamw"),
        ("blocks.0.attn.relative_position_bias_table", (49, 4), "adamw"),
        ("scale_shift_table", (6, 8), "adamw"),
        ("prompts.0", (5, 8), "adamw"),
        ("posemb", (5, 8), "adamw"),
        ("blocks.0", (5, 8), "muon"),
        ("blocks.0.tokens.weight", (8, 8), "muon"),
        ("blocks.0.pos_proj_weight", (8, 8), "muon"),
        ("blocks.0.compose", (8, 8), "muon"),
        ("blocks.0.tokenizer", (8, 8), "muon"),
        ("blocks.0.query", (8, 8), "muon"),
        ("to_latent.weight", (8, 8), "muon"),
        ("stable", (8, 8), "muon"),
        ("output.weight", (50, 8), "adamw"),
        ("layers.3.attention.output.weight", (8, 8), "muon"),
        ("encoder.layer.0.output.dense.weight", (8, 32), "muon"),
        ("experts.gate_up_proj_bias", (4, 16), "adamw"),
        ("experts.gate_up_proj", (4, 8, 16), "muon"),
        ("layers.0.embedding_free.proj.weight", (8, 8), "muon"),
        ("member.weight", (8, 8), "muon"),
        ("backbone.layers.3.mixer.A_log", (12, 4), "adamw"),
        ("layers.0.ss2d.A_logs", (12, 4), "adamw"),
        ("blocks.0.att.time_decay", (4, 8), "adamw"),
        ("blocks.0.att.time_decay_w1", (8, 4), "muon"),
        ("layers.0.data_log", (8, 4), "muon"),
        ("layers.0.A_log.weight", (8, 4), "muon"),
    ],
)
def test_a_name_decides_the_rule(name, shape, rule):
    optimizer = MuonOptimizer([(name, nn.Parameter(torch.randn(shape))), ("other", nn.Parameter(torch.randn(3, 3)))])
    assert rules(optimizer)[name] == rule


class Mixer(nn.Module):
    """The parameters of a Mamba block."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(6, 24, bias=False)
        self.conv1d = nn.Conv1d(12, 12, 4, groups=12)
        self.A_log = nn.Parameter(torch.zeros(12, 4))
        self.D = nn.Parameter(torch.ones(12))


def test_the_decay_rates_of_a_state_space_layer():
    model = nn.ModuleDict({"mixer": Mixer()})
    split = {"*.in_proj.weight": {"split_sizes": (12, 12)}}
    for params in (model, model.named_parameters()):
        optimizer = MuonOptimizer(params, strict=True, overrides=split)
        assert rules(optimizer)["mixer.A_log"] == "adamw"
        assert reasons(optimizer)["mixer.A_log"] == "decay rates, by name"
    assert rules(MuonOptimizer(model, overrides={"*A_log": "muon"}))["mixer.A_log"] == "muon"
    assert rules(MuonOptimizer(model.parameters()))["param[2]"] == "muon"  # without a name there is no telling


def test_convolutions_say_so():
    """A depthwise one too, read as one (channels, taps) matrix."""
    model = nn.ModuleDict(
        {"conv": nn.Conv2d(3, 6, 2), "mixer": Mixer(), "experts": nn.ParameterList([torch.ones(2, 3, 4)])}
    )
    by_module, by_name = MuonOptimizer(model), MuonOptimizer(model.named_parameters())
    for optimizer, reason in ((by_module, "convolution"), (by_name, "convolution, by name")):
        rows = {row.name: (row.rule, row.reason, row.scale) for row in optimizer.routing_report().rows}
        assert rows["conv.weight"] == ("muon", reason, "1")  # (6, 12)
        assert rows["mixer.conv1d.weight"] == ("muon", reason, "1.732")  # (12, 4)
        assert rows["experts.0"][:2] == ("muon", "3D weight")
    label(model["mixer"].conv1d, "stacked")
    (row,) = [row for row in MuonOptimizer(model).routing_report().rows if row.name == "mixer.conv1d.weight"]
    assert (row.rule, row.reason) == ("adamw", "stack of vectors")  # twelve (1, 4)


def test_rules_of_other_modules():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm((4, 5))
            self.conv = nn.Conv1d(3, 6, 5)
            self.experts = nn.Parameter(torch.randn(3, 4, 5))
            self.pos_embed = nn.Parameter(torch.randn(1, 9, 4))
            self.bag = nn.EmbeddingBag(7, 3)
            self.gain = nn.Parameter(torch.ones(()))

    optimizer = MuonOptimizer(Odd())
    assert rules(optimizer) == {
        "norm.weight": "adamw", "norm.bias": "adamw", "conv.weight": "muon", "conv.bias": "adamw", "experts": "muon",
        "pos_embed": "adamw", "bag.weight": "adamw", "gain": "adamw",
    }  # fmt: skip
    scales = {row.name: row.scale for row in optimizer.routing_report().rows}
    assert scales["conv.weight"] == "1"  # (6, 15)
    assert reasons(optimizer)["gain"] == "scalar"


def test_classes_that_only_contain_the_word_norm():
    class LayerNormLinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4))

    class NormedLinear(nn.Linear):
        pass

    model = nn.ModuleDict({"fused": LayerNormLinear(), "normed": NormedLinear(4, 6), "norm": nn.LayerNorm((3, 4))})
    assert rules(MuonOptimizer(model)) == {
        "fused.weight": "muon", "normed.weight": "muon", "normed.bias": "adamw", "norm.weight": "adamw",
        "norm.bias": "adamw",
    }  # fmt: skip


def test_an_embedding_of_the_users_own():
    class TokenTable(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(20, 8))

    model = nn.ModuleDict({"tok_embeddings": TokenTable(), "body": nn.Linear(8, 8), "output": nn.Linear(8, 20)})
    found = rules(MuonOptimizer(model))
    assert (found["tok_embeddings.weight"], found["output.weight"], found["body.weight"]) == ("adamw", "adamw", "muon")


def test_a_head_of_another_shape_is_reported():
    model = nn.ModuleDict({"wte": nn.Embedding(50, 8), "body": nn.Linear(8, 8), "lm_head": nn.Linear(8, 64)})
    optimizer = create_hybrid_optimizer(model)
    assert rules(optimizer)["lm_head.weight"] == "muon"
    (warning,) = optimizer.routing_report().warnings
    assert "lm_head.weight is named like an output head" in warning


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.zeros(1, 17, 8))
        self.reg_token, self.latents = nn.Parameter(torch.zeros(1, 4, 8)), nn.Parameter(torch.zeros(32, 8))
        self.relative_position_bias_table = nn.Parameter(torch.zeros(49, 2))
        self.pos, self.latent = nn.Linear(8, 6), nn.Linear(8, 6)  # layers of these names are matrices


def test_learned_tokens_and_tables():
    for params in (Tokens(), Tokens().named_parameters()):
        optimizer = MuonOptimizer(params, strict=True)
        found = {name: (rule, reasons(optimizer)[name]) for name, rule in rules(optimizer).items()}
        assert found["reg_token"] == found["latents"] == ("adamw", "learned tokens, by name")
        assert found["relative_position_bias_table"] == ("adamw", "table, by name")
        assert [name for name, (rule, _) in found.items() if rule == "muon"] == ["pos.weight", "latent.weight"]


@pytest.mark.parametrize("head", ["fc", "score"])
def test_heads_of_common_names_only_as_the_last_linear(head):
    body = {"wte": nn.Embedding(50, 8), "body": nn.Linear(8, 8)}
    last = create_hybrid_optimizer(
        nn.ModuleDict({**body, "other": nn.Linear(8, 50), head: nn.Linear(8, 50)}), strict=True
    )
    assert reasons(last)[f"{head}.weight"] == "output head"
    assert rules(last)["other.weight"] == "muon"
    classifier = nn.ModuleDict({**body, head: nn.Linear(8, 3)})
    assert (
        f"{head}.weight is named like an output head"
        in create_hybrid_optimizer(classifier).routing_report().warnings[0]
    )
    with pytest.raises(ValueError, match=f"strict: {head}.weight is named like an output head"):
        create_hybrid_optimizer(classifier, strict=True)
    for model in (
        nn.ModuleDict({**body, head: nn.Linear(8, 3), "last": nn.Linear(3, 8)}),
        nn.ModuleDict({**body, "blocks": nn.ModuleList([nn.ModuleDict({head: nn.Linear(8, 3)})])}),
        nn.ModuleDict({head: nn.Linear(8, 3)}),  # nothing comes before it
    ):
        optimizer = create_hybrid_optimizer(model, strict=True)
        assert {row.rule for row in optimizer.routing_report().rows if row.name.endswith(f"{head}.weight")} == {"muon"}
        assert not optimizer.routing_report().warnings
    assert rules(MuonOptimizer(classifier.named_parameters()))[f"{head}.weight"] == "muon"  # names do not show the last


def test_a_linear_used_twice_is_one_candidate():
    shared = nn.Linear(8, 50)
    model = nn.ModuleDict(
        {"wte": nn.Embedding(50, 8), "body": nn.Linear(8, 8), "a": shared, "b": nn.Sequential(shared)}
    )
    optimizer = create_hybrid_optimizer(model)
    assert rules(optimizer)["a.weight"] == "adamw"
    assert not optimizer.routing_report().warnings


def test_learned_positions_by_other_names():
    model = nn.ModuleDict({"embed_positions": nn.Embedding(32, 8), "fc1": nn.Linear(8, 32), "fc2": nn.Linear(32, 8)})
    assert rules(create_hybrid_optimizer(model))["fc1.weight"] == "muon"


def test_an_untied_head_beside_a_tied_one():
    wte = nn.Embedding(50, 8)
    decoder = nn.Linear(8, 50, bias=False)
    decoder.weight = wte.weight
    model = nn.ModuleDict(
        {
            "wte": wte,
            "tied": decoder,
            "other": nn.Embedding(20, 8),
            "lm_head": nn.Linear(8, 20),
            "probe": nn.Linear(8, 20),
        }
    )
    found = rules(create_hybrid_optimizer(model))
    assert (found["lm_head.weight"], found["probe.weight"]) == ("adamw", "muon")


def test_lr_of_an_override_for_a_block_is_that_of_its_matrices():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = MuonOptimizer(model, overrides={"1.*": {"lr": 0.5}, "0.bias": {"lr": 0.01}}, adamw_lr=0.001)
    rates = {name: g["lr"] for g in optimizer.param_groups for name in g["param_names"]}
    assert rates == {"0.weight": 0.02, "1.weight": 0.5, "1.bias": 0.001, "0.bias": 0.01}
    everything = MuonOptimizer(model, overrides={"1.*": "muon"})
    assert rules(everything)["1.bias"] == "adamw"


def test_conv1d_behind_another_class():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 16))

    class Wrapped(Conv1D):
        pass

    assert MuonOptimizer(Wrapped()).routing_report().rows[0].scale == "2"


def test_prefixes_of_data_parallel_wrappers():
    model = Model()
    model.wpe.requires_grad_(False)
    wrapped = nn.DataParallel(model)
    optimizer = create_hybrid_optimizer(wrapped, overrides={"blocks.0.mlp.weight": "adamw"})
    assert rules(optimizer)["blocks.0.mlp.weight"] == "adamw"
    assert rules(optimizer)["wpe.weight"] == "none"
    plain = MuonOptimizer(model.named_parameters())
    MuonOptimizer(wrapped.named_parameters()).load_state_dict(plain.state_dict())


def test_wrappers_do_not_change_names():
    model = Model()
    plain = rules(create_hybrid_optimizer(model))
    compiled = torch.compile(model, backend="eager")
    assert rules(create_hybrid_optimizer(compiled)) == plain
    assert rules(MuonOptimizer(compiled.named_parameters())) == plain
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    assert rules(create_hybrid_optimizer(model)) == plain


def test_overrides_by_pattern():
    optimizer = create_hybrid_optimizer(
        Model(),
        overrides={
            "blocks.0.mlp.*": "adamw",
            "blocks.1.output.weight": {"num_heads": 2, "lr": 0.5},
            "blocks.*.mlp.weight": {"scale": "v1"},
            "wte.weight": {"rule": "muon", "lr": 0.1},
            "lm_head.weight": {"adamw_lr": 0.07},
        },
        strict=True,
    )
    assert rules(optimizer)["blocks.0.mlp.weight"] == "adamw"
    assert reasons(optimizer)["blocks.0.mlp.weight"] == "override 'blocks.0.mlp.*'"
    group = {row.name: g for g in optimizer.param_groups for p in g["params"] for row in [row_of(optimizer, p)]}
    assert group["blocks.1.output.weight"]["num_heads"] == 2
    assert group["blocks.1.output.weight"]["lr"] == 0.5
    assert group["blocks.1.mlp.weight"]["scale"] == "v1"
    assert group["wte.weight"]["lr"] == 0.1
    assert group["lm_head.weight"]["lr"] == 0.07
    assert group["wpe.weight"]["lr"] == 1e-3
    assert [g["rule"] for g in optimizer.param_groups] == ["muon"] * 4 + ["adamw"] * 2


def row_of(optimizer: MuonOptimizer, parameter: nn.Parameter):
    index = [id(p) for g in optimizer.param_groups for p in g["params"]].index(id(parameter))
    return optimizer.routing_report().rows[index]


def test_a_group_may_say_its_rule():
    model = Model()
    groups = [
        {"params": model.wte.named_parameters("wte"), "rule": "muon"},
        {"params": model.blocks.named_parameters("blocks"), "rule": "adamw"},
    ]
    optimizer = MuonOptimizer(groups)
    assert rules(optimizer)["wte.weight"] == "muon"
    assert set(rules(optimizer).values()) == {"muon", "adamw"}
    assert rules(optimizer)["blocks.0.mlp.weight"] == "adamw"


def test_strict_wants_something_in_muon():
    with pytest.raises(ValueError, match="strict: Muon has nothing to update"):
        MuonOptimizer([nn.Parameter(torch.randn(3))], strict=True)
    with pytest.raises(ValueError, match="Muon has nothing to update"):
        create_hybrid_optimizer(nn.Embedding(4, 3), strict=True)
    with pytest.raises(ValueError, match="strict: rule='adamw' updates no parameter as a matrix"):
        MuonOptimizer(Model(), rule="adamw", strict=True)


def test_an_override_that_matches_nothing():
    with pytest.warns(UserWarning, match=r"\['blocks.7.\*'\] match no parameter"):
        optimizer = create_hybrid_optimizer(Model(), overrides={"blocks.7.*": "adamw"})
    assert optimizer.routing_report().warnings
    with pytest.raises(ValueError, match="match no parameter"):
        create_hybrid_optimizer(Model(), overrides={"blocks.7.*": "adamw"}, strict=True)


def test_label_on_a_module():
    model = Model()
    label(model.blocks[0].mlp, "flatten")
    label(model.blocks[1].output, "attn")
    optimizer = create_hybrid_optimizer(model)
    scales = {row.name: row.scale for row in optimizer.routing_report().rows}
    assert scales["blocks.1.output.weight"] == "2"  # four (8, 2) matrices
    assert scales["blocks.0.output.weight"] == "1"
    with pytest.raises(ValueError, match="auto, matrix, stacked, flatten, attn"):
        label(model.blocks[0].mlp, "qkv")
    with pytest.raises(ValueError, match="no parameter 'kernel'"):
        label(model.blocks[0].mlp, "attn", "kernel")


def test_frozen_parameters_are_left_out_and_reported():
    model = Model()
    model.blocks[0].requires_grad_(False)
    optimizer = create_hybrid_optimizer(model)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == 8
    assert rules(optimizer)["blocks.0.mlp.weight"] == "none"
    assert "frozen" in reasons(optimizer)["blocks.0.mlp.weight"]


def test_the_report_is_a_table():
    text = str(create_hybrid_optimizer(Model()).routing_report())
    lines = text.splitlines()
    assert lines[0].split() == ["name", "shape", "matrices", "rule", "group", "scale", "reason"]
    assert any(
        line.split() == ["blocks.*.mlp.weight", "x", "2", "32x8", "32x8", "muon", "0", "2", "matrix"] for line in lines
    )
    assert any(line.split() == ["blocks.*.mlp.bias", "x", "2", "32", "adamw", "1", "vector"] for line in lines)
    assert max(map(len, lines)) <= 100


def test_hand_written_lora_factors_are_named_in_the_report():
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lora_A = nn.Linear(16, 4, bias=False)
            self.lora_B = nn.Parameter(torch.zeros(16, 4))

    model = nn.Sequential(Adapted())
    for optimizer in (MuonOptimizer(model), MuonOptimizer(model.named_parameters())):
        reasons = {row.name: (row.rule, row.reason) for row in optimizer.routing_report().rows}
        assert reasons == {"0.lora_A.weight": ("muon", "LoRA factor A"), "0.lora_B": ("muon", "LoRA factor B")}
