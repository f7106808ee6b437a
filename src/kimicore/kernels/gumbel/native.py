"""Gumbel noise in C++ (``gumbel.cpp``): the same bits as the reference, and no noise tensor for a whole vocabulary."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from kimicore.kernels.build import load_library
from kimicore.kernels.gumbel.reference import gumbel

__all__ = ["NativeGumbel", "load"]

_SOURCE: Final = Path(__file__).with_name("gumbel.cpp")


def _address(x: Tensor, dtype: torch.dtype) -> int:
    if x.dtype != dtype or x.dim() != 1 or x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(f"tensor {tuple(x.shape)} of {x.dtype} on {x.device}: must be one row of {dtype} on the CPU")
    return x.data_ptr()


@frozen(eq=False)
class NativeGumbel:
    """The noise of :func:`kimicore.kernels.gumbel.reference.gumbel` from the compiled library."""

    library: ctypes.CDLL

    def __call__(self, seed: int, choice: int, position: int, ids: Tensor, /) -> Tensor:
        """Return the noise float32 [N] of the token ids int64 [N]; raises ValueError for another kind of tensor."""
        ids = ids.contiguous()
        noise = torch.empty(ids.shape, dtype=torch.float32)
        self.library.kimicore_gumbel(
            seed, choice, position, _address(ids, torch.int64), ids.numel(), _address(noise, torch.float32)
        )
        return noise

    def argmax(self, scores: Tensor, seed: int, choice: int, position: int) -> int:
        """Return the id with the largest noisy score of ``scores`` float32 [V], the lowest of equals."""
        address = _address(scores, torch.float32)
        return int(self.library.kimicore_gumbel_argmax(address, scores.numel(), seed, choice, position))


def _declare(library: ctypes.CDLL) -> None:
    seed, word, size, address = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int64, ctypes.c_void_p
    library.kimicore_gumbel.argtypes = (seed, word, word, address, size, address)
    library.kimicore_gumbel.restype = None
    library.kimicore_gumbel_argmax.argtypes = (address, size, seed, word, word)
    library.kimicore_gumbel_argmax.restype = ctypes.c_int64


def load() -> tuple[NativeGumbel | None, str]:
    """Return the compiled noise, or None, and the reason.

    A library that does not give the reference's bits (a compiler may have its own mind about arithmetic) is not used:
    the same seed has to give the same text on every machine.
    """
    library = load_library(_SOURCE)
    if library.handle is None:
        return None, library.reason
    _declare(library.handle)
    native = NativeGumbel(library.handle)
    ids = torch.arange(0, 40_000, 37)
    if not torch.equal(native(2**63 + 5, 1, 2, ids), gumbel(2**63 + 5, 1, 2, ids)):
        return None, f"{library.reason}, but its noise differs from the reference"
    return native, library.reason
