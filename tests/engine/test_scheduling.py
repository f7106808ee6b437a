"""Preemption, priorities, long prompts, deadlines and full queues, as callers see them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kimicore import Choice, Engine, EngineConfig, Overloaded, RequestTimeout
from kimicore.types import BoundStep
from rigs.runners import around, gated
from rigs.settle import settled

pytestmark = pytest.mark.anyio
Alone = Callable[..., Choice]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
FLOAT: dict[str, Any] = {"dtype": "float32"}


async def side_by_side(engine: Engine, prompts: list[Any], **asked: Any) -> list[Choice]:
    """Return the choices of requests that are sent together."""
    found: dict[int, Choice] = {}

    async def one(at: int) -> None:
        found[at] = (await engine.generate(prompts[at], **asked)).choices[0]

    async with anyio.create_task_group() as group:
        for at in range(len(prompts)):
            group.start_soon(one, at)
    return [found[at] for at in range(len(prompts))]


@pytest.mark.parametrize("cached", [True, False])
async def test_preempted_requests_come_back_whole(tiny: Path, alone: Alone, cached: bool) -> None:
    """With memory for two of four sequences all four get their hundred tokens, as alone
    (vllm-project/vllm#16832)."""
    config = EngineConfig(kv_device_bytes=15 * BLOCK_BYTES, prefix_cache=cached, **FLOAT)
    prompts = [[20 + at] * 5 for at in range(4)]
    async with Engine(tiny, config) as engine:
        choices = await side_by_side(engine, prompts, max_tokens=100, **GREEDY)
        assert engine.stats().preemptions > 0
        await settled(engine)
    assert choices == [alone(prompt, max_tokens=100, **GREEDY) for prompt in prompts]
    assert {choice.finish_reason for choice in choices} == {"length"}


@pytest.mark.parametrize("tokens", [16, 24, 512])
async def test_a_seed_gives_one_text(tiny: Path, alone: Alone, tokens: int) -> None:
    """A seeded text is the same alone, in a batch, after a preemption and with any chunk size
    (vllm-project/vllm#51226)."""
    blocks = 14
    config = EngineConfig(
        kv_device_bytes=(blocks + 1) * BLOCK_BYTES, max_batch_tokens=tokens, max_batch_size=8, **FLOAT
    )
    asked: dict[str, Any] = {"temperature": 1.1, "top_p": 0.95, "max_tokens": 70, "ignore_eos": True, "seed": 77}
    prompts = [[5 + at, *range(30, 30 + 9 * at)] for at in range(6)]
    async with Engine(tiny, config) as engine:
        choices = await side_by_side(engine, prompts, **asked)
        assert engine.stats().preemptions > 0
        await settled(engine)
    assert choices == [alone(prompt, **asked) for prompt in prompts]


async def test_the_urgent_goes_before_and_equals_never_push_each_other(tiny: Path) -> None:
    """With all places taken an urgent request gets one; equals wait for each other (vllm-project/vllm#54530)."""
    config = EngineConfig(batching="priority", max_batch_size=2, kv_device_bytes="1MiB", **FLOAT)
    async with Engine(tiny, config) as engine:
        order: list[str] = []

        async def one(name: str, priority: int, tokens: int) -> None:
            await engine.generate([5], max_tokens=tokens, priority=priority, **GREEDY)
            order.append(name)

        with gated(engine) as gate:
            async with anyio.create_task_group() as group:
                for name in ("low 1", "low 2"):
                    group.start_soon(one, name, 0, 60)
                    await anyio.wait_all_tasks_blocked()
                gate.let(3)
                for _ in range(4):
                    await anyio.to_thread.run_sync(gate.wait_step)
                group.start_soon(one, "high", 5, 4)
                await anyio.wait_all_tasks_blocked()
                gate.open()
            assert order[0] == "high"
            high = max(gate.seen())
            assert next(at for at, step in enumerate(gate.steps) if high in step) <= 5
        assert engine.stats().preemptions == 1
        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(one, name, 1, 40)
        assert engine.stats().preemptions == 1
        await settled(engine)


async def test_aging_is_bounded(tiny: Path) -> None:
    """Under a steady flow of urgent requests a patient one is served within the documented bound
    (vllm-project/vllm#56843)."""
    config = EngineConfig(batching="priority", max_batch_size=1, kv_device_bytes="1MiB", **FLOAT)
    async with Engine(tiny, config) as engine:
        loop = engine.face.loop
        now = [0.0]
        loop.clock = lambda: now[0]  # a second passes with every step
        urgent: list[float] = []
        served: list[int] = []

        async def lane() -> None:
            while not served and len(urgent) < 200:
                await engine.generate([6], max_tokens=4, priority=2, **GREEDY)
                urgent.append(now[0])

        def before(step: BoundStep) -> None:
            now[0] += 1.0

        with around(engine, before):
            async with anyio.create_task_group() as group:
                for _ in range(3):  # one runs, two wait
                    group.start_soon(lane)
                while len(urgent) < 3:
                    await engine.generate([7], max_tokens=1, priority=9, **GREEDY)
                begun = len(urgent)
                await engine.generate([5], max_tokens=2, priority=0, **GREEDY)
                served.append(len(urgent) - begun)
        assert served[0] <= 8  # 10 seconds of newcomers at four a request, and those that were there before
        await settled(engine)


async def test_a_long_prompt_lets_others_through(tiny: Path, alone: Alone) -> None:
    """Beside a prompt of 4,000 tokens a short one starts within a few chunks and a running stream goes on
    (sgl-project/sglang#34623)."""
    config = EngineConfig(max_batch_tokens=64, kv_device_bytes="4MiB", **FLOAT)
    long = [5 + i * 13 % 290 for i in range(4000)]
    async with Engine(tiny, config) as engine:
        decoding = engine.stream([7], max_tokens=400, **GREEDY)
        await anext(decoding)
        with gated(engine) as gate:
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: engine.generate(long, max_tokens=1, **GREEDY))
                await anyio.wait_all_tasks_blocked()
                gate.let(5)
                for _ in range(6):
                    await anyio.to_thread.run_sync(gate.wait_step)
                short = engine.stream([9] * 10, max_tokens=3, **GREEDY)
                started = len(gate.steps)
                gate_task = anyio.Event()

                async def read_short() -> None:
                    ids = [one async for chunk in short for one in chunk.token_ids]
                    assert tuple(ids) == alone([9] * 10, max_tokens=3, **GREEDY).token_ids
                    gate_task.set()

                group.start_soon(read_short)
                await anyio.wait_all_tasks_blocked()
                gate.open()
                await gate_task.wait()
            number = short._handle.numbers[0] if short._handle else 0
            first = next(at for at, step in enumerate(gate.steps) if number in step)
            stream = decoding._handle.numbers[0] if decoding._handle else 0
            while_long = [step for step in gate.steps if any(count > 8 for _, count in step.values())]
            assert first - started <= 3
            assert len(while_long) >= 60
            assert sum(stream in step for step in while_long) >= min(len(while_long), 390)
        await decoding.aclose()
        await settled(engine)


