"""An engine without a model: the real book, ledger and planner over a runner whose tokens show every fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, field

from kimicore.admission import limits_of
from kimicore.book import Book
from kimicore.config import EngineConfig
from kimicore.contracts import Batching, Eviction, Padding, StepView
from kimicore.cost import StepTimeModel, step_load
from kimicore.guard import PolicyFaults
from kimicore.ledger import Ledger
from kimicore.plan import Planner
from kimicore.plugins import resolve
from kimicore.prefix import BlockKeys, KeyContext
from kimicore.requests import Failed, Finished, NewRequest, Preempted, Tokens
from kimicore.sampling_params import SamplingParams
from kimicore.slabs import slab_layout
from kimicore.testing.clock import ManualClock
from kimicore.testing.runner import FakeRunner, fake_tokens
from kimicore.types import BoundRow, BoundStep, EngineStats, KVClass, Tier

__all__ = ["FakeEngine", "FakeRequest"]

VOCABULARY = 1000


class _NoStops:
    """A judge that never ends a text."""

    def accept(self, token_id: int) -> str | None:
        """Let every token pass."""
        return None


@define(eq=False)
class FakeRequest:
    """A request of a :class:`FakeEngine`, and what became of it; times are on the engine's clock, in seconds.

    ``started_s``: its first step was planned. ``cached_tokens``: of its prompt, when it was admitted. ``preemptions``:
    how often it gave its blocks back.
    """

    number: int
    prompt: list[int]
    max_tokens: int
    tenant: str
    priority: int
    tier: Tier
    arrived_s: float
    seed: int
    tokens: list[int] = field(factory=list)
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    cancelled: bool = False
    error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether it is over, well or not."""
        return self.cancelled or self.error is not None or self.finished_s is not None


