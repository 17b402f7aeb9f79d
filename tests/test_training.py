"""The training programs: model, data, loop and the demo's command line."""

from __future__ import annotations

import array
import json
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise, repeat
from pathlib import Path

import pytest
import torch
from torch import Tensor

from muon_fsdp.training import data, demo, loop, model, program, report
from muon_fsdp.training.config import TrainConfig
from muon_fsdp.training.data import DataError, Tokens
from muon_fsdp.training.loop import Pace
from muon_fsdp.training.model import GPT, GPTConfig, RotaryEmbedding
from muon_fsdp.training.parallel import World
from muon_fsdp.training.results import Evaluation, OptimizerGroup, RunResult, describe_groups, read_result
from muon_fsdp.training.schedule import make_schedule

TINY = GPTConfig(num_layers=2, num_heads=2, d_model=32, sequence_length=16)


def tiny_gpt(config: GPTConfig = TINY) -> GPT:
    """A GPT with a head that is not zero, so that its logits say something."""
    torch.manual_seed(0)
    gpt = GPT(config)
    torch.nn.init.normal_(gpt.lm_head.weight)
    return gpt


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog.\n" * 200)
    return file


# --- model ---


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


# --- data ---


def test_standard_library_is_read_alike_every_time_and_without_tests() -> None:
    files = data.standard_library_files()
    root = Path(sysconfig.get_paths()["stdlib"])
    relative = [file.relative_to(root) for file in files]
    assert Path("argparse.py") in relative
    assert Path("json/decoder.py") in relative
    assert all(file.suffix == ".py" for file in relative)
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
    assert not [file for file in relative if skipped & set(file.parts[:-1])]
    assert relative == sorted(relative, key=lambda file: file.parts)
    tokens = data.load_tokens(byte_budget=100_000)
    assert tokens.dtype == torch.uint8
    assert tokens.shape == (100_000,)
    assert bytes(tokens[: files[0].stat().st_size].tolist()) == files[0].read_bytes()
    assert torch.equal(tokens, data.load_tokens(byte_budget=100_000))


def test_a_folder_is_read_in_sorted_order_without_binaries_and_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first ")
    (tmp_path / "c.bin").write_bytes(b"\0\1\2")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"hidden")
    assert bytes(data.load_tokens(tmp_path).tolist()) == b"first second"
    assert bytes(data.load_tokens(tmp_path, byte_budget=8).tolist()) == b"first se"


def test_split_keeps_every_byte_once_and_holds_out_the_end() -> None:
    tokens = (torch.arange(10_007) % 251).to(torch.uint8)
    train, validation = data.split_tokens(tokens, sequence_length=16)
    assert validation.numel() == 1000
    assert torch.equal(torch.cat((train, validation)), tokens)
    # No storage location is in both: a window cut from one can't reach into the other.
    assert train.data_ptr() + train.numel() <= validation.data_ptr()


