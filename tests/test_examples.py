"""The examples run and do what they say."""

from __future__ import annotations

import array
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

import muon_fsdp
from examples import finetune, lora, mixed_adamw, tokenize_text, train_sso
from muon_fsdp.training import model, program
from muon_fsdp.training.data import open_corpus

UNWRITABLE = Path("/proc")  # for every user


def test_mixed_adamw(capsys):
    assert mixed_adamw.create_hybrid_optimizer is muon_fsdp.create_hybrid_optimizer
    assert mixed_adamw.main(steps=100) < 0.5
    text = capsys.readouterr().out
    assert "embedding.weight" in text
    assert "step  100" in text


def test_lora(capsys):
    assert lora.main(["--steps", "20", "--b-lr-ratio", "2"]) < 3.2
    text = capsys.readouterr().out
    assert "LoRA factor A" in text
    assert "LoRA factor B; override: lr=0.04" in text
    assert "frozen (requires_grad is False)" in text


def test_train_sso(capsys):
    assert train_sso.main(["--steps", "12", "--batch-size", "2"]) < 4.5
    text = capsys.readouterr().out
    assert "spectral_sphere" in text
    distances = [float(part.split()[0]) for part in text.split("|s/R - 1| at most ")[1:]]
    assert len(distances) == 2
    assert max(distances) < 0.05


def test_train_gpt_under_torchrun(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog.\n" * 400)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["examples/train_gpt.py", "--model", "demo", "--sequence-length", "16", "--steps", "3", "--fsdp"]
    command += ["--data", str(text), "--output", str(tmp_path / "out"), "--batch-size", "4", "--eval-windows", "4"]
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "FSDP2 on 2 rank(s)" in done.stdout
    assert done.stdout.count("validation loss") == 1  # rank 0 alone speaks
    assert (tmp_path / "out" / "checkpoints" / "step-00000003").is_dir()


def one_line_error(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], object], *arguments: object) -> str:
    """Run a program that ends with status 2; return the only line on its stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def losses_of(text: str) -> list[float]:
    """Return the validation losses before and after training."""
    return [float(number) for number in re.findall(r"validation loss \w+: ([\d.]+)", text)]


def test_finetune_from_scratch_and_from_a_folder(capsys, tmp_path):
    first = finetune.main(
        ["--steps", "12", "--batch-size", "8", "--max-length", "128", "--output", str(tmp_path / "a")]
    )
    before, after = losses_of(capsys.readouterr().out)
    assert after == pytest.approx(first, abs=1e-4)
    assert after < before - 0.5
    lines = [json.dumps({"q": f"What is {i}?", "a": "The number " + "i" * i}) for i in range(1, 13)]
    (tmp_path / "pairs.jsonl").write_text("\n\n".join(lines))
    common = ["--model", str(tmp_path / "a"), "--steps", "6", "--batch-size", "4", "--output", str(tmp_path / "b")]
    fields = ["--data", str(tmp_path / "pairs.jsonl"), "--question", "q", "--answer", "a"]
    for optimizer in (["--optimizer", "adamw", "--lr", "3e-3"], ["--scale", "v2", "--lr", "0.02"]):
        finetune.main([*common, *fields, *optimizer])
        text = capsys.readouterr().out
        assert "11 pairs, 1 held out" in text
        before, after = losses_of(text)
        assert after < before


def test_finetune_counts_the_answer_only():
    tokenizer = ByT5Tokenizer(extra_ids=0)
    examples = finetune.encode(tokenizer, [("Why?", "So."), ("Why not at all?", "No.")], max_length=64)
    batch = finetune.collate(examples, padding=0, device="cpu")
    for row, (answer, pair) in enumerate([(" So.", examples[0]), (" No.", examples[1])]):
        labels = batch["labels"][row]
        assert tokenizer.decode(labels[labels != -100][:-1]) == answer
        assert labels[labels != -100][-1] == tokenizer.eos_token_id
        assert int(batch["attention_mask"][row].sum()) == len(pair[0])
    assert int((batch["labels"][0, examples[0][1] + 5 :] != -100).sum()) == 0  # padding


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: not an object"),
        ('{"question": "a"}', "line 2: field 'answer' must be"),
        ('{"question": "a", "answer": " "}', "line 2: field 'answer' must be"),
        ('{"question": "a", "answer": "\xe9"}', "line 2: not UTF-8"),
        ("", "has 1 pair"),
    ],
)
def test_finetune_names_a_bad_line(line, message, tmp_path, capsys):
    (tmp_path / "pairs.jsonl").write_text('{"question": "a", "answer": "b"}\n' + line, encoding="latin-1")
    output = tmp_path / "out"
    assert message in one_line_error(capsys, finetune.main, "--data", tmp_path / "pairs.jsonl", "--output", output)
    assert not output.exists()


def test_finetune_reads_a_file_with_a_byte_order_mark(tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"q": "é", "a": "b"}\n{"q": "c", "a": "d"}\n', encoding="utf-8-sig")
    assert finetune.read_pairs(tmp_path / "pairs.jsonl", "q", "a") == [("é", "b"), ("c", "d")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lr", "-1"], "--lr must be positive and finite, got -1.0"),
        (["--lr", "nan"], "--lr must be positive and finite, got nan"),
        (["--adamw-lr", "inf"], "--adamw-lr must be positive and finite, got inf"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--max-length", "1"], "--max-length must be at least 2, got 1"),
        (["--max-length", "10"], "only 0 pair(s) are short enough and 2 are needed: raise --max-length 10"),
        (["--scale", "v9"], "argument --scale: invalid choice: 'v9'"),
        (["--data", "nowhere.jsonl"], "cannot read nowhere.jsonl: No such file or directory"),
        (["--data", "."], "cannot read .: Is a directory"),
        (["--output", "file"], "cannot write to file: File exists; pass another folder as --output"),
        (["--output", "file/out"], "cannot write to file/out: Not a directory"),
        (["--output", str(UNWRITABLE)], f"cannot write to {UNWRITABLE}: "),
        (["--model", "./nowhere"], "no such folder: ./nowhere; pass a folder"),
        (["--model", "someone/nowhere"], "AutoTokenizer cannot load someone/nowhere: "),
        (["--model", "file"], "file is a file; pass the folder"),
        (["--model", "tokenizer"], "tokenizer has no config.json"),
        (["--model", "config"], "config has no tokenizer; save it there too"),
        (["--model", "no_weights"], "AutoModelForCausalLM cannot load no_weights: "),
        (["--model", "no_end"], "no_end has no token that ends an answer"),
    ],
)
def test_finetune_tells_mistakes_in_a_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("text")
    config = json.dumps({"model_type": "llama", "vocab_size": 300, "hidden_size": 8, "num_attention_heads": 2})
    for folder in ("config", "no_weights", "no_end"):
        Path(folder).mkdir()
        Path(folder, "config.json").write_text(config)
    for folder in ("tokenizer", "no_weights"):
        ByT5Tokenizer(extra_ids=0).save_pretrained(folder)
    words = tokenize_text.Tokenizer(tokenize_text.models.WordLevel({"?": 0}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained("no_end")
    assert message in one_line_error(capsys, finetune.main, *arguments)


def test_finetune_checks_before_it_imports_what_is_slow(tmp_path):
    (tmp_path / "pairs.jsonl").write_text("{")
    program = """
