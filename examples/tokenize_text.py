"""Turn a folder of texts into token shards for `muon-fsdp train --data SHARDS`: 16 bits a token, in files `*.bin`.

python examples/tokenize_text.py FOLDER SHARDS                             # trains a byte-level BPE on the texts first
python examples/tokenize_text.py FOLDER SHARDS --tokenizer tokenizer.json  # one that there is, as `tokenizers` saves it
python examples/tokenize_text.py FOLDER SHARDS --suffix .py

Needs the package `tokenizers`, which comes with Transformers.
"""

from __future__ import annotations

import argparse
import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
LARGEST_VOCABULARY = 1 << 16


def texts(folder: Path, suffix: str) -> Iterator[str]:
    """Every text once, in a fixed order; files that are no UTF-8 are left out."""
    seen: set[int] = set()
    for path in sorted(folder.rglob(f"*{suffix}")):
        if not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text and hash(text) not in seen:
            seen.add(hash(text))
            yield text


def train_tokenizer(samples: Iterator[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(samples, trainer)
    return tokenizer


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shards", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; without it one is trained and saved there")
    parser.add_argument("--vocab-size", type=int, default=50257, help="of a tokenizer that is trained (%(default)s)")
    parser.add_argument("--training-texts", type=int, default=4000, help="that a tokenizer is trained on (%(default)s)")
    parser.add_argument("--suffix", default=".txt", help="of the files to read (%(default)s)")
    parser.add_argument("--validation-every", type=int, default=50, help="texts for one that is held out (%(default)s)")
    args = parser.parse_args(argv)
    if min(args.vocab_size, args.training_texts, args.validation_every) < 1:
        parser.error("--vocab-size, --training-texts and --validation-every must be at least 1")
    if not args.vocab_size <= LARGEST_VOCABULARY:
        parser.error(f"--vocab-size {args.vocab_size} does not fit into 16 bits")
    documents = list(texts(args.folder, args.suffix))
    if len(documents) < args.validation_every:
        parser.error(f"{args.folder} has {len(documents)} texts *{args.suffix}, too few to hold one out")
    args.shards.mkdir(parents=True, exist_ok=True)
    if args.tokenizer is None:
        sample = documents[:: -(-len(documents) // args.training_texts)]
        print(
            f"training a tokenizer of {args.vocab_size} tokens on {len(sample)} of {len(documents)} texts", flush=True
        )
        tokenizer = train_tokenizer(iter(sample), args.vocab_size)
        tokenizer.save(str(args.shards / "tokenizer.json"))
    else:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
        if tokenizer.get_vocab_size() > LARGEST_VOCABULARY:
            parser.error(f"{args.tokenizer} has {tokenizer.get_vocab_size()} tokens, which do not fit into 16 bits")
    end = tokenizer.token_to_id(END_OF_TEXT)
    shards = {"train": array.array("H"), "val": array.array("H")}
    for start in range(0, len(documents), 1000):
        for i, encoding in enumerate(tokenizer.encode_batch(documents[start : start + 1000]), start):
            shard = shards["val" if i % args.validation_every == 0 else "train"]
            shard.extend(encoding.ids if end is None else [*encoding.ids, end])
        print(f"{min(start + 1000, len(documents))} of {len(documents)} texts", flush=True)
    for name, tokens in shards.items():
        with (args.shards / f"{name}.bin").open("wb") as stream:
            tokens.tofile(stream)
        print(f"wrote {args.shards / name}.bin: {len(tokens):,} tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
