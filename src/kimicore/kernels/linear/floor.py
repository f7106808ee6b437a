"""torch's product made the same for a row in every batch: padded to the least number of rows from which it is so.

Matrix libraries pick another order of summation for few rows. Where that is all they do, padding the rows cures it; the
floor is measured on the machine, since it depends on the processor and the library.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from kimicore.kernels.linear import reference
from kimicore.kernels.ops import LinearOp

__all__ = ["PROBED_ROWS", "row_floor", "row_invariant_linear"]

PROBED_ROWS: Final = (*range(1, 34), 48, 63, 64, 65, 100, 127, 128, 200, 256, 511, 512)
_LARGEST: Final = 1024  # outputs of a probed weight: blocks of outputs do not change the order of a sum


def row_floor(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int | None:
    """Return the least number of rows from which a row's product has the same bits in every batch.

    ``shapes`` are weights' (O, C). Checked with random numbers at :data:`PROBED_ROWS`; None where no
    number of rows up to 256 does. Takes some 10 ms per shape.
    """
    floor = 1
    noise = torch.Generator().manual_seed(20)
    for outs, depth in {(min(outs, _LARGEST), depth) for outs, depth in shapes}:
        x = torch.randn(PROBED_ROWS[-1], depth, generator=noise).to(dtype)
        weight = torch.randn(outs, depth, generator=noise).to(dtype)
        full = reference.linear(x, weight)
        for rows in reversed(PROBED_ROWS[:-1]):
            if rows < floor:
                break
            # the first and the last rows: what a tile leaves over may be summed in another order
            same = torch.equal(reference.linear(x[:rows], weight), full[:rows])
            if not same or not torch.equal(reference.linear(x[-rows:], weight), full[-rows:]):
                floor = next(n for n in PROBED_ROWS if n > rows)
                break
    return floor if floor <= 256 else None


def row_invariant_linear(floor: int) -> LinearOp:
    """Return the reference product with rows padded to ``floor``."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        if rows >= floor:
            return reference.linear(x, weight, bias)
        return reference.linear(torch.nn.functional.pad(x, (0, 0, 0, floor - rows)), weight, bias)[:rows]

    return linear
