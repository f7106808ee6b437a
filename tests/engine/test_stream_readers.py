"""Who reads a stream, and what it is worth once it was read."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import anyio
import pytest

from kimicore import Engine, EngineConfig, InvalidRequest, ModelLoadError, SyncEngine
from rigs.settle import settled

pytestmark = pytest.mark.anyio


async def test_a_stream_has_one_reader(shared: Engine) -> None:
    """A second task that reads a stream at the same time is told so, and the first misses nothing."""
    stream = shared.stream([5], max_tokens=30, ignore_eos=True)
    told: list[InvalidRequest] = []
    read: list[int] = []

    async def read_all() -> None:
        try:
            async for chunk in stream:
                read.extend(chunk.token_ids)
        except InvalidRequest as error:
            told.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(read_all)
        group.start_soon(read_all)
    assert len(told) == 1
    assert len(read) == 30
    await settled(shared)


async def test_the_result_of_a_stream_is_that_of_generate(shared: Engine) -> None:
    """A stream that was read to its end has the result that ``generate`` gives; one that was not has none."""
    options: dict[str, Any] = {"max_tokens": 12, "seed": 3, "n": 2, "logprobs": 1, "ignore_eos": True}
    whole = await shared.generate([5, 6], **options)
    async with shared.stream([5, 6], **options) as stream:
        async for _ in stream:
            with contextlib.suppress(InvalidRequest):
                assert len(stream.result().choices) == 2
    assert stream.result().choices == whole.choices
    async with shared.stream([5, 6], **options) as left:
        await anext(left)
    with pytest.raises(InvalidRequest, match="not read to its end"):
        left.result()
    await settled(shared)


async def test_more_choices_than_may_ever_wait_are_refused_for_good(shared: Engine, tiny: Path) -> None:
    """What can never be admitted is a wrong request and not an overload, which one would try again."""
    async with Engine(tiny, EngineConfig(dtype="float32", kv_device_bytes="1MiB", max_waiting=3)) as engine:
        with pytest.raises(InvalidRequest, match="max_waiting=3"):
            await engine.generate([5], n=6, max_tokens=2)


async def test_odd_values_are_refused_by_name(shared: Engine) -> None:
    """Numbers over every range, text that UTF-8 cannot hold, and what merely looks true are invalid requests."""
    for options in (
        {"temperature": 10**400},
        {"timeout_s": 10**400},
        {"logit_bias": {1: 10**400}},
        {"tenant": "\ud800"},
        {"stop": ["\ud83d"]},
    ):
        with pytest.raises(InvalidRequest, match=next(iter(options))):
            await shared.generate([5], max_tokens=2, **options)
    with pytest.raises(InvalidRequest, match="parse_special"):
        await shared.generate("a", parse_special="no")  # type: ignore[arg-type]
    await settled(shared)


def test_prompts_are_a_list_of_prompts(tiny: Path) -> None:
    """``generate_many`` takes any iterable of prompts, and a text is not one."""
    with SyncEngine(tiny, EngineConfig(dtype="float32", kv_device_bytes="1MiB")) as engine:
        for wrong in ("abc", None, 5):
            with pytest.raises(InvalidRequest, match="prompts"):
                engine.generate_many(wrong)  # type: ignore[arg-type]
        assert len(engine.generate_many(iter([[5], [6]]), max_tokens=2)) == 2
    with pytest.raises(ModelLoadError, match="model=None"):
        SyncEngine(None)  # type: ignore[arg-type]
