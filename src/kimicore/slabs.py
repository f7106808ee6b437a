"""How the KV arena is shared between classes of blocks: equal slabs, each lent to one class at a time."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import gcd, lcm

from kimicore.errors import ConfigError
from kimicore.types import KVClass

__all__ = ["Slabs", "slab_layout"]


def slab_layout(classes: Sequence[KVClass], arena_bytes: int) -> tuple[int, int]:
    """Return ``(slab_bytes, slabs)`` for an arena of at most ``arena_bytes`` (slab 0, which is never given out,
    counts).

    A slab holds a whole number of blocks of every class: with one class it is a block, with several the least
    common multiple of their sizes. Raises :class:`~kimicore.ConfigError` where not even one block of each class fits.
    """
    slab_bytes = lcm(*(one.block_bytes for one in classes))
    slabs = arena_bytes // slab_bytes
    if slabs < 1 + len(classes):
        raise ConfigError(
            f"kv_device_bytes={arena_bytes} holds {slabs} slabs of {slab_bytes} bytes; at least "
            f"{(1 + len(classes)) * slab_bytes} bytes are needed"
        )
    return slab_bytes, slabs


class Slabs:
    """Hands out slot numbers: ``slot = slab * per_slab[c] + i``. It knows nothing of what is in them.

    A slot is free, or taken; a taken slot is *busy* while somebody holds it. A slab goes to a class with its first slot
    and returns with its last. The lowest slab with room is used first, which keeps the upper ones empty.
    """

    def __init__(self, block_bytes: Sequence[int], slab_bytes: int, slabs: int) -> None:
        for size in block_bytes:
            if size <= 0 or slab_bytes % size:
                raise ConfigError(f"a slab of {slab_bytes} bytes does not hold whole blocks of {size} bytes")
        if slabs < 2:
            raise ConfigError(f"slabs={slabs}: slab 0 is never given out, so at least 2 are needed")
        self.per_slab = tuple(slab_bytes // size for size in block_bytes)
        self.count = slabs
        unit = gcd(*block_bytes)
        self.units = tuple(size // unit for size in block_bytes)
        self.units_total = (slabs - 1) * (slab_bytes // unit)
        self.owner = [-1] * slabs
        self.used = [0] * slabs
        self.busy = [0] * slabs
        self.busy_slots = [0] * len(self.per_slab)
        self.busy_slabs = [0] * len(self.per_slab)
        self.used_slots = [0] * len(self.per_slab)
        self.usable = slabs - 1  # slabs with no busy slot
        self._free = list(range(1, slabs))  # sorted, hence a heap
        self._holes: list[list[int]] = [[] for _ in range(slabs)]
        self._open: list[list[int]] = [[] for _ in self.per_slab]  # heaps of slabs that may have holes ...
        self._listed: list[set[int]] = [set() for _ in self.per_slab]  # ... each once
        self._idle_slabs: set[int] = set()  # owned, nothing busy, something cached

    def take(self, kind: int) -> int:
        """Return a free slot of class ``kind``, or -1 where only cached blocks could make room."""
        per = self.per_slab[kind]
        open_ = self._open[kind]
        while open_:
            slab = open_[0]
            holes = self._holes[slab]
            if self.owner[slab] == kind and holes:
                self.used[slab] += 1
                self.used_slots[kind] += 1
                slot = holes.pop()
                if not holes:
                    self._listed[kind].discard(heappop(open_))
                return slot
            self._listed[kind].discard(heappop(open_))
        if not self._free:
            return -1
        slab = heappop(self._free)
        self.owner[slab] = kind
        self.used[slab] = 1
        self.used_slots[kind] += 1
        if per > 1:
            self._holes[slab] = list(range(slab * per + per - 1, slab * per, -1))  # popped lowest first
            self._list(kind, slab)
        return slab * per

    def give(self, kind: int, slot: int) -> None:
        """Take back a slot that is not busy."""
        per = self.per_slab[kind]
        slab = slot // per
        self.used_slots[kind] -= 1
        self.used[slab] -= 1
        if not self.used[slab]:
            self.owner[slab] = -1
            self._holes[slab] = []
            self._idle_slabs.discard(slab)
            heappush(self._free, slab)
            return
        holes = self._holes[slab]
        holes.append(slot)
        self._list(kind, slab)

    def _list(self, kind: int, slab: int) -> None:
        if slab not in self._listed[kind]:
            self._listed[kind].add(slab)
            heappush(self._open[kind], slab)

    def hold(self, kind: int, slot: int) -> None:
        """Mark a taken slot busy."""
        slab = slot // self.per_slab[kind]
        self.busy_slots[kind] += 1
        if not self.busy[slab]:
            self.busy_slabs[kind] += 1
            self.usable -= 1
            self._idle_slabs.discard(slab)
        self.busy[slab] += 1

    def drop(self, kind: int, slot: int) -> None:
        """Mark a busy slot as not busy."""
        slab = slot // self.per_slab[kind]
        self.busy_slots[kind] -= 1
        self.busy[slab] -= 1
        if not self.busy[slab]:
            self.busy_slabs[kind] -= 1
            self.usable += 1
            self._idle_slabs.add(slab)

    def free_units(self) -> int:
        """Return the units (see :class:`~kimicore.ledger.BlockCounts`) that hold nothing, not even cached blocks."""
        used = sum([count * unit for count, unit in zip(self.used_slots, self.units, strict=True)])
        return self.units_total - used

    def spare(self, kind: int) -> int:
        """Return how many more blocks the slabs with a busy block of this class can hold."""
        return self.busy_slabs[kind] * self.per_slab[kind] - self.busy_slots[kind]

    def fits(self, needs: Sequence[int]) -> bool:
        """Return whether so many more busy blocks per class can be had, dropping cached blocks where needed."""
        slabs = 0
        for kind, need in enumerate(needs):
            short = need - self.spare(kind)
            if short > 0:
                slabs += -(-short // self.per_slab[kind])
        return slabs <= self.usable

    def cheapest_idle(self, kind: int) -> int:
        """Return the slab of another class that loses the fewest cached blocks when it is emptied, or -1."""
        candidates = [(self.used[slab], slab) for slab in self._idle_slabs if self.owner[slab] != kind]
        return min(candidates)[1] if candidates else -1

    def check(self) -> None:
        """Raise AssertionError where the counts do not agree with each other."""
        free = set(self._free)
        assert len(free) == len(self._free)
        assert 0 not in free
        assert self.owner[0] == -1
        assert self.used[0] == 0
        assert self.busy[0] == 0
        for slab in range(1, self.count):
            kind = self.owner[slab]
            assert (slab in free) == (kind == -1) == (self.used[slab] == 0)
            assert 0 <= self.busy[slab] <= self.used[slab]
            if kind >= 0:
                per = self.per_slab[kind]
                holes = self._holes[slab]
                assert len(set(holes)) == len(holes)
                assert all(one // per == slab for one in holes)
                assert len(holes) == per - self.used[slab]
                assert not holes or slab in self._open[kind]
            assert (slab in self._idle_slabs) == (self.used[slab] > 0 and self.busy[slab] == 0)
        for kind in range(len(self.per_slab)):
            assert len(self._open[kind]) == len(self._listed[kind])
            assert set(self._open[kind]) == self._listed[kind]
            owned = [slab for slab in range(1, self.count) if self.owner[slab] == kind]
            assert self.used_slots[kind] == sum(self.used[slab] for slab in owned)
            assert self.busy_slots[kind] == sum(self.busy[slab] for slab in owned)
            assert self.busy_slabs[kind] == sum(1 for slab in owned if self.busy[slab])
        assert self.usable == self.count - 1 - sum(self.busy_slabs)
