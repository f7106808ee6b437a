"""First come, first served."""

from __future__ import annotations

from attrs import frozen

from kimicore.contracts import Ranking, RowView, StepCost, StepLimits, StepView

__all__ = ["Fcfs", "in_order"]


@frozen
class Fcfs:
    """Requests in the order in which they arrived, a preempted one at its old place; nobody is more urgent."""

    name: str = "fcfs"

    @property
    def starvation_bound_s(self) -> float:
        """Nobody who came later is started before one who waits."""
        return 0.0

    def start(self, limits: StepLimits) -> FcfsState:
        """Return fresh state."""
        return FcfsState()


def _arrival(row: RowView) -> tuple[float, int]:
    return row.arrived_s, row.request


def in_order(view: StepView) -> tuple[int, ...]:
    """Return the view's requests, oldest first."""
    rows = sorted((*view.running, *view.waiting), key=_arrival)
    return tuple([row.request for row in rows])


class FcfsState:
    """Remembers the last order, which holds for as long as the same requests run and wait."""

    def __init__(self) -> None:
        self._running: tuple[int, ...] = ()
        self._waiting: tuple[RowView, ...] | None = None
        self._answer = Ranking((), {}, {})

    def rank(self, view: StepView, cost: StepCost) -> Ranking:
        """Return the requests, oldest first."""
        running = tuple([row.request for row in view.running])
        if view.waiting is not self._waiting or running != self._running:
            self._answer = Ranking(in_order(view), {}, {})
            self._waiting, self._running = view.waiting, running
        return self._answer
