"""What the tests of the decide tower share: an engine without a device, driven step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve

from kimicore.below import Below
from kimicore.book import Book
from kimicore.contracts import Eviction, StepLimits
from kimicore.cost import StepTimeModel
from kimicore.importance import Importance
from kimicore.ledger import Ledger
from kimicore.plan import Planner
from kimicore.plugins import resolve
from kimicore.prefix import BlockKeys, KeyContext
from kimicore.requests import Event, Failed, Finished, NewRequest, Preempted, Tokens
from kimicore.sampling_params import SamplingParams
from kimicore.shelf import DiskShelf, HostShelf
from kimicore.slabs import slab_layout
from kimicore.testing.carrier import FakeCarrier, Outcome
from kimicore.testing.clock import ManualClock
from kimicore.testing.runner import FakeRunner, fake_tokens
from kimicore.tiers import Tiers
from kimicore.types import BoundRow, BoundStep, KVClass, KVPrecision, Retention, Tier

VOCABULARY = 50
SECRET = b"secret"


class Words:
    """A judge that stops when the given token ids come one after the other."""

    def __init__(self, stop: Sequence[int] = ()) -> None:
        self.stop = tuple(stop)
        self.seen: list[int] = []

    def accept(self, token_id: int) -> str | None:
        self.seen.append(token_id)
        if self.stop and tuple(self.seen[-len(self.stop) :]) == self.stop:
            return "".join(chr(97 + one % 26) for one in self.stop)
        return None


def kv_class(
    name: str = "full", layers: int = 1, window: int | None = None, block_tokens: int = 16, **more: Any
) -> KVClass:
    """Return a class whose block has 8 bytes per layer and token."""
    shape = (layers, 2, 1, block_tokens, 1)
    return KVClass(name, tuple(range(layers)), window, "float32", shape, layers * 8 * block_tokens, **more)


def quantized(*full: KVClass, precision: KVPrecision = "int8") -> tuple[KVClass, ...]:
    """Return classes of another precision beside these: where whole blocks are, and where they are filled."""
    mains = [
        evolve(one, name=f"{one.name}-{precision}", block_bytes=8 * one.shape[3], precision=precision) for one in full
    ]
    tails = [evolve(one, name=f"{one.name}-{precision}-tail", window=1, precision=precision, tail=True) for one in full]
    return (*mains, *tails)


class Output:
    """Everything that was told about one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.prompt_scores: list[Any] = []
        self.logprobs: list[Any] = []
        self.finished: Finished | None = None
        self.error: BaseException | None = None
        self.preemptions = 0
        self.firsts = 0
        self.ends = 0


