"""The living requests and the moves between their states; blocks follow every move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kimicore.admission import Traffic
from kimicore.contracts import RowView
from kimicore.importance import Importance
from kimicore.ledger import Ledger
from kimicore.prefix import first_seen
from kimicore.requests import Event, Failed, Finished, Preempted, Request
from kimicore.types import FinishReason

__all__ = ["Roster"]


class Roster:
    """Who lives, who waits and who runs.

    ``waiting`` leaves out those that wait for their leader (``followers``). ``cache_age`` grows whenever blocks
    enter or leave the cache. ``solo``: a request that has to run alone. ``counts``: totals for the statistics.
    ``importance``: None where nobody looks at what attention blocks get.
    """

    def __init__(self, ledger: Ledger, importance: Importance | None = None) -> None:
        self.ledger = ledger
        self.importance = importance
        self.requests: dict[int, Request] = {}
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.followers: dict[int, list[int]] = {}
        self.groups: Counter[int] = Counter()
        self.events: list[Event] = []
        self.counts: Counter[str] = Counter()
        self.traffic = Traffic()
        self.waiting_view: tuple[RowView, ...] | None = None
        self.cache_age = 0
        self.solo: int | None = None
        self.wanted: Callable[[Request], None] | None = None  # hears of blocks that are to reach the disk
        self.barred: set[int] = set()  # waiting requests that may not start to compute yet
        self.holders: dict[int, Request] = {}  # waiting requests that hold what was fetched for them

    # ------------------------------------------------------------ coming and going

    def enter(self, request: Request, now_s: float) -> None:
        """Take a new request: it waits, or waits for its leader, or ends where nothing is to be computed."""
        self.requests[request.number] = request
        self.groups[request.group] += 1
        if self.importance is not None and request.new.use_cache and request.new.kv_precision == "full":
            request.attention = [None] * len(request.tables)
        if request.logits_at == "none":
            self.finish(request, "length", None, now_s)
            return
        leader = None if request.new.leader is None else self.requests.get(request.new.leader)
        if leader is not None and leader.computed < leader.prompt_tokens and not leader.cancelled:
            request.held_by = leader.number
            self.followers.setdefault(leader.number, []).append(request.number)
        else:
            self.wait(request)

    def wait(self, request: Request) -> None:
        """Put a request into the queue."""
        request.held_by = None
        request.state = "waiting"
        request.row_view = self.waiting_view = None
        request.seen_at = -1
        self.waiting[request.number] = request

    def set_aside(self, request: Request) -> None:
        """Take a request out of the queue while its blocks are fetched from a lower tier."""
        del self.waiting[request.number]
        self.waiting_view = None

    def free_followers(self, leader: int) -> None:
        """Let those that wait for this request wait for blocks and slots only."""
        for number in self.followers.pop(leader, ()):
            follower = self.requests.get(number)
            if follower is not None and follower.held_by == leader:
                self.wait(follower)

    def finish(self, request: Request, reason: FinishReason, stop: str | int | None, now_s: float) -> None:
        """End a request with its answer."""
        self.counts["finished"] += 1
        self.events.append(
            Finished(
                request.number,
                reason,
                stop,
                request.prompt_tokens,
                request.first_cached,
                request.generated,
                request.new.arrived_s,
                request.started_s,
                request.first_token_s,
                now_s,
            )
        )
        self.leave(request)

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error; what it computed is not trusted."""
        self.counts["failed"] += 1
        self.events.append(Failed(request.number, error))
        request.attention = None
        self.leave(request, forget=True)

    def abandon(self, request: Request) -> None:
        """End a request that nobody asks for any more: now, or when its running step is committed."""
        request.attention = None
        if request.in_flight:
            request.cancelled = True
        else:
            self.leave(request)

    def leave(self, request: Request, *, forget: bool = False) -> None:
        """Give back everything of a request, once, and forget it."""
        number = request.number
        del self.requests[number]
        if self.waiting.pop(number, None) is not None:
            self.waiting_view = None
        self.running.pop(number, None)
        if request.held_by is not None:
            self.followers[request.held_by].remove(number)
        if request.loading is not None:
            request.loading.request = None
            request.loading = None
        self.groups[request.group] -= 1
        last = not self.groups[request.group]
        if last:
            del self.groups[request.group]
        if forget:
            own = request.cached // self.ledger.block_tokens
            for kind, table in enumerate(request.tables):
                self.ledger.forget(kind, [slot for slot in table[own : request.sealed] if slot])
        keep = 0
        if not request.new.use_cache and not last:  # its group may still want the prompt
            keep = request.prompt_tokens // self.ledger.block_tokens
        self.release(request, keep=None if request.new.use_cache else keep)
        if self.solo == number:
            self.solo = None
        self.free_followers(number)

    # ------------------------------------------------------------ blocks

    def release(self, request: Request, keep: int | None = None) -> None:
        """Give back a request's blocks; only the first ``keep`` stay cached (None: all)."""
        self.cache_age += 1
        self.holders.pop(request.number, None)
        if request.new.retain:
            self._keep(request)
        if request.new.keep and self.wanted is not None:
            self.wanted(request)
        for kind in request.kinds:
            table, live = request.tables[kind], request.live[kind]
            cut = len(table) if keep is None else max(live, min(keep, len(table)))
            self.ledger.release(kind, table[cut:][::-1], drop=True)
            self.ledger.release(kind, table[live:cut][::-1])
            if self.importance is not None:  # after the uses: a policy averages over blocks that it knows
                self.importance.tell(self.ledger, kind, request, live, cut)
            table.clear()
            request.live[kind] = 0
        request.sealed = request.computed = 0

    def _keep(self, request: Request) -> None:
        """Have the parts of its prompt stay cached that a request asked for; the time runs from now on."""
        ledger = self.ledger
        size = ledger.block_tokens
        for wish in request.new.retain:
            end = request.prompt_tokens if wish.end_tokens is None else min(wish.end_tokens, request.prompt_tokens)
            until_s = ledger.now_s + wish.seconds
            for kind, table in enumerate(request.tables):
                slots = table[wish.start_tokens // size : min(-(-end // size), request.sealed)]
                ledger.keep(kind, [slot for slot in slots if slot], until_s, wish.priority)

    def hit(self, request: Request) -> int:
        """Return how many blocks the cache can give: never all tokens, and nothing that still has to be scored."""
        blocks = self.most_hit_blocks(request)
        return self.ledger.hit(request.chains, blocks) if blocks else 0

    def most_hit_blocks(self, request: Request) -> int:
        """Return how many blocks any cache could give, and have the request's keys reach that far."""
        most = len(request.known) - 1
        if request.scored < request.prompt_tokens - 1:
            most = min(most, request.scored)
        blocks = most // self.ledger.block_tokens
        for chain in request.chains:
            if chain is not None:
                chain.extend(request.known, blocks)
        return blocks

    def take_hit(self, request: Request) -> None:
        """Hold what the cache can give to a waiting request that is admitted."""
        if self.holders.pop(request.number, None) is None:
            self.hold(request)
            del self.holders[request.number]
        request.cached = request.computed = request.sealed * self.ledger.block_tokens

    def hold(self, request: Request) -> None:
        """Hold what the cache can give to a waiting request while it waits; see :meth:`loosen`."""
        size = self.ledger.block_tokens
        blocks = self.hit(request)
        request.tables = self.ledger.acquire(request.chains, blocks)
        for kind in request.kinds:
            if request.chains[kind] is None:  # what is being filled is never shared
                request.tables[kind] = [0] * blocks
            request.live[kind] = first_seen(blocks * size, self.ledger.windows[kind], size)
        request.sealed = blocks
        request.cached = blocks * size
        self.holders[request.number] = request

    def loosen(self) -> bool:
        """Have the last waiting request that holds blocks let go of them; False where there is none."""
        if not self.holders:
            return False
        self.decline(self.holders[next(reversed(self.holders))])
        return True

    def allocate(self, request: Request, count: int) -> bool:
        """Give a request the blocks for ``count`` more tokens; False (and nothing changed) where there are too few.

        Waiting requests that hold blocks let go of them before that.
        """
        while not self._allocate(request, count):
            if not self.loosen():
                return False
        return True

    def _allocate(self, request: Request, count: int) -> bool:
        more = -(-(request.computed + count) // self.ledger.block_tokens) - len(request.table)
        if more <= 0:
            return True
        for at, kind in enumerate(request.kinds):
            table = request.tables[kind]
            slots = self.ledger.allocate(kind, more)
            if slots is None:
                for other in request.kinds[:at]:
                    own = request.tables[other]
                    self.ledger.release(other, own[-more:][::-1])
                    del own[-more:]
                return False
            table.extend(slots)
        self.cache_age += 1
        return True

    def seal(self, request: Request) -> None:
        """Name the blocks that became full, and let go of those that no later query sees."""
        ledger = self.ledger
        full = request.computed // ledger.block_tokens
        if full == request.sealed:
            return
        named = full  # what is computed from a part of the context is for nobody else
        if request.new.share is not None:
            named = min(full, request.prompt_tokens // ledger.block_tokens)
        for kind, chain in enumerate(request.chains):
            if chain is None:
                continue
            chain.extend(request.known, full)
            table = request.tables[kind]
            for at in range(request.sealed, named):
                ledger.seal(kind, table[at], chain, at)
        request.sealed = full
        self.cache_age += 1
        drop = not request.new.use_cache or self.solo == request.number
        for kind in request.kinds:
            window = ledger.windows[kind]
            if window is None:
                continue
            table, live = request.tables[kind], request.live[kind]
            first = min(first_seen(request.computed, window, ledger.block_tokens), full)
            if first > live:
                ledger.release(kind, table[live:first][::-1], drop=drop)
                if self.importance is not None and not drop:
                    self.importance.tell(ledger, kind, request, live, first)
                table[live:first] = [0] * (first - live)
                request.live[kind] = first

    # ------------------------------------------------------------ waiting and running

    def admit(self, request: Request, now_s: float) -> None:
        """Let a waiting request run; its hit is held already."""
        del self.waiting[request.number]
        self.running[request.number] = request
        request.state = "running"
        request.row_view = self.waiting_view = None
        self.traffic.left(now_s)
        if request.started_s is None:
            request.started_s = now_s
            request.first_cached = request.cached
            self.counts["prompt_tokens"] += request.prompt_tokens
            self.counts["cached_tokens"] += request.cached
        self.counts["recomputed_tokens"] += max(0, request.lost - request.computed)
        request.lost = 0

    def decline(self, request: Request) -> None:
        """Let go of the hit of a request that was not admitted after all."""
        self.release(request)
        request.cached = 0
        request.seen_at = -1
        request.row_view = self.waiting_view = None

    def preempt(self, request: Request) -> None:
        """Let a running request give its blocks back and wait; it keeps its tokens and its place."""
        del self.running[request.number]
        request.preemptions += 1
        request.tries, request.declined_s = 0, float("-inf")
        request.lost = request.computed
        self.counts["preemptions"] += 1
        self.events.append(Preempted(request.number))
        self.release(request)
        if request.attention is not None:
            request.attention = [None] * len(request.tables)
        request.cached = 0
        self.wait(request)

    def make_way(self, request: Request, count: int, yields: Sequence[int], bound: set[int]) -> bool:
        """Let lower-ranked running requests give way until ``request`` has its blocks; ``bound`` ones cannot."""
        for number in yields:
            if number == request.number:
                break
            other = self.running.get(number)
            if other is None or number in bound or other.in_flight:
                continue
            self.preempt(other)
            if self.allocate(request, count):
                return True
        return False

    def start_compact(self, request: Request) -> None:
        """Let the only request begin anew, alone, in an arena without holes, where everything that fits finishes."""
        if request.state == "running":
            self.preempt(request)
        else:
            self.decline(request)
        self.ledger.flush()
        self.cache_age += 1
        self.solo = request.number

    def check_integrity(self) -> list[Counter[int]]:
        """Raise AssertionError where requests and queues do not agree; return per class how often each slot is held."""
        held: list[Counter[int]] = [Counter() for _ in self.ledger.classes]
        size = self.ledger.block_tokens
        for number, request in self.requests.items():
            aside = (request.held_by is not None) + (request.loading is not None)
            places = (number in self.waiting) + (number in self.running) + aside
            assert number == request.number
            assert places == 1
            known = len(request.known)
            assert 0 <= request.computed <= known
            assert known + request.pending <= max(request.limit, known)
            assert request.generated == known - request.prompt_tokens
            assert known <= request.limit
            if request.state == "running":
                assert request.cached <= request.computed
                assert all(len(request.tables[kind]) * size >= request.computed for kind in request.kinds)
            else:
                assert not request.in_flight
                assert not request.computed
                assert number in self.holders or not any(request.tables)
            assert request.sealed == (request.cached if number in self.holders else request.computed) // size
            for kind, table in enumerate(request.tables):
                live = request.live[kind]
                assert kind in request.kinds or not table
                assert not any(table[:live])
                assert all(table[live:])
                assert len(set(table[live:])) == len(table) - live
                held[kind].update(table[live:])
            if request.held_by is not None:
                assert number in self.followers[request.held_by]
                assert request.held_by in self.requests
        assert len(self.waiting) + len(self.running) <= len(self.requests)
        assert set(self.groups) == {one.group for one in self.requests.values()}
        assert set(self.holders) <= set(self.waiting)
        assert self.solo is None or self.solo in self.requests
        return held