import sys
from examples import finetune
try:
    finetune.main(sys.argv[1:])
except SystemExit as exit:
    print(exit.code, sorted({"torch", "transformers"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", program, "--data", str(tmp_path / "pairs.jsonl")]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.stdout == "2 []\n", done.stderr


def test_tokenize_text_makes_shards_that_the_program_reads(capsys, tmp_path):
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"text number {i}, which is about the number {i} and no other number.\n" * 3)
    (tmp_path / "copy.txt").write_text((tmp_path / "0.txt").read_text())
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "binary.txt").write_bytes(b"a\0b")
    shards = tmp_path / "shards"
    assert tokenize_text.main([str(tmp_path), str(shards), "--vocab-size", "300"]) == 0
    text = capsys.readouterr().out
    assert "60 text(s); 2 file(s) left out: not UTF-8 text" in text
    assert "a vocabulary of 300\n" in text
    tokenizer = tokenize_text.Tokenizer.from_file(str(shards / "tokenizer.json"))
    corpus = open_corpus(shards, 16)
    assert corpus.vocab_size == 300
    end = tokenizer.token_to_id(tokenize_text.END_OF_TEXT)
    tokens = corpus.validation.read(0, corpus.validation.numel()).tolist()
    assert tokenizer.decode(tokens[: tokens.index(end)]) == (tmp_path / "0.txt").read_text()
    assert tokens.count(end) == 2  # of 60 texts
    assert (
        tokenize_text.main([str(tmp_path), str(tmp_path / "again"), "--tokenizer", str(shards / "tokenizer.json")]) == 0
    )
    for name in ("train.bin", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (shards / name).read_bytes()


@pytest.mark.parametrize("num_lines", [8, 400])  # with less and with more held out than a window of --model small
def test_the_end_of_one_text_is_held_out_and_the_next_command_trains(num_lines, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_text, "PART", 100)
    text = "".join(f"line {i} of the only text, {'long ' * (i % 30)}\n" for i in range(num_lines))
    (tmp_path / "a.txt").write_text(text)
    shards = tmp_path / "the shards"
    tokenize_text.main([str(tmp_path / "a.txt"), str(shards), "--vocab-size", "300"])
    *_, command = capsys.readouterr().out.splitlines()
    tokenizer = tokenize_text.Tokenizer.from_file(str(shards / "tokenizer.json"))
    train, val = (array.array("H", (shards / f"{name}.bin").read_bytes()) for name in ("train", "val"))
    assert tokenizer.decode([*train, *val]) == text  # without the end of a text, which comes once
    assert val[-1] == tokenizer.token_to_id(tokenize_text.END_OF_TEXT)
    assert (train + val).count(val[-1]) == 1
    assert len(val) == len(train + val) // 10
    assert (len(val) <= 256) == (num_lines == 8)
    next_, *arguments = shlex.split(command.removeprefix("next: "))
    assert [next_, arguments[0]] == ["muon-fsdp", "train"]
    monkeypatch.setitem(model.PRESETS, "small", replace(model.PRESETS["small"], num_layers=1, num_heads=2, d_model=32))
    more = ["--device", "cpu", "--steps", "2", "--batch-size", "2", "--output", str(tmp_path / "out")]
    assert program.main([*arguments[1:], *more]) == 0


def test_a_tokenizer_that_marks_the_start_of_a_text_marks_each_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize_text, "PART", 4)
    tokenizer = tokenize_text.Tokenizer(tokenize_text.models.WordLevel({"<s>": 0, "a": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenize_text.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(1)  # neither is for training
    tokenizer.enable_padding(length=9)
    shards = tokenize_text.tokenize(tokenizer, [["a a\n", "a\n"], ["b\n"]], validation_every=2)
    assert [list(tokens) for tokens in shards] == [[2, 0], [1, 1, 1, 0]]


def test_tokenize_text_tells_mistakes_in_a_line(capsys, tmp_path):
    def told(message: str, *arguments: object) -> None:
        assert message in one_line_error(capsys, tokenize_text.main, *arguments)

    texts, shards = tmp_path / "texts", tmp_path / "shards"
    texts.mkdir()
    (texts / "binary.txt").write_bytes(b"a\0b")
    told("no such file or folder: ", tmp_path / "nowhere", shards)
    told("texts; 1 file(s) left out: not UTF-8 text; pass", texts, shards)
    told("binary.txt; 1 file(s) left out: not UTF-8 text; pass", texts / "binary.txt", shards)
    (texts / "a.txt").write_text("a text of some length\n" * 10)
    told("no text *.nothing in ", texts, shards, "--suffix", ".nothing")
    told("nofile.json: No such file or directory", texts, shards, "--tokenizer", tmp_path / "nofile.json")
    (tmp_path / "bad.json").write_text("{")
    told("bad.json: EOF while parsing", texts, shards, "--tokenizer", tmp_path / "bad.json")
    large = tokenize_text.Tokenizer(tokenize_text.models.WordLevel({"a": 0, "b": 65536}, unk_token="a"))
    large.save(str(tmp_path / "large.json"))
    told("large.json has 65537 tokens, which do not fit", texts, shards, "--tokenizer", tmp_path / "large.json")
    told("--vocab-size must be between 257 (all bytes and the end", texts, shards, "--vocab-size", 256)
    told("and 65536 (16 bits per token), got 70000", texts, shards, "--vocab-size", 70000)
    told("invalid int value: 'many'", texts, shards, "--vocab-size", "many")
    told("--training-texts must be at least 1, got 0", texts, shards, "--training-texts", 0)
    told("--validation-every must be at least 2, got 1", texts, shards, "--validation-every", 1)
    assert not shards.exists()
    told("a.txt: File exists; pass another folder", texts, texts / "a.txt")
    told("shards: Not a directory", texts, texts / "a.txt" / "shards")
    told("contains a.txt, which training would read as data", texts, texts)
    told(f"cannot write to {UNWRITABLE}: ", texts, UNWRITABLE)
    (shards / "val.bin").mkdir(parents=True)
    told("val.bin: Is a directory", texts, shards)
    (texts / "a.txt").write_text("short")
    told("has only 6 tokens, too few to hold some out; pass more text", texts, shards, "--vocab-size", 257)