def test_training_batches_are_shifted_windows_and_follow_the_seed() -> None:
    tokens = (torch.arange(5000) % 256).to(torch.uint8)

    def draw(seed: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return list(islice(data.training_batches(tokens, 4, 16, generator), 3))

    for inputs, targets in draw(0):
        assert inputs.shape == targets.shape == (4, 16)
        assert inputs.dtype == torch.int64
        assert torch.equal((inputs + 1) % 256, targets)  # the text counts upwards, so the next byte is one more
    torch.manual_seed(123)  # the global generator must not matter
    assert all(torch.equal(a[0], b[0]) for a, b in zip(draw(0), draw(0), strict=True))
    assert not torch.equal(draw(0)[0][0], draw(1)[0][0])


def test_training_windows_reach_the_first_and_the_last_byte() -> None:
    tokens = torch.arange(20).to(torch.uint8)
    batches = data.training_batches(tokens, 64, 16, torch.Generator().manual_seed(0))
    inputs, targets = next(batches)
    assert inputs.min() == 0
    assert targets.max() == 19


@pytest.mark.parametrize("num_tokens", [17, 100, 1000])
def test_validation_windows_do_not_overlap(num_tokens: int) -> None:
    tokens = torch.arange(num_tokens)
    batches = data.validation_batches(tokens, 4, 16, num_windows=10)
    targets = torch.cat([targets.flatten() for _, targets in batches])
    assert targets.unique().numel() == targets.numel() == 16 * min(10, (num_tokens - 1) // 16)
    assert all(torch.equal(inputs + 1, targets) for inputs, targets in batches)
    assert targets.max() > 0.8 * num_tokens  # they are spread, not taken from the start alone


def test_tokens_in_pieces_read_as_one_text() -> None:
    text = torch.arange(60_000, 60_100)  # beyond 15 bits
    pieces = [piece.to(torch.int32).to(torch.int16) for piece in text.split([7, 50, 1, 42])]
    tokens = Tokens(pieces)
    assert tokens.numel() == 100
    for start, length in [(0, 100), (5, 3), (6, 60), (57, 1), (99, 1), (50, 20)]:
        assert torch.equal(tokens.read(start, length), text[start : start + length])
    assert torch.equal(tokens.windows(torch.tensor([0, 40]), 30), torch.stack((text[:30], text[40:70])))
    for cut in (0, 3, 57, 100):
        before, after = tokens.split(cut)
        assert before.numel() == cut
        assert torch.equal(torch.cat((before.read(0, cut), after.read(0, 100 - cut))) if 0 < cut < 100 else text, text)


def write_shard(path: Path, tokens: range, header: bool = False, announced: int | None = None) -> None:
    numbers = array.array("i", [20240520, 1, len(tokens) if announced is None else announced] + [0] * 253)
    path.write_bytes((numbers.tobytes() if header else b"") + array.array("H", tokens).tobytes())


def test_token_shards_with_and_without_header(tmp_path: Path) -> None:
    write_shard(tmp_path / "train_1.bin", range(50_000, 50_900), header=True)
    write_shard(tmp_path / "train_0.bin", range(1000, 1600))
    corpus = data.open_corpus(tmp_path, 16)
    assert (corpus.train.numel(), corpus.validation.numel(), corpus.vocab_size) == (1350, 150, None)
    assert corpus.train.read(598, 4).tolist() == [1598, 1599, 50_000, 50_001]
    assert corpus.validation.read(149, 1).item() == 50_899
    write_shard(tmp_path / "val_0.bin", range(30_000, 30_100))
    corpus = data.open_corpus(tmp_path, 16)
    assert (corpus.train.numel(), corpus.validation.numel()) == (1500, 100)
    assert corpus.validation.read(0, 1).item() == 30_000


@pytest.mark.parametrize(
    ("vocabulary", "added", "expected"),
    [
        ({"a": 0, "b": 1}, [], 2),
        ({"a": 0, "b": 1}, [0, 2], 3),  # a special token may be one of the model's
        ({"a": 0, "b": 1899}, [5], 1900),
        ([["a", 0.0], ["b", -1.0]], [2], 3),  # Unigram
    ],
)
def test_a_tokenizer_beside_the_shards_tells_their_vocabulary(
    vocabulary: object, added: list[int], expected: int, tmp_path: Path
) -> None:
    write_shard(tmp_path / "train.bin", range(1000))
    tokenizer = {"added_tokens": [{"id": token} for token in added], "model": {"vocab": vocabulary}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert data.open_corpus(tmp_path, 16).vocab_size == expected
    assert data.open_corpus(tmp_path / "train.bin", 16).vocab_size == expected


@pytest.mark.parametrize(("in_data", "rows"), [(256, 256), (257, 320), (50_257, 50_304), (None, 50_304)])
def test_the_models_vocabulary_is_that_of_the_data(in_data: int | None, rows: int) -> None:
    assert TrainConfig(model="gpt2").model_config(in_data).vocab_size == rows
    assert TrainConfig(model="gpt2", vocab_size=60_001).model_config(in_data).vocab_size == 60_001


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model": {"vocab": []}, "added_tokens": []}', "\xff"])
def test_a_bad_tokenizer_beside_the_shards_is_named(text: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "train.bin", range(1000))
    (tmp_path / "tokenizer.json").write_text(text, encoding="latin-1")
    with pytest.raises(
        DataError, match=r"tokenizer\.json is not a tokenizer that the package `tokenizers` saved: save it again"
    ):
        data.open_corpus(tmp_path, 16)


def test_bad_shards_say_what_to_do(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", range(100), header=True, announced=1000)
    with pytest.raises(DataError, match=r"a\.bin has 100 tokens, but its header says 1000; write it again"):
        data.open_corpus(tmp_path, 8)
    (tmp_path / "a.bin").write_bytes(b"123")
    with pytest.raises(DataError, match="3 bytes, which is not a whole number of 16-bit tokens"):
        data.open_corpus(tmp_path, 8)
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(DataError, match=r"token shards \(a\.bin\) and text \(b\.txt\)"):
        data.open_corpus(tmp_path, 8)
    write_shard(tmp_path / "val.bin", range(100))
    with pytest.raises(DataError, match="only validation shards"):
        data.open_corpus(tmp_path / "val.bin", 8)
    write_shard(tmp_path / "c.bin", range(100))
    with pytest.raises(DataError, match=r"has only 10 validation tokens, but a sequence needs 16 \+ 1"):
        data.open_corpus(tmp_path / "c.bin", 16)


def test_a_resumed_run_and_a_rank_see_their_part_of_the_same_batches() -> None:
    tokens = (torch.arange(5000) % 256).to(torch.uint8)

    def draw(**options: object) -> Iterator[tuple[Tensor, Tensor]]:
        return data.training_batches(tokens, 4, 16, torch.Generator().manual_seed(0), **options)

    whole = list(islice(draw(), 5))
    assert torch.equal(next(draw(first=3))[0], whole[3][0])
    assert torch.equal(next(draw(first=2, rows=slice(2, 4)))[1], whole[2][1][2:4])


def test_data_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"no such file or folder: .*nowhere; pass an existing text file"):
        data.load_tokens(tmp_path / "nowhere")
    with pytest.raises(DataError, match="contains no text"):
        data.load_tokens(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty\.txt contains no text"):
        data.load_tokens(tmp_path / "empty.txt")
    with pytest.raises(DataError, match="has 100 bytes, but sequence_length=16 needs at least 171"):
        data.split_tokens(torch.zeros(100, dtype=torch.uint8), 16)
    data.split_tokens(torch.zeros(171, dtype=torch.uint8), 16)
    with pytest.raises(ValueError, match="byte_budget must be positive, got 0"):
        data.load_tokens(byte_budget=0)
    with pytest.raises(DataError, match="too few"):
        next(data.training_batches(torch.zeros(16), 1, 16, torch.Generator()))
    with pytest.raises(DataError, match="too few"):
        data.validation_batches(torch.zeros(16), 1, 16, 1)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="no Python sources under"):
        data.load_tokens()


def test_an_unreadable_file_is_named(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:  # file modes do not stop root, so they can't be used here
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"cannot read .*text\.txt: Permission denied; fix its permissions"):
        data.load_tokens(text_file)


# --- loop ---


def test_cosine_warms_up_peaks_once_and_ends_low() -> None:
    factor = make_schedule("cosine", 100, warmup=0.1, final=0.05)
    factors = [factor(step) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert max(factors) == pytest.approx(1.0)
    assert all(later <= earlier for earlier, later in pairwise(factors[10:]))
    assert factor(55) == pytest.approx(0.525)  # half way down
    assert factor(100) == pytest.approx(0.05)
    assert all(0 < make_schedule("cosine", 1)(step) <= 1 for step in range(3))


def test_trapezoid_is_flat_and_then_a_line() -> None:
    factor = make_schedule("trapezoid", 100, warmup=0.1, decay=0.4, final=0.05)
    assert [factor(step) for step in (4, 9, 10, 59, 60)] == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0])
    assert factor(80) == pytest.approx(0.525)
    assert factor(100) == pytest.approx(0.05)
    assert make_schedule("trapezoid", 10, warmup=0.9, decay=0.9)(8) == 1.0  # they do not overlap


def test_result_reports_the_first_evaluation_that_reaches_a_loss() -> None:
    result = RunResult("Muon", evaluations=[Evaluation(0, 5.0), Evaluation(10, 3.0), Evaluation(20, 3.5)])
    assert result.first_reaching(3.5) == Evaluation(10, 3.0)
    assert result.first_reaching(2.9) is None
    assert result.best_validation_loss == 3.0
    assert result.final_validation_loss == 3.5


def train_with_sgd(gpt: GPT, pace: Pace, factor: Callable[[int], float] = lambda step: 1.0) -> tuple[RunResult, list]:
    """The result, and the lr and step of every look."""
    optimizer = torch.optim.SGD(gpt.parameters(), lr=2.0)
    tokens = torch.randint(256, (4, 16))
    looks: list[tuple[float, int]] = []
    training = loop.Training(
        model=gpt,
        optimizer=optimizer,
        base_lrs=[2.0],
        schedule=factor,
        train_batches=repeat((tokens, tokens)),
        validation=[(tokens, tokens)],
        pace=pace,
        world=World(torch.device("cpu"), torch.float32),
        on_log=lambda result, factors: looks.append((optimizer.param_groups[0]["lr"], result.num_steps)),
        on_save=lambda step: None,
        stop_wanted=lambda: False,
    )
    return loop.train(training, RunResult("SGD")), looks


def test_training_clips_the_gradient() -> None:
    gpt = tiny_gpt()
    before = torch.nn.utils.parameters_to_vector(gpt.parameters()).detach()
    result, _ = train_with_sgd(gpt, Pace(steps=1, eval_every=1, clip_norm=1e-2))
    moved = torch.nn.utils.parameters_to_vector(gpt.parameters()).detach() - before
    assert moved.norm().item() == pytest.approx(2.0 * 1e-2, rel=1e-2)  # lr times the clipped norm
    assert result.gradient_norms[0] > 1e-2


def test_training_clears_the_gradient_after_each_step() -> None:
    gpt = tiny_gpt()
    train_with_sgd(gpt, Pace(steps=1, eval_every=1))
    assert all(parameter.grad is None for parameter in gpt.parameters())


def test_accumulation_gives_the_whole_batch() -> None:
    whole, parts = tiny_gpt(), tiny_gpt()
    results = []
    for gpt, count in ((whole, 1), (parts, 4)):
        torch.manual_seed(1)
        results.append(train_with_sgd(gpt, Pace(steps=3, eval_every=3, num_micro_batches=count))[0])
    assert results[1].train_losses == pytest.approx(results[0].train_losses, rel=1e-5)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_training_follows_the_schedule_looks_and_evaluates_at_the_intervals() -> None:
    factor = make_schedule("cosine", 5, warmup=0.4)
    result, looks = train_with_sgd(tiny_gpt(), Pace(steps=5, eval_every=2, log_every=3), factor)
    assert [step for _, step in looks] == [2, 3, 4, 5]
    assert [lr for lr, _ in looks] == pytest.approx([2.0 * factor(step) for step in (1, 2, 3, 4)])
    assert [evaluation.step for evaluation in result.evaluations] == [0, 2, 4, 5]
    assert len(result.step_seconds) == len(result.optimizer_seconds) == len(result.train_losses) == 5
    assert 0 < result.optimizer_share < 1
    assert result.milliseconds_per_step > 0


def test_training_stops_on_a_loss_that_is_not_finite() -> None:
    gpt = tiny_gpt()
    with torch.no_grad():
        gpt.wte.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="the loss of SGD is nan at step 1; lower the learning rate"):
        train_with_sgd(gpt, Pace(steps=3, eval_every=3, log_every=3))


def test_training_stops_before_a_gradient_that_is_not_finite_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "clip_gradient", lambda model, largest: torch.tensor(math.inf))
    with pytest.raises(FloatingPointError, match="the gradient norm of SGD is inf at step 1"):
        train_with_sgd(tiny_gpt(), Pace(steps=1, eval_every=5))


