"""Cancellation in every state of a request: it raises at once, and everything is given back."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kimicore import Choice, Engine, EngineConfig, RequestTimeout
from kimicore.types import BoundStep
from kimicore.wake import AsyncWaker
from rigs.runners import around, gated
from rigs.settle import read, settled

pytestmark = pytest.mark.anyio
Alone = Callable[..., Choice]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


async def cancelled(engine: Engine, prompt: Any, when: Callable[[], Any], **asked: Any) -> bool:
    """Start a request, cancel it once ``when()`` returns on a worker thread; return whether it was cancelled."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def stop() -> None:
                await anyio.to_thread.run_sync(when)
                scope.cancel()

            group.start_soon(stop)
            await engine.generate(prompt, **asked)
            return False
    return True


async def test_while_it_is_tokenized(shared: Engine, alone: Alone) -> None:
    """A request that is cancelled while its text is tokenized raises at once and is never submitted
    (BerriAI/litellm#31499)."""
    tokenizer = shared.face.tokenizer
    encode = tokenizer.encode
    begun, free, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(text: str, **options: Any) -> list[int]:
        begun.set()
        free.wait(60)
        ended.set()
        return encode(text, **options)

    tokenizer.encode = slow  # type: ignore[method-assign]
    try:
        with around(shared) as runner:
            assert await cancelled(shared, "in the " * 1000, lambda: begun.wait(60), max_tokens=4)
            free.set()
            await anyio.to_thread.run_sync(ended.wait)
            await settled(shared)
            assert len(runner.seen()) == 1  # the last look's own request
    finally:
        tokenizer.encode = encode  # type: ignore[method-assign]
    result = await shared.generate([5], max_tokens=3, **GREEDY)
    assert result.choices[0] == alone([5], max_tokens=3, **GREEDY)


async def test_while_it_is_queued(tiny: Path) -> None:
    """A request that is cancelled in the queue never starts (BerriAI/litellm#31499)."""
    config = EngineConfig(dtype="float32", kv_device_bytes="1MiB", max_batch_size=1)
    async with Engine(tiny, config) as engine:
        with gated(engine) as gate:
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: engine.generate([5], max_tokens=6, **GREEDY))
                await anyio.to_thread.run_sync(gate.wait_step)
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as inner:
                        inner.start_soon(lambda: engine.generate([6], max_tokens=6, n=3, **GREEDY))
                        await anyio.wait_all_tasks_blocked()
                        scope.cancel()
                gate.open()
            assert len(gate.seen()) == 1
        assert engine.stats().requests_cancelled == 3
        await settled(engine)


async def test_during_the_prompt(tiny: Path) -> None:
    """A request that is cancelled in its prefill computes no further chunk (BerriAI/litellm#31499)."""
    config = EngineConfig(dtype="float32", kv_device_bytes="1MiB", max_batch_tokens=64)
    async with Engine(tiny, config) as engine:
        with gated(engine) as gate:
            gate.let(2)

            def third() -> None:
                for _ in range(3):
                    gate.wait_step()

            assert await cancelled(engine, [5] * 640, third, max_tokens=4)
            assert engine.stats().kv_blocks_used > 0
            gate.open()
            await settled(engine)
            chunks = [step[min(gate.seen())] for step in gate.steps if min(gate.seen()) in step]
        assert chunks == [(0, 64), (64, 64), (128, 64)]
        await settled(engine)


async def test_around_the_last_step(shared: Engine) -> None:
    """Cancelled at random about its last step, a request ends once, cancelled or complete, and holds nothing
    (vllm-project/vllm#29987)."""
    rng = random.Random(7)
    loop, complete = shared.face.loop, 0
    before = shared.stats()
    for _ in range(200):
        waker, target = AsyncWaker(), rng.randint(6, 9)

        def tell(step: BoundStep, waker: AsyncWaker = waker, target: int = target) -> None:
            if len(runner.steps) >= target:
                waker.notify()

        with around(shared, tell) as runner:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:

                    async def stop(waker: AsyncWaker = waker, scope: anyio.CancelScope = scope) -> None:
                        await waker.wait()
                        for _ in range(rng.randint(0, 3)):
                            await anyio.sleep(0)
                        scope.cancel()

                    group.start_soon(stop)
                    result = await shared.generate([5, 6], max_tokens=8, **GREEDY)
                    assert len(result.token_ids) == 8
                    complete += 1
                    group.cancel_scope.cancel()
            await shared.generate([5], max_tokens=1, **GREEDY)
        assert shared.stats().kv_blocks_used == 0
    after = shared.stats()
    ended = after.requests_cancelled - before.requests_cancelled + after.requests_finished - before.requests_finished
    assert ended == 400
    assert not loop._live
    await settled(shared)


