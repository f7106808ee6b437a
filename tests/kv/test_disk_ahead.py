"""Records that are read before they are asked for: right bytes or a miss, whatever happens in between."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kimicore.kv import ahead as ahead_module
from kimicore.kv.ahead import Ahead
from kimicore.kv.disk import DiskBlock, DiskStore
from kimicore.kv.record import HEADER_BYTES

from .rig import LAYOUT, FaultyFiles, content, flip, found, key, numbers, put, records, segments

Make = Callable[..., DiskStore]
COUNT = 7


def ahead_of(store: DiskStore, wanted: Sequence[int]) -> Ahead:
    """Read blocks ahead by number."""
    return store.read_ahead([key(number) for number in wanted])


def hits(store: DiskStore, wanted: Sequence[int], ahead: Ahead) -> list[bool]:
    """Which of the blocks the store gives; what it gives is right."""
    return [found(store, number, ahead=ahead) for number in wanted]


@pytest.fixture
def files() -> FaultyFiles:
    """System calls that can fail."""
    return FaultyFiles()


def reads(files: FaultyFiles, begin: int = 0) -> int:
    """How many reads there were since call ``begin``."""
    return sum(call.startswith("read") for call in files.calls[begin:])


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("order", [range(COUNT), range(COUNT)[::-1], (3, 0, 6, 2, 5, 1, 4)])
def test_neighbours_are_read_at_once(make: Make, files: FaultyFiles, order: Sequence[int], direct: str) -> None:
    """Records side by side are one read, in whatever order they are asked for, and none is read again."""
    store = make(files=files, direct=direct)
    put(store, range(COUNT))
    begin = len(files.calls)
    ahead = ahead_of(store, order)
    assert (ahead.keys, reads(files, begin)) == (COUNT, 1)
    assert all(hits(store, order, ahead))
    assert reads(files, begin) == 1
    assert store.stats().reads == COUNT


def test_records_of_several_segments_and_with_holes(make: Make, files: FaultyFiles) -> None:
    """Each run of neighbours is one read; keys that are not there, or come twice, change nothing."""
    store = make(files=files)
    put(store, range(30))
    store.discard([key(4), key(17)])
    wanted = [*random.Random(1).sample(range(40), 40), 7, 7]
    begin = len(files.calls)
    ahead = ahead_of(store, wanted)
    assert ahead.keys == 42
    assert reads(files, begin) == len(segments(Path(store._folder.path))) + 2
    assert hits(store, wanted, ahead) == [number < 30 and number not in (4, 17) for number in wanted]


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("at", [0, 60, 191, HEADER_BYTES, HEADER_BYTES + 3000])
def test_a_damaged_record_among_neighbours(make: Make, folder: Path, at: int, direct: str) -> None:
    """A record that is bad in the middle of a run is a miss for itself alone, is counted, and is not found again."""
    store = make(direct=direct)
    put(store, range(COUNT))
    path = segments(folder)[0]
    flip(path, records(path)[3].offset + at)
    ahead = ahead_of(store, range(COUNT))
    for _ in range(2):
        assert hits(store, range(COUNT), ahead) == [number != 3 for number in range(COUNT)]
    assert (store.stats().set_aside, store.stats().read_failures) == (1, 0)
    assert 3 not in numbers(make())


@pytest.mark.parametrize("which", [0, 1])
def test_a_spare_is_read_where_the_bytes_are_bad(make: Make, folder: Path, which: int) -> None:
    """Where a crash left a block twice and the one that was read ahead is bad, the other one is read."""
    store = make()
    put(store, range(COUNT))
    store.close()
    path = segments(folder)[0]
    source = path.read_bytes()
    store = make()
    store.discard([key(0)])
    store.compact()
    store.close()
    (copies,) = segments(folder)
    path.write_bytes(source)
    path.chmod(0o600)
    bad = (path, copies)[which]
    flip(bad, next(one for one in records(bad) if one.key == key(3)).offset + HEADER_BYTES + 50)
    store = make()
    assert all(hits(store, range(COUNT), ahead_of(store, range(COUNT))))


def test_what_moves_or_changes_meanwhile(make: Make, files: FaultyFiles) -> None:
    """Between reading ahead and asking, blocks are discarded, put anew with other bytes and moved by compaction, and
    their file goes: each is given as it is now, or not at all.
    """
    store = make(files=files)
    put(store, range(COUNT))
    ahead = ahead_of(store, range(COUNT))
    store.discard([key(0), key(1)])
    assert store.put([DiskBlock(key(1), LAYOUT, 2, memoryview(content(50)))])[0] > 0
    store.compact()
    begin = len(files.calls)
    assert hits(store, [0, *range(2, COUNT)], ahead) == [False] + [True] * (COUNT - 2)
    assert reads(files, begin) == COUNT - 2, "the copies, one by one"
    out = memoryview(bytearray(6000))
    assert store.get(key(1), LAYOUT, out, ahead)
    assert out == content(50)


def test_a_file_that_goes_while_it_is_read(make: Make, folder: Path, files: FaultyFiles) -> None:
    """Compaction may take a segment away in the middle of the read: its file stays open until then, and no longer."""
    store = make(files=files)
    put(store, range(COUNT))
    open_before = len(os.listdir("/proc/self/fd"))
    busy = []

    def plan(call: str) -> None:
        if call.startswith("read") and not busy:
            busy.append(call)
            store.discard([key(0)])
            store.compact()

    files.plan = plan
    ahead = ahead_of(store, range(COUNT))
    assert busy
    assert len(segments(folder)) == 1
    assert hits(store, range(COUNT), ahead) == [False] + [True] * (COUNT - 1)
    assert len(os.listdir("/proc/self/fd")) <= open_before
    store._log.check_integrity()


def test_closing_while_it_is_read(make: Make, files: FaultyFiles) -> None:
    """A store that closes during the read gives nothing afterwards, and all descriptors go."""
    before = len(os.listdir("/proc/self/fd"))
    store = make(files=files)
    put(store, range(COUNT))
    files.plan = lambda call: store.close() if call.startswith("read") else None
    ahead = ahead_of(store, range(COUNT))
    assert len(os.listdir("/proc/self/fd")) == before
    assert not any(hits(store, range(COUNT), ahead))
    ahead = ahead_of(store, range(COUNT))
    assert ahead.keys == COUNT
    assert not any(hits(store, range(COUNT), ahead))


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_read_that_fails_is_tried_for_each_alone(make: Make, files: FaultyFiles, direct: str) -> None:
    """Where the one read fails, each record is read by itself; what fails then is a miss, and stays."""
    store = make(files=files, direct=direct)
    put(store, range(COUNT))
    bad = {1, 4}  # the run, and the third block
    count = 0

    def plan(call: str) -> None:
        nonlocal count
        count += call.startswith("read")
        if call.startswith("read") and count in bad:
            raise OSError(errno.EIO, "planted")

    files.plan = plan
    ahead = ahead_of(store, range(COUNT))
    assert hits(store, range(COUNT), ahead) == [number != 2 for number in range(COUNT)]
    assert (store.stats().set_aside, store.stats().read_failures) == (0, 1)
    assert found(store, 2)


def test_a_read_that_ends_early_is_no_proof(make: Make, files: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short reads are continued; where they stop although the file goes on, the blocks are misses now and stay."""
    store = make(files=files, direct="off")
    put(store, range(COUNT))
    whole = files.read
    monkeypatch.setattr(files, "read", lambda fd, into, offset: whole(fd, into[:4096], offset))
    assert all(hits(store, range(COUNT), ahead_of(store, range(COUNT))))
    monkeypatch.setattr(files, "read", lambda fd, into, offset: whole(fd, into[:100], offset))
    store._ahead_buffers.take(1)[:8] = bytes(8)  # nothing of before stands there
    assert not any(hits(store, range(COUNT), ahead_of(store, range(COUNT))))
    monkeypatch.undo()
    assert (store.stats().set_aside, store.stats().read_failures) == (0, COUNT)
    assert all(hits(store, range(COUNT), ahead_of(store, range(COUNT))))


