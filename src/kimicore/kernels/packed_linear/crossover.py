"""How many rows each way to multiply with a weight in tiles is the fastest for, measured on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from kimicore.kernels.packed_linear.layout import PackedWeight, pack_codes
from kimicore.kernels.packed_linear.tiled import TiledWeight, tiled

__all__ = ["Crossover", "measure_crossover"]

ALL: Final = (1 << 63) - 1
FEW: Final = (2, 3, 4, 6, 8, 12, 16)
SOME: Final = (24, 32, 64, 128, 256)
_OUTS, _DEPTH, _GROUP = 1024, 512, 64
_TRIES: Final = 5

Product = Callable[[Tensor, TiledWeight, int, int], Tensor]
"""Called with x, the weight, and the largest numbers of rows for the first way and for the second."""


@frozen
class Crossover:
    """Up to ``few`` rows by dot products of bytes, up to ``some`` by tiles of codes, more by the unpacked weight."""

    few: int
    some: int


def _fastest(product: Product, x: Tensor, weight: TiledWeight, few: int, some: int) -> float:
    best = float("inf")
    for _ in range(_TRIES):
        begun = time.perf_counter()
        product(x, weight, few, some)
        best = min(best, time.perf_counter() - begun)
    return best


def measure_crossover(product: Product) -> Crossover:
    """Return the numbers of rows up to which the first way, and then the second, is faster than the next.

    Takes some 30 ms.
    """
    noise = torch.Generator().manual_seed(11)
    codes = torch.randint(0, 16, (_OUTS, _DEPTH), generator=noise, dtype=torch.uint8)
    scales = torch.rand((_OUTS, _DEPTH // _GROUP), generator=noise).half()
    weight = tiled(PackedWeight(_OUTS, _DEPTH, 4, _GROUP, pack_codes(codes, 4), scales, zero=8))
    x = torch.randn((SOME[-1], _DEPTH), generator=noise).to(torch.bfloat16)

    def last(counts: tuple[int, ...], least: int, first: tuple[int, int], second: tuple[int, int]) -> int:
        for rows in counts:
            if _fastest(product, x[:rows], weight, *first) > _fastest(product, x[:rows], weight, *second):
                return least
            least = rows
        return least

    few = last(FEW, 1, (ALL, ALL), (0, ALL))
    return Crossover(few, last(SOME, few, (0, ALL), (0, 0)))
