"""Containing policies: late answers, hanging calls, nonsense, and being set aside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from rig import Rig, prompt_of

from kimicore import guard
from kimicore.contracts import BlockKey, Ranking, StepCost, StepLimits, StepView
from kimicore.guard import PolicyFaults, Watchdog
from kimicore.policies.eviction.lru import Lru, LruState
from kimicore.testing.clock import ManualClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The clock that calls of policies are timed with."""
    clock = ManualClock()
    monkeypatch.setattr(guard, "perf_counter", clock)
    return clock


def test_a_late_return_is_a_fault_with_its_time(clock: ManualClock):
    """A call that takes longer than the limit is a fault that tells how long it took; one in time is none."""
    faults = PolicyFaults("batching", "slow", limit_s=0.1)
    faults.begin("rank()")
    clock.advance(0.1)
    assert faults.end()
    faults.begin("rank()")
    clock.advance(0.25)
    assert not faults.end()
    assert (faults.count, faults.last) == (1, "rank() returns within 0.1 s (it took 0.25 s)")


def test_calls_without_a_limit_are_not_timed(clock: ManualClock):
    """A built-in policy's calls are never late, whatever the machine does."""
    faults = PolicyFaults("batching", "fcfs")
    faults.begin("rank()")
    clock.advance(1e6)
    assert faults.end()
    assert not Watchdog([faults]).needed


def test_the_watchdog_tells_once_where_a_call_hangs(clock: ManualClock, caplog: pytest.LogCaptureFixture):
    """The stack of a call that has not returned is logged once per call, and nothing while it may still take."""
    faults = PolicyFaults("eviction", "endless", limit_s=0.1)
    dog = Watchdog([faults], patience=10.0)
    assert dog.needed
    faults.begin("victims()")
    clock.advance(0.9)
    dog.look(0, faults)
    assert not caplog.records
    clock.advance(0.2)
    for _ in range(3):
        dog.look(0, faults)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    message = record.getMessage()
    assert "eviction policy 'endless': victims() has not returned for 1.1 s" in message
    assert "test_the_watchdog_tells_once_where_a_call_hangs" in message
    faults.end()
    faults.begin("victims()")
    clock.advance(2.0)
    dog.look(0, faults)
    assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 2


def test_the_watchdog_ends(clock: ManualClock):
    """A stopped watchdog's thread ends."""
    dog = Watchdog([PolicyFaults("eviction", "mine", limit_s=1.0)], look_s=0.001)
    dog.start()
    dog.stop()
    dog.join(10)
    assert not dog.is_alive()


