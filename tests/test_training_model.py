"""The GPT of the training programs: shapes, loss, attention, presets and configurations."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from muon_fsdp.training import model
from muon_fsdp.training.model import GPT, GPTConfig, RotaryEmbedding
from tests.training_cases import TINY, tiny_gpt


def test_logits_and_loss_have_the_documented_shapes() -> None:
    tokens = torch.randint(256, (3, 16))
    logits, loss = tiny_gpt()(tokens, tokens)
    assert logits.shape == (3, 16, 256)
    assert loss.shape == ()
    assert tiny_gpt()(tokens)[1] is None


def test_loss_is_the_mean_negative_log_probability_of_the_targets() -> None:
    tokens, targets = torch.randint(256, (2, 16)), torch.randint(256, (2, 16))
    logits, loss = tiny_gpt()(tokens, targets)
    probabilities = logits.exp() / logits.exp().sum(-1, keepdim=True)
    expected = -probabilities.gather(-1, targets[..., None]).log().mean()
    torch.testing.assert_close(loss, expected)


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    tokens = torch.randint(256, (2, 16))
    loss = GPT(TINY)(tokens, tokens)[1]
    assert loss.item() == pytest.approx(math.log(256), abs=1e-5)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_later_token_changes_no_earlier_logit(qk_norm: bool) -> None:
    gpt = tiny_gpt(GPTConfig(num_layers=2, num_heads=2, d_model=32, sequence_length=16, qk_norm=qk_norm))
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    before, after = gpt(tokens)[0], gpt(changed)[0]
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=1e-6)
    # Every later position must see it: attention reaches back, it does not only look at the token itself.
    assert ((before - after)[0, 10:].abs().amax(-1) > 1e-4).all()


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    rope = RotaryEmbedding(head_dim=8, sequence_length=32, base=10_000.0)
    q, k = torch.randn(8), torch.randn(8)
    rotated_q = rope(q.expand(1, 1, 32, 8))[0, 0]  # the same vector at every position
    rotated_k = rope(k.expand(1, 1, 32, 8))[0, 0]
    scores = rotated_q @ rotated_k.T  # (32, 32)
    for distance in (0, 1, 5, 17):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert scores[0, 0].item() == pytest.approx((q @ k).item(), abs=1e-5)
    assert abs(scores[5, 0] - scores[0, 0]) > 1e-2
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm().expand(32))


def test_qk_norm_makes_attention_blind_to_the_size_of_q() -> None:
    gpt = tiny_gpt()
    tokens = torch.randint(256, (1, 16))
    before = gpt(tokens)[0]
    with torch.no_grad():
        gpt.blocks[0].attention.q.weight.mul_(10)
    torch.testing.assert_close(gpt(tokens)[0], before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "millions"), [("demo", 1.3), ("small", 10.8), ("gpt2", 123.6), ("medium", 353.6)])
def test_presets_have_the_promised_sizes(name: str, millions: float) -> None:
    with torch.device("meta"):
        assert GPT(model.preset(name)).num_parameters() / 1e6 == pytest.approx(millions, abs=0.05)
    assert model.preset(name).num_heads % 2 == 0  # so that --tp 2 works


def test_a_scaled_embedding_is_not_drowned_by_the_first_blocks() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(256, (2, 64))
    config = replace(model.preset("gpt2"), vocab_size=256, num_layers=1)
    ratios = []
    for scale in (False, True):
        gpt = GPT(replace(config, scale_embedding=scale))
        streams: list[torch.Tensor] = []
        gpt.blocks[0].register_forward_hook(lambda _, inputs, output, kept=streams: kept.extend((inputs[0], output)))
        gpt(tokens)
        ratios.append(((streams[1] - streams[0]).std() / streams[0].std()).item())
        assert streams[0].std().item() == pytest.approx(0.02 * 768**0.5 if scale else 0.02, rel=0.02)
    assert ratios[0] > 10  # a block writes ten times what the token did
    assert ratios[1] < 2


def test_learned_positions_and_a_tied_head() -> None:
    config = replace(TINY, positions="learned", tie_embeddings=True)
    torch.manual_seed(0)
    gpt = GPT(config)
    assert gpt.lm_head.weight is gpt.wte.weight
    assert gpt.num_parameters() == GPT(TINY).num_parameters() - 256 * 32 + 16 * 32
    logits, loss = gpt(torch.full((1, 16), 7), torch.full((1, 16), 7))
    assert (logits[0, 1:] - logits[0, :-1]).abs().max() > 1e-4  # the same token at other places
    assert loss.item() == pytest.approx(math.log(256), abs=0.5)
    with pytest.raises(ValueError, match="positions must be 'rope' or 'learned', got 'none'"):
        replace(TINY, positions="none")


def test_demo_preset_has_the_promised_size_and_names() -> None:
    config = model.preset("demo")
    gpt = GPT(config)
    assert 1e6 < gpt.num_parameters() < 3e6
    assert config.d_model != config.vocab_size
    names = {name for name, _ in gpt.named_parameters()}
    assert {"wte.weight", "lm_head.weight"} < names
    assert not any(name.endswith("bias") for name in names)
    assert gpt.wte.weight is not gpt.lm_head.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a positive integer, got 0"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"d_model": 32.0}, "d_model must be a positive integer"),
        ({"num_heads": 3}, r"d_model \(32\) must be a multiple of num_heads \(3\)"),
        ({"num_heads": 32}, "must be even, got 1"),
        ({"rope_base": 0.0}, "rope_base must be positive"),
    ],
)
def test_config_refuses_what_cannot_work(change: dict[str, int | float], message: str) -> None:
    sizes = {"num_layers": 2, "num_heads": 2, "d_model": 32, "sequence_length": 16}
    with pytest.raises(ValueError, match=message):
        GPTConfig(**(sizes | change))


def test_unknown_preset_and_too_long_input_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="'huge'; choose one of: demo, gpt2, medium, small"):
        model.preset("huge")
    with pytest.raises(ValueError, match=r"17 tokens were given.*sequence_length=16"):
        GPT(TINY)(torch.zeros(1, 17, dtype=torch.long))
