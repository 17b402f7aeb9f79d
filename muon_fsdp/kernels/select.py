"""Which kernel computes a product, and why: PyTorch's library or one of ours, and with which tiles.

For Hopper the tiles come from a table that was measured once and is part of the package. On other GPUs a few
candidates, the library among them, are timed at the first product of a class of shapes, and the result is kept on disk.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from muon_fsdp.kernels.schedule import NO_TILE
from muon_fsdp.kernels.tiles import KernelError, TileConfig, num_processors

Operation = Literal["symmetric", "multiply_add"]

# "torch" switches our kernels off, "auto" uses them wherever they run.
KERNELS_VARIABLE = "MUON_FSDP_KERNELS"
CACHE_VARIABLE = "MUON_FSDP_CACHE"
_HALF = (torch.float16, torch.bfloat16)


# Versions of Triton whose Gluon, which is not a stable interface, compiles our kernel.
GLUON_VERSIONS = ("3.6", "3.7")
_gluon_failure: str | None = None


class Product(NamedTuple):
    """What is computed: a batch of (rows x inner) times (inner x cols).

    Args:
        operation: "symmetric", a product whose result is symmetric, or "multiply_add".
        num_matrices: size of the batch.
        rows: of the result.
        cols: of the result.
        inner: the side that is summed over.
        dtype: precision of the operands.
        bulk: rows of the operands are multiples of 16 bytes.
        wide_result: what is added, or the result, takes four bytes an element.
        transposed: operands are stored with `inner` as rows.
        uniform: all operands have this precision and begin at multiples of 16 bytes.
        masked: some matrices may be left out.
    """

    operation: Operation
    num_matrices: int
    rows: int
    cols: int
    inner: int
    dtype: torch.dtype
    bulk: bool = True
    wide_result: bool = False
    transposed: bool = False
    uniform: bool = True
    masked: bool = False

    @property
    def shape_class(self) -> str:
        """Products that share a choice of tiles."""
        sizes = "x".join(str(1 << max(4, (size - 1).bit_length())) for size in (self.rows, self.cols, self.inner))
        many = 1 << min(6, (self.num_matrices - 1).bit_length())
        kind = str(self.dtype).removeprefix("torch.")
        more = ("" if self.bulk else " unaligned") + (" wide" if self.wide_result else "")
        return f"{self.operation} {many}x{sizes} {kind}{more}"


@dataclass(frozen=True)
class Choice:
    """What computes a product.

    Args:
        path: "gluon", "triton", or "torch", PyTorch's library; None where candidates have to be timed first.
        config: the tiles of "triton".
        reason: why.
    """

    path: Literal["gluon", "triton", "torch"] | None
    config: TileConfig | None
    reason: str


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are launched on the current device; make that the one their tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def triton_available() -> bool:
    return find_spec("triton") is not None


def triton_version() -> str:
    """Without patches: 3.7."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


def unusable(device: torch.device) -> str | None:
    """Why Triton kernels can't run on a device; None if they can."""
    return _unusable(device, os.environ.get(KERNELS_VARIABLE, "auto"))


@lru_cache(maxsize=64)
def _unusable(device: torch.device, kernels: str) -> str | None:
    if kernels == "torch":
        return f"{KERNELS_VARIABLE}=torch"
    if device.type != "cuda":
        return f"no kernels for device type {device.type!r}"
    if not triton_available():
        return "Triton is not installed"
    if torch.version.hip is None and _capability(device) < (8, 0):
        return "compute capability below 8.0"
    return None


@lru_cache(maxsize=4096)
def _from_table(product: Product, processors: int, no_gluon: str | None) -> Choice:
    reason = "measured on an H200"
    if product.operation == "symmetric":
        obstacle = _not_for_gluon(product, processors) or no_gluon
        if obstacle is None:
            return Choice("gluon", None, reason)
        reason += f"; not by the Gluon kernel: {obstacle}"
    return Choice("triton", _hopper_tiles(product, processors), reason)


def select(product: Product, device: torch.device) -> Choice:
    """The kernel for a product on a device, and why; nothing is run.

    Args:
        product: what is to be computed.
        device: where.
    """
    reason = unusable(device)
    if reason is None and product.dtype not in (*_HALF, torch.float32):
        reason = f"no tensor cores for {product.dtype}"
    if reason is not None:
        return Choice("torch", None, reason)
    if _capability(device)[0] == 9 and torch.version.hip is None:
        return _from_table(product, num_processors(device), gluon_unusable())
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # Ranks that hold replicas must round alike, and would not if each chose for itself.
        return Choice("triton", _candidates(product)[0], "the same on all ranks")
    known = _tuned(_device_name(device)).get(product.shape_class)
    if known is None:
        return Choice(None, None, "not timed yet on this device")
    return _as_choice(known)


def gluon_unusable() -> str | None:
    """Why the Gluon kernel can't be compiled here; None if it can, as far as is known."""
    return _gluon_failure or _gluon_import_failure()


def give_up_gluon(error: KernelError) -> None:
    """From now on another kernel computes what the Gluon kernel would have."""
    global _gluon_failure
    _gluon_failure = f"it failed with {error}"


@lru_cache(maxsize=1)
def _gluon_import_failure() -> str | None:
    version = triton_version()
    if version not in GLUON_VERSIONS:
        return f"Triton is {version}, it is known to compile with {' and '.join(GLUON_VERSIONS)}"
    try:
        import_module("muon_fsdp.kernels.triton_hopper")
    except Exception as error:
        return f"import failed with {type(error).__name__}: {error}"
    return None