async def test_a_deadline_in_the_queue_costs_nothing(tiny: Path) -> None:
    """A request whose time passes while it waits ends with RequestTimeout and no step computes it
    (Avarok-Cybersecurity/atlas#482)."""
    config = EngineConfig(max_batch_size=1, kv_device_bytes="1MiB", **FLOAT)
    async with Engine(tiny, config) as engine:
        loop = engine.face.loop
        now = [0.0]
        loop.clock = lambda: now[0]
        caught: list[RequestTimeout] = []

        async def hasty() -> None:
            with pytest.raises(RequestTimeout) as error:
                await engine.generate([6], max_tokens=5, timeout_s=0.1, **GREEDY)
            caught.append(error.value)

        with gated(engine) as gate:
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: engine.generate([5], max_tokens=20, **GREEDY))
                await anyio.to_thread.run_sync(gate.wait_step)
                group.start_soon(hasty)
                await anyio.wait_all_tasks_blocked()
                now[0] = 2.0
                gate.open()
            assert len(gate.seen()) == 1
        assert len(caught) == 1
        assert isinstance(caught[0], TimeoutError)
        assert engine.stats().requests_timed_out == 1
        await settled(engine)


async def test_a_full_queue_says_when_and_opens_again(tiny: Path) -> None:
    """At the cap a request is Overloaded with a time to come back; when some are cancelled others are admitted
    (vllm-project/vllm#53130)."""
    config = EngineConfig(max_batch_size=1, max_waiting=3, kv_device_bytes="1MiB", **FLOAT)
    async with Engine(tiny, config) as engine:
        with gated(engine) as gate:
            async with anyio.create_task_group() as group:
                running = engine.stream([5], max_tokens=4, **GREEDY)
                group.start_soon(anext, running)
                await anyio.to_thread.run_sync(gate.wait_step)
                waiting = [engine.stream([6 + at], max_tokens=2, **GREEDY) for at in range(3)]
                for stream in waiting:
                    await stream.__aenter__()
                with pytest.raises(Overloaded) as error:
                    await engine.generate([9], max_tokens=2, **GREEDY)
                assert error.value.retry_after_s > 0
                for stream in waiting[:2]:
                    await stream.aclose()
                gate.open()
            async for _ in running:  # cancellations are seen when the running step ends
                pass
            result = await engine.generate([9], max_tokens=2, **GREEDY)
            assert len(result.token_ids) == 2
            assert sum([len(chunk.token_ids) async for chunk in waiting[2]]) == 2
        await settled(engine)