def test_training_stops_before_weights_that_are_not_finite_are_saved() -> None:
    with pytest.raises(FloatingPointError, match="the validation loss of SGD is nan at step 1"):
        train_with_sgd(tiny_gpt(), Pace(steps=1, eval_every=5), lambda step: math.inf)


def finished_run(name: str, losses: list[float]) -> RunResult:
    """A run with an evaluation every ten steps of 0.1 s, a quarter of it in the optimizer; one step was disturbed."""
    evaluations = [Evaluation(10 * i, loss) for i, loss in enumerate(losses)]
    num_steps = evaluations[-1].step
    return RunResult(
        name,
        train_losses=[loss - 0.5 for loss in losses for _ in range(10)][10:],
        evaluations=evaluations,
        step_seconds=[9.0] + [0.1] * (num_steps - 1),
        optimizer_seconds=[0.025] * num_steps,
    )


def test_report_compares_with_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    fast = finished_run("Fast", [5.0, 3.0, 2.0])
    slow = finished_run("Slow", [5.0, 4.0, 3.0])
    assert report.summarize(fast, baseline=slow) == pytest.approx(
        {
            "final_train_loss": 1.5,
            "final_validation_loss": 2.0,
            "best_validation_loss": 2.0,
            "steps_to_baseline": 10,
            "seconds_to_baseline": 1.0,
            "milliseconds_per_step": 100.0,
            "optimizer_share": 0.25,
        }
    )
    assert report.summarize(slow, baseline=fast)["steps_to_baseline"] is None

    report.print_table([fast, slow], baseline=slow)
    printed = capsys.readouterr().out
    assert "reached Slow's final validation loss of 3.000 after 10 of 20 steps, in 1.0 s" in printed
    report.print_table([fast, slow], baseline=fast)
    printed = capsys.readouterr().out
    assert "Slow did not reach Fast's final validation loss of 2.000" in printed
    assert "never" in printed


