"""Training text as tokens: where it comes from, how it is split, and in which order batches are drawn."""

from __future__ import annotations

import bisect
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

DEFAULT_BYTE_BUDGET = 8_000_000
VALIDATION_FRACTION = 0.1
BYTE_VOCABULARY = 256

SHARD_SUFFIX = ".bin"
TOKENIZER_FILE = "tokenizer.json"  # beside the shards: what made them
_SHARD_MAGIC = 20240520  # first of the 256 int32 that llm.c and its descendants put before the tokens
_SHARD_HEADER_BYTES = 1024

# Third-party code, tests and generated files vary between installations of the same Python; the rest does not.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"},
)


class DataError(ValueError):
    """The training text cannot be used; the message says why and what to do."""


class Tokens:
    """Tokens in one or several pieces, read as one text; pieces may be files that are mapped, not loaded."""

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self._pieces = list(pieces)  # each 1-D; int16 means unsigned 16 bits, which torch can't index everywhere
        self._ends = list(accumulate(piece.numel() for piece in self._pieces))

    def numel(self) -> int:
        return self._ends[-1]

    def windows(self, starts: Tensor, length: int) -> Tensor:
        """(len(starts), length), int64."""
        return torch.stack([self.read(start, length) for start in starts.tolist()])

    def read(self, start: int, length: int) -> Tensor:
        parts, index = [], bisect.bisect_right(self._ends, start)
        while length > 0:
            piece, first = self._pieces[index], start - (self._ends[index] - self._pieces[index].numel())
            part = piece[first : first + length]
            parts.append(part.long() & 0xFFFF if part.dtype == torch.int16 else part.long())
            start, length, index = start + part.numel(), length - part.numel(), index + 1
        return torch.cat(parts)

    def split(self, at: int) -> tuple[Tokens, Tokens]:
        """The first `at` tokens, and the others."""
        before: list[Tensor] = []
        after: list[Tensor] = []
        for piece, end in zip(self._pieces, self._ends, strict=True):
            cut = min(max(at - (end - piece.numel()), 0), piece.numel())
            before.append(piece[:cut])
            after.append(piece[cut:])
        return Tokens(before), Tokens(after)


@dataclass(frozen=True)
class Corpus:
    """What a run trains on and is evaluated with."""

    train: Tokens
    validation: Tokens
    vocab_size: int | None  # None for token shards without their tokenizer: they do not say
    source: str


def open_corpus(path: Path | None, sequence_length: int) -> Corpus:
    """Text as bytes from a file, a folder or (None) the standard library, or token shards `*.bin` of 16 bits a token.

    Shards may start with llm.c's header of 1024 bytes or have none. Those with "val" in their name are held out; where
    none has, the last tenth of all tokens is. A `tokenizer.json` beside them, as `tokenizers` saves it, tells the size
    of the vocabulary.
    """
    shards = _shards(path)
    vocab_size: int | None
    if not shards:
        tokens = Tokens([load_tokens(path, byte_budget=None)])
        held_out = int(tokens.numel() * VALIDATION_FRACTION)
        train, validation = tokens.split(tokens.numel() - held_out)
        vocab_size, source = BYTE_VOCABULARY, "Python's standard library" if path is None else str(path)
    else:
        named = [shard for shard in shards if "val" in shard.name.lower()]
        train = Tokens([_map_shard(shard) for shard in shards if shard not in named])
        if named:
            validation = Tokens([_map_shard(shard) for shard in named])
        else:
            train, validation = train.split(train.numel() - int(train.numel() * VALIDATION_FRACTION))
        vocab_size, source = _tokenizer_vocabulary(shards[0].parent / TOKENIZER_FILE), str(path)
    for part, name in ((train, "training"), (validation, "validation")):
        if part.numel() < sequence_length + 1:  # a window is sequence_length inputs and the token after them
            raise DataError(
                f"{source} gives {part.numel()} {name} tokens, but a window takes {sequence_length} + 1; "
                "give --data a longer text or lower --sequence-length"
            )
    return Corpus(train, validation, vocab_size, source)


def _shards(path: Path | None) -> list[Path]:
    if path is None or not path.exists():
        return []
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    shards = [file for file in files if file.suffix == SHARD_SUFFIX]
    texts = [file for file in files if file not in shards and file.suffix in (".txt", ".md", ".py")]
    if shards and texts:
        raise DataError(
            f"{path} holds token shards ({shards[0].name}) and text ({texts[0].name}); give --data one kind"
        )
    if shards and all("val" in shard.name.lower() for shard in shards):
        raise DataError(f"{path} holds validation shards alone; give --data a folder with training shards too")
    return shards


def _tokenizer_vocabulary(file: Path) -> int | None:
    """The largest token and one: numbers may be left out. None where there is no such file."""
    try:
        tokenizer = json.loads(file.read_bytes())
        vocabulary = tokenizer["model"]["vocab"]  # a list of (token, score) in Unigram models
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        return 1 + max(ids + [token["id"] for token in tokenizer["added_tokens"]])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{file} is not a tokenizer as `tokenizers` saves it: write it again, or move it and give --vocab-size"
        ) from error


