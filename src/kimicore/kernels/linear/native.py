"""Product with weights in C++: the same bits of a row in every batch, and faster than torch for few rows.

Microseconds on 2 cores of an AVX-512 server with bfloat16 dot products, one thread, native / torch (oneDNN, MKL);
weights of bfloat16 come from memory, as a model's do, not from a cache:

====================  =========  =========  =========  =========  =========  ============
weight [O, C]         1 row      8 rows     16 rows    32 rows    128 rows   512 rows
====================  =========  =========  =========  =========  =========  ============
float32 960 x 576     28 / 45    104 / 150  190 / 234  375 / 399             5,900 / 5,700
float32 576 x 1536    46 / 62    149 / 238  286 / 370  542 / 637             8,700 / 9,000
float32 2048 x 2048   244 / 310  751 / 1.6k 1.6k/2.4k  3.0k/3.8k             50k / 50k
bfloat16 960 x 576    66 / 155   71 / 187   122 / 227  212 / 298  758 / 766  3,000 / 2,700
bfloat16 576 x 1536   87 / 185   102 / 210  162 / 272  290 / 396  1.1k/1.1k  4,400 / 4,200
bfloat16 2048 x 2048  395 / 805  488 / 958  875 / 1.2k 1.4k/1.7k  5.1k/5.3k  21k / 20k
====================  =========  =========  =========  =========  =========  ============

So float32 is served natively at every size, and bfloat16 up to :data:`FEW_ROWS` rows, among which a row's
bits do not change.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_void_p
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kimicore.kernels.build import load_library, parallel_entry
from kimicore.kernels.ops import LinearOp

__all__ = ["FEW_ROWS", "load"]

FEW_ROWS: Final = 128
_CALL: Final = struct.Struct("4P5q")  # struct Call of linear.cpp


def load(dtype: torch.dtype) -> tuple[LinearOp | None, str]:
    """Return the operation for ``dtype`` (called as the reference is), or None, and the reason."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None, f"no native product in {str(dtype).removeprefix('torch.')}"
    library = load_library(Path(__file__).with_name("linear.cpp"))
    if library.handle is None:
        return None, library.reason
    if dtype == torch.bfloat16 and library.handle.kimicore_linear_types() != 3:
        return None, "this processor has no bfloat16 dot product"
    entry = library.handle.kimicore_linear
    entry.argtypes, entry.restype = (c_char_p, c_int, c_int, c_void_p), None
    limit = 1 << 62 if dtype == torch.float32 else FEW_ROWS
    return _bound(entry, parallel_entry() or 0, dtype, limit), library.reason


def _bound(entry: Callable[..., Any], parallel: int, dtype: torch.dtype, limit: int) -> LinearOp:
    pack, threads, torch_linear = _CALL.pack, torch.get_num_threads, torch.nn.functional.linear
    kind = int(dtype == torch.bfloat16)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        suits = x.dim() == 2 and x.shape[0] <= limit and x.dtype == weight.dtype == dtype
        if not suits or x.stride(1) != 1 or weight.stride(1) != 1 or x.shape[1] != weight.shape[1]:
            return torch_linear(x, weight, bias)
        if bias is not None and (bias.dtype != dtype or not bias.is_contiguous()):
            return torch_linear(x, weight, bias)
        rows, depth = x.shape
        outs = weight.shape[0]
        y = torch.empty((rows, outs), dtype=dtype)
        call = pack(
            x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(),
            rows, outs, depth, x.stride(0), weight.stride(0),
        )  # fmt: skip
        entry(call, kind, threads(), parallel)
        return y

    return linear
