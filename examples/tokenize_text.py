"""Turn texts into token shards for `muon-fsdp train --data SHARDS`: files `*.bin` with 16 bits per token.

python examples/tokenize_text.py TEXTS SHARDS                              # trains a byte-level BPE on the texts first
python examples/tokenize_text.py TEXTS SHARDS --tokenizer tokenizer.json   # uses an existing tokenizer
python examples/tokenize_text.py TEXTS SHARDS --suffix .py

TEXTS is a folder or one file. Every 50th text is held out for validation; if there are fewer texts, the last tenth of
their tokens is. The package `tokenizers` is needed, which comes with Transformers.
"""

from __future__ import annotations

import argparse
import array
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from muon_fsdp.training.arguments import OneLineParser, fail

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # all bytes and the end-of-text token
LARGEST_VOCABULARY = 1 << 16
PART = 1 << 16  # characters; long texts are tokenized in parts of this size, which limits the memory needed
BATCH = 128
WINDOW = 256  # sequence length of --model small


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the command line; exit with an error for an argument that cannot be used."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="folder of text files, or one text file")
    parser.add_argument("shards", type=Path, help="folder for the token shards")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use (default: train a tokenizer)")
    parser.add_argument(
        "--vocab-size", type=int, default=50257, help="tokens of a trained tokenizer (default: %(default)s)"
    )
    parser.add_argument("--training-texts", type=int, default=4000, help="parts to train it on (default: %(default)s)")
    parser.add_argument(
        "--suffix", default=".txt", help="suffix of the files to read in a folder (default: %(default)s)"
    )
    parser.add_argument(
        "--validation-every", type=int, default=50, help="hold out every N-th text (default: %(default)s)", metavar="N"
    )
    args = parser.parse_args(argv)
    if not SMALLEST_VOCABULARY <= args.vocab_size <= LARGEST_VOCABULARY:
        fail(
            f"--vocab-size must be between {SMALLEST_VOCABULARY} (all bytes and the end of a text) and "
            f"{LARGEST_VOCABULARY} (16 bits per token), got {args.vocab_size}"
        )
    for name, least in (("training_texts", 1), ("validation_every", 2)):
        if getattr(args, name) < least:
            fail(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if not args.texts.exists():
        fail(f"no such file or folder: {args.texts}; pass a folder of text files or one text file")
    return args


def read_texts(path: Path, suffix: str) -> list[str]:
    """Return every text once, in a fixed order; leave out files that are not UTF-8."""
    texts: dict[str, None] = {}
    num_left_out = 0
    for file in sorted(path.rglob(f"*{suffix}")) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            text = "\0"
        if "\0" in text:  # a binary file may be valid UTF-8 by chance
            num_left_out += 1
        elif text:
            texts[text] = None
    left_out = f"; {num_left_out} file(s) left out: not UTF-8 text" if num_left_out else ""
    if not texts:
        kind = f"*{suffix} " if path.is_dir() else ""
        fail(f"no text {kind}in {path}{left_out}; pass other texts or another --suffix")
    print(f"{len(texts)} text(s){left_out}", flush=True)
    return list(texts)


def make_folder(path: Path) -> None:
    """Create a folder and check, before the work, that it can be written to and has no other training data."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        fail(f"cannot write to {path}: {error.strerror}; pass another folder for the shards")
    for file in sorted(path.iterdir()):
        if file.suffix in (".bin", ".txt", ".md", ".py") and file.name not in ("train.bin", "val.bin"):
            fail(f"{path} contains {file.name}, which training would read as data; pass an empty folder for the shards")


def train_tokenizer(samples: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(samples, trainer)
    return tokenizer


def parts_of(text: str) -> Iterator[str]:
    """Yield parts of a text with at most PART characters each, cut after a line if possible."""
    start = 0
    while start < len(text):
        end = start + PART
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def read_tokenizer(path: Path) -> Tokenizer:
    """Return a saved tokenizer; exit with an error if it cannot be used."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises no other type
        fail(f"cannot read {path}: {error}; pass a tokenizer.json as --tokenizer")
    if vocabulary_of(tokenizer) > LARGEST_VOCABULARY:
        fail(f"{path} has {vocabulary_of(tokenizer)} tokens, which do not fit into 16 bits; pass another --tokenizer")
    return tokenizer


def vocabulary_of(tokenizer: Tokenizer) -> int:
    """Return one more than the largest token, because numbers may be unused."""
    return 1 + max(tokenizer.get_vocab().values(), default=0)


def tokenize(tokenizer: Tokenizer, documents: Sequence[Sequence[str]], validation_every: int) -> list[array.array[int]]:
    """Tokenize the parts of all documents.

    Returns:
        The tokens to train on, and the tokens held out for validation.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    end = tokenizer.token_to_id(END_OF_TEXT)
    after_text = (
        tokenizer.encode("").ids if end is None else [end]
    )  # without an end token, what this tokenizer puts around a text
    train, held_out = array.array("H"), array.array("H")
    few = len(documents) < validation_every
    parts: list[tuple[str, array.array[int], list[int]]] = []  # text, where its tokens are added, and what follows them
    for i, document in enumerate(documents):
        tokens = train if few or i % validation_every else held_out
        parts += [(part, tokens, []) for part in document[:-1]] + [(document[-1], tokens, after_text)]
    for start in range(0, len(parts), BATCH):
        batch = parts[start : start + BATCH]
        encodings = tokenizer.encode_batch([part for part, _, _ in batch], add_special_tokens=False)
        for encoding, (_, tokens, after) in zip(encodings, batch, strict=True):
            tokens.extend(encoding.ids + after)
        if start // BATCH % 10 == 9:
            print(f"tokenized {(start + len(batch)) / len(parts):.0%}", flush=True)
    if few:
        cut = len(train) - len(train) // 10
        train, held_out = train[:cut], train[cut:]
    return [train, held_out]


def write(folder: Path, shards: Sequence[array.array[int]], tokenizer: Tokenizer) -> None:
    """Write the shards and the tokenizer into a folder."""
    try:
        for name, tokens in zip(("train.bin", "val.bin"), shards, strict=True):
            (folder / name).write_bytes(tokens.tobytes())
            print(f"wrote {folder / name}: {len(tokens):,} tokens")
        (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    except OSError as error:
        fail(f"cannot write to {error.filename or folder}: {error.strerror}; pass another folder for the shards")
    print(f"wrote {folder / 'tokenizer.json'}: a vocabulary of {vocabulary_of(tokenizer):,}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code."""
    args = parse(argv)
    tokenizer = read_tokenizer(args.tokenizer) if args.tokenizer else None
    documents = [list(parts_of(text)) for text in read_texts(args.texts, args.suffix)]
    make_folder(args.shards)
    if tokenizer is None:
        parts = [part for document in documents for part in document]
        sample = parts[:: -(-len(parts) // args.training_texts)]
        print(f"training a tokenizer of {args.vocab_size} tokens on {len(sample)} of {len(parts)} parts", flush=True)
        tokenizer = train_tokenizer(iter(sample), args.vocab_size)
    shards = tokenize(tokenizer, documents, args.validation_every)
    fewest = min(len(tokens) for tokens in shards)
    if fewest < 2:  # a sequence needs a token to read and one to predict
        fail(f"{args.texts} has only {sum(map(len, shards))} tokens, too few to hold some out; pass more text")
    write(args.shards, shards, tokenizer)
    window = f" --sequence-length {fewest - 1}" if fewest <= WINDOW else ""
    print(f"next: muon-fsdp train --model small --data {shlex.quote(str(args.shards))}{window}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
