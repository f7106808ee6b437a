"""Tenants take turns."""

from __future__ import annotations

from attrs import frozen

from kimicore.contracts import Ranking, RowView, StepCost, StepLimits, StepView
from kimicore.errors import ConfigError


@frozen
class TenantTurns:
    """Tenants take turns; each starts ``in_a_row`` requests when it is its turn, the oldest first."""

    in_a_row: int = 1
    name: str = "tenant-turns"

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.in_a_row, int) or self.in_a_row < 1:
            raise ConfigError(f"in_a_row={self.in_a_row!r}: must be an integer of at least 1")

    def start(self, limits: StepLimits) -> TenantTurnsState:
        """Return fresh state."""
        return TenantTurnsState(self.in_a_row)


def _arrival(row: RowView) -> tuple[float, int]:
    return row.arrived_s, row.request


class TenantTurnsState:
    """Counts how many requests each tenant has started, for as long as it has any."""

    def __init__(self, in_a_row: int) -> None:
        self._in_a_row = in_a_row
        self._started: dict[str, int] = {}
        self._running: frozenset[int] = frozenset()

    def rank(self, view: StepView, cost: StepCost) -> Ranking:
        """Return the running requests, then the waiting ones in turns."""
        rows = sorted((*view.running, *view.waiting), key=_arrival)
        least = min([self._started[row.tenant] for row in rows if row.tenant in self._started], default=0)
        # Who comes anew begins with those that have had the least: nobody saves up turns.
        self._started = {row.tenant: self._started.get(row.tenant, least) for row in rows}
        for row in view.running:
            if row.request not in self._running:
                self._started[row.tenant] += 1
        self._running = frozenset(row.request for row in view.running)
        order = [row.request for row in rows if row.state == "running"]
        return Ranking(order=(*order, *self._in_turns(rows)), urgency={}, chunks={})

    def _in_turns(self, rows: list[RowView]) -> list[int]:
        counts = dict(self._started)
        places = []
        for row in rows:
            if row.state == "waiting":
                places.append((counts[row.tenant] // self._in_a_row, *_arrival(row)))
                counts[row.tenant] += 1
        return [request for _, _, request in sorted(places)]
