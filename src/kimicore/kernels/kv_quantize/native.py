"""Keys and values in 8 or 4 bits in C++: the reference's bytes, blocks and heads shared among threads.

Microseconds of one thread on an AVX-512 server, a layer of 3 heads of 64 in blocks of 16 tokens of bfloat16, native /
torch: 1 block 11 / 330, 32 blocks in 8 bits 140 / 1800, in 4 bits 120 / 1900.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from ctypes import c_char_p, c_int
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kimicore.kernels.build import load_library
from kimicore.kernels.kv_quantize import reference
from kimicore.kernels.kv_quantize.layout import ALIGNMENT_BYTES, packed_layout
from kimicore.kernels.ops import KvQuantizeOp
from kimicore.kernels.team.native import parallel_entry

__all__ = ["load"]

_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CALL: Final = struct.Struct("4P7q8iP")  # struct Call of kv_quantize.cpp


def load() -> tuple[KvQuantizeOp | None, str]:
    """Return the operation (called as the reference is), or None, and the reason."""
    library = load_library(Path(__file__).with_name("kv_quantize.cpp"))
    if library.handle is None:
        return None, library.reason
    entry = library.handle.kimicore_kv_quantize
    entry.argtypes, entry.restype = (c_char_p, c_int), c_int
    return _bound(entry, parallel_entry() or 0), library.reason


def _suits(kv: Tensor, layer: int, sources: Tensor, packed: Tensor, targets: Tensor) -> bool:
    return (
        kv.dtype in _TYPES
        and kv.shape[0] > 0
        and kv[0].is_contiguous()
        and 0 <= layer < min(kv.shape[1], packed.shape[1])
        and packed.dtype == torch.uint8
        and packed.shape[0] > 0
        and packed[0].is_contiguous()
        and packed.data_ptr() % ALIGNMENT_BYTES == packed.stride(0) % ALIGNMENT_BYTES == 0
        and sources.dtype == targets.dtype == torch.int32
        and sources.shape == targets.shape
        and sources.is_contiguous()
        and targets.is_contiguous()
    )


def _bound(entry: Callable[[bytes, int], int], parallel: int) -> KvQuantizeOp:
    pack, types, threads = _CALL.pack, _TYPES, torch.get_num_threads

    def kv_quantize(kv: Tensor, layer: int, sources: Tensor, packed: Tensor, targets: Tensor, bits: int) -> None:
        slots, _, _, kv_heads, block_tokens, dim = kv.shape
        layout = packed_layout(kv_heads, block_tokens, dim, bits)
        if packed.shape[2] != layout.layer_bytes or not _suits(kv, layer, sources, packed, targets):
            return reference.kv_quantize(kv, layer, sources, packed, targets, bits)
        call = pack(
            kv.data_ptr(), packed.data_ptr(), sources.data_ptr(), targets.data_ptr(),
            kv.stride(0), packed.stride(0),
            layout.value_codes_at, layout.key_scales_at, layout.value_scales_at, layout.layer_bytes, sources.shape[0],
            slots, packed.shape[0], kv_heads, dim, block_tokens, layer, bits, threads(), parallel,
        )  # fmt: skip
        if entry(call, types[kv.dtype]):
            raise ValueError("kv_quantize: a slot lies outside of its cache")

    return kv_quantize
