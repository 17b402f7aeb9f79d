"""Read text or token shards, hold out a part for validation, and draw batches."""

from __future__ import annotations

import bisect
import itertools
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VALIDATION_FRACTION = 0.1
TOKENIZER_FILE = "tokenizer.json"  # the tokenizer that made the shards lies beside them
_SHARD_MAGIC = 20240520  # the first of 256 int32 numbers that llm.c and its descendants write before the tokens
_SHARD_HEADER_BYTES = 1024

# These vary between installations of the same Python, so runs on two machines would not read the same text.
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"})

Batch = tuple[Tensor, Tensor]  # inputs and targets, each (B, T)


class DataError(ValueError):
    """The training data cannot be used; the message says why and what to do."""


class OneRankError(DataError):
    """An error in data that only this rank has read, so that only this rank can report it."""


class Tokens:
    """A text of tokens in one or several tensors, which may be files that are memory-mapped instead of loaded."""

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self._pieces = list(pieces)  # 1-D; int16 stands for uint16, which torch cannot index on every device
        self._ends = list(itertools.accumulate(piece.numel() for piece in self._pieces))

    def numel(self) -> int:
        """Return the number of tokens."""
        return self._ends[-1]

    def windows(self, starts: Tensor, length: int) -> Batch:
        """Return the sequences of `length` tokens at `starts` and their next tokens, both (B, T)."""
        windows = torch.stack([self.read(start, length + 1) for start in starts.tolist()])  # (B, T + 1)
        return windows[:, :-1], windows[:, 1:]

    def read(self, start: int, length: int) -> Tensor:
        """Return `length` tokens from position `start` on, as int64."""
        parts, index = [], bisect.bisect_right(self._ends, start)
        while length > 0:
            piece, first = self._pieces[index], start - (self._ends[index] - self._pieces[index].numel())
            part = piece[first : first + length]
            parts.append(part.long() & 0xFFFF if part.dtype == torch.int16 else part.long())
            start, length, index = start + part.numel(), length - part.numel(), index + 1
        return torch.cat(parts)

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        """Return the first `at` tokens, and the tokens after them."""
        before: list[Tensor] = []
        after: list[Tensor] = []
        for piece, end in zip(self._pieces, self._ends, strict=True):
            cut = min(max(at - (end - piece.numel()), 0), piece.numel())
            before.append(piece[:cut])
            after.append(piece[cut:])
        return Tokens(before), Tokens(after)


@dataclass(frozen=True)
class Corpus:
    """The tokens that a run trains on and those that it is validated on."""

    train: Tokens
    validation: Tokens
    vocab_size: int | None  # None for token shards without a tokenizer, which do not contain it
    source: str


def open_corpus(path: Path | None, sequence_length: int, byte_budget: int | None = None) -> Corpus:
    """Open a text file, a folder of text files, token shards (`*.bin`), or for None Python's standard library.

    Text is read as bytes. Shards have 16 bits per token and may start with llm.c's header of 1024 bytes. Shards with
    "val" in their name are held out for validation; if there are none, the last tenth of all tokens is. The size of the
    shards' vocabulary is read from a `tokenizer.json` beside them, as the package `tokenizers` saves it. Of a text, at
    most `byte_budget` bytes are read.

    Raises:
        DataError: the data cannot be read, or is too short for a sequence of `sequence_length`.
    """
    shards, held_out = _shards(path)
    vocab_size: int | None = 256  # of bytes
    if shards:
        train = Tokens([_map_shard(shard) for shard in shards])
        vocab_size = _tokenizer_vocabulary(shards[0].parent / TOKENIZER_FILE)
    else:
        train = Tokens([load_tokens(path, byte_budget)])
    if held_out:
        validation = Tokens([_map_shard(shard) for shard in held_out])
    else:
        train, validation = train.split(train.numel() - int(train.numel() * VALIDATION_FRACTION))
    source = "Python's standard library" if path is None else str(path)
    for part, name in ((train, "training"), (validation, "validation")):
        if part.numel() < sequence_length + 1:  # a window is sequence_length inputs and the token after them
            raise DataError(
                f"{source} has only {part.numel()} {name} tokens, but a sequence needs {sequence_length} + 1; "
                "pass a longer text as --data, or a smaller --sequence-length"
            )
    return Corpus(train, validation, vocab_size, source)


def _shards(path: Path | None) -> tuple[list[Path], list[Path]]:
    """Return the token shards for training and those for validation, both empty for a text."""
    if path is None or not path.exists():
        return [], []
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    shards = [file for file in files if file.suffix == ".bin"]
    texts = [file for file in files if file not in shards and file.suffix in (".txt", ".md", ".py")]
    if shards and texts:
        raise DataError(
            f"{path} contains token shards ({shards[0].name}) and text ({texts[0].name}); pass a folder with only one "
            "kind as --data"
        )
    held_out = [shard for shard in shards if "val" in shard.name.lower()]
    if shards and shards == held_out:
        raise DataError(f"{path} contains only validation shards; pass a folder with training shards too as --data")
    return [shard for shard in shards if shard not in held_out], held_out


