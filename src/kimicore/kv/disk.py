"""The SSD tier's store of KV blocks: what it gives back is what was put, or nothing.

Blocks lie in append-only segment files (see ``kimicore.kv.record``). A block is published when it is on the disk, and
is checked whole when it is read: a mismatch of any kind is a miss. Nothing that the disk does is the engine's error.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from attrs import evolve, field, frozen

from kimicore.checks import integer
from kimicore.errors import ConfigError
from kimicore.kv.ahead import Ahead, read_ahead
from kimicore.kv.codec import Codec, CorruptBlock
from kimicore.kv.compaction import admit, compact_all, tidy
from kimicore.kv.direct import PageBuffers
from kimicore.kv.files import Files
from kimicore.kv.folder import DiskFolder, open_folder
from kimicore.kv.log import Item, Log
from kimicore.kv.record import PAGE_BYTES, Record, payload_sum
from kimicore.kv.segment import BadRecord
from kimicore.kv.space import Space

__all__ = ["DiskBlock", "DiskEntry", "DiskStats", "DiskStore"]

_KEY_BYTES: Final = 16
_LEAST_SEGMENT_BYTES: Final = 64 << 10
_DEFAULT_SEGMENTS: Final = 32  # of the default size in the limit ...
_LEAST_DEFAULT_BYTES: Final = 4 << 20  # ... but not smaller than this
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0


def _name(_: object, attribute: object, value: bytes) -> None:
    if len(value) != _KEY_BYTES:
        raise ValueError(f"a key and a layout have {_KEY_BYTES} bytes each, not {len(value)}")


@frozen
class DiskEntry:
    """A block that is stored: its key and layout (16 bytes each) and the bytes that it takes up on disk."""

    key: bytes
    layout: bytes
    stored_bytes: int


@frozen(eq=False)
class DiskBlock:
    """A block to put: ``raw`` are its contiguous bytes, of items of ``item_bytes`` each.

    ``layout`` is a digest of what the bytes mean (class, dtype, shape, block size); it is stored and asked for again.
    """

    key: bytes = field(validator=_name)
    layout: bytes = field(validator=_name)
    item_bytes: int
    raw: memoryview


@frozen
class DiskStats:
    """Counters and gauges of a store at one moment.

    ``live_bytes`` of ``used_bytes`` are of blocks that can be read; the rest is dead or overhead. ``reads`` gave a
    block (``read_bytes`` from disk), ``writes`` stored one (``raw_bytes`` became ``written_bytes``). ``write_failures``
    and ``read_failures`` are errors of the system, ``set_aside`` counts blocks whose bytes were proven bad.
    """

    records: int
    live_bytes: int
    used_bytes: int
    limit_bytes: int
    segments: int
    reads: int
    read_bytes: int
    writes: int
    written_bytes: int
    raw_bytes: int
    write_failures: int
    read_failures: int
    set_aside: int
    compactions: int
    direct: bool


class DiskStore:
    """KV blocks in a folder, within a limit in bytes. Any thread may call it; :meth:`open` makes one.

    No method raises OSError. The store never drops a good block by itself: the engine decides who leaves. It belongs to
    the process that opened it; in a forked one it stores and finds nothing.
    """

    def __init__(
        self, folder: DiskFolder, log: Log, codec: Codec, buffers: PageBuffers, clock: Callable[[], float]
    ) -> None:
        self._folder = folder
        self._log = log
        self._codec = codec
        self._buffers = buffers
        self._ahead_buffers = PageBuffers()  # of their own: what is read alone does not write over what was read ahead
        self._clock = clock
        self._process = os.getpid()
        self._closed = False
        self._write_failures = 0
        self._pause_s = 0.0
        self._paused_until = clock()

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        limit_bytes: int,
        *,
        codec: Codec | None = None,
        segment_bytes: int | None = None,
        direct: str = "auto",
        clock: Callable[[], float] = time.monotonic,
        files: Files | None = None,
    ) -> DiskStore:
        """Open the folder, or make it, and find what it holds.

        ``limit_bytes`` bounds what the store's files take up at any moment. A segment file has ``segment_bytes``, by
        default a 32nd of that; no block may be larger. ``direct``: reads go past the page cache ("on"), do not ("off"),
        or do where that works ("auto"). ``files`` are the system's calls.

        Raises :class:`~kimicore.ConfigError` that names the folder, the reason and the remedy. Whatever the files in
        the folder hold is no reason, but for a format of another version.
        """
        limit = integer("limit_bytes", limit_bytes, 1, None, ConfigError)
        if segment_bytes is None:
            segment_bytes = max(_LEAST_DEFAULT_BYTES, limit // _DEFAULT_SEGMENTS)
        size = integer("segment_bytes", segment_bytes, _LEAST_SEGMENT_BYTES, None, ConfigError)
        space = Space(limit, size // PAGE_BYTES * PAGE_BYTES)
        files = files or Files()
        buffers = PageBuffers()
        opened = open_folder(folder, direct, buffers, files)
        try:
            least = 2 * space.segment_bytes + space.slack_bytes + opened.fixed_bytes
            if limit < least:
                raise opened.refusal(
                    f"limit_bytes={limit} holds no two segments of {space.segment_bytes} bytes",
                    f"raise it to {least} bytes or more, or lower segment_bytes",
                )
            log = Log(files, opened, space, buffers)
            try:
                log.load()
            except OSError as error:
                log.close()
                raise opened.refusal(f"cannot be read: {error}", "look after the disk, or choose another") from error
            return cls(opened, log, codec or Codec(), buffers, clock)
        except BaseException:
            opened.close()
            raise

    @property
    def secret(self) -> bytes:
        """32 bytes that stay the same from start to start, and that only the folder's owner can read."""
        return self._folder.secret

    @property
    def used_bytes(self) -> int:
        """Bytes on disk of everything that is the store's; never over the limit."""
        return self._log.used_bytes

    @property
    def room_bytes(self) -> int:
        """How many more stored bytes could be put, if all dead space were won back first."""
        return self._log.room_bytes

    def __contains__(self, key: object) -> bool:
        """Whether a block is listed under this key; only reading it shows whether its bytes are right."""
        return key in self._log.index

    def entries(self) -> list[DiskEntry]:
        """Return the blocks that are stored, oldest first."""
        with self._log.lock:
            records = [place.record for place in self._log.index.values()]
        records.sort(key=lambda one: one.sequence)
        return [DiskEntry(one.key, one.layout, one.total_bytes) for one in records]

    def put(self, blocks: Sequence[DiskBlock]) -> list[int]:
        """Store blocks; return for each the bytes that it takes up, 0 where it was not stored.

        When this returns, what was stored is on the disk. A key that is there already is not written again. Nothing is
        stored where the limit leaves no room, after a failed write for 0.5 s to 30 s, and when the store is closed.
        """
        if not self._open:
            return [0] * len(blocks)
        items = {} if self._paused else self._encoded(blocks)
        if items:
            with self._log.writing:
                if self._open and not self._paused:
                    self._write([one for one in items.values() if not self._stored_bytes(one.record)])
        return [self._stored_bytes(block) for block in blocks]

    def read_ahead(self, keys: Sequence[bytes]) -> Ahead:
        """Read the records of the first of these keys, of 8 MiB at most, for :meth:`get`, called by the same thread.

        It covers at least one key. Records that lie side by side are read at once, and nothing is checked yet.
        """
        if not self._open:
            return Ahead(len(keys), {})
        return read_ahead(self._log, keys, self._ahead_buffers)

    def get(self, key: bytes, layout: bytes, out: memoryview, ahead: Ahead | None = None) -> bool:
        """Write a block's bytes into ``out`` and return True, or return False: not there, or not to be had.

        The bytes are those that were put under this key and layout, and exactly as many as ``out`` holds. Where False
        is returned, ``out`` may hold anything. A block that is proven bad is set aside for good; one that cannot be
        read just now stays. What this thread last read ``ahead`` is not read again, where it is the record still.
        """
        if not self._open:
            return False
        target = memoryview(out).cast("B")
        while (answer := self._read(key, layout, target, ahead)) is None:
            pass  # each round uses up a spare of the key
        return answer

    def _read(self, key: bytes, layout: bytes, target: memoryview, ahead: Ahead | None) -> bool | None:
        """Return whether ``target`` holds the block now; None where the record was bad and another took its place."""
        log = self._log
        with log.reading(key) as place:
            if place is None:
                return False
            record = place.record
            if record.layout != layout or record.raw_bytes != len(target):
                return False
            try:
                known = None if ahead is None else ahead.bytes_of(place)
                payload = place.segment.read(record, self._buffers, known)
                self._codec.decode(record.codec, payload, target, record.item_bytes)
            except BadRecord as bad:
                return None if log.set_aside(place, bury=bad.framed) else False
            except (CorruptBlock, ValueError):  # ValueError: items that no codec knows
                return None if log.set_aside(place, bury=True) else False
            except OSError:
                log.count_read_failure()
                return False
            log.count_read(record)
            return True

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget blocks; their space comes back when it is needed.

        After a restart a block that was discarded may be found again: it is as right as it was.
        """
        if self._open:
            self._log.forget(keys)

    def compact(self) -> None:
        """Win back the space of all blocks that were discarded."""
        if not self._open:
            return
        with self._log.writing:
            if self._open and not self._paused:
                with self._counted():
                    compact_all(self._log)

    def stats(self) -> DiskStats:
        """Return the counters and gauges."""
        log = self._log
        return DiskStats(
            records=len(log.index),
            live_bytes=log.live_bytes,
            used_bytes=log.used_bytes,
            limit_bytes=log.space.limit_bytes,
            segments=log.files,
            reads=log.reads,
            read_bytes=log.read_bytes,
            writes=log.writes,
            written_bytes=log.written_bytes,
            raw_bytes=log.raw_bytes,
            write_failures=self._write_failures,
            read_failures=log.read_failures,
            set_aside=log.bad_records,
            compactions=log.compactions,
            direct=self._folder.direct,
        )

    def close(self) -> None:
        """Let go of the folder; blocks that are being read are read to the end. Does nothing the second time."""
        if self._open:
            self._closed = True
            self._log.close()
        self._folder.close()

    # ------------------------------------------------------------ parts of put

    @property
    def _open(self) -> bool:
        return not self._closed and os.getpid() == self._process

    @property
    def _paused(self) -> bool:
        return self._clock() < self._paused_until

    def _stored_bytes(self, one: DiskBlock | Record) -> int:
        place = self._log.index.get(one.key)
        return place.record.total_bytes if place is not None and place.record.layout == one.layout else 0

    def _encoded(self, blocks: Sequence[DiskBlock]) -> dict[bytes, Item]:
        """Encode what is not there yet, as far as there may be room for it."""
        items: dict[bytes, Item] = {}
        left = self._log.room_bytes
        for block in blocks:
            if left <= 0 or block.key in items or self._stored_bytes(block):
                continue
            raw = memoryview(block.raw).cast("B")
            encoded = self._codec.encode(raw, block.item_bytes)
            size = len(encoded.payload)
            record = Record(block.key, block.layout, encoded.codec, block.item_bytes, len(raw), size, bytes(16))
            record = evolve(record, content_sum=payload_sum(record, encoded.payload))
            items[block.key] = Item(record, encoded.payload)
            if record.total_bytes <= left:
                left -= record.total_bytes
        return items

    def _write(self, items: Sequence[Item]) -> None:
        with self._counted():
            chosen = admit(self._log, items)
            self._log.append(chosen)
            if chosen:
                self._pause_s = 0.0
            tidy(self._log)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count an error of the system, and pause writing for a time that doubles from error to error."""
        try:
            yield
        except OSError:
            self._write_failures += 1
            self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            self._paused_until = self._clock() + self._pause_s
