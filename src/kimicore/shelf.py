"""What lies in the lower tiers: blocks in slots of host memory, and records on disk, by key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from kimicore.contracts import BlockKey, Eviction, EvictionState
from kimicore.guard import RAISED, PolicyFaults
from kimicore.plugins import started
from kimicore.slabs import Slabs
from kimicore.types import KVClass

__all__ = ["DiskShelf", "HostShelf"]


class HostShelf:
    """Blocks in host memory, for every KV class; the arena is cut as the device's is.

    A slot is free, ARRIVING (a move writes it; ``reserve``), or PRESENT under a key. A pinned block is being read and
    stays. Each class has a state of the eviction policy of its own; unlike on the device a block may be here without
    the one before it, so any block that is not pinned may go.
    """

    def __init__(
        self,
        classes: Sequence[KVClass],
        slab_bytes: int,
        slabs: int,
        eviction: Eviction,
        *,
        seed: int = 0,
        ghosts: int = 4,
        faults: PolicyFaults | None = None,
    ) -> None:
        self.slabs = Slabs([one.block_bytes for one in classes], slab_bytes, slabs)
        self.block_bytes = tuple(one.block_bytes for one in classes)
        self.faults = faults or PolicyFaults("eviction", eviction.name)
        self.slots: list[dict[BlockKey, int]] = [{} for _ in classes]
        self._keys: list[dict[int, BlockKey]] = [{} for _ in classes]
        self._order: list[OrderedDict[BlockKey, None]] = [OrderedDict() for _ in classes]  # longest unused first
        self._pins: list[dict[int, int]] = [{} for _ in classes]
        self._arriving: list[set[int]] = [set() for _ in classes]
        self._policies: list[EvictionState] = [
            started("eviction", eviction, (slabs - 1) * per, ghosts * (slabs - 1) * per, seed)
            for per in self.slabs.per_slab
        ]

    @property
    def blocks(self) -> int:
        """Blocks that can be read."""
        return sum(map(len, self.slots))

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that are taken, those that are still being written to among them."""
        return sum([count * size for count, size in zip(self.slabs.used_slots, self.block_bytes, strict=True)])

    # ------------------------------------------------------------ coming

    def reserve(self, kind: int) -> int:
        """Return a slot to write to, or 0 where only dropping a block could make room."""
        slot = self.slabs.take(kind)
        if slot < 0:
            return 0
        self.slabs.hold(kind, slot)
        self._arriving[kind].add(slot)
        return slot

    def arrive(
        self, kind: int, slot: int, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float
    ) -> None:
        """Make a written slot a block that can be read; where its content is there already the slot is freed."""
        self._arriving[kind].remove(slot)
        self.slabs.drop(kind, slot)
        if key in self.slots[kind]:
            self.slabs.give(kind, slot)
            return
        self.slots[kind][key] = slot
        self._keys[kind][slot] = key
        self._order[kind][key] = None
        self._call("added()", self._policies[kind].added, key, parent, depth_blocks, now_s)

    def abandon(self, kind: int, slot: int) -> None:
        """Free a slot whose write failed."""
        self._arriving[kind].remove(slot)
        self.slabs.drop(kind, slot)
        self.slabs.give(kind, slot)

    # ------------------------------------------------------------ reading and going

    def pin(self, kind: int, slot: int) -> None:
        """Keep a block where it is while its bytes are read."""
        pins = self._pins[kind]
        if slot not in pins:
            self.slabs.hold(kind, slot)
        pins[slot] = pins.get(slot, 0) + 1

    def pinned(self, kind: int, slot: int) -> bool:
        """Whether a block is being read."""
        return slot in self._pins[kind]

    def unpin(self, kind: int, slot: int) -> None:
        """End a pin."""
        pins = self._pins[kind]
        pins[slot] -= 1
        if not pins[slot]:
            del pins[slot]
            self.slabs.drop(kind, slot)

    def touch(self, kind: int, key: BlockKey, now_s: float) -> None:
        """Note that a block was read for a request."""
        if key in self.slots[kind]:
            self._order[kind].move_to_end(key)
            self._call("touched()", self._policies[kind].touched, key, now_s)

    def drop(self, kind: int, key: BlockKey) -> None:
        """Forget a block that is not pinned."""
        slot = self.slots[kind].pop(key)
        del self._keys[kind][slot], self._order[kind][key]
        self.slabs.give(kind, slot)
        self._call("removed()", self._policies[kind].removed, key)

    def next_victims(self, kind: int, count: int, now_s: float) -> list[BlockKey]:
        """Return the blocks of a class that go next, up to ``count``: as the policy says, else the longest unused."""
        slots, pins = self.slots[kind], self._pins[kind]
        named: set[BlockKey] = set()
        faults = self.faults

        def evictable(key: BlockKey) -> bool:
            return key in slots and slots[key] not in pins

        found: list[BlockKey] = []
        if not faults.set_aside:
            faults.begin("victims()")
            try:
                for key in islice(self._policies[kind].victims(count, evictable, now_s), count):
                    if isinstance(key, bytes) and key not in named and evictable(key):
                        named.add(key)
                        found.append(key)
            except RAISED as error:
                faults.note("victims() never raises", error)
            faults.end()
        return found or list(islice((key for key in self._order[kind] if evictable(key)), count))

    def emptied(self, kind: int) -> bool:
        """Free a slab of another class for this one by dropping what is in it; False where there is none."""
        slab = self.slabs.cheapest_idle(kind)
        if slab < 0:
            return False
        other = self.slabs.owner[slab]
        per = self.slabs.per_slab[other]
        for slot in range(slab * per, slab * per + per):
            key = self._keys[other].get(slot)
            if key is not None:
                self.drop(other, key)
        return True

    def _call(self, what: str, method: Callable[..., object], *arguments: object) -> None:
        faults = self.faults
        if faults.set_aside:
            return
        faults.begin(what)
        try:
            method(*arguments)
        except RAISED as error:
            faults.note(f"{what} never raises", error)
        faults.end()

    def check(self) -> None:
        """Raise AssertionError where slots, keys, pins and slabs do not agree."""
        self.slabs.check()
        for kind, slots in enumerate(self.slots):
            assert {slot: key for key, slot in slots.items()} == self._keys[kind]
            assert set(self._order[kind]) == set(slots)
            arriving, pins = self._arriving[kind], self._pins[kind]
            assert not arriving & set(self._keys[kind])
            assert set(pins) <= set(self._keys[kind])
            assert all(count > 0 for count in pins.values())
            assert self.slabs.used_slots[kind] == len(slots) + len(arriving)
            assert self.slabs.busy_slots[kind] == len(pins) + len(arriving)


