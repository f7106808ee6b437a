"""The blocks of one KV class: states, holders, names, and what the eviction policy knows of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

from kimicore.contracts import BlockKey, EvictionState
from kimicore.plugins import PolicyFaults
from kimicore.prefix import PrefixIndex
from kimicore.slabs import Slabs

__all__ = ["FILLING", "FREE", "SEALED", "Blocks"]

FREE, FILLING, SEALED = 0, 1, 2


class Blocks:
    """Lists indexed by slot, and the index of contents.

    ``rooted``: whether a block is of use only together with those before it (a class without a window); then it
    is in the index only while its parent is.
    """

    __slots__ = (
        "children",
        "depth",
        "faults",
        "idle",
        "index",
        "key",
        "parent",
        "pins",
        "policy",
        "refs",
        "rooted",
        "state",
        "told",
        "twins",
    )

    def __init__(self, slots: int, rooted: bool, policy: EvictionState, faults: PolicyFaults) -> None:
        self.rooted = rooted
        self.policy = policy
        self.faults = faults
        self.state = [FREE] * slots
        self.refs = [0] * slots
        self.pins = [0] * slots
        self.key: list[BlockKey | None] = [None] * slots  # of an indexed block, or of a twin
        self.depth = [0] * slots
        self.parent = [0] * slots  # slot of the indexed parent, 0: none
        self.children: list[set[int] | None] = [None] * slots
        self.told = [False] * slots  # the policy knows the block
        self.index = PrefixIndex()
        self.twins: dict[BlockKey, list[int]] = {}  # held blocks whose content another slot was first to index
        self.idle: OrderedDict[int, None] = OrderedDict()  # indexed, nobody holds it; longest unused first

    def enter(self, slot: int, key: BlockKey, parent: int, depth: int) -> int:
        """Index a sealed block, or note it as a twin; return the slot that holds its content, itself or another."""
        self.key[slot] = key
        self.depth[slot] = depth
        first = self.index.slots.setdefault(key, slot)
        if first != slot:
            self.twins.setdefault(key, []).append(slot)
            return first
        self.parent[slot] = parent
        if parent:
            siblings = self.children[parent]
            if siblings is None:
                self.children[parent] = {slot}
            else:
                siblings.add(slot)
        return slot

    def is_indexed(self, slot: int) -> bool:
        """Whether others can find this very block."""
        key = self.key[slot]
        return key is not None and self.index.slots.get(key) == slot

    def replace(self, slot: int) -> None:
        """Let the oldest twin of an indexed block take its place in the index."""
        key = self.key[slot]
        assert key is not None
        twin = self.twins[key][0]
        self.leave_twins(twin)
        self.key[twin] = key
        self.index.slots[key] = twin
        self.told[twin], self.told[slot] = self.told[slot], False
        self.children[twin], self.children[slot] = self.children[slot], None
        for child in self.children[twin] or ():
            self.parent[child] = twin
        parent = self.parent[twin] = self.parent[slot]
        if parent:
            siblings = self.children[parent]
            assert siblings is not None
            siblings.discard(slot)
            siblings.add(twin)
        self.parent[slot] = 0
        self.key[slot] = None

    def leave_twins(self, slot: int) -> None:
        """Make a twin a private block without a name."""
        key = self.key[slot]
        assert key is not None
        twins = self.twins[key]
        twins.remove(slot)
        if not twins:
            del self.twins[key]
        self.key[slot] = None

    def leave_index(self, slot: int) -> None:
        """Take a block out of the index, so that nobody finds it any more."""
        key = self.key[slot]
        assert key is not None
        del self.index.slots[key]
        self.key[slot] = None
        parent = self.parent[slot]
        if parent:
            siblings = self.children[parent]
            assert siblings is not None
            siblings.discard(slot)
            self.parent[slot] = 0
        self.children[slot] = None
        if self.told[slot]:
            self.told[slot] = False
            try:
                self.policy.removed(key)
            except Exception as error:
                self.faults.note("removed() never raises", error)

    def tell(self, slot: int, key: BlockKey, now_s: float) -> None:
        """Tell the policy that a request has used an indexed block and lets go of it."""
        try:
            if self.told[slot]:
                self.policy.touched(key, now_s)
            else:
                self.told[slot] = True
                parent = self.parent[slot]
                self.policy.added(key, self.key[parent] if parent else None, self.depth[slot], now_s)
        except Exception as error:
            self.faults.note("added() and touched() never raise", error)

    def victims(self, count: int, now_s: float) -> list[BlockKey]:
        """Return what the policy names; nothing where it raises or was set aside."""
        if self.faults.set_aside:
            return []
        try:
            named = list(self.policy.victims(count, self._asker(), now_s))
        except Exception as error:
            self.faults.note("victims() never raises", error)
            return []
        if len(named) < count:
            self.faults.note(f"victims() names as many as were asked for, as long as there are ({count})")
        return named[:count]

    def _asker(self) -> Callable[[BlockKey], bool]:
        """Return ``evictable``: see :meth:`kimicore.contracts.EvictionState.victims`."""
        taken: set[int] = set()
        slots, idle, children = self.index.slots, self.idle, self.children

        def evictable(key: BlockKey) -> bool:
            slot = slots.get(key, 0)
            if slot not in idle or slot in taken:
                return False
            below = children[slot]
            if below and not below <= taken:
                return False
            taken.add(slot)
            return True

        return evictable

    def legal_victim(self, key: object) -> int:
        """Return the slot of a block that may go now, or 0."""
        slot = self.index.slots.get(key, 0) if isinstance(key, bytes) else 0
        return slot if slot in self.idle and not self.children[slot] else 0

    def longest_unused(self) -> int:
        """Return the cached block that goes first where there is no policy to ask."""
        for slot in self.idle:
            if not self.children[slot]:  # true of the first, since a block is let go after those that follow it
                return slot
        raise AssertionError("cached blocks are there, and each is followed by another one")

    def check(self, kind: int, slabs: Slabs, held: Mapping[int, int] | None) -> None:
        """Raise AssertionError where states, holders, index and slabs do not agree."""
        taken = busy = 0
        slots = self.index.slots
        per = slabs.per_slab[kind]
        assert not any(self.state[:per]), "slab 0 is never given out"
        for slot, state in enumerate(self.state):
            refs, pins, key = self.refs[slot], self.pins[slot], self.key[slot]
            assert refs >= 0
            assert pins >= 0
            if held is not None:
                assert refs == held.get(slot, 0), f"slot {slot}: {refs} references, {held.get(slot, 0)} in tables"
            if state == FREE:
                assert not refs
                assert not pins
                assert key is None
                assert slot not in self.idle
                assert not self.told[slot]
                assert not self.children[slot]
                assert not self.parent[slot]
                continue
            taken += 1
            busy += bool(refs or pins)
            assert slabs.owner[slot // per] == kind
            assert state == SEALED or (refs == 1 and key is None)
            assert (slot in self.idle) == (not refs and not pins)
            if key is None or slots[key] != slot:
                assert (refs or pins) if key is None else (refs and slot in self.twins[key])
                assert not self.children[slot]
                assert not self.parent[slot]
                assert not self.told[slot]
                continue
            self._check_indexed(slot, key)
        assert taken == slabs.used_slots[kind]
        assert busy == slabs.busy_slots[kind]
        assert all(self.key[slot] == key and self.state[slot] == SEALED for key, slot in slots.items())
        for key, twins in self.twins.items():
            assert twins
            assert all(self.key[twin] == key and self.refs[twin] for twin in twins)
            assert self.refs[slots[key]] or self.pins[slots[key]], "an unused block gives way to its twin"

    def _check_indexed(self, slot: int, key: BlockKey) -> None:
        if self.rooted and self.depth[slot]:
            parent = self.parent[slot]
            above = self.key[parent]
            assert parent
            assert above is not None
            assert self.index.slots[above] == parent
            assert slot in (self.children[parent] or ())
            held = self.refs[parent] or self.pins[parent]
            assert held or not (self.refs[slot] or self.pins[slot]), "who holds a block holds those before it"
        for child in self.children[slot] or ():
            assert self.parent[child] == slot
            assert self.is_indexed(child)
