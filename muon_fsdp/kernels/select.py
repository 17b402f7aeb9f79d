"""Select the kernel that computes a product, PyTorch's library or one of ours, with its tiles, and report why.

For Hopper GPUs the tiles come from a table that was measured once and is part of the package. On other GPUs the first
product of a class of shapes times a few candidates, including PyTorch's library, and the result is kept on disk. Under
torch.distributed nothing is timed: the architecture decides.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from muon_fsdp.kernels.launch import Addend, TileConfig, num_processors
from muon_fsdp.kernels.schedule import NO_TILE
from muon_fsdp.kernels.tables import ALIGNMENT
from muon_fsdp.timing import seconds

Operation = Literal["symmetric", "multiply_add"]

# The environment variable: "torch" switches our kernels off, "auto" uses them wherever they can run.
KERNELS_VARIABLE = "MUON_FSDP_KERNELS"
CACHE_VARIABLE = "MUON_FSDP_CACHE"
_HALF = (torch.float16, torch.bfloat16)


# The largest relative error with which `probe_gluon` accepts products of the Gluon kernel; rounding gives about 1e-3.
PROBE_TOLERANCE = 1e-2
# Compute capabilities of GPUs whose large symmetric products our kernel computes where nothing may be timed, because it
# needs half the operations (not measured). All other products, and GPUs that are not listed, then use the library.
KERNEL_WITHOUT_TIMING = ((8, 0), (8, 6), (8, 9))
_is_gluon_probed = False
_gluon_failure: str | None = None


class Product(NamedTuple):
    """A batch of matrix products, (rows x inner) times (inner x cols), for which a kernel is selected.

    Args:
        operation: "symmetric", a product whose result is symmetric, or "multiply_add".
        num_matrices: size of the batch.
        rows: rows of the result.
        cols: columns of the result.
        inner: the dimension that is summed over.
        dtype: dtype of the operands.
        bulk: whether the rows of the operands are multiples of 16 bytes.
        wide_result: whether an addend or the result has four or more bytes per element.
        transposed: whether the operands are stored with `inner` as rows.
        uniform: whether all operands and addends have the same dtype and begin at multiples of 16 bytes.
        masked: whether a mask can exclude matrices of the batch.
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
        """Return the name of the class of products that share a choice of tiles; sizes are rounded to powers of 2."""
        sizes = "x".join(str(1 << max(4, (size - 1).bit_length())) for size in (self.rows, self.cols, self.inner))
        many = 1 << min(6, (self.num_matrices - 1).bit_length())
        kind = str(self.dtype).removeprefix("torch.")
        more = ("" if self.bulk else " unaligned") + (" wide" if self.wide_result else "")
        return f"{self.operation} {many}x{sizes} {kind}{more}"


@dataclass(frozen=True)
class Choice:
    """The kernel that `select` chose for a product.

    Args:
        path: "gluon", "triton", or "torch" for PyTorch's library; None if the candidates have not been timed yet.
        config: the tiles of a Triton kernel.
        reason: why this kernel was chosen.
    """

    path: Literal["gluon", "triton", "torch"] | None
    config: TileConfig | None
    reason: str


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that makes `device` the current CUDA device, on which Triton launches its kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def unusable(device: torch.device) -> str | None:
    """Return why Triton kernels can't run on a device, or None if they can."""
    return _unusable(device, os.environ.get(KERNELS_VARIABLE, "auto"))


@lru_cache(maxsize=64)
def _unusable(device: torch.device, kernels: str) -> str | None:
    if kernels == "torch":
        return f"{KERNELS_VARIABLE}=torch"
    if device.type != "cuda":
        return f"no kernels for device type {device.type!r}"
    if find_spec("triton") is None:
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
    """Select the kernel for a product on a device, without running anything.

    Args:
        product: the product to compute.
        device: the device of its operands.
    """
    reason = unusable(device)
    if reason is None and product.dtype not in (*_HALF, torch.float32):
        reason = f"no tensor cores for {product.dtype}"
    if reason is None and product.dtype == torch.float32 and torch.version.hip is not None:
        reason = "no float32 kernels for AMD GPUs"
    if reason is not None:
        return Choice("torch", None, reason)
    if is_hopper(device):
        return _from_table(product, num_processors(device), gluon_unusable())
    if _is_distributed():
        return _untimed(product, device)
    known = _tuned(_device_name(device)).get(product.shape_class)
    if known is None:
        return Choice(None, None, "not timed yet on this device")
    return _as_choice(known)


