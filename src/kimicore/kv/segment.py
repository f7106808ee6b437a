"""One segment file: appended to by one writer, read by many, never written in the middle but for tombstones."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from typing import Final

from kimicore.kv.direct import PageBuffers, read_pages
from kimicore.kv.files import Buffer, Files, write_whole
from kimicore.kv.record import (
    HEADER_BYTES,
    LIVE,
    PAGE_BYTES,
    RECORD_MAGIC,
    Foreign,
    Record,
    SegmentHeader,
    paged,
    parse_record,
    parse_segment,
    payload_sum,
)

__all__ = ["BadRecord", "Segment", "create_segment", "load_segment", "segment_name", "segment_number"]

_NAME: Final = re.compile(r"segment-(0[0-9a-f]{15})\.kv")  # the next number always has a name as well
_SEARCH_BYTES: Final = 256 << 10


class BadRecord(Exception):
    """A record whose bytes are proven not to be what was written; ``framed`` where its header still is."""

    def __init__(self, message: str, *, framed: bool = False) -> None:
        super().__init__(message)
        self.framed = framed


def segment_name(number: int) -> str:
    """Return the file name of a segment."""
    return f"segment-{number:016x}.kv"


def segment_number(name: str) -> int | None:
    """Return the number that a file name says, or None where the file is no segment."""
    match = _NAME.fullmatch(name)
    return int(match[1], 16) if match else None


class Segment:
    """An open segment. ``live`` holds its published records by key; who changes it holds the store's lock.

    ``end_bytes`` is where the next record goes, ``durable_bytes`` how far it is on the disk for certain, and
    ``taken_bytes`` what the file takes up there.
    ``foreign_bytes`` counts whole records of another version. ``write_fd`` is -1 once nothing is appended any more.
    """

    def __init__(self, files: Files, number: int, ident: bytes, read_fd: int, direct: bool, write_fd: int = -1) -> None:
        self.files = files
        self.direct = direct
        self.number = number
        self.ident = ident
        self.name = segment_name(number)
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.end_bytes = PAGE_BYTES
        self.durable_bytes = PAGE_BYTES
        self.taken_bytes = PAGE_BYTES
        self.live: dict[bytes, Record] = {}
        self.live_bytes = 0
        self.foreign_bytes = 0
        self.spares: set[bytes] = set()  # keys of records that may yet be needed, see the log
        self.named = write_fd < 0  # whether its name is known to be on the disk
        self.stuck = False  # could not be read or removed: left alone until the next start
        self.readers = 0
        self.retired = False

    @property
    def dead_bytes(self) -> int:
        """Bytes that nobody asks for any more."""
        return self.end_bytes - PAGE_BYTES - self.live_bytes - self.foreign_bytes

    @property
    def removable(self) -> bool:
        """Whether nothing in it is of use any more."""
        return self.write_fd < 0 and not self.live and not self.spares and not self.foreign_bytes

    def measure(self) -> None:
        """Look up what the file takes up on disk."""
        with contextlib.suppress(OSError):
            self.taken_bytes = max(self.end_bytes, self.files.taken_bytes(self.read_fd))

    def write(self, record: Record, payload: Buffer) -> Record:
        """Append a record and return it as placed; raises OSError. It is not on the disk before :meth:`sync`."""
        placed = record.at(self.ident, self.end_bytes)
        padding = bytes(placed.total_bytes - HEADER_BYTES - placed.payload_bytes)
        write_whole(self.files, self.write_fd, [placed.pack(), payload, padding], self.end_bytes)
        self.end_bytes += placed.total_bytes
        self.taken_bytes = max(self.taken_bytes, self.end_bytes)
        return placed

    def sync(self, folder: int) -> None:
        """Return when all that was appended is on the disk, the file's name included; raises OSError."""
        self.files.sync(self.write_fd)
        if not self.named:
            self.files.sync_folder(folder)
            self.named = True
        if not self.files.status(self.write_fd).st_nlink:
            raise OSError(errno.ENOENT, "the segment's file was removed")
        with contextlib.suppress(OSError):
            self.files.forget(self.write_fd, self.durable_bytes, self.end_bytes - self.durable_bytes)
        self.durable_bytes = self.end_bytes
        self.measure()

    def cut(self) -> None:
        """Take back what is not on the disk for certain, as far as the system lets us."""
        with contextlib.suppress(OSError):
            self.files.cut(self.write_fd, self.durable_bytes)
            self.end_bytes = self.taken_bytes = self.durable_bytes
        self.measure()

    def seal(self) -> None:
        """Append nothing any more."""
        if self.write_fd >= 0:
            fd, self.write_fd = self.write_fd, -1
            with contextlib.suppress(OSError):
                self.files.close(fd)

    def fill(self, view: memoryview, offset: int) -> int:
        """Fill whole pages from ``offset``; return the bytes read, fewer where the file ends. Raises OSError."""
        count = read_pages(self.files, self.read_fd, view, offset)
        if not self.direct:
            with contextlib.suppress(OSError):
                self.files.forget(self.read_fd, offset, len(view))
        return count

    def read(self, record: Record, buffers: PageBuffers, ahead: memoryview | None = None) -> memoryview:
        """Return a record's payload, checked against its header and checksums: in this thread's buffer, or in
        ``ahead``, its bytes where somebody has read them already.

        Raises :class:`BadRecord` where the bytes are wrong or the file is too short, OSError where it cannot be read.
        """
        view = ahead
        if view is None:
            view = buffers.take(record.total_bytes)
            if self.fill(view, record.offset) < len(view):
                if self.files.status(self.read_fd).st_size >= record.offset + len(view):
                    raise OSError(errno.EIO, "a read ended early")
                raise BadRecord("the file ends within the record")
        if parse_record(view) != record:
            raise BadRecord("another header stands there")
        payload = view[HEADER_BYTES : HEADER_BYTES + record.payload_bytes]
        if payload_sum(record, payload) != record.content_sum:
            raise BadRecord("the payload's checksum is another", framed=True)
        return payload

    def bury(self, record: Record, folder: int) -> None:
        """Write a tombstone over the record's header, where the file is still the one we know; best effort.

        Its 192 bytes lie in one sector, so a crash leaves either header or none that is valid.
        """
        with contextlib.suppress(OSError):
            fd = self.files.open(folder, self.name, os.O_WRONLY)
            try:
                here, known = self.files.status(fd), self.files.status(self.read_fd)
                if (here.st_dev, here.st_ino) == (known.st_dev, known.st_ino):
                    write_whole(self.files, fd, [record.dead().pack()], record.offset)
            finally:
                self.files.close(fd)

    def close(self) -> None:
        """Close the descriptors; nobody may be reading."""
        self.seal()
        if self.read_fd >= 0:
            fd, self.read_fd = self.read_fd, -1
            with contextlib.suppress(OSError):
                self.files.close(fd)


