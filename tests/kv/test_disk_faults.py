"""What the system refuses is counted and survived: full disks, bad reads, lost rights, and no half-written block."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kimicore.kv.disk import DiskStore

from .rig import LAYOUT, LIMIT, Clock, FaultyFiles, folder_bytes, found, key, numbers, opened, put, segments

Make = Callable[..., DiskStore]


@pytest.fixture
def files() -> FaultyFiles:
    """System calls that can fail."""
    return FaultyFiles()


@pytest.fixture
def clock() -> Clock:
    """A clock that stands."""
    return Clock()


WRITING = [
    ("write", errno.ENOSPC),
    ("write", errno.EROFS),
    ("write", errno.EIO),
    ("create", errno.EACCES),
    ("create", errno.EDQUOT),
    ("sync", errno.EIO),
    ("sync_folder", errno.EIO),
]


@pytest.mark.parametrize(("call", "code"), WRITING)
def test_a_failed_write_stores_nothing_and_loses_nothing(
    make: Make, folder: Path, files: FaultyFiles, clock: Clock, call: str, code: int
) -> None:
    """Where a write, a new file or its way to the disk fails, nothing is published, all else is still read, and the
    bytes are cut off again; when the disk is well, writing goes on.
    """
    put(make(), range(3))
    store = make(files=files, clock=clock, direct="off")
    files.fail(call, code=code)
    before = folder_bytes(folder)
    assert put(store, [3, 4]) == [0, 0]
    assert store.stats().write_failures == 1
    assert numbers(store) == [0, 1, 2]
    assert all(found(store, number) for number in range(3))
    assert folder_bytes(folder) <= before + 4096
    files.fail()
    assert put(store, [3]) == [0], "it pauses"
    clock.now += 0.5
    assert all(put(store, [3, 4]))
    assert all(found(store, number) for number in range(5))
    again = make()
    assert all(found(again, number) for number in range(5))


@pytest.mark.parametrize(("call", "code"), [one for one in WRITING if one[0] != "create"])
def test_a_failed_append_keeps_the_segment_as_it_was(
    make: Make, folder: Path, files: FaultyFiles, clock: Clock, call: str, code: int
) -> None:
    """A batch that fails behind good records leaves the file as long as they are, even if the cut fails too."""
    for calls in ((call,), (call, "cut")):
        store = make(files=files, clock=clock, direct="off")
        base = len(numbers(store))
        assert all(put(store, range(base, base + 2)))
        path = segments(folder)[-1]
        size = path.stat().st_size
        files.fail(*calls, code=code)
        refused = put(store, [base + 2])
        if call != "sync_folder":  # the file's name is on the disk since the first batch
            assert refused == [0]
            assert path.stat().st_size == size or "cut" in calls
        files.fail()
        clock.now += 60
        assert put(store, [base + 2])[0] > 0
        assert all(found(store, number) for number in range(base + 3))
        assert folder_bytes(folder) <= store.used_bytes


@pytest.mark.parametrize("room", [0, 1, 4095, 4096, 8191, 8192, 20_000, 30_001])
def test_a_disk_that_fills_up_within_a_batch(
    make: Make, folder: Path, files: FaultyFiles, clock: Clock, room: int
) -> None:
    """Where the disk is full at any byte, a batch is stored whole or not at all, and the file is as before."""
    store = make(files=files, clock=clock, direct="off")
    put(store, [0])
    size = segments(folder)[0].stat().st_size
    files.room = room
    stored = put(store, range(1, 9))
    assert stored == [0] * 8
    assert segments(folder)[0].stat().st_size == size
    assert found(store, 0)
    files.room = None
    clock.now += 0.5
    assert all(put(store, range(1, 9)))
    again = make()
    assert all(found(again, number) for number in range(9))


def test_segments_that_were_finished_before_the_disk_filled_up_stay(
    make: Make, files: FaultyFiles, clock: Clock
) -> None:
    """Of a batch over several segments, what was durable before the failure is stored."""
    store = make(files=files, clock=clock, direct="off")
    files.room = 100_000
    stored = put(store, range(30))
    count = sum(map(bool, stored))
    assert 3 < count < 12
    assert all(stored[:count])
    assert numbers(store) == list(range(count))
    assert all(found(store, number) for number in range(count))


def test_the_pause_grows_and_ends(make: Make, files: FaultyFiles, clock: Clock) -> None:
    """After failures in series writes pause 0.5 s, 1 s, 2 s and so on, at most 30 s; a success ends the series."""
    store = make(files=files, clock=clock, direct="off")
    files.fail("write", code=errno.ENOSPC)
    waits = []
    for number in range(9):
        before = len(files.calls)
        assert put(store, [number]) == [0]
        assert "write" in files.calls[before:]
        start = clock.now
        while True:
            clock.now += 0.25
            before = len(files.calls)
            put(store, [100])
            if "write" in files.calls[before:]:
                break
        waits.append(clock.now - start)
        clock.now += 1000
    expected = [0.5, 2.0, 8.0, 30.0]  # each round fails twice
    assert waits[:4] == expected
    assert set(waits[4:]) == {30.0}
    files.fail()
    assert put(store, [1])[0] > 0
    files.fail("write")
    assert put(store, [2]) == [0]
    files.fail()
    clock.now += 0.5
    assert put(store, [2])[0] > 0


@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EINTR])
def test_a_read_that_fails_is_a_miss_and_keeps_the_block(
    make: Make, files: FaultyFiles, code: int, direct: str
) -> None:
    """An error while reading proves nothing about the bytes: the block is a miss now and found when reading works."""
    store = make(files=files, direct=direct)
    put(store, [1, 2])
    files.fail("read", "read_direct", code=code)
    assert not found(store, 1)
    assert (store.stats().read_failures, store.stats().set_aside) == (1, 0)
    files.fail()
    assert found(store, 1)
    assert found(store, 2)


def test_a_read_that_ends_early_is_no_proof(make: Make, files: FaultyFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short read is continued; one that stops although the file goes on is the system's error, no bad block."""
    store = make(files=files, direct="off")
    put(store, [1])
    whole = files.read
    monkeypatch.setattr(files, "read", lambda fd, into, offset: whole(fd, into[:4096], offset))
    assert found(store, 1)
    monkeypatch.setattr(files, "read", lambda fd, into, offset: whole(fd, into[:100], offset))
    assert not found(store, 1)
    monkeypatch.undo()
    assert found(store, 1)
    assert (store.stats().read_failures, store.stats().set_aside) == (1, 0)


