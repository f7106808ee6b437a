"""Many requests of many kinds at once: every text that is finished is the one that its request gives alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from attrs import frozen

from kimicore import Choice, Engine, EngineConfig, RequestTimeout, SyncEngine
from rigs.settle import ids_of, joined, settled

pytestmark = pytest.mark.anyio
Alone = Callable[..., Choice]
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
TEXT = "in the other hand and on the face of it there is an end to all that is begun in the first of the hours "


@frozen
class Ask:
    """One kind of request."""

    prompt: Any
    sampling: dict[str, Any]


def kinds(count: int, seed: int, *, ids: int, words: str, most: int) -> list[Ask]:
    """Return so many different requests: text and ids, short and long, greedy and seeded, n, stops, penalties."""
    rng = random.Random(seed)
    shared = [rng.randrange(20, ids) for _ in range(40)]
    asks = []
    for at in range(count):
        if at % 3 == 0:
            begin = rng.randrange(0, len(words) // 2)
            prompt: Any = words[begin : begin + rng.randint(1, len(words) // 2)]
        else:
            prompt = shared[: rng.choice((0, 7, 32, 40))] + [rng.randrange(20, ids) for _ in range(rng.randint(1, 30))]
        sampling: dict[str, Any] = {"max_tokens": rng.randint(1, most), "ignore_eos": rng.random() < 0.5}
        if rng.random() < 0.5:
            sampling["temperature"] = 0.0
        else:
            sampling |= {"seed": rng.randrange(1 << 60), "temperature": rng.choice((0.7, 1.2)), "top_p": 0.95}
            sampling["n"] = rng.choice((1, 1, 2, 3))
        if rng.random() < 0.2:
            sampling["frequency_penalty"] = 0.5
        if rng.random() < 0.2:
            sampling["stop"] = ["e", "the"]
        if rng.random() < 0.2:
            sampling["logprobs"] = 2
        asks.append(Ask(prompt, sampling))
    return asks


class Storm:
    """Clients that ask an engine at random, some of which give up; finished answers are compared."""

    def __init__(self, engine: Engine, asks: list[Ask], expected: list[list[tuple[str, tuple[int, ...]]]]) -> None:
        self.engine, self.asks, self.expected = engine, asks, expected
        self.finished = self.given_up = self.timed_out = 0

    async def run(self, requests: int, tasks: int, seed: int) -> None:
        """Send so many requests from so many tasks."""
        async with anyio.create_task_group() as group:
            for at in range(tasks):
                share = requests // tasks + (at < requests % tasks)
                group.start_soon(self._client, share, random.Random(seed * 1000 + at))

    async def _client(self, requests: int, rng: random.Random) -> None:
        for _ in range(requests):
            at = rng.randrange(len(self.asks))
            options = {"tenant": rng.choice(("", "a", "b")), "priority": rng.randint(0, 2)}
            if rng.random() < 0.15:
                options["timeout_s"] = rng.choice((0.0, 0.01, 0.1))
            patience_s = rng.choice((0.0, 0.005, 0.05, 0.3)) if rng.random() < 0.3 else 3600.0
            with anyio.move_on_after(patience_s) as scope:
                try:
                    await (self._stream if rng.random() < 0.5 else self._whole)(at, options, rng)
                    self.finished += 1
                except RequestTimeout:
                    self.timed_out += 1
            self.given_up += scope.cancelled_caught

    async def _whole(self, at: int, options: dict[str, Any], rng: random.Random) -> None:
        result = await self.engine.generate(self.asks[at].prompt, **self.asks[at].sampling, **options)
        assert [(choice.text, choice.token_ids) for choice in result.choices] == self.expected[at]

    async def _stream(self, at: int, options: dict[str, Any], rng: random.Random) -> None:
        chunks = []
        slow = rng.random() < 0.3
        async with self.engine.stream(self.asks[at].prompt, **self.asks[at].sampling, **options) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                if slow:
                    await anyio.sleep(0.01)
        n = self.asks[at].sampling.get("n", 1)
        assert [(joined(chunks, i), ids_of(chunks, i)) for i in range(n)] == self.expected[at]


def _expected(alone: Alone, asks: list[Ask]) -> list[list[tuple[str, tuple[int, ...]]]]:
    found = []
    for ask in asks:
        choices = [alone(ask.prompt, index=i, **ask.sampling) for i in range(ask.sampling.get("n", 1))]
        found.append([(choice.text, choice.token_ids) for choice in choices])
    return found


@pytest.mark.parametrize(
    ("model", "batching", "tokens", "cached"),
    [
        ("tiny", "fcfs", 512, True),
        ("tiny", "priority", 40, True),
        ("windowed", "fcfs", 64, False),
        ("mixed", "priority", 48, True),
    ],
)
async def test_a_storm_of_requests(
    model: str,
    batching: str,
    tokens: int,
    cached: bool,
    alone_in: Callable[[Path], Alone],
    request: pytest.FixtureRequest,
) -> None:
    """300 requests from 40 tasks, with cancellation, time limits, slow readers, several choices and tenants, in an
    arena that forces preemption: every finished text is right and nothing is held (vllm-project/vllm#29987)."""
    folder: Path = request.getfixturevalue(model)
    alone = alone_in(folder)
    asks = kinds(40, 1, ids=299, words=TEXT, most=80)
    config = EngineConfig(
        dtype="float32",
        kv_device_bytes=21 * BLOCK_BYTES,
        max_batch_tokens=tokens,
        max_batch_size=24,
        batching=batching,
        prefix_cache=cached,
    )
    async with Engine(folder, config) as engine:
        storm = Storm(engine, asks, _expected(alone, asks))
        await storm.run(300, 40, seed=len(batching) + tokens)
        await settled(engine)
        stats = engine.stats()
    assert storm.finished + storm.given_up + storm.timed_out == 300
    assert storm.finished >= 120
    assert storm.given_up > 0
    assert stats.preemptions > 0 or model == "windowed"  # whose rows stop growing
    assert not stats.requests_failed


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_a_long_storm_on_a_real_model(smollm2_path: Path) -> None:
    """1,000 requests from 200 tasks on SmolLM2 in float32, as in the short form (vllm-project/vllm#29987)."""
    asks = kinds(48, 2, ids=40_000, words="The quick brown fox jumps over the lazy dog. " * 6, most=48)
    expected = []
    with SyncEngine(smollm2_path, EngineConfig(dtype="float32", prefix_cache=False)) as engine:
        for ask in asks:
            choices = engine.generate(ask.prompt, **ask.sampling).choices
            expected.append([(choice.text, choice.token_ids) for choice in choices])
    config = EngineConfig(dtype="float32", kv_device_bytes="48MiB", batching="priority")
    async with Engine(smollm2_path, config) as engine:
        storm = Storm(engine, asks, expected)
        await storm.run(1000, 200, seed=3)
        await settled(engine)
        stats = engine.stats()
    assert storm.finished + storm.given_up + storm.timed_out == 1000
    assert storm.finished >= 400
    assert stats.preemptions > 0
    assert not stats.requests_failed
