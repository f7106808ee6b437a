"""The same engine for scripts and notebooks: plain calls, no event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Self

import kimicore.sync_session  # the module, not its names: the two import each other
from kimicore.config import EngineConfig
from kimicore.errors import InvalidRequest
from kimicore.face import Face
from kimicore.handle import Asked, Handle, Job, KVWish
from kimicore.sampling_params import SamplingParams
from kimicore.turns import Turn, Turns
from kimicore.types import EngineStats, GenerationResult, KVPrecision, Retention, StreamChunk, Tier
from kimicore.wake import ThreadWaker

__all__ = ["SyncEngine", "SyncStream", "finish"]


class SyncEngine:
    """The engine with blocking methods; may be used from many threads at once, whose requests share batches.

    The arguments, results and errors are those of :class:`~kimicore.Engine`. An interrupt (Ctrl-C) during a
    call cancels its request.
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

    def open(self) -> None:
        """Load the model if that has not been done."""
        if not self._face.opened:
            self._face.open()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine; waits for the running step, at most ``shutdown_s``; may be called twice."""
        self._face.begin_close()
        waker = ThreadWaker()
        if not self._face.when_closed(waker):
            end_s = time.monotonic() + self.config.shutdown_s
            while not self._face.closed and time.monotonic() < end_s:
                waker.wait(max(0.0, end_s - time.monotonic()))
        self._face.end_close()

    def generate(
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
        """Generate a continuation of ``prompt`` and return it whole; see :meth:`kimicore.Engine.generate`."""
        self.open()
        kv = KVWish(domain, kv_precision, sparse_decode)
        asked = Asked(priority, tier, retain, timeout_s, tenant, request_id, kv=kv)
        job = self._face.job(params, sampling, asked)
        return finish(self._face, job, self._ids(prompt, job, parse_special))

    def generate_many(
        self,
        prompts: Iterable[str | Sequence[int]],
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
        parse_special: bool = False,
        **sampling: Any,
    ) -> list[GenerationResult]:
        """Generate for all ``prompts`` in one go and return the results in their order.

        The first error cancels the others and is raised.
        """
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise InvalidRequest(f"prompts: must be a list of prompts, not {type(prompts).__name__}")
        prompts = list(prompts)
        self.open()
        kv = KVWish(domain, kv_precision, sparse_decode)
        asked = Asked(priority, tier, retain, timeout_s, tenant, None, kv=kv)
        jobs = [self._face.job(params, sampling, asked) for _ in prompts]
        all_ids = [self._ids(prompt, job, parse_special) for prompt, job in zip(prompts, jobs, strict=True)]
        waker = ThreadWaker()
        handles: list[Handle] = []
        try:
            for job, ids in zip(jobs, all_ids, strict=True):
                self._face.submit(job, ids, waker, wake_each=False, kept=handles)
            while not all(one.done for one in handles) and not any(one.error for one in handles):
                waker.wait()
            for one in handles:
                one.raise_error()
        finally:
            for one in handles:
                self._face.cancel(one)
        return [self._face.result(*one) for one in zip(jobs, all_ids, handles, strict=True)]

    def chat(
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
        """Answer ``messages`` through the model's chat template; see :meth:`kimicore.Engine.chat`."""
        self.open()
        kv = KVWish(domain, kv_precision, sparse_decode)
        asked = Asked(priority, tier, retain, timeout_s, tenant, request_id, kv=kv)
        job = self._face.job(params, sampling, asked)
        return finish(
            self._face, job, self._face.chat_ids(messages, template, dict(template_variables or {}), job.precision)
        )

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
    ) -> SyncStream:
        """Return an iterator of chunks of what :meth:`generate` would return; leaving it cancels the rest."""
        self.open()
        kv = KVWish(domain, kv_precision, sparse_decode)
        asked = Asked(priority, tier, retain, timeout_s, tenant, request_id, kv=kv)
        job = self._face.job(params, sampling, asked)
        return SyncStream(self._face, job, self._ids(prompt, job, parse_special))

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
    ) -> SyncStream:
        """Return an iterator of chunks of what :meth:`chat` would return."""
        self.open()
        kv = KVWish(domain, kv_precision, sparse_decode)
        asked = Asked(priority, tier, retain, timeout_s, tenant, request_id, kv=kv)
        job = self._face.job(params, sampling, asked)
        return SyncStream(
            self._face, job, self._face.chat_ids(messages, template, dict(template_variables or {}), job.precision)
        )

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
    ) -> kimicore.sync_session.SyncSession:
        """Return a conversation that keeps its messages and its KV; see :meth:`kimicore.Engine.session`."""
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
        return kimicore.sync_session.SyncSession(self, turns)

    def stats(self) -> EngineStats:
        """Return counters and gauges as of the last step."""
        return self._face.stats()

    def _ids(self, prompt: Any, job: Job, parse_special: bool) -> Sequence[int]:
        if isinstance(prompt, str):
            return self._face.encode(prompt, parse_special, job.precision)
        return self._face.check_ids(prompt, job.precision)


def finish(face: Face, job: Job, ids: Sequence[int]) -> GenerationResult:
    """Submit a checked request and return its whole result; an interrupt cancels the request."""
    waker = ThreadWaker()
    handles: list[Handle] = []
    try:
        handle = face.submit(job, ids, waker, wake_each=False, kept=handles)
        while not handle.done:
            waker.wait()
    finally:
        for one in handles:
            face.cancel(one)
    return face.result(job, ids, handle)


class SyncStream:
    """Chunks of one request as they come: a context manager and an iterator."""

    def __init__(self, face: Face, job: Job, ids: Sequence[int], turn: Turn | None = None) -> None:
        self._face, self._job, self._ids = face, job, ids
        self._turn = turn  # of a session, whose history gets the reply with the last chunk
        self._waker = ThreadWaker()
        self._handle: Handle | None = None
        kept: list[Handle] = []
        try:
            self._handle = face.submit(job, ids, self._waker, wake_each=True, kept=kept)
        except BaseException:
            for one in kept:
                face.cancel(one)
            raise
        self._ready: list[StreamChunk] = []
        self._read: list[StreamChunk] = []
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        """Return the next chunk; raises what ended the request, or ``StopIteration`` at its end."""
        assert self._handle is not None
        while not self._closed:
            done = self._handle.done
            if not self._ready:
                self._ready.extend(self._face.chunks(self._job, self._handle))
            if self._ready:
                self._read.append(self._ready.pop(0))
                if self._turn is not None and self._read[-1].finish_reason:
                    self._turn.enter(self.result())
                return self._read[-1]
            if done:
                self._drop_turn()
                self._handle.raise_error()
                break
            self._waker.wait()
        raise StopIteration

    def close(self) -> None:
        """Cancel the request if it has not ended."""
        self._closed = True
        self._drop_turn()
        if self._handle is not None:
            self._face.cancel(self._handle)
            self._waker.notify()

    def _drop_turn(self) -> None:
        if self._turn is not None:
            self._turn.drop()

    def result(self) -> GenerationResult:
        """Return what :meth:`SyncEngine.generate` would have, once the stream was read to its end."""
        return self._face.summary(self._job, self._ids, self._handle, self._read)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.close()
