"""Compile every kernel for GPUs that need not be there, and print one line each; run by tests/test_kernels.py.

python -m tests.compile_kernels                # for all targets
python -m tests.compile_kernels sm_80 gfx942   # for some

The interpreter accepts what a compiler does not, and says nothing about shared memory or the width of loads.
"""

from __future__ import annotations

import re
import sys
from itertools import product
from typing import Any, NamedTuple

import torch
import triton.language as tl
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError

from muon_fsdp.kernels import (
    Product,
    triton_elementwise,
    triton_norms,
    triton_pair,
    triton_products,
    triton_rows,
    triton_small,
    triton_spectral,
    triton_state,
    triton_subspace,
)
from muon_fsdp.kernels.launch import TileConfig
from muon_fsdp.kernels.select import _candidates, _hopper_tiles
from tests.small_cases import QUINTICS


class Target(NamedTuple):
    """A GPU that kernels are compiled for: its architecture and the shared memory of one program in bytes."""

    gpu: GPUTarget
    shared_memory: int

    @property
    def name(self) -> str:
        """Return the name of the architecture, such as sm_90."""
        return str(self.gpu.arch) if self.is_amd else f"sm_{self.gpu.arch}"

    @property
    def is_amd(self) -> bool:
        """Return whether it is an AMD GPU."""
        return self.gpu.backend == "hip"

    @property
    def has_bulk_copies(self) -> bool:
        """Return whether products read tiles through tensor descriptors."""
        return not self.is_amd and self.gpu.arch >= 90

    @property
    def matrix_instruction(self) -> str:
        """Return a pattern of the instructions of its tensor cores."""
        return (
            "v_mfma" if self.is_amd else {90: "wgmma", 100: r"tcgen05\.mma|mma\.sync"}.get(self.gpu.arch, r"mma\.sync")
        )


HOPPER = Target(GPUTarget("cuda", 90, 32), 232448)
TARGETS = [
    Target(GPUTarget("cuda", 80, 32), 166912),
    Target(GPUTarget("cuda", 86, 32), 101376),
    Target(GPUTarget("cuda", 89, 32), 101376),
    HOPPER,
    Target(GPUTarget("cuda", 100, 32), 232448),
    Target(GPUTarget("cuda", 120, 32), 101376),
    Target(GPUTarget("hip", "gfx90a", 64), 65536),
    Target(GPUTarget("hip", "gfx942", 64), 65536),
    Target(GPUTarget("hip", "gfx950", 64), 163840),
]
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def compiled(
    kernel: Any,
    types: list[str | None],
    constants: dict[str, Any],
    target: Target,
    source_type: type[ASTSource] = ASTSource,
    **options: int,
) -> Any:
    """Compile a kernel; `types` are those of the arguments before the constants.

    None stands for None, and a trailing ! for 16-byte alignment.
    """
    signature, values, attributes = {}, dict(constants), {}
    for number, (parameter, kind) in enumerate(zip(kernel.params, types, strict=False)):
        if kind is None:
            signature[parameter.name], values[parameter.name] = "constexpr", None
        else:
            signature[parameter.name] = kind.removesuffix("!")
            if kind.endswith("!"):
                attributes[(number,)] = [["tt.divisibility", 16]]
    signature.update(dict.fromkeys(constants, "constexpr"))
    source = source_type(kernel, signature, constexprs=values, attrs=attributes)
    result = triton_compile(source, target=target.gpu, options=options)
    assert result.metadata.shared <= target.shared_memory, (
        target.name,
        kernel.fn.__name__,
        constants,
        result.metadata.shared,
    )
    return result


def machine_code(result: Any) -> str:
    code: str = result.asm["amdgcn" if "amdgcn" in result.asm else "ptx"]
    return code


def wide_loads(result: Any) -> int:
    """Count the loads and asynchronous copies of 16 bytes or more."""
    wide = r"(global|buffer)_load_(lds_)?dwordx4|ld\.global\S*\.v[48]|cp\.async\.c[ag]\S* .*, 0x10,"
    return len(re.findall(wide, machine_code(result)))


def narrow_copies(result: Any) -> int:
    """Count the asynchronous copies of less than 16 bytes."""
    return len(re.findall(r"cp\.async\.ca\S* .*, 0x[48],", machine_code(result)))


