"""Compile every kernel for GPUs that need not be there, and print one line each; run by tests/test_kernels.py.

The interpreter accepts what a compiler does not, and says nothing about shared memory or the width of loads.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import torch
import triton.language as tl
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from muon_fsdp.kernels import (
    Product,
    triton_elementwise,
    triton_norms,
    triton_pair,
    triton_products,
    triton_rows,
    triton_small,
    triton_spectral,
    triton_subspace,
)
from muon_fsdp.kernels.select import _candidates, _hopper_tiles
from muon_fsdp.kernels.tiles import TileConfig
from tests.small_cases import QUINTICS

HOPPER, AMPERE = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 80, 32)
SHARED_MEMORY = {90: 232448, 80: 166912}
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def compiled(
    kernel: Any,
    types: list[str | None],
    constants: dict[str, Any],
    target: GPUTarget,
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
    result = triton_compile(source, target=target, options=options)
    assert result.metadata.shared <= SHARED_MEMORY[target.arch], (kernel.fn.__name__, constants, result.metadata.shared)
    return result


def symmetric(
    tiles: TileConfig,
    dtype: torch.dtype,
    target: GPUTarget,
    *,
    same: bool,
    transposed: bool,
    added: int,
    masked: bool = False,
) -> None:
    tiles = tiles._replace(persistent=False) if masked else tiles
    bulk, name = target is HOPPER, NAMES[dtype]
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
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
    }
    numbers = ["i32", "i32", "i32", "fp32", "fp32", "fp32"]
    _run(triton_products._symmetric_kernel, [*types, *numbers], constants, tiles, target)


def multiply_add(
    tiles: TileConfig, dtype: torch.dtype, target: GPUTarget, c: torch.dtype, out: torch.dtype, masked: bool = False
) -> None:
    tiles = tiles._replace(persistent=False) if masked else tiles
    bulk, name, half = target is HOPPER, NAMES[dtype], (tiles.rows, tiles.cols // 2)
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
        "PRECISION": "tf32x3" if dtype == torch.float32 else "tf32",
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
    result = compiled(kernel, [*types, *numbers], constants, HOPPER, GluonASTSource, **limits)
    assert "wgmma" in result.asm["ptx"]
    print(90, kernel.fn.__name__, constants, "shared memory", result.metadata.shared, flush=True)


def _run(kernel: Any, types: list[str | None], constants: dict[str, Any], tiles: TileConfig, target: GPUTarget) -> None:
    result = compiled(kernel, types, constants, target, num_warps=tiles.num_warps, num_stages=tiles.num_stages)
    matrix_instruction = "wgmma" if target is HOPPER else "mma.sync"
    assert matrix_instruction in result.asm["ptx"], (kernel.fn.__name__, tiles)
    print(target.arch, kernel.fn.__name__, tuple(tiles), "shared memory", result.metadata.shared, flush=True)


def elementwise(kernel: Any, types: list[str | None], constants: dict[str, Any], loads: bool = True) -> None:
    result = compiled(kernel, types, constants, HOPPER, num_warps=8, num_stages=3)
    wide = len(re.findall(r"ld\.global\S*\.v4", result.asm["ptx"]))
    assert bool(wide) == loads, (kernel.fn.__name__, "is read element by element")
    print(90, kernel.fn.__name__, wide, "loads of 16 bytes", flush=True)


def spectral() -> None:
    """Compile the kernels of the spectral sphere: inner products, products with weights, subspaces."""
    tiles = {"HAS_ACTIVE": True, "ALIGNED": True, "ROWS": 8, "BLOCK": 512}
    numbers: list[str | None] = ["i32", "i32", "i32"]
    elementwise(
        triton_spectral._bilinear_kernel, ["*fp32!", "*fp16!", "*fp32!", "*i32", "*fp32", *numbers], tiles, True
    )
    shifted: list[str | None] = ["*bf16!", *["*fp32!"] * 5, "*i32", "*fp16!", *numbers]
    elementwise(triton_spectral._shifted_cast_kernel, shifted, tiles)
    projected: list[str | None] = ["*fp16!", "*fp32!", "*fp32!", "*fp32", "*fp32", "fp32", *numbers]
    elementwise(triton_spectral._project_out_kernel, projected, {"ALIGNED": True, "ROWS": 8, "BLOCK": 512})
    factors: list[str | None] = ["*fp32", "*fp32", "*fp64", "*fp64", "*fp32", "i32", "fp32", "fp32", "fp32"]
    for initialize, dynamic in product((False, True), (False, True)):
        constants = {"INITIALIZE": initialize, "DYNAMIC": dynamic, "BLOCK": 128}
        elementwise(triton_spectral._sphere_factors_kernel, factors, constants, False)
    for along_rows, aligned, dtype in product((False, True), (False, True), (tl.float32, tl.bfloat16)):
        products_with_weights(along_rows, aligned, dtype)
    subspaces()


def products_with_weights(along_rows: bool, aligned: bool, dtype: Any) -> None:
    kernel = triton_spectral._along_rows_kernel if along_rows else triton_spectral._along_columns_kernel
    constants = {"TYPE": dtype, "ADD": not aligned, "ROUND": dtype == tl.float32, "UNIT": aligned, "ALIGNED": aligned}
    constants |= {"ALIGNED_ROWS": aligned, "FIELDS": triton_spectral.FIELDS, "VECTORS": triton_spectral.MAX_VECTORS}
    constants |= triton_spectral._tiles(along_rows)
    result = compiled(kernel, ["*i32", "*i64", "*fp32!", "*fp32!"], constants, HOPPER, num_warps=4, num_stages=3)
    wide = len(re.findall(r"cp\.async\.cg\S* .*, 0x10,", result.asm["ptx"]))
    assert bool(wide) == aligned, (kernel.fn.__name__, "is read element by element")
    assert ".tf32.tf32" in result.asm["ptx"]
    print(90, kernel.fn.__name__, dtype, wide, "copies of 16 bytes, shared memory", result.metadata.shared, flush=True)


def subspaces() -> None:
    sizes = {"VECTORS": triton_spectral.MAX_VECTORS, "CHUNK": triton_subspace.CHUNK, "BLOCK": triton_subspace.BLOCK}
    fields = {"FIELDS": triton_subspace.FIELDS}
    tables: list[str | None] = ["*i64!", "*i32!"]
    for second, size in ((None, 16), ("*fp32!", 32)):
        has_second = {"HAS_SECOND": second is not None}
        in_float64(triton_subspace._inner_kernel, [*tables, "*fp32!", second, "*fp64!"], has_second | sizes | fields)
        for single in (False, True):
            constants = {"SINGLE": single, "ROUND": not single, **has_second, **sizes, **fields}
            types: list[str | None] = [*tables, "*fp64!", "*fp32!", second, "*fp32!"]
            in_float64(triton_subspace._combine_kernel, types, constants)
        in_registers = {"KNOWN": size - 16, "SIZE": size}
        compiled(triton_subspace._orthonormal_kernel, ["*fp64!", "*i32!", "*fp64!"], in_registers, HOPPER, num_warps=1)
    squares = {"SQUARINGS": triton_subspace.SQUARINGS, "VECTORS": 16, "SIZE": 32}
    in_float64(triton_subspace._ritz_kernel, ["*fp64!", "*i32!", "*fp64!", "*fp64!"], squares)
    compiled(triton_subspace._sum_kernel, ["*fp64!", "*i32!", "*fp64!"], {"SIZE": 32}, HOPPER)
    lanes = {"BLOCK": 1024, **fields}
    compiled(triton_subspace._fill_kernel, ["*i64!", "*fp32!", "*fp32!"], {"VECTORS": 16, **lanes}, HOPPER)
    compiled(triton_subspace._unit_kernel, ["*i64!", "*i64!", "*fp32!", "*fp32!", "*fp32!"], lanes, HOPPER)


def in_float64(kernel: Any, types: list[str | None], constants: dict[str, Any]) -> None:
    result = compiled(kernel, types, constants, HOPPER, num_warps=4, num_stages=3)
    assert re.search(r"mma\S*\.f64", result.asm["ptx"]), kernel.fn.__name__
    print(90, kernel.fn.__name__, "in float64, shared memory", result.metadata.shared, flush=True)


def matrix_products() -> None:
    """Compile the kernels of matrix products with tiles for Hopper and Ampere."""
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
    symmetric(
        _candidates(Product("symmetric", 8, 768, 768, 768, half))[0],
        half,
        AMPERE,
        same=False,
        transposed=False,
        added=2,
    )
    multiply_add(_candidates(large)[0], half, AMPERE, bf16, half)


def fused_updates() -> None:
    """Compile the kernels of fused updates, of norms and of the element-wise pair."""
    tables: list[str | None] = ["*i64", "*i64", "*i64", "*fp32", "*i64"]
    aligned = {"ALIGNED": True, "CHUNK": triton_norms.CHUNK}
    prepare = {"NESTEROV": True, "NORMS": True, "GRADIENT_TYPE": tl.float32}
    elementwise(triton_elementwise._muon_prepare_kernel, [*tables, "*bf16!", "*fp32!", "i32"], {**prepare, **aligned})
    unaligned = {**aligned, "ALIGNED": False}
    elementwise(
        triton_elementwise._muon_prepare_kernel, [*tables, "*bf16!", "*fp32!", "i32"], {**prepare, **unaligned}, False
    )
    for has_factors in (False, True):
        types = {"HAS_FACTORS": has_factors, "PARAMETER_TYPE": tl.float32}
        arguments = [*tables, "*fp16!", "*fp32" if has_factors else None, "i32", "i32"]
        elementwise(triton_elementwise._apply_kernel, arguments, {**types, **aligned})
    types = {"PARAMETER_TYPE": tl.bfloat16, "GRADIENT_TYPE": tl.bfloat16}
    elementwise(
        triton_elementwise._adamw_kernel, ["*i64", "*i64", "*i64", "*fp32", "*fp32", "i32"], {**types, **aligned}
    )
    elementwise(
        triton_elementwise._adamw_count_kernel, ["*i64", "*i64", "*fp32", "*fp32", "i32"], {"BLOCK": 128}, False
    )
    norms = {"CHUNK": triton_norms.CHUNK, "ALIGNED": True}
    elementwise(triton_norms._partials_kernel, ["*bf16!", "*fp32!", "i32", "i32"], norms)
    elementwise(triton_norms._scaled_cast_kernel, ["*bf16!", "*fp32", "*fp16!", "i32", "i32", "fp32"], norms)
    damping = {"EACH": triton_norms.DAMPING_PROGRAMS, **norms}
    elementwise(triton_norms._damp_kernel, ["*fp16!", "*fp32", "i32", "fp32"], damping)
    for first_chunk in ("*i32!", None):
        types = ["*fp32!", first_chunk, "*fp32!", "i32"]
        elementwise(triton_norms._inverse_norms_kernel, types, {"BLOCK": 1024}, False)
    for dtype, block in product(("fp16", "bf16", "fp32"), (256, 512)):
        tiles = {"ALIGNED": True, "ROWS": triton_rows.ROWS, "BLOCK": block}
        sizes: list[str | None] = ["i32", "i32", "i32"]
        elementwise(triton_rows._row_squares_kernel, [f"*{dtype}!", "*fp32!", *sizes, "fp32"], tiles)
        elementwise(triton_rows._scale_rows_kernel, [f"*{dtype}!", "*fp32!", "*fp32", *sizes], tiles)
    factors: list[str | None] = ["*fp32!", "*fp32", "*fp32", "i32", "fp32", "fp32", "fp32"]
    elementwise(triton_rows._row_factors_kernel, factors, {"BLOCK": 1024}, False)
    pair = {"PARAMETER_TYPE": tl.float32, "GRADIENT_TYPE": tl.float32, **aligned}
    update = {"COUPLED": True, "NESTEROV": True, "NORM": True}
    update |= {**pair, "BLOCK": triton_pair.BLOCK}
    elementwise(triton_pair._update_kernel, ["*i64", "*i64", "*fp32", "*fp64!", "i32"], update)
    sums: list[str | None] = ["*i64", "*i64", "*fp32", "*i32!", "*fp64!", "*i32!", "*fp64!", "i32"]
    elementwise(triton_pair._sums_of_squares_kernel, sums, {"COUPLED": True, **pair, "BLOCK": 1024})


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
        wide = len(re.findall(r"cp\.async\.cg\S* .*, 0x10,", result.asm["ptx"]))
        assert wide, "X is read element by element"
        assert "wgmma" in result.asm["ptx"]
        print(90, "_small_kernel", rows, dtype, wide, "copies of 16 bytes, shared memory", result.metadata.shared)


if __name__ == "__main__":
    matrix_products()
    small_matrices()
    fused_updates()
    spectral()
