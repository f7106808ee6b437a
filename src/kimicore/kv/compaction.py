"""Winning back space: live records are copied to the log's end, then their old file is removed.

A copy is durable and published before its source goes, so a crash at any moment leaves one of them, or both. Who calls
these functions holds the log's ``writing``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kimicore.kv.log import Item, Log, Place
from kimicore.kv.record import PAGE_BYTES
from kimicore.kv.segment import BadRecord, Segment

__all__ = ["admit", "compact_all", "tidy"]

_MOST_SEGMENTS: Final = 128
_FEW: Final = 0.25  # of a segment: live bytes that are copied without need, to have the rest back


def admit(log: Log, items: Sequence[Item]) -> list[Item]:
    """Return those of the items that there is room for, having won back dead bytes for them; raises OSError."""
    room = log.room_bytes
    most = log.space.segment_bytes - PAGE_BYTES
    wanted = []
    for item in items:
        size = item.record.total_bytes
        if size <= min(room, most):
            room -= size
            wanted.append(item)
    _make_room(log, wanted)
    return _fitting(log, wanted, log.space.ceiling_bytes - log.used_bytes)[0]


def _fitting(log: Log, items: Sequence[Item], free_bytes: int | None) -> tuple[list[Item], int]:
    """Return the items that fit into so many free bytes, in order, and what they take with their segments' headers."""
    end = log.active.end_bytes if log.active else log.space.segment_bytes
    taken, chosen = 0, []
    for item in items:
        size = item.record.total_bytes
        rolls = end + size > log.space.segment_bytes
        cost = size + (PAGE_BYTES if rolls else 0)
        if free_bytes is None or taken + cost <= free_bytes:
            chosen.append(item)
            taken += cost
            end = PAGE_BYTES + size if rolls else end + size
    return chosen, taken


def _make_room(log: Log, items: Sequence[Item]) -> None:
    _remove_empty(log)
    while log.used_bytes + _fitting(log, items, None)[1] > log.space.ceiling_bytes:
        victim = _victim(log)
        if victim is None:
            return
        _compact(log, victim)


def _victim(log: Log) -> Segment | None:
    """Return the segment with the most dead bytes, else one that fits whole behind the newest, else None."""
    candidates = log.compactable()
    best = max(candidates, key=lambda one: one.dead_bytes, default=None)
    if best is not None and best.dead_bytes > 0:
        return best
    return _small(log, candidates)


def _small(log: Log, candidates: Sequence[Segment]) -> Segment | None:
    """Return the smallest segment, where its copies fit behind the newest one, or into a new one with the next."""
    small = sorted((one for one in candidates if one is not log.active), key=lambda one: one.live_bytes)[:2]
    if not small:
        return None
    behind = log.active is not None and log.active.end_bytes + small[0].live_bytes <= log.space.segment_bytes
    anew = len(small) == 2 and PAGE_BYTES + sum(one.live_bytes for one in small) <= log.space.segment_bytes
    return small[0] if behind or anew else None


def _remove_empty(log: Log) -> None:
    for segment in [one for one in log.segments if one.removable]:
        log.retire(segment)


def _compact(log: Log, victim: Segment) -> None:
    """Copy a segment's live records to the log's end and remove it; raises OSError where they cannot be written."""
    if victim is log.active:
        log.seal()
    _settle(log, victim)
    with log.lock:
        places = [log.index[key] for key in victim.live]
    log.append(_copies(log, sorted(places, key=lambda one: one.record.offset)))
    log.compactions += 1
    if victim.live or victim.spares:
        victim.stuck = True  # some of it cannot be read: a cable, or a disk that dies; the next start sees
    else:
        log.retire(victim)


def _settle(log: Log, victim: Segment) -> None:
    """Read the blocks of which the victim has spares: where one is bad, its spare takes its place and is copied."""
    for key in list(victim.spares):
        while key in victim.spares:
            with log.reading(key) as place:
                if place is None:
                    break
                try:
                    place.segment.read(place.record, log.buffers)
                except BadRecord as bad:
                    log.set_aside(place, bad.framed)
                except OSError:
                    log.count_read_failure()
                    break
                else:
                    log.settle(key)


def _copies(log: Log, places: Sequence[Place]) -> Iterator[Item]:
    for place in places:
        if log.index.get(place.record.key) is not place:
            continue
        try:
            payload = place.segment.read(place.record, log.buffers)
        except BadRecord:
            log.set_aside(place, bury=False)  # its file goes
        except OSError:
            log.count_read_failure()
        else:
            yield Item(place.record, payload, place)


def tidy(log: Log) -> None:
    """Remove what is empty, and compact one segment where that is cheap or there are too many; raises OSError."""
    _remove_empty(log)
    candidates = [one for one in log.compactable() if one is not log.active]
    few = [one for one in candidates if one.live_bytes <= _FEW * one.end_bytes and one.dead_bytes]
    if few:
        _compact(log, min(few, key=lambda one: one.live_bytes))
    elif len(log.segments) > _MOST_SEGMENTS:
        victim = _small(log, candidates)
        if victim is None:
            log.seal()  # the next round finds a newest segment that is empty
        else:
            _compact(log, victim)


def compact_all(log: Log) -> None:
    """Win back all dead bytes; raises OSError where that cannot be written."""
    _remove_empty(log)
    while True:
        victim = max(log.compactable(), key=lambda one: one.dead_bytes, default=None)
        if victim is None or victim.dead_bytes <= 0:
            return
        _compact(log, victim)
