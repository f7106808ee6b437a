"""What goes down, when, what comes up, and whether that is worth it."""

from __future__ import annotations

from typing import Any

import pytest
from rig import Rig, prompt_of

from kimicore.errors import RequestFailed
from kimicore.loading import recompute_s
from kimicore.prefix import joined
from kimicore.rates import Rates
from kimicore.types import BoundRow


class Fixed(Rates):
    """A tier of a known speed."""

    def observe(self, load_bytes: int, seconds: float) -> None:
        """Learn nothing."""


def rig(slabs: int = 13, host_slabs: int = 40, **more: Any) -> Rig:
    """Return a rig of 12 blocks of 16 tokens with a host below, whose loads take no time."""
    made = Rig(slabs, host_slabs=host_slabs, **more)
    made.below.tiers.rates = {"host": Fixed(1e18, 0.0), "disk": Fixed(1e18, 0.0)}
    return made


def pushed_out(made: Rig, tokens: int = 100, prompts: int = 3, first: int = 0) -> None:
    """Run prompts that do not fit beside each other, so that the first ones' blocks lie below."""
    for number in range(first, first + prompts):
        made.run(prompt_of(tokens, number), 2)
        made.settle()


def test_a_prefix_comes_back_from_the_host() -> None:
    """A prompt whose blocks left the device finds them there again, and computes only the rest."""
    made = rig()
    pushed_out(made)
    before = len(made.steps)
    out = made.run(prompt_of(100), 2)
    assert out.finished is not None
    assert out.finished.cached_tokens == 96
    assert sum(row.plan.count for step in made.steps[before:] for row in step.rows) == 4 + 1
    stats = made.book.stats()
    assert (stats.loads, stats.loads_late, stats.loads_declined) == (1, 0, 0)
    assert stats.host is not None
    assert stats.host.hit_blocks >= 5
    assert stats.host.missed_blocks == 0
    made.assert_empty()


def test_nothing_moves_where_everything_fits() -> None:
    """As long as the device has room to spare no block is copied anywhere."""
    made = rig(65)
    pushed_out(made)
    assert not made.carrier.host[0]
    stats = made.book.stats()
    assert stats.host is not None
    assert stats.host.stored_blocks == 0


@pytest.mark.parametrize(("bytes_per_s", "loads"), [(1e18, 1), (1.0, 0)])
def test_the_faster_way_is_taken(bytes_per_s: float, loads: int) -> None:
    """What would come slower than it is computed is computed, and told apart in the figures."""
    made = rig()
    pushed_out(made)
    made.below.tiers.rates = {"host": Fixed(bytes_per_s, 0.0), "disk": Fixed(bytes_per_s, 0.0)}
    out = made.run(prompt_of(100), 2)
    assert out.finished is not None
    assert (out.finished.cached_tokens == 96) == bool(loads)
    stats = made.book.stats()
    assert (stats.loads, stats.loads_declined) == (loads, 1 - loads)


def test_a_slow_disk_behind_a_fast_host_is_left_out() -> None:
    """Where the host has the first part and a slow disk the rest, the first part is loaded and the rest computed."""
    made = rig(disk={})
    pushed_out(made)
    host = made.below.tiers.host
    chain = made.book._chains(prompt_of(100), 100, joined(b""))[0].keys
    for key in chain[3:]:
        made.carrier.disk[key] = made.carrier.host[0][host.slots[0][key]]
        made.below.tiers.disk.add(key, 64)  # type: ignore[union-attr]
        host.drop(0, key)
    made.below.tiers.rates["disk"] = Fixed(1.0, 0.0)
    out = made.run(prompt_of(100), 2)
    assert out.finished is not None
    assert out.finished.cached_tokens == 48
    made.assert_right(max(made.out))


def test_computing_is_estimated_in_chunks() -> None:
    """The estimate adds up chunks, each with the context before it."""

    class Cost:
        """A step costs a second, a hundredth per token, and a millionth per pair."""

        def step_s(self, tokens: int, rows: int, context_tokens: int, attended_tokens: int = 0) -> float:
            """Return the seconds of a step."""
            return 1.0 + 0.01 * tokens + 1e-6 * attended_tokens

    assert recompute_s(0, 100, 100, Cost()) == pytest.approx(1.0 + 1.0 + 5e-3)
    assert recompute_s(50, 150, 50, Cost()) == pytest.approx(2 * 1.5 + 1e-6 * (50 * 50 + 50 * 100 + 2 * 1250))
    assert recompute_s(100, 100, 50, Cost()) == 0.0


