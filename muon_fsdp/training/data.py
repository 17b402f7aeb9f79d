"""Training text as byte tokens: where it comes from, how it is split, and in which order batches are drawn."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

DEFAULT_BYTE_BUDGET = 8_000_000
VALIDATION_FRACTION = 0.1

# Third-party code, tests and generated files vary between installations of the same Python; the rest does not.
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"},
)


class DataError(ValueError):
    """The training text cannot be used; the message says why and what to do."""


def load_tokens(path: Path | None = None, byte_budget: int = DEFAULT_BYTE_BUDGET) -> Tensor:
    """The bytes (uint8, 1-D) of a file, of a folder of text files, or of Python's standard library for `None`."""
    if byte_budget < 1:
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


def _read(files: Iterable[Path], byte_budget: int) -> bytearray:
    text = bytearray()
    for file in files:
        if len(text) >= byte_budget:
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


def _windows(tokens: Tensor, starts: Tensor, sequence_length: int) -> tuple[Tensor, Tensor]:
    offsets = torch.arange(sequence_length + 1)
    windows = tokens[starts[:, None] + offsets].long()  # (B, T + 1)
    return windows[:, :-1], windows[:, 1:]


def training_batches(
    tokens: Tensor, batch_size: int, sequence_length: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), both (B, T), at random places; equal generator seeds give equal batches in order."""
    num_starts = tokens.numel() - sequence_length
    if num_starts < 1:
        raise DataError(f"{tokens.numel()} tokens are too few for one window of {sequence_length} + 1")
    while True:
        starts = torch.randint(num_starts, (batch_size,), generator=generator)
        yield _windows(tokens, starts, sequence_length)


def validation_batches(
    tokens: Tensor, batch_size: int, sequence_length: int, num_windows: int
) -> list[tuple[Tensor, Tensor]]:
    """The same (inputs, targets) every time: up to `num_windows` windows, none overlapping, spread over the text."""
    num_available = (tokens.numel() - 1) // sequence_length
    if num_available < 1:
        raise DataError(f"{tokens.numel()} tokens are too few for one window of {sequence_length} + 1")
    num_windows = min(num_windows, num_available)
    # Integer steps between whole windows: two windows may touch, never overlap.
    starts = torch.arange(num_windows) * (num_available // num_windows) * sequence_length
    return [_windows(tokens, chunk, sequence_length) for chunk in torch.split(starts, batch_size)]
