"""How many rows each way to multiply with a weight in tiles is the fastest for, measured on the machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from kimicore.kernels.packed_linear.layout import PackedWeight, pack_codes
from kimicore.kernels.packed_linear.tiled import TiledWeight, tiled

__all__ = ["WIDE_BLOCK", "Crossover", "measure_crossover", "split"]

ALL: Final = (1 << 63) - 1
FEW: Final = (1, 2, 3, 4, 6, 8, 16)
SOME: Final = (8, 16, 24, 32, 64)
WIDE_BLOCK: Final = 64
"""Columns from which on a block counts as wide: fewer sums are scaled."""
_OUTS, _DEPTH = 2048, 1024
_TRIES: Final = 5

Product = Callable[[Tensor, TiledWeight, int, int], Tensor]
"""Called with x, the weight, and the largest numbers of rows for the first way and for the second."""


@frozen
class Crossover:
    """Up to ``few`` rows by dot products of bytes, up to ``some`` by tiles of codes, more by the unpacked weight."""

    few: int
    some: int


def _least(product: Product, x: Tensor, weight: TiledWeight, ways: tuple[tuple[int, int], ...]) -> list[float]:
    """Return the least seconds of each way, tried in turns."""
    best = [float("inf")] * len(ways)
    for _ in range(_TRIES):
        for at, (few, some) in enumerate(ways):
            begun = time.perf_counter()
            product(x, weight, few, some)
            best[at] = min(best[at], time.perf_counter() - begun)
    return best


def split(counts: tuple[int, ...], seconds: list[list[float]], least: int) -> int:
    """Return the number of rows up to which the first way is to be taken; ``least`` where it is for none of ``counts``.

    ``seconds``: of the first way and the second, by number of rows. The split loses the least against the faster way at
    each number, in ratios, so that a single figure that is out of line moves it by no more than it weighs.
    """
    gains = [math.log(second / first) for first, second in seconds]
    totals = [sum(gains[:end]) for end in range(len(counts) + 1)]
    best = max(range(len(totals)), key=totals.__getitem__)
    return counts[best - 1] if best else least


def measure_crossover(product: Product, whole_bytes: bool, wide: bool) -> Crossover:
    """Return the numbers of rows up to which the first way, and then the second, is the fastest, in some 50 ms.

    That is for weights of 8 bits or of fewer, and with wide blocks or narrow ones.
    """
    bits, block = 8 if whole_bytes else 4, WIDE_BLOCK if wide else WIDE_BLOCK // 2
    noise = torch.Generator().manual_seed(11)
    codes = torch.randint(0, 1 << bits, (_OUTS, _DEPTH), generator=noise, dtype=torch.uint8)
    scales = torch.rand((_OUTS, _DEPTH // block), generator=noise).half()
    packed = pack_codes(codes, bits)
    weight = tiled(PackedWeight(_OUTS, _DEPTH, bits, block, packed, scales, zero=1 << bits - 1))
    x = torch.randn((max(*FEW, *SOME), _DEPTH), generator=noise).to(torch.bfloat16)

    def seconds(counts: tuple[int, ...], *ways: tuple[int, int]) -> list[list[float]]:
        return [_least(product, x[:rows], weight, ways) for rows in counts]

    few = split(FEW, seconds(FEW, (ALL, ALL), (0, ALL)), 0)
    return Crossover(few, max(few, split(SOME, seconds(SOME, (0, ALL), (0, 0)), few)))
