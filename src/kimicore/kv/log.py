"""The log of segments: which records are live and where, how space is kept, and how it is won back.

Two locks. ``writing`` is held by whoever appends, compacts or removes, so that these never meet; it may be held over a
write to the disk. ``lock`` guards the index and is held for moments only; it is taken inside the other, never around.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Final

from attrs import evolve, frozen

from kimicore.kv.direct import PageBuffers
from kimicore.kv.files import Buffer, Files
from kimicore.kv.folder import DiskFolder
from kimicore.kv.record import PAGE_BYTES, Foreign, Record
from kimicore.kv.segment import Segment, create_segment, load_segment, segment_name, segment_number
from kimicore.kv.space import Space

__all__ = ["Item", "Log", "Place"]

_LOADERS: Final = 8


@frozen(eq=False)
class Place:
    """A live record and the segment that it lies in."""

    segment: Segment
    record: Record


@frozen(eq=False)
class Item:
    """A record to append. Its payload stands still until the next item is asked for; ``old``: what it is a copy of."""

    record: Record
    payload: Buffer
    old: Place | None = None


class Log:
    """Segments of one folder and the index of their live records. No method raises OSError unless it says so."""

    def __init__(self, files: Files, folder: DiskFolder, space: Space, buffers: PageBuffers) -> None:
        self.writing = Lock()
        self.lock = Lock()
        self.index: dict[bytes, Place] = {}
        self.compactions = 0
        self.reads = self.read_bytes = 0
        self.writes = self.written_bytes = self.raw_bytes = 0
        self.read_failures = 0  # reads that the system refused
        self.bad_records = 0  # set aside
        self.space = space
        self.buffers = buffers
        self.segments: list[Segment] = []  # oldest first
        self.active: Segment | None = None  # the one that is appended to
        self._files = files
        self._folder = folder
        self._leaving: list[Segment] = []  # removed, but still read
        self._spares: dict[bytes, list[Place]] = {}  # other records of a key, until the one in the index has been read
        self._kept: dict[str, int] = {}  # bytes of segments that cannot be read, or are a later version's
        self._next_number = 0
        self._next_sequence = 1

    # ------------------------------------------------------------ start and end

    def load(self) -> None:
        """Find what is stored; what is over the limit goes, oldest first. Raises OSError for an unreadable folder."""
        numbers = sorted(n for name in self._files.names(self._folder.fd) if (n := segment_number(name)) is not None)
        with ThreadPoolExecutor(_LOADERS) as pool:  # a disk answers many small reads as fast as one
            for number, found in zip(numbers, pool.map(self._load, numbers), strict=True):
                if isinstance(found, Segment):
                    self.segments.append(found)
                    self._merge(found)
                elif isinstance(found, OSError):
                    self.read_failures += 1
                    self._keep(number, 0)
                elif isinstance(found, Foreign):
                    self._keep(number, found.total_bytes)
                else:
                    self._unlink(segment_name(number))
        self._next_number = max(numbers, default=-1) + 1
        with self.writing:
            for segment in [one for one in self.segments if one.removable]:
                self.retire(segment)
            self._keep_limit()

    def _load(self, number: int) -> Segment | Foreign | OSError | None:
        folder = self._folder
        try:
            return load_segment(self._files, folder.fd, number, folder.store, folder.direct, self.buffers)
        except OSError as error:
            return error

    def _keep(self, number: int, size_bytes: int) -> None:
        name = segment_name(number)
        with contextlib.suppress(OSError):
            size_bytes = max(size_bytes, self._folder.taken_bytes(name))
        self._kept[name] = size_bytes

    def _merge(self, segment: Segment) -> None:
        """Add a segment's records to the index; of two of a key the later stays, and the other is a spare.

        A crash can leave the header of a record without its payload, and beside it the record that it is a copy of or
        was to replace. A start reads no payloads, so it keeps both in mind until one has been read.
        """
        for key, record in list(segment.live.items()):
            self._next_sequence = max(self._next_sequence, record.sequence + 1)
            found, known = Place(segment, record), self.index.get(key)
            if known is None:
                self.index[key] = found
                continue
            later = found if record.sequence > known.record.sequence else known
            spare = known if later is found else found
            self._unlist(spare)
            self.index[key] = later
            self._spares.setdefault(key, []).append(spare)
            spare.segment.spares.add(key)

    def _keep_limit(self) -> None:
        """Drop the oldest segments where the limit is lower than it was.

        A little over the ceiling is no reason where compaction can mend it: it may have been cut short by a crash.
        """
        space = self.space
        if self.used_bytes > space.limit_bytes:
            while self.segments and self.used_bytes > space.ceiling_bytes:
                self._drop(self.segments[0])
        while self.segments and self.used_bytes > space.ceiling_bytes + space.slack_bytes:
            if any(one.dead_bytes > 0 for one in self.compactable()):
                break
            self._drop(self.segments[0])

    def _drop(self, segment: Segment) -> None:
        for key in segment.live:
            del self.index[key]
        for key in [*segment.live, *segment.spares]:
            self._drop_spares(key)
        segment.live.clear()
        segment.live_bytes = 0
        self.retire(segment)

    def close(self) -> None:
        """Forget all and close the files, those that are being read as soon as they are not."""
        with self.writing, self.lock:
            self.index.clear()
            self.active = None
            for segment in self.segments:
                segment.seal()
                segment.retired = True
                if not segment.readers:
                    segment.close()
            self.segments.clear()

    # ------------------------------------------------------------ space

    @property
    def used_bytes(self) -> int:
        """Bytes that everything of ours in the folder takes up, and what is removed but still being read."""
        segments = sum(one.taken_bytes for one in [*self.segments, *self._leaving])
        return self._folder.fixed_bytes + sum(self._kept.values()) + segments

    @property
    def fixed_bytes(self) -> int:
        """Bytes that no record can have: other files, segments that cannot be used, and dead bytes for good."""
        stiff = sum(one.taken_bytes - one.live_bytes for one in self.segments if one.stuck or one.foreign_bytes)
        return self._folder.fixed_bytes + sum(self._kept.values()) + stiff

    @property
    def live_bytes(self) -> int:
        """Bytes of all live records."""
        return sum(one.live_bytes for one in self.segments)

    @property
    def room_bytes(self) -> int:
        """Bytes of records that could be put if all dead bytes were won back."""
        return max(0, self.space.capacity_bytes(self.fixed_bytes) - self.live_bytes)

    @property
    def files(self) -> int:
        """Number of segment files, those that cannot be used included."""
        return len(self.segments) + len(self._kept)

    def compactable(self) -> list[Segment]:
        """Return the segments whose copies have room now."""
        free = self.space.limit_bytes - self.space.slack_bytes - self.used_bytes - PAGE_BYTES
        return [one for one in self.segments if not one.stuck and not one.foreign_bytes and one.live_bytes <= free]

    # ------------------------------------------------------------ the index

    @contextlib.contextmanager
    def holding(self, keys: Sequence[bytes]) -> Iterator[list[Place | None]]:
        """Find keys; their segments stay readable inside, whatever is removed meanwhile."""
        with self.lock:
            places = [self.index.get(key) for key in keys]
            segments = [place.segment for place in places if place is not None]
            for segment in segments:
                segment.readers += 1
        try:
            yield places
        finally:
            with self.lock:
                for segment in segments:
                    self._read_done(segment)

    @contextlib.contextmanager
    def reading(self, key: bytes) -> Iterator[Place | None]:
        """Find one key, as :meth:`holding` does."""
        with self.holding((key,)) as places:
            yield places[0]

    def _read_done(self, segment: Segment) -> None:
        segment.readers -= 1
        if segment.retired and not segment.readers:
            segment.close()
            with contextlib.suppress(ValueError):
                self._leaving.remove(segment)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Take keys off the index."""
        with self.lock:
            for key in keys:
                place = self.index.pop(key, None)
                if place is not None:
                    self._unlist(place)
                    self._drop_spares(key)

    def set_aside(self, place: Place, bury: bool) -> bool:
        """Take a record that is proven bad off the index, unless another is there by now; ``bury``: for good.

        Returns whether a spare took its place.
        """
        key, spared = place.record.key, False
        with self.lock:
            self.bad_records += 1
            if self.index.get(key) is place:
                del self.index[key]
                self._unlist(place)
                spares = sorted(self._spares.get(key, ()), key=lambda one: one.record.sequence)
                if spares:
                    self._spares[key] = spares[:-1]
                    self._list(spares[-1])
                    spared = True
        if bury:
            place.segment.bury(place.record, self._folder.fd)
        return spared

    def _drop_spares(self, key: bytes) -> None:
        for place in self._spares.pop(key, ()):
            place.segment.spares.discard(key)

    def _list(self, place: Place) -> None:
        segment, record = place.segment, place.record
        segment.spares.discard(record.key)
        segment.live[record.key] = record
        segment.live_bytes += record.total_bytes
        self.index[record.key] = place

    def settle(self, key: bytes) -> None:
        """Forget the spares of a key whose record has been read."""
        with self.lock:
            self._drop_spares(key)

    def count_read(self, record: Record) -> None:
        """Count a block that was read; its spares are needed no more."""
        with self.lock:
            self.reads += 1
            self.read_bytes += record.total_bytes
            self._drop_spares(record.key)

    def count_read_failure(self) -> None:
        """Count a read that the system refused."""
        with self.lock:
            self.read_failures += 1

    def _unlist(self, place: Place) -> None:
        segment, record = place.segment, place.record
        if segment.live.get(record.key) is record:
            del segment.live[record.key]
            segment.live_bytes -= record.total_bytes

    # ------------------------------------------------------------ appending; who calls holds ``writing``

    def append(self, items: Iterable[Item]) -> None:
        """Append records, make them durable, and only then publish them; raises OSError.

        Where it raises, what was published before stays, and the rest is cut off again.
        """
        run: list[tuple[Item, Record]] = []
        try:
            for item in items:
                if self.active is None or self.active.end_bytes + item.record.total_bytes > self.space.segment_bytes:
                    self._commit(run)
                    run = []
                    self._roll()
                if self.active is not None:
                    run.append((item, self.active.write(self._numbered(item.record), item.payload)))
            self._commit(run)
        except BaseException:
            if self.active is not None:
                self.active.cut()
            self.seal()
            raise

    def _numbered(self, record: Record) -> Record:
        if record.sequence:
            return record
        self._next_sequence += 1
        return evolve(record, sequence=self._next_sequence - 1)

    def _commit(self, run: list[tuple[Item, Record]]) -> None:
        segment = self.active
        if segment is None or not run:
            return
        segment.sync(self._folder.fd)
        with self.lock:
            for item, record in run:
                known = self.index.get(record.key)
                if item.old is not None and known is not item.old:
                    continue  # forgotten or set aside while it was copied
                if known is not None:
                    self._unlist(known)
                self._drop_spares(record.key)
                self._list(Place(segment, record))
                if item.old is None:
                    self.writes += 1
                    self.written_bytes += record.total_bytes
                    self.raw_bytes += record.raw_bytes

    def _roll(self) -> None:
        self.seal()
        number, self._next_number = self._next_number, self._next_number + 1
        segment = create_segment(self._files, self._folder.fd, number, self._folder.store, self._folder.direct)
        with self.lock:
            self.segments.append(segment)
        self.active = segment

    def seal(self) -> None:
        """Append nothing more to the newest segment."""
        segment, self.active = self.active, None
        if segment is not None:
            segment.seal()

    def retire(self, segment: Segment) -> None:
        """Remove a segment in which nothing is live; who still reads it can do so to the end."""
        self._unlink(segment.name)
        with self.lock:
            self.segments.remove(segment)
            segment.retired = True
            if segment.readers:
                self._leaving.append(segment)
            else:
                segment.close()

    def _unlink(self, name: str) -> None:
        try:
            self._files.remove(self._folder.fd, name)
            self._files.sync_folder(self._folder.fd)
        except FileNotFoundError:
            pass
        except OSError:
            taken = self._folder.taken_bytes(name)
            if taken:
                self._kept[name] = taken  # still there; the next start tries again

    def check_integrity(self) -> None:
        """Raise AssertionError where index, segments and counts disagree; nobody may be writing."""
        with self.lock:
            listed = 0
            for segment in self.segments:
                assert segment.live_bytes == sum(one.total_bytes for one in segment.live.values())
                assert segment.live_bytes + segment.foreign_bytes + PAGE_BYTES <= segment.end_bytes or not segment.live
                assert (segment.write_fd >= 0) == (segment is self.active), segment.name
                assert not segment.retired and segment.read_fd >= 0, segment.name
                for key, record in segment.live.items():
                    place = self.index[key]
                    assert place.record is record and place.segment is segment, key
                    assert key not in segment.spares, key
                listed += len(segment.live)
            assert listed == len(self.index)
            spares = {(place.segment.number, key) for key, some in self._spares.items() for place in some}
            assert spares == {(one.number, key) for one in self.segments for key in one.spares}
            assert all(one.retired and one.readers for one in self._leaving)
