"""The only authority over KV blocks: which slot is free, filling or sealed, who holds it, and what is in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kimicore.block_records import BlockCounts, Pin, kinds_of
from kimicore.blocks import FILLING, FREE, SEALED, Blocks
from kimicore.contracts import BlockKey, Eviction
from kimicore.guard import PolicyFaults
from kimicore.plugins import started
from kimicore.prefix import Chains, KeyChain, PrefixIndex, first_seen, longest_hit
from kimicore.slabs import Slabs
from kimicore.types import KVClass

__all__ = ["FILLING", "FREE", "SEALED", "BlockCounts", "Ledger", "Pin"]


class Ledger:
    """Blocks of an engine, for every KV class.

    ``classes``: the classes, in the order of the block tables. ``slab_bytes``, ``slabs``: the arena (see
    :func:`~kimicore.slabs.slab_layout`). ``eviction``: settings of the policy; each class gets a state of its
    own. ``ghosts``: how many blocks that left a policy may remember, in multiples of the class's capacity.

    A slot is FREE, FILLING (one holder writes it) or SEALED. A sealed block is indexed by its key, or private
    where another held block with the same key came first (a *twin*); when that one is let go the twin takes its place.
    An indexed block that nobody holds is cached: it stays until its slot is needed. ``now_s`` is set by the owner.
    """

    def __init__(
        self,
        classes: Sequence[KVClass],
        slab_bytes: int,
        slabs: int,
        block_tokens: int,
        eviction: Eviction,
        *,
        seed: int = 0,
        ghosts: int = 4,
        faults: PolicyFaults | None = None,
    ) -> None:
        self.classes = tuple(classes)
        self.windows = tuple(one.window for one in self.classes)
        self.kinds = kinds_of(self.classes)
        self.block_tokens = block_tokens
        self.slabs = Slabs([one.block_bytes for one in self.classes], slab_bytes, slabs)
        self.bytes_total = slab_bytes * slabs
        self.now_s = 0.0
        self.evicted_blocks = 0
        self._dropping: Callable[[int, int], object] = lambda kind, slot: None
        self.faults = faults or PolicyFaults("eviction", eviction.name)
        self._blocks: list[Blocks] = []
        for window, per in zip(self.windows, self.slabs.per_slab, strict=True):
            capacity = (slabs - 1) * per
            policy = started("eviction", eviction, capacity, ghosts * capacity, seed)
            self._blocks.append(Blocks(slabs * per, window is None, policy, self.faults))
        self._indexes = tuple(blocks.index for blocks in self._blocks)

    # ------------------------------------------------------------ finding and holding

    def hit(self, chains: Chains, blocks: int) -> int:
        """Return how many of the first ``blocks`` blocks every class can give a sequence with these keys."""
        return longest_hit(self._indexes, self.windows, chains, self.block_tokens, blocks)

    def shared(self, chains: Chains, blocks: int) -> tuple[int, ...]:
        """Return per class how many blocks of a hit of ``blocks`` blocks are held by others now."""
        counts = []
        for kind, (own, chain) in enumerate(zip(self._blocks, chains, strict=True)):
            if chain is None:
                counts.append(0)
                continue
            first = first_seen(blocks * self.block_tokens, self.windows[kind], self.block_tokens)
            if self.windows[kind] is None:  # holders hold a sequence from its start, so held ones come first
                low, high = 0, blocks
                while low < high:
                    middle = (low + high + 1) >> 1
                    if own.refs[own.index.slots[chain.keys[middle - 1]]]:
                        low = middle
                    else:
                        high = middle - 1
                counts.append(low)
            else:
                counts.append(sum(1 for key in chain.keys[first:blocks] if own.refs[own.index.slots[key]]))
        return tuple(counts)

    def acquire(self, chains: Chains, blocks: int) -> list[list[int]]:
        """Hold a hit of ``blocks`` blocks and return the block tables; blocks that no later query sees are 0."""
        tables: list[list[int]] = []
        for kind, (own, chain) in enumerate(zip(self._blocks, chains, strict=True)):
            if chain is None:
                tables.append([])
                continue
            first = first_seen(blocks * self.block_tokens, self.windows[kind], self.block_tokens)
            table = [0] * first
            for key in chain.keys[first:blocks]:
                slot = own.index.slots[key]
                self._hold(kind, slot)
                table.append(slot)
            tables.append(table)
        return tables

    def _hold(self, kind: int, slot: int) -> None:
        own = self._blocks[kind]
        if not own.refs[slot] and not own.pins[slot]:
            own.idle.pop(slot, None)
            self.slabs.hold(kind, slot)
        own.refs[slot] += 1

    def pin(self, kind: int, slot: int) -> Pin:
        """Keep an indexed block where it is while its bytes move, whoever holds it; those before it stay as well.

        Raises ValueError for a block that nobody could find.
        """
        own = self._blocks[kind]
        if not own.is_indexed(slot):
            raise ValueError(f"slot {slot} of class {kind} is not indexed and cannot be pinned")
        path = [slot]
        while own.parent[path[-1]]:
            path.append(own.parent[path[-1]])
        for one in path:
            if not own.refs[one] and not own.pins[one]:
                del own.idle[one]
                self.slabs.hold(kind, one)
            own.pins[one] += 1
        return Pin(kind, path)

    def unpin(self, pin: Pin) -> None:
        """End a pin; raises ValueError where it has ended already."""
        if not pin.slots:
            raise ValueError(f"this pin of class {pin.kind} has ended already")
        own = self._blocks[pin.kind]
        slots, pin.slots = pin.slots, []
        for slot in slots:
            own.pins[slot] -= 1
            if not own.pins[slot] and not own.refs[slot]:
                self._rest(pin.kind, slot, drop=False)

    # ------------------------------------------------------------ filling

    def fits(self, needs: Sequence[int]) -> bool:
        """Return whether so many more blocks per class can be had together without touching held ones."""
        return self.slabs.fits(needs)

    def allocate(self, kind: int, count: int) -> list[int] | None:
        """Return ``count`` slots to fill, or None (and nothing changed but the cache) where they cannot be had."""
        own = self._blocks[kind]
        slots: list[int] = []
        while len(slots) < count:
            slot = self.slabs.take(kind)
            if slot < 0:
                if self._make_free(kind, count - len(slots)):
                    continue
                for taken in reversed(slots):
                    self.slabs.drop(kind, taken)
                    self._free(kind, taken)
                return None
            self.slabs.hold(kind, slot)
            own.state[slot] = FILLING
            own.refs[slot] = 1
            slots.append(slot)
        return slots

    def seal(self, kind: int, slot: int, chain: KeyChain, at: int) -> None:
        """Name the full block ``slot`` by ``chain.keys[at]``, so that others can find it."""
        own = self._blocks[kind]
        own.state[slot] = SEALED
        parent = 0
        if at and own.rooted:
            parent = own.index.slots.get(chain.keys[at - 1], 0)
            if not parent:
                return  # nobody could reach it: it stays private
        first = own.enter(slot, chain.keys[at], parent, at)
        if first != slot and not own.refs[first] and not own.pins[first]:
            del own.idle[first]
            own.replace(first)
            self._free(kind, first)

    # ------------------------------------------------------------ letting go

    def release(self, kind: int, slots: Sequence[int], *, drop: bool = False) -> None:
        """Let go of blocks, last of the sequence first; with ``drop`` they are not kept once nobody holds them.

        Raises ValueError for a block that is not held.
        """
        own, now_s = self._blocks[kind], self.now_s
        index = own.index.slots
        for slot in slots:
            if not own.refs[slot]:
                raise ValueError(f"slot {slot} of class {kind} is not held")
            key = own.key[slot]
            indexed = key is not None and index.get(key) == slot
            if indexed and not drop and key is not None:
                own.tell(slot, key, now_s)
            own.refs[slot] -= 1
            if own.refs[slot] or own.pins[slot]:
                continue
            if key is not None and not indexed:
                own.leave_twins(slot)
            self._rest(kind, slot, drop=drop)

    def keep(self, kind: int, slots: Sequence[int], until_s: float, priority: int) -> None:
        """Keep these blocks cached until ``until_s`` while others can go instead: see :class:`kimicore.Retention`."""
        own = self._blocks[kind]
        for slot in slots:
            own.keep(slot, until_s, priority)

    def _rest(self, kind: int, slot: int, *, drop: bool) -> None:
        """Put a block that nobody holds any more where it belongs: to the cached ones, or to the free ones."""
        own, key = self._blocks[kind], self._blocks[kind].key[slot]
        self.slabs.drop(kind, slot)
        if key is not None:
            if key in own.twins:
                own.replace(slot)
            elif drop and not own.children[slot]:
                own.leave_index(slot)
            else:
                own.idle[slot] = None
                return
        self._free(kind, slot)

    def _free(self, kind: int, slot: int) -> None:
        own = self._blocks[kind]
        own.state[slot] = FREE
        own.refs[slot] = 0
        self.slabs.give(kind, slot)

    def forget(self, kind: int, slots: Sequence[int]) -> None:
        """Take blocks whose content is not to be trusted out of the index, with all that was built on them."""
        own = self._blocks[kind]
        pending = list(slots)
        while pending:
            slot = pending.pop()
            key = own.key[slot]
            if key is None:
                continue
            if own.index.slots[key] != slot:
                own.leave_twins(slot)
                continue
            below = own.children[slot]
            if below:
                pending.append(slot)
                pending.extend(below)
                continue
            while key in own.twins:
                own.leave_twins(own.twins[key][0])
            own.leave_index(slot)
            if not own.refs[slot] and not own.pins[slot]:
                del own.idle[slot]
                self._free(kind, slot)

    # ------------------------------------------------------------ making room

    def _make_free(self, kind: int, count: int) -> bool:
        """Free at least one slot for class ``kind`` (up to ``count`` at once); False where that cannot be."""
        own = self._blocks[kind]
        if own.idle:
            self._evict(kind, min(count, len(own.idle)))
            return True
        slab = self.slabs.cheapest_idle(kind)
        if slab < 0:
            return False
        other = self.slabs.owner[slab]
        per = self.slabs.per_slab[other]
        for slot in range(slab * per, slab * per + per):
            self._evict_tree(other, slot)
        return True

    def _evict_tree(self, kind: int, slot: int) -> None:
        """Drop a cached block after the cached blocks that follow it, which nobody could reach without it."""
        own = self._blocks[kind]
        pending = [slot]
        while pending:
            one = pending[-1]
            below = own.children[one]
            if below:
                pending.extend(below)
                continue
            pending.pop()
            if own.state[one] != FREE:
                self._evict_one(kind, one)

    def _evict_one(self, kind: int, slot: int) -> None:
        own = self._blocks[kind]
        del own.idle[slot]
        self._dropping(kind, slot)
        own.leave_index(slot)
        self._free(kind, slot)
        self.evicted_blocks += 1

    def _evict(self, kind: int, count: int) -> None:
        """Drop ``count`` cached blocks: those that the policy names as far as it is right, then the longest unused."""
        own, left = self._blocks[kind], count
        for key in own.victims(count, self.now_s):
            slot = own.legal_victim(key)
            if not slot:
                self.faults.note("victims are cached, not held, named once, and a leaf goes before its root")
                break
            self._evict_one(kind, slot)
            left -= 1
        for _ in range(left):
            self._evict_one(kind, own.longest_unused())

    def next_victims(self, kind: int, count: int) -> list[tuple[int, BlockKey]]:
        """Return the blocks that would be dropped next, up to ``count``, with their slots; nothing is dropped."""
        own = self._blocks[kind]
        found = own.next_victims(min(count, len(own.idle)), self.now_s) if own.idle else ()
        return [(slot, key) for slot in found if (key := own.key[slot])]

    def evict(self, kind: int, key: BlockKey) -> bool:
        """Drop a cached block that nobody holds and nothing follows; False where it is not such a one."""
        slot = self._blocks[kind].legal_victim(key)
        if slot:
            self._evict_one(kind, slot)
        return slot > 0

    def index(self, kind: int) -> PrefixIndex:
        """Return a class's index, to be read."""
        return self._indexes[kind]

    def listen(self, used: Callable[[BlockKey], None] | None, dropping: Callable[[int, int], None]) -> None:
        """Have every use of a block told, as the policy is, and every cached block (class, slot) that is to go."""
        self._dropping = dropping
        for own in self._blocks:
            own.uses = used

    def named(self, kind: int, slot: int) -> tuple[BlockKey, BlockKey | None, int]:
        """Return an indexed block's key, that of the one before it (None: it is the first), and its depth in blocks."""
        own = self._blocks[kind]
        return own.key[slot] or b"", own.key[own.parent[slot]] if own.parent[slot] else None, own.depth[slot]

    def flush(self) -> int:
        """Drop every cached block; return how many there were."""
        count = 0
        for kind, own in enumerate(self._blocks):
            while own.idle:
                count += 1
                self._evict_one(kind, own.longest_unused())
        return count

    def importance(self, kind: int, slots: Sequence[int], values: Sequence[float]) -> None:
        """Tell the policy how much attention held blocks got (1.0 is uniform); unnamed blocks are left out."""
        self._blocks[kind].tell_importance(slots, values)

    # ------------------------------------------------------------ looking

    def counts(self) -> BlockCounts:
        """Return how many blocks are held, cached and free.

        With several classes a unit is the greatest common divisor of their block sizes, so that a large block
        counts as several and the sum is the arena.
        """
        slabs = self.slabs
        used = sum(busy * unit for busy, unit in zip(slabs.busy_slots, slabs.units, strict=True))
        cached = sum(len(own.idle) * unit for own, unit in zip(self._blocks, slabs.units, strict=True))
        return BlockCounts(used, cached, slabs.units_total - used - cached, slabs.units_total)

    def state(self, kind: int, slot: int) -> int:
        """Return FREE, FILLING or SEALED."""
        return self._blocks[kind].state[slot]

    def refs(self, kind: int, slot: int) -> int:
        """Return how many requests hold the slot."""
        return self._blocks[kind].refs[slot]

    def pins(self, kind: int, slot: int) -> int:
        """Return how many moves hold the slot."""
        return self._blocks[kind].pins[slot]

    def indexed(self, kind: int, slot: int) -> bool:
        """Return whether others can find this very block."""
        return self._blocks[kind].is_indexed(slot)

    def cached(self, kind: int, key: BlockKey) -> int:
        """Return the slot that holds this content, or 0."""
        return self._blocks[kind].index.slots.get(key, 0)

    def check_integrity(self, held: Sequence[Mapping[int, int]] | None = None) -> None:
        """Raise AssertionError where the books do not agree.

        ``held``: per class, how often each slot stands in block tables (a mapping); compared with the references.
        """
        self.slabs.check()
        for kind, own in enumerate(self._blocks):
            own.check(kind, self.slabs, None if held is None else held[kind])
        counts = self.counts()
        assert min(counts.used, counts.cached, counts.free) >= 0
