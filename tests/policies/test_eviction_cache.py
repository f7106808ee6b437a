"""The bare block cache, on traces that can be followed by hand, and a scan that policies survive or not."""

from __future__ import annotations

import pytest
from attrs import frozen

from kimicore.errors import ConfigError, PluginError
from kimicore.plugins import resolve
from kimicore.policies.eviction.lru import Lru
from kimicore.sim.cache import replay_cache, replay_optimum


def keys(names: str) -> list[bytes]:
    return [name.encode() for name in names]


def trace(*paths: str) -> list[tuple[float, list[bytes]]]:
    return [(float(at), keys(path)) for at, path in enumerate(paths)]


def test_hits_are_the_blocks_from_the_start_that_are_there():
    """A request's hits are counted from its start up to the first block that is missing, over all its blocks."""
    report = replay_cache(trace("abc", "abd", "abc"), Lru(), 10)
    assert (report.requests, report.blocks, report.hit_blocks, report.evicted_blocks) == (3, 9, 5, 0)
    assert report.block_hit_rate == 5 / 9


def test_a_leaf_leaves_before_its_root():
    """With room for three, the ends of the older sequence leave and its start is still hit."""
    report = replay_cache(trace("abc", "x", "abc"), Lru(), 3)
    assert (report.hit_blocks, report.evicted_blocks) == (2, 2)


def test_a_request_larger_than_the_cache_leaves_its_start():
    """Of a request that does not fit, what fits from the start stays."""
    report = replay_cache(trace("abcdef", "abcdef"), Lru(), 4)
    assert report.hit_blocks == 4


def test_the_warm_part_is_not_counted():
    """With report_from only the later requests count, over a cache that the earlier ones have warmed."""
    report = replay_cache(trace("ab", "cd", "ab", "cd"), Lru(), 4, report_from=0.5)
    assert (report.requests, report.block_hit_rate) == (2, 1.0)


def test_the_optimum_keeps_what_comes_back_first():
    """Where least recently used hits nothing in a loop, the optimum keeps two of the three."""
    loop = trace("a", "b", "c", "a", "b", "c", "a", "b", "c")
    assert replay_cache(loop, Lru(), 2).hit_blocks == 0
    assert replay_optimum(loop, 2).hit_blocks == 4  # c, whose next use is always last, never stays


def test_impossible_sizes_are_refused():
    """A size or a share out of range is a ConfigError that names it."""
    with pytest.raises(ConfigError, match="capacity_blocks=0"):
        replay_cache([], Lru(), 0)
    with pytest.raises(ConfigError, match="ghost_blocks=-1"):
        replay_cache([], Lru(), 1, ghost_blocks=-1)
    with pytest.raises(ConfigError, match=r"report_from=1\.0"):
        replay_cache([], Lru(), 1, report_from=1.0)


def test_a_policy_that_names_too_few_is_refused():
    """A replay does not go on with a policy that breaks its promise: the error names the policy."""

    class Lazy(type(Lru().start(1, 0, 0))):
        def victims(self, count, evictable, now_s):
            return []

    @frozen
    class Lazily(Lru):
        name: str = "lazy"

        def start(self, capacity_blocks, ghost_blocks, seed):
            return Lazy()

    with pytest.raises(PluginError, match="'lazy'"):
        replay_cache(trace("ab", "cd"), Lazily(), 2)


def conversations(turns: int, scan_blocks: int) -> list[tuple[float, list[bytes]]]:
    """Twenty conversations grow by a block a turn; between two turns a scan of blocks passes that nobody asks again."""
    requests: list[tuple[float, list[bytes]]] = []
    now_s, scanned = 0.0, 0
    for turn in range(1, turns + 1):
        for number in range(20):
            now_s += 1.0
            requests.append((now_s, [f"c{number}.{at}".encode() for at in range(turn + 2)]))
            now_s += 1.0
            requests.append((now_s, [f"s{scanned}.{at}".encode() for at in range(scan_blocks)]))
            scanned += 1
    return requests


def test_a_scan_does_not_wash_out_conversations():
    """Where a scan makes least recently used lose nearly all, activity-importance keeps most of the conversations."""
    requests = conversations(turns=12, scan_blocks=20)
    lru = replay_cache(requests, Lru(), 300, report_from=0.5).block_hit_rate
    learned = replay_cache(requests, resolve("eviction", "activity-importance"), 300, report_from=0.5).block_hit_rate
    optimum = replay_optimum(requests, 300, report_from=0.5).block_hit_rate
    assert lru < 0.05
    assert learned > 0.8 * optimum > 0.2


@pytest.mark.parametrize("name", ["activity-importance", "arc", "lfu", "lru", "s3-fifo"])
def test_no_policy_passes_the_optimum(name: str):
    """On the same traffic, at any size, every policy hits at most what the optimum hits, and is repeatable."""
    requests = conversations(turns=6, scan_blocks=9)
    for blocks in (5, 60, 300):
        report = replay_cache(requests, resolve("eviction", name), blocks)
        assert report == replay_cache(requests, resolve("eviction", name), blocks)
        assert report.hit_blocks <= replay_optimum(requests, blocks).hit_blocks
