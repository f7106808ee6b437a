"""How much attention blocks get: whose is measured in a step, and what the eviction policy is told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kimicore.types import BoundRow

if TYPE_CHECKING:
    from kimicore.ledger import Ledger
    from kimicore.requests import Request

__all__ = ["Importance"]

NEWEST_WEIGHT = 0.25
"""How much of a block's mean the newest measurement is."""


class Importance:
    """What is known of the attention that requests' blocks get; 1 is the mean of those that were compared.

    ``every``: in each step whose number this divides, all rows are measured, and in every other step those that reach
    the end of their prompt, since the end of a prompt says most about it and short answers would often be missed. 0
    measures nothing. ``table``: per KV class a value by the block's place in its sequence, told of blocks that were not
    measured; those without a value (NaN) and those beyond the table are not told.
    """

    def __init__(self, every: int, table: Sequence[Sequence[float]] = ()) -> None:
        self._every = every
        self._table = tuple(np.asarray(values, np.float32) for values in table)

    def measured(self, number: int, rows: Sequence[BoundRow], requests: Mapping[int, Request]) -> tuple[int, ...]:
        """Return the indices of the rows whose attention step ``number`` measures."""
        if not self._every:
            return ()
        whole = number % self._every == 0
        return tuple(
            [
                index
                for index, row in enumerate(rows)
                if (whole or (row.plan.count > 1 and row.sample)) and requests[row.plan.request].attention is not None
            ]
        )

    def hear(self, request: Request, found: Sequence[Sequence[float] | None]) -> None:
        """Take in what a step measured for a request: per KV class a value by block, NaN: not compared."""
        means = request.attention
        if means is None:
            return
        for kind, values in enumerate(found):
            if values is not None:
                fresh = np.asarray(values, np.float32)
                before = means[kind]
                means[kind] = fresh if before is None else _averaged(before, fresh)

    def tell(self, ledger: Ledger, kind: int, request: Request, low: int, high: int) -> None:
        """Tell the policy of blocks ``[low, high)`` of a request's table, which it has let go of."""
        if request.attention is None:
            return
        values = self._values(kind, request.attention[kind], low, high)
        if values is None:
            return
        pairs = [(slot, one) for slot, one in zip(request.tables[kind][low:high], values, strict=True) if one == one]
        if pairs:
            ledger.importance(kind, [slot for slot, _ in pairs], [one for _, one in pairs])

    def _values(self, kind: int, mean: NDArray[np.float32] | None, low: int, high: int) -> list[float] | None:
        if mean is None and not self._table:
            return None
        values = np.full(high - low, np.nan, np.float32)
        if self._table:
            fixed = self._table[kind][low:high]
            values[: len(fixed)] = fixed
        if mean is not None:
            own = mean[low:high]
            np.copyto(values[: len(own)], own, where=~np.isnan(own))
        found: list[float] = values.tolist()
        return found


def _averaged(before: NDArray[np.float32], fresh: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the means once ``fresh`` is taken in; a block that only one of them knows has that value."""
    size = max(len(before), len(fresh))
    both = np.full((2, size), np.nan, np.float32)
    both[0, : len(before)], both[1, : len(fresh)] = before, fresh
    mean: NDArray[np.float32] = both[0] + np.float32(NEWEST_WEIGHT) * (both[1] - both[0])
    alone = np.isnan(mean)
    mean[alone] = np.where(np.isnan(both[0]), both[1], both[0])[alone]
    return mean