@pytest.mark.parametrize("outcome", ["failed", "half", "lost"])
def test_what_did_not_arrive_is_computed(outcome: Any) -> None:
    """A load that fails, or brings a part, leaves a request that computes the rest and is right."""
    disk: dict[bytes, list[int]] = {}
    pushed_out(rig(disk=disk, staging=True))
    made = rig(disk=disk, staging=True)
    number = made.submit(prompt_of(100), 4)
    made.tend()
    assert made.book.stats().loads == 1
    while made.carrier.pending:
        made.move(0, outcome)
    made.finish()
    made.assert_right(number)
    made.assert_empty()


def test_the_beginning_stays_while_the_rest_comes_up() -> None:
    """Blocks of the prefix that are on the device are not dropped for others while those behind them are fetched."""
    made = rig(17, max_batch_size=2)
    pushed_out(made, prompts=4)
    made.run(prompt_of(40), 1)  # two blocks of it are on the device again
    number = made.submit(prompt_of(100), 2)
    made.tend()
    assert made.book.stats().loads >= 2
    made.submit(prompt_of(130, 9), 1)  # takes what it can get
    for _ in range(3):
        made.step()
    made.settle()
    made.finish()
    out = made.out[number]
    assert out.finished is not None
    assert out.finished.cached_tokens == 96
    made.assert_right(number)


def test_late_blocks_are_not_waited_for() -> None:
    """A request goes on when its load has taken too long; the blocks join the cache when they arrive."""
    made = rig(25)
    pushed_out(made, prompts=5)
    number = made.submit(prompt_of(100), 2)
    made.tend()
    assert made.book.stats().loads == 1
    made.step()
    assert not made.out[number].ends
    made.clock.advance(10.0)
    for _ in range(4):
        made.step()
    assert made.out[number].ends
    made.assert_right(number)
    assert made.book.stats().loads_late == 1
    made.assert_empty()


def test_who_gave_way_fetches_its_blocks() -> None:
    """A preempted request whose blocks were needed by others loads them when there is room again."""
    made = rig(14)
    first = made.submit(prompt_of(40), 150)
    second = made.submit(prompt_of(40, 5), 100)
    made.finish()
    assert made.out[second].preemptions == 1
    assert made.book.stats().loads == 1
    assert made.book.stats().recomputed_tokens < 16
    for number in (first, second):
        made.assert_right(number)
    made.assert_empty()


def test_nobody_waits_for_room_to_load_what_is_gone() -> None:
    """A request that waited for room to load starts to compute once its blocks have left the lower tiers."""
    made = rig(17, max_batch_size=4)
    pushed_out(made, prompts=4)
    running = made.submit(prompt_of(150, 9), 60)
    for _ in range(4):
        made.step()
    waiting = made.submit(prompt_of(100), 2)
    made.step()
    assert waiting in made.book._roster.barred
    host = made.below.tiers.host
    for key in list(host.slots[0]):
        host.drop(0, key)
    made.book._roster.cache_age += 1
    made.tend()
    assert waiting not in made.book._roster.barred
    made.finish()
    made.assert_right(running)
    made.assert_right(waiting)


def test_others_do_not_wait_for_a_load() -> None:
    """While one request's blocks are on the way another is served."""
    made = rig(25)
    pushed_out(made, prompts=5)
    slow = made.submit(prompt_of(100), 2)
    made.tend()
    other = made.submit(prompt_of(20, 9), 2)
    for _ in range(3):
        made.step()
    assert made.out[other].ends
    assert not made.out[slow].ends
    made.finish()
    made.assert_right(slow)


def test_a_block_is_written_to_disk_at_its_second_use() -> None:
    """Blocks that were used once do not reach the disk; those used again do."""
    disk: dict[bytes, list[int]] = {}
    made = rig(disk=disk, staging=True, admission=2)
    pushed_out(made)
    assert not disk
    for _ in range(2):
        made.run(prompt_of(100, 7), 2)
    pushed_out(made, first=10)
    assert len(disk) == 6
    made.run(prompt_of(100, 1), 2)  # its second use, though nothing was left of the first
    pushed_out(made, first=20)
    assert len(disk) == 12


def test_a_restart_finds_what_was_written() -> None:
    """What one engine wrote to disk another one reads, under the same secret."""
    disk: dict[bytes, list[int]] = {}
    made = rig(disk=disk, staging=True)
    pushed_out(made)
    assert disk
    again = rig(disk=disk, staging=True)
    out = again.run(prompt_of(100), 2)
    assert out.finished is not None
    assert out.finished.cached_tokens == 96
    again.assert_right(1)


