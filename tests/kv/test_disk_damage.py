"""Whatever happens to the bytes on disk, a block that comes back is right, and what is not damaged still comes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kimicore.kv.codec import Codec
from kimicore.kv.disk import DiskBlock, DiskStore
from kimicore.kv.record import HEADER_BYTES, PAGE_BYTES, Record

from .rig import LAYOUT, block, content, flip, found, key, numbers, overwrite, put, records, segments

Make = Callable[..., DiskStore]
COUNT = 6


def cut(path: Path, how: str) -> None:
    """Cut or lengthen a file."""
    size = path.stat().st_size
    if how == "junk":
        with path.open("ab") as file:
            file.write(os.urandom(10_001))
    else:
        os.truncate(path, {"0": 0, "1": 1, "50%": size // 2, "n-1": size - 1}[how])


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("how", ["0", "1", "50%", "n-1", "junk"])
def test_a_cut_file_loses_what_was_cut(make: Make, folder: Path, how: str, direct: str, restart: bool) -> None:
    """Of a file that is cut or grown, while it is open or between two runs, what is left is right and the rest a miss
    (LMCache/LMCache#3292); new blocks are kept.
    """
    store = make(direct=direct)
    put(store, range(COUNT))
    if restart:
        store.close()
    cut(segments(folder)[0], how)
    if restart:
        store = make(direct=direct)
    hits = [found(store, number) for number in range(COUNT)]
    assert hits == sorted(hits, reverse=True)
    assert sum(hits) == {"0": 0, "1": 0, "50%": COUNT // 2 - 1, "n-1": COUNT - 1, "junk": COUNT}[how]
    assert numbers(store) == list(range(sum(hits)))
    assert put(store, [50])[0] > 0
    again = make(direct=direct)
    assert found(again, 50) or (not restart and how in ("0", "1"))  # an open file has lost its header with the rest
    left = [found(again, number) for number in range(COUNT)]
    assert left == hits or not restart


def test_swapped_files_are_misses(make: Make, folder: Path) -> None:
    """Two files whose contents were swapped give nothing at the next start; a good file beside them stays."""
    for number in range(3):
        put(make(), [number])
    make().close()
    first, second, _ = segments(folder)
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    store = make()
    assert numbers(store) == [2]
    assert [found(store, number) for number in range(3)] == [False, False, True]
    assert len(segments(folder)) == 1


def test_files_swapped_under_an_open_store_are_misses(make: Make, folder: Path) -> None:
    """Contents that are swapped while the store reads them are recognized as another segment's, and not buried."""
    put(make(), [0])
    store = make()
    put(store, [1, 2])
    first, second = segments(folder)
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)
    assert not any(found(store, number) for number in range(3))
    assert store.stats().set_aside == 3
    store.close()
    first.write_bytes(one)
    second.write_bytes(two)
    store = make()
    assert all(found(store, number) for number in range(3))


def test_a_record_in_another_place_is_none(make: Make, folder: Path) -> None:
    """A whole record that is copied to another place or file, old blocks of a disk for example, is not found there."""
    put(make(), [1, 2])
    put(make(), [3, 4])
    make().close()
    first, second = segments(folder)
    one, two = records(first)
    other = records(second)[0]
    data = first.read_bytes()
    assert one.total_bytes == two.total_bytes
    overwrite(first, two.offset, data[one.offset : one.offset + one.total_bytes])
    overwrite(second, other.offset, data[one.offset : one.offset + one.total_bytes])
    store = make()
    assert sorted(numbers(store)) == [1, 4]
    assert found(store, 1)
    assert found(store, 4)


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_any_flipped_bit_is_a_miss(make: Make, folder: Path, direct: str) -> None:
    """A bit that flips anywhere in a record is a miss for this block alone; in the padding it is nothing."""
    put(make(), range(COUNT))
    make().close()
    path = segments(folder)[0]
    whole = path.read_bytes()
    record = records(path)[3]
    end = record.offset + HEADER_BYTES + record.payload_bytes
    inside = [*range(record.offset, record.offset + HEADER_BYTES, 7), *range(record.offset + HEADER_BYTES, end, 523)]
    for offset in [*inside, end - 1, end, record.offset + record.total_bytes - 1]:
        path.write_bytes(whole)
        flip(path, offset)
        store = make(direct=direct)
        assert found(store, 3) == (offset >= end)
        assert [found(store, number) for number in range(COUNT) if number != 3] == [True] * (COUNT - 1)


def test_a_bad_block_is_not_found_again(make: Make, folder: Path) -> None:
    """A block that is proven bad is set aside and buried, so that a restart does not list it; it can be put anew."""
    store = make()
    sizes = put(store, range(COUNT))
    path = segments(folder)[0]
    flip(path, records(path)[2].offset + HEADER_BYTES + 100)
    assert not found(store, 2)
    assert numbers(store) == [0, 1, 3, 4, 5]
    assert (store.stats().set_aside, store.stats().read_failures) == (1, 0)
    assert not found(store, 2)
    assert store.stats().set_aside == 1
    store = make()
    assert numbers(store) == [0, 1, 3, 4, 5]
    assert put(store, [2]) == [sizes[2]]
    store = make()
    assert all(found(store, number) for number in range(COUNT))


