"""The engine's own thread: it decides, runs and commits steps, and feeds the handles.

Everything on it is plain synchronous code. Callers of any thread reach it through an inbox and learn the
outcome through their :class:`~kimicore.handle.Handle`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

from attrs import define, evolve

from kimicore.block_moves import BlockMoves
from kimicore.book import Book
from kimicore.clock import Clock
from kimicore.config import EngineConfig
from kimicore.contracts import Carrier, Runner
from kimicore.cost import StepTimeModel, step_load
from kimicore.errors import EngineClosed, EngineFailed, InvalidRequest, KimiCoreError, Overloaded
from kimicore.guard import Watchdog
from kimicore.handle import Handle, Job, SinkCall
from kimicore.intake import context_limit, make_group
from kimicore.plan import Planner
from kimicore.requests import Event, Failed, Finished, NewRequest, Tokens
from kimicore.text.judge import TextJudge
from kimicore.text.tokenizer import Tokenizer
from kimicore.types import BoundRow, EngineStats, Timing, Usage
from kimicore.wake import Waker

__all__ = ["EngineLoop"]

_log = logging.getLogger("kimicore")

IDLE_LOOK_S = 0.25
"""How often an idle engine looks whether the interpreter is going down."""
BLOCKED_LOOK_S = 0.002  # how often a plan is tried anew when nothing can run and nothing happens


@define(eq=False)
class _Live:
    """One choice on its way: where its output goes, and what was counted."""

    handle: Handle
    index: int
    judge: TextJudge
    submitted_s: float


_Item = tuple[Handle, list[NewRequest], float] | Handle | SinkCall  # comes, is cancelled, is to be written to disk


class _EngineThread(threading.Thread):
    """An engine's own thread; by its type, engines know each other."""


def _forsaken() -> bool:
    """Return whether the program has ended but for engines: nobody is left to ask or to read."""
    if threading.main_thread().is_alive():
        return False
    return all(one.daemon or isinstance(one, _EngineThread) for one in threading.enumerate() if one.is_alive())


