"""Records that are read before they are checked and decoded, so that a disk does not wait for a processor.

Records that lie side by side, as those of one batch do, are read with one call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Final

from attrs import frozen

from kimicore.kv.direct import PageBuffers
from kimicore.kv.log import Log, Place

__all__ = ["AHEAD_BYTES", "Ahead", "read_ahead"]

AHEAD_BYTES: Final = 8 << 20
"""The most that a thread reads ahead, and so the size that its buffer can have."""


@frozen(eq=False)
class Ahead:
    """Bytes as they came from the disk, of which nothing is proven yet; good until their thread reads ahead again.

    ``keys``: how many of the keys that were asked for this covers, those included of which there are no bytes.
    """

    keys: int
    _found: dict[bytes, tuple[Place, memoryview]]

    def bytes_of(self, place: Place) -> memoryview | None:
        """Return a record's bytes from this very place, or None: it was not read, or another one was."""
        known = self._found.get(place.record.key)
        return known[1] if known is not None and known[0] is place else None


def read_ahead(log: Log, keys: Sequence[bytes], buffers: PageBuffers) -> Ahead:
    """Read records of the first keys, at most ``AHEAD_BYTES`` of them; at least one key is covered, if there is any.

    Never raises OSError: what cannot be read, or is larger than that, is left to who asks for it alone.
    """
    with log.holding(keys) as held:
        count, size = 0, 0
        places: dict[bytes, Place] = {}
        for place in held:
            if place is not None and place.record.total_bytes <= AHEAD_BYTES and place.record.key not in places:
                if size + place.record.total_bytes > AHEAD_BYTES:
                    break
                size += place.record.total_bytes
                places[place.record.key] = place
            count += 1
        found: dict[bytes, tuple[Place, memoryview]] = {}
        room = buffers.take(size) if size else memoryview(b"")
        for run in _runs(places.values()):
            segment, offset = run[0].segment, run[0].record.offset
            length = sum([one.record.total_bytes for one in run])
            view, room = room[:length], room[length:]
            with contextlib.suppress(OSError):
                if segment.fill(view, offset) == length:
                    for one in run:
                        at = one.record.offset - offset
                        found[one.record.key] = one, view[at : at + one.record.total_bytes]
        return Ahead(count, found)


def _runs(places: Iterable[Place]) -> list[list[Place]]:
    """Return the places in the order of the disk, those together that follow each other without a gap."""
    runs: list[list[Place]] = []
    end = (-1, -1)
    for place in sorted(places, key=lambda one: (one.segment.number, one.record.offset)):
        if end == (place.segment.number, place.record.offset):
            runs[-1].append(place)
        else:
            runs.append([place])
        end = place.segment.number, place.record.offset + place.record.total_bytes
    return runs
