"""Headers on disk: what is read is what was written, and nothing else is ever read."""

from __future__ import annotations

import struct

import pytest
import xxhash
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kimicore.kv.record import (
    DEAD,
    HEADER_BYTES,
    PAGE_BYTES,
    Foreign,
    Record,
    SegmentHeader,
    parse_record,
    parse_segment,
    payload_sum,
)

IDS = st.binary(min_size=16, max_size=16)
U32, U63 = st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1)
RECORDS = st.builds(
    Record,
    key=IDS,
    layout=IDS,
    codec=st.integers(0, 2**16 - 1),
    item_bytes=U32,
    raw_bytes=U63,
    payload_bytes=st.integers(0, 2**60),
    content_sum=IDS,
    sequence=U63,
    ident=IDS,
    offset=U63,
    kind=st.integers(0, 2**16 - 1),
)
ONE = Record(b"k" * 16, b"l" * 16, 2, 2, 4096, 1000, b"s" * 16, 7, b"i" * 16, 8192)
PAGE = memoryview(ONE.pack().ljust(PAGE_BYTES, b"p"))


def resealed(header: bytearray) -> memoryview:
    """The header with a checksum that fits what it says."""
    header[-16:] = xxhash.xxh3_128_digest(header[:-16])
    return memoryview(bytes(header))


@given(RECORDS)
def test_a_header_comes_back_as_it_was(record: Record) -> None:
    """A record's header says after reading what it said before writing, in 192 bytes."""
    packed = record.pack()
    assert len(packed) == HEADER_BYTES
    assert parse_record(memoryview(packed + b"payload")) == record


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_a_flipped_bit_is_seen(bit: int) -> None:
    """No header is read in which one bit is another."""
    packed = bytearray(ONE.pack())
    packed[bit // 8] ^= 1 << bit % 8
    assert parse_record(memoryview(packed)) is None


@given(st.binary(max_size=PAGE_BYTES))
def test_any_bytes_can_be_read(data: bytes) -> None:
    """Bytes of any kind give no record and no error, also behind a right beginning."""
    assert parse_record(memoryview(data)) is None
    assert parse_segment(memoryview(data)) is None
    assert parse_record(memoryview(ONE.pack()[:16] + data)) is None


@pytest.mark.parametrize("size", [0, 1, 8, 20, HEADER_BYTES - 1])
def test_part_of_a_header_is_none(size: int) -> None:
    """A header that the file's end cuts off is none."""
    assert parse_record(PAGE[:size]) is None
    assert parse_segment(memoryview(SegmentHeader(1, b"i" * 16, b"s" * 16).pack())[:size]) is None


def test_another_version_is_told_by_its_size() -> None:
    """A header of a later version, of another length, is skipped by the size that it says, if it is whole."""
    later = bytearray(struct.pack("<8sHHQ", b"KimiKVre", 9, 256, 3 * PAGE_BYTES).ljust(256, b"x"))
    assert parse_record(resealed(later)) == Foreign(3 * PAGE_BYTES)
    broken = bytearray(resealed(later))
    broken[100] ^= 1
    assert parse_record(memoryview(broken)) is None


@pytest.mark.parametrize("total", [0, 1, 100, PAGE_BYTES - 1, PAGE_BYTES + 1])
def test_lengths_that_cannot_be_are_refused(total: int) -> None:
    """A length that is no whole number of pages, or none, is no header, whoever computed its checksum."""
    header = bytearray(ONE.pack())
    header[12:20] = total.to_bytes(8, "little")
    assert parse_record(resealed(header)) is None
    header[8:10] = (9).to_bytes(2, "little")
    assert parse_record(resealed(header)) is None


def test_a_length_beside_the_payloads_is_refused() -> None:
    """The record's length follows from the payload's; a header in which they disagree is none."""
    header = bytearray(ONE.pack())
    header[12:20] = (5 * PAGE_BYTES).to_bytes(8, "little")
    assert parse_record(resealed(header)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"K" * 16},
        {"layout": b"L" * 16},
        {"codec": 1},
        {"item_bytes": 4},
        {"raw_bytes": 1},
        {"payload_bytes": 9},
    ],
)
def test_a_payload_under_another_header_never_verifies(change: dict[str, object]) -> None:
    """The payload's checksum covers everything that says what the payload means."""
    assert payload_sum(evolve(ONE, **change), b"payload") != payload_sum(ONE, b"payload")
    assert payload_sum(ONE, b"Payload") != payload_sum(ONE, b"payload")


def test_a_copy_keeps_its_payloads_checksum() -> None:
    """Where a record lies, and its tombstone, are no part of the payload's checksum."""
    assert payload_sum(ONE.at(b"j" * 16, 0), b"payload") == payload_sum(ONE, b"payload")
    dead = parse_record(memoryview(ONE.dead().pack()))
    assert isinstance(dead, Record)
    assert (dead.kind, dead.total_bytes) == (DEAD, ONE.total_bytes)


@given(U63, IDS, IDS)
def test_a_segments_header_comes_back_as_it_was(number: int, ident: bytes, store: bytes) -> None:
    """A segment's header is one page and says after reading what it said before; a record's is none."""
    header = SegmentHeader(number, ident, store)
    assert len(header.pack()) == PAGE_BYTES
    assert parse_segment(memoryview(header.pack())) == header
    assert parse_record(memoryview(header.pack())) is None
    assert parse_segment(PAGE) is None
