"""The lower tiers of the KV cache: what goes down and when, and what is where.

Blocks go from the device to host memory and from there to disk, and come back from either to the device. Tiers hold
bytes and decide nothing: here and in the ledger is all that decides, on one thread. What is asked for are transfers;
whoever carries them tells when each is over. What the device drops is copied to the host before anything is written
over it, a few blocks before a step that fills as many; the host writes to disk ahead of its need, and where that cannot
keep up, blocks are dropped without a copy and nobody waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from attrs import define

from kimicore.contracts import BlockKey
from kimicore.ledger import Ledger, Pin
from kimicore.moves import BlockMove, TierName, Transfer, Transferred
from kimicore.prefix import Chains, PrefixIndex, longest_hit
from kimicore.rates import Rates
from kimicore.shelf import DiskShelf, HostShelf
from kimicore.types import TierStats

__all__ = ["BATCH", "QUEUED_BYTES", "READ_BATCH", "Tiers"]

BATCH = 32  # blocks of a transfer downwards
READ_BATCH = 8  # blocks of a transfer upwards: several threads share a long one
HOST_RESERVE = 8  # one part in so many of the host's arena is kept free, where there is a disk below
QUEUED_BYTES = 64 << 20  # that are on their way to the disk at once
PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # without writes after one that failed, twice as long after each


@define(eq=False)
class _Open:
    """A transfer on its way; ``pins`` keep its sources on the device."""

    transfer: Transfer
    pins: list[Pin]
    units: int


@define(eq=False)
class _Counts:
    """Totals of one tier."""

    hit_blocks: int = 0
    missed_blocks: int = 0
    loaded_bytes: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    dropped_blocks: int = 0


class Tiers:
    """What is in the lower tiers and on its way.

    ``staging``: the host's arena only passes blocks on to the disk. ``admission``: uses of a block before it is written
    to disk.
    """

    def __init__(
        self,
        ledger: Ledger,
        host: HostShelf,
        disk: DiskShelf | None,
        *,
        staging: bool = False,
        admission: int = 2,
    ) -> None:
        self.ledger, self.host, self.disk = ledger, host, disk
        self.staging, self.admission = staging, admission
        self.rates = {"host": Rates(4e9, 1e-3), "disk": Rates(0.5e9, 2e-3)}
        self._pause_s, self._paused_until_s = 0.0, -1e18
        self.sinking = False  # everything that is worth it goes down now, whether there is need or not
        self._host_reserve = host.slabs.units_total if staging else host.slabs.units_total // HOST_RESERVE
        self._open: dict[int, _Open] = {}
        self._urgent: list[tuple[BlockMove, BlockKey | None, int]] = []
        self._next = 1
        self._leaving_units = self.queued_bytes = 0
        self._sent: list[set[BlockKey]] = [set() for _ in ledger.classes]  # on their way down
        self._uses: OrderedDict[BlockKey, int] = OrderedDict()
        slots = sum([one.slabs.units_total // min(one.slabs.units) for one in (ledger, host)])
        self._most_uses = max(4096, 4 * slots)
        self._counts = {"host": _Counts(), "disk": _Counts()}
        self._discards: list[BlockKey] = []
        ledger.listen(self._used if disk is not None and admission > 1 else None, self._dropping)

    # ------------------------------------------------------------ looking

    def source(self, kind: int, key: BlockKey) -> TierName | None:
        """Return the fastest lower tier that has a block, or None."""
        if key in self.host.slots[kind]:
            return "host"
        return "disk" if self.disk is not None and key in self.disk else None

    def reach(self, chains: Chains, blocks: int, *, disk: bool = True) -> int:
        """Return the most of the first ``blocks`` blocks that device, host and (``disk``) disk have together."""
        below = self.disk if disk else None
        indexes = [_Union(self.ledger.index(kind), slots, below) for kind, slots in enumerate(self.host.slots)]
        return longest_hit(indexes, self.ledger.windows, chains, self.ledger.block_tokens, blocks)

    @property
    def busy(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._open)

    @property
    def on_device(self) -> bool:
        """Whether moves hold slots of the device."""
        return any("device" in (one.transfer.source, one.transfer.target) for one in self._open.values())

    def stats(self, tier: TierName) -> TierStats | None:
        """Return the figures of a lower tier as far as they are known here, or None where there is none."""
        counts = self._counts[tier]
        totals = (
            counts.hit_blocks,
            counts.missed_blocks,
            counts.loaded_bytes,
            counts.stored_blocks,
            counts.stored_bytes,
            counts.dropped_blocks,
        )
        if tier == "host":
            slabs = self.host.slabs
            limit = (slabs.count - 1) * slabs.per_slab[0] * self.host.block_bytes[0]
            return TierStats(self.host.blocks, self.host.used_bytes, limit, *totals)
        if self.disk is None:
            return None
        return TierStats(len(self.disk), self.disk.used_bytes, self.disk.limit_bytes, *totals)

    # ------------------------------------------------------------ going down

    def lower(self, now_s: float) -> list[Transfer]:
        """Return what is to be written down now, before the host runs short of room."""
        if self.disk is None or now_s < self._paused_until_s:
            return []
        found = self._sink_device(now_s) if self.sinking else []
        return found + self._lower_host(now_s)

    def want(self, keys: Iterable[BlockKey]) -> None:
        """Have these blocks written to disk at their first use, as if they had been used often enough."""
        for key in keys:
            self._uses.pop(key, None)
            self._note_use(key, self.admission)

    def _used(self, key: BlockKey) -> None:
        self._note_use(key, self._uses.pop(key, 0) + 1)

    def _dropping(self, kind: int, slot: int) -> None:
        """Have a block copied that the device drops now and nobody has copied before: see :meth:`take_urgent`."""
        key, parent, depth = self.ledger.named(kind, slot)
        if self.source(kind, key) is not None:
            return
        useless = self.sinking or (self.staging and not self._admits(key))  # nobody asks the host any more, or at all
        target = 0 if useless else self.host_slot(kind, self.ledger.now_s)
        if target:
            self._urgent.append((BlockMove(kind, key, slot, target), parent, depth))
        else:
            self._counts["host"].dropped_blocks += 1

    def take_urgent(self) -> list[BlockMove]:
        """Return copies from the device to the host that have to be made before anybody writes to the device again."""
        return [move for move, _, _ in self._urgent]

    def urgent_done(self, stored: Sequence[int]) -> None:
        """Take in what became of the copies that :meth:`take_urgent` named."""
        urgent, self._urgent = self._urgent, []
        for (move, parent, depth), size in zip(urgent, stored, strict=True):
            if size > 0:
                self._arrived(move, parent, depth, size)
            else:
                self.host.abandon(move.kind, move.target)

    def _arrived(self, move: BlockMove, parent: BlockKey | None, depth: int, size: int) -> None:
        self.host.arrive(move.kind, move.target, move.key, parent, depth, self.ledger.now_s)
        self._counts["host"].stored_blocks += 1
        self._counts["host"].stored_bytes += size

    def _note_use(self, key: BlockKey, count: int) -> None:
        self._uses[key] = count
        if len(self._uses) > self._most_uses:
            self._uses.popitem(last=False)

    def _admits(self, key: BlockKey) -> bool:
        return self.admission <= 1 or self._uses.get(key, 0) >= self.admission

    def _sink_device(self, now_s: float) -> list[Transfer]:
        """Return copies of cached blocks that are worth a place on disk, for the end of an engine."""
        found: list[Transfer] = []
        for kind in range(len(self.host.slots)):
            moves: list[BlockMove] = []
            for slot, key in self.ledger.next_victims(kind, BATCH):
                if self.source(kind, key) is None and self._admits(key):
                    target = self.host_slot(kind, now_s)
                    if not target:
                        break
                    moves.append(BlockMove(kind, key, slot, target))
                else:
                    self.ledger.evict(kind, key)  # it is below, or not worth it
            if moves:
                found.append(self.send("device", "host", moves))
        return found

    def host_slot(self, kind: int, now_s: float) -> int:
        """Return a slot of the host's to write to, dropping its least worthy blocks where it must; 0: there is none."""
        host = self.host
        slot = host.reserve(kind)
        if slot:
            return slot
        for key in host.next_victims(kind, 8, now_s):
            on_disk = self.disk is not None and key in self.disk
            if self.staging and not on_disk:
                continue  # it was promised to the disk
            host.drop(kind, key)
            if self.disk is not None and not on_disk:
                self._counts["disk"].dropped_blocks += 1
        slot = host.reserve(kind)
        if not slot and not self.staging and host.emptied(kind):
            slot = host.reserve(kind)
        return slot

    def _lower_host(self, now_s: float) -> list[Transfer]:
        host, disk = self.host, self.disk
        assert disk is not None
        slabs = host.slabs
        short = self._host_reserve - slabs.free_units() - self._leaving_units
        if self.sinking:
            short = slabs.units_total
        found: list[Transfer] = []
        for kind, unit in enumerate(slabs.units):
            if short <= 0 or self.queued_bytes >= QUEUED_BYTES:
                break
            moves: list[BlockMove] = []
            # As many as the queue takes: a step, or a load, can bring more than one transfer of them.
            most = -(-(QUEUED_BYTES - self.queued_bytes) // host.block_bytes[kind])
            for key in host.next_victims(kind, most if self.sinking else min(most, -(-short // unit)), now_s):
                if key not in disk and self._admits(key):
                    moves.append(BlockMove(kind, key, host.slots[kind][key], 0))
                elif not self.sinking:
                    if key not in disk:
                        self._counts["disk"].dropped_blocks += 1
                    host.drop(kind, key)
                else:
                    continue
                short -= unit
            found += [self.send("host", "disk", moves[at : at + BATCH]) for at in range(0, len(moves), BATCH)]
        return found

    def moving(self, kind: int, key: BlockKey) -> bool:
        """Whether a block is on its way from the device to the host."""
        return key in self._sent[kind]

    def send(self, source: TierName, target: TierName, moves: Sequence[BlockMove]) -> Transfer:
        """Begin a move downwards; its sources stay where they are until it is over."""
        ledger = self.ledger
        pins: list[Pin] = []
        held: set[tuple[int, int]] = set()  # by this move itself: another's pin may end sooner
        units = 0
        for move in moves:
            units += ledger.slabs.units[move.kind]
            if source == "host":
                self.host.pin(move.kind, move.source)
            elif (move.kind, move.source) not in held:
                pins.append(ledger.pin(move.kind, move.source))
                held.update((move.kind, slot) for slot in pins[-1].slots)  # the blocks before it as well
            if target == "host":
                self._sent[move.kind].add(move.key)
        if target == "disk":
            self._leaving_units += units
            self.queued_bytes += self._bytes(moves)
        return self.open(source, target, moves, pins, units)

    def open(
        self,
        source: TierName,
        target: TierName,
        moves: Sequence[BlockMove],
        pins: Sequence[Pin] = (),
        units: int = 0,
    ) -> Transfer:
        """Note a transfer as on its way and return it."""
        transfer = Transfer(self._next, source, target, tuple(moves))
        self._next += 1
        self._open[transfer.number] = _Open(transfer, list(pins), units)
        if target == "device":
            self.rates[source].queued_bytes += self._bytes(moves)
        return transfer

    def _bytes(self, moves: Iterable[BlockMove]) -> int:
        sizes = self.host.block_bytes
        return sum([sizes[move.kind] for move in moves])

    # ------------------------------------------------------------ what is over

    def done(self, moved: Transferred, now_s: float) -> None:
        """Take in a transfer's outcome; raises KeyError for one that is not on its way."""
        own = self._open.pop(moved.transfer.number)
        transfer = moved.transfer
        if transfer.target == "device":
            self._loaded(moved, now_s)
        elif transfer.target == "host":
            self._on_host(moved, own)
        else:
            self._on_disk(moved, own, now_s)

    def _on_host(self, moved: Transferred, own: _Open) -> None:
        ledger, host = self.ledger, self.host
        moves = moved.transfer.moves
        for move, stored in zip(moves, moved.stored, strict=True):
            self._sent[move.kind].discard(move.key)
            # A block that lost its name meanwhile belongs to a request that failed: nobody may have its content.
            if stored <= 0 or ledger.cached(move.kind, move.key) != move.source:
                host.abandon(move.kind, move.target)
                continue
            self._arrived(move, *ledger.named(move.kind, move.source)[1:], stored)
        for pin in own.pins:
            ledger.unpin(pin)

    def _on_disk(self, moved: Transferred, own: _Open, now_s: float) -> None:
        disk, counts = self.disk, self._counts["disk"]
        assert disk is not None
        self._leaving_units -= own.units
        self.queued_bytes -= self._bytes(moved.transfer.moves)
        failed = False
        for move, stored in zip(moved.transfer.moves, moved.stored, strict=True):
            self.host.unpin(move.kind, move.source)
            if stored > 0:
                disk.add(move.key, stored)
                counts.stored_blocks += 1
                counts.stored_bytes += stored
            else:
                failed = True
                counts.dropped_blocks += 1
                if self.staging and not self.host.pinned(move.kind, move.source):  # others wait for its place
                    self.host.drop(move.kind, move.key)
        self._discards += disk.overflow(disk.limit_bytes // 32 if failed else 0)
        self._pause_s = min(LONGEST_PAUSE_S, max(PAUSE_S, 2 * self._pause_s)) if failed else 0.0
        self._paused_until_s = now_s + self._pause_s

    def _loaded(self, moved: Transferred, now_s: float) -> None:
        transfer = moved.transfer
        counts, rates = self._counts[transfer.source], self.rates[transfer.source]
        rates.queued_bytes -= self._bytes(transfer.moves)
        good = [move for move, stored in zip(transfer.moves, moved.stored, strict=True) if stored > 0]
        rates.observe(self._bytes(good), moved.ended_s - moved.begun_s)
        counts.hit_blocks += len(good)
        counts.missed_blocks += len(transfer.moves) - len(good)
        counts.loaded_bytes += self._bytes(good)
        for move, stored in zip(transfer.moves, moved.stored, strict=True):
            if transfer.source == "host":
                self.host.unpin(move.kind, move.source)
                self.host.touch(move.kind, move.key, now_s)
            elif self.disk is not None:
                self.disk.touch(move.key) if stored >= 0 else self.disk.forget(move.key)

    def take_discards(self) -> list[BlockKey]:
        """Return the records that the disk is to forget."""
        discards, self._discards = self._discards, []
        return discards

    def check_integrity(self) -> None:
        """Raise AssertionError where what is on its way and what is held for it do not agree."""
        self.host.check()
        if self.disk is not None:
            self.disk.check()
        leaving = [one for one in self._open.values() if one.transfer.source == "device"]
        sinking = [one for one in self._open.values() if one.transfer.target == "disk"]
        assert self._leaving_units == sum([one.units for one in sinking])
        assert self.queued_bytes == sum([self._bytes(one.transfer.moves) for one in sinking])
        for kind, sent in enumerate(self._sent):
            moves = [move for one in leaving for move in one.transfer.moves if move.kind == kind]
            assert sent == {move.key for move in moves}
            assert all(self.ledger.pins(kind, move.source) for move in moves)
        for name, rates in self.rates.items():
            up = [one for one in self._open.values() if (one.transfer.source, one.transfer.target) == (name, "device")]
            assert rates.queued_bytes == sum([self._bytes(one.transfer.moves) for one in up])


class _Union:
    """One KV class in all tiers together, as :func:`~kimicore.prefix.longest_hit` asks for it."""

    def __init__(self, device: PrefixIndex, host: dict[BlockKey, int], disk: DiskShelf | None) -> None:
        self._device, self._host, self._disk = device, host, disk

    def __contains__(self, key: object) -> bool:
        return key in self._device or key in self._host or (self._disk is not None and key in self._disk)

    def run(self, keys: Sequence[BlockKey], blocks: int) -> int:
        """Return how many of the first ``blocks`` keys are there without a gap."""
        at = self._device.run(keys, blocks)
        while at < blocks and keys[at] in self:
            at += 1
        return at
