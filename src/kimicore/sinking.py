"""Writing named blocks to disk because somebody asked for it, wherever they are now."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import Factory, define

from kimicore.contracts import BlockKey
from kimicore.moves import BlockMove, Transfer
from kimicore.tiers import BATCH, QUEUED_BYTES, Tiers

__all__ = ["Sink", "Sinking"]

TRIES = 4  # writes of a block before it is given up


@define(eq=False)
class Sink:
    """A wish to have blocks on disk: ``left`` are not there yet, ``gone`` are nowhere any more or could not be written.

    ``blocks``: how many were named. It is over when nothing is left.
    """

    blocks: int
    left: dict[tuple[int, BlockKey], int]
    gone: int = 0
    done: bool = False


@define(eq=False)
class Sinking:
    """The wishes that are open; blocks go down in the order in which they were named, the first wish first."""

    tiers: Tiers
    open: list[Sink] = Factory(list)

    def ask(self, blocks: Iterable[tuple[int, BlockKey]]) -> Sink:
        """Take a wish for blocks of (class, key); without a disk it is over at once."""
        named = dict.fromkeys(blocks, 0)
        sink = Sink(len(named), named)
        if self.tiers.disk is None:
            sink.gone, sink.left, sink.done = len(named), {}, True
        else:
            self.tiers.want(key for _, key in named)
            self.open.append(sink)
        return sink

    def lower(self, now_s: float) -> list[Transfer]:
        """Return the moves that the wishes need now, and mark those that are over."""
        found: list[Transfer] = []
        for sink in self.open:
            found += self._lower(sink, now_s)
            sink.done = not sink.left
        self.open = [one for one in self.open if not one.done]
        return found

    def _lower(self, sink: Sink, now_s: float) -> list[Transfer]:
        tiers = self.tiers
        assert tiers.disk is not None
        down: list[BlockMove] = []
        absent: list[tuple[int, BlockKey]] = []
        for (kind, key), tries in list(sink.left.items()):
            if key in tiers.disk:
                del sink.left[kind, key]
                continue
            slot = tiers.host.slots[kind].get(key, 0)
            if tiers.moving(kind, key) or (slot and tiers.host.pinned(kind, slot)):
                continue
            if tries >= TRIES or not (slot or tiers.ledger.cached(kind, key)):  # it is nowhere, or cannot be written
                del sink.left[kind, key]
                sink.gone += 1
            elif not slot:
                absent.append((kind, key))
            elif len(down) < BATCH and tiers.queued_bytes < QUEUED_BYTES:
                sink.left[kind, key] += 1
                down.append(BlockMove(kind, key, slot, 0))
        # Sent, and so pinned, before room is made in the host for others: that drops blocks nobody holds.
        found = [tiers.send("host", "disk", down)] if down else []
        return found + self._fetch(absent[:BATCH], now_s)

    def _fetch(self, blocks: Iterable[tuple[int, BlockKey]], now_s: float) -> list[Transfer]:
        """Return the copies of blocks from the device to the host, as far as there is room."""
        tiers = self.tiers
        moves: list[BlockMove] = []
        for kind, key in blocks:
            target = tiers.host_slot(kind, now_s)
            if not target:
                break
            moves.append(BlockMove(kind, key, tiers.ledger.cached(kind, key), target))
        return [tiers.send("device", "host", moves)] if moves else []
