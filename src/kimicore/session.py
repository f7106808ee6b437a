"""A conversation with an engine, for asynchronous applications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import anyio
from anyio import to_thread

import kimicore.engine  # the module, not its names: the two import each other
from kimicore.checks import number
from kimicore.errors import InvalidRequest
from kimicore.handle import Job, SinkCall
from kimicore.sampling_params import SamplingParams
from kimicore.turns import SavedSession, Turn, Turns, new_messages
from kimicore.types import GenerationResult, Tier
from kimicore.wake import AsyncWaker

__all__ = ["Session"]


class Session:
    """A conversation that keeps its messages; made by :meth:`kimicore.Engine.session`.

    Every turn's prompt begins with the very tokens of the turns before, replies included, so their KV is computed once.
    Where the template writes earlier messages otherwise than before, the prompt is tokenized anew from there on: the
    reply is right all the same, and more of it is computed.

    One turn at a time; a session may be used from several event loops and threads. With a disk tier its KV outlives
    the engine's memory, and with :meth:`save` the whole session outlives the process.
    """

    def __init__(self, engine: kimicore.engine.Engine, turns: Turns) -> None:
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

    async def chat(
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
        """Add ``content`` to the conversation, have it answered, and add the reply.

        ``content``: text or a list of text parts, from ``role``; or a message (a mapping with ``role`` and
        ``content``), or a list of messages. The other arguments are those of :meth:`kimicore.Engine.generate`, and so
        are the errors; ``n`` is 1. A turn that fails or is cancelled leaves the session as it was, and so does one that
        begins while another is on its way: that is a :class:`~kimicore.InvalidRequest`.
        """
        turn = Turn(self._turns, new_messages(content, role))
        face = self._engine.face
        turn.begin()
        try:
            await self._engine.open()
            job = turn.job(params, sampling, priority, tier, timeout_s)
            ids = await to_thread.run_sync(turn.prompt, abandon_on_cancel=True)
            result = await kimicore.engine.finish(face, job, ids)
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
    ) -> kimicore.engine.Stream:
        """Return a :class:`Stream` of what :meth:`chat` would return; the arguments are the same.

        The turn begins when the stream does. The reply is added when its last chunk is read; a stream that is left
        before leaves the session as it was.
        """
        turn = Turn(self._turns, new_messages(content, role))

        def job_of() -> Job:
            return turn.job(params, sampling, priority, tier, timeout_s)

        async def ids_of(job: Job) -> Sequence[int]:
            return await to_thread.run_sync(turn.prompt, abandon_on_cancel=True)

        return kimicore.engine.Stream(self._engine, job_of, ids_of, turn)

    async def save(self, path: str | PathLike[str], *, timeout_s: float = 30.0) -> SavedSession:
        """Write the conversation to ``path``, for ``resume=``; with a disk tier, its KV to disk before that.

        ``timeout_s``: how long to wait for the KV; what is not on disk by then is computed anew some day. The file is
        written whole or not at all, also when this is cancelled, and only its owner may read it: it holds the
        conversation in the clear. A turn on its way is not part of it.

        Raises :class:`~kimicore.ConfigError` where the file cannot be written.
        """
        limit_s = number("timeout_s", timeout_s, 0.0, 1e9, InvalidRequest)
        history = self._turns.history
        waker = AsyncWaker()
        call = self._turns.sink(history, waker)
        if call is not None:
            await _settle(call, waker, limit_s)
        # Not abandoned when cancelled: nothing writes to the path any more once this has ended.
        return await to_thread.run_sync(self._turns.write, path, history, call)

    def fork(self) -> Session:
        """Return a session of its own with the same history; a turn on its way is not part of it."""
        return Session(self._engine, self._turns.fork())


async def _settle(call: SinkCall, waker: AsyncWaker, timeout_s: float) -> None:
    with anyio.move_on_after(timeout_s):
        while not call.done:
            await waker.wait()
