"""The engine as an asynchronous application sees it; the same code on asyncio and on trio."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Self

import anyio
from anyio import to_thread

import kimicore.session  # the module, not its names: the two import each other
from kimicore.config import EngineConfig
from kimicore.errors import InvalidRequest
from kimicore.face import Face
from kimicore.handle import Asked, Handle, Job, KVWish
from kimicore.sampling_params import SamplingParams
from kimicore.turns import Turn, Turns
from kimicore.types import EngineStats, GenerationResult, KVPrecision, Retention, StreamChunk, Tier
from kimicore.wake import AsyncWaker

__all__ = ["Engine", "Stream", "finish"]

INLINE_CHARACTERS = 2_000
"""Prompts up to this length are tokenized where they stand (about 0.3 ms); longer ones in a worker thread."""


class Engine:
    """One model, ready to generate for many concurrent requests in this process.

    ``model``: a demo model's alias, a folder with ``config.json`` and safetensors, a GGUF file, or a hub id.
    ``config``: settings. ``progress``: called with ``(what, done, total)`` while the model is fetched and loaded.

    Use it as an async context manager; entering loads the model (in a worker thread: the event loop goes on)
    and leaving closes the engine. The first ``generate`` opens an engine that was not entered. An engine
    belongs to no event loop: it may be used from several, one after another or at once, and from threads.

    Raises :class:`~kimicore.ModelLoadError` or :class:`~kimicore.ConfigError` when it opens.
    """

    def __init__(
        self,
        model: str | PathLike[str],
        config: EngineConfig | None = None,
        *,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._face = Face(model, config, progress)

    @property
    def config(self) -> EngineConfig:
        """The settings."""
        return self._face.config

    @property
    def face(self) -> Face:
        """What is below, for tools that measure the engine; no part of the stable interface."""
        return self._face

    async def open(self) -> None:
        """Load the model if that has not been done; safe to call from several tasks.

        Cancelled, it leaves the loading to end by itself in the background; a later call takes it up.
        """
        if not self._face.opened:
            await to_thread.run_sync(self._face.open, abandon_on_cancel=True)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.aclose()

    async def aclose(self) -> None:
        """Close the engine: pending requests end with :class:`~kimicore.EngineClosed`, memory is given back.

        Waits for the running step, at most ``shutdown_s``. May be called twice, and by several tasks at once.
        """
        self._face.begin_close()
        waker = AsyncWaker()
        if not self._face.when_closed(waker):
            with anyio.move_on_after(self.config.shutdown_s):
                while not self._face.closed:
                    await waker.wait()
        self._face.end_close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tier: Tier = "standard",
        retain: Sequence[Retention] = (),
        domain: str | None = None,
        kv_precision: KVPrecision | None = None,
        sparse_decode: float | None = None,
        timeout_s: float | None = None,
        tenant: str = "",
        request_id: str | None = None,
        parse_special: bool = False,
        **sampling: Any,
    ) -> GenerationResult:
        """Generate a continuation of ``prompt`` (text, or token ids) and return it whole.

        ``params`` holds the sampling fields; keyword arguments build or change them. ``priority``: higher goes
        first under ``batching="priority"``. ``tier``: "interactive", "standard" or "background", which
        ``batching="tiered"`` goes by. ``retain``: parts of the prompt whose KV should stay cached for a time (see
        :class:`~kimicore.Retention`). ``timeout_s``: the request ends with
        :class:`~kimicore.RequestTimeout` after that many seconds, wherever it is. ``tenant``: prefixes are
        cached per tenant; no other tenant's request can hit them. ``parse_special``: special tokens written out in a
        text prompt are parsed; otherwise they stay text.

        ``domain``: the settings' ``kv_domains`` say what precision its KV has; or ``kv_precision``: "full", "int8" or
        "int4". ``sparse_decode``: generated tokens attend to about this share of the context, the blocks whose keys
        can matter most, with the first and the last; what they are then depends a little on preemptions as well.

        Cancelling the awaiting task raises at once; the request's blocks are free when the running step ends.
        Nothing of a cancelled request can be had. Raises :class:`~kimicore.InvalidRequest` before any work,
        :class:`~kimicore.Overloaded`, :class:`~kimicore.RequestTimeout`, :class:`~kimicore.RequestFailed`,
        :class:`~kimicore.EngineClosed`, :class:`~kimicore.EngineFailed`.
        """
        await self.open()
        kv = KVWish(domain, kv_precision, sparse_decode)
        asked = Asked(priority, tier, retain, timeout_s, tenant, request_id, kv=kv)
        job = self._face.job(params, sampling, asked)
        return await finish(self._face, job, await self._ids(prompt, job, parse_special))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        priority: int = 0,
        tier: Tier = "standard",
        retain: Sequence[Retention] = (),
        domain: str | None = None,
        kv_precision: KVPrecision | None = None,
        sparse_decode: float | None = None,
        timeout_s: float | None = None,
        tenant: str = "",
        request_id: str | None = None,
        **sampling: Any,
    ) -> GenerationResult:
        """Answer ``messages`` (mappings with ``role`` and ``content``) through the model's chat template.

        Special tokens in a message's content stay text. ``template``: a Jinja template instead of the model's.
        Otherwise as :meth:`generate`.
        """
        await self.open()
        kv = KVWish(domain, kv_precision, sparse_decode)
        asked = Asked(priority, tier, retain, timeout_s, tenant, request_id, kv=kv)
        job = self._face.job(params, sampling, asked)
        ids = await to_thread.run_sync(
            self._face.chat_ids,
            messages,
            template,
            dict(template_variables or {}),
            job.precision,
            abandon_on_cancel=True,
        )
        return await finish(self._face, job, ids)

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        tier: Tier = "standard",
        retain: Sequence[Retention] = (),
        domain: str | None = None,
        kv_precision: KVPrecision | None = None,
        sparse_decode: float | None = None,
        timeout_s: float | None = None,
        tenant: str = "",
        request_id: str | None = None,
        parse_special: bool = False,
        **sampling: Any,
    ) -> Stream:
        """Return a :class:`Stream` of what :meth:`generate` would return; the arguments are the same."""
        kv = KVWish(domain, kv_precision, sparse_decode)
        asked = Asked(priority, tier, retain, timeout_s, tenant, request_id, kv=kv)
        job_of = lambda: self._face.job(params, sampling, asked)  # noqa: E731
        return Stream(self, job_of, lambda job: self._ids(prompt, job, parse_special))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        priority: int = 0,
        tier: Tier = "standard",
        retain: Sequence[Retention] = (),
        domain: str | None = None,
        kv_precision: KVPrecision | None = None,
        sparse_decode: float | None = None,
        timeout_s: float | None = None,
        tenant: str = "",
        request_id: str | None = None,
        **sampling: Any,
    ) -> Stream:
        """Return a :class:`Stream` of what :meth:`chat` would return; the arguments are the same."""
        kv = KVWish(domain, kv_precision, sparse_decode)
        asked = Asked(priority, tier, retain, timeout_s, tenant, request_id, kv=kv)
        job_of = lambda: self._face.job(params, sampling, asked)  # noqa: E731

        async def ids_of(job: Job) -> Sequence[int]:
            variables = dict(template_variables or {})
            return await to_thread.run_sync(
                self._face.chat_ids, messages, template, variables, job.precision, abandon_on_cancel=True
            )

        return Stream(self, job_of, ids_of)

    def session(
        self,
        *,
        tenant: str = "",
        template: str | None = None,
        template_variables: Mapping[str, Any] | None = None,
        messages: Sequence[Mapping[str, Any]] = (),
        domain: str | None = None,
        kv_precision: KVPrecision | None = None,
        sparse_decode: float | None = None,
        resume: str | PathLike[str] | None = None,
        sink_after_turns: int = 200,
        sink_turns: int = 10,
    ) -> kimicore.session.Session:
        """Return a conversation that keeps its messages, and finds the KV of all its turns again.

        ``messages``: what it begins with, a system prompt for example. ``tenant``, ``template`` and
        ``template_variables``: as for :meth:`chat`, for every turn, and so ``domain``, ``kv_precision`` and
        ``sparse_decode``. ``resume``: a file that
        :meth:`kimicore.Session.save` wrote, to go on from; what stands in it is not to be given again.

        With a ``kv_disk_dir``: while the KV of more than ``sink_after_turns`` turns is not on disk, every turn has the
        oldest ``sink_turns`` of these written there in the background. They come back when the session goes on.

        Cheap, but for reading the file; the engine opens at the first turn. Raises
        :class:`~kimicore.InvalidRequest` for wrong arguments and :class:`~kimicore.ConfigError`, which names file and
        field, for a file that cannot be used.
        """
        turns = Turns.of(
            self._face,
            tenant=tenant,
            template=template,
            template_variables=template_variables,
            messages=messages,
            kv=KVWish(domain, kv_precision, sparse_decode),
            resume=resume,
            sink_after_turns=sink_after_turns,
            sink_turns=sink_turns,
        )
        return kimicore.session.Session(self, turns)

    def stats(self) -> EngineStats:
        """Return counters and gauges as of the last step."""
        return self._face.stats()

    async def _ids(self, prompt: str | Sequence[int], job: Job, parse_special: bool) -> Sequence[int]:
        if not isinstance(prompt, str):
            return self._face.check_ids(prompt, job.precision)
        if len(prompt) <= INLINE_CHARACTERS:
            return self._face.encode(prompt, parse_special, job.precision)
        return await to_thread.run_sync(self._face.encode, prompt, parse_special, job.precision, abandon_on_cancel=True)


async def finish(face: Face, job: Job, ids: Sequence[int]) -> GenerationResult:
    """Submit a checked request and return its whole result; cancelled, it cancels the request."""
    waker = AsyncWaker()
    handle = face.submit(job, ids, waker, wake_each=False)
    try:
        while not handle.done:
            await waker.wait()
    finally:
        face.cancel(handle)
    return face.result(job, ids, handle)


class Stream:
    """Chunks of one request as they come; an async context manager and an async iterator with a defined end.

    Leaving the context, :meth:`aclose` (from any task) or dropping the stream cancels what has not ended.
    It has one reader at a time. A slow reader gets larger chunks and never misses text. After the end,
    :meth:`result` has the whole.
    """

    def __init__(
        self, engine: Engine, job_of: Callable[[], Job], ids_of: Callable[[Job], Any], turn: Turn | None = None
    ) -> None:
        self._engine = engine
        self._face = engine._face
        self._job_of, self._ids_of = job_of, ids_of
        self._turn = turn  # of a session, whose history gets the reply with the last chunk
        self._job: Job | None = None
        self._handle: Handle | None = None
        self._waker: AsyncWaker | None = None
        self._ids: Sequence[int] = ()
        self._ready: list[StreamChunk] = []
        self._read: list[StreamChunk] = []
        self._reading = False
        self._closed = False

    async def __aenter__(self) -> Self:
        if not self._closed:
            await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamChunk:
        """Return the next chunk; raises what ended the request, or ``StopAsyncIteration`` at its end."""
        if self._closed:  # a stream that was closed before it began never begins
            raise StopAsyncIteration
        if self._reading:
            raise InvalidRequest("a stream has one reader at a time: read it in one task, and hand its chunks on")
        self._reading = True
        try:
            return await self._next(*await self._start())
        finally:
            self._reading = False

    async def _next(self, handle: Handle, waker: AsyncWaker) -> StreamChunk:
        while not self._closed:
            done = handle.done  # looked at first: what comes between the two looks is not lost
            if not self._ready:
                self._ready.extend(self._face.chunks(self._job, handle))
            if self._ready:
                self._read.append(self._ready.pop(0))
                if self._turn is not None and self._read[-1].finish_reason:
                    self._turn.enter(self.result())
                return self._read[-1]
            if done:
                self._drop_turn()
                handle.raise_error()
                break
            await waker.wait()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the request if it has not ended; nothing is awaited, so it cannot be cancelled itself."""
        self._close()

    def result(self) -> GenerationResult:
        """Return what :meth:`Engine.generate` would have, once the stream was read to its end."""
        return self._face.summary(self._job, self._ids, self._handle, self._read)

    async def _start(self) -> tuple[Handle, AsyncWaker]:
        if self._handle is None:
            await self._engine.open()
            try:
                if self._turn is not None:
                    self._turn.begin()
                self._job = self._job_of()
                self._ids = await self._ids_of(self._job)
                self._waker = AsyncWaker()
                self._handle = self._face.submit(self._job, self._ids, self._waker, wake_each=True)
            except BaseException:
                self._drop_turn()
                raise
            if self._closed:  # by another task, while the prompt was tokenized
                self._close()
        assert self._waker is not None
        return self._handle, self._waker

    def _drop_turn(self) -> None:
        if self._turn is not None:
            self._turn.drop()

    def _close(self) -> None:
        self._closed = True
        self._drop_turn()
        if self._handle is not None:
            self._face.cancel(self._handle)
            if self._waker is not None:
                self._waker.notify()

    def __del__(self) -> None:
        if hasattr(self, "_closed"):
            self._close()