@pytest.mark.parametrize("at", [0, 10, 30, 60, 100, 130, 170, 191])
def test_a_header_that_changes_under_an_open_store_is_a_miss(make: Make, folder: Path, at: int) -> None:
    """The header is checked with every read, also where the payload is as it was."""
    store = make()
    put(store, range(3))
    path = segments(folder)[0]
    flip(path, records(path)[1].offset + at)
    assert [found(store, number) for number in range(3)] == [True, False, True]
    assert store.stats().set_aside == 1


def test_a_new_file_of_the_name_is_not_written_to(make: Make, folder: Path) -> None:
    """Where a good file has replaced the one that is open, the tombstone for what was bad in the old one stays away."""
    store = make()
    put(store, range(3))
    path = segments(folder)[0]
    good = path.read_bytes()
    flip(path, records(path)[1].offset + HEADER_BYTES)
    fresh = folder / "fresh"
    fresh.write_bytes(good)
    fresh.chmod(0o600)
    fresh.replace(path)
    assert not found(store, 1)
    assert path.read_bytes() == good
    store = make()
    assert all(found(store, number) for number in range(3))


def test_a_replacement_is_not_removed_with_the_bad_one(make: Make, folder: Path) -> None:
    """Setting a block aside takes away that record, never one of the same key that was put meanwhile."""
    store = make()
    put(store, [1])
    with store._log.reading(key(1)) as old:
        assert old is not None
        store.discard([key(1)])
        put(store, [1])
        store._log.set_aside(old, bury=True)
    assert found(store, 1)
    assert found(make(), 1)


def test_a_broken_header_does_not_hide_what_follows(make: Make, folder: Path) -> None:
    """Behind a header that cannot be read, the search goes on at the next page."""
    put(make(), range(COUNT))
    make().close()
    path = segments(folder)[0]
    _, second, third, *_ = records(path)
    overwrite(path, second.offset, bytes(PAGE_BYTES))
    overwrite(path, third.offset, b"KimiKVre" + os.urandom(PAGE_BYTES - 8))
    store = make()
    assert numbers(store) == [0, 3, 4, 5]
    assert all(found(store, number) for number in (0, 3, 4, 5))


def test_a_payload_that_looks_like_a_record_is_none(make: Make, folder: Path) -> None:
    """Records planted inside a block's bytes are not found, even where the search comes through them."""
    planted = b"".join(
        Record(key(n), LAYOUT, 0, 1, 10, 10, b"s" * 16, 99, b"i" * 16, (n + 1) * PAGE_BYTES)
        .pack()
        .ljust(PAGE_BYTES, b"x")
        for n in range(5)
    )
    raw = (b"\0" * (PAGE_BYTES - HEADER_BYTES)) + planted
    store = make(codec=Codec("raw"))
    store.put([DiskBlock(key(20), LAYOUT, 1, memoryview(raw)), block(21)])
    store.close()
    path = segments(folder)[0]
    flip(path, PAGE_BYTES + 20)
    store = make()
    assert numbers(store) == [21]
    assert found(store, 21)


def test_of_two_records_of_a_key_the_later_one_counts(make: Make, folder: Path) -> None:
    """Where a key is found twice, as after a discard and a new put, the higher sequence number wins."""
    put(make(), [1, 3])
    store = make()
    store.discard([key(1)])
    assert store.put([DiskBlock(key(1), LAYOUT, 2, memoryview(content(2)))])[0] > 0
    for _ in range(2):
        store = make()
        out = memoryview(bytearray(6000))
        assert numbers(store).count(1) == 1
        assert store.get(key(1), LAYOUT, out)
        assert out == content(2)
        put(store, [9])


def test_a_bad_record_is_dropped_by_compaction(make: Make, folder: Path) -> None:
    """Compaction checks what it copies: a record that turns out bad is dropped, the others go on."""
    store = make()
    put(store, range(COUNT))
    path = segments(folder)[0]
    flip(path, records(path)[2].offset + HEADER_BYTES + 1)
    store.discard([key(0)])
    store.compact()
    assert numbers(store) == [1, 3, 4, 5]
    assert store.stats().set_aside == 1
    assert not path.exists()
    assert all(found(store, number) for number in (1, 3, 4, 5))


@pytest.mark.parametrize("then", ["get", "compact"])
@pytest.mark.parametrize("which", [0, 1])
def test_of_two_copies_a_good_one_is_found(make: Make, folder: Path, which: int, then: str) -> None:
    """Where a crash left a block twice, its source and a copy, and either is bad, the other one is found: no compaction
    takes it away before it is known which is good.
    """
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
    assert sorted(numbers(store)) == list(range(COUNT))
    if then == "compact":
        store.discard([key(5)])
        store.compact()
        assert len(segments(folder)) == 1
    assert all(found(store, number) for number in range(COUNT - 1))
    store = make()
    assert all(found(store, number) for number in range(COUNT - 1))


def test_files_that_are_removed_under_an_open_store(make: Make, folder: Path) -> None:
    """A folder or file that goes away is a miss or the right bytes, and no error; putting pauses."""
    put(make(), [1])
    store = make()
    put(store, [2])
    for path in segments(folder):
        path.unlink()
    assert found(store, 1)
    assert found(store, 2)
    assert put(store, [3]) == [0]
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert put(store, [4]) == [0]
    store.compact()
    store.discard([key(1)])
    assert store.stats().write_failures == 1
    store.close()
    assert numbers(make()) == []
