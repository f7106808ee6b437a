"""Higher priority first, with aging so that nobody waits for ever."""

from __future__ import annotations

from attrs import frozen

from kimicore.checks import float_field
from kimicore.contracts import Ranking, RowView, StepCost, StepLimits, StepView
from kimicore.errors import ConfigError

__all__ = ["Priority"]


@frozen
class Priority:
    """The higher number first; a request gains one step of priority for every ``aging_s`` seconds since it arrived.

    The bound: a request of priority p is overtaken only by requests of a priority q > p that arrive within
    ``(q - p) * aging_s`` seconds after it; from then on it stands before all newcomers of q. Requests of a higher
    priority that also stand before it may preempt it; equals never preempt each other.
    """

    aging_s: float = float_field(5.0, 0.0, 86400.0, fault=ConfigError, above=True)
    name: str = "priority"

    @property
    def starvation_bound_s(self) -> float:
        """A step of priority is made up for by so many seconds of waiting."""
        return self.aging_s

    def start(self, limits: StepLimits) -> PriorityState:
        """Return fresh state."""
        return PriorityState(self.aging_s)


class PriorityState:
    """Priority plus age over ``aging_s`` grows alike for all, so the order does not change while they wait."""

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._running: tuple[int, ...] = ()
        self._waiting: tuple[RowView, ...] | None = None
        self._answer = Ranking((), {}, {})

    def _key(self, row: RowView) -> tuple[float, float, int]:
        return row.arrived_s - row.priority * self._aging_s, row.arrived_s, row.request

    def rank(self, view: StepView, cost: StepCost) -> Ranking:
        """Return the requests by aged priority; their urgency is the priority they came with."""
        running = tuple([row.request for row in view.running])
        if view.waiting is not self._waiting or running != self._running:
            rows = sorted((*view.running, *view.waiting), key=self._key)
            urgency = {row.request: float(row.priority) for row in rows}
            self._answer = Ranking(tuple([row.request for row in rows]), urgency, {})
            self._waiting, self._running = view.waiting, running
        return self._answer
