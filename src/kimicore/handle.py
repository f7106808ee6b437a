"""The thread-safe slot between the engine's thread, which fills it, and one reader.

Whatever comes before the reader looks is merged, so that a slow reader costs no blocks, stalls nobody and
holds at most its own request's output.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from attrs import define, field, frozen

from kimicore.sampling_params import SamplingParams
from kimicore.types import FinishReason, KVPrecision, Retention, Tier, Timing, TokenScores, Usage
from kimicore.wake import Waker

__all__ = ["Asked", "Handle", "Job", "KVWish", "Piece", "SinkCall"]


@frozen
class KVWish:
    """What a caller says of a request's KV: its domain or its precision, and which share of its blocks is read."""

    domain: str | None = None
    precision: KVPrecision | None = None
    share: float | None = None


@frozen
class Asked:
    """What a caller says about a request beside its prompt and its sampling."""

    priority: int
    tier: Tier
    retain: Sequence[Retention]
    timeout_s: float | None
    tenant: str
    request_id: str | None
    keep: bool = False
    kv: KVWish = KVWish()


@define(eq=False)
class SinkCall:
    """A caller's wish to have a sequence's KV on disk; ``stored`` of ``blocks`` are there once it is ``done``."""

    token_ids: Sequence[int]
    prompt_tokens: int
    tenant: str
    precision: KVPrecision | None
    waker: Waker
    blocks: int = 0
    stored: int = 0
    error: BaseException | None = None
    done: bool = False

    def end(self, blocks: int, stored: int, error: BaseException | None = None) -> None:
        """Tell the caller how it ended; called once, from any thread."""
        self.blocks, self.stored, self.error = blocks, stored, error
        self.done = True
        self.waker.notify()


@frozen
class Job:
    """A checked request, before its prompt is known in tokens."""

    params: SamplingParams
    asked: Asked
    submitted_s: float

    @property
    def precision(self) -> KVPrecision:
        """Of its KV."""
        return self.asked.kv.precision or "full"


@define
class Piece:
    """Unread output of one choice."""

    text: list[str] = field(factory=list)
    token_ids: list[int] = field(factory=list)
    scores: list[TokenScores] = field(factory=list)
    finish_reason: FinishReason | None = None
    stop: str | int | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.token_ids or self.finish_reason)


class Handle:
    """One caller's request with its ``n`` choices; fed by the engine's thread, read by one reader."""

    def __init__(self, request_id: str, numbers: Sequence[int], waker: Waker, *, wake_each: bool) -> None:
        self.request_id = request_id
        self.numbers = tuple(numbers)
        self._waker = waker
        self._wake_each = wake_each
        self._lock = threading.Lock()
        self._pieces = [Piece() for _ in self.numbers]
        self._open = set(range(len(self.numbers)))
        self._prompt_scores: list[TokenScores] = []
        self._error: BaseException | None = None
        self._dead_reader = False
        self._accounted = 0
        self.usage = Usage(0, 0, 0)
        self.timing = Timing(0.0, 0.0, 0.0)

    # ------------------------------------------------------------ the engine's side

    def feed(self, index: int, text: str, token_ids: Sequence[int], scores: Sequence[TokenScores] | None) -> bool:
        """Add output of choice ``index``; False where nobody can read it any more."""
        with self._lock:
            piece = self._pieces[index]
            if text:
                piece.text.append(text)
            piece.token_ids.extend(token_ids)
            if scores:
                piece.scores.extend(scores)
        return self._wake() if self._wake_each else not self._dead_reader

    def feed_prompt(self, scores: Sequence[TokenScores]) -> None:
        """Add scores of further prompt positions."""
        with self._lock:
            self._prompt_scores.extend(scores)

    def account(self, index: int, usage: Usage, timing: Timing) -> None:
        """Add the counts of choice ``index``: the prompt counts once, the first choice's cache hits, every output."""
        with self._lock:
            old = self.usage
            cached = usage.cached_tokens if index == 0 else old.cached_tokens
            self.usage = Usage(usage.prompt_tokens, cached, old.completion_tokens + usage.completion_tokens)
            first = timing if self._accounted == 0 else self.timing
            self._accounted += 1
            self.timing = Timing(
                queue_s=min(timing.queue_s, first.queue_s),
                ttft_s=min(timing.ttft_s, first.ttft_s),
                total_s=max(timing.total_s, first.total_s),
            )

    def finish(self, index: int, reason: FinishReason, stop: str | int | None, text: str) -> bool:
        """End choice ``index`` with its last ``text``; True when this was the last open choice."""
        with self._lock:
            if index not in self._open:
                return False
            piece = self._pieces[index]
            if text:
                piece.text.append(text)
            piece.finish_reason, piece.stop = reason, stop
            self._open.discard(index)
            last = not self._open
        if last or self._wake_each:
            self._wake()
        return last

    def fail(self, error: BaseException) -> bool:
        """End the whole request with ``error``; False where it had ended already."""
        with self._lock:
            if not self._open or self._error is not None:
                return False
            self._error = error
            self._open.clear()
        self._wake()
        return True

    def _wake(self) -> bool:
        if not self._dead_reader and not self._waker.notify():
            self._dead_reader = True
        return not self._dead_reader

    # ------------------------------------------------------------ the reader's side

    @property
    def done(self) -> bool:
        """Whether every choice has ended (well or not)."""
        return not self._open

    @property
    def error(self) -> BaseException | None:
        """What ended the request, where it did not end well."""
        return self._error

    def prompt_scores(self) -> tuple[TokenScores, ...]:
        """Return the scores of the prompt's positions so far, from its second token on."""
        with self._lock:
            return tuple(self._prompt_scores)

    def take(self) -> list[tuple[int, Piece]]:
        """Return what came since the last call, per choice."""
        with self._lock:
            taken = [(index, piece) for index, piece in enumerate(self._pieces) if piece]
            for index, _ in taken:
                self._pieces[index] = Piece()
        return taken

    def raise_error(self) -> None:
        """Raise what ended the request, where it did not end well."""
        if self._error is not None:
            raise self._error
