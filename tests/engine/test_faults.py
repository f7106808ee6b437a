"""One bad request ends alone; a failed step ends everything, with its cause."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from kimicore import Choice, Engine, EngineConfig, EngineFailed, GenerationResult, InvalidRequest, RequestFailed
from kimicore.types import BoundStep
from rigs.runners import around, gated
from rigs.settle import read, settled

pytestmark = pytest.mark.anyio
Alone = Callable[..., Choice]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class Broken(RuntimeError):
    """What the tests break steps with."""


@pytest.mark.parametrize(
    "fields",
    [
        *[{"logit_bias": bias} for bias in ({"cat": -50}, {None: 1}, {3.5: 1}, {5: "x"}, {5: math.nan}, [5, 1])],
        *[{"logit_bias": {one: 1.0}} for one in (-1, -49153, -(2**31) - 1, 300, 2**63)],
        *[{"stop_token_ids": [one]} for one in (-1, 300, 1.5, "7")],
        *[{"seed": seed} for seed in (-1, 2**64, 1.5, "7")],
        {"n": 0},
        {"n": 2.0},
        {"max_tokens": -1},
        {"logprobs": 1000},
        {"timeout_s": -1.0},
        {"tenant": 7},
        {"priority": 1.5},
    ],
    ids=str,
)
async def test_bad_fields_are_refused_beside_running_requests(
    shared: Engine, alone: Alone, fields: dict[str, Any]
) -> None:
    """A field that is wrong raises at its own call, and two running requests end as they do alone
    (vllm-project/vllm#5963, ModelTC/LightLLM#1457)."""
    streams = [shared.stream([6 + i] * 5, max_tokens=12, **GREEDY) for i in range(2)]
    first = [await anext(stream) for stream in streams]
    with pytest.raises(InvalidRequest):
        await shared.generate([5], **fields)
    for i, stream in enumerate(streams):
        rest = await read(stream)
        ids = tuple(one for chunk in (first[i], *rest) for one in chunk.token_ids)
        assert ids == alone([6 + i] * 5, max_tokens=12, **GREEDY).token_ids
    await settled(shared)


async def test_prompt_ids_are_checked_one_by_one(shared: Engine, alone: Alone) -> None:
    """Ids outside the vocabulary and what is no integer are refused by position; numpy's integers are taken
    (vllm-project/vllm#26797)."""
    for bad in (-1, 300, 49152, 2**63, 1.5, "7", True, None):
        with pytest.raises(InvalidRequest, match=r"prompt\[1\]"):
            await shared.generate([5, bad])  # type: ignore[list-item]
    with pytest.raises(InvalidRequest):
        await shared.generate(np.array([[5, 6]]))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        await shared.generate(np.array([5.0, 6.0]))  # type: ignore[arg-type]
    expected = alone([5, 6, 7], max_tokens=4, **GREEDY)
    for good in (np.array([5, 6, 7]), np.array([5, 6, 7], np.uint16), (5, 6, 7), range(5, 8), [np.int64(5), 6, 7]):
        assert (await shared.generate(good, max_tokens=4, **GREEDY)).choices[0] == expected  # type: ignore[arg-type]
    await settled(shared)


async def test_one_name_may_be_used_again_at_once(shared: Engine, alone: Alone) -> None:
    """A thousand requests in series under one request_id are all right (vllm-project/vllm#29355)."""
    expected = [alone([5 + i], max_tokens=2, **GREEDY) for i in range(4)]
    for i in range(1000):
        result = await shared.generate([5 + i % 4], max_tokens=2, request_id="the same", **GREEDY)
        assert result.request_id == "the same"
        assert result.choices[0] == expected[i % 4]
    await settled(shared)


@pytest.mark.parametrize(
    "bad",
    [
        [{"content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "x", "kind": object()}],
        "text",
    ],
    ids=["no role", "content of a wrong kind", "an object", "no list"],
)
async def test_a_broken_message_fails_in_its_own_place(shared: Engine, bad: Any) -> None:
    """Of four chats at once one is malformed: three answers and one error (vllm-project/vllm#13101)."""
    good = [[{"role": "user", "content": f"in the {word}"}] for word in ("other", "and", "on")]
    asked = {"max_tokens": 8, **GREEDY}
    expected = [(await shared.chat(messages, **asked)).choices for messages in good]
    results: dict[int, Any] = {}

    async def one(at: int, messages: Any, template: str | None = None) -> None:
        try:
            results[at] = (await shared.chat(messages, template=template, **asked)).choices
        except InvalidRequest as error:
            results[at] = error

    async with anyio.create_task_group() as group:
        for at, messages in enumerate([*good, bad]):
            group.start_soon(one, at, messages)
        group.start_soon(one, 4, good[0], "{{ messages[0].missing.field }}")
    assert [results[at] for at in range(3)] == expected
    assert isinstance(results[3], InvalidRequest)
    assert isinstance(results[4], InvalidRequest)
    await settled(shared)


async def test_a_rows_error_ends_its_stream_with_it(shared: Engine, alone: Alone) -> None:
    """An error of one row in its fifth step is raised by that row's async-for and by no other
    (OpenNMT/CTranslate2#1225)."""
    with gated(shared) as runner:
        bad = shared.stream([6], max_tokens=20, **GREEDY)
        async with bad, shared.stream([7], max_tokens=20, **GREEDY) as good:
            number = bad._handle.numbers[0] if bad._handle else 0

            def fault(step: BoundStep, index: int) -> BaseException | None:
                row = step.rows[index]
                failing = row.plan.request == number and len(row.known) == 5
                return RequestFailed("by the test") if failing else None

            runner.fault = fault
            runner.open()
            got: list[int] = []

            async def collect() -> None:
                async for chunk in bad:
                    got.extend(chunk.token_ids)

            with pytest.raises(RequestFailed, match="by the test"):
                await collect()
            assert tuple(got) == alone([6], max_tokens=20, **GREEDY).token_ids[:4]
            with pytest.raises(RequestFailed):
                await anext(bad)
            ids = [one async for chunk in good for one in chunk.token_ids]
        assert tuple(ids) == alone([7], max_tokens=20, **GREEDY).token_ids
    await settled(shared)


async def test_a_failed_step_ends_every_request_with_its_cause(tiny: Path) -> None:
    """When step five itself fails, every waiter gets EngineFailed with the cause, and so does every later call
    (OpenNMT/CTranslate2#1225)."""
    async with Engine(tiny, EngineConfig(dtype="float32", kv_device_bytes="1MiB", max_batch_size=2)) as engine:
        causes: list[BaseException | None] = []

        def before(step: BoundStep) -> None:
            if len(runner.steps) == 5:
                raise Broken("step five")

        async def generate(prompt: list[int]) -> None:
            with pytest.raises(EngineFailed) as error:
                await engine.generate(prompt, max_tokens=50, n=1, **GREEDY)
            causes.append(error.value.__cause__)

        async def stream(prompt: list[int]) -> None:
            with pytest.raises(EngineFailed) as error:
                await read(engine.stream(prompt, max_tokens=50, **GREEDY))
            causes.append(error.value.__cause__)

        with around(engine, before) as runner:
            async with anyio.create_task_group() as group:
                for at in range(3):  # more than run at once: the waiting ones are told as well
                    group.start_soon(generate, [5 + at])
                    group.start_soon(stream, [5 + at])
        assert len(causes) == 6
        assert all(isinstance(cause, Broken) for cause in causes)
        with pytest.raises(EngineFailed, match="step five"):
            await engine.generate([5])
        with pytest.raises(EngineFailed):
            await read(engine.stream([5]))
        stats = engine.stats()
        assert (stats.kv_blocks_used, stats.requests_running, stats.requests_waiting) == (0, 0, 0)


async def test_a_stream_ends_once(shared: Engine) -> None:
    """After its end a stream stays at its end, and its totals agree with its chunks (OpenNMT/CTranslate2#1225)."""
    stream = shared.stream([5, 6], max_tokens=7, **GREEDY)
    with pytest.raises(InvalidRequest, match="not read to its end"):
        stream.result()
    chunks = await read(stream)
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    result: GenerationResult = stream.result()
    assert result.usage.completion_tokens == sum(len(chunk.token_ids) for chunk in chunks) == 7
    assert result.usage.prompt_tokens == 2