async def test_timeouts_around_a_call(shared: Engine, alone: Alone) -> None:
    """Ten timeouts around long calls, in parallel and in series, leave an engine that works
    (genlm/genlm-backend#2)."""

    async def hasty() -> None:
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.02):
                await shared.generate([5], max_tokens=8000, **GREEDY)

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(hasty)
    for _ in range(10):
        await hasty()
    assert shared.face.loop._thread is not None
    assert shared.face.loop._thread.is_alive()
    result = await shared.generate([5], max_tokens=20, **GREEDY)
    assert result.choices[0] == alone([5], max_tokens=20, **GREEDY)
    await settled(shared)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncios_own_timeouts(shared: Engine, alone: Alone) -> None:
    """asyncio's wait_for and timeout cancel the request and not the engine (genlm/genlm-backend#2)."""
    for _ in range(5):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(shared.generate([5], max_tokens=8000, **GREEDY), 0.02)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await shared.generate([5], max_tokens=8000, **GREEDY)
    task = asyncio.create_task(shared.generate([5], max_tokens=8000, **GREEDY))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    result = await shared.generate([5], max_tokens=20, **GREEDY)
    assert result.choices[0] == alone([5], max_tokens=20, **GREEDY)
    await settled(shared)


async def test_the_requests_own_time_limit(shared: Engine) -> None:
    """timeout_s ends a request wherever it is, with a TimeoutError of our own (genlm/genlm-backend#2)."""
    for timeout_s in (0.0, 0.02):
        with pytest.raises(RequestTimeout):
            await shared.generate([5], max_tokens=8000, timeout_s=timeout_s, **GREEDY)
        stream = shared.stream([5], max_tokens=8000, timeout_s=timeout_s, **GREEDY)
        with pytest.raises(RequestTimeout):
            await read(stream)
    await settled(shared)


async def test_a_stream_is_closed_by_another_task(shared: Engine) -> None:
    """A stream that was started in one task may be closed from another: its reader ends, and no scope is mixed up
    (openai/openai-agents-python#840)."""
    stream = shared.stream([5], max_tokens=8000, **GREEDY)
    begun = anyio.Event()
    got = 0

    async def reader() -> None:
        nonlocal got
        async with stream:
            async for chunk in stream:
                got += len(chunk.token_ids)
                begun.set()

    async with anyio.create_task_group() as group:
        group.start_soon(reader)
        await begun.wait()
        await stream.aclose()
        await stream.aclose()
    assert 0 < got < 8000
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    never = shared.stream([5])
    await never.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(never)
    tokenizer = shared.face.tokenizer
    encode = tokenizer.encode
    tokenized, free = threading.Event(), threading.Event()

    def slow(text: str, **options: Any) -> list[int]:
        tokenized.set()
        free.wait(60)
        return encode(text, **options)

    tokenizer.encode = slow  # type: ignore[method-assign]
    early = shared.stream("in the " * 1000, max_tokens=8000, **GREEDY)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(early.__aenter__)
            await anyio.to_thread.run_sync(tokenized.wait)
            await early.aclose()  # while its prompt is tokenized
            free.set()
    finally:
        tokenizer.encode = encode  # type: ignore[method-assign]
    with pytest.raises(StopAsyncIteration):
        await anext(early)
    await settled(shared)


async def test_a_dropped_stream_is_closed(shared: Engine) -> None:
    """A stream that nobody holds any more ends its request (openai/openai-agents-python#840)."""
    before = shared.stats().requests_cancelled
    stream = shared.stream([5], max_tokens=8000, **GREEDY)
    async for _ in stream:
        break
    del stream
    gc.collect()
    await settled(shared)
    assert shared.stats().requests_cancelled == before + 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
async def test_an_async_generator_is_closed_by_its_loop(shared: Engine, backend: str) -> None:
    """A generator around a stream that is left open is closed by its loop's end without complaint
    (openai/openai-agents-python#840)."""
    kept: list[Any] = []
    before = shared.stats().requests_cancelled

    async def texts() -> AsyncIterator[str]:
        async with shared.stream([5], max_tokens=8000, **GREEDY) as stream:
            async for chunk in stream:
                yield chunk.text

    async def main() -> None:
        generator = texts()
        kept.append(generator)
        await anext(generator)

    await anyio.to_thread.run_sync(lambda: anyio.run(main, backend=backend))
    await settled(shared)
    assert shared.stats().requests_cancelled == before + 1


async def test_cancelled_while_a_slow_step_runs(shared: Engine) -> None:
    """The caller is free at once, though the running step still holds the request's blocks
    (vllm-project/vllm#29987)."""
    with gated(shared) as gate:
        assert await cancelled(shared, [5] * 40, gate.wait_step, max_tokens=4)
        gate.open()
        await settled(shared)


@pytest.mark.long
async def test_ten_thousand_random_cancellations(shared: Engine, alone: Alone) -> None:
    """After ten thousand cancellations at random moments nothing is held and every other text is right
    (vllm-project/vllm#29987, waybarrios/vllm-mlx#154)."""
    rng = random.Random(11)
    prompts = [[5 + i] * (1 + 7 * i) for i in range(12)]
    expected = [alone(prompt, max_tokens=10, **GREEDY) for prompt in prompts]

    async def client() -> None:
        for _ in range(250):
            at = rng.randrange(12)
            with anyio.move_on_after(rng.choice((0.0, 0.001, 0.01, 0.05, 0.2))):
                result = await shared.generate(prompts[at], max_tokens=10, **GREEDY)
                assert result.choices[0] == expected[at]

    async with anyio.create_task_group() as group:
        for _ in range(40):
            group.start_soon(client)
    await settled(shared)
