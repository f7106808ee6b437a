"""The same conversation for scripts and notebooks: plain calls, no event loop."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import kimicore.sync  # the module, not its names: the two import each other
from kimicore.checks import number
from kimicore.errors import InvalidRequest
from kimicore.sampling_params import SamplingParams
from kimicore.turns import SavedSession, Turn, Turns, new_messages
from kimicore.types import GenerationResult, Tier
from kimicore.wake import ThreadWaker

__all__ = ["SyncSession"]


class SyncSession:
    """A conversation that keeps its messages and its KV; made by :meth:`kimicore.SyncEngine.session`.

    Arguments, results and errors are those of :class:`~kimicore.Session`. An interrupt (Ctrl-C) during a turn leaves
    the session as it was.
    """

    def __init__(self, engine: kimicore.sync.SyncEngine, turns: Turns) -> None:
        self._engine, self._turns = engine, turns

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the conversation so far, the messages that it began with included."""
        return self._turns.messages

    @property
    def turns(self) -> int:
        """How many replies there are."""
        return self._turns.history.turns

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The last prompt and its reply as token ids; empty before the first turn."""
        return self._turns.history.token_ids

    def chat(
        self,
        content: str | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        role: str = "user",
        priority: int = 0,
        tier: Tier = "standard",
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> GenerationResult:
        """Add ``content`` to the conversation, have it answered, and add the reply; see :meth:`Session.chat`."""
        turn = Turn(self._turns, new_messages(content, role))
        try:
            turn.begin()
            self._engine.open()
            job = turn.job(params, sampling, priority, tier, timeout_s)
            result = kimicore.sync.finish(self._engine.face, job, turn.prompt())
            turn.enter(result)
        finally:
            turn.drop()
        return result

    def stream_chat(
        self,
        content: str | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        role: str = "user",
        priority: int = 0,
        tier: Tier = "standard",
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> kimicore.sync.SyncStream:
        """Return an iterator of chunks of what :meth:`chat` would return; the turn begins at once.

        The reply is added when the last chunk is read; a stream that is left before leaves the session as it was.
        """
        turn = Turn(self._turns, new_messages(content, role))
        try:
            turn.begin()
            self._engine.open()
            job = turn.job(params, sampling, priority, tier, timeout_s)
            return kimicore.sync.SyncStream(self._engine.face, job, turn.prompt(), turn)
        except BaseException:
            turn.drop()
            raise

    def save(self, path: str | PathLike[str], *, timeout_s: float = 30.0) -> SavedSession:
        """Write the conversation, and with a disk tier its KV, to disk; see :meth:`Session.save`."""
        limit_s = number("timeout_s", timeout_s, 0.0, 1e9, InvalidRequest)
        history = self._turns.history
        waker = ThreadWaker()
        call = self._turns.sink(history, waker)
        until_s = time.monotonic() + limit_s
        while call is not None and not call.done and (left_s := until_s - time.monotonic()) > 0:
            waker.wait(left_s)
        return self._turns.write(path, history, call)

    def fork(self) -> SyncSession:
        """Return a session of its own with the same history; a turn on its way is not part of it."""
        return SyncSession(self._engine, self._turns.fork())
