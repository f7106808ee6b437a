"""Two queues by recency, one of blocks used once and one of the others, whose shares adapt."""

from __future__ import annotations

from collections import OrderedDict

from attrs import frozen

from kimicore.contracts import BlockKey
from kimicore.policies.eviction.candidates import Candidates

__all__ = ["Arc"]


@frozen
class Arc:
    """Balances recency and frequency: a block that comes back too late shifts room to the queue that lost it.

    Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache" (FAST 2003).
    """

    name: str = "arc"

    def start(self, capacity_blocks: int, ghost_blocks: int, seed: int) -> ArcState:
        """Return fresh state that remembers up to as many blocks that left as are cached, if it may."""
        return ArcState(capacity_blocks, ghost_blocks)


class ArcState(Candidates):
    """The paper's T1 and T2 (``_once``, ``_often``), B1 and B2 (what left them), and the target p of T1."""

    def __init__(self, capacity_blocks: int, ghost_blocks: int) -> None:
        super().__init__()
        self._capacity_blocks = capacity_blocks
        self._ghost_blocks = ghost_blocks
        self._once: OrderedDict[BlockKey, None] = OrderedDict()
        self._often: OrderedDict[BlockKey, None] = OrderedDict()
        self._left_once: OrderedDict[BlockKey, None] = OrderedDict()
        self._left_often: OrderedDict[BlockKey, None] = OrderedDict()
        self._used_often: set[BlockKey] = set()  # which of the two queues a block belongs to, also while aside
        self._target = 0.0

    def added(self, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float) -> None:
        """Note a new block; one that left not long ago moves the target and counts as used often."""
        if key in self._parent:
            self.touched(key, now_s)
            self._parent[key] = parent
            return
        self._parent[key] = parent
        once, often = self._left_once, self._left_often
        if key in once:
            self._target = min(self._target + max(len(often) / len(once), 1.0), float(self._capacity_blocks))
            del once[key]
        elif key in often:
            self._target = max(self._target - max(len(once) / len(often), 1.0), 0.0)
            del often[key]
        else:
            self._once[key] = None
            return
        self._used_often.add(key)
        self._often[key] = None

    def touched(self, key: BlockKey, now_s: float) -> None:
        """Make the block the most recent of those used often."""
        if key not in self._parent:
            self.added(key, None, 0, now_s)
            return
        self._aside.pop(key, None)
        self._once.pop(key, None)
        self._used_often.add(key)
        self._often[key] = None
        self._often.move_to_end(key)

    def removed(self, key: BlockKey) -> None:
        """Remember the key of a block that left, within the paper's bounds and the given one."""
        if key not in self._parent:
            return
        self._left(key)
        if key in self._used_often:
            self._used_often.discard(key)
            self._often.pop(key, None)
            self._left_often[key] = None
        else:
            self._once.pop(key, None)
            self._left_once[key] = None
        once, often = self._left_once, self._left_often
        there = len(self._parent)
        used_once = there - len(self._used_often)
        while once and used_once + len(once) > self._capacity_blocks:
            once.popitem(last=False)
        while often and there + len(once) + len(often) > 2 * self._capacity_blocks:
            often.popitem(last=False)
        while len(once) + len(often) > self._ghost_blocks:
            (once if len(once) >= len(often) else often).popitem(last=False)

    def _next(self, now_s: float) -> BlockKey | None:
        once, often = self._once, self._often
        queue = once if once and (len(once) > self._target or not often) else often
        return queue.popitem(last=False)[0] if queue else None

    def _back(self, key: BlockKey) -> None:
        queue = self._often if key in self._used_often else self._once
        queue[key] = None
        queue.move_to_end(key, last=False)