class FakeEngine:
    """Serves requests with the engine's own decisions, on a clock that only its steps and :meth:`wait` move.

    ``config``: names the policies and the budgets. ``batching``, ``eviction``, ``padding``: settings of policies that
    serve in place of the named ones. ``kv_blocks``: size of the arena, in blocks of its first KV class. ``windows``:
    one KV class for each, with its window in tokens or None. ``step_s``: seconds of a step, or a function of the bound
    step. ``limits``: changes to ``config``, such as ``max_batch_size=4``.
    """

    counter: type[PolicyFaults] = PolicyFaults
    """Counts what policies do wrong."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        batching: Batching | None = None,
        eviction: Eviction | None = None,
        padding: Padding | None = None,
        kv_blocks: int = 64,
        windows: Sequence[int | None] = (None,),
        step_s: float | Callable[[BoundStep], float] = 0.01,
        fault: Callable[[BoundRow], BaseException | None] | None = None,
    ) -> None:
        config = config or EngineConfig()
        chosen: dict[str, Any] = {"batching": batching, "eviction": eviction, "padding": padding}
        for kind, given in chosen.items():
            chosen[kind] = given or resolve(kind, getattr(config, kind), config.policy.get(kind))
        self.config = config
        self.clock = ManualClock()
        self.requests: dict[int, FakeRequest] = {}
        self.steps: list[BoundStep] = []
        self.windows = tuple(windows)
        classes = [_kv_class(at, window, config.block_tokens) for at, window in enumerate(self.windows)]
        slab_bytes, _ = slab_layout(classes, 1 << 40)
        # Calls are not timed: a slow machine must not change what a test sees.
        self._faults = {
            kind: self.counter(kind, policy.name, config.policy_fault_limit) for kind, policy in chosen.items()
        }
        self.ledger = Ledger(
            classes, slab_bytes, kv_blocks + 1, config.block_tokens, chosen["eviction"], faults=self._faults["eviction"]
        )
        limits = limits_of(config)
        contexts = [KeyContext(kv_class=one.name.encode()) for one in classes]
        self.book = Book(
            self.ledger, BlockKeys(config.block_tokens, b"fake"), contexts, limits, max_waiting=config.max_waiting
        )
        self.planner = Planner(
            chosen["batching"],
            chosen["padding"],
            limits,
            batching_faults=self._faults["batching"],
            padding_faults=self._faults["padding"],
        )
        self.runner = FakeRunner(
            tuple(classes),
            tuple((kv_blocks + 1) * per for per in self.ledger.slabs.per_slab),
            VOCABULARY,
            fault=fault,
            seconds=step_s if callable(step_s) else lambda step: float(step_s),
            after=self.clock.advance,
        )
        self._cost = StepTimeModel()

    # ------------------------------------------------------------ requests

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        tenant: str = "",
        priority: int = 0,
        tier: Tier = "standard",
        streamed: bool = True,
        seed: int = 0,
        arrived_s: float | None = None,
    ) -> FakeRequest:
        """Take a request, which arrives now or has arrived a moment ago, at ``arrived_s``.

        Raises what the engine raises for a request that it cannot take.
        """
        number = len(self.requests) + 1
        now_s = self.clock() if arrived_s is None else arrived_s
        new = NewRequest(
            number=number,
            prompt=list(prompt),
            limit_tokens=len(prompt) + max_tokens,
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            seed=seed,
            choice=0,
            tenant=tenant,
            priority=priority,
            arrived_s=now_s,
            deadline_s=None,
            salt=tenant.encode(),
            use_cache=self.config.prefix_cache,
            leader=None,
            judge=_NoStops(),
            end_ids=frozenset(),
            streamed=streamed,
            tier=tier,
        )
        self.book.submit(new, self.clock())
        request = FakeRequest(number, list(prompt), max_tokens, tenant, priority, tier, now_s, seed)
        self.requests[number] = request
        self._take()
        return request

    def cancel(self, request: FakeRequest) -> bool:
        """End a request without an answer; False where it had ended."""
        gone = self.book.cancel(request.number)
        request.cancelled = request.cancelled or gone
        self._take()
        return gone

    def expected(self, request: FakeRequest) -> list[int]:
        """Return the tokens that the request gives when it is alone and nothing goes wrong."""
        return fake_tokens(request.prompt, request.max_tokens, self.windows, seed=request.seed, vocabulary=VOCABULARY)

    # ------------------------------------------------------------ steps

    def view(self) -> StepView:
        """Return what the next step will be decided on."""
        return self.book.view(self.clock())

    def wait(self, seconds: float) -> None:
        """Let time pass without a step."""
        self.clock.advance(seconds)

    def step(self) -> BoundStep:
        """Decide, run and commit one step, which may be empty."""
        bound = self.book.bind(self.planner.plan(self.view(), self._cost))
        self.steps.append(bound)
        now_s = self.clock()
        for row in bound.rows:
            request = self.requests[row.plan.request]
            if request.started_s is None:
                request.started_s = now_s
        if bound.rows:
            result = self.runner.run(bound)
            self._take(self.book.commit(bound, result, self.clock()))
            self._cost.observe(result.step_s, *step_load(bound.rows))
        else:
            self._take()
        return bound

    def run(self, most_steps: int = 10_000) -> None:
        """Step until every request has ended; raises AssertionError where they do not within ``most_steps``."""
        for _ in range(most_steps):
            if self.book.idle:
                return
            if not self.step().rows:
                self.wait(self.config.max_wait_s + 0.001)
        if not self.book.idle:
            raise AssertionError(f"requests live after {most_steps} steps: {self.view()}")

    def _take(self, events: Sequence[Any] = ()) -> None:
        for event in (*events, *self.book.take_events()):
            request = self.requests.get(event.request)
            if request is None:
                continue
            if isinstance(event, Tokens):
                request.tokens.extend(event.tokens)
                if event.first:
                    request.first_token_s = self.clock()
            elif isinstance(event, Finished):
                request.finished_s = event.finished_s
                request.cached_tokens = event.cached_tokens
            elif isinstance(event, Failed):
                request.error = event.error
            elif isinstance(event, Preempted):
                request.preemptions += 1

    # ------------------------------------------------------------ looking

    @property
    def start_order(self) -> list[FakeRequest]:
        """The requests in the order in which their first tokens were computed; ties as the steps had them."""
        order: dict[int, None] = {}
        for step in self.steps:
            for row in step.rows:
                order.setdefault(row.plan.request)
        return [self.requests[number] for number in order]

    def faults(self, kind: str) -> PolicyFaults:
        """Return what the policy of ``kind`` ("batching", "eviction", "padding") did wrong so far."""
        return self._faults[kind]

    def stats(self) -> EngineStats:
        """Return the engine's counters and gauges."""
        return self.book.stats(0.0, [self._faults["batching"], self._faults["padding"]])

    def check_integrity(self) -> None:
        """Raise AssertionError where requests, queues and blocks do not agree."""
        self.book.check_integrity()


def _kv_class(at: int, window: int | None, block_tokens: int) -> KVClass:
    name = f"class {at}"
    return KVClass(name, (at,), window, "float32", (1, 2, 1, block_tokens, 1), 8 * block_tokens)
