"""What the asynchronous and the synchronous face share: opening, checking, submitting, results.

Nothing here waits for a request; the faces do, each in its own way.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kimicore.checks import integer, number
from kimicore.config import EngineConfig
from kimicore.errors import ConfigError, EngineClosed, ForkedProcess, InvalidRequest, ModelLoadError, PromptTooLong
from kimicore.handle import Asked, Handle, Job, Piece
from kimicore.intake import check_params, resolve_kv
from kimicore.sampling_params import SamplingParams
from kimicore.types import (
    TIERS,
    Candidate,
    Choice,
    EngineStats,
    GenerationResult,
    KVPrecision,
    Retention,
    StreamChunk,
    TokenLogprob,
    TokenScores,
)
from kimicore.wake import Waker

if TYPE_CHECKING:
    from kimicore.loop import EngineLoop
    from kimicore.text.tokenizer import Tokenizer

__all__ = ["Face", "check_tenant"]

MAX_NAME = 256


class Face:
    """One engine behind its faces; every method may be called from any thread."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        config: EngineConfig | None,
        progress: Callable[[str, int, int], None] | None,
    ) -> None:
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"config={config!r}: must be an EngineConfig")
        if not isinstance(model, (str, os.PathLike)):
            raise ModelLoadError(f"model={model!r}: must be an alias, a path or a hub id")
        self.config = EngineConfig() if config is None else config
        self._model, self._progress = model, progress
        self._pid = os.getpid()
        self._opening = threading.Lock()
        self._loop: EngineLoop | None = None
        self._closing = False

    # ------------------------------------------------------------ life

    @property
    def opened(self) -> bool:
        """Whether the model is loaded; raises where the engine cannot be used at all."""
        self._check_process()
        if self._closing:
            raise EngineClosed("the engine is closed; make a new one")
        return self._loop is not None

    def open(self) -> None:
        """Load the model and start the engine's thread, once; blocks while another thread does so."""
        with self._opening:
            if self.opened:
                return
            from kimicore.assembly import assemble

            loop = assemble(self._model, self.config, self._progress)
            loop.start()
            self._loop = loop
            if self._closing:
                loop.request_stop()

    def begin_close(self) -> None:
        """Tell the engine's thread to end after the running step; pending requests fail now."""
        self._closing = True
        if self._loop is not None and os.getpid() == self._pid:
            self._loop.request_stop()

    def when_closed(self, waker: Waker) -> bool:
        """Notify ``waker`` when the engine's thread has ended; True where there is nothing to wait for."""
        loop = self._loop
        return loop is None or os.getpid() != self._pid or not loop.notify_when_stopped(waker)

    @property
    def closed(self) -> bool:
        """Whether the engine's thread has ended."""
        return self._loop is None or self._loop.stopped

    def end_close(self) -> None:
        """Fail what is still pending after the shutdown's time is over."""
        if self._loop is not None and os.getpid() == self._pid:
            self._loop.abandon()

    def __del__(self) -> None:
        loop = getattr(self, "_loop", None)
        if loop is not None and os.getpid() == self._pid:
            loop.request_stop()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"this engine was made in process {self._pid} and is used in its fork {os.getpid()}: "
                "start the child with the 'spawn' method, or fork before the first engine opens"
            )

    @property
    def loop(self) -> EngineLoop:
        """The running engine; raises where it is closed or was never opened."""
        self._check_process()
        if self._closing or self._loop is None:
            raise EngineClosed("the engine is closed" if self._closing else "the engine is not open yet")
        return self._loop

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.loop.tokenizer

    @property
    def identity(self) -> tuple[str, str]:
        """What a sequence's KV and its token ids depend on: digests of the weights and of the tokenizer."""
        loop = self.loop
        weights = loop._book._contexts[0].weights
        return blake2b(weights, digest_size=16).hexdigest(), loop.tokenizer.version.hex()

    def stats(self) -> EngineStats:
        """Return counters and gauges as of the last step; also after closing."""
        self._check_process()
        if self._loop is None:
            raise EngineClosed("the engine is not open yet: it has no statistics")
        return self._loop.stats

    # ------------------------------------------------------------ requests

    def job(
        self,
        params: SamplingParams | None,
        sampling: Mapping[str, Any],
        asked: Asked,
    ) -> Job:
        """Check everything but the prompt; raises :class:`InvalidRequest`."""
        loop = self.loop
        chosen = SamplingParams.of(params, sampling)
        check_params(chosen, loop.tokenizer)
        timeout_s, tenant = asked.timeout_s, asked.tenant
        if timeout_s is not None:
            timeout_s = number("timeout_s", timeout_s, 0.0, 1e9, InvalidRequest)
        check_tenant(tenant)
        _check_name("request_id", asked.request_id or "")
        priority = integer("priority", asked.priority, -(1 << 31), 1 << 31, InvalidRequest)
        if asked.tier not in TIERS:
            raise InvalidRequest(f"tier={asked.tier!r}: must be one of {', '.join(TIERS)}")
        retain = (asked.retain,) if isinstance(asked.retain, Retention) else asked.retain
        if not isinstance(retain, Sequence) or not all(isinstance(one, Retention) for one in retain):
            raise InvalidRequest(f"retain={retain!r}: must be a list of kimicore.Retention")
        kv = resolve_kv(asked.kv, self.config)
        checked = Asked(
            priority, asked.tier, tuple(retain), timeout_s, tenant, asked.request_id or None, asked.keep, kv
        )
        return Job(chosen, checked, loop.clock())

    def limit_tokens(self, precision: KVPrecision) -> int:
        """Return the longest prompt that is served in a precision of its KV."""
        loop = self.loop
        return min(loop.limit_tokens, loop._book.capacities[precision] - 1)

    def encode(self, text: str, parse_special: bool, precision: KVPrecision) -> Sequence[int]:
        """Return the token ids of ``text``; refuses what cannot fit before tokenizing it as a whole."""
        if not isinstance(parse_special, bool):
            raise InvalidRequest(f"parse_special={parse_special!r}: must be True or False")
        limit = self.limit_tokens(precision)
        return self.tokenizer.encode(text, parse_special=parse_special, max_tokens=limit)

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: str | None,
        variables: Mapping[str, Any],
        precision: KVPrecision,
    ) -> Sequence[int]:
        """Return the token ids of a conversation, ready for the answer."""
        from kimicore.text.chat import render_chat

        limit = self.limit_tokens(precision)
        return render_chat(self.tokenizer, messages, template=template, max_tokens=limit, variables=variables)

    def check_ids(self, prompt: Any, precision: KVPrecision) -> Sequence[int]:
        """Return ``prompt`` as token ids, or raise :class:`InvalidRequest` that names what is wrong."""
        if isinstance(prompt, (bytes, bytearray)):
            raise InvalidRequest("prompt: bytes are not taken; decode them to text, or give token ids")
        if not isinstance(prompt, Sequence) and not hasattr(prompt, "__array__"):
            raise InvalidRequest(f"prompt: must be text or a sequence of token ids, not {type(prompt).__name__}")
        if getattr(prompt, "ndim", 1) != 1:
            raise InvalidRequest("prompt: an array of token ids must have one dimension")
        limit_tokens = self.limit_tokens(precision)
        if len(prompt) > limit_tokens:
            raise too_long(len(prompt), limit_tokens)
        high = self.loop.vocab_tokens - 1
        return [integer(f"prompt[{i}]", one, 0, high, InvalidRequest) for i, one in enumerate(prompt)]

    def submit(
        self, job: Job, ids: Sequence[int], waker: Waker, *, wake_each: bool, kept: list[Handle] | None = None
    ) -> Handle:
        """Hand the request to the engine's thread and return its handle, which is in ``kept`` before that."""
        if not ids:
            raise InvalidRequest("prompt: it has no tokens, and this model begins with none; give at least one")
        loop = self.loop
        limit_tokens = self.limit_tokens(job.precision)
        if len(ids) > limit_tokens:
            raise too_long(len(ids), limit_tokens)
        seed = job.params.seed if job.params.seed is not None else secrets.randbits(64)
        return loop.submit(job, ids, seed, waker, wake_each=wake_each, kept=kept)

    def cancel(self, handle: Handle) -> None:
        """Cancel what has not ended of ``handle``; never waits."""
        if not handle.done and self._loop is not None and os.getpid() == self._pid:
            self._loop.cancel(handle)

    # ------------------------------------------------------------ results

    def chunks(self, job: Job | None, handle: Handle) -> list[StreamChunk]:
        """Return what came since the last call as chunks."""
        assert job is not None
        return [
            StreamChunk(
                index=index,
                text="".join(piece.text),
                token_ids=tuple(piece.token_ids),
                finish_reason=piece.finish_reason,
                stop=piece.stop,
                logprobs=self._logprobs(job, piece),
            )
            for index, piece in handle.take()
        ]

    def result(self, job: Job, ids: Sequence[int], handle: Handle) -> GenerationResult:
        """Return the whole result of an ended request, or raise what ended it."""
        handle.raise_error()
        return self._result(job, ids, handle, dict(handle.take()))

    def summary(
        self, job: Job | None, ids: Sequence[int], handle: Handle | None, chunks: Sequence[StreamChunk]
    ) -> GenerationResult:
        """Return a stream's result from its chunks; raises where it was not read to its end."""
        if handle is not None:
            handle.raise_error()
        if job is None or handle is None or sum(1 for one in chunks if one.finish_reason) < len(handle.numbers):
            raise InvalidRequest("the stream was not read to its end: only then is there a result")
        parts: dict[int, list[StreamChunk]] = {}
        for chunk in chunks:
            parts.setdefault(chunk.index, []).append(chunk)
        choices = tuple(_joined(index, found, job) for index, found in sorted(parts.items()))
        return self._whole(job, ids, handle, choices)

    def _result(self, job: Job, ids: Sequence[int], handle: Handle, pieces: Mapping[int, Piece]) -> GenerationResult:
        choices = tuple(
            Choice(
                index=index,
                text="".join(piece.text),
                token_ids=tuple(piece.token_ids),
                finish_reason=piece.finish_reason or "length",
                stop=piece.stop,
                logprobs=self._logprobs(job, piece),
            )
            for index, piece in sorted(pieces.items())
        )
        return self._whole(job, ids, handle, choices)

    def _whole(self, job: Job, ids: Sequence[int], handle: Handle, choices: tuple[Choice, ...]) -> GenerationResult:
        prompt = None
        if job.params.prompt_logprobs is not None:
            scores: list[TokenScores | None] = [None, *handle.prompt_scores()]
            prompt = tuple(self._token(one, score) for one, score in zip(ids, scores, strict=True))
        return GenerationResult(handle.request_id, choices, handle.usage, handle.timing, prompt)

    def _logprobs(self, job: Job, piece: Piece) -> tuple[TokenLogprob, ...] | None:
        if job.params.logprobs is None:
            return None
        pairs = zip(piece.token_ids, piece.scores, strict=True)
        return tuple(self._token(token_id, scores) for token_id, scores in pairs)

    def _token(self, token_id: int, scores: TokenScores | None) -> TokenLogprob:
        text = self._loop.tokenizer if self._loop is not None else None
        assert text is not None
        if scores is None:
            return TokenLogprob(token_id, None, text.token_bytes(token_id))
        top = tuple(Candidate(one, value, text.token_bytes(one)) for one, value in scores.top)
        return TokenLogprob(token_id, scores.logprob, text.token_bytes(token_id), top)


