"""How much attention blocks get: in which layers it is measured, and the figure that becomes of it."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from kimicore.model.kv_layout import kv_places
from kimicore.model.spec import ModelSpec

__all__ = ["MEASURED_QUERIES", "RECENT_TOKENS", "measured_layers", "relative_importance"]

MEASURED_QUERIES: Final = 16
"""So many of a row's last queries are measured."""
RECENT_TOKENS: Final = 64
"""What stands this near to a query is not compared."""
_FULL_LAYERS, _WINDOW_LAYERS = 4, 2


def measured_layers(spec: ModelSpec) -> frozenset[int]:
    """Return the layers in which attention is measured, spread over the depth of each KV class.

    They are up to four with full attention, and up to two of each window, whose blocks compete in a small range only.
    """
    chosen: list[int] = []
    owners = [kv_class for kv_class, _ in kv_places(spec)]
    for kv_class in sorted(set(owners)):
        layers = [index for index, owner in enumerate(owners) if owner == kv_class]
        most = _FULL_LAYERS if spec.layers[layers[0]].window is None else _WINDOW_LAYERS
        count = min(most, len(layers))
        chosen += [layers[(2 * at + 1) * len(layers) // (2 * count)] for at in range(count)]
    return frozenset(chosen)


def relative_importance(
    mass: NDArray[np.float32], queries: int, context: int, window: int | None, block_tokens: int
) -> NDArray[np.float32] | None:
    """Return by how much each block of a row gets more attention than the mean of those it is compared with.

    ``mass`` [N]: shares of the row's ``queries`` last queries, by block. Compared are the blocks after the first (it
    gets much whatever it holds: attention that finds nothing goes there) that end at least ``RECENT_TOKENS`` before the
    first of these queries (what stands near a query gets much, whatever it holds), as far as every query sees the whole
    block. Their values have a mean of 1; entries before them are NaN, and those behind them are left out. None where
    fewer than two blocks remain, or where they get nothing that is a number.
    """
    low, high = 1, max(0, context - queries - RECENT_TOKENS) // block_tokens
    if window is not None:
        low = max(low, -(-(context - window) // block_tokens))
    compared = mass[low:high]
    total = float(compared.sum(dtype=np.float64))
    if len(compared) < 2 or not 0.0 < total < np.inf:
        return None
    values = np.full(high, np.nan, np.float32)
    values[low:] = compared * (len(compared) / total)
    return values
