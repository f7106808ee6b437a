"""All requests of an engine and their legal state changes: the face of the decide tower.

The book is the only one that changes a request: ``submit``, ``cancel`` and ``expire`` from outside, ``bind`` and
``commit`` around each step. It knows neither clocks nor devices; the time is handed in. It is used from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from struct import error as StructError

from kimicore.admission import Capacity, HeldBlocks, limits_of
from kimicore.below import Below
from kimicore.config import EngineConfig
from kimicore.contracts import MemoryView, RowView, StepLimits, StepView
from kimicore.errors import ConfigError, InvalidRequest, Overloaded, PromptTooLong, RequestTimeout
from kimicore.guard import PolicyFaults
from kimicore.importance import Importance
from kimicore.leap import DecodeSteps, Ends, Leap
from kimicore.ledger import Ledger
from kimicore.plugins import faults_of, resolve
from kimicore.policies.precision import ActivationPrecision
from kimicore.prefix import BlockKeys, Chains, KeyChain, KeyContext, joined
from kimicore.requests import Event, Failed, NewRequest, Request
from kimicore.roster import Roster
from kimicore.sinking import Sink
from kimicore.steps import Steps
from kimicore.tiers import Tiers
from kimicore.types import BoundStep, EngineStats, KVClass, KVPrecision, StepPlan, StepResult

__all__ = ["Book"]

LOOKS = 32  # waiting requests whose cached prefix is looked up anew when the cache has changed


class Book:
    """The requests of one engine.

    ``ledger``: the blocks. ``keys``: names contents. ``contexts``: per KV class what its blocks depend on (the
    salt is each request's). ``limits``: budgets that the views carry. ``max_waiting``: requests that may wait.
    ``rope_original_tokens``: with a dynamic rope, the length from which its factor grows; the prompt's length fixes it.
    """

    def __init__(
        self,
        ledger: Ledger,
        keys: BlockKeys,
        contexts: Sequence[KeyContext],
        limits: StepLimits,
        *,
        max_waiting: int = 4096,
        rope_original_tokens: int | None = None,
        tiers: Tiers | None = None,
        importance: Importance | None = None,
    ) -> None:
        if len(contexts) != len(ledger.classes):
            raise ValueError("one context per KV class is needed")
        self.ledger = ledger
        self.limits = limits
        self.max_waiting = max_waiting
        self.capacities = {precision: Capacity(ledger, kinds).tokens for precision, kinds in ledger.kinds.items()}
        """By precision, the longest request, prompt and output, that the arena holds when it has it alone."""
        if min(self.capacities.values()) < 2:
            least = ledger.bytes_total // ledger.slabs.count * (1 + max(map(len, ledger.kinds.values())))
            raise ConfigError(
                f"kv_device_bytes: an arena of {ledger.bytes_total} bytes does not hold a block of each KV class of "
                f"this model and these precisions; at least {least} bytes are needed"
            )
        self._keys = keys
        self._contexts = tuple(contexts)
        self._rope_original_tokens = rope_original_tokens
        self._roster = Roster(ledger, importance)
        self._steps = Steps(self._roster)
        self.below = None if tiers is None else Below(self._roster, tiers, limits)
        self._deadlines: list[tuple[float, int]] = []
        self._now_s = 0.0

    @classmethod
    def from_config(
        cls,
        *,
        classes: Sequence[KVClass],
        slab_bytes: int,
        slabs: int,
        config: EngineConfig,
        contexts: Sequence[KeyContext],
        rope_original_tokens: int | None = None,
        secret: bytes | None = None,
        tiers_of: Callable[[Ledger], Tiers] | None = None,
        importance: Importance | None = None,
        activations: ActivationPrecision | None = None,
    ) -> Book:
        """Return a book with the ledger and the policies that the settings name.

        ``slab_bytes``, ``slabs``: the arena, slab 0 included. ``secret``: keys the block names (None draws one).
        ``tiers_of``: makes the tiers below the ledger's, where there are any. ``activations``: see :class:`BlockKeys`.
        """
        eviction = resolve("eviction", config.eviction, config.policy.get("eviction"))
        faults = faults_of("eviction", config.eviction, config)
        ledger = Ledger(classes, slab_bytes, slabs, config.block_tokens, eviction, faults=faults)
        return cls(
            ledger,
            BlockKeys(config.block_tokens, secret, activations),
            contexts,
            limits_of(config),
            max_waiting=config.max_waiting,
            rope_original_tokens=rope_original_tokens,
            tiers=None if tiers_of is None else tiers_of(ledger),
            importance=importance,
        )

    # ------------------------------------------------------------ from outside

    @property
    def idle(self) -> bool:
        """Whether no request lives."""
        return not self._roster.requests

    @property
    def running_requests(self) -> int:
        """How many requests run."""
        return len(self._roster.running)

    @property
    def waiting_requests(self) -> int:
        """How many requests wait for blocks and a place, or for their leader."""
        return len(self._roster.requests) - len(self._roster.running)

    @property
    def retry_after_s(self) -> float:
        """Seconds after which a tenth of a full queue should have moved on, by the measured rate of completions."""
        return self._roster.traffic.retry_after_s(max(1, self.max_waiting // 10))

    @property
    def capacity_tokens(self) -> int:
        """The longest request of any precision that the arena holds."""
        return max(self.capacities.values())

    def fits(self, prompt_tokens: int, limit_tokens: int, precision: KVPrecision = "full") -> bool:
        """Return whether such a request could ever run."""
        return 0 < prompt_tokens <= limit_tokens <= self.capacities[precision]

    def check_fits(self, prompt_tokens: int, limit_tokens: int, precision: KVPrecision = "full") -> None:
        """Raise InvalidRequest or PromptTooLong, with the figures, where such a request could never run."""
        if prompt_tokens < 1:
            raise InvalidRequest("the prompt is empty; at least one token is needed")
        if limit_tokens < prompt_tokens:
            raise InvalidRequest(f"limit_tokens={limit_tokens} is under the prompt's {prompt_tokens} tokens")
        capacity_tokens = self.capacities[precision]
        if limit_tokens > capacity_tokens:
            raise PromptTooLong(
                f"the prompt has {prompt_tokens} tokens, {limit_tokens} with its output, and the KV arena holds "
                f"{capacity_tokens}; shorten it, lower max_tokens or raise kv_device_bytes",
                prompt_tokens=prompt_tokens,
                limit_tokens=capacity_tokens,
            )

    def submit(self, new: NewRequest, now_s: float) -> None:
        """Take a request; see :meth:`submit_all`."""
        self.submit_all((new,), now_s)

    def submit_all(self, group: Sequence[NewRequest], now_s: float) -> None:
        """Take all of these requests or none; a leader comes before those that it leads.

        Raises Overloaded where more would wait than may, InvalidRequest where one could never run.
        """
        roster = self._roster
        for new in group:
            self.check_fits(len(new.prompt), new.limit_tokens, new.kv_precision)
            if new.number in roster.requests:
                raise ValueError(f"request {new.number} is there already")
        waiting = len(roster.requests) - len(roster.running)
        if waiting + len(group) > self.max_waiting:
            roster.counts["refused"] += len(group)
            retry_after_s = self.retry_after_s
            raise Overloaded(
                f"{waiting} requests wait and max_waiting={self.max_waiting}; try again in {retry_after_s:.2f} s",
                retry_after_s=retry_after_s,
            )
        made = [self._make(new) for new in group]
        for request in made:
            if request.new.deadline_s is not None:
                heappush(self._deadlines, (request.new.deadline_s, request.number))
            roster.enter(request, now_s)
        if len(self._deadlines) > 2 * len(roster.requests) + 64:
            self._deadlines = [one for one in self._deadlines if one[1] in roster.requests]
            heapify(self._deadlines)

    def _make(self, new: NewRequest) -> Request:
        group = new.number if new.leader is None else new.leader
        salt = joined(new.salt) if new.use_cache else joined(new.salt, b"private", str(group).encode())
        chains = self._chains(new.prompt, len(new.prompt), salt, new.kv_precision)
        return Request(new, chains, self.ledger.kinds[new.kv_precision], group)

    def _chains(
        self, tokens: Sequence[int], prompt_tokens: int, salt: bytes, precision: KVPrecision = "full"
    ) -> Chains:
        """Return the keys of a sequence's full blocks per class; a dynamic rope depends on the prompt's length."""
        original = self._rope_original_tokens
        rope = None if original is None or prompt_tokens <= original else str(prompt_tokens).encode()
        kinds = [kind for kind in self.ledger.kinds[precision] if not self.ledger.classes[kind].tail]
        made = self._keys.chains([self._contexts[kind] for kind in kinds], salt, rope, prompt_tokens)
        chains: list[KeyChain | None] = [None] * len(self._contexts)
        try:
            for kind, chain in zip(kinds, made, strict=True):
                chain.extend(tokens, len(tokens) // self.ledger.block_tokens)
                chains[kind] = chain
        except StructError as error:
            raise InvalidRequest(f"the prompt holds something that is no token id: {error}") from error
        return chains

    def cancel(self, number: int) -> bool:
        """End a request without an answer; False where it has ended already.

        Its blocks are free at once, or when the step that is running with it is committed.
        """
        request = self._roster.requests.get(number)
        if request is None or request.cancelled:
            return False
        self._roster.counts["cancelled"] += 1
        self._roster.abandon(request)
        return True

    def expire(self, now_s: float) -> list[Event]:
        """End the requests whose deadline has passed, wherever they are, and return what there is to tell."""
        self.ledger.now_s = self._now_s = now_s
        roster = self._roster
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, number = heappop(self._deadlines)
            request = roster.requests.get(number)
            if request is None or request.cancelled:
                continue
            roster.counts["timed_out"] += 1
            allowed_s = deadline_s - request.new.arrived_s
            where = f"after {request.generated} tokens" if request.generated else f"while {request.state}"
            roster.events.append(Failed(number, RequestTimeout(f"not finished within {allowed_s:.3f} s: {where}")))
            roster.abandon(request)
        return self.take_events()

    def next_deadline_s(self) -> float | None:
        """Return when :meth:`expire` may next have something to do, or None."""
        while self._deadlines and self._deadlines[0][1] not in self._roster.requests:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def fail_all(self, error: BaseException) -> list[Event]:
        """End every request with ``error`` and give all blocks back; for when a step failed."""
        self._steps.bound = None
        for request in list(self._roster.requests.values()):
            request.in_flight = False
            if request.cancelled:
                self._roster.leave(request, forget=True)
            else:
                self._roster.fail(request, error)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Return what happened outside of a commit (requests that needed no step, preemptions) and was not told yet."""
        events, self._roster.events = self._roster.events, []
        return events

    def sink(self, tokens: Sequence[int], prompt_tokens: int, salt: bytes, precision: KVPrecision = "full") -> Sink:
        """Have the KV of a sequence written to disk from now on, as far as any tier has it.

        ``prompt_tokens``: length of the prompt that computed it. Raises InvalidRequest for what are no token ids.
        """
        chains = self._chains(tokens, prompt_tokens, joined(salt), precision)
        if self.below is None:
            return Sink(0, {}, 0, True)
        return self.below.sink(chains, len(tokens))

    # ------------------------------------------------------------ a step

    def view(self, now_s: float) -> StepView:
        """Return everything that a plan is made from; rows that did not change are the same objects as before."""
        self.ledger.now_s = self._now_s = now_s
        roster = self._roster
        self._look_again()
        if roster.waiting_view is None:
            rows = [one.view() for one in roster.waiting.values() if one.number not in roster.barred]
            roster.waiting_view = tuple(sorted(rows, key=_arrival))
        waiting = roster.waiting_view
        running = tuple([one.view() for one in roster.running.values() if not one.in_flight])
        if roster.solo is not None and self.below is not None and self.below.tiers.on_device:
            waiting = running = ()  # who needs the whole arena starts when the last moves have left it
        slabs = self.ledger.slabs
        kinds = range(len(slabs.per_slab))
        spare = tuple([slabs.spare(kind) for kind in kinds])
        ledger = self.ledger
        memory = MemoryView(ledger.block_tokens, ledger.windows, spare, slabs.per_slab, slabs.usable, ledger.kinds)
        free = tuple([spare[kind] + slabs.usable * slabs.per_slab[kind] for kind in kinds])
        held = HeldBlocks(roster.running, self.ledger)
        return StepView(now_s, running, waiting, self.limits, free, held, memory, roster.solo)

    def _look_again(self) -> None:
        """Look up the cached prefix of the first waiting requests, where the cache has changed since the last look."""
        roster = self._roster
        for count, request in enumerate(roster.waiting.values()):
            if count == LOOKS:
                break
            if request.seen_at == roster.cache_age:
                continue
            request.seen_at = roster.cache_age
            blocks = request.sealed if request.number in roster.holders else roster.hit(request)
            shared = self.ledger.shared(request.chains, blocks) if blocks else ()
            cached = blocks * self.ledger.block_tokens
            if cached != request.cached or shared != request.shared:
                request.cached, request.shared = cached, shared
                request.row_view = roster.waiting_view = None

    def bind(self, plan: StepPlan) -> BoundStep:
        """Carry out a plan's memory side and return the step with block numbers.

        The plan must be of the last view, with nothing but ``submit`` and ``cancel`` in between. Rows for which
        memory turned out too short are left out (after lower-ranked ones gave way to running ones), a row's start is
        where its cache hit really ends, and a request that is gone is skipped. A step without rows needs neither a
        run nor a commit; the next view has rows again. Raises ValueError where the step before was not committed.
        """
        return self._steps.bind(plan, self._now_s)

    def commit(self, step: BoundStep, result: StepResult, now_s: float) -> list[Event]:
        """Take in a step's result: advance, seal, finish, free; return what there is to tell, in order.

        Raises ValueError where ``step`` is not the bound one or the result does not match it; that step has failed.
        """
        self.ledger.now_s = self._now_s = now_s
        self._steps.commit(step, result, now_s)
        return self.take_events()

    def leap(self, now_s: float, until_s: float, steps: DecodeSteps, ends: Ends) -> tuple[float, list[Event]]:
        """Do many steps at once in which every running request generates a token, for a simulation; return when the
        last one ends, and what there is to tell. Nothing happens where the next step is not such a one.

        That nobody who waits can get in is the caller's to know. ``until_s``: no step begins then or later. ``ends``:
        whether requests may finish in any of these steps, the last one, or none. See :class:`~kimicore.leap.Leap`.
        """
        leap = Leap(self._roster, steps)
        if leap.possible():
            now_s = self._now_s = leap.run(now_s, until_s, ends)
            self.ledger.now_s = now_s
            self._steps.count_shapes(leap.shapes)
        return now_s, self.take_events()

    # ------------------------------------------------------------ looking

    def stats(self, step_s: float = 0.0, faults: Sequence[PolicyFaults] = ()) -> EngineStats:
        """Return counters and gauges; ``step_s`` and the faults of other policies than eviction are the caller's."""
        faults = (*faults, self.ledger.faults)
        roster, counts, blocks = self._roster, self._roster.counts, self.ledger.counts()
        return EngineStats(
            requests_running=len(roster.running),
            requests_waiting=len(roster.requests) - len(roster.running),
            requests_finished=counts["finished"],
            requests_cancelled=counts["cancelled"],
            requests_timed_out=counts["timed_out"],
            requests_failed=counts["failed"],
            requests_refused=counts["refused"],
            preemptions=counts["preemptions"],
            steps=counts["steps"],
            prompt_tokens=counts["prompt_tokens"],
            cached_tokens=counts["cached_tokens"],
            completion_tokens=counts["completion_tokens"],
            recomputed_tokens=counts["recomputed_tokens"],
            padded_tokens=counts["padded_tokens"],
            kv_blocks_used=blocks.used,
            kv_blocks_cached=blocks.cached,
            kv_blocks_free=blocks.free,
            kv_blocks_total=blocks.total,
            kv_bytes_total=self.ledger.bytes_total,
            evicted_blocks=self.ledger.evicted_blocks,
            step_s=step_s,
            policy_faults=sum([one.count for one in faults]),
            policies_set_aside=tuple([f"{one.kind}:{one.name}" for one in faults if one.set_aside]),
            padded_shapes=self._steps.shapes,
            loads=counts["loads"],
            loads_late=counts["loads_late"],
            loads_declined=counts["loads_declined"],
            host=None if self.below is None else self.below.tiers.stats("host"),
            disk=None if self.below is None else self.below.tiers.stats("disk"),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError where requests, queues and blocks do not agree; also between bind and commit."""
        held = self._roster.check_integrity()
        assert self._steps.bound is not None or not any(one.in_flight for one in self._roster.requests.values())
        if self.below is not None:
            self.below.check_integrity(held)
        self.ledger.check_integrity(held)


def _arrival(row: RowView) -> tuple[float, int]:
    return row.arrived_s, row.request
