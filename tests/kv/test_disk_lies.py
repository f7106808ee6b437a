"""Records that lie: whatever a header or payload claims, a get is right or a miss, in bounded memory."""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
import zstandard
from attrs import evolve

from kimicore.kv.disk import DiskStore
from kimicore.kv.record import HEADER_BYTES, SegmentHeader, payload_sum

from .rig import LAYOUT, content, found, key, numbers, overwrite, put, records, segments

Make = Callable[..., DiskStore]
SIZE = 16 << 20
ZSTD = zstandard.ZstdCompressor(level=1)


def forge(path: Path, index: int, payload: bytes, **said: int) -> None:
    """Put another payload under a record's header, with checksums that fit: what a hostile writer could do."""
    old = records(path)[index]
    record = evolve(old, payload_bytes=len(payload), **said)
    assert record.total_bytes <= old.total_bytes
    record = evolve(record, content_sum=payload_sum(record, payload))
    padding = bytes(record.total_bytes - HEADER_BYTES - len(payload))
    overwrite(path, old.offset, record.pack() + payload + padding)


def wide_window() -> bytes:
    """A frame that says it needs a window of 2 GiB."""
    return struct.pack("<IBB", 0xFD2FB528, 0, 21 << 3) + b"\x01\x00\x00" + b"\x02\x00\x00" + bytes(100)


@pytest.mark.parametrize(
    ("codec", "payload"),
    [
        pytest.param(1, ZSTD.compress(bytes(SIZE)), id="16 MiB of zeros"),
        pytest.param(1, ZSTD.compress(content(1, 5999)), id="a byte short"),
        pytest.param(1, ZSTD.compress(content(1, 6001)), id="a byte long"),
        pytest.param(1, wide_window(), id="a window of 2 GiB"),
        pytest.param(1, b"", id="nothing"),
        pytest.param(2, struct.pack("<II", 2**32 - 1, 2**32 - 1), id="planes of 4 GiB"),
        pytest.param(0, content(1, 5999), id="raw, a byte short"),
        pytest.param(77, content(1, 6000), id="a codec that is not known"),
    ],
)
def test_a_lying_payload_is_a_miss_in_bounded_memory(make: Make, folder: Path, codec: int, payload: bytes) -> None:
    """A frame that says more, less or otherwise than the block has is a miss (luben/zstd-jni#382,
    indygreg/python-zstandard#157), although every checksum fits; it is set aside.
    """
    put(make(), [1, 4, 3])
    make().close()
    forge(segments(folder)[0], 1, payload, codec=codec)
    store = make()
    assert numbers(store) == [1, 4, 3]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert not store.get(key(4), LAYOUT, memoryview(bytearray(6000)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    assert numbers(store) == [1, 3]
    assert store.stats().set_aside == 1
    assert found(store, 1)
    assert found(store, 3)
    assert numbers(make()) == [1, 3]


@pytest.mark.parametrize(
    "said", [{"item_bytes": 0}, {"item_bytes": 7}, {"item_bytes": 2**32 - 1}, {"raw_bytes": 2**60}]
)
def test_lengths_that_lie_are_misses(make: Make, folder: Path, said: dict[str, int]) -> None:
    """Items of no possible size and a block of an impossible length are misses and no error."""
    put(make(), [4])
    make().close()
    forge(segments(folder)[0], 0, content(4), **said)
    store = make()
    store.get(key(4), LAYOUT, memoryview(bytearray(6000)))
    assert put(store, [5])[0] > 0
    assert found(store, 5)


def test_a_record_that_claims_more_than_the_file_has_is_none(make: Make, folder: Path) -> None:
    """A length is believed as far as the file goes: a record that would end behind it is skipped."""
    put(make(), range(3))
    make().close()
    path = segments(folder)[0]
    first = records(path)[0]
    overwrite(path, first.offset, evolve(first, payload_bytes=2**40).pack())
    store = make()
    assert numbers(store) == [1, 2]


@pytest.mark.parametrize("what", ["record", "segment"])
def test_a_later_version_is_skipped_and_kept(make: Make, folder: Path, what: str) -> None:
    """Records and segments of a later version are no hits, are not removed, and count towards the limit."""
    put(make(), range(3))
    make().close()
    path = segments(folder)[0]
    at = records(path)[1].offset if what == "record" else 0
    header = bytearray(path.read_bytes()[at : at + HEADER_BYTES])
    header[8:10] = (2).to_bytes(2, "little")
    header[-16:] = xxhash.xxh3_128_digest(header[:-16])
    overwrite(path, at, bytes(header))
    before = path.read_bytes()
    store = make()
    assert numbers(store) == ([0, 2] if what == "record" else [])
    store.discard([key(0), key(2)])
    put(store, range(10, 14))
    store.compact()
    assert store.used_bytes > len(before)
    assert found(store, 12)
    store = make()
    assert path.read_bytes() == before
    assert found(store, 12)


@pytest.mark.parametrize("change", [{"number": 7}, {"store": b"another store..."}])
def test_another_stores_segment_is_removed(make: Make, folder: Path, change: dict[str, object]) -> None:
    """A segment whose header names another number or store can never be asked for rightly, so it goes."""
    put(make(), [1])
    put(make(), [2])
    make().close()
    path = segments(folder)[0]
    data = memoryview(path.read_bytes())
    number, ident, store = struct.unpack_from("<Q16s16s", data, 20)
    header = evolve(SegmentHeader(number, ident, store), **change)
    overwrite(path, 0, header.pack())
    again = make()
    assert numbers(again) == [2]
    assert not path.exists()
