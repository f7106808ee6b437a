"""The disk tier's store in good times: what was put is found, also after a restart, within the limit."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kimicore.errors import ConfigError
from kimicore.kv.codec import Codec
from kimicore.kv.disk import DiskBlock, DiskStore

from .rig import LAYOUT, LIMIT, SEGMENT, block, content, folder_bytes, found, key, numbers, opened, put, segments

Make = Callable[..., DiskStore]
OTHER = b"another layout.."


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("codec", ["raw", "zstd", "planes-zstd", "planes-packed", "auto"])
def test_what_is_put_is_found_also_after_a_restart(make: Make, codec: str, direct: str) -> None:
    """Blocks come back byte for byte, oldest first in the list, whatever codec wrote them and however they are read."""
    store = make(codec=Codec(codec), direct=direct)
    stored = put(store, range(12))
    assert all(size >= 4096 and size % 4096 == 0 for size in stored)
    assert [entry.stored_bytes for entry in store.entries()] == stored
    for restart in (False, True):
        again = make(direct=direct) if restart else store
        assert numbers(again) == list(range(12))
        assert all(found(again, number) for number in range(12))
        assert not found(again, 12)
        stats = again.stats()
        assert (stats.reads, stats.read_bytes, stats.records) == (12, sum(stored), 12)
        assert stats.live_bytes == sum(stored) <= stats.used_bytes <= LIMIT
        assert (stats.read_failures, stats.write_failures, stats.set_aside) == (0, 0, 0)


def test_counters_of_writing(make: Make) -> None:
    """Written blocks are counted once each, with what they were and what they became."""
    store = make()
    stored = put(store, [1, 2, 1, 3])
    assert stored[0] == stored[2]
    assert put(store, [3, 2]) == [stored[3], stored[1]]
    stats = store.stats()
    assert (stats.writes, stats.raw_bytes) == (3, 18000)
    assert stats.written_bytes == stored[0] + stored[1] + stored[3]


@pytest.mark.parametrize("size", [1, 2, 3, 4096 - 192, 4096, 5001, 40_000])
def test_blocks_of_any_size(make: Make, size: int) -> None:
    """Blocks that fill pages, blocks that do not, and odd ones come back."""
    store = make()
    for item_bytes in (1, 2, 4):
        if size % item_bytes == 0:
            store.put([DiskBlock(key(item_bytes), LAYOUT, item_bytes, memoryview(content(1, size)))])
            out = memoryview(bytearray(size))
            assert store.get(key(item_bytes), LAYOUT, out)
            assert out == content(1, size)


def test_an_array_of_any_type_can_be_read_into(make: Make) -> None:
    """Lengths are counted in bytes, whatever the items of the memory are."""
    store = make()
    raw = memoryview(content(1, 4096)).cast("I")
    assert store.put([DiskBlock(key(1), LAYOUT, 4, raw)])[0] > 0
    out = memoryview(bytearray(4096)).cast("H")
    assert store.get(key(1), LAYOUT, out)
    assert out.tobytes() == content(1, 4096)


def test_another_layout_or_length_is_a_miss(make: Make) -> None:
    """A block is given to nobody who asks for it as something else, and stays for who asks rightly."""
    store = make()
    put(store, [1])
    assert not store.get(key(1), OTHER, memoryview(bytearray(6000)))
    assert not store.get(key(1), LAYOUT, memoryview(bytearray(5999)))
    assert not store.get(key(1), LAYOUT, memoryview(bytearray(6001)))
    assert not store.get(key(1), LAYOUT, memoryview(bytearray(0)))
    assert found(store, 1)
    assert store.stats().set_aside == 0


def test_a_key_under_another_layout_replaces_the_old_one(make: Make) -> None:
    """Put under a new layout, a key is found under that alone, also after a restart."""
    store = make()
    put(store, [1])
    raw = memoryview(b"new" * 2000)
    assert store.put([DiskBlock(key(1), OTHER, 1, raw)])[0] > 0
    for restart in (False, True):
        again = make() if restart else store
        out = memoryview(bytearray(6000))
        assert not again.get(key(1), LAYOUT, out)
        assert again.get(key(1), OTHER, out)
        assert out == raw
        assert len(again.entries()) == 1


@pytest.mark.parametrize(("name", "size"), [("key", 15), ("layout", 17)])
def test_keys_and_layouts_have_sixteen_bytes(name: str, size: int) -> None:
    """A key or layout of another length is refused where the block is made."""
    with pytest.raises(ValueError, match=f"16 bytes each, not {size}"):
        DiskBlock(**{"key": key(1), "layout": LAYOUT, "item_bytes": 2, "raw": memoryview(b"ab"), name: bytes(size)})


def test_what_is_discarded_is_not_found(make: Make) -> None:
    """A discarded block is gone, its space comes back by compaction, and it can be put again."""
    store = make()
    put(store, range(20))
    before = store.used_bytes
    store.discard([key(number) for number in range(1, 20)] + [key(99)])
    assert numbers(store) == [0]
    assert not found(store, 5)
    store.compact()
    assert store.used_bytes < before - 18 * 4096
    assert store.stats().compactions > 0
    assert put(store, [5])[0] > 0
    for restart in (False, True):
        again = make() if restart else store
        assert sorted(numbers(again)) == [0, 5]
        assert found(again, 0)
        assert found(again, 5)


def test_the_limit_holds_and_compaction_makes_room(make: Make, folder: Path) -> None:
    """However much is put and discarded, the files stay under the limit, and what has room is stored."""
    store = make()
    rng = random.Random(1)
    held: set[int] = set()
    refused = 0
    for number in range(300):
        room = store.room_bytes
        size = put(store, [number])[0]
        assert folder_bytes(folder) <= store.used_bytes <= LIMIT
        assert size or room < 8192 + 4096
        if size:
            held.add(number)
        else:
            refused += 1
            leaving = rng.sample(sorted(held), 5)
            store.discard(map(key, leaving))
            held -= set(leaving)
        assert set(numbers(store)) == held
    assert refused > 10
    assert store.stats().compactions > 5
    assert len(held) * 8192 > LIMIT / 2
    assert all(found(store, number) for number in held)
    again = make()
    assert all(found(again, number) for number in held)


def test_a_full_store_says_so_and_keeps_what_it_has(make: Make) -> None:
    """Without room nothing is stored and nothing is lost; the store drops no block by itself."""
    store = make()
    stored = put(store, range(200))
    kept = [number for number, size in enumerate(stored) if size]
    assert 20 < len(kept) < 100
    assert store.room_bytes < 8192
    assert put(store, [500, kept[0]]) == [0, stored[kept[0]]]
    assert all(found(store, number) for number in kept)
    assert store.stats().write_failures == 0


def test_a_block_over_a_segment_is_not_stored(make: Make) -> None:
    """A block that no segment can hold is refused, and its neighbours are not."""
    store = make()
    big = DiskBlock(key(8), LAYOUT, 2, memoryview(content(8, 2 * SEGMENT)))
    assert [bool(size) for size in store.put([block(1), big, block(2)])] == [True, False, True]


def test_old_segments_are_not_appended_to(make: Make, folder: Path) -> None:
    """After a restart the files that are there keep their bytes, and new blocks go into a new one."""
    put(make(), [1])
    before = segments(folder)
    content_before = before[0].read_bytes()
    put(make(), [2])
    after = segments(folder)
    assert len(after) == 2
    assert after[:1] == before
    assert before[0].read_bytes() == content_before


def test_many_short_runs_leave_few_files(make: Make, folder: Path) -> None:
    """A store that is opened again and again, for a block each time, does not fill up with small files."""
    limit = 64 * SEGMENT
    for number in range(140):
        assert put(make(limit, direct="off"), [number])[0] > 0
    store = make(limit)
    assert len(segments(folder)) <= 130
    assert sorted(numbers(store)) == list(range(140))
    assert all(found(store, number) for number in range(140))


def test_small_files_are_merged_for_room(make: Make, folder: Path) -> None:
    """What has room is stored, also where that room is in the headers and ends of many small files."""
    for number in range(30):
        assert put(make(direct="off"), [number])[0] > 0
    store = make()
    assert len(segments(folder)) == 30
    number = 30
    while store.room_bytes >= 3 * 4096:
        assert put(store, [number])[0] > 0
        number += 1
    assert number > 33
    assert all(found(store, one) for one in range(number))


def test_a_store_without_blocks_leaves_no_segments(make: Make, folder: Path) -> None:
    """Segments in which nothing is live are removed at the next write, or at the start."""
    store = make()
    put(store, range(30))
    store.discard(map(key, range(30)))
    put(store, [99])
    assert len(segments(folder)) <= 2
    store.discard([key(99)])
    make().compact()
    make().discard([key(99)])


def test_a_lower_limit_drops_the_oldest(make: Make) -> None:
    """A restart with a smaller limit keeps it from the start: what is too much goes, the oldest segments first."""
    put(make(16 * SEGMENT), range(60))
    store = make(4 * SEGMENT)
    left = numbers(store)
    assert 0 < len(left) < 60
    assert left == list(range(60 - len(left), 60))
    assert all(found(store, number) for number in left)


def test_direct_reads_are_used_where_they_can_be(make: Make, folder: Path) -> None:
    """ "auto" reads directly exactly where "on" is accepted, and "off" never does."""
    assert not make(direct="off").stats().direct
    able = make(direct="auto").stats().direct
    if able:
        assert make(direct="on").stats().direct
    else:
        with pytest.raises(ConfigError, match="direct reads are not to be had"):
            make(direct="on")
    assert not (folder / "probe.tmp").exists()


def test_the_secret_stays(make: Make, folder: Path) -> None:
    """The secret is drawn once, is the owner's alone to read, and differs between folders."""
    secret = make().secret
    assert len(secret) == 32
    assert make().secret == secret
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    other = opened(folder.parent / "other")
    assert other.secret != secret
    other.close()