def test_a_segment_that_cannot_be_read_at_the_start_is_kept(make: Make, folder: Path, files: FaultyFiles) -> None:
    """A file that the system does not let us read is no hit and no reason to remove it: it may be well tomorrow."""
    for number in range(3):
        put(make(), [number])
    make().close()
    paths = segments(folder)
    opens = iter([None, errno.EACCES, errno.EIO])

    def plan(call: str) -> None:
        if call == "open" and files.calls.count("open") > 2:  # FORMAT and the secret come first
            code = next(opens, None)
            if code:
                raise OSError(code, os.strerror(code))

    files.plan = plan
    store = make(files=files, direct="off")
    assert len(numbers(store)) == 1
    assert store.stats().read_failures == 2
    assert store.used_bytes >= folder_bytes(folder) - 4096
    assert put(store, [7])[0] > 0
    assert segments(folder)[:3] == paths
    assert sorted(numbers(make())) == [0, 1, 2, 7]


@pytest.mark.parametrize("call", ["write", "sync", "create", "sync_folder"])
def test_compaction_that_cannot_write_loses_nothing(make: Make, files: FaultyFiles, clock: Clock, call: str) -> None:
    """Where copies cannot be written, the old file stays and is read; later the compaction is done."""
    store = make(files=files, clock=clock, direct="off")
    put(store, range(30))
    store.discard(map(key, range(0, 30, 2)))
    files.fail(call, code=errno.ENOSPC)
    store.compact()
    assert store.stats().write_failures == 1
    assert all(found(store, number) for number in range(1, 30, 2))
    files.fail()
    clock.now += 60
    used = store.used_bytes
    store.compact()
    assert store.used_bytes < used
    assert all(found(store, number) for number in range(1, 30, 2))


def test_compaction_that_cannot_read_keeps_the_file(make: Make, files: FaultyFiles) -> None:
    """A record that cannot be read is not copied and not dropped: its file stays until the disk is well."""
    store = make(files=files, direct="off")
    put(store, range(4))
    store.discard([key(0)])
    reads = iter([errno.EIO])

    def plan(call: str) -> None:
        if call == "read" and next(reads, None):
            raise OSError(errno.EIO, "planted")

    files.plan = plan
    store.compact()
    assert sorted(numbers(store)) == [1, 2, 3]
    assert store.stats().read_failures == 1
    assert all(found(store, number) for number in (1, 2, 3))
    store = make()
    store.discard([key(0)])
    store.compact()
    assert all(found(store, number) for number in (1, 2, 3))


