"""A bare block cache: what an eviction policy makes of a trace when nothing else happens.

No scheduler, no step times: requests come one after the other, each uses its blocks and lets go of them. What is left
is the policy, so block hit rates of policies can be compared, with each other and with the offline optimum.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from attrs import define, frozen

from kimicore.contracts import BlockKey, Eviction, EvictionState
from kimicore.errors import ConfigError, PluginError
from kimicore.guard import RAISED
from kimicore.plugins import started

__all__ = ["CacheReport", "CacheRequest", "replay_cache", "replay_optimum"]

CacheRequest = tuple[float, Sequence[BlockKey]]
"""When a request comes, in seconds, and the keys of its full blocks from the start of its sequence to the end."""

GHOSTS = 4  # blocks that left and may be remembered, in multiples of the capacity: what the engine's ledger gives


@frozen
class CacheReport:
    """What a replay counted, over the requests from ``report_from`` of the trace on.

    ``block_hit_rate`` is ``hit_blocks / blocks``: of all blocks of all requests, the share that lay in the cache when
    its request came, with every block before it. ``evicted_blocks`` are those of the whole trace.
    """

    policy: str
    capacity_blocks: int
    ghost_blocks: int
    requests: int
    blocks: int
    hit_blocks: int
    evicted_blocks: int
    block_hit_rate: float


class _Cache:
    """The blocks that are there with how many cached blocks follow each; a block is there only with its parent."""

    def __init__(self, capacity_blocks: int, name: str) -> None:
        self.capacity_blocks = capacity_blocks
        self.name = name
        self.parent: dict[BlockKey, BlockKey | None] = {}
        self.children: dict[BlockKey, int] = {}
        self.hit_blocks = self.blocks = self.requests = self.evicted_blocks = 0

    def hits(self, keys: Sequence[BlockKey]) -> int:
        """Return how many blocks from the start are there."""
        parent = self.parent
        for at, key in enumerate(keys):
            if key not in parent:
                return at
        return len(keys)

    def count(self, blocks: int, hits: int) -> None:
        """Note a request that is to be reported."""
        self.requests += 1
        self.blocks += blocks
        self.hit_blocks += hits

    def add(self, keys: Sequence[BlockKey], first: int) -> None:
        """Put the blocks from number ``first`` on into the cache."""
        above = keys[first - 1] if first else None
        for key in keys[first:]:
            self.parent[key] = above
            self.children[key] = 0
            if above is not None:
                self.children[above] += 1
            above = key

    def asker(self, taken: list[BlockKey]) -> Callable[[BlockKey], bool]:
        """Return ``evictable`` (see :meth:`~kimicore.contracts.EvictionState.victims`); a yes takes the block out."""
        parent, children = self.parent, self.children

        def evictable(key: BlockKey) -> bool:
            if children.get(key, 1):
                return False
            del children[key]
            above = parent.pop(key)
            if above is not None:
                children[above] -= 1
            taken.append(key)
            return True

        return evictable

    def tell(self, keys: Sequence[BlockKey], hits: int, state: EvictionState, now_s: float) -> None:
        """Tell the policy of a request's blocks, the ``hits`` first of which were there, from the end to the start."""
        doing = "added()"
        try:
            added, touched = state.added, state.touched
            for at in range(len(keys) - 1, hits - 1, -1):
                added(keys[at], keys[at - 1] if at else None, at, now_s)
            doing = "touched()"
            for at in range(hits - 1, -1, -1):
                touched(keys[at], now_s)
        except RAISED as error:
            raise _failed(self.name, doing, error) from error

    def make_room(self, count: int, state: EvictionState, now_s: float) -> None:
        """Evict ``count`` blocks that the policy names."""
        taken: list[BlockKey] = []
        try:
            named = list(islice(state.victims(count, self.asker(taken), now_s), count + 1))
            right = len(named) == count and sorted(named) == sorted(taken)
        except RAISED as error:
            raise _failed(self.name, "victims()", error) from error
        if not right:
            raise PluginError(
                f"eviction policy {self.name!r} named {len(named)} victims when asked for {count}, "
                f"and was told that {len(taken)} may go: it has to name those, and no others"
            )
        self.evicted_blocks += count
        try:
            for key in named:
                state.removed(key)
        except RAISED as error:
            raise _failed(self.name, "removed()", error) from error

    def report(self, ghost_blocks: int) -> CacheReport:
        """Return what was counted."""
        return CacheReport(
            policy=self.name,
            capacity_blocks=self.capacity_blocks,
            ghost_blocks=ghost_blocks,
            requests=self.requests,
            blocks=self.blocks,
            hit_blocks=self.hit_blocks,
            evicted_blocks=self.evicted_blocks,
            block_hit_rate=self.hit_blocks / self.blocks if self.blocks else 0.0,
        )


def _failed(name: str, call: str, error: BaseException) -> PluginError:
    return PluginError(f"eviction policy {name!r}: {call} failed: {error!r}")