def _map_shard(file: Path) -> Tensor:
    size = file.stat().st_size
    if size < 2 or size % 2:
        raise DataError(f"{file} has {size} bytes, which is no whole number of 16-bit tokens; write it again")
    tokens = torch.from_file(str(file), shared=False, size=size // 2, dtype=torch.int16)
    if size < _SHARD_HEADER_BYTES or tokens[:2].view(torch.int32).item() != _SHARD_MAGIC:
        return tokens
    count = int(tokens[4:6].view(torch.int32).item())
    tokens = tokens[_SHARD_HEADER_BYTES // 2 :]
    if count != tokens.numel():
        raise DataError(f"{file} announces {count} tokens and holds {tokens.numel()}; it is cut short, write it again")
    return tokens


def load_tokens(path: Path | None = None, byte_budget: int | None = DEFAULT_BYTE_BUDGET) -> Tensor:
    """The bytes (uint8, 1-D) of a file, of a folder of text files, or of Python's standard library for `None`.

    At most `byte_budget` of them; None takes all.
    """
    if byte_budget is not None and byte_budget < 1:
        raise ValueError(f"byte_budget must be positive, got {byte_budget}")
    if path is None:
        files: Iterable[Path] = standard_library_files()
    elif not path.exists():
        raise DataError(f"no such file or folder: {path}; give --data an existing text file or folder")
    elif path.is_dir():
        files = _folder_files(path)
    else:
        files = [path]
    text = _read(files, byte_budget)
    if not text:
        where = "the standard library" if path is None else str(path)
        raise DataError(f"{where} holds no text; give --data a text file or a folder of text files")
    return torch.frombuffer(text, dtype=torch.uint8)


def standard_library_files() -> list[Path]:
    """Python's own sources in a fixed order: text that is on every machine, so that no download is needed."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in _walk(root, _SKIPPED_FOLDERS) if file.suffix == ".py"]
    if not files:
        raise DataError(f"no Python sources under {root}; give --data a text file or a folder of text files")
    return files


def _folder_files(root: Path) -> list[Path]:
    return [file for file in _walk(root, frozenset()) if not file.name.startswith(".")]


def _walk(root: Path, skipped_folders: frozenset[str]) -> list[Path]:
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        # Pruned in place, so that os.walk does not descend: site-packages alone can take seconds.
        subfolders[:] = [name for name in subfolders if name not in skipped_folders and not name.startswith(".")]
        files += [file for name in names if (file := Path(folder, name)).is_file()]  # no sockets, no dangling links
    return sorted(files, key=lambda file: file.relative_to(root).parts)


def _read(files: Iterable[Path], byte_budget: int | None) -> bytearray:
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
    return text[:byte_budget]


def split_tokens(tokens: Tensor, sequence_length: int) -> tuple[Tensor, Tensor]:
    """Training and validation tokens: the last tenth of the text is held out, so no byte is in both."""
    num_validation = int(tokens.numel() * VALIDATION_FRACTION)
    train, validation = tokens[: tokens.numel() - num_validation], tokens[tokens.numel() - num_validation :]
    if num_validation < sequence_length + 1:  # a window is sequence_length inputs and the byte after them
        needed = int((sequence_length + 1) / VALIDATION_FRACTION) + 1
        raise DataError(
            f"the text has {tokens.numel()} bytes, but sequence_length={sequence_length} needs at least {needed}; "
            "give --data a longer text"
        )
    return train, validation


def _windows(tokens: Tensor | Tokens, starts: Tensor, sequence_length: int) -> tuple[Tensor, Tensor]:
    if isinstance(tokens, Tensor):
        tokens = Tokens([tokens])
    windows = tokens.windows(starts, sequence_length + 1)  # (B, T + 1)
    return windows[:, :-1], windows[:, 1:]


def training_batches(
    tokens: Tensor | Tokens,
    batch_size: int,
    sequence_length: int,
    generator: torch.Generator,
    first: int = 0,
    rows: slice = slice(None),
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), both (B, T), at random places; equal generator seeds give equal batches in order.

    `first` batches are left out, as a resumed run has seen them; of each batch only `rows` are read, as a rank takes
    its own.
    """
    num_starts = tokens.numel() - sequence_length
    if num_starts < 1:
        raise DataError(f"{tokens.numel()} tokens are too few for one window of {sequence_length} + 1")
    for _ in range(first):
        torch.randint(num_starts, (batch_size,), generator=generator)
    while True:
        starts = torch.randint(num_starts, (batch_size,), generator=generator)
        yield _windows(tokens, starts[rows], sequence_length)


def validation_batches(
    tokens: Tensor | Tokens, batch_size: int, sequence_length: int, num_windows: int
) -> list[tuple[Tensor, Tensor]]:
    """The same (inputs, targets) every time: up to `num_windows` windows, none overlapping, spread over the text."""
    num_available = (tokens.numel() - 1) // sequence_length
    if num_available < 1:
        raise DataError(f"{tokens.numel()} tokens are too few for one window of {sequence_length} + 1")
    num_windows = min(num_windows, num_available)
    # Integer steps between whole windows: two windows may touch, never overlap.
    starts = torch.arange(num_windows) * (num_available // num_windows) * sequence_length
    return [_windows(tokens, chunk, sequence_length) for chunk in torch.split(starts, batch_size)]
