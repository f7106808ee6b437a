"""activity-importance: what it learns, what it remembers, and the promises that learning may not break."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Rig, kv_class

from kimicore.errors import ConfigError
from kimicore.ledger import Ledger
from kimicore.plugins import KINDS, resolve
from kimicore.policies.eviction.reuse import CLASSES, ReuseRates, mean_use_s
from kimicore.prefix import BlockKeys, KeyContext
from kimicore.slabs import slab_layout

NAMES = sorted(KINDS["eviction"])


def started(capacity: int = 100, ghosts: int = 400, **settings: float):
    return resolve("eviction", "activity-importance", settings).start(capacity, ghosts, 0)


def order(state, count: int, now_s: float) -> list[bytes]:
    return state.victims(count, lambda key: True, now_s)


def test_settings_out_of_range_are_refused():
    """A half-life or a weight that cannot be is a ConfigError that names it."""
    for name, value in (("half_life_s", 0.0), ("learn_half_life_s", float("inf")), ("importance_weight", 1.5)):
        with pytest.raises(ConfigError, match=name):
            resolve("eviction", "activity-importance", {name: value})
    with pytest.raises(ConfigError, match="small_share"):
        resolve("eviction", "s3-fifo", {"small_share": 1.0})
    with pytest.raises(ConfigError, match="promote_uses"):
        resolve("eviction", "s3-fifo", {"promote_uses": 4})


def test_what_was_used_often_stays_longer():
    """Of blocks that were last used at the same time, those used more often go later."""
    state = started()
    for name in (b"a", b"b", b"c"):
        state.added(name, None, 0, 0.0)
    for now_s in (1.0, 2.0):
        state.touched(b"a", now_s)
        state.touched(b"b", now_s)
    state.touched(b"a", 3.0)
    state.touched(b"b", 3.0)
    state.touched(b"c", 3.0)
    state.touched(b"a", 3.0)
    assert order(state, 3, 4.0) == [b"c", b"b", b"a"]


def test_of_equally_many_uses_the_faster_ones_stay_longer():
    """Of blocks used three times each, the one whose turns came fast stays, although the slow one's last is later."""
    state = started()
    uses = [(at, b"slow") for at in (0.0, 500.0, 1000.0)] + [(at, b"fast") for at in (980.0, 989.0, 998.0)]
    seen: set[bytes] = set()
    for now_s, name in sorted(uses):
        if name in seen:
            state.touched(name, now_s)
        else:
            state.added(name, None, 0, now_s)
        seen.add(name)
    assert order(state, 2, 1001.0) == [b"slow", b"fast"]


@given(
    gaps=st.lists(st.floats(0.001, 1e5), min_size=1, max_size=80),
    pick=st.integers(0, 79),
    share=st.floats(0, 1),
    half_life_s=st.sampled_from([0.5, 300.0, 1e5]),
)
def test_a_later_use_never_makes_the_mean_earlier(gaps: list[float], pick: int, share: float, half_life_s: float):
    """The mean of the uses rises with each of their times, and is never past the last one."""
    times = [sum(gaps[: at + 1]) for at in range(len(gaps))]
    later = list(times)
    pick %= len(times)
    later[pick] += share * (times[pick + 1] - times[pick] if pick + 1 < len(times) else 1000.0)
    means = []
    for uses in (times, later):
        activity, used_s = 0.0, uses[0]
        for at in uses:
            activity, used_s = 1.0 + activity * 2.0 ** ((used_s - at) / half_life_s), at
        means.append(mean_use_s(len(uses), activity, used_s, half_life_s))
        assert means[-1] <= used_s
    assert means[0] <= means[1] + 1e-6 * half_life_s


def test_a_clock_that_steps_back_is_no_fault():
    """Events that come with an earlier time than those before are taken as simultaneous."""
    state = started(half_life_s=0.001)
    for now_s in (10.0, 5.0, 1.0):
        state.added(b"a", None, 0, now_s)
        state.added(b"b", b"a", 1, now_s)
        state.touched(b"a", now_s)
    assert set(order(state, 2, 1.0)) == {b"a", b"b"}


def test_a_block_that_comes_back_resumes_its_score():
    """A block that left and is remembered counts its earlier uses when it is back; without ghosts it does not."""
    for ghosts, first in ((400, b"new"), (0, b"old")):
        state = started(ghosts=ghosts)
        state.added(b"old", None, 0, 0.0)
        for now_s in (1.0, 2.0, 3.0):
            state.touched(b"old", now_s)
        assert order(state, 1, 4.0) == [b"old"]
        state.removed(b"old")
        state.added(b"old", None, 0, 5.0)
        state.added(b"new", None, 0, 5.0)
        assert order(state, 1, 6.0) == [first]


