"""Batching policies that each break one promise; ``Good`` breaks none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, frozen

from kimicore.contracts import Ranking, RowView, StepCost, StepLimits, StepView


def arrival(row: RowView) -> tuple[float, int]:
    return row.arrived_s, row.request


def ranking(rows: list[RowView], **more: Any) -> Ranking:
    return Ranking(**{"order": tuple([row.request for row in rows]), "urgency": {}, "chunks": {}, **more})


class GoodState:
    """First come, first served."""

    def rows(self, view: StepView) -> list[RowView]:
        return sorted((*view.running, *view.waiting), key=arrival)

    def rank(self, view: StepView, cost: StepCost) -> Any:
        return ranking(self.rows(view))


class Raises(GoodState):
    def rank(self, view: StepView, cost: StepCost) -> Any:
        if any(row.priority < 0 for row in view.waiting):
            raise ValueError("negative priority")
        return super().rank(view, cost)


class Forgets(GoodState):
    def rows(self, view: StepView) -> list[RowView]:
        return [row for row in super().rows(view) if row.tenant != "c"]


class Doubles(GoodState):
    def rows(self, view: StepView) -> list[RowView]:
        rows = super().rows(view)
        return [*rows, rows[0]] if rows[0].tenant == "c" else rows


class EmptyChunks(GoodState):
    def rank(self, view: StepView, cost: StepCost) -> Any:
        rows = self.rows(view)
        return ranking(rows, chunks={row.request: row.known_tokens - row.computed_tokens - 1 for row in rows})


class EndlessUrgency(GoodState):
    def rank(self, view: StepView, cost: StepCost) -> Any:
        rows = self.rows(view)
        return ranking(rows, urgency={row.request: float("nan") for row in rows if row.prompt_tokens == 900})


class OldWishes(GoodState):
    """Wishes for requests that are gone."""

    def __init__(self) -> None:
        self.chunks: dict[int, int] = {}

    def rank(self, view: StepView, cost: StepCost) -> Any:
        rows = self.rows(view)
        self.chunks.update({row.request: 256 for row in rows})
        return ranking(rows, chunks=dict(self.chunks))


class HoldsRunning(GoodState):
    def rank(self, view: StepView, cost: StepCost) -> Any:
        rows = self.rows(view)
        return ranking(rows, held=frozenset(row.request for row in rows if row.prompt_tokens < 16))


class Changes(GoodState):
    def rank(self, view: StepView, cost: StepCost) -> Any:
        for row in view.waiting:
            object.__setattr__(row, "priority", row.priority + 1)
        return super().rank(view, cost)


class ByTenantSet(GoodState):
    def rows(self, view: StepView) -> list[RowView]:
        rows = super().rows(view)
        return [row for tenant in {row.tenant for row in rows} for row in rows if row.tenant == tenant]


class StrictPriority(GoodState):
    def rows(self, view: StepView) -> list[RowView]:
        return sorted(super().rows(view), key=lambda row: -row.priority)


class OneClass(GoodState):
    """Knows models with one class of KV blocks only."""

    def rank(self, view: StepView, cost: StepCost) -> Any:
        (free_blocks,) = view.free_blocks
        return super().rank(view, cost) if free_blocks else ranking(self.rows(view))


@frozen
class Good:
    """Settings that start a given state."""

    state: Callable[[], Any] = GoodState
    starvation_bound_s: float | None = 0.0
    name: str = "planted"

    def start(self, limits: StepLimits) -> Any:
        return self.state()


@define
class Mutable:
    """Settings that can be changed."""

    name: str = "planted"

    def start(self, limits: StepLimits) -> GoodState:
        return GoodState()


BAD: list[tuple[str, Callable[[], Any]]] = [
    ("settings", Mutable),
    ("never-raises", lambda: Good(Raises)),
    ("complete", lambda: Good(Forgets, None)),
    ("complete", lambda: Good(Doubles, None)),
    ("wishes", lambda: Good(EmptyChunks, None)),
    ("wishes", lambda: Good(EndlessUrgency)),
    ("wishes", lambda: Good(OldWishes)),
    ("held", lambda: Good(HoldsRunning, None)),
    ("unchanged", lambda: Good(Changes, None)),
    ("repeatable", lambda: Good(ByTenantSet, None)),
    ("starvation", lambda: Good(StrictPriority, 1.0)),
    ("starvation", lambda: Good(GoodState, -1.0)),
    ("engine", lambda: Good(OneClass, None)),
]
