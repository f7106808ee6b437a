"""Requests whose prefix is being fetched from a lower tier, and whether that is worth it.

A waiting request whose prefix goes on below the device is set aside while its blocks are copied up; when they are
there, or its time is over, it waits as before and finds in the cache whatever arrived. So a load changes what a request
finds, and nothing else: one that fails, or comes too late, costs time and never a wrong token.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import Factory, define, frozen

from kimicore.contracts import StepCost, StepLimits
from kimicore.ledger import Pin
from kimicore.moves import BlockMove, TierName, Transfer, Transferred
from kimicore.prefix import Chains, first_seen
from kimicore.requests import Request
from kimicore.roster import Roster
from kimicore.tiers import READ_BATCH, Tiers

__all__ = ["Loader", "Loading", "recompute_s"]

LOOKS = 32  # waiting requests that are looked at
TRIES = 16  # loads per request: what arrived may be dropped again before it is used
ROOM_S = 10.0  # how long a request waits for room to load to, rather than compute
DECLINED_S = 0.25  # how long it counts that computing was faster: the estimate changes with what is measured
PATIENCE = 4.0  # a load may take so many times what was expected ...
LEAST_PATIENCE_S = 0.25  # ... and at least this long


@define(eq=False)
class Loading:
    """Blocks on their way up for a request (None: it went on without them). ``blocks``: per class (place, slot)."""

    request: Request | None
    chains: Chains
    blocks: list[list[tuple[int, int]]]
    pins: list[Pin]
    deadline_s: float
    left: int
    arrived: set[tuple[int, int]] = Factory(set)


@frozen
class _Want:
    """A hit of ``reach`` blocks and what is missing of it on the device: per class (place, tier)."""

    reach: int
    missing: tuple[tuple[tuple[int, TierName], ...], ...]

    @property
    def count(self) -> int:
        return sum(map(len, self.missing))


def recompute_s(start: int, end: int, chunk_tokens: int, cost: StepCost) -> float:
    """Return the seconds that the tokens from ``start`` to ``end`` of a prompt take, in chunks, alone."""
    seconds = 0.0
    while start < end:
        count = min(chunk_tokens, end - start)
        seconds += cost.step_s(count, 1, start + count, count * start + count * count // 2)
        start += count
    return seconds


class Loader:
    """Sets requests aside while their blocks come up. ``limits``: what a step takes of rows and of a prompt."""

    def __init__(self, roster: Roster, tiers: Tiers, limits: StepLimits) -> None:
        self._roster, self._tiers, self._ledger = roster, tiers, roster.ledger
        self._chunk_tokens, self._places = limits.max_batch_tokens, limits.max_batch_size
        self._of: dict[int, Loading] = {}  # by transfer
        self._all: list[Loading] = []
        self._roomless: dict[int, float] = {}  # requests that could load if there were room, and since when

    # ------------------------------------------------------------ beginning

    def begin(self, now_s: float, cost: StepCost) -> list[Transfer]:
        """Look at the first requests that wait, and return the transfers that they need."""
        found: list[Transfer] = []
        roster = self._roster
        for number in [one for one in self._roomless if one not in roster.waiting]:
            del self._roomless[number]
        for request in list(roster.waiting.values())[:LOOKS]:
            open_ = request.tries < TRIES and request.declined_s <= now_s and request.number not in roster.holders
            if open_ and request.looked_at != roster.cache_age and request.new.use_cache:
                found += self._look(request, now_s, cost)
        self._bar(now_s)
        return found

    def _bar(self, now_s: float) -> None:
        """Keep requests from computing what they could load, for a while, where room for that may yet come."""
        roster = self._roster
        hopeful = roster.running or self._all or roster.holders
        barred = {one for one, since_s in self._roomless.items() if hopeful and now_s - since_s <= ROOM_S}
        if barred != roster.barred:
            roster.barred, roster.waiting_view = barred, None

    def _look(self, request: Request, now_s: float, cost: StepCost) -> list[Transfer]:
        roster, tiers = self._roster, self._tiers
        request.looked_at = roster.cache_age
        most = roster.most_hit_blocks(request)
        here = roster.hit(request) if most else 0
        reach = tiers.reach(request.chains, most) if most else 0
        if reach <= here:
            self._roomless.pop(request.number, None)
            return []
        want, expected_s = self._best(request, here, reach, cost)
        if want is None:
            roster.counts["loads_declined"] += request.declined_s == float("-inf")
            request.declined_s = now_s + DECLINED_S
            self._roomless.pop(request.number, None)
            return []
        return self._start(request, want, now_s, expected_s)

    def _best(self, request: Request, here: int, reach: int, cost: StepCost) -> tuple[_Want | None, float]:
        """Return the hit that gets the request going soonest, and its load's seconds; None: computing is sooner."""
        tiers, size = self._tiers, self._ledger.block_tokens
        known = len(request.known)
        best: _Want | None = None
        best_s = recompute_s(here * size, known, self._chunk_tokens, cost)
        expected_s = 0.0
        near = tiers.reach(request.chains, reach, disk=False)
        for end in {near, reach}:
            if end <= here:
                continue
            want = self._want(request.chains, end)
            load_s = self._load_s(want)
            total_s = load_s + recompute_s(end * size, known, self._chunk_tokens, cost)
            if total_s < best_s:
                best, best_s, expected_s = want, total_s, load_s
        return best, expected_s

    def _want(self, chains: Chains, reach: int) -> _Want:
        ledger, tiers = self._ledger, self._tiers
        missing: list[tuple[tuple[int, TierName], ...]] = []
        for kind, chain in enumerate(chains):
            if chain is None:
                missing.append(())
                continue
            slots = ledger.index(kind).slots
            first = first_seen(reach * ledger.block_tokens, ledger.windows[kind], ledger.block_tokens)
            own: list[tuple[int, TierName]] = []
            for at in range(first, reach):
                key = chain.keys[at]
                tier = None if key in slots else tiers.source(kind, key)
                if tier is not None:
                    own.append((at, tier))
            missing.append(tuple(own))
        return _Want(reach, tuple(missing))

    def _load_s(self, want: _Want) -> float:
        """Return how long a load takes; from host and disk at once it takes as long as the slower of both."""
        sizes = self._tiers.host.block_bytes
        total = {"host": 0, "disk": 0}
        for kind, own in enumerate(want.missing):
            for _, tier in own:
                total[tier] += sizes[kind]
        return max(self._tiers.rates[tier].load_s(count) for tier, count in total.items())

    def _start(self, request: Request, want: _Want, now_s: float, expected_s: float) -> list[Transfer]:
        """Set the request aside and ask for its blocks; nothing changes where there is no room for them now."""
        ledger, roster = self._ledger, self._roster
        pins = self._pins(request.chains, want)
        sources = self._host_slots(request.chains, want)  # making room below must not drop what is to come
        company = len(roster.running) + len(roster.holders) + len(self._all)
        margin = company + 1 if company else 0  # the next block of each, as who is admitted has to leave
        needs = [len(own) for own in want.missing]
        slots: list[list[int]] | None = None
        spare = [margin if kind in request.kinds else 0 for kind in range(len(needs))]
        if ledger.fits([need + more for need, more in zip(needs, spare, strict=True)]) and self._modest(needs):
            slots = self._allocate(needs)
        if slots is None:
            self._roomless.setdefault(request.number, now_s)
            for pin in pins:
                ledger.unpin(pin)
            for kind, held in enumerate(sources):
                for slot in held:
                    self._tiers.host.unpin(kind, slot)
            return []
        blocks = [
            [(at, slot) for (at, _), slot in zip(own, mine, strict=True)]
            for own, mine in zip(want.missing, slots, strict=True)
        ]
        patience_s = max(LEAST_PATIENCE_S, PATIENCE * expected_s)
        loading = Loading(request, request.chains, blocks, pins, now_s + patience_s, want.count)
        self._all.append(loading)
        roster.set_aside(request)
        self._roomless.pop(request.number, None)
        request.tries += 1
        request.loading = loading
        roster.counts["loads"] += 1
        return self._ask(loading, want)

    def _modest(self, needs: Sequence[int]) -> bool:
        """Whether a load may begin: what comes up for requests without a place stays under half of the arena."""
        slabs = self._ledger.slabs
        if len(self._roster.running) + len(self._all) < self._places:
            return True
        coming = [sum(len(one.blocks[kind]) for one in self._all) for kind in range(len(needs))]
        units = sum([(need + more) * unit for need, more, unit in zip(needs, coming, slabs.units, strict=True)])
        return 2 * units <= slabs.units_total

    def _pins(self, chains: Chains, want: _Want) -> list[Pin]:
        """Keep the blocks of the hit that are on the device; a block keeps those before it."""
        ledger = self._ledger
        pins: list[Pin] = []
        for kind, chain in enumerate(chains):
            if chain is None:
                continue
            slots = ledger.index(kind).slots
            window = ledger.windows[kind]
            first = first_seen(want.reach * ledger.block_tokens, window, ledger.block_tokens)
            missing = {at for at, _ in want.missing[kind]}
            here = [at for at in range(first, want.reach) if at not in missing]
            pins += [ledger.pin(kind, slots[chain.keys[at]]) for at in (here[-1:] if window is None else here)]
        return pins

    def _host_slots(self, chains: Chains, want: _Want) -> list[list[int]]:
        """Pin the blocks of a load that lie in the host, until they are read, and return their slots per class."""
        host = self._tiers.host
        found: list[list[int]] = []
        for kind, (own, chain) in enumerate(zip(want.missing, chains, strict=True)):
            keys = () if chain is None else chain.keys
            slots = [host.slots[kind][keys[at]] for at, tier in own if tier == "host"]
            for slot in slots:
                host.pin(kind, slot)
            found.append(slots)
        return found

    def _allocate(self, needs: Sequence[int]) -> list[list[int]] | None:
        ledger = self._ledger
        slots: list[list[int]] = []
        for kind, need in enumerate(needs):
            own = ledger.allocate(kind, need)
            if own is None:
                for other, taken in enumerate(slots):
                    ledger.release(other, taken, drop=True)
                return None
            slots.append(own)
        self._roster.cache_age += 1
        return slots

    def _ask(self, loading: Loading, want: _Want) -> list[Transfer]:
        """Return the transfers of a load, first blocks first, several from the disk so that its readers share them."""
        tiers = self._tiers
        found: list[Transfer] = []
        for tier, batch in (("host", 1 << 30), ("disk", READ_BATCH)):
            moves: list[BlockMove] = []
            for kind, chain in enumerate(loading.chains):
                if chain is None:
                    continue
                for (at, source), (_, slot) in zip(want.missing[kind], loading.blocks[kind], strict=True):
                    if source != tier:
                        continue
                    key = chain.keys[at]
                    place = tiers.host.slots[kind][key] if tier == "host" else 0
                    moves.append(BlockMove(kind, key, place, slot))
            for begin in range(0, len(moves), batch):
                transfer = tiers.open("host" if tier == "host" else "disk", "device", moves[begin : begin + batch])
                self._of[transfer.number] = loading
                found.append(transfer)
        return found

    # ------------------------------------------------------------ ending

    def done(self, moved: Transferred) -> None:
        """Take in a transfer's outcome; with the last of its load the blocks join the cache and the request waits."""
        loading = self._of.pop(moved.transfer.number)
        for move, stored in zip(moved.transfer.moves, moved.stored, strict=True):
            if stored > 0:
                loading.arrived.add((move.kind, move.target))
        loading.left -= len(moved.transfer.moves)
        if loading.left:
            return
        self._all.remove(loading)
        self._settle(loading)

    def _settle(self, loading: Loading) -> None:
        """Give the blocks that arrived to the cache and to the request, and the others back."""
        ledger = self._ledger
        arrived: list[list[int]] = []
        for kind, blocks in enumerate(loading.blocks):
            good: list[int] = []
            bad: list[int] = []
            chain = loading.chains[kind]
            for at, slot in blocks:
                whole = (kind, slot) in loading.arrived and not (bad and ledger.windows[kind] is None)
                if chain is not None and whole:
                    ledger.seal(kind, slot, chain, at)
                (good if whole else bad).append(slot)
            ledger.release(kind, bad[::-1], drop=True)
            arrived.append(good)
        self._roster.cache_age += 1
        if loading.request is not None:
            self._roster.hold(loading.request)
            self._rejoin(loading)
        for kind, good in enumerate(arrived):
            ledger.release(kind, good[::-1])
        for pin in loading.pins:
            ledger.unpin(pin)

    def expire(self, now_s: float) -> None:
        """Let requests go on whose load takes too long; what arrives later joins the cache for others."""
        for loading in self._all:
            if loading.request is not None and loading.deadline_s <= now_s:
                self._roster.counts["loads_late"] += 1
                loading.request.tries = TRIES
                self._rejoin(loading)

    def _rejoin(self, loading: Loading) -> None:
        request, loading.request = loading.request, None
        assert request is not None
        request.loading = None
        self._roster.wait(request)

    def check_integrity(self) -> None:
        """Raise AssertionError where loads, requests and transfers do not agree."""
        assert {id(one) for one in self._of.values()} == {id(one) for one in self._all}
        for loading in self._all:
            assert loading.left > 0
            assert loading.request is None or loading.request.loading is loading

    def held(self, kind: int) -> list[int]:
        """Return the slots of a class that loads hold."""
        return [slot for loading in self._all for _, slot in loading.blocks[kind]]
