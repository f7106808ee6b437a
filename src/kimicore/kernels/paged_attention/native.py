"""Paged attention in C++: reads the cache where it lies, and gives a query the same bits in every batch.

Measured on 2 cores of an AVX-512 server (bfloat16 dot products, no AMX), 9 query and 3 key-value heads of 64:

- 32 rows of 320 cached tokens, one token each, the cache in main memory: bfloat16 0.39 ms (in the cache 0.23), float32
  0.77 ms (0.38); gathering the blocks for torch alone takes 1.9 ms.
- A prompt of 2,048 tokens: bfloat16 205 GFLOP/s beside 114 of torch's scaled_dot_product_attention after a gather,
  float32 152 beside 115; of 128 tokens 145 and 107 beside 46 and 56. So it serves prompts of every length as well.
- One row of 6,000 tokens: bfloat16 0.32 ms, shared among threads in parts of 256 keys.
- One row of 7,000 tokens, one thread: bfloat16 0.31 ms; 64 blocks of 16 for each key-value head by tables of its own
  0.06 ms.

With matrix tiles (two threads of one core of a server with AMX, the same heads, bfloat16) a prompt of 2,048 tokens
takes 15 ms, where dot products take 50 ms; rows of one token take the same as with those.

One thread of a busy machine with AVX2 and no AVX-512 (Zen 3; its time on the processor), the same heads: 256 tokens
that see 4,000 each take float32 57 ms (40 GFLOP/s), bfloat16 51 ms; a prompt of 512 tokens 7.7 and 6.5 ms; 32 rows of
320 cached tokens, one token each, 3.4 and 2.6 ms.
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
from kimicore.kernels.ops import PagedAttentionOp
from kimicore.kernels.paged_attention import reference
from kimicore.kernels.team.native import parallel_entry

__all__ = ["CALL", "FAULTS", "TYPES", "load", "suits"]

TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CALL: Final = struct.Struct("10P12q14i2fP")  # struct Call of parts.h
FAULTS: Final = {
    1: "row_starts does not ascend within the tokens",
    2: "a context is shorter than its row's queries, or longer than its block table",
    3: "an entry of block_table that is in use is not a slot of the cache",
    4: "no memory",
    5: "a row whose heads have tables of their own has more than one query",
}


def load() -> tuple[PagedAttentionOp | None, str]:
    """Return the operation (called as the reference is) and None or the reason why it is missing."""
    library = load_library(Path(__file__).with_name("paged_attention.cpp"))
    if library.handle is None:
        return None, library.reason
    entry = library.handle.kimicore_paged_attention
    entry.argtypes, entry.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_int
    return _bound(entry, parallel_entry() or 0), library.reason


def suits(q: Tensor, kv: Tensor, block_table: Tensor, row_starts: Tensor, contexts: Tensor) -> bool:
    """Return whether the native kernel can take arguments of such types and shapes."""
    heads, kv_heads, block_tokens = q.shape[1], kv.shape[3], kv.shape[4]
    return (
        q.dtype == kv.dtype
        and q.dtype in TYPES
        and 16 <= block_tokens <= 256
        and block_tokens & (block_tokens - 1) == 0
        and heads % kv_heads == 0
        and heads // kv_heads <= 256
        and q.stride(2) == 1
        and kv[0].is_contiguous()
        and block_table.dtype == row_starts.dtype == contexts.dtype == torch.int32
        and block_table.stride(-1) == row_starts.stride(0) == contexts.stride(0) == 1
    )


def _bound(entry: Callable[[bytes, int], int], parallel: int) -> PagedAttentionOp:
    pack, types = CALL.pack, TYPES

    def paged_attention(
        q: Tensor,
        kv: Tensor,
        layer: int,
        block_table: Tensor,
        row_starts: Tensor,
        contexts: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        bias: Tensor | None = None,
        importance: Tensor | None = None,
    ) -> Tensor:
        if not suits(q, kv, block_table, row_starts, contexts):
            return reference.paged_attention(
                q, kv, layer, block_table, row_starts, contexts,
                scale=scale, window=window, softcap=softcap, bias=bias, importance=importance,
            )  # fmt: skip
        out = torch.empty(q.shape, dtype=q.dtype)
        slots, layers, _, kv_heads, block_tokens, dim = kv.shape
        rows, *heads, blocks = block_table.shape
        table_head = 0
        if heads:
            reference.check_head_tables(block_table, kv_heads, window, importance)
            block_table = block_table if block_table.stride(1) else block_table.contiguous()
            table_head = block_table.stride(1)
        call = pack(
            q.data_ptr(), kv.data_ptr(), out.data_ptr(),
            block_table.data_ptr(), row_starts.data_ptr(), contexts.data_ptr(),
            0 if bias is None else bias.data_ptr(), 0 if importance is None else importance.data_ptr(),
            0, 0, q.stride(0), q.stride(1), kv.stride(0), block_table.stride(0), table_head,
            0 if bias is None else bias.stride(0), 0, 0, 0, 0, 0, 0,
            q.shape[0], q.shape[1], kv_heads, dim, rows, blocks, block_tokens, slots, layers, layer, window or 0,
            torch.get_num_threads(), 0, 0, scale, softcap or 0.0, parallel,
        )  # fmt: skip
        fault = entry(call, types[q.dtype])
        if fault:
            raise ValueError(f"paged_attention: {FAULTS[fault]}")
        return out

    return paged_attention
