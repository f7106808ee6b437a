"""Slots, holders, pins and evictions."""

from __future__ import annotations

import logging
from collections import Counter

import pytest
from bad_policies import KINDS, BadEviction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rig import kv_class

from kimicore.errors import ConfigError
from kimicore.ledger import FILLING, FREE, SEALED, Ledger, Pin
from kimicore.plugins import resolve
from kimicore.prefix import BlockKeys, KeyChain, KeyContext
from kimicore.slabs import Slabs, slab_layout

SIZE = 4
FULL = kv_class("full", 1, block_tokens=SIZE)
WINDOW = kv_class("window", 3, window=9, block_tokens=SIZE)


def make(slabs: int = 9, classes=(FULL,), how: str | None = None) -> Ledger:
    """Return a ledger with a policy that keeps or breaks its promises."""
    slab_bytes, _ = slab_layout(classes, 1 << 30)
    eviction = resolve("eviction", "lru") if how is None else BadEviction(how)
    return Ledger(classes, slab_bytes, slabs, SIZE, eviction)


def chain_of(tokens: list[int], name: bytes = b"") -> KeyChain:
    """Return the chain of names of some tokens."""
    chain = BlockKeys(SIZE, b"s").chain(KeyContext(kv_class=name))
    chain.extend(tokens, len(tokens) // SIZE)
    return chain


def fill(ledger: Ledger, chain: KeyChain, kind: int = 0) -> list[int]:
    """Allocate and seal all blocks of a chain."""
    slots = ledger.allocate(kind, len(chain.keys))
    assert slots is not None
    for at, slot in enumerate(slots):
        ledger.seal(kind, slot, chain, at)
    return slots


def test_slot_zero_is_never_given_out():
    """However many blocks are asked for, slab 0 stays unused, and one block too many is refused whole."""
    ledger = make(9)
    assert ledger.allocate(0, 9) is None
    assert ledger.counts().free == 8
    assert sorted(ledger.allocate(0, 8) or ()) == list(range(1, 9))
    assert ledger.allocate(0, 1) is None
    ledger.check_integrity()


def test_a_block_goes_through_its_states():
    """FREE, FILLING, SEALED, cached, hit again, and FREE when its slot is needed."""
    ledger = make(3)
    chain = chain_of([1, 2, 3, 4])
    (slot,) = ledger.allocate(0, 1) or ()
    assert ledger.state(0, slot) == FILLING
    ledger.seal(0, slot, chain, 0)
    assert ledger.state(0, slot) == SEALED
    ledger.release(0, [slot])
    assert ledger.counts().cached == 1
    assert ledger.acquire([chain], ledger.hit([chain], 1)) == [[slot]]
    ledger.release(0, [slot])
    assert ledger.allocate(0, 2) is not None
    assert ledger.hit([chain], 1) == 0
    assert ledger.cached(0, chain.keys[0]) == 0


def test_a_filling_block_is_not_kept():
    """A block that was let go before it was full is free, not cached."""
    ledger = make(3)
    ledger.release(0, ledger.allocate(0, 2) or ())
    assert ledger.counts() == type(ledger.counts())(0, 0, 2, 2)


def test_letting_go_twice_is_refused():
    """A reference cannot be dropped twice, and neither can a pin."""
    ledger = make()
    slots = fill(ledger, chain_of([1] * 8))
    ledger.release(0, slots[::-1])
    with pytest.raises(ValueError, match="not held"):
        ledger.release(0, slots[:1])
    pin = ledger.pin(0, slots[1])
    ledger.unpin(pin)
    with pytest.raises(ValueError, match="ended already"):
        ledger.unpin(pin)
    (filling,) = ledger.allocate(0, 1) or ()
    with pytest.raises(ValueError, match="not indexed"):
        ledger.pin(0, filling)


def test_the_first_of_two_equal_blocks_is_kept_and_the_second_takes_over():
    """Two rows that fill the same content: the first is found, the second is private until the first is let go."""
    ledger = make()
    one, other = chain_of([5] * 8), chain_of([5] * 8)
    first, second = fill(ledger, one), fill(ledger, other)
    assert ledger.cached(0, one.keys[0]) == first[0]
    ledger.release(0, first[::-1])
    assert ledger.cached(0, one.keys[0]) == second[0]
    assert ledger.state(0, first[0]) == FREE
    ledger.check_integrity([Counter(second)])
    ledger.release(0, second[::-1])
    assert ledger.counts().cached == 2
    ledger.check_integrity([Counter()])


def test_an_unused_copy_gives_way_to_a_new_one():
    """A content that was cached and is computed again (the last block of a whole hit) is held once."""
    ledger = make()
    chain = chain_of([5] * 8)
    ledger.release(0, fill(ledger, chain)[::-1])
    (root,) = ledger.acquire([chain], 1)[0]
    (slot,) = ledger.allocate(0, 1) or ()
    ledger.seal(0, slot, chain, 1)
    assert ledger.counts().cached == 0
    assert ledger.cached(0, chain.keys[1]) == slot
    ledger.check_integrity([Counter([root, slot])])


def test_the_end_of_a_sequence_goes_before_its_start():
    """When room is needed, the least recently used sequence loses its last blocks first."""
    ledger = make(9)
    old, new = chain_of([1] * 16), chain_of([2] * 16)
    for chain in (old, new):
        ledger.now_s += 1
        ledger.release(0, fill(ledger, chain)[::-1])
    assert ledger.allocate(0, 3) is not None
    assert (ledger.hit([old], 4), ledger.hit([new], 4)) == (1, 4)
    assert ledger.evicted_blocks == 3
    ledger.check_integrity()


def test_held_and_pinned_blocks_stay():
    """No policy can take a block that is held or pinned, or one in front of it."""
    ledger = make(5)
    chain = chain_of([1] * 16)
    slots = fill(ledger, chain)
    pin = ledger.pin(0, slots[1])
    ledger.release(0, slots[::-1])
    assert ledger.counts().used == 2
    assert len(ledger.allocate(0, 2) or ()) == 2
    assert ledger.hit([chain], 4) == 2
    assert ledger.allocate(0, 1) is None
    ledger.unpin(pin)
    assert len(ledger.allocate(0, 2) or ()) == 2
    ledger.check_integrity()


@pytest.mark.parametrize("how", [how for how in KINDS if how not in ("fine",)])
def test_a_bad_eviction_policy_is_contained(how: str, caplog: pytest.LogCaptureFixture):
    """A policy that raises, or names too few, held, twice or nonsense ones: blocks are found all the same."""
    ledger = make(9, how=how)
    with caplog.at_level(logging.WARNING, "kimicore"):
        held = fill(ledger, chain_of([9] * 8))
        for at in range(40):
            chain = chain_of([at] * 16)
            slots = fill(ledger, chain)
            ledger.check_integrity([Counter(held + slots)])
            ledger.release(0, slots[::-1])
    assert ledger.faults.count > 0
    assert "eviction policy 'bad'" in caplog.text
    assert ledger.hit([chain_of([9] * 8)], 2) == 2


def test_a_policy_is_set_aside_after_many_faults():
    """After sixteen faults the policy is not asked any more, and this is logged."""
    ledger = make(4, how="none")
    for at in range(100):
        ledger.release(0, fill(ledger, chain_of([at] * 12))[::-1])
    assert ledger.faults.count == ledger.faults.limit == 16
    assert ledger.faults.set_aside


def test_slabs_move_between_classes():
    """A slab serves one class at a time and comes back when its last block is free."""
    ledger = make(5, (WINDOW, FULL))
    assert ledger.slabs.per_slab == (1, 3)
    full = ledger.allocate(1, 7) or []
    assert [slot // 3 for slot in full] == [1, 1, 1, 2, 2, 2, 3]
    assert ledger.allocate(0, 2) is None
    (window,) = ledger.allocate(0, 1) or ()
    assert window == 4
    ledger.release(1, full[3:6])
    assert ledger.allocate(0, 1) == [2]
    ledger.check_integrity()


def test_cached_blocks_of_another_class_make_room():
    """A class that has nothing cached itself takes a slab whose blocks nobody holds, losing as little as it can."""
    ledger = make(4, (WINDOW, FULL))
    chain = chain_of([1] * 28)
    slots = fill(ledger, chain, 1)
    ledger.release(1, slots[::-1])
    assert ledger.allocate(0, 1) == [3]
    assert ledger.cached(1, chain.keys[6]) == 0
    assert ledger.cached(1, chain.keys[5]) != 0
    ledger.check_integrity()


def test_counts_add_up_in_common_units():
    """With several classes, used, cached and free blocks are counted in the common share and sum to the total."""
    ledger = make(10, (WINDOW, FULL))
    total = ledger.counts().total
    assert total == 9 * 3
    ledger.allocate(0, 2)
    ledger.release(1, fill(ledger, chain_of([1] * 8), 1)[::-1])
    counts = ledger.counts()
    assert (counts.used, counts.cached, counts.free) == (6, 2, total - 8)


def test_what_is_not_trusted_is_forgotten_with_all_that_follows():
    """Forgetting a block takes it and every block built on it out of the index, held or not."""
    ledger = make(9)
    chain, branch = chain_of([1] * 12), chain_of([1] * 8 + [2] * 4)
    slots = fill(ledger, chain)
    taken = ledger.acquire([branch], ledger.hit([branch], 3))[0]
    more = ledger.allocate(0, 1) or []
    ledger.seal(0, more[0], branch, 2)
    ledger.release(0, slots[::-1])
    ledger.forget(0, [slots[1]])
    assert ledger.hit([chain], 3) == ledger.hit([branch], 3) == 1
    ledger.check_integrity([Counter(taken + more)])
    ledger.release(0, (taken + more)[::-1])
    assert ledger.counts().cached == 1


def test_flush_leaves_what_is_held():
    """Flushing drops every cached block and no held one."""
    ledger = make(9)
    held = fill(ledger, chain_of([1] * 8))
    ledger.release(0, fill(ledger, chain_of([2] * 12))[::-1])
    assert ledger.flush() == 3
    assert ledger.counts().used == 2
    ledger.check_integrity([Counter(held)])


def test_an_arena_that_holds_nothing_is_refused():
    """Too small an arena is a ConfigError that says what is needed."""
    with pytest.raises(ConfigError, match="kv_device_bytes"):
        slab_layout((FULL, WINDOW), 200)
    with pytest.raises(ConfigError, match="at least 2"):
        Slabs([32], 32, 1)
    with pytest.raises(ConfigError, match="whole blocks"):
        Slabs([32, 48], 64, 4)


class LedgerMachine(RuleBasedStateMachine):
    """Rows that fill, share, pin and let go of blocks of two classes, against a plain model of what is held."""

    @initialize(slabs=st.integers(3, 9), both=st.booleans(), how=st.sampled_from(KINDS))
    def open(self, slabs: int, both: bool, how: str) -> None:
        self.classes = (WINDOW, FULL) if both else (FULL,)
        self.ledger = make(slabs, self.classes, how)
        self.rows: list[tuple[int, list[int]]] = []
        self.pins: list[Pin] = []

    @rule(kind=st.integers(0, 1), base=st.integers(0, 2), blocks=st.integers(1, 6), tail=st.integers(0, 1))
    def fill(self, kind: int, base: int, blocks: int, tail: int) -> None:
        kind %= len(self.classes)
        chain = chain_of([base] * (blocks * SIZE - 1) + [tail], bytes([kind]))
        need = [0] * len(self.classes)
        before = self.ledger.counts()
        full = self.classes[kind].window is None
        count = 0
        if full:  # as a row does: hit what is there, then fill the rest
            chains = [chain] * len(self.classes)
            indexed = [self.ledger.cached(kind, key) for key in chain.keys]
            count = indexed.index(0) if 0 in indexed else len(indexed)
            count = min(count, blocks - 1)
            slots = []
            for key in chain.keys[:count]:
                slot = self.ledger.cached(kind, key)
                self.ledger._hold(kind, slot)
                slots.append(slot)
            assert len(chains) == len(self.classes)
        else:
            slots = []
        need[kind] = blocks - count
        possible = self.ledger.fits(need) if len(self.classes) == 1 else None
        more = self.ledger.allocate(kind, blocks - count)
        if possible is not None:
            assert possible == (more is not None)
        if more is None:
            self.ledger.release(kind, slots[::-1])
            assert self.ledger.counts().used == before.used
            return
        for at, slot in enumerate(more):
            self.ledger.seal(kind, slot, chain, count + at)
        self.rows.append((kind, slots + more))

    @rule(at=st.integers(0, 9), drop=st.booleans())
    def let_go(self, at: int, drop: bool) -> None:
        if self.rows:
            kind, slots = self.rows.pop(at % len(self.rows))
            self.ledger.release(kind, slots[::-1], drop=drop)

    @rule(at=st.integers(0, 9), block=st.integers(0, 5))
    def pin(self, at: int, block: int) -> None:
        if self.rows:
            kind, slots = self.rows[at % len(self.rows)]
            slot = slots[block % len(slots)]
            if self.ledger.indexed(kind, slot):
                self.pins.append(self.ledger.pin(kind, slot))

    @rule(at=st.integers(0, 9))
    def unpin(self, at: int) -> None:
        if self.pins:
            self.ledger.unpin(self.pins.pop(at % len(self.pins)))

    @rule(at=st.integers(0, 9), block=st.integers(0, 5))
    def forget(self, at: int, block: int) -> None:
        if self.rows:
            kind, slots = self.rows[at % len(self.rows)]
            self.ledger.forget(kind, [slots[block % len(slots)]])

    @rule()
    def flush(self) -> None:
        self.ledger.flush()
        assert self.pins or self.ledger.counts().cached == 0

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "ledger"):
            return
        held = [Counter() for _ in self.classes]
        for kind, slots in self.rows:
            held[kind].update(slots)
        self.ledger.check_integrity(held)
        counts = self.ledger.counts()
        assert counts.used + counts.cached + counts.free == counts.total


LedgerMachine.TestCase.settings = settings(
    stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedger = LedgerMachine.TestCase
TestLedger.__doc__ = "Whatever rows, pins and policies do, references, index, slabs and counts agree."