def test_the_end_of_a_run_is_remembered_for_all_of_it():
    """Of a sequence that left, one or two records stand for all its blocks, which resume their uses together."""
    state = started(ghosts=2)
    path = [b"p%d" % at for at in range(20)]

    def use(now_s: float, told: set[bytes]) -> None:
        for at in range(19, -1, -1):
            if path[at] in told:
                state.touched(path[at], now_s)
            else:
                state.added(path[at], path[at - 1] if at else None, at, now_s)

    use(0.0, set())
    use(1.0, set(path))
    for key in order(state, 20, 2.0):
        state.removed(key)
    use(3.0, set())
    state.added(b"once", None, 0, 4.0)
    assert order(state, 1, 5.0) == [b"once"]


def test_what_never_comes_back_is_learned():
    """Sizes of request whose blocks never return lose to others that do, whatever was assumed at first."""
    state = started(capacity=2000, ghosts=8000)
    now_s = 0.0
    small: list[bytes] = []
    for number in range(400):
        now_s += 1.0
        state.added(b"small%d" % number, None, 0, now_s)  # never again
        small.append(b"small%d" % number)
        for at in range(39, -1, -1):
            state.added(b"l%d.%d" % (number, at), b"l%d.%d" % (number, at - 1) if at else None, at, now_s)
        if number >= 30:  # comes back once, after half a minute
            for at in range(38, -1, -1):
                state.touched(b"l%d.%d" % (number - 30, at), now_s)
    young = [b"l%d.%d" % (number, at) for number in range(375, 400) for at in range(39)]
    compared = {*small[-25:], *young}
    named = state.victims(25, lambda key: key in compared, now_s + 1.0)
    assert sorted(named) == sorted(small[-25:])


@settings(max_examples=100, deadline=None)
@given(
    events=st.lists(st.tuples(st.integers(0, CLASSES - 1), st.floats(0, 3000), st.booleans()), max_size=60),
    half_life_s=st.sampled_from([1.0, 300.0, 1e5]),
)
def test_worth_falls_with_age_whatever_was_learned(events: list[tuple[int, float, bool]], half_life_s: float):
    """No traffic makes an older block of a class worth more than a younger one."""
    rates = ReuseRates(half_life_s, 600.0)
    now_s = 0.0
    waiting: list[tuple[int, float]] = []
    for kind, seconds, comes_back in events:
        now_s += seconds
        rates.request(now_s)
        if comes_back and waiting:
            old_kind, used_s = waiting.pop(0)
            rates.used(old_kind, used_s, now_s)
        rates.waits(kind, now_s)
        waiting.append((kind, now_s))
    for _ in range(16 * 9):
        rates.request(now_s)
    for row in rates.rows:
        assert all(one >= two >= 0.0 for one, two in pairwise(row))
    for kind, used_s in waiting:
        rates.forgotten(kind, used_s)


@given(
    times=st.lists(st.floats(0, 1000), min_size=2, max_size=6, unique=True), low=st.floats(0, 5), more=st.floats(0, 5)
)
def test_attention_never_makes_a_block_leave_earlier(times: list[float], low: float, more: float):
    """With all else equal a block that was told a higher importance stands no earlier in the order."""
    places = []
    for value in (low, low + more):
        state = started()
        for number, now_s in enumerate(sorted(times)):
            state.added(b"%d" % number, None, 0, now_s)
        state.importance([b"1", b"unknown"], [value, 3.0])
        places.append(order(state, len(times), 1001.0).index(b"1"))
    assert places[0] <= places[1]


@pytest.mark.parametrize("name", NAMES)
def test_in_the_ledger_leaves_go_before_roots(name: str):
    """In the engine's own ledger every built-in evicts without a fault, and what is cached stays reachable."""
    one = kv_class(block_tokens=4)
    slab_bytes, _ = slab_layout((one,), 1 << 30)
    ledger = Ledger((one,), slab_bytes, 33, 4, resolve("eviction", name))
    for number in range(60):
        ledger.now_s += 1.0
        chain = BlockKeys(4, b"s").chain(KeyContext())
        chain.extend([number % 7] * 16 + [number] * 12, 7)
        hit = ledger.hit([chain], 7)
        table = ledger.acquire([chain], hit)[0]
        new = ledger.allocate(0, 7 - hit)
        assert new is not None
        for at, slot in enumerate(new, hit):
            ledger.seal(0, slot, chain, at)
        table = [*table, *new]
        ledger.check_integrity([Counter(table)])
        ledger.release(0, table[::-1])
    ledger.check_integrity([Counter()])
    assert ledger.evicted_blocks > 0
    assert ledger.faults.count == 0, ledger.faults.last


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_with_little_memory_runs_on_any_of_them(name: str):
    """Requests that share prefixes and preempt each other end right, and the policy breaks no promise."""
    rig = Rig(slabs=14, block_tokens=4, eviction=resolve("eviction", name))
    numbers = [rig.submit([at % 3] * 8 + list(range(at, at + 6)), 6) for at in range(12)]
    rig.finish()
    for number in numbers:
        rig.assert_right(number)
    rig.assert_empty()
    assert rig.ledger.faults.count == 0, rig.ledger.faults.last
