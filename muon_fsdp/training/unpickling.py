"""Read checkpoints of `torch.distributed.checkpoint` without running what they say: their `.metadata` is a pickle."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

_METADATA = ".metadata"
_OF_METADATA = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},  # Python 3.13
}  # fmt: skip


class ForeignObjectError(pickle.UnpicklingError):
    """A file of a checkpoint names a class or function that a checkpoint does not need."""


class Reader(FileSystemReader):
    """Reads `.metadata` by a list of classes; tensors are read with `weights_only=True` by torch itself."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, as the reader of torch does."""
        with (Path(self.path) / _METADATA).open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise ForeignObjectError(f"{_METADATA} holds a {type(metadata).__name__}, which is not a checkpoint's")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle names, before it can be called."""
        if name in _OF_METADATA.get(module, ()) or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise ForeignObjectError(f"{_METADATA} names {module}.{name}, which no checkpoint needs; it was not executed")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


class Planner(DefaultLoadPlanner):
    """Loads what is not a tensor, as numbers and names of param groups, with `weights_only=True` too."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one value; torch's own does so without limits, so it is told only after a look."""
        foreign = _foreign_in(value)
        if foreign:
            where = read_item.dest_index.fqn
            raise ForeignObjectError(f"{where!r} holds {foreign}, which no checkpoint needs; it was not executed")
        value.seek(0)
        super().load_bytes(read_item, value)


def _foreign_in(value: io.BytesIO) -> str:
    """Return what `weights_only=True` refuses in a saved value, "" if nothing."""
    try:
        torch.load(value, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        return named[1] if named else "what is not plain data"
    return ""
