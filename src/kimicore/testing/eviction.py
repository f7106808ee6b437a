"""The conformance kit of eviction policies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from kimicore.contracts import Eviction, EvictionState
from kimicore.testing.cache_drive import CacheDrive
from kimicore.testing.engine_check import check_in_engine
from kimicore.testing.footprint import Footprint
from kimicore.testing.promises import Check, Effort, Judge, Story, Together, explore, explore_machine, named
from kimicore.testing.settings_check import check_settings

__all__ = ["check_eviction"]

PROMISES = {
    "settings": "the settings are a frozen record with a name, and each start() gives a state of its own",
    "never-raises": "no event that the engine may tell makes it raise",
    "evictable": "every victim is a cached block that nobody holds",
    "distinct": "no block is named twice in one answer",
    "leaf-first": "a block is named only after the blocks that follow it in their sequences",
    "enough": "exactly as many blocks are named as were asked for, or all that can go where there are fewer",
    "asks": "evictable() is asked only about blocks that it was told of and that were not removed since",
    "order": "the blocks stand in one order: those named when few are asked for are the first of those named for many",
    "recent": "of two blocks with the same history, the one used later is never named first",
    "important": "a block that was told a higher importance, all else being equal, is never named earlier",
    "bounded": "it remembers at most capacity_blocks + ghost_blocks blocks, however many come",
    "repeatable": "the same events give the same answers, in every process",
    "engine": "in the engine's own book and ledger it serves real traffic without a fault",
}
_BY_MACHINE = ("never-raises", "evictable", "distinct", "leaf-first", "enough", "asks", "order", "repeatable")


def check_eviction(maker: Callable[[], Eviction], *, examples: int = 60, steps: int = 30, seed: int = 0) -> list[Check]:
    """Return the checks of an eviction policy, one for each promise of :class:`~kimicore.contracts.EvictionState`.

    ``maker``: called without arguments, returns the settings: the class itself, or a function that gives some.
    ``examples``, ``steps``: how many histories each check tries and how many events one has; ``seed`` chooses them.
    Under pytest: ``@pytest.mark.parametrize("check", check_eviction(MyPolicy), ids=str)`` over a test that calls
    ``check()``. Nothing runs before that.
    """
    effort = Effort(examples, steps, seed, shrinks=400)
    searches: dict[str, Callable[[], None]] = {
        "settings": lambda: check_settings("eviction", maker, lambda made: made.start(8, 32, 0), EvictionState),
        "recent": lambda: explore(partial(_recent, maker), effort, **_recent_values()),
        "important": lambda: explore(partial(_important, maker), effort, **_important_values()),
        "bounded": lambda: _bounded(maker),
        "engine": lambda: check_in_engine("eviction", maker, effort),
    }
    together = Together(partial(_by_machine, maker, effort), _BY_MACHINE)
    searches.update({name: partial(together.check, name) for name in _BY_MACHINE})
    policy = named(maker)
    return [Check("eviction", policy, name, promise, searches[name]) for name, promise in PROMISES.items()]


def _by_machine(maker: Callable[[], Any], effort: Effort, promises: Collection[str]) -> None:
    def machine() -> Any:
        from kimicore.testing.eviction_machine import EvictionMachine

        return EvictionMachine(maker, promises)

    explore_machine(machine, effort)


# ---------------------------------------------------------------- more recent, more important

ROOM = 24
FIRST = 100  # number of the first block of the compared ones, which are new


def _warm_values() -> Any:
    from hypothesis import strategies as st

    return st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.0, 1.0, 60.0]), st.integers(0, 3)), max_size=25)


def _warmed(maker: Callable[[], Any], promise: str, warm: Sequence[tuple[int, float, int]]) -> CacheDrive:
    """Return a cache after some traffic of sequences of one block, with room for a few more."""
    drive = CacheDrive(maker, Judge([promise], Story()), ROOM, 2 * ROOM)
    for number, seconds, evicted in warm:
        drive.wait(seconds)
        drive.use([number], done=True)
        if evicted == 3:
            drive.evict(1)
    return drive


def _recent_values() -> dict[str, Any]:
    from hypothesis import strategies as st

    return {
        "warm": _warm_values(),
        "blocks": st.integers(2, 5),
        "uses": st.integers(0, 3),
        "picks": st.lists(st.integers(0, 4), max_size=12),
        "gap_s": st.sampled_from([0.5, 20.0, 1000.0]),
    }


def _recent(
    maker: Callable[[], Any],
    *,
    warm: list[tuple[int, float, int]],
    blocks: int,
    uses: int,
    picks: list[int],
    gap_s: float,
) -> None:
    """Blocks get the same number of uses, each use of a later block after the same use of the one before it."""
    drive = _warmed(maker, "recent", warm)
    done = [0] * blocks
    wanted = 1 + uses

    def use(at: int) -> None:
        if done[at] < wanted and (at == 0 or done[at] < done[at - 1]):
            drive.wait(gap_s)
            drive.use([FIRST + at], done=True)
            done[at] += 1

    for _ in range(wanted):  # whatever was picked, all are used equally often in the end
        for pick in picks:
            use(pick % blocks)
        for at in range(blocks):
            use(at)
    gone = [label for label in drive.drain() if label in {f"b{FIRST + at}" for at in range(blocks)}]
    for first, second in pairwise(gone):
        if int(first[1:]) > int(second[1:]):
            drive.judge.broken(
                "recent", f"{first} went before {second}, although both were used {wanted} times and {first} later"
            )


def _important_values() -> dict[str, Any]:
    from hypothesis import strategies as st

    values = st.sampled_from([0.0, 0.2, 1.0, 2.0, 50.0])
    return {
        "warm": _warm_values(),
        "tellings": st.lists(
            st.tuples(st.integers(0, 3), values, values, st.sampled_from([0.0, 5.0, 600.0])), min_size=1, max_size=5
        ),
        "uses": st.lists(st.integers(0, 3), max_size=4),
    }


def _important(
    maker: Callable[[], Any],
    *,
    warm: list[tuple[int, float, int]],
    tellings: list[tuple[int, float, float, float]],
    uses: list[int],
) -> None:
    """Two histories differ only in that one of them gave a block more attention."""
    orders = []
    drive = None
    for high in (False, True):
        drive = _warmed(maker, "important", warm)
        for at in range(4):
            drive.use([FIRST + at], done=True)
        first = len(drive.model.told()) - 4
        for other, one, two, seconds in tellings:
            drive.wait(seconds)
            drive.importance([first, first + other], [1.0, one])
            drive.importance([first], [max(one, two) if high else min(one, two)])
        for at in uses:
            drive.wait(1.0)
            drive.use([FIRST + at], done=True)
        orders.append(drive.drain())
    low, more = (order.index(f"b{FIRST}") for order in orders)
    if drive is not None and more < low:
        drive.judge.broken(
            "important",
            f"b{FIRST} went as number {more + 1}; with each importance of it at its lowest it was number {low + 1}",
        )


# ---------------------------------------------------------------- bounded

STREAM = 24  # times what may be remembered


def _bounded(maker: Callable[[], Any]) -> None:
    for capacity, ghosts in ((16, 0), (16, 64)):
        _bounded_at(maker, capacity, ghosts)


def _bounded_at(maker: Callable[[], Any], capacity: int, ghosts: int) -> None:
    """A stream of blocks that are new but for a few: neither what it remembers nor its size may grow on."""
    story = Story()
    drive = CacheDrive(maker, Judge(["bounded"], story), capacity, ghosts)
    may = capacity + ghosts
    early = late = 0
    for number in range(STREAM * may):
        drive.wait(0.1)
        drive.use([number, 0] if number % 3 else [number], done=True)
        if number % 5 == 0:
            drive.use([number], done=True)
            drive.importance([0, 1], [0.5, 2.0])
        drive.history.clear()
        del story.events[1:]
        if number % max(1, may // 4) == 0:
            seen = drive.remembered()
            if len(seen.keys) > 2 * may + 16:
                _too_much(drive, number, seen, may)
            if number > 3 * may:  # it is warm
                if number < STREAM * may // 2:
                    early = max(early, seen.bytes_total)
                else:
                    late = max(late, seen.bytes_total)
    if late > 1.5 * early + 8192:
        story.tell(f"{STREAM * may} requests, most of them for blocks that were never seen before")
        drive.judge.broken(
            "bounded", f"its state was {early} bytes in the first half of the stream and {late} in the second"
        )


def _too_much(drive: CacheDrive, number: int, seen: Footprint, may: int) -> None:
    drive.story.tell(f"{number + 1} requests, most of them for blocks that were never seen before")
    drive.judge.broken(
        "bounded",
        f"its state holds the keys of {len(seen.keys)} blocks; {may} may be remembered (twice as many are let pass)",
    )