def test_a_block_that_is_discarded_while_it_is_copied_stays_so(make: Make, files: FaultyFiles) -> None:
    """Compaction brings nothing back that was discarded since it began."""
    store = make(files=files, direct="off")
    put(store, range(4))
    store.discard([key(0)])
    writes = 0

    def plan(call: str) -> None:
        nonlocal writes
        writes += call == "write"
        if call == "write" and writes == 3:
            store.discard([key(1), key(2)])

    files.plan = plan
    store.compact()
    assert numbers(store) == [3]
    assert not found(store, 1)
    assert store.stats().live_bytes == store.entries()[0].stored_bytes
    store.compact()
    assert numbers(make()) == [3]


def test_a_file_that_cannot_be_removed_counts(make: Make, folder: Path, files: FaultyFiles, clock: Clock) -> None:
    """Where an old file cannot be removed, its bytes still count towards the limit."""
    store = make(files=files, clock=clock, direct="off")
    put(store, range(20))
    files.fail("remove", code=errno.EACCES)
    store.discard(map(key, range(15)))
    store.compact()
    for number in range(20, 120):
        put(store, [number])
        assert folder_bytes(folder) <= store.used_bytes <= LIMIT
    assert all(found(store, number) for number in range(15, 20))


def test_no_call_raises_what_the_system_raises(make: Make, files: FaultyFiles, clock: Clock) -> None:
    """With every call failing in turn, and all together, no method raises, and afterwards the store works."""
    calls = ["open", "create", "read", "write", "sync", "sync_folder", "cut", "remove", "status"]
    for failing in [[one] for one in calls] + [calls]:
        store = make(files=files, clock=clock, direct="off")
        put(store, range(30))
        files.fail(*failing)
        put(store, [50])
        found(store, 3)
        store.discard(map(key, range(20)))
        clock.now += 60
        store.compact()
        clock.now += 60
        put(store, [51])
        store.stats()
        store.entries()
        files.fail()
        clock.now += 60
        assert put(store, [52])[0] > 0
        assert found(store, 52)
        assert found(store, 25)
        store.close()


WRITER = """
import resource, sys
from kimicore.kv.disk import DiskBlock, DiskStore
size = int(sys.argv[2])
store = DiskStore.open(sys.argv[1], 1 << 24, segment_bytes=1 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
put = lambda n: store.put([DiskBlock(n.to_bytes(16, "little"), b"l" * 16, 1, memoryview(bytes([n]) * 9000))])[0]
from kimicore.kv.codec import Codec
store._codec = Codec("raw")
stored = [put(n) for n in range(40)]
out = memoryview(bytearray(9000))
right = [store.get(n.to_bytes(16, "little"), b"l" * 16, out) and out == bytes([n]) * 9000 for n in range(40)]
assert right == [bool(one) for one in stored], (right, stored)
print(sum(right), store.stats().write_failures)
store.close()
"""


@pytest.mark.parametrize("limit", [100_000, 122_880, 123_000])
def test_a_file_size_limit_for_real(folder: Path, limit: int) -> None:
    """Under the system's own limit on a file's size, what did not fit is not stored, and what was stored is right."""
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(folder), str(limit)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    hits, failures = map(int, done.stdout.split())
    assert hits == (limit - 4096) // 12288
    assert failures == 1
    store = opened(folder, 1 << 24)
    assert len(numbers(store)) == hits
    out = memoryview(bytearray(9000))
    assert all(store.get(key(n), b"l" * 16, out) and out == bytes([n]) * 9000 for n in range(hits))
    store.close()


def test_a_full_disk_for_real(tmp_path: Path) -> None:
    """On a small disk that is really full, blocks are stored until there is no room, and nothing is lost or wrong."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        clock = Clock()
        store = opened(small / "tier", 1 << 24, clock=clock)
        stored = put(store, range(60))
        for number in range(60, 80):
            clock.now += 60
            stored += put(store, [number])
        kept = [number for number, size in enumerate(stored) if size]
        assert kept
        assert store.stats().write_failures > 0
        assert all(found(store, number) for number in kept)
        store.discard(map(key, kept[::2]))
        clock.now += 60
        store.close()
        store = opened(small / "tier", 1 << 24)
        assert all(found(store, number) for number in kept[1::2])
        assert store.get(key(999), LAYOUT, memoryview(bytearray(1))) is False
        store.close()
    finally:
        subprocess.run(["umount", str(small)], check=True)
