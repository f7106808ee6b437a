"""The least frequently used block goes first."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush

from attrs import frozen

from kimicore.contracts import BlockKey
from kimicore.policies.eviction.candidates import Candidates

__all__ = ["Lfu"]


@frozen
class Lfu:
    """Drops what was used least often while it was cached; of equals what was unused for longest.

    Nothing ages: a block that was used often once stays until all others have been used as often.
    """

    name: str = "lfu"

    def start(self, capacity_blocks: int, ghost_blocks: int, seed: int) -> LfuState:
        """Return fresh state; nothing that left is remembered."""
        return LfuState()


class LfuState(Candidates):
    """For each number of uses a queue of the blocks used so often, longest unused first."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[BlockKey, int] = {}
        self._queues: dict[int, OrderedDict[BlockKey, None]] = {}
        self._counts: list[int] = []  # heap of the numbers of uses that have a queue, or had one

    def added(self, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float) -> None:
        """Note a block that was used once."""
        self._parent[key] = parent
        self._use(key)

    def touched(self, key: BlockKey, now_s: float) -> None:
        """Note one more use."""
        self._parent.setdefault(key, None)
        self._use(key)

    def _use(self, key: BlockKey) -> None:
        uses = self._uses.get(key, 0)
        if key in self._aside:
            del self._aside[key]
        elif uses:
            self._leave(uses, key)
        self._uses[key] = uses + 1
        self._queue(uses + 1)[key] = None

    def removed(self, key: BlockKey) -> None:
        """Forget the block and its uses."""
        if key in self._parent:
            uses = self._uses.pop(key)
            if not self._left(key):
                self._leave(uses, key)

    def _queue(self, uses: int) -> OrderedDict[BlockKey, None]:
        if uses not in self._queues:
            self._queues[uses] = OrderedDict()
            heappush(self._counts, uses)
            if len(self._counts) > 2 * len(self._queues) + 16:
                self._counts = sorted(self._queues)
        return self._queues[uses]

    def _leave(self, uses: int, key: BlockKey) -> None:
        queue = self._queues[uses]
        del queue[key]
        if not queue:
            del self._queues[uses]

    def _next(self, now_s: float) -> BlockKey | None:
        while self._counts:
            queue = self._queues.get(self._counts[0])
            if queue:
                return queue.popitem(last=False)[0]
            self._queues.pop(heappop(self._counts), None)
        return None

    def _back(self, key: BlockKey) -> None:
        queue = self._queue(self._uses[key])
        queue[key] = None
        queue.move_to_end(key, last=False)
