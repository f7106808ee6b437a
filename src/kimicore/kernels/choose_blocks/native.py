"""The choice of blocks in C++: reads the summaries where they lie, and chooses the same for a row in every batch.

Microseconds on 2 cores of a busy AVX-512 server, 9 query and 3 key-value heads of 64 in bfloat16, 64 blocks of 16 kept:
one row of 7,000 tokens 28 (one thread 39, of which 9 are Python's; torch 435), of 2,000 tokens 18 (226).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kimicore.kernels.build import load_library
from kimicore.kernels.choose_blocks import reference
from kimicore.kernels.ops import ChooseBlocksOp
from kimicore.kernels.team.native import parallel_entry

__all__ = ["load"]

_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CALL: Final = struct.Struct("7P4q11ifP")  # struct Call of choose_blocks.cpp
_FAULTS: Final = {
    1: "a context is longer than its block table",
    2: "an entry of block_table that is in use is not a slot of the cache",
    3: "no memory",
}


def load() -> tuple[ChooseBlocksOp | None, str]:
    """Return the operation (called as the reference is), or None, and the reason."""
    library = load_library(Path(__file__).with_name("choose_blocks.cpp"))
    if library.handle is None:
        return None, library.reason
    entry = library.handle.kimicore_choose_blocks
    entry.argtypes, entry.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_int
    return _bound(entry, parallel_entry() or 0), library.reason


def _suits(q: Tensor, summary: Tensor, block_table: Tensor, contexts: Tensor, keep: Tensor) -> bool:
    return (
        q.dtype == summary.dtype
        and q.dtype in _TYPES
        and q.shape[1] % summary.shape[2] == 0
        and q.shape[2] == summary.shape[4]
        and q.stride(2) == 1
        and summary[0].is_contiguous()
        and q.shape[0] == block_table.shape[0] == contexts.shape[0] == keep.shape[0]
        and block_table.dtype == contexts.dtype == keep.dtype == torch.int32
        and block_table.stride(1) == contexts.stride(0) == keep.stride(0) == 1
    )


def _bound(entry: Callable[[bytes, int], int], parallel: int) -> ChooseBlocksOp:
    pack, types, threads = _CALL.pack, _TYPES, torch.get_num_threads

    def choose_blocks(
        q: Tensor,
        summary: Tensor,
        layer: int,
        block_table: Tensor,
        contexts: Tensor,
        keep: Tensor,
        *,
        block_tokens: int,
        scale: float,
        first: int = 1,
        recent: int = 2,
    ) -> tuple[Tensor, Tensor]:
        if first < 0 or recent < 1 or not _suits(q, summary, block_table, contexts, keep):
            return reference.choose_blocks(
                q, summary, layer, block_table, contexts, keep,
                block_tokens=block_tokens, scale=scale, first=first, recent=recent,
            )  # fmt: skip
        rows, blocks = block_table.shape
        slots, _, kv_heads, _, dim = summary.shape
        table = torch.empty(rows * kv_heads * blocks, dtype=torch.int32)  # room for rows that keep all
        chosen = torch.empty(rows, dtype=torch.int32)
        call = pack(
            q.data_ptr(), summary.data_ptr(), table.data_ptr(), chosen.data_ptr(),
            block_table.data_ptr(), contexts.data_ptr(), keep.data_ptr(),
            q.stride(0), q.stride(1), summary.stride(0), block_table.stride(0),
            rows, q.shape[1], kv_heads, dim, blocks, block_tokens, slots, layer, first, recent,
            threads(), scale, parallel,
        )  # fmt: skip
        width = entry(call, types[q.dtype])
        if width < 0:
            raise ValueError(f"choose_blocks: {_FAULTS[-width]}")
        return table.as_strided((rows, kv_heads, width), (kv_heads * width, width, 1)), chosen

    return choose_blocks