def test_groups_are_described() -> None:
    optimizer = torch.optim.SGD(tiny_gpt().parameters(), lr=2.0)
    num_tensors = len(list(tiny_gpt().parameters()))
    assert describe_groups(optimizer) == [OptimizerGroup("sgd", num_tensors, tiny_gpt().num_parameters(), 2.0, 0.0)]


# --- the demo's command line ---


@pytest.fixture
def tiny_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model, and both runs of Muon on one process: other processes would not see this."""
    monkeypatch.setitem(model.PRESETS, "demo", TINY)
    monkeypatch.setitem(demo.RUNS, demo.TOGETHER, demo.MUON)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("training was started")

    monkeypatch.setattr(demo, "train_main", fail)


def test_demo_trains_on_one_process_and_two_and_writes_what_it_says(
    text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "folder"
    assert demo.main(["--steps", "5", "--data", str(text_file), "--output", str(output)]) == 0
    printed = capfd.readouterr().out
    assert str(output / "loss.png") in printed
    assert str(output / "metrics.json") in printed
    assert "FSDP2 on 2 rank(s)" in printed
    assert "Muon   step    5/5" in printed
    assert "AdamW  step    5/5" in printed
    assert "muon on 24 tensors" in printed  # four blocks of six matrices; neither the embedding nor the head

    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")
    metrics = json.loads((output / "metrics.json").read_text())
    assert list(metrics["runs"]) == ["Muon", "Muon, 2 ranks", "AdamW"]
    for run in metrics["runs"].values():
        assert len(run["train_losses"]) == len(run["step_seconds"]) == 5
        assert sum(group["num_parameters"] for group in run["groups"]) == GPT(model.preset("demo")).num_parameters()
        assert run["evaluations"][0]["loss"] == pytest.approx(math.log(256), abs=1e-4)
        assert run["evaluations"][-1] == run["evaluations"][-1] | {"step": 5, "loss": run["final_validation_loss"]}
        assert run["final_validation_loss"] < 4  # log(256) is 5.5
        assert run["best_validation_loss"] <= run["final_validation_loss"]
        assert 0 < run["optimizer_share"] < 1
    assert metrics["runs"]["AdamW"]["steps_to_baseline"] is not None
    one, two = (metrics["runs"][name]["train_losses"] for name in ("Muon", "Muon, 2 ranks"))
    assert two == pytest.approx(one, abs=2e-3)
    assert metrics["settings"]["largest_distance"] == max(abs(a - b) for a, b in zip(one, two, strict=True))
    # Equal weights and equal batches: before the first update the two can't differ.
    adamw = metrics["runs"]["AdamW"]["train_losses"]
    assert one[0] == adamw[0]
    assert one[-1] != adamw[-1]


@pytest.mark.usefixtures("tiny_demo")
def test_demo_repeats_itself_for_one_seed_and_differs_for_another(text_file: Path, tmp_path: Path) -> None:
    def losses(seed: int, folder: str) -> list[float]:
        arguments = ["--steps", "3", "--seed", str(seed), "--data", str(text_file), "--output", str(tmp_path / folder)]
        assert demo.main(arguments) == 0
        metrics = json.loads((tmp_path / folder / "metrics.json").read_text())
        assert metrics["settings"]["largest_distance"] == 0.0
        losses: list[float] = metrics["runs"]["Muon"]["train_losses"]
        return losses

    first = losses(0, "first")
    assert losses(0, "first") == first  # in the folder of the first, which it replaces
    assert losses(1, "other")[1:] != first[1:]


@pytest.mark.usefixtures("tiny_demo")
def test_demo_shows_a_live_line_on_a_terminal(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert demo.main(["--steps", "3", "--data", str(text_file), "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "3/3" in printed
    assert "s left" not in printed  # no plain lines beside it


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
@pytest.mark.usefixtures("no_training")
def test_demo_without_an_optional_package_says_what_to_install(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # how Python marks a module that can't be imported
    assert demo.main(["--output", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert f"needs {package};" in captured.err
    assert 'pip install -e ".[cli]"' in captured.err
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_training")
def test_demo_refuses_bad_arguments_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--data", str(tmp_path / "nowhere"), "--output", str(tmp_path / "out")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("short")
    assert demo.main(["--data", str(tmp_path / "short.txt"), "--output", str(tmp_path / "out")]) == 2
    assert "pass a longer text as --data" in capsys.readouterr().err
    (tmp_path / "taken").touch()
    assert demo.main(["--output", str(tmp_path / "taken")]) == 2
    assert str(tmp_path / "taken") in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--steps", "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("code", [1, 130])
def test_demo_ends_where_a_run_ends(
    code: int, tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[object] = []

    def fail(flags: list[str]) -> int:
        runs.append(flags)
        return code

    monkeypatch.setattr(demo, "train_main", fail)
    assert demo.main(["--data", str(text_file), "--output", str(tmp_path / "out")]) == code
    assert len(runs) == 1


def test_the_share_of_the_optimizer_is_what_a_profiler_sees(text_file: Path, tmp_path: Path) -> None:
    flags = ["--model", "demo", "--data", str(text_file), "--steps", "6", "--batch-size", "4", "--device", "cpu"]
    flags += ["--sequence-length", "64", "--eval-windows", "4", "--output", str(tmp_path)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        assert program.main(flags) == 0
    (update,) = [event for event in profile.key_averages() if event.key == "Optimizer.step#FSDPMuonOptimizer.step"]
    result = read_result(tmp_path)
    assert update.count == 6
    assert sum(result.optimizer_seconds) == pytest.approx(update.cpu_time_total / 1e6, rel=0.1)
    assert 0 < sum(result.optimizer_seconds) < sum(result.step_seconds)