class DiskShelf:
    """Records on disk by key, longest unused first; ``limit_bytes`` bounds what they take there together."""

    def __init__(self, limit_bytes: int, entries: Iterable[tuple[BlockKey, int]] = ()) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._stored: OrderedDict[BlockKey, int] = OrderedDict()
        for key, stored_bytes in entries:
            self.add(key, stored_bytes)

    def __contains__(self, key: object) -> bool:
        return key in self._stored

    def __len__(self) -> int:
        return len(self._stored)

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._stored)

    def add(self, key: BlockKey, stored_bytes: int) -> None:
        """Note a record that can be read."""
        self.used_bytes += stored_bytes - self._stored.pop(key, 0)
        self._stored[key] = stored_bytes

    def touch(self, key: BlockKey) -> None:
        """Note that a record was read for a request."""
        if key in self._stored:
            self._stored.move_to_end(key)

    def forget(self, key: BlockKey) -> None:
        """Take a record out that is not there any more."""
        self.used_bytes -= self._stored.pop(key, 0)

    def overflow(self, more_bytes: int = 0) -> list[BlockKey]:
        """Forget and return the longest unused records that have to go so that ``more_bytes`` fit."""
        gone = []
        while self._stored and self.used_bytes + more_bytes > self.limit_bytes:
            key, stored_bytes = self._stored.popitem(last=False)
            self.used_bytes -= stored_bytes
            gone.append(key)
        return gone

    def check(self) -> None:
        """Raise AssertionError where the sum is wrong."""
        assert self.used_bytes == sum(self._stored.values())
