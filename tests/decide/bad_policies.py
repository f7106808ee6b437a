"""Policies that break their promises, for the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from kimicore.contracts import BlockKey, Ranking, StepCost, StepView
from kimicore.policies.eviction.lru import LruState

KINDS = ("fine", "raises", "none", "held", "root", "twice", "junk", "events")


class BadState(LruState):
    """Least recently used, except for every third question."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.asked = 0

    def added(self, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float) -> None:
        super().added(key, parent, depth_blocks, now_s)
        if self.how == "events":
            raise RuntimeError("added")

    def removed(self, key: BlockKey) -> None:
        super().removed(key)
        if self.how == "events":
            raise RuntimeError("removed")

    def victims(self, count: int, evictable: Callable[[BlockKey], bool], now_s: float) -> Any:
        self.asked += 1
        keys: list[Any] = list(self._order)
        right = super().victims(count, evictable, now_s)
        if self.asked % 3 or self.how in ("fine", "events"):
            return right
        if self.how == "raises":
            raise RuntimeError("victims")
        if self.how == "none":
            return []
        if self.how == "held":
            return [key for key in keys if key not in right][:count]
        if self.how == "root":
            return right[::-1]
        if self.how == "twice":
            return [right[0]] * count
        return [b"nonsense", 7, None][:count] + right


@frozen
class BadEviction:
    """Settings of a policy that breaks its promise ``how``."""

    how: str = "fine"
    name: str = "bad"

    def start(self, capacity_blocks: int, ghost_blocks: int, seed: int) -> BadState:
        return BadState(self.how)


class BadRanking:
    """A running batching policy that answers nonsense."""

    def __init__(self, how: str) -> None:
        self.how = how

    def rank(self, view: StepView, cost: StepCost) -> Any:
        numbers: Sequence[int] = [row.request for row in (*view.running, *view.waiting)]
        if self.how == "raises":
            raise RuntimeError("rank")
        if self.how == "missing":
            return Ranking(tuple(numbers[1:]), {}, {})
        if self.how == "twice":
            return Ranking((*numbers, *numbers), {}, {})
        if self.how == "stranger":
            return Ranking((*numbers[1:], -1), {}, {})
        return None
