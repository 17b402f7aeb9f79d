"""The data of the training programs: text and token shards, splits, windows and batches."""

from __future__ import annotations

import array
import json
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from muon_fsdp.training import data
from muon_fsdp.training.config import TrainConfig
from muon_fsdp.training.data import DataError, Tokens
from tests.training_cases import text_file_fixture  # noqa: F401


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


def test_split_keeps_every_byte_once_and_holds_out_the_end(tmp_path: Path) -> None:
    text = bytes(1 + number % 250 for number in range(10_007))
    (tmp_path / "text.txt").write_bytes(text)
    corpus = data.open_corpus(tmp_path / "text.txt", sequence_length=16)
    assert (corpus.train.numel(), corpus.validation.numel(), corpus.vocab_size) == (9007, 1000, 256)
    # A window cut from one part can't reach into the other.
    assert bytes([*corpus.train.read(0, 9007).tolist(), *corpus.validation.read(0, 1000).tolist()]) == text
    part = data.open_corpus(tmp_path / "text.txt", 16, byte_budget=1000)
    assert (part.train.numel(), part.validation.read(99, 1).item()) == (900, text[999])


def test_training_batches_are_shifted_windows_and_follow_the_seed() -> None:
    tokens = Tokens([(torch.arange(5000) % 256).to(torch.uint8)])

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
    tokens = Tokens([torch.arange(20).to(torch.uint8)])
    batches = data.training_batches(tokens, 64, 16, torch.Generator().manual_seed(0))
    inputs, targets = next(batches)
    assert inputs.min() == 0
    assert targets.max() == 19


@pytest.mark.parametrize("num_tokens", [17, 100, 1000])
def test_validation_windows_do_not_overlap(num_tokens: int) -> None:
    tokens = Tokens([torch.arange(num_tokens)])
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
    inputs, targets = tokens.windows(torch.tensor([0, 40]), 30)
    assert torch.equal(inputs, torch.stack((text[:30], text[40:70])))
    assert torch.equal(targets, torch.stack((text[1:31], text[41:71])))
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
    tokens = Tokens([(torch.arange(5000) % 256).to(torch.uint8)])

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
    short = tmp_path / "short.txt"
    short.write_bytes(b"x" * 169)
    with pytest.raises(
        DataError, match=r"short.txt has only 16 validation tokens, but a sequence needs 16 \+ 1; pass a"
    ):
        data.open_corpus(short, 16)
    short.write_bytes(b"x" * 170)
    corpus = data.open_corpus(short, 16)
    next(data.training_batches(corpus.train, 1, 16, torch.Generator()))
    assert len(data.validation_batches(corpus.validation, 1, 16, 1)) == 1
    with pytest.raises(DataError, match="contains no text"):
        data.load_tokens(byte_budget=0)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="no Python sources under"):
        data.load_tokens()


def test_an_unreadable_file_is_named(text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:  # file modes do not stop root, so they can't be used here
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"cannot read .*text\.txt: Permission denied; fix its permissions"):
        data.load_tokens(text_file)
