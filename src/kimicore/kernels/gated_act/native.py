"""Gated activation in C++, in float32 and one pass over each row.

Microseconds on 2 cores of an AVX-512 server, silu over 1,536 results, native / torch, in float32 and bfloat16: 1 row
5 / 6 and 5 / 6, 8 rows 9 / 12 and 12 / 14, 32 rows 17 / 28 and 22 / 31, 512 rows 213 / 280 and 289 / 323.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from kimicore.kernels.build import load_library
from kimicore.kernels.gated_act import reference
from kimicore.kernels.ops import GatedActOp
from kimicore.kernels.team.native import parallel_entry

__all__ = ["load"]

_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_KINDS: Final = {"silu": 0, "gelu_tanh": 1}


def load() -> tuple[GatedActOp | None, str]:
    """Return the operation (called as the reference is), or None, and the reason."""
    library = load_library(Path(__file__).with_name("gated_act.cpp"))
    if library.handle is None:
        return None, library.reason
    entry = library.handle.kimicore_gated_act
    entry.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int, c_int, c_int, c_void_p)
    entry.restype = None
    return _bound(entry, parallel_entry() or 0), library.reason


def _bound(entry: Callable[..., Any], parallel: int) -> GatedActOp:
    types, kinds, threads = _TYPES, _KINDS, torch.get_num_threads

    def gated_act(gate_up: Tensor, kind: str) -> Tensor:
        dtype, act = types.get(gate_up.dtype), kinds.get(kind)
        if dtype is None or act is None or gate_up.dim() != 2 or gate_up.stride(1) != 1 or gate_up.shape[1] % 2:
            return reference.gated_act(gate_up, kind)
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty((tokens, width), dtype=gate_up.dtype)
        entry(gate_up.data_ptr(), y.data_ptr(), tokens, width, gate_up.stride(0), dtype, act, threads(), parallel)
        return y

    return gated_act
