"""The engine's decisions over a runner that only takes time.

Planner, book, ledger and policies are the engine's own; what the simulator adds is the clock: a step takes what
:class:`~kimicore.sim.cost.StepTimes` say, and the trace says when requests come and how many tokens they want.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kimicore.asking import padded
from kimicore.book import Book
from kimicore.contracts import RowView, StepView
from kimicore.cost import step_load
from kimicore.errors import ConfigError, Overloaded, PromptTooLong
from kimicore.leap import Ends
from kimicore.ledger import Ledger
from kimicore.plan import Planner
from kimicore.plugins import resolve
from kimicore.policies.batching.fcfs import Fcfs
from kimicore.policies.batching.priority import Priority
from kimicore.prefix import KeyContext
from kimicore.requests import Event, Finished, NewRequest, Preempted, Tokens
from kimicore.sampling_params import SamplingParams
from kimicore.sim.cost import StepTimes
from kimicore.sim.keys import TraceKeys
from kimicore.sim.record import Record
from kimicore.sim.report import SimReport
from kimicore.sim.settings import SimConfig
from kimicore.sim.traces import TraceRequest
from kimicore.types import BoundRow, BoundStep, KVClass, RowResult, Shape, StepResult

__all__ = ["Progress", "simulate"]

Progress = Callable[[int, int, float], None]
"""Told now and then: requests that are over, all of them, and the trace's time."""

BLOCKED_S = 0.002  # how soon the engine plans anew when nothing can run
CLOSE_S = 1e-6  # so near to the moment at which prompts are let in, every step is planned
STEADY = (Fcfs, Priority)
"""Batching policies whose answer depends on who waits and who runs alone, not on the time: while nobody comes or
finishes, a request that they did not let in stays out."""
_DREW = RowResult((0,))
_READ = RowResult(())


def simulate(
    requests: Sequence[TraceRequest], *, config: SimConfig | None = None, progress: Progress | None = None
) -> SimReport:
    """Return what becomes of ``requests`` (in order of arrival) under ``config``.

    The same arguments give the same report. A request that the engine would refuse is counted as such.
    ``progress`` is told now and then. Raises :class:`~kimicore.ConfigError` and :class:`~kimicore.PluginError` before
    any work, also where the trace is empty or not in order.
    """
    if not requests:
        raise ConfigError("there are no requests to simulate")
    for at in range(1, len(requests)):
        if requests[at].arrived_s < requests[at - 1].arrived_s:
            raise ConfigError(f"request {at} arrives before the one before it; sort the requests by arrived_s")
    return _Simulation(requests, config or SimConfig(), progress).run()


class _Silent:
    """A judge of no text."""

    def accept(self, token_id: int) -> str | None:
        """Let every token pass."""
        return None


