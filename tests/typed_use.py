"""An application as a type checker sees it: ``tests/test_public.py`` has mypy check this file, nothing runs it."""

from __future__ import annotations

from typing import assert_type

import kimicore
from kimicore import Choice, Engine, EngineStats, GenerationResult, StreamChunk, SyncEngine, TokenLogprob, Usage


async def with_an_event_loop(engine: Engine) -> None:
    """Entering, generating and streaming give the types that their documentation names."""
    async with engine as entered:
        assert_type(entered, Engine)
        result = await entered.generate("a", kimicore.SamplingParams(n=2), seed=1)
        assert_type(result, GenerationResult)
        assert_type(result.text, str)
        assert_type(result.choices, tuple[Choice, ...])
        assert_type(result.logprobs, tuple[TokenLogprob, ...] | None)
        assert_type(result.usage, Usage)
        async with entered.stream([1, 2], max_tokens=1) as chunks:
            async for chunk in chunks:
                assert_type(chunk, StreamChunk)
        assert_type(chunks.result(), GenerationResult)
        assert_type(entered.stats(), EngineStats)


def without_one(engine: SyncEngine) -> None:
    """The plain face has the same types."""
    with engine as entered:
        assert_type(entered, SyncEngine)
        assert_type(entered.generate_many(["a"]), list[GenerationResult])
        with entered.stream_chat([{"role": "user", "content": "a"}]) as chunks:
            for chunk in chunks:
                assert_type(chunk, StreamChunk)


def figures(full: kimicore.Overloaded, long: kimicore.PromptTooLong) -> None:
    """Errors carry their figures."""
    assert_type(full.retry_after_s, float)
    assert_type(long.limit_tokens, int)
