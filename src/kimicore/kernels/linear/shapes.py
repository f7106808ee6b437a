"""torch's 16-bit product asked for at few different numbers of rows.

Its library (oneDNN) prepares code for each shape of a product and keeps up to a thousand of them for the whole process.
An engine's steps have any number of tokens: within some minutes of mixed traffic that is half a gigabyte.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kimicore.kernels.linear import reference
from kimicore.kernels.ops import LinearOp

__all__ = ["few_shapes_linear", "row_step", "whole_rows"]

_PARTS: Final = 8  # numbers of rows between a power of two and the next
_LARGEST_STEP: Final = 128


def row_step(rows: int) -> int:
    """Return the step between the numbers of rows that are used near ``rows``: an eighth, at most 128."""
    return max(1, min(_LARGEST_STEP, (1 << (rows.bit_length() - 1)) // _PARTS))


def whole_rows(rows: int) -> int:
    """Return the largest number of rows up to ``rows`` that is used."""
    return rows // row_step(rows) * row_step(rows)


def few_shapes_linear() -> LinearOp:
    """Return the reference product with rows padded to the next number that is used, by an eighth at most."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        more = -rows % row_step(rows) if x.dim() == 2 and rows else 0
        if not more:
            return reference.linear(x, weight, bias)
        return reference.linear(torch.nn.functional.pad(x, (0, 0, 0, more)), weight, bias)[:rows]

    return linear
