"""Product with weights in C++: the same bits of a row in every batch, and seldom slower than torch.

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

So float32 is served natively at every size, and bfloat16 there up to 128 rows, among which a row's bits do not change.
Of more rows torch gets as many as :mod:`kimicore.kernels.linear.shapes` says, and the rest is served natively.

The same on a busy machine with AVX2 and no AVX-512 (Zen 3; one thread's time on the processor), where torch's bfloat16
product takes 1.2 to 2 times as long as the native one for 1 row, 4 times for 8 and 4 to 8 times for more:

====================  ===========  ===========  ===========  ===========  ===========  ===========
weight [O, C]         1 row        8 rows       16 rows      32 rows      128 rows     512 rows
====================  ===========  ===========  ===========  ===========  ===========  ===========
float32 960 x 576     250 / 297    350 / 557    519 / 659    999 / 971    2,800/2,900  9,000/9,500
float32 576 x 1536    260 / 322    480 / 788    778 / 1.0k   1.2k/1.4k    3,300/3,800  14k / 14k
float32 2048 x 2048   1.2k/1.5k    2.2k/5.9k    3.3k/7.1k    6.4k/9.7k    17k / 24k    67k / 81k
bfloat16 960 x 576    148          297          525          955          2,700        10k
bfloat16 576 x 1536   154          322          648          1.4k         3,700        15k
bfloat16 2048 x 2048  679          1.5k         3.4k         5.9k         16k          62k
====================  ===========  ===========  ===========  ===========  ===========  ===========

There every type is served at every number of rows; 16-bit weights are widened as they are read, so that few rows take
less time than with float32 weights.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kimicore.kernels.build import load_library
from kimicore.kernels.linear.shapes import whole_rows
from kimicore.kernels.ops import LinearOp
from kimicore.kernels.team.native import parallel_entry

__all__ = ["ALL_ROWS", "load", "most_rows"]

ALL_ROWS: Final = (1 << 63) - 1
_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_CALL: Final = struct.Struct("4P6q")  # struct Call of call.h


def load(dtype: torch.dtype) -> tuple[LinearOp | None, str]:
    """Return the operation for ``dtype`` (called as the reference is), or None, and the reason."""
    if dtype not in _TYPES:
        return None, f"no native product in {_name(dtype)}"
    library = load_library(Path(__file__).with_name("linear.cpp"))
    if library.handle is None:
        return None, library.reason
    rows = most_rows(dtype)
    if rows == 0:
        return None, f"none in {_name(dtype)} that is faster than torch on this processor"
    entry = library.handle.kimicore_linear
    entry.argtypes, entry.restype = (c_char_p, c_int, c_int, c_void_p), c_int
    return _bound(entry, parallel_entry() or 0, dtype, rows), library.reason


def most_rows(dtype: torch.dtype) -> int:
    """Return up to how many rows the native product serves ``dtype``; torch serves more.

    :data:`ALL_ROWS` where it always serves, 0 where it does not.
    """
    library = load_library(Path(__file__).with_name("linear.cpp"))
    if library.handle is None or dtype not in _TYPES:
        return 0
    limit = library.handle.kimicore_linear_rows
    limit.argtypes, limit.restype = (c_int,), c_int64
    return int(limit(_TYPES[dtype]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bound(entry: Callable[..., int], parallel: int, dtype: torch.dtype, limit: int) -> LinearOp:
    pack, threads, torch_linear = _CALL.pack, torch.get_num_threads, torch.nn.functional.linear
    kind = _TYPES[dtype]

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        suits = x.dim() == 2 and x.dtype == weight.dtype == dtype
        if not suits or x.stride(1) != 1 or weight.stride(1) != 1 or x.shape[1] != weight.shape[1]:
            return torch_linear(x, weight, bias)
        if bias is not None and (bias.dtype != dtype or not bias.is_contiguous()):
            return torch_linear(x, weight, bias)
        rows, depth = x.shape
        outs = weight.shape[0]
        done = whole_rows(rows) if rows > limit else 0  # by torch; what is over that is little, and served here
        if done == rows:
            return torch_linear(x, weight, bias)
        y = torch.empty((rows, outs), dtype=dtype)
        if done:
            if bias is None:
                torch.mm(x[:done], weight.t(), out=y[:done])
            else:
                torch.addmm(bias, x[:done], weight.t(), out=y[:done])
        call = pack(
            x.data_ptr() + 2 * done * x.stride(0), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
            y.data_ptr() + 2 * done * outs, rows - done, outs, depth, x.stride(0), weight.stride(0), outs,
        )  # fmt: skip
        if entry(call, kind, threads(), parallel):
            raise MemoryError(f"linear: no memory to pack {rows} rows of {depth}")
        return y

    return linear