def _untimed(product: Product, device: torch.device) -> Choice:
    """Select a kernel by architecture, because ranks with replicas of a weight must compute the same bits.

    Timings would let each rank choose another kernel, and ranks need not compute the same shapes.
    """
    reason = "not timed, so that all ranks use the same kernel"
    is_known = torch.version.hip is None and _capability(device) in KERNEL_WITHOUT_TIMING
    # One tile is its own mirror, and rows that are not aligned are loaded element by element.
    saves = product.operation == "symmetric" and product.rows > 128 and product.dtype in _HALF
    if is_known and saves and product.rows % ALIGNMENT == 0 and product.inner % ALIGNMENT == 0:
        return Choice("triton", _candidates(product)[0], f"{reason}; it computes half of a symmetric product")
    return Choice("torch", None, reason)


def is_hopper(device: torch.device) -> bool:
    """Return whether a CUDA device is a Hopper GPU, whose kernels and tiles were measured."""
    return torch.version.hip is None and _capability(device)[0] == 9


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def gluon_unusable() -> str | None:
    """Return why the Gluon kernel can't be used, or None if no reason is known yet."""
    return _gluon_failure


def give_up_gluon(reason: str) -> None:
    """Stop selecting the Gluon kernel until the process ends, for this reason, and warn."""
    global _gluon_failure
    _gluon_failure = reason
    warnings.warn(
        f"The Gluon kernel for Hopper GPUs is not used: {reason}. Results are the same, but large products take up to "
        "29% longer. Please report this with the output of `muon-fsdp doctor`.",
        RuntimeWarning,
        stacklevel=2,
    )


def probe_gluon(device: torch.device) -> bool:
    """Compare small products of the Gluon kernel with the library's once, and give the kernel up if they differ.

    Gluon is not a stable interface: another version of Triton may not import, compile or launch the kernel, or may
    compile something else. The comparison waits for the device, so it is not made while a CUDA graph is captured.

    Returns:
        Whether the kernel may be used.
    """
    global _is_gluon_probed
    if _is_gluon_probed or torch.cuda.is_current_stream_capturing():
        return _gluon_failure is None
    _is_gluon_probed = True
    try:
        error = _error_of_gluon(device)
    except torch.OutOfMemoryError:  # no fault of the kernel: probe it at the next call
        _is_gluon_probed = False
        raise
    except Exception as failure:
        give_up_gluon(f"it failed with {type(failure).__name__}: {failure}")
    else:
        if not error <= PROBE_TOLERANCE:  # NaN too
            give_up_gluon(f"its products are wrong by {error:.2g}")
    return _gluon_failure is None


def _error_of_gluon(device: torch.device) -> float:
    """Return the largest relative error of two products: a Gram matrix, and a square with two addends."""
    from muon_fsdp.kernels import triton_hopper

    x = torch.randn(2, 304, 96, generator=torch.Generator().manual_seed(0)).to(device, torch.float16)
    gram = triton_hopper.symmetric_product(x, x, [], x.new_empty(2, 304, 304), alpha=2.0**-6)
    addends = [Addend(gram, -0.5), Addend(gram, 0.25)]
    square = triton_hopper.symmetric_product(gram, gram, addends, torch.empty_like(gram), alpha=2.0**-4)
    errors = []
    for found, left, added in ((gram, 2.0**-6 * x.double(), 0.0), (square, 2.0**-4 * gram.double(), -0.25)):
        right = x if found is gram else gram
        expected = left @ right.double().mT + added * gram.double()
        errors.append(torch.linalg.norm(found.double() - expected) / torch.linalg.norm(expected))
    return float(torch.stack(errors).amax())