def symmetric(
    tiles: TileConfig,
    dtype: torch.dtype,
    target: Target,
    *,
    same: bool,
    transposed: bool,
    added: int,
    masked: bool = False,
) -> None:
    tiles = tiles._replace(persistent=False) if masked else tiles
    bulk, name = target.has_bulk_copies, NAMES[dtype]
    block = (tiles.inner, tiles.rows) if transposed else (tiles.rows, tiles.inner)
    operand, square = _operand(name, block, bulk), _operand(name, (tiles.rows, tiles.rows), bulk)
    types = [operand, None if same else operand, *([square] * added + [None] * (2 - added)), square]
    types.append("*i32" if masked else None)
    constants = {
        "SAME": same,
        "SYMMETRIZE": not same or dtype == torch.float32,
        "TRANSPOSED": transposed,
        "HAS_C": added > 0,
        "HAS_E": added > 1,
        "HAS_ACTIVE": masked,
        "BLOCK": tiles.rows,
        "BLOCK_K": tiles.inner,
        "GROUP": tiles.group,
        "PERSISTENT": tiles.persistent,
        "BULK_IN": bulk,
        "BULK_OUT": bulk,
        "ALIGNED": not bulk,
        "PRECISION": triton_products.precision(dtype),
    }
    numbers = ["i32", "i32", "i32", "fp32", "fp32", "fp32"]
    _run(triton_products._symmetric_kernel, [*types, *numbers], constants, tiles, target)


def multiply_add(
    tiles: TileConfig, dtype: torch.dtype, target: Target, c: torch.dtype, out: torch.dtype, masked: bool = False
) -> None:
    tiles = tiles._replace(persistent=False) if masked else tiles
    bulk, name, half = target.has_bulk_copies, NAMES[dtype], (tiles.rows, tiles.cols // 2)
    types = [
        _operand(name, (tiles.rows, tiles.inner), bulk),
        _operand(name, (tiles.inner, tiles.cols), bulk),
        _operand(NAMES[c], half, bulk),
        _operand(NAMES[out], half, bulk),
        "*fp32",
        "*i32" if masked else None,
        *(["i32"] * 4 + ["fp32"] * 2),
    ]
    constants = {
        "HAS_C": True,
        "HAS_SCALE": True,
        "HAS_ACTIVE": masked,
        "BLOCK_M": tiles.rows,
        "BLOCK_N": tiles.cols,
        "BLOCK_K": tiles.inner,
        "GROUP": tiles.group,
        "PERSISTENT": tiles.persistent,
        "BULK_IN": bulk,
        "BULK_OUT": bulk,
        "ALIGNED": not bulk,
        "PRECISION": triton_products.precision(dtype),
    }
    _run(triton_products._multiply_add_kernel, types, constants, tiles, target)


def _operand(name: str, block: tuple[int, int], bulk: bool) -> str:
    return f"tensordesc<{name}[1,{block[0]},{block[1]}]>" if bulk else f"*{name}!"


def symmetric_by_gluon(dtype: torch.dtype, *, same: bool, added: int, transposed: bool = False) -> None:
    from triton.experimental.gluon._runtime import GluonASTSource

    from muon_fsdp.kernels import triton_hopper as hopper

    def operand(rows: int, cols: int, layout: object) -> str:
        return f"tensordesc<{NAMES[dtype]}[1, {rows}, {cols}],{layout!r}>"

    side, inner = hopper.SIDE, hopper.INNER
    block, tile = operand(side, inner, hopper._BLOCK_LAYOUT), operand(side, side, hopper._TILE_LAYOUT)
    if transposed:
        block = operand(inner, side, hopper._TILE_LAYOUT)
    half_tile = operand(side, 2 * inner, hopper._BLOCK_LAYOUT)
    types = [block, None if same else block, tile if added > 0 else None, half_tile if added > 1 else None, tile]
    numbers = ["*i32!", "i32", "i32", "i32", "fp32", "fp32", "fp32"]
    constants = {"SAME": same, "HAS_C": added > 0, "HAS_E": added > 1}
    kernel, limits = hopper._symmetric_hopper_kernel, {"num_warps": 4, "maxnreg": hopper.MAX_REGISTERS}
    try:
        result = compiled(kernel, [*types, *numbers], constants, HOPPER, GluonASTSource, **limits)
    except (CompilationError, RuntimeError) as error:  # Gluon is not stable; `probe_gluon` then uses the other kernel
        print(HOPPER.name, kernel.fn.__name__, constants, "is not compiled:", first_cause(error), flush=True)
        return
    assert "wgmma" in result.asm["ptx"]
    print(HOPPER.name, kernel.fn.__name__, constants, "shared memory", result.metadata.shared, flush=True)


def first_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).splitlines()[-1]