class Rig:
    """Book, planner and fake runner with a clock; ``classes`` default to one full class."""

    def __init__(
        self,
        slabs: int = 65,
        *,
        classes: Sequence[KVClass] = (),
        block_tokens: int = 16,
        batching: str = "fcfs",
        padding: str = "packed",
        eviction: Eviction | None = None,
        max_waiting: int = 1000,
        fault: Callable[[BoundRow], BaseException | None] | None = None,
        seconds: Callable[[BoundStep], float] | None = None,
        rope_original_tokens: int | None = None,
        contexts: Sequence[KeyContext] | None = None,
        vocabulary: int = VOCABULARY,
        host_slabs: int = 0,
        disk: dict[bytes, list[int]] | None = None,
        disk_bytes: int = 1 << 20,
        staging: bool = False,
        admission: int = 1,
        importance: Importance | None = None,
        **limits: Any,
    ) -> None:
        self.classes = tuple(classes) or (kv_class(block_tokens=block_tokens),)
        slab_bytes, _ = slab_layout(self.classes, 1 << 40)
        self.limits = StepLimits(
            **{"max_batch_size": 8, "max_batch_tokens": 64, "min_batch_size": 1, "max_wait_s": 0.05}
            | {"target_step_s": 1e9}
            | limits
        )
        self.ledger = Ledger(self.classes, slab_bytes, slabs, block_tokens, eviction or resolve("eviction", "lru"))
        if contexts is None:
            contexts = [KeyContext(kv_class=one.name.encode()) for one in self.classes]
        tiers = None
        if host_slabs:
            shelf = HostShelf(self.classes, slab_bytes, host_slabs, eviction or resolve("eviction", "lru"))
            below = None if disk is None else DiskShelf(disk_bytes, [(key, 64) for key in disk])
            tiers = Tiers(self.ledger, shelf, below, staging=staging, admission=admission)
        self.book = Book(
            self.ledger,
            BlockKeys(block_tokens, SECRET),
            contexts,
            self.limits,
            max_waiting=max_waiting,
            rope_original_tokens=rope_original_tokens,
            tiers=tiers,
            importance=importance,
        )
        self.clock = ManualClock()
        slots = tuple(slabs * per for per in self.ledger.slabs.per_slab)
        self.runner = FakeRunner(
            self.classes,
            slots,
            vocabulary,
            fault=fault,
            seconds=seconds or (lambda step: 0.01),
            after=self.clock.advance,
        )
        self.carrier = FakeCarrier(self.runner, self.clock, {} if disk is None else disk)
        self.planner = Planner(resolve("batching", batching), resolve("padding", padding), self.limits)
        self.cost: Any = StepTimeModel()
        self.out: dict[int, Output] = {}
        self.news: dict[int, NewRequest] = {}
        self.steps: list[BoundStep] = []
        self._next = 1

    def new(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = 8,
        *,
        limit: int | None = None,
        params: SamplingParams | None = None,
        seed: int = 0,
        choice: int = 0,
        tenant: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        use_cache: bool = True,
        leader: int | None = None,
        judge: Any = None,
        ends: Sequence[int] = (),
        banned: Sequence[int] = (),
        number: int | None = None,
        retain: Sequence[Retention] = (),
        tier: Tier = "standard",
        kv_precision: KVPrecision = "full",
        share: float | None = None,
    ) -> NewRequest:
        """Return a request that arrives now."""
        if number is None:
            number = self._next
        self._next = max(self._next, number + 1)
        now_s = self.clock()
        return NewRequest(
            number=number,
            prompt=list(prompt),
            limit_tokens=limit if limit is not None else len(prompt) + (max_tokens or 0),
            params=params or SamplingParams(max_tokens=max_tokens, temperature=0.0),
            seed=seed,
            choice=choice,
            tenant=tenant,
            priority=priority,
            arrived_s=now_s,
            deadline_s=None if timeout_s is None else now_s + timeout_s,
            salt=tenant.encode(),
            use_cache=use_cache,
            leader=leader,
            judge=judge or Words(),
            end_ids=frozenset(ends),
            banned_until_min=tuple(banned),
            tier=tier,
            retain=tuple(retain),
            kv_precision=kv_precision,
            share=share,
        )

    def submit_all(self, group: Sequence[NewRequest]) -> None:
        """Submit requests together."""
        self.book.submit_all(group, self.clock())
        for new in group:
            self.news[new.number] = new
            self.out[new.number] = Output()
        self.take(self.book.take_events())

    def submit(self, prompt: Sequence[int], max_tokens: int | None = 8, **more: Any) -> int:
        """Submit a request and return its number."""
        new = self.new(prompt, max_tokens, **more)
        self.submit_all([new])
        return new.number

    def take(self, events: Sequence[Event]) -> None:
        """Note what was told."""
        for event in events:
            out = self.out[event.request]
            if isinstance(event, Preempted):
                out.preemptions += 1
                continue
            assert not out.ends, "told after the end"
            if isinstance(event, Tokens):
                out.firsts += event.first
                out.tokens.extend(event.tokens)
                out.prompt_scores.extend(event.prompt_scores or ())
                out.logprobs.extend(event.logprobs or ())
            elif isinstance(event, Finished):
                out.finished = event
                out.ends += 1
            elif isinstance(event, Failed):
                out.error = event.error
                out.ends += 1

    @property
    def below(self) -> Below:
        """The lower tiers, which have to be there."""
        assert self.book.below is not None
        return self.book.below

    def tend(self) -> None:
        """Begin the block moves that are due."""
        below = self.book.below
        if below is not None:
            due = below.tend(self.clock(), self.cost)
            self.before_writes()
            self.carrier.submit(due)
            self.carrier.discard(below.tiers.take_discards())

    def move(self, at: int = 0, outcome: Outcome = "done") -> None:
        """End a block move that is on its way, if there is one."""
        over = self.carrier.finish(at, outcome)
        if over:
            self.below.moved(over, self.clock())

    def settle(self) -> None:
        """End all block moves, and those that these call for."""
        for _ in range(100):
            self.tend()
            over = self.carrier.finish_all()
            if not over:
                return
            self.below.moved(over, self.clock())
        raise AssertionError("blocks move for ever")

    def bind(self) -> BoundStep:
        """Plan and bind a step."""
        self.tend()
        bound = self.book.bind(self.planner.plan(self.book.view(self.clock()), self.cost))
        self.before_writes()
        self.steps.append(bound)
        return bound

    def before_writes(self) -> None:
        """Copy what the device has dropped uncopied."""
        if self.book.below is not None:
            tiers = self.book.below.tiers
            tiers.urgent_done(self.carrier.copy(tiers.take_urgent()))

    def commit(self, bound: BoundStep) -> None:
        """Run and commit a bound step."""
        if bound.rows:
            self.take(self.book.commit(bound, self.runner.run(bound), self.clock()))
        else:
            self.take(self.book.take_events())

    def step(self) -> BoundStep:
        """Do one whole step and check the books."""
        bound = self.bind()
        self.book.check_integrity()
        self.commit(bound)
        self.book.check_integrity()
        return bound

    def finish(self, most: int = 10_000) -> None:
        """Step until nobody lives."""
        empty = 0
        for _ in range(most):
            if self.book.idle:
                return
            empty = 0 if self.step().rows else empty + 1
            for _ in range(len(self.carrier.pending) if empty else len(self.carrier.pending) - 3):
                self.move()
            assert empty < 4, f"requests live and nothing runs: {self.book.view(self.clock())}"
        raise AssertionError(f"not finished after {most} steps")

    def run(self, prompt: Sequence[int], max_tokens: int | None = 8, **more: Any) -> Output:
        """Submit a request and step until nobody lives."""
        number = self.submit(prompt, max_tokens, **more)
        self.finish()
        return self.out[number]

    def alone(self, new: NewRequest) -> list[int]:
        """Return what the request gives when it is alone and nothing ends it early."""
        return fake_tokens(
            new.prompt,
            new.limit_tokens - len(new.prompt),
            [one.window for one in self.classes if one.precision == new.kv_precision and not one.tail],
            seed=new.seed,
            choice=new.choice,
            vocabulary=self.runner.vocabulary,
            banned=new.banned_until_min,
            min_tokens=new.params.min_tokens,
            precision=new.kv_precision,
            block_tokens=self.ledger.block_tokens,
        )

    def expected(self, new: NewRequest) -> tuple[list[int], str, str | int | None]:
        """Return the tokens, the reason and the stop that the request gives alone, by a rule written anew."""
        tokens = self.alone(new)
        stop = new.judge.stop if isinstance(new.judge, Words) else ()
        least = new.params.min_tokens
        for at, token in enumerate(tokens):
            if token in new.end_ids and at >= least:
                return tokens[: at + 1], "stop", token
            upto = tokens[: at + 1]
            if stop and at + 1 >= least and tuple(upto[-len(stop) :]) == stop:
                return upto, "stop", "".join(chr(97 + one % 26) for one in stop)
        return tokens, "length", None

    def assert_right(self, number: int) -> None:
        """Assert that a request finished by length with the tokens that it gives alone."""
        out = self.out[number]
        assert out.finished is not None, out.error
        assert out.tokens == self.alone(self.news[number])
        assert out.finished.completion_tokens == len(out.tokens)

    def assert_empty(self) -> None:
        """Assert that nothing is held any more, once the block moves have ended."""
        self.settle()
        counts = self.ledger.counts()
        assert counts.used == 0
        assert counts.cached + counts.free == counts.total
        assert self.book.idle
        self.book.check_integrity()


def prompt_of(length: int, start: int = 0) -> list[int]:
    """Return a prompt that differs from others in its first token."""
    return [(start * 7 + 3 * at + at * at) % VOCABULARY for at in range(length)]