def _not_for_gluon(product: Product, processors: int) -> str | None:
    """Return why the Gluon kernel does not compute a symmetric product, or None if it does."""
    if product.dtype not in _HALF:
        return f"operands are {product.dtype}"
    if product.masked:
        return "a mask may exclude matrices"
    if not product.uniform:
        return "operands differ in dtype or are not aligned to 16 bytes"
    if not product.bulk or product.rows % 8:
        return "rows are not multiples of 16 bytes"
    # If all tiles run at the same time, the Triton kernel is as fast. If every matrix is one tile, no two tiles share
    # an operand.
    at_once = processors * (2 if product.rows < 1024 else 1)
    if product.rows <= 128 or _num_tiles(product, 128, 128) <= at_once:
        return "too few tiles"
    if product.rows >= NO_TILE * 128 or product.inner == 0:
        return "sizes are outside its range"
    return None


def _hopper_tiles(product: Product, processors: int) -> TileConfig:
    """Return the fastest tiles on Hopper GPUs; source: measured on an H200."""
    rows, cols = product.rows, product.cols
    tiles = _num_tiles(product, 128, 128)
    if product.dtype == torch.float32:  # each tf32x3 product needs three times the operands, so registers are the limit
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
    """Time `run` with every candidate and store the fastest one in memory and on disk.

    `run` gets the tiles of a candidate, or None for PyTorch's library.
    """
    milliseconds: dict[TileConfig | None, float] = {None: _time(lambda: run(None))}
    for config in _candidates(product):
        with suppress(Exception):  # a candidate may need more shared memory or registers than the device has
            milliseconds[config] = _time(lambda config=config: run(config))  # type: ignore[misc]
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


def _time(run: Callable[[], object]) -> float:
    """Return the median milliseconds of a call, of four calls back to back, after one that compiles the kernel."""
    run()

    def run_all() -> None:
        for _ in range(4):
            run()

    return statistics.median(1e3 * seconds(run_all, "cuda") / 4 for _ in range(5))


def cache_file(device_name: str) -> Path:
    """Return the file that stores the timings of a device."""
    root = (
        os.environ.get(CACHE_VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "muon_fsdp"
    )
    safe = "".join(c if c.isalnum() else "-" for c in device_name)
    return Path(root) / f"tiles-{safe}.json"


@lru_cache(maxsize=8)
def _tuned(device_name: str) -> dict[str, dict[str, object]]:
    return _read_cache(device_name)


def _read_cache(device_name: str) -> dict[str, dict[str, object]]:
    """Return the timings on disk. Malformed entries, and those of other kernels than ours now, are left out."""
    with suppress(OSError, ValueError, AttributeError, TypeError, KeyError):
        content = json.loads(cache_file(device_name).read_text())
        if content["made_by"] == _kernels_version():
            return {key: entry for key, entry in content["timings"].items() if _is_valid(entry)}
    return {}


def _is_valid(entry: object) -> bool:
    """Return whether an entry of the cache names the library or a complete tile configuration."""
    if not isinstance(entry, dict) or not isinstance(entry.get("times"), str) or "config" not in entry:
        return False
    config = entry["config"]
    if config is None:
        return True
    if not isinstance(config, list) or len(config) != len(TileConfig._fields):
        return False
    *sizes, persistent, group = config
    return isinstance(persistent, bool) and all(type(size) is int and size > 0 for size in (*sizes, group))


@lru_cache(maxsize=1)
def _kernels_version() -> str:
    """Return the version of the package with a checksum of the kernels that are timed."""
    source = Path(__file__).with_name("triton_products.py").read_bytes()
    return f"muon_fsdp {sys.modules['muon_fsdp'].__version__} {zlib.crc32(source):08x}"


def _write_cache(device_name: str) -> None:
    """Write the timings to a new file and rename it, because other processes may read or write the file."""
    path = cache_file(device_name)
    with suppress(OSError):  # without a writable cache the candidates are timed again in the next process
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            timings = {**_read_cache(device_name), **_tuned(device_name)}
            json.dump({"made_by": _kernels_version(), "timings": timings}, file, indent=1, sort_keys=True)
        os.replace(file.name, path)


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=64)
def _device_name(device: torch.device) -> str:
    import triton

    return f"{torch.cuda.get_device_name(device)} triton {triton.__version__}"