def _run(kernel: Any, types: list[str | None], constants: dict[str, Any], tiles: TileConfig, target: Target) -> None:
    result = compiled(kernel, types, constants, target, num_warps=tiles.num_warps, num_stages=tiles.num_stages)
    what = target.name, kernel.fn.__name__, tuple(tiles)
    assert re.search(target.matrix_instruction, machine_code(result)), what
    if not target.has_bulk_copies:
        assert wide_loads(result), (*what, "is read element by element")
        assert not narrow_copies(result), (*what, "is copied element by element")
    print(*what, "shared memory", result.metadata.shared, flush=True)


def elementwise(
    target: Target, kernel: Any, types: list[str | None], constants: dict[str, Any], loads: bool = True
) -> None:
    num_warps = 4 if "ROWS" in constants else 8  # as they are launched
    result = compiled(kernel, types, constants, target, num_warps=num_warps, num_stages=3)
    wide = wide_loads(result)
    assert bool(wide) == loads, (target.name, kernel.fn.__name__, "is read element by element")
    print(target.name, kernel.fn.__name__, wide, "loads of 16 bytes", flush=True)


def spectral(target: Target) -> None:
    """Compile the kernels of the spectral sphere: inner products, products with weights, subspaces."""
    tiles = {"HAS_ACTIVE": True, "ALIGNED": True, "ROWS": 8, "BLOCK": 512}
    numbers: list[str | None] = ["i32", "i32", "i32"]
    elementwise(
        target, triton_spectral._bilinear_kernel, ["*fp32!", "*fp16!", "*fp32!", "*i32", "*fp32", *numbers], tiles, True
    )
    shifted: list[str | None] = ["*bf16!", *["*fp32!"] * 5, "*i32", "*fp16!", *numbers]
    elementwise(target, triton_spectral._shifted_cast_kernel, shifted, tiles)
    projected: list[str | None] = ["*fp16!", "*fp32!", "*fp32!", "*fp32", "*fp32", "fp32", *numbers]
    elementwise(target, triton_spectral._project_out_kernel, projected, {"ALIGNED": True, "ROWS": 8, "BLOCK": 512})
    factors: list[str | None] = ["*fp32", "*fp32", "*fp64", "*fp64", "*fp32", "i32", "fp32", "fp32", "fp32"]
    for initialize, dynamic in product((False, True), (False, True)):
        constants = {"INITIALIZE": initialize, "DYNAMIC": dynamic, "BLOCK": 128}
        elementwise(target, triton_spectral._sphere_factors_kernel, factors, constants, False)
    kinds = (False, True) if target is HOPPER else (True,)
    for along_rows, aligned, dtype in product((False, True), kinds, (tl.float32, tl.bfloat16)):
        products_with_weights(target, along_rows, aligned, dtype)
    subspaces(target)


def products_with_weights(target: Target, along_rows: bool, aligned: bool, dtype: Any) -> None:
    kernel = triton_spectral._along_rows_kernel if along_rows else triton_spectral._along_columns_kernel
    constants = {"TYPE": dtype, "ADD": not aligned, "ROUND": dtype == tl.float32, "UNIT": aligned, "ALIGNED": aligned}
    constants["PRECISION"], num_stages = triton_spectral.precision_and_stages(target.is_amd)
    constants |= {"ALIGNED_ROWS": aligned, "FIELDS": triton_spectral.FIELDS, "VECTORS": triton_spectral.MAX_VECTORS}
    constants |= triton_spectral._tiles(along_rows)
    types: list[str | None] = ["*i32", "*i64", "*fp32!", "*fp32!"]
    result = compiled(kernel, types, constants, target, num_warps=4, num_stages=num_stages)
    wide = wide_loads(result)
    # Triton 3.9 copies float32 numbers one by one to the shared memory of an MI350.
    assert bool(wide) == aligned or target.is_amd, (target.name, kernel.fn.__name__, "is read element by element")
    assert target.is_amd or re.search(r"\.tf32\.tf32|kind::tf32", result.asm["ptx"])
    print(target.name, kernel.fn.__name__, dtype, wide, "loads of 16 bytes, shared memory", result.metadata.shared)