def test_a_closed_store_does_nothing(make: Make, folder: Path) -> None:
    """After closing, which can be done twice, every call answers that there is nothing, and the folder is free."""
    store = make()
    put(store, [1])
    store.close()
    store.close()
    assert put(store, [2]) == [0]
    assert not found(store, 1)
    assert store.entries() == []
    store.discard([key(1)])
    store.compact()
    assert store.stats().records == 0
    assert found(make(), 1)


def test_descriptors_are_given_back(make: Make) -> None:
    """Opening, compacting and closing leave no file descriptor open."""
    make().close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        store = make()
        put(store, range(40))
        store.discard(map(key, range(0, 40, 2)))
        store.compact()
        store.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_blocks_can_be_read_while_their_segment_is_removed(make: Make) -> None:
    """A reader that has found a block gets its bytes, although compaction removes the file meanwhile."""
    store = make()
    put(store, range(8))
    with store._log.reading(key(3)) as place:
        assert place is not None
        store.discard([key(number) for number in range(8) if number != 3])
        used = store.used_bytes
        store.compact()
        assert store.used_bytes > used - 8 * 4096, "what is read still takes up space"
        payload = place.segment.read(place.record, store._buffers)
        assert len(payload) == place.record.payload_bytes
        assert found(store, 3)
    assert place.segment.read_fd == -1
    assert found(store, 3)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_changes_nothing(make: Make) -> None:
    """In a forked process the store finds and stores nothing, and closing it there takes no lock from the parent."""
    store = make()
    put(store, [1])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            out = memoryview(bytearray(6000))
            silent = not store.get(key(1), LAYOUT, out) and put(store, [1, 2]) == [0, 0]
            store.close()
            code = 0 if silent else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert found(store, 1)
    with pytest.raises(ConfigError, match="another engine or process"):
        opened(Path(store._folder.path))
    assert put(store, [2])[0] > 0