def replay_cache(
    requests: Iterable[CacheRequest],
    eviction: Eviction,
    capacity_blocks: int,
    *,
    ghost_blocks: int | None = None,
    seed: int = 0,
    report_from: float = 0.0,
) -> CacheReport:
    """Replay ``requests`` in their order against a cache of ``capacity_blocks`` blocks and return what was hit.

    ``eviction``: settings of the policy, whose state gets the events that the engine's ledger would tell it: a request
    lets go of its blocks from the end of its sequence to the start, new ones are added, others touched.
    ``ghost_blocks``: how many blocks that left it may remember; None: four times the capacity, as in the engine.
    ``seed``: the policy's. ``report_from``: the share of the requests, from 0.0 up to 1.0, that only warm the cache.

    Nothing is pinned: all blocks of a request are put into the cache and let go of, and then as many are evicted as are
    too many, its own among them if the policy says so. Every block of every request counts. Raises ConfigError for a
    size or share out of range, and PluginError where the policy raises, or does not name exactly as many victims as it
    is asked for, of those that may go.
    """
    ghosts = GHOSTS * capacity_blocks if ghost_blocks is None else ghost_blocks
    trace = _checked(requests, capacity_blocks, ghosts, report_from)
    state = started("eviction", eviction, capacity_blocks, ghosts, seed)
    cache = _Cache(capacity_blocks, eviction.name)
    counted_from = int(report_from * len(trace))
    for number, (now_s, keys) in enumerate(trace):
        hits = cache.hits(keys)
        if number >= counted_from:
            cache.count(len(keys), hits)
        cache.add(keys, hits)
        cache.tell(keys, hits, state, now_s)
        excess = len(cache.parent) - capacity_blocks
        if excess > 0:
            cache.make_room(excess, state, now_s)
    return cache.report(ghosts)


@define
class _Optimal:
    """The offline optimum as a policy, for one replay: it looks up when a block is used next."""

    uses: dict[BlockKey, list[int]]
    name: str = "optimal"

    def start(self, capacity_blocks: int, ghost_blocks: int, seed: int) -> _OptimalState:
        """Return fresh state; ``uses`` is used up."""
        return _OptimalState(self.uses)


class _OptimalState:
    """Blocks by their next use. What is used last, or never again, goes first; of those the deepest."""

    def __init__(self, uses: dict[BlockKey, list[int]]) -> None:
        self._uses = uses
        self._next: dict[BlockKey, float] = {}
        self._depth: dict[BlockKey, int] = {}
        self._heap: list[tuple[float, int, BlockKey]] = []

    def added(self, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float) -> None:
        """Note a block and its next use."""
        self._depth[key] = depth_blocks
        self.touched(key, now_s)

    def touched(self, key: BlockKey, now_s: float) -> None:
        """Go on to the block's next use."""
        uses = self._uses[key]
        uses.pop()
        self._next[key] = following = float(uses[-1]) if uses else math.inf
        heapq.heappush(self._heap, (-following, -self._depth[key], key))

    def removed(self, key: BlockKey) -> None:
        """Forget the block until it is added again."""
        del self._next[key]

    def importance(self, keys: Sequence[BlockKey], values: Sequence[float]) -> None:
        """The future is known; weights say nothing more."""

    def victims(self, count: int, evictable: Callable[[BlockKey], bool], now_s: float) -> list[BlockKey]:
        """Return the blocks that are used last."""
        found: list[BlockKey] = []
        held: list[tuple[float, int, BlockKey]] = []
        while len(found) < count and self._heap:
            entry = heapq.heappop(self._heap)
            key = entry[2]
            if self._next.get(key) != -entry[0]:
                continue  # of an earlier use
            if evictable(key):
                found.append(key)
            else:
                held.append(entry)
        for entry in held:
            heapq.heappush(self._heap, entry)
        return found


def replay_optimum(requests: Iterable[CacheRequest], capacity_blocks: int, *, report_from: float = 0.0) -> CacheReport:
    """Return what the offline optimum hits: of the blocks that may go, the one whose next use is farthest goes first.

    Arguments and errors are those of :func:`replay_cache`. Belady's rule ("A study of replacement algorithms for a
    virtual-storage computer", 1966) with a leaf before its root, which costs it nothing: a root is used whenever its
    leaf is. It stands for what no policy can pass, since a policy does not know the future.
    """
    trace = list(requests)
    uses: dict[BlockKey, list[int]] = {}
    for number in range(len(trace) - 1, -1, -1):
        for key in trace[number][1]:
            uses.setdefault(key, []).append(number)
    return replay_cache(trace, _Optimal(uses), capacity_blocks, ghost_blocks=0, report_from=report_from)


def _checked(
    requests: Iterable[CacheRequest], capacity_blocks: int, ghost_blocks: int, report_from: float
) -> list[CacheRequest]:
    if capacity_blocks < 1:
        raise ConfigError(f"capacity_blocks={capacity_blocks!r}: a cache has at least 1 block")
    if ghost_blocks < 0:
        raise ConfigError(f"ghost_blocks={ghost_blocks!r}: must be 0 or more")
    if not 0.0 <= report_from < 1.0:
        raise ConfigError(f"report_from={report_from!r}: must be at least 0.0 and under 1.0, a share of the requests")
    return list(requests)