def subspaces(target: Target) -> None:
    sizes = {"VECTORS": triton_spectral.MAX_VECTORS, "CHUNK": triton_subspace.CHUNK, "BLOCK": triton_subspace.BLOCK}
    fields = {"FIELDS": triton_subspace.FIELDS}
    tables: list[str | None] = ["*i64!", "*i32!"]
    for second, size in ((None, 16), ("*fp32!", 32)):
        has_second = {"HAS_SECOND": second is not None}
        in_float64(
            target, triton_subspace._inner_kernel, [*tables, "*fp32!", second, "*fp64!"], has_second | sizes | fields
        )
        for single in (False, True):
            constants = {"SINGLE": single, "ROUND": not single, **has_second, **sizes, **fields}
            types: list[str | None] = [*tables, "*fp64!", "*fp32!", second, "*fp32!"]
            in_float64(target, triton_subspace._combine_kernel, types, constants)
        in_registers = {"KNOWN": size - 16, "SIZE": size}
        compiled(triton_subspace._orthonormal_kernel, ["*fp64!", "*i32!", "*fp64!"], in_registers, target, num_warps=1)
    squares = {"SQUARINGS": triton_subspace.SQUARINGS, "VECTORS": 16, "SIZE": 32}
    in_float64(target, triton_subspace._ritz_kernel, ["*fp64!", "*i32!", "*fp64!", "*fp64!"], squares)
    compiled(triton_subspace._sum_kernel, ["*fp64!", "*i32!", "*fp64!"], {"SIZE": 32}, target)
    lanes = {"BLOCK": 1024, **fields}
    compiled(triton_subspace._fill_kernel, ["*i64!", "*fp32!", "*fp32!"], {"VECTORS": 16, **lanes}, target)
    compiled(triton_subspace._unit_kernel, ["*i64!", "*i64!", "*fp32!", "*fp32!", "*fp32!"], lanes, target)


def in_float64(target: Target, kernel: Any, types: list[str | None], constants: dict[str, Any]) -> None:
    result = compiled(kernel, types, constants, target, num_warps=4, num_stages=3)
    assert target is not HOPPER or re.search(r"mma\S*\.f64", result.asm["ptx"]), kernel.fn.__name__
    print(target.name, kernel.fn.__name__, "in float64, shared memory", result.metadata.shared, flush=True)


def hopper_products() -> None:
    """Compile the kernels of matrix products with the tiles for Hopper GPUs."""
    half, bf16, single = torch.float16, torch.bfloat16, torch.float32
    for batch, rows, inner in [(12, 768, 768), (8, 2048, 2048), (8, 2048, 8192), (1, 50, 100)]:
        tiles = _hopper_tiles(Product("symmetric", batch, rows, rows, inner, half), 132)
        symmetric(tiles, half, HOPPER, same=False, transposed=False, added=2)
        symmetric(tiles, half, HOPPER, same=False, transposed=False, added=2, masked=True)
        symmetric(tiles, half, HOPPER, same=True, transposed=inner > rows, added=0)
    symmetric(
        _hopper_tiles(Product("symmetric", 1, 50, 50, 50, single), 132),
        single,
        HOPPER,
        same=True,
        transposed=False,
        added=2,
    )
    symmetric_by_gluon(half, same=True, added=0, transposed=True)
    symmetric_by_gluon(half, same=True, added=0)
    symmetric_by_gluon(half, same=True, added=1)
    symmetric_by_gluon(bf16, same=False, added=2)
    large, wide = (
        Product("multiply_add", 8, 2048, 2048, 2048, half),
        Product("multiply_add", 8, 2048, 2048, 2048, half, True, True),
    )
    multiply_add(_hopper_tiles(large, 132), half, HOPPER, bf16, half)
    multiply_add(_hopper_tiles(large, 132), half, HOPPER, half, half, masked=True)
    multiply_add(_hopper_tiles(wide, 132), half, HOPPER, single, single)
    multiply_add(_hopper_tiles(Product("multiply_add", 1, 50, 99, 50, single), 132), single, HOPPER, single, single)