def _tokenizer_vocabulary(file: Path) -> int | None:
    """Return one more than the largest token, because numbers may be unused; None if there is no such file."""
    try:
        tokenizer = json.loads(file.read_bytes())
        vocabulary = tokenizer["model"]["vocab"]  # a list of (token, score) in Unigram models
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        return 1 + max(ids + [token["id"] for token in tokenizer["added_tokens"]])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{file} is not a tokenizer that the package `tokenizers` saved: save it again, or move it away and pass "
            "--vocab-size"
        ) from error


def _map_shard(file: Path) -> Tensor:
    size = file.stat().st_size
    if size < 2 or size % 2:
        raise DataError(f"{file} has {size} bytes, which is not a whole number of 16-bit tokens; write it again")
    tokens = torch.from_file(str(file), shared=False, size=size // 2, dtype=torch.int16)
    if size < _SHARD_HEADER_BYTES or tokens[:2].view(torch.int32).item() != _SHARD_MAGIC:
        return tokens
    count = int(tokens[4:6].view(torch.int32).item())
    tokens = tokens[_SHARD_HEADER_BYTES // 2 :]
    if count != tokens.numel():
        raise DataError(f"{file} has {tokens.numel()} tokens, but its header says {count}; write it again")
    return tokens


def load_tokens(path: Path | None = None, byte_budget: int | None = None) -> Tensor:
    """Return at most `byte_budget` bytes of a text file, a folder of them, or for None Python's standard library."""
    if path is None:
        files = standard_library_files()
    elif not path.exists():
        raise DataError(f"no such file or folder: {path}; pass an existing text file or folder as --data")
    elif path.is_dir():
        files = [file for file in _walk(path, frozenset()) if not file.name.startswith(".")]
    else:
        files = [path]
    text = bytearray()
    for file in files:
        if byte_budget is not None and len(text) >= byte_budget:
            break
        try:
            content = file.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror or error}; fix its permissions or move it") from error
        if b"\0" not in content:  # a NUL byte marks a binary file, such as an image among the texts
            text += content
    text = text[:byte_budget]
    if not text:
        where = "the standard library" if path is None else str(path)
        raise DataError(f"{where} contains no text; pass a text file or a folder of text files as --data")
    return torch.frombuffer(text, dtype=torch.uint8)


def standard_library_files() -> list[Path]:
    """Return the source files of Python's standard library in a fixed order: text that needs no download."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in _walk(root, _SKIPPED_FOLDERS) if file.suffix == ".py"]
    if not files:
        raise DataError(f"no Python sources under {root}; pass a text file or a folder of text files as --data")
    return files


def _walk(root: Path, skipped_folders: frozenset[str]) -> list[Path]:
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # Changed in place, so that os.walk does not descend: site-packages alone can take seconds.
        subfolders[:] = [name for name in subfolders if name not in skipped_folders and not name.startswith(".")]
        files += [file for name in names if (file := Path(folder, name)).is_file()]  # skips sockets and broken links
    return sorted(files, key=lambda file: file.relative_to(root).parts)


def training_batches(
    tokens: Tokens,
    batch_size: int,
    sequence_length: int,
    generator: torch.Generator,
    first: int = 0,
    rows: slice = slice(None),
) -> Iterator[Batch]:
    """Yield batches from random places of the text without end.

    Equal generator seeds give equal batches. The first `first` batches are skipped, because a resumed run has seen
    them. Only `rows` of each batch are read, because every rank needs only its own.
    """
    for index in itertools.count():
        starts = torch.randint(tokens.numel() - sequence_length, (batch_size,), generator=generator)
        if index >= first:
            yield tokens.windows(starts[rows], sequence_length)


def validation_batches(tokens: Tokens, batch_size: int, sequence_length: int, num_windows: int) -> list[Batch]:
    """Return batches, the same every time, of at most `num_windows` windows, spread over the text without overlap."""
    num_available = (tokens.numel() - 1) // sequence_length
    num_windows = min(num_windows, num_available)
    # Integer steps between whole windows: two windows may touch, never overlap.
    starts = torch.arange(num_windows) * (num_available // num_windows) * sequence_length
    return [tokens.windows(chunk, sequence_length) for chunk in torch.split(starts, batch_size)]


def check_tokens(batch: Batch, vocab_size: int, raises: type[DataError] = DataError) -> None:
    """Raise an error if a token is not in the model's vocabulary: on a GPU, its lookup would abort the process."""
    largest = max(int(part.max()) for part in batch)
    if largest >= vocab_size:
        raise raises(
            f"the data contains token {largest}, but the model's vocabulary has only {vocab_size} tokens: pass a "
            "larger --vocab-size, or data that was tokenized for this model"
        )
