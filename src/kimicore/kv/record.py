"""What lies on disk: the header of a segment file, the header of a record, and the checksums that bind them.

A segment is one page of header and then records, each at a multiple of 4,096 bytes: 192 bytes of header, the payload,
zeros up to the next page. All numbers are little-endian.

Two checksums stand in a record's header. The first covers the payload and what it means (key, layout, lengths,
codec), and goes along when a record is copied. The second covers the header, which names the segment and the place
as well, so that a record that turns up anywhere else is none.
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash
from attrs import evolve, frozen

__all__ = [
    "DEAD",
    "HEADER_BYTES",
    "LIVE",
    "PAGE_BYTES",
    "RECORD_MAGIC",
    "Foreign",
    "Record",
    "SegmentHeader",
    "paged",
    "parse_record",
    "parse_segment",
    "payload_sum",
]

PAGE_BYTES: Final = 4096
HEADER_BYTES: Final = 192
RECORD_MAGIC: Final = b"KimiKVre"
LIVE: Final = 0
DEAD: Final = 1  # written over a header whose payload has been proven bad

_SEGMENT_MAGIC: Final = b"KimiKVse"
_VERSION: Final = 1
_SUM_BYTES: Final = 16
# Every version begins like this and ends its header with the header's checksum, so that all can skip later ones:
# magic, version, bytes of the header, bytes of the whole.
_START: Final = struct.Struct("<8sHHQ")
_SEGMENT: Final = struct.Struct("<8sHHQQ16s16s")
_PLACE: Final = struct.Struct("<HHQQ16s")
_CONTENT: Final = struct.Struct("<16s16sIIQQ")
_HEAD: Final = struct.Struct(f"<{_START.size}s{_PLACE.size}s{_CONTENT.size}s16s")


def paged(size_bytes: int) -> int:
    """Return the size rounded up to whole pages of 4,096 bytes."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _sealed(head: bytes, header_bytes: int) -> bytes:
    body = head.ljust(header_bytes - _SUM_BYTES, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def _intact(data: memoryview, header_bytes: int) -> bool:
    body = header_bytes - _SUM_BYTES
    return xxhash.xxh3_128_digest(data[:body]) == data[body:header_bytes]


@frozen
class SegmentHeader:
    """The first page of a segment: its number (which its name says too), its random id, and the store it belongs to."""

    number: int
    ident: bytes
    store: bytes

    def pack(self) -> bytes:
        """Return the page."""
        head = _SEGMENT.pack(_SEGMENT_MAGIC, _VERSION, HEADER_BYTES, PAGE_BYTES, self.number, self.ident, self.store)
        return _sealed(head, HEADER_BYTES).ljust(PAGE_BYTES, b"\0")


@frozen
class Foreign:
    """Something whole of another version: nothing is known of it but its size in bytes, whole pages."""

    total_bytes: int


@frozen
class Record:
    """One block in a segment: what it is (``key``, ``layout``), how it is written, and where.

    ``sequence`` counts what was ever put, and decides between two records of a key; ``offset`` is in bytes from the
    start of segment ``ident``. ``payload_bytes`` is the payload alone, :attr:`total_bytes` what the record takes up.
    """

    key: bytes
    layout: bytes
    codec: int
    item_bytes: int
    raw_bytes: int
    payload_bytes: int
    content_sum: bytes
    sequence: int = 0
    ident: bytes = bytes(16)
    offset: int = 0
    kind: int = LIVE

    @property
    def total_bytes(self) -> int:
        """Bytes on disk: header, payload and the zeros up to the next page."""
        return paged(HEADER_BYTES + self.payload_bytes)

    def at(self, ident: bytes, offset: int) -> Record:
        """Return the same record in another place."""
        return evolve(self, ident=ident, offset=offset)

    def dead(self) -> Record:
        """Return the record's tombstone, which stands in the same place."""
        return evolve(self, kind=DEAD)

    def pack(self) -> bytes:
        """Return the header's bytes."""
        head = _HEAD.pack(
            _START.pack(RECORD_MAGIC, _VERSION, HEADER_BYTES, self.total_bytes),
            _PLACE.pack(self.kind, self.codec, self.sequence, self.offset, self.ident),
            _content(self),
            self.content_sum,
        )
        return _sealed(head, HEADER_BYTES)


def _content(record: Record) -> bytes:
    one = record
    return _CONTENT.pack(one.key, one.layout, one.item_bytes, one.codec, one.raw_bytes, one.payload_bytes)


def payload_sum(record: Record, payload: bytes | memoryview) -> bytes:
    """Return the checksum of a payload under what the record says of it; ``content_sum`` is where it is kept."""
    digest = xxhash.xxh3_128(_content(record))
    digest.update(payload)
    return digest.digest()


def _start(data: memoryview, magic: bytes) -> tuple[int, int, int] | None:
    """Return version, header bytes and total bytes of an intact header of any version."""
    if len(data) < _START.size or data[: len(magic)] != magic:
        return None
    _, version, header_bytes, total_bytes = _START.unpack_from(data)
    if not _START.size + _SUM_BYTES <= header_bytes <= min(len(data), PAGE_BYTES):
        return None
    if total_bytes < PAGE_BYTES or total_bytes % PAGE_BYTES or not _intact(data, header_bytes):
        return None
    return version, header_bytes, total_bytes


def parse_record(data: memoryview) -> Record | Foreign | None:
    """Return the record whose header ``data`` begins with (a page, or less at a file's end), or None.

    Nothing is returned but what the checksum proves. A header of another version gives a :class:`Foreign`.
    """
    start = _start(data, RECORD_MAGIC)
    if start is None:
        return None
    version, header_bytes, total_bytes = start
    if version != _VERSION:
        return Foreign(total_bytes)
    if header_bytes != HEADER_BYTES:
        return None
    _, place, content, content_sum = _HEAD.unpack_from(data)
    kind, codec, sequence, offset, ident = _PLACE.unpack(place)
    key, layout, item_bytes, codec_again, raw_bytes, payload_bytes = _CONTENT.unpack(content)
    record = Record(
        key, layout, codec, item_bytes, raw_bytes, payload_bytes, content_sum, sequence, ident, offset, kind
    )
    return record if codec == codec_again and record.total_bytes == total_bytes else None


def parse_segment(data: memoryview) -> SegmentHeader | Foreign | None:
    """Return the segment header that ``data`` begins with, a :class:`Foreign` for another version, or None."""
    start = _start(data, _SEGMENT_MAGIC)
    if start is None:
        return None
    version, header_bytes, _ = start
    if version != _VERSION:
        return Foreign(PAGE_BYTES)
    if header_bytes != HEADER_BYTES:
        return None
    return SegmentHeader(*_SEGMENT.unpack_from(data)[4:])