def matrix_products(target: Target) -> None:
    """Compile the kernels of matrix products with the tiles that other GPUs try."""
    half, single = torch.float16, torch.float32
    for tiles in _candidates(Product("symmetric", 8, 768, 768, 768, half))[:2]:
        symmetric(tiles, half, target, same=False, transposed=False, added=2)
    symmetric(tiles, half, target, same=True, transposed=True, added=0)
    for tiles in _candidates(Product("multiply_add", 8, 2048, 2048, 2048, half))[:3]:
        multiply_add(tiles, half, target, torch.bfloat16, half)
    if not target.is_amd:  # the library computes float32 products there
        tiles = _candidates(Product("symmetric", 8, 48, 48, 48, single))[-1]
        symmetric(tiles, single, target, same=False, transposed=False, added=2)
        multiply_add(tiles, single, target, single, single, masked=True)


def fused_updates(target: Target) -> None:
    """Compile the kernels of fused updates, of norms and of the element-wise pair."""
    tables: list[str | None] = ["*i64", "*i64", "*i64", "*fp32", "*i64"]
    aligned = {"ALIGNED": True, "CHUNK": triton_norms.CHUNK}
    unaligned = {**aligned, "ALIGNED": False}
    plain = {"ROUNDING": 0, "REMAINDER_ROW": 0, "ONE_RUN": True}
    for dtype, code in triton_state.CODES.items():
        state_type, places = triton_elementwise.TYPES[dtype], None if dtype == torch.float32 else "*i64"
        prepare = {"NESTEROV": True, "NORMS": True, "GRADIENT_TYPE": tl.float32, "STATE_TYPE": state_type, "CODE": code}
        arguments = [*tables, "*bf16!", "*fp32!", places, "i32"]
        elementwise(target, triton_elementwise._muon_prepare_kernel, arguments, {**prepare, **aligned})
        if target is HOPPER or dtype == torch.float32:
            elementwise(target, triton_elementwise._muon_prepare_kernel, arguments, {**prepare, **unaligned}, False)
    for has_factors, cautious in ((False, False), (False, True), (True, False)):
        types = {"HAS_FACTORS": has_factors, "CAUTIOUS": cautious, "PARAMETER_TYPE": tl.float32, **plain}
        arguments = [*tables, "*fp16!", "*fp32" if has_factors else None, None, "*i64", "i32", "i32"]
        elementwise(target, triton_elementwise._apply_kernel, arguments, {**types, **aligned})
    for dtype, rounding, one_run in ((tl.bfloat16, 1, True), (tl.float16, 1, False), (tl.bfloat16, 2, True)):
        types = {"HAS_FACTORS": False, "CAUTIOUS": False, "PARAMETER_TYPE": dtype, "ROUNDING": rounding}
        types |= {"REMAINDER_ROW": 3, "ONE_RUN": one_run, **aligned}
        arguments = [*tables, "*fp16!", None, "*i64", "*i64", "i32", "i32"]
        elementwise(target, triton_elementwise._apply_kernel, arguments, types)
    for cautious, dtype in (
        (False, torch.float32),
        (True, torch.float32),
        (False, torch.bfloat16),
        (False, torch.int8),
    ):
        first_type, code = triton_elementwise.TYPES[dtype], triton_state.CODES[dtype]
        second_type = tl.uint8 if dtype == torch.int8 else first_type
        types = {"CAUTIOUS": cautious, "PARAMETER_TYPE": tl.bfloat16, "GRADIENT_TYPE": tl.bfloat16}
        types |= {"FIRST_TYPE": first_type, "SECOND_TYPE": second_type, "CODE": code, **plain}
        types |= {"ROUNDING": 1, "ONE_RUN": False} if dtype == torch.int8 else {}
        places = None if dtype == torch.float32 else "*i64"
        arguments = ["*i64", "*i64", "*i64", "*fp32", "*fp32", places, "*i64", "i32"]
        elementwise(target, triton_elementwise._adamw_kernel, arguments, {**types, **aligned})
    elementwise(
        target, triton_elementwise._adamw_count_kernel, ["*i64", "*i64", "*fp32", "*fp32", "i32"], {"BLOCK": 128}, False
    )
    norms = {"CHUNK": triton_norms.CHUNK, "ALIGNED": True}
    elementwise(target, triton_norms._partials_kernel, ["*bf16!", "*fp32!", "i32", "i32"], norms)
    elementwise(target, triton_norms._scaled_cast_kernel, ["*bf16!", "*fp32", "*fp16!", "i32", "i32", "fp32"], norms)
    damping = {"EACH": triton_norms.DAMPING_PROGRAMS, **norms}
    elementwise(target, triton_norms._damp_kernel, ["*fp16!", "*fp32", "i32", "fp32"], damping)
    for first_chunk in ("*i32!", None):
        types = ["*fp32!", first_chunk, "*fp32!", "i32"]
        elementwise(target, triton_norms._inverse_norms_kernel, types, {"BLOCK": 1024}, False)
    for dtype, block in product(("fp16", "bf16", "fp32") if target is HOPPER else ("fp16",), (256, 512)):
        tiles = {"ALIGNED": True, "ROWS": triton_rows.ROWS, "BLOCK": block}
        sizes: list[str | None] = ["i32", "i32", "i32"]
        elementwise(target, triton_rows._row_squares_kernel, [f"*{dtype}!", "*fp32!", *sizes, "fp32"], tiles)
        elementwise(target, triton_rows._scale_rows_kernel, [f"*{dtype}!", "*fp32!", "*fp32", *sizes], tiles)
    factors: list[str | None] = ["*fp32!", "*fp32", "*fp32", "i32", "fp32", "fp32", "fp32"]
    elementwise(target, triton_rows._row_factors_kernel, factors, {"BLOCK": 1024}, False)
    pair = {"PARAMETER_TYPE": tl.float32, "GRADIENT_TYPE": tl.float32, **aligned}
    update = {"COUPLED": True, "NESTEROV": True, "NORM": True}
    update |= {**pair, "BLOCK": triton_pair.BLOCK}
    elementwise(target, triton_pair._update_kernel, ["*i64", "*i64", "*fp32", "*fp64!", "i32"], update)
    sums: list[str | None] = ["*i64", "*i64", "*fp32", "*i32!", "*fp64!", "*i32!", "*fp64!", "i32"]
    elementwise(target, triton_pair._sums_of_squares_kernel, sums, {"COUPLED": True, **pair, "BLOCK": 1024})


