"""The least recently used block goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from attrs import frozen

from kimicore.contracts import BlockKey

__all__ = ["Lru"]


@frozen
class Lru:
    """Drops what was unused for longest; of one sequence the end goes before the start."""

    name: str = "lru"

    def start(self, capacity_blocks: int, ghost_blocks: int, seed: int) -> LruState:
        """Return fresh state; nothing that left is remembered."""
        return LruState()


class LruState:
    """Blocks by last use. Those found held are put aside until they are touched, which letting them go does."""

    def __init__(self) -> None:
        self._order: OrderedDict[BlockKey, None] = OrderedDict()
        self._aside: OrderedDict[BlockKey, None] = OrderedDict()

    def added(self, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float) -> None:
        """Note the block as the most recent."""
        self.touched(key, now_s)

    def touched(self, key: BlockKey, now_s: float) -> None:
        """Note the block as the most recent."""
        self._aside.pop(key, None)
        self._order[key] = None
        self._order.move_to_end(key)

    def removed(self, key: BlockKey) -> None:
        """Forget the block."""
        if key in self._order:
            del self._order[key]
        else:
            self._aside.pop(key, None)

    def importance(self, keys: Sequence[BlockKey], values: Sequence[float]) -> None:
        """Recency is all that counts here."""

    def victims(self, count: int, evictable: Callable[[BlockKey], bool], now_s: float) -> list[BlockKey]:
        """Return the blocks that were unused for longest."""
        found: list[BlockKey] = []
        held: list[BlockKey] = []
        for key in self._order:
            if len(found) == count:
                break
            (found if evictable(key) else held).append(key)
        if len(found) < count:
            found.extend(key for key in self._aside if len(found) < count and evictable(key))
        for key in held:
            del self._order[key]
            self._aside[key] = None
        return found
