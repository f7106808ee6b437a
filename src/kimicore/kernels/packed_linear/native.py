"""Product with a packed weight in C++: unpacked panel by panel into a cache, and multiplied there.

The dense product with the unpacked weight has the same bits (:mod:`kimicore.kernels.linear.native`), but for bfloat16
where that goes by matrix tiles. Four times fewer
bytes come from memory with 4 bits than with 16, which is what a product of few rows waits for.

In bfloat16, where the processor has dot products of bytes, weights are kept in tiles (:mod:`.tiled`). Up to some rows,
inputs are then rounded to 16-bit integers with a scale per block of columns and multiplied with the codes, by dot
products of bytes or, with the same bits, by matrix tiles; more rows are multiplied with the unpacked weight, by matrix
tiles where there are such. From which number of rows on is measured for each form of weights (:mod:`.crossover`) at its
first product, which is that of an engine's warming up.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kimicore.kernels.build import load_library
from kimicore.kernels.ops import ArrangeOp, PackedLinearOp, PackedRowsOp
from kimicore.kernels.packed_linear import reference
from kimicore.kernels.packed_linear.crossover import WIDE_BLOCK, Crossover, measure_crossover
from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.kernels.packed_linear.tiled import TiledWeight, tiled, untiled
from kimicore.kernels.team.native import parallel_entry

__all__ = ["load", "load_arrange", "load_int8", "load_rows"]

_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CALL: Final = struct.Struct("3P3q")  # struct PackedCall and TiledCall, behind the weight


def _library(dtype: torch.dtype, name: str) -> tuple[Callable[..., int] | None, str]:
    """Return a function of the library, or None where ``dtype`` has none, and the reason."""
    library = load_library(Path(__file__).with_name("packed_linear.cpp"))
    if library.handle is None:
        return None, library.reason
    if dtype not in _TYPES or not library.handle.kimicore_packed_linear_serves(_TYPES[dtype]):
        return None, f"none in {str(dtype).removeprefix('torch.')} that is fast on this processor"
    entry: Callable[..., int] = getattr(library.handle, name)
    return entry, library.reason


def _tiles() -> Any:
    """Return the library of weights in tiles, or None where the processor is not served."""
    handle = load_library(Path(__file__).with_name("tiled_linear.cpp")).handle
    if handle is None or not handle.kimicore_tiled_serves():
        return None
    handle.kimicore_tiled_linear.argtypes = (c_char_p, c_int64, c_int64, c_int, c_void_p)
    handle.kimicore_tiled_rows.argtypes = (c_char_p, c_void_p, c_int64, c_void_p, c_int, c_void_p)
    return handle


def load_arrange(dtype: torch.dtype) -> tuple[ArrangeOp | None, str]:
    """Return what puts a packed weight into the form that products with ``dtype`` read, or None, and the reason."""
    entry, reason = _library(dtype, "kimicore_packed_linear")
    if entry is None:
        return None, reason
    if dtype != torch.bfloat16 or _tiles() is None:
        return reference.arrange, f"{reason}; row by row"
    return tiled, f"{reason}; in tiles of 16 outputs"


def load(dtype: torch.dtype, ways: Crossover | None = None) -> tuple[PackedLinearOp | None, str]:
    """Return the product for ``dtype`` (called as the reference is), or None, and the reason.

    ``ways``: for how many rows each way is taken with weights in tiles; None: as measured at a form's first product.
    """
    entry, reason = _library(dtype, "kimicore_packed_linear")
    if entry is None:
        return None, reason
    entry.argtypes, entry.restype = (c_char_p, c_int, c_int, c_void_p), c_int  # type: ignore[attr-defined]
    parallel = parallel_entry() or 0
    by_rows = _bound(entry, parallel, dtype)
    if dtype != torch.bfloat16 or _tiles() is None:
        return by_rows, reason
    by_tiles = _tiled_product(_tiles().kimicore_tiled_linear, parallel)
    measured: dict[tuple[bool, bool], Crossover] = {}

    def measure(x: Tensor, weight: TiledWeight, few: int, some: int) -> Tensor:
        return by_tiles(x, weight, None, None, few, some)

    def packed_linear(
        x: Tensor, weight: PackedWeight | TiledWeight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if not isinstance(weight, TiledWeight):
            return by_rows(x, weight, bias, out)
        form = (weight.bits == 8, weight.block >= WIDE_BLOCK)
        own = ways or measured.get(form)
        if own is None:
            own = measured[form] = measure_crossover(measure, *form)
        return by_tiles(x, weight, bias, out, own.few, own.some)

    return packed_linear, f"{reason}; by bytes for few rows, by the unpacked weight for many"


def load_rows(dtype: torch.dtype) -> tuple[PackedRowsOp | None, str]:
    """Return the reading of single rows for ``dtype`` (called as the reference is), or None, and the reason."""
    entry, reason = _library(dtype, "kimicore_packed_rows")
    if entry is None:
        return None, reason
    entry.argtypes = (c_char_p, c_int, c_void_p, c_int64, c_void_p, c_int, c_void_p)  # type: ignore[attr-defined]
    entry.restype = c_int  # type: ignore[attr-defined]
    return _bound_rows(entry, parallel_entry() or 0), reason


def _checked(
    x: Tensor, weight: PackedWeight | TiledWeight, bias: Tensor | None, out: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the inputs in the weight's order and the output; raises ValueError where anything does not fit."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    suits = x.dim() == 2 and x.dtype == dtype and x.stride(1) == 1 and x.shape[1] == weight.depth
    suits = suits and (bias is None or (bias.dtype == dtype and bias.is_contiguous()))
    if out is None:
        out = torch.empty((x.shape[0], weight.outs), dtype=dtype)
    if not suits or out.dtype != dtype or out.stride(1) != 1 or out.shape != (x.shape[0], weight.outs):
        raise ValueError(f"packed_linear: x {list(x.shape)} {x.dtype}, {weight}, out {list(out.shape)} do not fit")
    return x, out


def _call(x: Tensor, weight: PackedWeight | TiledWeight, bias: Tensor | None, out: Tensor) -> bytes:
    where = (x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr())
    return weight.described + _CALL.pack(*where, x.shape[0], x.stride(0), out.stride(0))


def _bound(entry: Callable[..., int], parallel: int, dtype: torch.dtype) -> PackedLinearOp:
    threads, kind = torch.get_num_threads, _TYPES[dtype]

    def packed_linear(
        x: Tensor, weight: PackedWeight | TiledWeight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if isinstance(weight, TiledWeight):
            raise ValueError(f"packed_linear: {weight} lies in tiles, which products of {dtype} do not read")
        x, out = _checked(x, weight, bias, out, dtype)
        if entry(_call(x, weight, bias, out), kind, threads(), parallel):
            raise MemoryError(f"packed_linear: no memory to unpack {weight.depth} x 32 weights")
        return out

    return packed_linear


def _tiled_product(
    entry: Callable[..., int], parallel: int
) -> Callable[[Tensor, TiledWeight, Tensor | None, Tensor | None, int, int], Tensor]:
    threads = torch.get_num_threads

    def product(x: Tensor, weight: TiledWeight, bias: Tensor | None, out: Tensor | None, few: int, some: int) -> Tensor:
        x, out = _checked(x, weight, bias, out, torch.bfloat16)
        if entry(_call(x, weight, bias, out), few, some, threads(), parallel):
            raise MemoryError(f"packed_linear: no memory for {x.shape[0]} rows of {weight.depth}")
        return out

    return product


def load_int8(dtype: torch.dtype) -> tuple[PackedLinearOp | None, str]:
    """Return the product with inputs of 8 bits for ``dtype`` and weights in tiles, or None, and the reason.

    Weights that have more than one scale in a row are rounded to 8 bits with one, so that the product is one of bytes.
    """
    tiles = _tiles() if dtype == torch.bfloat16 else None
    if tiles is None or tiles.kimicore_tiled_serves() < 2:
        return None, "no matrix tiles of bytes on this processor"
    entry, threads, parallel = tiles.kimicore_tiled_bytes, torch.get_num_threads, parallel_entry() or 0
    entry.argtypes = (c_char_p, c_int, c_void_p)

    def packed_linear_int8(
        x: Tensor, weight: PackedWeight | TiledWeight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if not isinstance(weight, TiledWeight):
            weight = tiled(weight)
        x, out = _checked(x, weight, bias, out, torch.bfloat16)
        if entry(_call(x, weight, bias, out), threads(), parallel):
            raise MemoryError(f"packed_linear_int8: no memory for {x.shape[0]} rows of {weight.depth}")
        return out

    return packed_linear_int8, "matrix tiles of bytes"


def _bound_rows(entry: Callable[..., int], parallel: int) -> PackedRowsOp:
    types, threads = _TYPES, torch.get_num_threads

    handle = _tiles()

    def packed_rows(weight: PackedWeight | TiledWeight, rows: Tensor, dtype: torch.dtype) -> Tensor:
        suits = weight.order is None and dtype in types and rows.dtype == torch.int64 and rows.is_contiguous()
        in_tiles = isinstance(weight, TiledWeight)
        if not suits or (in_tiles and dtype != torch.bfloat16):
            plain = untiled(weight) if isinstance(weight, TiledWeight) else weight
            return reference.packed_rows(plain, rows, dtype)
        count = rows.numel()
        if count and not 0 <= int(rows.min()) <= int(rows.max()) < weight.outs:
            raise IndexError(f"packed_rows: rows from {int(rows.min())} to {int(rows.max())} of {weight.outs}")
        found = torch.empty((count, weight.depth), dtype=dtype)
        described = weight.described
        if in_tiles:
            failed = handle.kimicore_tiled_rows(
                described, rows.data_ptr(), count, found.data_ptr(), threads(), parallel
            )
        else:
            failed = entry(described, types[dtype], rows.data_ptr(), count, found.data_ptr(), threads(), parallel)
        if failed:
            raise MemoryError(f"packed_rows: no memory to unpack a row of {weight.depth}")
        return found

    return packed_rows