def test_threads_share_a_store(make: Make, folder: Path) -> None:
    """Many threads that put, read, discard and compact at once get right bytes or a miss, within the limit."""
    store = make()
    wrong: list[str] = []
    stop = threading.Event()

    def work(seed: int) -> int:
        rng = random.Random(seed)
        hits = 0
        for turn in range(150):
            some = [rng.randrange(80) for _ in range(3)]
            if rng.random() < 0.4:
                sizes = put(store, some)
                if not all(sizes):
                    store.discard(key(rng.randrange(80)) for _ in range(8))
            elif turn % 50 == 49:
                store.compact()
            hits += sum(found(store, number) for number in some)
        return hits

    def watch() -> None:
        while not stop.wait(0.002):
            if store.used_bytes > LIMIT:
                wrong.append("over the limit")

    with ThreadPoolExecutor(5) as pool:
        watcher = pool.submit(watch)
        total = sum(pool.map(work, range(4)))
        stop.set()
        watcher.result()
    assert wrong == []
    assert folder_bytes(folder) <= store.used_bytes
    assert total > 200
    stats = store.stats()
    assert (stats.set_aside, stats.read_failures, stats.write_failures) == (0, 0, 0)
    assert stats.live_bytes == sum(entry.stored_bytes for entry in store.entries())
    left = numbers(store)
    again = make()
    assert all(found(again, number) for number in left)