def small_matrices() -> None:
    """Compile the kernel of small matrices, with the tiles for 64 and 128 rows."""
    steps, refreshes = QUINTICS[:2], frozenset({1})  # short, because compilation takes seconds per step
    for rows, dtype, has_norms, tall in ((64, torch.bfloat16, False, True), (128, torch.float32, True, False)):
        config = triton_small.small_config(rows, 4096, dtype)
        constants = {
            **triton_small._chain_constants(steps, refreshes),
            "HAS_NORMS": has_norms,
            "WIDE": dtype == torch.float32,
            "EXACT": rows == 64,
            "SPLIT_FROM": config.split_from,
            "TALL": tall,
            "ALIGNED": True,
            "ROWS": rows,
            "TILE": config.tile,
            "STAGES": config.num_stages,
        }
        types = [f"*{NAMES[dtype]}!", "*fp32", f"*{NAMES[dtype]}!", "i32", "i32", "fp32", "fp32"]
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        result = compiled(triton_small._small_kernel, types, constants, HOPPER, **options)
        wide = wide_loads(result)
        assert wide, "X is read element by element"
        assert "wgmma" in result.asm["ptx"]
        shared = result.metadata.shared
        print(HOPPER.name, "_small_kernel", rows, dtype, wide, "copies of 16 bytes, shared memory", shared)


def main(names: list[str]) -> None:
    unknown = set(names) - {target.name for target in TARGETS}
    assert not unknown, f"unknown targets {unknown}"
    for target in TARGETS:
        if names and target.name not in names:
            continue
        if target is HOPPER:
            hopper_products()
            small_matrices()
        else:
            matrix_products(target)
        fused_updates(target)
        spectral(target)


if __name__ == "__main__":
    main(sys.argv[1:])