class _Simulation:
    """One run: the book, the planner, the clock, and the record."""

    def __init__(self, requests: Sequence[TraceRequest], config: SimConfig, progress: Progress | None) -> None:
        self._requests = requests
        self._config = config
        self._progress = progress
        self._times = config.times
        size = config.block_tokens
        block = KVClass("kv", (0,), None, "none", (1, 2, 1, size, 1), size)
        eviction, batching, padding = [
            resolve(kind, name, config.settings_of(kind))
            for kind, name in (
                ("eviction", config.eviction),
                ("batching", config.batching),
                ("padding", config.padding),
            )
        ]
        self._ledger = Ledger((block,), size, config.kv_blocks + 1, size, eviction, seed=config.seed)
        self._keys = TraceKeys(size)
        self._book = Book(self._ledger, self._keys, (KeyContext(),), config.limits, max_waiting=config.max_waiting)
        self._planner = Planner(batching, padding, config.limits)
        self._steady = type(batching) in STEADY
        self._record = Record.of(requests)
        self._params = SamplingParams(temperature=0.0)
        self._judge = _Silent()
        self._now_s = 0.0
        self._next = 0
        self._over = 0
        self._decode = _Decode(self._planner, config.times, self._record)
        self._waiting: tuple[RowView, ...] = ()  # who waited at the last plan, ...
        self._planned_s = 0.0  # ... which was made then
        self._calm = False  # what follows needs no asking until somebody comes
        self._drew: set[int] = set()  # who had a token in the last step, ...
        self._drew_s = 0.0  # ... which ended then
        self._stalled: dict[int, float] = {}  # when the others that run, or gave way, had their last one

    # ------------------------------------------------------------ the loop

    def run(self) -> SimReport:
        """Run to the end and return the report."""
        requests, book = self._requests, self._book
        turns = 0
        while True:
            self._arrive()
            if book.idle:
                if self._next == len(requests):
                    break
                self._now_s = max(self._now_s, requests[self._next].arrived_s)
                continue
            if not (self._calm and self._config.leap and self._leap()):
                self._step()
            turns += 1
            if self._progress is not None and not turns % 1024:
                self._progress(self._over, len(requests), self._now_s)
        if self._progress is not None:
            self._progress(len(requests), len(requests), self._now_s)
        faults = self._planner.faults
        return SimReport(
            self._config,
            self._record,
            book.stats(faults=faults),
            self._now_s,
            faults=(*faults, self._ledger.faults),
        )

    def _arrive(self) -> None:
        requests, now_s = self._requests, self._now_s
        while self._next < len(requests) and requests[self._next].arrived_s <= now_s:
            number = self._next
            self._next += 1
            self._calm = False
            one = requests[number]
            salt = self._keys.salt(one, number)
            try:
                self._book.submit(self._new(one, number, salt), now_s)
            except (Overloaded, PromptTooLong) as error:
                self._keys.forget(salt)
                self._record.outcomes[number].reason = "overloaded" if isinstance(error, Overloaded) else "too long"
                self._over += 1

    def _new(self, one: TraceRequest, number: int, salt: bytes) -> NewRequest:
        return NewRequest(
            number=number,
            prompt=bytes(one.prompt_tokens),
            limit_tokens=one.prompt_tokens + one.output_tokens,
            params=self._params,
            seed=0,
            choice=0,
            tenant=one.tenant,
            priority=one.priority,
            arrived_s=one.arrived_s,
            deadline_s=None,
            salt=salt,
            use_cache=True,
            leader=None,
            judge=self._judge,
            end_ids=frozenset(),
            streamed=self._config.streamed,
            tier=one.tier or "standard",
        )

    def _step(self) -> None:
        """Plan, bind, run and commit one step, as the engine's thread does."""
        book, begun_s = self._book, self._now_s
        view = book.view(begun_s)
        plan = self._planner.plan(view, self._times)
        bound = book.bind(plan)
        rows = bound.rows
        if not rows:
            self._take(book.take_events())
            self._wait()
            return
        running = book.running_requests
        result, seconds, samples = self._run(bound)
        self._now_s = now_s = begun_s + seconds
        self._note_gaps(rows, now_s)
        ended = self._take(book.commit(bound, result, now_s))
        self._calm = samples == running and self._is_calm(view, rows, ended)
        self._waiting, self._planned_s = view.waiting, begun_s
        self._sample()

    def _is_calm(self, view: StepView, rows: Sequence[BoundRow], ended: bool) -> bool:
        """Whether the steps from here on follow without asking, until something happens; all running rows drew a token.

        A policy that may change its mind with time has to have seen such a step, with nobody waiting.
        """
        waits = self._book.waiting_requests > 0
        if self._steady and not waits:
            return True
        if ended or (not self._steady and (waits or view.waiting)):
            return False
        return {row.plan.request for row in rows} == {row.request for row in view.running} and all(
            [row.plan.count == 1 for row in rows]
        )

    def _wait(self) -> None:
        """Let time pass as an engine that cannot run anything does: until it looks again, or somebody comes."""
        self._calm = False
        until_s = self._now_s + BLOCKED_S
        if self._next < len(self._requests):
            until_s = min(until_s, max(self._now_s, self._requests[self._next].arrived_s))
        self._now_s = until_s

    def _run(self, bound: BoundStep) -> tuple[StepResult, float, int]:
        """Return the step's result, its seconds and how many rows draw a token, and count it."""
        tokens, rows, context, pairs = step_load(bound.rows)
        results = tuple([_DREW if row.sample else _READ for row in bound.rows])
        samples = results.count(_DREW)
        seconds = self._times.seconds(max(tokens, bound.shape.tokens), rows, context, pairs, samples)
        self._record.busy_s += seconds
        self._record.count(bound.shape, 1, tokens, samples)
        return StepResult(results), seconds, samples

    def _leap(self) -> bool:
        """Do the steps that need no asking; False where there are none."""
        begun_s = self._now_s
        until_s = self._requests[self._next].arrived_s if self._next < len(self._requests) else math.inf
        waits = self._book.waiting_requests > 0
        if waits and self._config.min_batch_size > 1:  # the last plan may have held them back for company
            release_s = self._waiting[0].arrived_s + self._config.max_wait_s
            if self._planned_s < release_s + CLOSE_S:
                until_s = min(until_s, release_s - CLOSE_S)
        ends: Ends = "none" if not self._steady else "one" if waits else "all"
        self._now_s, events = self._book.leap(begun_s, until_s, self._decode, ends)
        self._drew_s = self._now_s
        if self._now_s == begun_s:
            self._calm = False
            return False
        self._calm = not (self._take(events) and waits)
        self._sample()
        return True

    # ------------------------------------------------------------ writing down

    def _note_gaps(self, rows: Sequence[BoundRow], now_s: float) -> None:
        """Note how long each request that draws a token in this step waited for it since its last one."""
        record, stalled, tokens = self._record, self._stalled, 0
        drew: set[int] = set()
        for row in rows:
            if not row.sample:
                continue
            plan = row.plan
            drew.add(plan.request)
            if plan.start + plan.count == row.prompt_tokens:
                continue  # its first
            last_s = stalled.pop(plan.request, None)
            if last_s is None:
                tokens += 1
            else:
                record.gap(now_s - last_s, 1)
        if tokens:
            record.gap(now_s - self._drew_s, tokens)
        for number in self._drew - drew:
            stalled[number] = self._drew_s
        self._drew, self._drew_s = drew, now_s

    def _take(self, events: Sequence[Event]) -> bool:
        """Note what happened; True where a request ended."""
        outcomes, ended = self._record.outcomes, False
        for event in events:
            if isinstance(event, Tokens):
                continue
            outcome = outcomes[event.request]
            if isinstance(event, Preempted):
                outcome.preemptions += 1
                continue
            ended = True
            self._over += 1
            self._drew.discard(event.request)
            self._stalled.pop(event.request, None)
            if isinstance(event, Finished):
                outcome.started_s, outcome.first_token_s = event.started_s, event.first_token_s
                outcome.finished_s, outcome.cached_tokens = event.finished_s, event.cached_tokens
            else:
                raise RuntimeError(f"request {event.request} failed in a simulation") from event.error
        return ended

    def _sample(self) -> None:
        book, used_blocks = self._book, self._ledger.slabs.busy_slots[0]
        self._record.look(self._now_s, book.running_requests, book.waiting_requests, used_blocks)