def test_records_leave_the_disk_longest_unused_first() -> None:
    """Over the limit the records go that were not used for the longest time, and those of a load are used."""
    disk: dict[bytes, list[int]] = {}
    made = rig(disk=disk, staging=True, disk_bytes=14 * 64)
    pushed_out(made, prompts=3)
    first = list(disk)
    made.run(prompt_of(100, 1), 2)
    made.settle()
    pushed_out(made, prompts=6)
    assert len(disk) <= 14
    assert made.below.tiers.disk is not None
    assert made.below.tiers.disk.used_bytes <= 14 * 64
    assert set(first) - set(disk)


def test_a_disk_that_refuses_is_left_alone_for_a_while() -> None:
    """After a write that failed none is tried for a growing time; the device goes on without it."""
    made = rig(disk={}, staging=True)
    made.run(prompt_of(100, 0), 2)
    made.run(prompt_of(100, 7), 2)
    made.tend()
    assert [one.target for one in made.carrier.pending] == ["disk"]
    made.move(0, "failed")
    for number in range(1, 5):
        made.run(prompt_of(100, number), 2)
        made.tend()
        assert not made.carrier.pending
    made.clock.advance(1.0)
    made.run(prompt_of(100, 6), 2)
    made.tend()
    assert made.carrier.pending


def test_a_failing_requests_blocks_reach_no_tier() -> None:
    """What a request computed that failed is in no lower tier, even where it was on its way when that came out."""
    doomed: set[int] = set()

    def fault(row: BoundRow) -> BaseException | None:
        return RequestFailed("planted") if row.plan.request in doomed else None

    made = rig(9, fault=fault, max_batch_tokens=32)
    number = made.submit(prompt_of(100), 4)
    made.step()
    made.step()
    doomed.add(number)
    made.finish()
    made.settle()
    assert made.out[number].error is not None
    assert not made.below.tiers.host.blocks
    assert made.run(prompt_of(100), 4).finished is not None
    made.assert_right(max(made.out))


def test_waiting_requests_let_go_of_what_they_loaded_before_others_give_way() -> None:
    """Blocks that came up for a request that cannot start yet are given up before a running one is preempted."""
    made = rig(17, max_batch_size=1)
    pushed_out(made, tokens=100, prompts=5)
    running = made.submit(prompt_of(60, 8), 190)
    made.step()
    waiting = made.submit(prompt_of(100), 2)
    made.step()
    made.settle()
    assert made.book._roster.holders
    made.finish()
    assert made.out[running].preemptions == 0
    made.assert_right(running)
    made.assert_right(waiting)


def test_a_wish_to_have_blocks_on_disk_ends_with_all_of_them_there() -> None:
    """Named blocks are written from wherever they are, held or cached, and what is nowhere is counted."""
    disk: dict[bytes, list[int]] = {}
    made = rig(33, disk=disk, admission=2)
    made.run(prompt_of(100), 2)
    made.submit(prompt_of(100, 3), 50)
    made.step()
    made.step()
    cached = made.book.sink(prompt_of(100), 100, b"")
    held = made.book.sink(prompt_of(100, 3), 100, b"")
    nowhere = made.book.sink(prompt_of(100, 5), 100, b"")
    made.settle()
    made.tend()
    assert (cached.done, cached.gone, held.done, held.gone) == (True, 0, True, 0)
    assert (nowhere.done, nowhere.gone) == (True, 6)
    assert len(disk) == 12
    made.finish()
    made.assert_empty()


def test_without_a_disk_a_wish_is_over_at_once() -> None:
    """A wish for blocks on disk ends with none stored where there is no disk."""
    made = rig()
    made.run(prompt_of(100), 2)
    sink = made.book.sink(prompt_of(100), 100, b"")
    assert (sink.done, sink.gone, sink.blocks) == (True, 6, 6)
    bare = Rig()
    assert bare.book.sink(prompt_of(100), 100, b"").done


def test_rates_are_learned() -> None:
    """The measured speed of loads replaces the assumed one, slow ones and fast ones alike."""
    rates = Rates(1e9, 0.0)
    for _ in range(60):
        rates.observe(1_000_000, 0.1)
    assert rates.bytes_per_s == pytest.approx(1e7, rel=0.05)
    rates.queued_bytes = 10_000_000
    assert rates.load_s(10_000_000) == pytest.approx(2.0, rel=0.05)
    assert rates.load_s(0) == 0.0