class Late(LruState):
    """Names victims in the wrong order, and late."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock

    def victims(self, count: int, evictable: Callable[[BlockKey], bool], now_s: float) -> list[BlockKey]:
        self._clock.advance(1.0)
        return super().victims(count, evictable, now_s)


class Endless(LruState):
    """Names victims for ever."""

    def victims(self, count: int, evictable: Callable[[BlockKey], bool], now_s: float) -> Any:
        def forever() -> Iterator[bytes]:
            while True:
                yield b"nothing"

        return forever()


class Started(Lru):
    """Settings whose state is given."""

    def __new__(cls, state: Callable[[], LruState]) -> Any:
        made: Any = super().__new__(cls)
        return made

    def __init__(self, state: Callable[[], LruState]) -> None:
        super().__init__()
        object.__setattr__(self, "state", state)

    def start(self, capacity_blocks: int, ghost_blocks: int, seed: int) -> LruState:
        made: LruState = self.state()  # type: ignore[attr-defined]
        return made


def _fill(rig: Rig) -> None:
    for at in range(6):
        rig.submit(prompt_of(60, at), 4)
        rig.finish()


def test_a_late_eviction_policy_loses_its_say_and_nothing_else(clock: ManualClock):
    """A policy whose answers come late: the longest unused block goes instead, and requests end as they should."""
    rig = Rig(slabs=9, eviction=Started(lambda: Late(clock)))
    rig.ledger.faults.limit_s = 0.5
    _fill(rig)
    assert rig.ledger.evicted_blocks > 0
    assert rig.ledger.faults.count == min(rig.ledger.faults.limit, rig.ledger.faults.count) > 0
    assert "victims() returns within 0.5 s" in rig.ledger.faults.last
    rig.book.check_integrity()
    assert all(one.finished for one in rig.out.values())


def test_endless_victims_are_cut():
    """A policy that never stops naming victims is read for as many as were asked for."""
    rig = Rig(slabs=9, eviction=Started(Endless))
    _fill(rig)
    assert rig.ledger.evicted_blocks > 0
    assert rig.ledger.faults.count > 0
    rig.book.check_integrity()


def test_a_policy_that_is_set_aside_is_not_asked_any_more():
    """After the stated number of faults an eviction policy hears nothing more."""
    calls: list[str] = []

    class Bad(LruState):
        def touched(self, key: BlockKey, now_s: float) -> None:
            calls.append("touched")
            raise RuntimeError("no")

    rig = Rig(slabs=9, eviction=Started(Bad))
    rig.ledger.faults.limit = 3
    _fill(rig)
    assert calls == ["touched"] * 3
    assert rig.ledger.faults.set_aside
    assert rig.book.stats().policies_set_aside == ("eviction:lru",)


class Holding:
    """Holds back what it is told to."""

    name = "holding"

    def __init__(self, held: Sequence[int]) -> None:
        self.held = frozenset(held)

    def start(self, limits: StepLimits) -> Holding:
        return self

    def rank(self, view: StepView, cost: StepCost) -> Ranking:
        order = tuple(sorted(row.request for row in (*view.running, *view.waiting)))
        return Ranking(order, {}, {}, self.held)


def _planned(rig: Rig) -> set[int]:
    plan = rig.planner.plan(rig.book.view(rig.clock()), rig.cost)
    return {row.request for row in plan.rows}


def test_held_requests_wait_beside_running_ones_for_a_time():
    """A held request is not admitted while others run, until it has waited for max_wait_s; others go past it."""
    rig = Rig(max_wait_s=0.05)
    rig.planner._state = Holding([2])
    rig.submit(prompt_of(20, 1), 50)
    rig.step()
    rig.submit(prompt_of(20, 2), 5)
    rig.submit(prompt_of(20, 3), 5)
    assert _planned(rig) == {1, 3}
    rig.clock.advance(0.05)
    assert _planned(rig) == {1, 2, 3}


def test_an_idle_engine_holds_nobody():
    """Where nothing runs, a held request starts at once."""
    rig = Rig(max_wait_s=10.0)
    rig.planner._state = Holding([1])
    rig.submit(prompt_of(20, 1), 5)
    assert _planned(rig) == {1}


@pytest.mark.parametrize(
    ("urgency", "chunks", "held", "promise"),
    [
        ({1: float("nan")}, {}, frozenset(), "urgencies are finite numbers"),
        ({1: "much"}, {}, frozenset(), "rank() answers with a Ranking"),
        ({}, {1: 0}, frozenset(), "wishes for chunks are at least 1 token"),
        ({}, {1: None}, frozenset(), "rank() answers with a Ranking"),
        ({}, {}, [1], "held is a frozenset of requests"),
        (None, None, None, "held is a frozenset of requests"),
    ],
)
def test_nonsense_is_found_before_it_is_used(urgency: Any, chunks: Any, held: Any, promise: str):
    """What is no number, no wish or no set never gets into a plan; the fault names the promise."""

    class Nonsense:
        def rank(self, view: StepView, cost: StepCost) -> Ranking:
            return Ranking(tuple(row.request for row in view.waiting), urgency, chunks, held)

    rig = Rig()
    rig.planner._state = Nonsense()
    rig.submit(prompt_of(20, 1), 5)
    assert _planned(rig) == {1}
    assert rig.planner.batching_faults.last.startswith(promise)