class EngineLoop:
    """Owns book, runner and the engine's thread; its public methods may be called from any thread."""

    def __init__(
        self,
        *,
        book: Book,
        planner: Planner,
        runner: Runner,
        tokenizer: Tokenizer,
        config: EngineConfig,
        clock: Clock,
        context_tokens: int,
        set_threads: Callable[[int], int] | None = None,
        carrier: Carrier | None = None,
        warm: Iterable[tuple[float, BoundRow]] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.clock = clock
        self.vocab_tokens = tokenizer.vocab_size
        self.context_tokens = context_limit(config, context_tokens, book.capacities)
        self.limit_tokens = self.context_tokens - 1
        self._book, self._planner, self._config = book, planner, config
        self.runner = runner  # may be wrapped while the engine rests: it is taken with each step
        self._cost = StepTimeModel(warm)
        self._set_threads = set_threads
        self._live: dict[int, _Live] = {}
        self._wakeup = threading.Condition()
        self._moves = BlockMoves(book, carrier, clock, self._wakeup)
        self._inbox: list[_Item] = []
        self._queued = 0  # requests submitted and not yet seen by the book
        self._refused = 0  # requests that were over max_waiting before the book saw them
        self._retry_after_s = book.retry_after_s
        self._waiting = 0  # requests that the book had waiting at the last look
        self._next = 1
        self._step_s = 0.0  # a decaying mean
        self._stop = False
        self._stopped = False
        self._failure: BaseException | None = None
        self._farewells: list[Waker] = []
        self._thread: threading.Thread | None = None
        self._watchdog = Watchdog((*planner.faults, book.ledger.faults))
        self.stats: EngineStats = book.stats()

    # ------------------------------------------------------------ called from any thread

    @property
    def stopped(self) -> bool:
        """Whether the thread has ended."""
        return self._stopped

    def start(self) -> None:
        """Start the engine's thread."""
        # Not a daemon: a thread inside a native step must not be torn down with the interpreter. It ends by
        # itself when the main thread has.
        self._thread = _EngineThread(target=self._work, name="kimicore-engine", daemon=False)
        self._moves.start()
        self._thread.start()
        if self._watchdog.needed:
            self._watchdog.start()

    def submit(
        self,
        job: Job,
        ids: Sequence[int],
        seed: int,
        waker: Waker,
        *,
        wake_each: bool,
        kept: list[Handle] | None = None,
    ) -> Handle:
        """Queue a checked request and return its handle; raises Overloaded, EngineClosed or EngineFailed.

        The handle is in ``kept`` before it is queued: an interrupt of the caller leaves no request behind.
        """
        params = job.params
        room = min(self.context_tokens, self._book.capacities[job.precision]) - len(ids)
        output = room if params.max_tokens is None else min(params.max_tokens, room)
        with self._wakeup:
            self._check_alive()
            if params.n > self._config.max_waiting:
                raise InvalidRequest(
                    f"n={params.n}: over max_waiting={self._config.max_waiting}, so it could never be taken; lower n"
                )
            waiting = self._queued + self._waiting
            if waiting + params.n > self._config.max_waiting:
                self._refused += params.n
                retry_after_s = self._retry_after_s
                raise Overloaded(
                    f"{waiting} requests wait and max_waiting={self._config.max_waiting}: "
                    f"try again in about {retry_after_s:.2f} s",
                    retry_after_s=retry_after_s,
                )
            numbers = range(self._next, self._next + params.n)
            self._next += params.n
            handle = Handle(job.asked.request_id or f"request-{numbers[0]}", numbers, waker, wake_each=wake_each)
            cache = self._config.prefix_cache
            group = make_group(job, ids, seed, numbers, len(ids) + output, self.tokenizer, cache, wake_each)
            if kept is not None:
                kept.append(handle)
            self._inbox.append((handle, group, job.submitted_s))
            self._queued += params.n
            self._wakeup.notify()
        return handle

    def cancel(self, handle: Handle) -> None:
        """Have the handle's request end; never waits."""
        with self._wakeup:
            if not self._stopped:
                self._inbox.append(handle)
                self._wakeup.notify()

    def sink(self, call: SinkCall) -> None:
        """Have a sequence's KV written to disk; never waits. Raises EngineClosed or EngineFailed."""
        with self._wakeup:
            self._check_alive()
            self._inbox.append(call)
            self._wakeup.notify()

    def request_stop(self) -> None:
        """Have the thread end after the running step; never waits."""
        self._stop = True
        # A finalizer may call this while this very thread holds the lock; the idle thread looks by itself then.
        if self._wakeup.acquire(blocking=False):
            try:
                self._wakeup.notify_all()
            finally:
                self._wakeup.release()

    def notify_when_stopped(self, waker: Waker) -> bool:
        """Notify ``waker`` when the thread has ended; False where it has already."""
        with self._wakeup:
            if self._stopped or self._thread is None:
                return False
            self._farewells.append(waker)
            return True

    def abandon(self) -> None:
        """Fail what is pending though the thread may still be inside its last step."""
        with self._wakeup:
            handles = {id(live.handle): live.handle for live in list(self._live.values())}
            for item in self._inbox:
                if isinstance(item, tuple):
                    handles[id(item[0])] = item[0]
        for handle in handles.values():
            handle.fail(EngineClosed("the engine was closed before this request was finished"))

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(f"the engine failed and takes no more work: {self._failure!r}") from self._failure
        if self._stop or self._stopped:
            raise EngineClosed("the engine is closed; make a new one")

    # ------------------------------------------------------------ the engine's thread

    def _work(self) -> None:
        restore = None
        try:
            if self._set_threads is not None and self._config.threads is not None:
                restore = self._set_threads(self._config.threads)
            while self._turn():
                pass
        except BaseException as error:
            _log.exception("the engine's step failed; every request ends with the cause")
            self._fail_all(error)
        finally:
            self._end(restore)

    def _turn(self) -> bool:
        """Do one round: inbox, deadlines, one step. False when the engine is to end."""
        inbox = self._collect()
        if self._stop or _forsaken():
            self._stop = True
            self._refuse(inbox)
            return False
        for item in inbox:
            if isinstance(item, Handle):
                self._drop(item)
            elif isinstance(item, SinkCall):
                self._moves.sink(item)
            else:
                self._enter(*item)
        self._tell(self._book.expire(self.clock()))
        self._moves.tend(self._cost)
        if not self._book.idle:
            self._step()
        else:
            self._publish()
        return True

    def _drop(self, handle: Handle) -> None:
        for number in handle.numbers:
            self._live.pop(number, None)
            self._book.cancel(number)

    def _collect(self) -> list[_Item]:
        with self._wakeup:
            while not self._inbox and not self._stop and self._book.idle and not self._moves.over:
                if _forsaken():
                    break
                self._wakeup.wait(IDLE_LOOK_S)
            inbox, self._inbox = self._inbox, []
            return inbox

    def _enter(self, handle: Handle, group: list[NewRequest], submitted_s: float) -> None:
        try:
            for index, new in enumerate(group):
                assert isinstance(new.judge, TextJudge)
                self._live[new.number] = _Live(handle, index, new.judge, submitted_s)
            self._book.submit_all(group, self.clock())
        except KimiCoreError as error:
            for new in group:
                self._live.pop(new.number, None)
            handle.fail(error)
        finally:
            with self._wakeup:
                self._queued -= len(group)

    def _step(self) -> None:
        book = self._book
        plan = self._planner.plan(book.view(self.clock()), self._cost)
        bound = book.bind(plan)
        if not bound.rows:
            self._tell(book.take_events())
            with self._wakeup:
                if not self._inbox and not self._stop and not self._moves.over:
                    self._wakeup.wait(BLOCKED_LOOK_S)
            return
        self._moves.before_writes()
        self._publish()  # who was admitted no longer waits, for the queue's limit above all
        begun_s = self.clock()
        result = self.runner.run(bound)
        now_s = self.clock()
        self._step_s += 0.1 * (now_s - begun_s - self._step_s) if self._step_s else now_s - begun_s
        self._cost.observe(now_s - begun_s, *step_load(bound.rows))
        self._tell(book.commit(bound, result, now_s))

    # ------------------------------------------------------------ telling

    def _publish(self) -> None:
        self.stats = stats = self._book.stats(self._step_s, self._planner.faults)
        if self._refused:
            self.stats = evolve(stats, requests_refused=stats.requests_refused + self._refused)
        if stats.disk is not None:
            self.stats = evolve(self.stats, disk=self._moves.with_faults(stats.disk))
        self._waiting = stats.requests_waiting
        self._retry_after_s = self._book.retry_after_s

    def _tell(self, events: Sequence[Event]) -> None:
        """Make what happened visible: the figures first, so that a woken reader sees them."""
        self._publish()
        for event in events:
            live = self._live.get(event.request)
            if live is None:
                continue
            if isinstance(event, Tokens):
                self._tell_tokens(live, event)
            elif isinstance(event, Finished):
                del self._live[event.request]
                self._tell_end(live, event)
            elif isinstance(event, Failed):
                self._tell_failure(live, event.error)

    def _tell_tokens(self, live: _Live, event: Tokens) -> None:
        if event.prompt_scores:
            live.handle.feed_prompt(event.prompt_scores)
        if event.tokens and not live.handle.feed(live.index, live.judge.take(), event.tokens, event.logprobs):
            self.cancel(live.handle)  # nobody is left to read

    def _tell_end(self, live: _Live, event: Finished) -> None:
        handle = live.handle
        first_s = event.finished_s if event.first_token_s is None else event.first_token_s
        started_s = event.finished_s if event.started_s is None else event.started_s
        timing = Timing(
            queue_s=max(0.0, started_s - event.arrived_s),
            ttft_s=first_s - live.submitted_s,
            total_s=event.finished_s - live.submitted_s,
        )
        handle.account(live.index, Usage(event.prompt_tokens, event.cached_tokens, event.completion_tokens), timing)
        live.judge.finish()
        handle.finish(live.index, event.reason, event.stop, live.judge.take())

    def _tell_failure(self, live: _Live, error: BaseException) -> None:
        """End the whole handle: its other choices are of no use without this one."""
        self._drop(live.handle)
        live.handle.fail(error)

    # ------------------------------------------------------------ the end

    def _refuse(self, inbox: Sequence[_Item]) -> None:
        for item in inbox:
            if isinstance(item, SinkCall):
                item.end(0, 0, EngineClosed("the engine was closed before this was written"))
            elif isinstance(item, tuple):
                item[0].fail(EngineClosed("the engine was closed before this request began"))

    def _fail_all(self, error: BaseException) -> None:
        with self._wakeup:
            self._failure = error
            inbox, self._inbox = self._inbox, []
        waiting = [item[0] for item in inbox if isinstance(item, tuple)]
        self._refuse([item for item in inbox if isinstance(item, SinkCall)])
        self._empty(error)
        for handle in [*{id(one.handle): one.handle for one in self._live.values()}.values(), *waiting]:
            failed = EngineFailed(f"a step of the engine failed: {error!r}")
            failed.__cause__ = error
            handle.fail(failed)
        self._live.clear()

    def _empty(self, error: BaseException) -> None:
        """Give every block back before anybody is told, so that a woken reader sees the figures of the end."""
        try:
            self._book.fail_all(error)
            self._publish()
        except Exception:  # the book itself broke: whoever waits has to learn of the end nevertheless
            _log.exception("the requests' blocks could not be given back")

    def _end(self, restore: int | None) -> None:
        closed = "the engine was closed before this request was finished"
        self._empty(EngineClosed(closed))
        for handle in {id(one.handle): one.handle for one in self._live.values()}.values():
            handle.fail(EngineClosed(closed))
        self._live.clear()
        self._moves.close(self._cost, self._config.shutdown_s / 4)
        self._publish()
        self._watchdog.stop()
        self.runner.close()
        if restore is not None and self._set_threads is not None:
            self._set_threads(restore)
        with self._wakeup:
            self._stopped = True
            inbox, self._inbox = self._inbox, []
            farewells, self._farewells = self._farewells, []
        self._refuse(inbox)
        for waker in farewells:
            waker.notify()
