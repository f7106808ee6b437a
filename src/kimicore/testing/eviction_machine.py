"""The state machine behind the checks of eviction policies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kimicore.testing.cache_drive import CacheDrive, call_victims
from kimicore.testing.promises import Judge, Story

__all__ = ["EvictionMachine"]

# Part of every rule, since a search may leave single rules out.
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
REPLAYED = 25  # events: longer histories are replayed once, at their end
WAITS_S = st.sampled_from([0.0, 0.01, 1.0, 90.0, 4000.0])
VALUES = st.sampled_from([0.0, 0.1, 1.0, 3.5, 100.0])


class EvictionMachine(RuleBasedStateMachine):
    """Requests come and go, share prefixes and evict; ``promises`` are looked at.

    What is drawn never depends on what the policy answered, so that a policy that is not repeatable is found as one.
    """

    def __init__(self, maker: Callable[[], Any], promises: Collection[str]) -> None:
        super().__init__()
        self.maker = maker
        self.story = Story()
        self.judge = Judge(promises, self.story)

    @initialize(capacity=st.integers(4, 12), ghosts=st.sampled_from([0, 4, 40]), rooted=st.sampled_from([True, False]))
    def start(self, capacity: int, ghosts: int, rooted: bool) -> None:
        """Begin with an empty cache."""
        salts = (0, 1) if self.judge.looks_at("repeatable") else (0,)
        self.drive = CacheDrive(self.maker, self.judge, capacity, ghosts, rooted=rooted, salts=salts)

    @rule(path=PATHS, done=st.sampled_from([True, True, False]), seconds=WAITS_S)
    def use(self, path: list[int], done: bool, seconds: float) -> None:
        """A request comes after a while, and mostly goes at once."""
        self.drive.wait(seconds)
        self.drive.use(path, done=done)

    @rule(pick=st.integers(0, 7), path=PATHS)
    def finish(self, pick: int, path: list[int]) -> None:
        """A running request goes and another one comes."""
        self.drive.finish(pick)
        self.drive.use(path, done=True)

    @rule(count=st.integers(1, 6), path=PATHS)
    def evict(self, count: int, path: list[int]) -> None:
        """A request comes and goes, and blocks are needed elsewhere."""
        self.drive.use(path, done=True)
        if len(self.drive.history) <= REPLAYED:
            self._compare_orders()
        self.drive.evict(count)

    @rule(pick=st.integers(0, 30), path=PATHS)
    def forget(self, pick: int, path: list[int]) -> None:
        """A block and what follows it are dropped without being named."""
        self.drive.forget(pick)
        self.drive.use(path, done=True)

    @rule(pairs=st.lists(st.tuples(st.integers(0, 30), VALUES), min_size=1, max_size=4), path=PATHS)
    def importance(self, pairs: list[tuple[int, float]], path: list[int]) -> None:
        """A request comes and goes, and attention is told."""
        self.drive.use(path, done=True)
        self.drive.importance([pick for pick, _ in pairs], [value for _, value in pairs])

    def teardown(self) -> None:
        """Look at the order once more, at the end of a long history."""
        if not self.judge.over and hasattr(self, "drive"):
            self._compare_orders()

    def _compare_orders(self) -> None:
        """Ask fresh states with the same history for few and for all: the few are where the all begin."""
        if not self.judge.looks_at("order"):
            return
        drive = self.drive
        there = len(drive.model.idle)
        if not there:
            return
        asker = drive.model.asker()
        everything = call_victims(drive.replayed(drive.history), there, asker, drive.now_s)
        for count in {1, max(1, there // 2)}:
            few = call_victims(drive.replayed(drive.history), count, asker, drive.now_s)
            if few != everything[: len(few)]:
                self.judge.broken(
                    "order", f"asked for {there} blocks it names {everything}, and asked for {count} instead {few}"
                )