def _not_for_gluon(product: Product, processors: int) -> str | None:
    """Why the Gluon kernel does not compute a symmetric product; None if it does."""
    if product.dtype not in _HALF:
        return f"operands are {product.dtype}"
    if product.transposed:
        return "operands are transposed"
    if product.masked:
        return "matrices may be left out"
    if not product.uniform:
        return "operands differ in precision or begin at odd addresses"
    if not product.bulk or product.rows % 8:
        return "rows are not multiples of 16 bytes"
    # What the other kernel computes at once it computes as fast; and nothing is shared among tiles of several matrices.
    at_once = processors * (2 if product.rows < 1024 else 1)
    if product.rows <= 128 or _num_tiles(product, 128, 128) <= at_once:
        return "too few tiles"
    if product.rows >= NO_TILE * 128 or product.inner == 0:
        return "sizes that it is not made for"
    return None


def _hopper_tiles(product: Product, processors: int) -> TileConfig:
    rows, cols = product.rows, product.cols
    tiles = _num_tiles(product, 128, 128)
    if product.dtype == torch.float32:  # three products each: registers are the limit
        return TileConfig(64, 64, 32, 4, 3)
    if min(rows, cols) <= 64 or tiles < processors // 2:
        return TileConfig(64, 64, 64, 4, 4)
    if not product.bulk:
        return TileConfig(128, 128, 32, 4, 3)
    if product.operation == "multiply_add":
        if product.wide_result:  # shared memory is the limit
            return TileConfig(128, 128, 64, 8, 3)
        return TileConfig(128, 256, 64, 8, 3, persistent=True)
    if rows >= 1536 and product.inner > 2 * rows:
        return TileConfig(128, 128, 64, 4, 4, group=16)
    if rows < 1024:  # two programs share a multiprocessor: one writes while the other multiplies
        return TileConfig(128, 128, 32, 4, 4)
    return TileConfig(128, 128, 64, 8, 4, persistent=True)


def _num_tiles(product: Product, tile_rows: int, tile_cols: int) -> int:
    rows, cols = -(-product.rows // tile_rows), -(-product.cols // tile_cols)
    each = rows * (rows + 1) // 2 if product.operation == "symmetric" else rows * cols
    return each * product.num_matrices


# ---------------------------------------------------------------------------------------------------------- tuning


def _candidates(product: Product) -> list[TileConfig]:
    if product.dtype == torch.float32:
        return [TileConfig(64, 64, 32, 4, 2), TileConfig(64, 64, 32, 4, 3)]
    small = [TileConfig(64, 64, 64, 4, 3), TileConfig(64, 64, 32, 4, 4)]
    if min(product.rows, product.cols) <= 64:
        return small
    large = [TileConfig(128, 128, 32, 4, 3), TileConfig(128, 128, 64, 8, 3)]
    if product.operation == "multiply_add":
        large.append(TileConfig(128, 256, 32, 8, 3))
    return large + small


def tune(product: Product, device: torch.device, run: Callable[[TileConfig | None], object]) -> Choice:
    """Time `run` with every candidate (None: the library), and remember the fastest, here and on disk."""
    milliseconds: dict[TileConfig | None, float] = {None: _milliseconds(lambda: run(None))}
    for config in _candidates(product):
        with suppress(Exception):  # a candidate that needs more shared memory or registers than the device has
            milliseconds[config] = _milliseconds(lambda config=config: run(config))  # type: ignore[misc]
    fastest = min(milliseconds, key=lambda config: milliseconds[config])
    shown = ", ".join(f"{'library' if c is None else tuple(c)} {t:.3f} ms" for c, t in milliseconds.items())
    entry: dict[str, object] = {"config": None if fastest is None else list(fastest), "times": shown}
    _tuned(_device_name(device))[product.shape_class] = entry
    _write_cache(_device_name(device))
    return _as_choice(entry)


def _as_choice(entry: dict[str, object]) -> Choice:
    config, reason = entry["config"], f"timed on this device: {entry['times']}"
    if config is None:
        return Choice("torch", None, reason)
    assert isinstance(config, list)
    return Choice("triton", TileConfig(*config), reason)


def _milliseconds(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start) / 4)
    return statistics.median(times)


def cache_file(device_name: str) -> Path:
    root = (
        os.environ.get(CACHE_VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "muon_fsdp"
    )
    safe = "".join(c if c.isalnum() else "-" for c in device_name)
    return Path(root) / f"tiles-{safe}.json"


@lru_cache(maxsize=8)
def _tuned(device_name: str) -> dict[str, dict[str, object]]:
    return _read_cache(device_name)


def _read_cache(device_name: str) -> dict[str, dict[str, object]]:
    with suppress(OSError, ValueError, AttributeError, TypeError):
        content = json.loads(cache_file(device_name).read_text())
        return {key: entry for key, entry in content.items() if {"config", "times"} <= set(entry)}
    return {}


def _write_cache(device_name: str) -> None:
    """Replace the file as a whole: other processes may read or write it."""
    path = cache_file(device_name)
    with suppress(OSError):  # a home that can't be written to costs a second at the next start
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({**_read_cache(device_name), **_tuned(device_name)}, file, indent=1, sort_keys=True)
        os.replace(file.name, path)


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    import triton

    return f"{torch.cuda.get_device_name(device)} triton {triton.__version__}"
