"""Three queues, first in first out: what is not used again soon leaves early."""

from __future__ import annotations

from collections import OrderedDict

from attrs import frozen

from kimicore.checks import float_field, int_field
from kimicore.contracts import BlockKey
from kimicore.errors import ConfigError
from kimicore.policies.eviction.candidates import Candidates

__all__ = ["S3Fifo"]

MOST_USES = 3  # uses since a block was queued that are counted: two bits in the paper


@frozen
class S3Fifo:
    """New blocks pass through a small queue, and stay only where they are used again meanwhile.

    ``small_share``: the small queue's share of the capacity, over 0 and at most 0.99. ``promote_uses``: how many
    further uses take a block from the small queue to the main one. Raises ConfigError for other values.

    Source: Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023).
    """

    small_share: float = float_field(0.1, 0.0, 0.99, fault=ConfigError, above=True)
    promote_uses: int = int_field(2, 1, MOST_USES, fault=ConfigError)
    name: str = "s3-fifo"

    def start(self, capacity_blocks: int, ghost_blocks: int, seed: int) -> S3FifoState:
        """Return fresh state that remembers as many blocks that left as the main queue holds, if it may."""
        small_blocks = max(1, int(self.small_share * capacity_blocks))
        main_blocks = max(capacity_blocks - small_blocks, 0)
        return S3FifoState(small_blocks, main_blocks, min(ghost_blocks, main_blocks), self.promote_uses)


class S3FifoState(Candidates):
    """The small and the main queue, oldest first, and the keys of blocks that left the small one."""

    def __init__(self, small_blocks: int, main_blocks: int, ghost_blocks: int, promote_uses: int) -> None:
        super().__init__()
        self._small_blocks = small_blocks
        self._main_blocks = main_blocks
        self._ghost_blocks = ghost_blocks
        self._promote_uses = promote_uses
        self._small: OrderedDict[BlockKey, None] = OrderedDict()
        self._main: OrderedDict[BlockKey, None] = OrderedDict()
        self._ghosts: OrderedDict[BlockKey, None] = OrderedDict()
        self._uses: dict[BlockKey, int] = {}
        self._in_main: set[BlockKey] = set()

    def added(self, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float) -> None:
        """Queue a new block: in the main queue where it left the small one a while ago, else in the small one."""
        if key in self._parent:
            self.touched(key, now_s)
            self._parent[key] = parent
            return
        self._parent[key] = parent
        self._uses[key] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            self._in_main.add(key)
            self._main[key] = None
        else:
            self._small[key] = None

    def touched(self, key: BlockKey, now_s: float) -> None:
        """Count one more use; the block keeps its place."""
        if key not in self._parent:
            self.added(key, None, 0, now_s)
            return
        self._uses[key] = min(self._uses[key] + 1, MOST_USES)
        if key in self._aside:
            del self._aside[key]
            self._back(key)

    def removed(self, key: BlockKey) -> None:
        """Forget the block, but for its key if it left the small queue."""
        if key not in self._parent:
            return
        self._left(key)
        del self._uses[key]
        if key in self._in_main:
            self._in_main.discard(key)
            self._main.pop(key, None)
            return
        self._small.pop(key, None)
        if self._ghost_blocks:
            self._ghosts[key] = None
            if len(self._ghosts) > self._ghost_blocks:
                self._ghosts.popitem(last=False)

    def _next(self, now_s: float) -> BlockKey | None:
        small, main, uses = self._small, self._main, self._uses
        while small or main:
            full = len(main) > self._main_blocks or len(small) < self._small_blocks
            if main and (full or not small):
                key, _ = main.popitem(last=False)
                if not uses[key]:
                    return key
                uses[key] -= 1
                main[key] = None
            else:
                key, _ = small.popitem(last=False)
                if uses[key] < self._promote_uses:
                    return key
                uses[key] = 0
                self._in_main.add(key)
                main[key] = None
        return None

    def _back(self, key: BlockKey) -> None:
        queue = self._main if key in self._in_main else self._small
        queue[key] = None
        queue.move_to_end(key, last=False)
