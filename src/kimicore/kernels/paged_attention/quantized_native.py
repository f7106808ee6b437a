"""Attention over packed blocks in C++: unpacks keys and values while it packs them for the products. See ``native``.

Milliseconds of one thread's time on an AVX-512 server (bfloat16 dot products), bfloat16 cache / 8 bits / 4 bits:

- One token over 7,000, 9 query and 3 key-value heads of 64, the cache in main memory: 0.49 / 0.45 / 0.44 with blocks
  of 16 tokens, 0.50 / 0.42 / 0.42 with 32; where the processor's cache holds it, 0.31 / 0.38 / 0.40. Two threads with
  blocks of 32: 0.29 / 0.24 / 0.24.
- The same for 4 and 1 heads of 256, blocks of 32: 0.73 / 0.48 / 0.48; cached, blocks of 16: 0.36 / 0.42 / 0.46.
- A prompt of 2,048 tokens, blocks of 16: 41 / 44 / 44, with 4 and 1 heads of 256 52 / 54 / 55; blocks of 32: 41 / 42 /
  42. The fewer heads share keys, the more unpacking weighs: 8 and 8 heads, 1,024 tokens 9.8 / 12.1 / 12.4.
- float32: one token over 7,000 0.53 / 0.47 / 0.48, a prompt of 2,048 tokens 60 / 62 / 62.

A task's queries stand in one block, so that each of its keys is either packed or not for all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kimicore.kernels.build import load_library
from kimicore.kernels.kv_quantize.layout import ALIGNMENT_BYTES, packed_layout
from kimicore.kernels.ops import QuantizedAttentionOp
from kimicore.kernels.paged_attention import quantized
from kimicore.kernels.paged_attention.native import CALL, FAULTS, TYPES, suits
from kimicore.kernels.team.native import parallel_entry

__all__ = ["load"]


def load() -> tuple[QuantizedAttentionOp | None, str]:
    """Return the operation (called as the reference is), or None, and the reason."""
    library = load_library(Path(__file__).with_name("quantized_attention.cpp"))
    if library.handle is None:
        return None, library.reason
    entry = library.handle.kimicore_quantized_attention
    entry.argtypes, entry.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_int
    return _bound(entry, parallel_entry() or 0), library.reason


def _suits_packed(packed: Tensor, layer: int, packed_table: Tensor, tail_table: Tensor) -> bool:
    return (
        packed.dtype == torch.uint8
        and packed.shape[0] > 0
        and packed.shape[1] > layer
        and packed[0].is_contiguous()
        and packed.data_ptr() % ALIGNMENT_BYTES == packed.stride(0) % ALIGNMENT_BYTES == 0
        and packed_table.dtype == torch.int32
        and packed_table.stride(1) == 1
        and packed_table.shape == tail_table.shape
    )


def _bound(entry: Callable[[bytes, int], int], parallel: int) -> QuantizedAttentionOp:
    pack, types = CALL.pack, TYPES

    def quantized_attention(
        q: Tensor,
        packed: Tensor,
        bits: int,
        kv: Tensor,
        layer: int,
        packed_table: Tensor,
        tail_table: Tensor,
        row_starts: Tensor,
        contexts: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        slots, layers, _, kv_heads, block_tokens, dim = kv.shape
        layout = packed_layout(kv_heads, block_tokens, dim, bits)
        if packed.shape[2] != layout.layer_bytes:
            raise ValueError(f"packed: a layer must take {layout.layer_bytes} bytes, not {packed.shape[2]}")
        if not (
            suits(q, kv, tail_table, row_starts, contexts) and _suits_packed(packed, layer, packed_table, tail_table)
        ):
            return quantized.quantized_attention(
                q, packed, bits, kv, layer, packed_table, tail_table, row_starts, contexts,
                scale=scale, window=window, softcap=softcap,
            )  # fmt: skip
        out = torch.empty(q.shape, dtype=q.dtype)
        rows, blocks = tail_table.shape
        call = pack(
            q.data_ptr(), kv.data_ptr(), out.data_ptr(),
            tail_table.data_ptr(), row_starts.data_ptr(), contexts.data_ptr(), 0, 0,
            packed.data_ptr(), packed_table.data_ptr(),
            q.stride(0), q.stride(1), kv.stride(0), tail_table.stride(0), 0, 0,
            packed.stride(0), packed_table.stride(0),
            layout.value_codes_at, layout.key_scales_at, layout.value_scales_at, layout.layer_bytes,
            q.shape[0], q.shape[1], kv_heads, dim, rows, blocks, block_tokens, slots, layers, layer, window or 0,
            torch.get_num_threads(), bits, packed.shape[0], scale, softcap or 0.0, parallel,
        )  # fmt: skip
        fault = entry(call, types[q.dtype])
        if fault:
            raise ValueError(f"quantized_attention: {FAULTS[fault]}")
        return out

    return quantized_attention