class _Decode:
    """The decode steps of a leap: their shapes by the planner, their times by the model."""

    def __init__(self, planner: Planner, times: StepTimes, record: Record) -> None:
        self._planner = planner
        self._times = times
        self._record = record
        self._shapes: dict[tuple[int, int], Shape] = {}

    def shape(self, rows: int, blocks: int) -> Shape | None:
        """Return the shape of a step; None, so that the planner is asked, where the policy is at fault."""
        faults = self._planner.padding_faults
        shape = self._shapes.get((rows, blocks))
        if shape is None:
            shape = self._shapes[rows, blocks] = padded(self._planner.padding, rows, rows, blocks, faults)
        return None if faults.count else shape

    def run(
        self, now_s: float, until_s: float, most: int, rows: int, context_tokens: int, shape: Shape
    ) -> tuple[int, float]:
        """Run steps, note their times and count them; see :class:`~kimicore.leap.DecodeSteps`."""
        times, record = self._times, self._record
        fixed_s = times.seconds(max(rows, shape.tokens), rows, 0, 0, rows)
        per_context_s, busy_s = times.per_context_s, record.busy_s
        gap = record.gaps_s.append
        steps = 0
        while steps < most and now_s < until_s:
            seconds = fixed_s + per_context_s * context_tokens
            busy_s += seconds
            end_s = now_s + seconds
            gap(end_s - now_s)
            now_s = end_s
            context_tokens += rows
            steps += 1
        record.busy_s = busy_s
        record.gap_tokens.extend([rows] * steps)
        record.count(shape, steps, rows, rows)
        return steps, now_s