def test_a_file_that_ends_early(make: Make, folder: Path) -> None:
    """Of a file that was cut while it is open, what is left comes, and the rest is set aside."""
    store = make()
    put(store, range(COUNT))
    path = segments(folder)[0]
    os.truncate(path, records(path)[4].offset + 5000)
    assert hits(store, range(COUNT), ahead_of(store, range(COUNT))) == [number < 4 for number in range(COUNT)]
    assert store.stats().set_aside == COUNT - 4


def test_a_read_alone_leaves_what_was_read_ahead(make: Make, files: FaultyFiles) -> None:
    """Blocks that are read by themselves in between do not write over those that were read ahead."""
    store = make(files=files)
    put(store, range(20))
    ahead = ahead_of(store, range(5))
    begin = len(files.calls)
    for number in range(5):
        assert found(store, 10 + number)
        assert found(store, number, ahead=ahead)
    assert reads(files, begin) == 5


def test_memory_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read ahead never takes more than the bound: further keys are for the next round, and a record that is
    larger by itself is read when it is asked for.
    """
    monkeypatch.setattr(ahead_module, "AHEAD_BYTES", 20_000)
    store = make()
    put(store, range(COUNT))
    put(store, [40], size=30_000)
    wanted = [0, 1, 40, 2, 3, 4, 5, 6]
    done: list[int] = []
    while len(done) < len(wanted):
        left = wanted[len(done) :]
        ahead = ahead_of(store, left)
        assert ahead.keys >= 1
        for number in left[: ahead.keys]:
            assert found(store, number, 30_000 if number == 40 else 6000, ahead)
            done.append(number)
        assert len(store._ahead_buffers._view) <= 20_480
    assert done == wanted
    assert store.read_ahead([]).keys == 0


def test_threads_read_ahead_at_once(make: Make) -> None:
    """Threads that read ahead while others put, discard and compact get right bytes or a miss, each from its own."""
    store = make()
    put(store, range(40))
    stop = threading.Event()

    def change() -> None:
        rng = random.Random(9)
        while not stop.is_set():
            some = rng.sample(range(40), 5)
            store.discard(map(key, some))
            store.compact()
            put(store, some)

    def read(seed: int) -> int:
        rng = random.Random(seed)
        count = 0
        for _ in range(80):
            wanted = rng.sample(range(40), 10)
            count += sum(hits(store, wanted, ahead_of(store, wanted)))
        return count

    with ThreadPoolExecutor(4) as pool:
        changing = pool.submit(change)
        total = sum(pool.map(read, range(3)))
        stop.set()
        changing.result()
    assert total > 800
    stats = store.stats()
    assert (stats.set_aside, stats.read_failures, stats.write_failures) == (0, 0, 0)
    store._log.check_integrity()
