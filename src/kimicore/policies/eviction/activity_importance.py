"""How soon a block is likely to be used again, times how much attention it gets: the lowest goes first."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush, heapreplace

from attrs import define, frozen

from kimicore.checks import float_field
from kimicore.contracts import BlockKey
from kimicore.errors import ConfigError
from kimicore.policies.eviction.candidates import Candidates
from kimicore.policies.eviction.reuse import CLASSES, ReuseRates, class_of, mean_use_s

__all__ = ["ActivityImportance"]

LEAST_IMPORTANCE = 2.0**-20  # a block without any attention still has an order in time

_First = tuple[float, float, int, int]  # worth, time, entry, class
_Used = tuple[BlockKey, BlockKey | None, int, float]  # key, parent, uses, activity


@frozen
class ActivityImportance:
    """Drops the block with the lowest activity times importance.

    *Activity* is the rate, in uses per second, at which blocks like this one come back, and it decays while a block is
    not used. What is like it: blocks that were used as often, by a request with as many new blocks, as long ago in the
    mean of their uses, of which one counts half of one ``half_life_s`` seconds later. The rates begin as those of chat
    traffic, and are learned from the traffic itself, what came back too late included (see
    :class:`~kimicore.policies.eviction.reuse.ReuseRates`). Of two blocks used equally often, each time by requests of
    one size, the one whose uses are later never goes first.

    *Importance* is the mean attention that a block's positions get, 1.0 where nobody tells. What is told is averaged
    exponentially: the newest value counts ``importance_weight`` (over 0, up to 1). A block of twice the importance is
    treated as one whose uses were ``half_life_s`` later.

    ``learn_half_life_s``: after so many seconds what was learned counts half beside what is new. Raises ConfigError
    for a value out of range.
    """

    half_life_s: float = float_field(300.0, 1e-3, 1e9, fault=ConfigError)
    importance_weight: float = float_field(0.3, 0.0, 1.0, fault=ConfigError, above=True)
    learn_half_life_s: float = float_field(600.0, 1e-3, 1e9, fault=ConfigError)
    name: str = "activity-importance"

    def start(self, capacity_blocks: int, ghost_blocks: int, seed: int) -> ActivityImportanceState:
        """Return fresh state."""
        return ActivityImportanceState(self, ghost_blocks)


@define(eq=False)
class _Block:
    """What is known of a block that is cached, or that left and stands for its run.

    A *run* is a stretch of one request's blocks that were used equally often. They share their fate, so its last block
    alone is learned from and remembered; it ``speaks`` for the others. ``used_s``: the last use. ``activity``: the
    uses up to that one, the earlier ones faded. ``mean_s``: the mean of their times. ``event``: number of the last use,
    of which a leaf has a lower one than its root; 0 once the block left. ``late_s``: by how much its importance makes
    its uses count as later. ``entry``: number of its entry in a queue that is not outdated; 0: it has none.
    """

    key: BlockKey
    uses: int = 0
    used_s: float = 0.0
    activity: float = 0.0
    mean_s: float = 0.0
    event: int = 0
    kind: int = 0
    speaks: bool = False
    importance: float = 1.0
    late_s: float = 0.0
    entry: int = 0


class ActivityImportanceState(Candidates):
    """Cached blocks in a queue for each class, by time; only the first of each has to be weighed."""

    def __init__(self, settings: ActivityImportance, ghost_blocks: int) -> None:
        super().__init__()
        self._half_life_s = settings.half_life_s
        self._weight = settings.importance_weight
        self._ghost_blocks = ghost_blocks
        self._rates = ReuseRates(settings.half_life_s, settings.learn_half_life_s)
        self._blocks: dict[BlockKey, _Block] = {}
        self._ghosts: OrderedDict[BlockKey, _Block] = OrderedDict()
        # Entries of each class by time, event and number; those that come out of order stand in a heap beside it.
        self._queues: list[deque[tuple[float, int, int, _Block]]] = [deque() for _ in range(CLASSES)]
        self._late: list[list[tuple[float, int, int, _Block]]] = [[] for _ in range(CLASSES)]
        self._entries = 0  # in all of them, outdated ones included
        self._entry = 0
        # While victims are asked for: the first of each class, as a heap and by class.
        self._firsts: list[_First] = []
        self._stated: dict[int, _First] = {}
        self._asked_s: float | None = None
        self._request: list[tuple[BlockKey, BlockKey | None]] = []  # blocks of one request so far, leaf first
        self._request_s = 0.0
        self._events = 0

    # ------------------------------------------------------------ events

    def added(self, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float) -> None:
        """Note the first use of a block, or of one that comes back."""
        request = self._request
        if request and (request[-1][1] != key or now_s != self._request_s):
            self._settle()
            request = self._request
        request.append((key, parent))
        self._request_s = now_s
        if parent is None:
            self._settle()

    def touched(self, key: BlockKey, now_s: float) -> None:
        """Note one more use."""
        self.added(key, self._parent.get(key), 0, now_s)

    def removed(self, key: BlockKey) -> None:
        """Forget the block, unless it speaks for a run and may be remembered."""
        self._settle()
        block = self._blocks.get(key)
        if block is None or not block.event:
            return
        self._left(key)
        block.event = block.entry = 0
        if block.speaks:
            self._ghosts[key] = block
            if len(self._ghosts) > self._ghost_blocks:
                key, block = self._ghosts.popitem(last=False)
                self._rates.forgotten(block.kind, block.mean_s)
                self._forget(block)
        else:
            self._forget(block)
        self._tidy()

    def _forget(self, block: _Block) -> None:
        del self._blocks[block.key]
        block.key = b""  # outdated entries of a queue may still hold the record

    def importance(self, keys: Sequence[BlockKey], values: Sequence[float]) -> None:
        """Average what attention the blocks got into their importance; unknown ones and odd values are left out."""
        self._settle()
        for key, value in zip(keys, values, strict=True):
            block = self._blocks.get(key)
            if block is None or not 0.0 <= value < math.inf:
                continue
            block.importance += self._weight * (value - block.importance)
            block.late_s = self._half_life_s * math.log2(max(block.importance, LEAST_IMPORTANCE))
            if block.event and key not in self._aside:
                self._push(block)
        self._tidy()

    # ------------------------------------------------------------ a request

    def _settle(self) -> None:
        """Take in the blocks of the last request, now that all of them are known."""
        request, now_s = self._request, self._request_s
        if not request:
            return
        self._request = []
        rates, blocks = self._rates, self._blocks
        rates.request(now_s)
        used: list[_Used] = []
        least = new_blocks = 0
        activity = 0.0
        for key, parent in request:
            block = blocks.get(key)
            if block is not None:
                least = max(least, block.uses)  # whoever used a block used those before it as well
                activity = max(activity, block.activity * 2.0 ** (min(block.used_s - now_s, 0.0) / self._half_life_s))
                if block.speaks:
                    rates.used(block.kind, block.mean_s, now_s)
            used.append((key, parent, least + 1, activity + 1.0))
            new_blocks += not least
        self._take_in(used, new_blocks, now_s)
        self._tidy()

    def _take_in(self, used: Sequence[_Used], new_blocks: int, now_s: float) -> None:
        run = 0  # how often the blocks of the current run were used
        for at, (key, parent, uses, activity) in enumerate(used):
            block = self._blocks.get(key)
            if block is None:
                block = self._blocks[key] = _Block(key)
            elif not block.event:
                del self._ghosts[key]
            self._aside.pop(key, None)
            self._parent[key] = parent
            last = not at and len(used) > 1
            block.kind = class_of(uses, new_blocks, last)
            block.uses, block.activity, block.used_s = uses, activity, now_s
            block.mean_s = mean_use_s(uses, activity, now_s, self._half_life_s)
            self._events += 1
            block.event = self._events
            block.speaks = uses != run
            if block.speaks:
                self._rates.waits(block.kind, block.mean_s)
            run = 0 if last and uses == 1 else uses  # the last block's fate is its own
            self._push(block)

    # ------------------------------------------------------------ who goes

    def victims(self, count: int, evictable: Callable[[BlockKey], bool], now_s: float) -> list[BlockKey]:
        """Return the blocks of the lowest activity times importance."""
        self._settle()
        firsts = (self._first(kind, now_s) for kind in range(CLASSES))
        self._firsts = [first for first in firsts if first is not None]
        self._stated = {first[3]: first for first in self._firsts}
        heapify(self._firsts)
        self._asked_s = now_s
        found = super().victims(count, evictable, now_s)
        self._asked_s = None
        self._firsts = []
        self._stated = {}
        return found

    def _first(self, kind: int, now_s: float) -> _First | None:
        """Return the first of a class, once outdated entries are gone."""
        queue, late = self._queues[kind], self._late[kind]
        while queue or late:
            aside = bool(late and (not queue or late[0] < queue[0]))
            used_s, _, entry, block = late[0] if aside else queue[0]
            if block.entry == entry:
                age_s = now_s - used_s
                if age_s >= 0.0:
                    return self._rates.worth(kind, age_s), used_s, entry, kind
                return self._rates.worth(kind, 0.0) * 2.0 ** (-age_s / self._half_life_s), used_s, entry, kind
            if aside:
                heappop(late)
            else:
                queue.popleft()
            self._entries -= 1
        return None

    def _take(self, first: _First) -> BlockKey | None:
        """Take a block out that was the first of its class; None where it is that no more."""
        queue, late = self._queues[first[3]], self._late[first[3]]
        for aside, entries in ((False, queue), (True, late)):
            if entries and entries[0][2] == first[2] == entries[0][3].entry:
                block = heappop(late)[3] if aside else queue.popleft()[3]
                self._entries -= 1
                block.entry = 0
                return block.key
        return None

    def _next(self, now_s: float) -> BlockKey | None:
        firsts = self._firsts
        while firsts:
            stated = firsts[0]
            kind = stated[3]
            if self._stated.get(kind) is not stated:  # a block came back that stands before it
                heappop(firsts)
                continue
            key = self._take(stated)
            first = self._first(kind, now_s)
            if first is None:
                heappop(firsts)
                del self._stated[kind]
            else:
                heapreplace(firsts, first)
                self._stated[kind] = first
            if key is not None:
                return key
        return None

    def _back(self, key: BlockKey) -> None:
        block = self._blocks[key]
        self._push(block)
        if self._asked_s is not None:
            first = self._first(block.kind, self._asked_s)
            if first is not None and first != self._stated.get(block.kind):
                self._stated[block.kind] = first
                heappush(self._firsts, first)

    def _push(self, block: _Block) -> None:
        self._entry += 1
        block.entry = self._entry
        entry = (block.mean_s + block.late_s, block.event, self._entry, block)
        queue = self._queues[block.kind]
        if not queue or entry > queue[-1]:
            queue.append(entry)
        else:
            heappush(self._late[block.kind], entry)
        self._entries += 1

    def _tidy(self) -> None:
        """Leave outdated entries out before they outnumber the blocks."""
        if self._entries <= 2 * len(self._parent) + 64:
            return
        self._entries = 0
        for kind, (queue, late) in enumerate(zip(self._queues, self._late, strict=True)):
            self._queues[kind] = deque(one for one in queue if one[3].entry == one[2])
            self._late[kind] = [one for one in late if one[3].entry == one[2]]
            heapify(self._late[kind])
            self._entries += len(self._queues[kind]) + len(self._late[kind])
