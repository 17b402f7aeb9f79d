"""Read checkpoints of `torch.distributed.checkpoint`, which contain pickles, without running code from them."""

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
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from muon_fsdp.kernels.tables import REMAINDER

_METADATA = ".metadata"
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}
_OF_METADATA = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
}  # fmt: skip


class ForeignObjectError(pickle.UnpicklingError):
    """A file of a checkpoint names a class or function that no checkpoint needs."""


class Reader(FileSystemReader):
    """A FileSystemReader that unpickles only a fixed list of classes; torch reads tensors with `weights_only=True`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata` like FileSystemReader does, but refuse foreign classes."""
        with (Path(self.path) / _METADATA).open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise ForeignObjectError(
                f"{_METADATA} contains a {type(metadata).__name__} instead of the metadata of a checkpoint"
            )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """An Unpickler that finds only the classes that the metadata of a checkpoint needs."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function that the pickle names; raise for a foreign one before it can be called."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _OF_METADATA.get(module, ()):
            return super().find_class(module, name)
        raise ForeignObjectError(f"{_METADATA} names {module}.{name}, which no checkpoint needs; it was not executed")


class Planner(DefaultLoadPlanner):
    """A DefaultLoadPlanner that loads values other than tensors with `weights_only=True` too.

    Remainders of weights that a checkpoint lacks, because it was saved with another `rounding`, stay zero.
    """

    def create_local_plan(self) -> LoadPlan:
        """Plan to load everything that is not a remainder, and the remainders that the checkpoint has."""
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        self.state_dict = {
            key: value for key, value in self.state_dict.items() if key in saved or not key.endswith(f".{REMAINDER}")
        }
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load one value after checking it, because DefaultLoadPlanner would run any code in it."""
        foreign = ""
        try:
            torch.load(value, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            foreign = named[1] if named else "something that is not plain data"
        if foreign:  # raised here, because the error above would hide it as its context
            where = read_item.dest_index.fqn
            raise ForeignObjectError(f"{where!r} contains {foreign}, which no checkpoint needs; it was not executed")
        value.seek(0)
        super().load_bytes(read_item, value)
