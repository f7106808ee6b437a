"""The deepest blocks go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from attrs import frozen

from kimicore.contracts import BlockKey


@frozen
class DeepestFirst:
    """Keeps the beginnings of sequences, which many requests share; among equally deep blocks the unused go first."""

    name: str = "deepest-first"

    def start(self, capacity_blocks: int, ghost_blocks: int, seed: int) -> DeepestFirstState:
        """Return fresh state; nothing that left is remembered."""
        return DeepestFirstState()


class DeepestFirstState:
    """Blocks by depth, and within a depth by last use."""

    def __init__(self) -> None:
        self._depth: dict[BlockKey, int] = {}
        self._levels: dict[int, OrderedDict[BlockKey, None]] = {}

    def added(self, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float) -> None:
        """Note a new block."""
        self._depth[key] = depth_blocks
        self._levels.setdefault(depth_blocks, OrderedDict())[key] = None

    def touched(self, key: BlockKey, now_s: float) -> None:
        """Note that the block was used."""
        if key in self._depth:
            self._levels[self._depth[key]].move_to_end(key)

    def removed(self, key: BlockKey) -> None:
        """Forget the block."""
        depth = self._depth.pop(key, None)
        if depth is not None:
            level = self._levels[depth]
            del level[key]
            if not level:
                del self._levels[depth]

    def importance(self, keys: Sequence[BlockKey], values: Sequence[float]) -> None:
        """Attention does not count here."""

    def victims(self, count: int, evictable: Callable[[BlockKey], bool], now_s: float) -> list[BlockKey]:
        """Return the deepest blocks that may go."""
        found: list[BlockKey] = []
        for depth in sorted(self._levels, reverse=True):
            for key in self._levels[depth]:
                if len(found) == count:
                    return found
                if evictable(key):
                    found.append(key)
        return found
