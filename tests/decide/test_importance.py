"""What the eviction policy hears of the attention that blocks get: from whom, when, and nothing else."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from attrs import evolve, field, frozen

from kimicore.contracts import BlockKey
from kimicore.importance import NEWEST_WEIGHT, Importance
from kimicore.policies.eviction.activity_importance import ActivityImportance
from kimicore.policies.eviction.lru import LruState
from kimicore.types import BoundStep, StepResult

from .rig import Rig, kv_class

Value = Callable[[int, int, int], float]  # of a request's number, a block, and how often it was measured


class Heard:
    """Least recently used, with a list of what it was told; importance is told of blocks that it knows alone."""

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.lru = LruState()
        self.victims = self.lru.victims
        self.log = log
        self.known: set[BlockKey] = set()

    def added(self, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float) -> None:
        self.known.add(key)
        self.log.append(("use", depth_blocks))
        self.lru.added(key, parent, depth_blocks, now_s)

    def touched(self, key: BlockKey, now_s: float) -> None:
        self.log.append(("use", None))
        self.lru.touched(key, now_s)

    def removed(self, key: BlockKey) -> None:
        self.known.discard(key)
        self.lru.removed(key)

    def importance(self, keys: Sequence[BlockKey], values: Sequence[float]) -> None:
        assert keys and len(keys) == len(set(keys)) == len(values) and self.known.issuperset(keys)
        self.log.append(("importance", list(values)))


@frozen
class Listener:
    """Settings of :class:`Heard`; ``log`` holds what its states hear."""

    log: list[tuple[Any, ...]] = field(factory=list)
    name: str = "listener"

    def start(self, capacity_blocks: int, ghost_blocks: int, seed: int) -> Heard:
        """Return fresh state."""
        return Heard(self.log)

    @property
    def values(self) -> list[list[float]]:
        """What was told of importance, call after call."""
        return [one[1] for one in self.log if one[0] == "importance"]


class Measuring:
    """A runner around the rig's that measures ``value`` for the blocks of a measured row but the first and the last."""

    def __init__(self, rig: Rig, value: Value) -> None:
        self.inner, self.value = rig.runner, value
        self.counts: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, step: BoundStep) -> StepResult:
        result = self.inner.run(step)
        found: list[Any] = [None] * len(step.rows)
        for index in step.measured:
            row = step.rows[index]
            count = self.counts[row.plan.request] = self.counts.get(row.plan.request, 0) + 1
            found[index] = [
                [math.nan, *[self.value(row.plan.request, at, count) for at in range(1, len(table) - 1)]]
                for table in row.tables
            ]
        return evolve(result, importance=tuple(found))


def rig(value: Value = lambda request, block, count: 1.0, every: int = 1000, **more: Any) -> tuple[Rig, Listener]:
    listener = Listener()
    made = Rig(eviction=listener, **{"importance": Importance(every), **more})
    made.runner = Measuring(made, value)  # type: ignore[assignment]
    return made, listener


def test_told_after_the_uses() -> None:
    """When a request lets go of its blocks, the policy first hears of their use, then of what was measured."""
    one, heard = rig(lambda request, block, count: float(block))
    one.run(range(70), 4)
    assert heard.log == [*[("use", at) for at in (3, 2, 1, 0)], ("importance", [1.0, 2.0, 3.0])]


def test_newer_measurements_weigh_more() -> None:
    """What is told is a mean in which each newer measurement has the same share, and older ones fade."""
    one, heard = rig(lambda request, block, count: {1: 1.0, 2: 3.0, 3: 2.0}[count], every=1)
    one.run(range(40), 3)
    mean = 1.0
    for value in (3.0, 2.0):
        mean += NEWEST_WEIGHT * (value - mean)
    assert heard.values == [[pytest.approx(mean)]]


def test_only_so_many_steps_are_measured() -> None:
    """Every Nth step measures all rows, and the others those that reach the end of their prompt."""
    one, _ = rig(every=4, max_batch_tokens=64)
    one.submit(range(100), 12)
    one.submit(range(20), 12)
    one.finish()
    for step in one.steps:
        ends = {at for at, row in enumerate(step.rows) if row.plan.count > 1 and row.sample}
        assert set(step.measured) == (set(range(len(step.rows))) if step.number % 4 == 0 else ends)
    assert sum(bool(step.measured) for step in one.steps) < len(one.steps) / 2


@pytest.mark.parametrize("importance", [None, Importance(0), Importance(0, [[]])])
def test_off(importance: Importance | None) -> None:
    """Where it is off no row is measured, and the policy hears of uses alone, even from a runner that measures."""
    one, heard = rig(importance=importance)
    one.run(range(70), 4)
    assert not any(step.measured for step in one.steps)
    assert heard.log == [("use", at) for at in (3, 2, 1, 0)]


def test_private_requests_are_not_measured() -> None:
    """A request that shares no cache is never measured, and nothing is told of it."""
    one, heard = rig(every=1)
    one.submit(range(70), 4, use_cache=False)
    one.submit(range(100, 170), 4)
    one.finish()
    private = [at for step in one.steps for at in step.measured if step.rows[at].plan.request == 1]
    assert private == [] and len(heard.values) == 1


