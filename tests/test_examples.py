"""The examples run and do what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import muon_fsdp
from examples import finetune, mixed_adamw, tokenize_text, train_sso
from muon_fsdp.training.data import open_corpus


def test_mixed_adamw(capsys):
    assert mixed_adamw.create_hybrid_optimizer is muon_fsdp.create_hybrid_optimizer
    assert mixed_adamw.main(steps=100) < 0.5
    text = capsys.readouterr().out
    assert "embedding.weight" in text
    assert "step  100" in text


def test_train_sso(capsys):
    assert train_sso.main(["--steps", "12", "--batch-size", "4"]) < 4.5
    text = capsys.readouterr().out
    assert "spectral_sphere" in text
    distances = [float(part.split()[0]) for part in text.split("|s/R - 1| at most ")[1:]]
    assert len(distances) == 2
    assert max(distances) < 0.05


def test_train_gpt_under_torchrun(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog.\n" * 400)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["examples/train_gpt.py", "--model", "small", "--sequence-length", "16", "--steps", "3", "--fsdp"]
    command += ["--data", str(text), "--output", str(tmp_path / "out"), "--batch-size", "4", "--eval-windows", "4"]
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "FSDP2 on 2 rank(s)" in done.stdout
    assert done.stdout.count("validation loss") == 1  # rank 0 alone speaks
    assert (tmp_path / "out" / "checkpoints" / "step-00000003").is_dir()


def losses_of(text: str) -> list[float]:
    """The validation losses before and after."""
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
    tokenizer = finetune.ByT5Tokenizer(extra_ids=0)
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
        ("", "has 1 pair"),
    ],
)
def test_finetune_names_a_bad_line(line, message, tmp_path, capsys):
    (tmp_path / "pairs.jsonl").write_text('{"question": "a", "answer": "b"}\n' + line)
    with pytest.raises(SystemExit):
        finetune.main(["--data", str(tmp_path / "pairs.jsonl")])
    assert message in capsys.readouterr().err


def test_tokenize_text_makes_shards_that_the_program_reads(capsys, tmp_path):
    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"text number {i}, which is about the number {i} and no other number.\n" * 3)
    (tmp_path / "copy.txt").write_text((tmp_path / "0.txt").read_text())
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    shards = tmp_path / "shards"
    assert tokenize_text.main([str(tmp_path), str(shards), "--vocab-size", "300"]) == 0
    assert "60 of 60 texts" in capsys.readouterr().out
    tokenizer = tokenize_text.Tokenizer.from_file(str(shards / "tokenizer.json"))
    corpus = open_corpus(shards, 16)
    end = tokenizer.token_to_id(tokenize_text.END_OF_TEXT)
    text = corpus.validation.read(0, corpus.validation.numel()).tolist()
    assert tokenizer.decode(text[: text.index(end)]) == (tmp_path / "0.txt").read_text()
    assert text.count(end) == 2  # of 60 texts
    assert (
        tokenize_text.main([str(tmp_path), str(tmp_path / "again"), "--tokenizer", str(shards / "tokenizer.json")]) == 0
    )
    assert (tmp_path / "again" / "train.bin").read_bytes() == (shards / "train.bin").read_bytes()
    for arguments, message in (
        ([str(tmp_path), str(shards), "--suffix", ".nothing"], "has 0 texts"),
        ([str(tmp_path), str(shards), "--vocab-size", "70000"], "does not fit into 16 bits"),
    ):
        with pytest.raises(SystemExit):
            tokenize_text.main(arguments)
        assert message in capsys.readouterr().err