def create_segment(files: Files, folder: int, number: int, store: bytes, direct: bool) -> Segment:
    """Create a segment's file with its header, to be appended to; raises OSError and leaves nothing then."""
    header = SegmentHeader(number, secrets.token_bytes(16), store)
    name = segment_name(number)
    write_fd = files.open(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    read_fd = -1
    try:
        write_whole(files, write_fd, [header.pack()], 0)
        read_fd = _open_to_read(files, folder, name, direct)
        segment = Segment(files, number, header.ident, read_fd, direct, write_fd)
        segment.measure()
        return segment
    except OSError:
        for fd in (write_fd, read_fd):
            if fd >= 0:
                files.close(fd)
        with contextlib.suppress(OSError):
            files.remove(folder, name)
        raise


def _open_to_read(files: Files, folder: int, name: str, direct: bool) -> int:
    return files.open(folder, name, os.O_RDONLY | os.O_NONBLOCK | (os.O_DIRECT if direct else 0))


def load_segment(
    files: Files, folder: int, number: int, store: bytes, direct: bool, buffers: PageBuffers
) -> Segment | Foreign | None:
    """Open a segment that is there and read its headers, not its payloads: its records, all in ``live``.

    Two records of a key: the later one stays. None: its bytes are no segment of this store and number, so that it may
    be removed. A :class:`Foreign`: a later version's, to be left alone. Raises OSError.
    """
    fd = _open_to_read(files, folder, segment_name(number), direct)
    try:
        size = files.status(fd).st_size
        page = buffers.take(PAGE_BYTES)
        header = parse_segment(page[: read_pages(files, fd, page, 0)])
        if isinstance(header, Foreign):
            files.close(fd)
            return Foreign(paged(size))
        if header is None or (header.number, header.store) != (number, store):
            files.close(fd)
            return None
        segment = Segment(files, number, header.ident, fd, direct)
        _scan(segment, size, buffers)
        segment.end_bytes = segment.durable_bytes = size
        segment.measure()
        return segment
    except OSError:
        files.close(fd)
        raise


def _scan(segment: Segment, size: int, buffers: PageBuffers) -> None:
    at = PAGE_BYTES
    while at + PAGE_BYTES <= size:
        page = buffers.take(PAGE_BYTES)
        found = parse_record(page[: read_pages(segment.files, segment.read_fd, page, at)])
        if found is None or not _belongs(found, segment, at, size):
            at = _next_magic(segment, at + PAGE_BYTES, size, buffers)
            continue
        if isinstance(found, Foreign):
            segment.foreign_bytes += found.total_bytes
        elif found.kind == LIVE:
            _keep(segment, found)
        at += found.total_bytes


def _keep(segment: Segment, record: Record) -> None:
    """Note a record of the segment as live, unless a later one of its key is."""
    known = segment.live.get(record.key)
    if known is not None:
        if known.sequence > record.sequence:
            return
        segment.live_bytes -= known.total_bytes
    segment.live[record.key] = record
    segment.live_bytes += record.total_bytes


def _belongs(found: Record | Foreign, segment: Segment, at: int, size: int) -> bool:
    if at + found.total_bytes > size:
        return False
    return isinstance(found, Foreign) or (found.ident, found.offset) == (segment.ident, at)


def _next_magic(segment: Segment, at: int, size: int, buffers: PageBuffers) -> int:
    """Return where the next header may stand: the first page from ``at`` that begins like one, or the file's end."""
    while at < size:
        view = buffers.take(min(_SEARCH_BYTES, paged(size - at)))
        read = read_pages(segment.files, segment.read_fd, view, at)
        for start in range(0, read, PAGE_BYTES):
            if bytes(view[start : start + len(RECORD_MAGIC)]) == RECORD_MAGIC:
                return at + start
        if read < len(view):
            break
        at += read
    return size