@pytest.mark.parametrize("end", ["cancelled", "cancelled in a step", "expired", "failed", "step failed"])
@pytest.mark.parametrize("table", [[], [[1.0, 2.0, 3.0]]], ids=["measured", "table"])
def test_who_does_not_finish_tells_nothing(end: str, table: list[list[float]]) -> None:
    """A request that is cancelled, expires or fails tells nothing of importance, measured or from the table, of blocks
    of its own or of those that it found."""
    fails = [False]
    one, heard = rig(importance=Importance(1, table), fault=lambda row: OSError("row") if fails[0] else None)
    one.run(range(40), 1)
    heard.log.clear()
    number = one.submit(range(70), 8, timeout_s=10.0 if end == "expired" else None)
    for _ in range(4):
        one.step()
    fails[0] = end == "failed"
    bound = one.bind()
    if end == "cancelled in a step":
        one.book.cancel(number)
    if end == "step failed":
        one.take(one.book.fail_all(OSError("step")))
    else:
        one.commit(bound)
    if end == "cancelled":
        one.book.cancel(number)
    if end == "expired":
        one.clock.advance(20.0)
        one.take(one.book.expire(one.clock()))
    one.finish()
    one.book.check_integrity()
    assert heard.values == []


def test_preempted_requests_tell_and_begin_anew() -> None:
    """A request that gives way tells what was measured so far, and after it only what is measured since."""
    value = 3.0
    one, heard = rig(lambda request, block, count: value, every=1)
    number = one.submit(range(70), 20)
    for _ in range(5):
        one.step()
    one.book._roster.preempt(one.book._roster.running[number])
    value = 7.0
    one.finish()
    one.assert_right(number)
    assert [set(values) for values in heard.values] == [{3.0}, {7.0}]


def test_the_table_serves_what_was_not_measured() -> None:
    """A block that was not measured has the table's value of its place, and none beyond the table or where it has
    none."""
    table = [5.0, math.nan, 7.0, 8.0]
    one, heard = rig(importance=Importance(0, [table]))
    one.run(range(100), 4)
    assert heard.values == [[5.0, 7.0, 8.0]]
    one, heard = rig(lambda request, block, count: float(block), importance=Importance(1000, [table]))
    one.run(range(100), 4)
    assert heard.values == [[5.0, 1.0, 2.0, 3.0, 4.0, 5.0]]


def test_hits_are_told_as_well() -> None:
    """Blocks that a request found in the cache are told with what it gave them."""
    one, heard = rig(lambda request, block, count: 10.0 * request + block)
    one.run(range(70), 4)
    one.run(range(70), 4)
    assert heard.values == [[11.0, 12.0, 13.0], [21.0, 22.0, 23.0]]


def test_blocks_that_leave_a_window() -> None:
    """Blocks that leave a window are told of when they are let go, and each class by its own values."""
    classes = (kv_class("full"), kv_class("window", window=48))
    one, heard = rig(lambda request, block, count: float(block), every=1, classes=classes)
    one.run(range(130), 4)
    told = sorted(value for values in heard.values for value in values)
    assert told == sorted([*map(float, range(1, 8)), *map(float, range(1, 8))])
    assert len(heard.values) > 2


def test_a_block_of_more_attention_stays_longer() -> None:
    """Of two sequences used alike, activity-importance drops the one that got less attention, whichever came first."""
    for favourite in (1, 2):
        one = Rig(slabs=14, eviction=ActivityImportance(), importance=Importance(1000))
        one.runner = Measuring(one, lambda request, block, count, best=favourite: 4.0 if request == best else 0.25)  # type: ignore[assignment]
        for start in (0, 200):
            one.run(range(start, start + 70), 4)
        one.run(range(400, 510), 4)
        first, second = (one.submit(range(start, start + 70), 1) for start in (0, 200))
        one.step()
        hits = {row.plan.request: row.plan.start for row in one.steps[-1].rows}
        assert (hits[first] > hits[second]) == (favourite == 1), (favourite, hits)


@pytest.mark.parametrize("seed", range(4))
def test_any_history(seed: int) -> None:
    """Through twins, hits, preemptions, cancels and evictions only known blocks are told, and the books agree."""
    source = random.Random(seed)
    classes = (kv_class("full"), kv_class("window", window=40)) if seed % 2 else ()
    one, heard = rig(
        lambda request, block, count: source.choice((0.0, 1.0, math.nan, 3.0)),
        every=2,
        slabs=40,
        classes=classes,
        importance=Importance(2, [[2.0] * 3] * max(1, len(classes))),
    )
    for _ in range(300):
        if source.random() < 0.3 and one.book.waiting_requests < 6:
            length = source.randrange(1, 120)
            one.submit([source.randrange(2)] * length, source.randrange(1, 30), use_cache=source.random() < 0.9)
        if source.random() < 0.05 and one.book._roster.requests:
            one.book.cancel(source.choice(list(one.book._roster.requests)))
        if not one.book.idle:
            one.step()
    one.finish()
    one.assert_empty()
    assert one.ledger.faults.count == 0 and len(heard.values) > 20