def _joined(index: int, chunks: Sequence[StreamChunk], job: Job) -> Choice:
    """Return the choice that its chunks make up."""
    scores = tuple(score for one in chunks for score in one.logprobs or ())
    return Choice(
        index=index,
        text="".join(one.text for one in chunks),
        token_ids=tuple(token for one in chunks for token in one.token_ids),
        finish_reason=chunks[-1].finish_reason or "length",
        stop=chunks[-1].stop,
        logprobs=None if job.params.logprobs is None else scores,
    )


def check_tenant(tenant: Any) -> str:
    """Return a tenant's name, or raise :class:`InvalidRequest`."""
    name = _check_name("tenant", tenant)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"tenant={name!r}: must be text that UTF-8 can hold") from error
    return name


def _check_name(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise InvalidRequest(f"{name}={value!r}: must be a string of at most {MAX_NAME} characters")
    return value


def too_long(prompt_tokens: int, limit_tokens: int) -> PromptTooLong:
    """Return the error for a prompt of ``prompt_tokens`` where ``limit_tokens`` are taken."""
    return PromptTooLong(
        f"the prompt has {prompt_tokens} tokens and this engine takes at most {limit_tokens} "
        "(the smaller of the model's context less one token and the KV arena): shorten it, or raise "
        "context_tokens or kv_device_bytes",
        prompt_tokens=prompt_tokens,
        limit_tokens=limit_tokens,
    )
