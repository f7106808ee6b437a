"""The blocks of one KV class: states, holders, names, and what the eviction policy knows of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from kimicore.contracts import BlockKey, EvictionState
from kimicore.guard import RAISED, PolicyFaults
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
        "kept",
        "key",
        "parent",
        "pins",
        "policy",
        "refs",
        "rooted",
        "state",
        "told",
        "twins",
        "uses",
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
        self.kept: dict[BlockKey, tuple[float, int]] = {}  # until when, at which priority somebody wants it cached
        self.idle: OrderedDict[int, None] = OrderedDict()  # indexed, nobody holds it; longest unused first
        self.uses: Callable[[BlockKey], None] | None = None  # is told of every use, where lower tiers want to know

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
        self.kept.pop(key, None)
        if self.told[slot]:
            self.told[slot] = False
            self._call("removed()", self.policy.removed, key)

    def _call(self, what: str, method: Callable[..., object], *arguments: object) -> None:
        """Tell the policy something, unless it is set aside; what it raises is noted."""
        faults = self.faults
        if faults.set_aside:
            return
        faults.begin(what)
        try:
            method(*arguments)
        except RAISED as error:
            faults.note(f"{what} never raises", error)
        faults.end()

    def tell(self, slot: int, key: BlockKey, now_s: float) -> None:
        """Tell the policy that a request has used an indexed block and lets go of it."""
        if self.uses is not None:
            self.uses(key)
        if self.told[slot]:
            self._call("touched()", self.policy.touched, key, now_s)
            return
        self.told[slot] = True
        parent = self.parent[slot]
        above = self.key[parent] if parent else None
        self._call("added()", self.policy.added, key, above, self.depth[slot], now_s)

    def tell_importance(self, slots: Sequence[int], values: Sequence[float]) -> None:
        """Tell the policy how much attention blocks got that it knows."""
        pairs = [(self.key[slot], value) for slot, value in zip(slots, values, strict=True) if self.told[slot]]
        keys, shares = [key for key, _ in pairs], [value for _, value in pairs]
        if keys:
            self._call("importance()", self.policy.importance, keys, shares)

    # ------------------------------------------------------------ who goes

    def keep(self, slot: int, until_s: float, priority: int) -> None:
        """Have an indexed block go after those that nobody asked to keep; of two wishes the more important counts."""
        key = self.key[slot]
        if key is None or self.index.slots.get(key) != slot:
            return
        before = self.kept.get(key)
        if before is None or (priority, until_s) > (before[1], before[0]):
            self.kept[key] = (until_s, priority)

    def victims(self, count: int, now_s: float, *, all_of_them: bool = True) -> list[BlockKey]:
        """Return what the policy names; nothing where it raises or was set aside.

        ``all_of_them``: so many can go, and it is a fault to name fewer.

        Blocks that somebody asked to keep are open to it only where the others are too few, least important first.
        """
        taken: set[int] = set()
        if not self.kept:
            return self._named(count, now_s, None, taken, all_of_them)
        for key in [key for key, (until_s, _) in self.kept.items() if until_s <= now_s]:
            del self.kept[key]
        named: list[BlockKey] = []
        for priority in (*sorted({one for _, one in self.kept.values()}), None):
            named += self._named(count - len(named), now_s, priority, taken, all_of_them)
            if len(named) >= count:
                break
        return named

    def _named(self, count: int, now_s: float, below: int | None, taken: set[int], all_of_them: bool) -> list[BlockKey]:
        """Ask the policy; ``taken`` blocks and those kept at priority ``below`` or more (None: none) are not to go."""
        faults = self.faults
        if faults.set_aside:
            return []
        faults.begin("victims()")
        try:
            named = list(islice(self.policy.victims(count, self._asker(below, taken), now_s), count))
        except RAISED as error:
            faults.end()
            faults.note("victims() never raises", error)
            return []
        if not faults.end():
            return []
        if len(named) < count and below is None and all_of_them:
            faults.note(f"victims() names as many as were asked for, as long as there are ({count})")
        return named

    def _asker(self, below: int | None, taken: set[int]) -> Callable[[BlockKey], bool]:
        """Return ``evictable``: see :meth:`kimicore.contracts.EvictionState.victims`; it notes what it says yes to."""
        slots, idle, children = self.index.slots, self.idle, self.children
        kept = self.kept if below is not None else {}
        least = -1 if below is None else below

        def evictable(key: BlockKey) -> bool:
            slot = slots.get(key, 0)
            if slot not in idle or slot in taken:
                return False
            below = children[slot]
            if below and not below <= taken:
                return False
            if key in kept and kept[key][1] >= least:
                return False
            taken.add(slot)
            return True

        return evictable

    def next_victims(self, count: int, now_s: float) -> list[int]:
        """Return the slots of the blocks that would go next, up to ``count``, a leaf before its root; none goes."""
        found: list[int] = []
        gone: set[int] = set()
        for key in self.victims(count, now_s, all_of_them=False):  # blocks that move keep those before them
            slot = self.index.slots.get(key, 0) if isinstance(key, bytes) else 0
            if slot not in self.idle or slot in gone or not (self.children[slot] or gone) <= gone:
                self.faults.note("victims are cached, not held, named once, and a leaf goes before its root")
                break
            gone.add(slot)
            found.append(slot)
        if not found:
            for slot in islice(self.idle, count):
                if (self.children[slot] or gone) <= gone and self.key[slot] not in self.kept:
                    gone.add(slot)
                    found.append(slot)
        return found

    def legal_victim(self, key: object) -> int:
        """Return the slot of a block that may go now, or 0."""
        slot = self.index.slots.get(key, 0) if isinstance(key, bytes) else 0
        return slot if slot in self.idle and not self.children[slot] else 0

    def longest_unused(self) -> int:
        """Return the cached block that goes first where there is no policy to ask."""
        kept = 0
        for slot in self.idle:
            if not self.children[slot]:  # true of the first, since a block is let go after those that follow it
                if self.key[slot] not in self.kept:
                    return slot
                kept = kept or slot
        if kept:
            return kept
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
        assert all(key in slots for key in self.kept), "only what is cached or held is kept"
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
