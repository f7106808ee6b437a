"""Sampling, seeds, log-probabilities, penalties and several choices, as a caller sees them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from kimicore import Choice, Engine, EngineConfig, GenerationResult, InvalidRequest, RequestFailed
from rigs.runners import gated
from rigs.settle import ids_of, joined, read, settled

pytestmark = pytest.mark.anyio
Alone = Callable[..., Choice]
PROMPT = "in the other hand and on the"


async def together(engine: Engine, *calls: tuple[Any, dict[str, Any]]) -> list[GenerationResult]:
    """Return the results of requests that run side by side: the first one's first step waits for the others."""
    results: dict[int, GenerationResult] = {}

    async def one(at: int, prompt: Any, sampling: dict[str, Any]) -> None:
        results[at] = await engine.generate(prompt, **sampling)

    with gated(engine) as gate:
        async with anyio.create_task_group() as group:
            for at, (prompt, sampling) in enumerate(calls):
                group.start_soon(one, at, prompt, sampling)
                await anyio.wait_all_tasks_blocked()
            gate.open()
    return [results[at] for at in range(len(calls))]


async def test_tiny_temperatures_are_greedy(shared: Engine, alone: Alone) -> None:
    """Temperatures of nearly nothing give the greedy text (vllm-project/vllm#3063, NVIDIA/TensorRT-LLM#15715)."""
    greedy = alone(PROMPT, max_tokens=40, temperature=0.0, ignore_eos=True)
    for temperature in (1e-300, 1e-12, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3):
        result = await shared.generate(PROMPT, max_tokens=40, temperature=temperature, ignore_eos=True)
        assert result.token_ids == greedy.token_ids, temperature


@pytest.mark.parametrize("temperature", [-1, math.nan, math.inf, "hot", True])
async def test_impossible_temperatures_are_refused(shared: Engine, temperature: Any) -> None:
    """Negative and non-finite temperatures are refused before any work (NVIDIA/TensorRT-LLM#15715)."""
    before = shared.stats().steps
    with pytest.raises(InvalidRequest, match="temperature"):
        await shared.generate(PROMPT, temperature=temperature)
    assert shared.stats().steps == before


async def test_zeros_are_what_they_say(shared: Engine, alone: Alone) -> None:
    """An explicit zero is honoured and never replaced by a default (hiyouga/LlamaFactory#10709)."""
    first = await shared.generate(PROMPT, seed=0, max_tokens=12, priority=0, logprobs=0, ignore_eos=True)
    again = await shared.generate(PROMPT, seed=0, max_tokens=12, min_p=0, top_k=0, ignore_eos=True)
    other = await shared.generate(PROMPT, seed=1, max_tokens=12, ignore_eos=True)
    assert first.token_ids == again.token_ids != other.token_ids
    assert first.logprobs is not None
    assert all(entry.top == () and entry.logprob is not None for entry in first.logprobs)
    strict = await shared.generate(PROMPT, top_p=0.0, max_tokens=12, ignore_eos=True)
    assert strict.token_ids == alone(PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True).token_ids


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 150, 299])
async def test_a_broken_logit_ends_its_request_only(tiny: Path, alone: Alone, poison: float, place: int) -> None:
    """A logit that is no number ends that request with an error, and its neighbour is right (JustVugg/colibri#369)."""
    async with Engine(tiny, EngineConfig(dtype="float32", kv_device_bytes="1MiB")) as engine:
        model = engine.face.loop.runner.model
        logits = model.logits

        def broken(hidden: torch.Tensor) -> torch.Tensor:
            values = logits(hidden)
            if len(values) == 2:
                values[1, place] = poison
            return values

        model.logits = broken
        outcome: list[GenerationResult | BaseException] = [ValueError(), ValueError()]

        async def one(at: int) -> None:
            try:
                outcome[at] = await engine.generate([5 + at], max_tokens=8, temperature=0.0, ignore_eos=True)
            except RequestFailed as error:
                outcome[at] = error

        async with anyio.create_task_group() as group:
            with gated(engine) as gate:
                group.start_soon(one, 0)
                await anyio.to_thread.run_sync(gate.wait_step)
                group.start_soon(one, 1)
                await anyio.wait_all_tasks_blocked()
                gate.open()
        assert isinstance(outcome[0], GenerationResult)
        assert outcome[0].choices[0] == alone([5], max_tokens=8, temperature=0.0, ignore_eos=True)
        assert isinstance(outcome[1], RequestFailed)
        await settled(engine)


# ---------------------------------------------------------------- seeds


async def test_a_seed_does_not_depend_on_neighbours(shared: Engine, alone: Alone) -> None:
    """A seeded request is the same alone and beside requests without a seed (vllm-project/vllm#51226)."""
    seeded = {"seed": 11, "temperature": 0.9, "max_tokens": 24, "ignore_eos": True}
    expected = alone(PROMPT, **seeded)
    for _ in range(5):
        first, _ = await together(shared, (PROMPT, seeded), ("and so on", {"max_tokens": 24, "ignore_eos": True}))
        assert first.choices[0] == expected
    await settled(shared)


async def test_neighbours_content_does_not_reach_a_row(shared: Engine) -> None:
    """In batches of one shape a row's scores are bit-equal whatever its neighbours say (kekzl/imp#1314)."""
    asked = {"logprobs": 5, "max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    seen = []
    for salt in (0, 100):
        neighbours = [([20 + salt + i] * 9, asked) for i in range(2)]
        results = await together(shared, ([7] * 9, asked), *neighbours)
        seen.append(results[0].choices[0])
    assert seen[0] == seen[1]
    await settled(shared)


async def test_a_burst_of_cancellations_changes_nothing(shared: Engine, alone: Alone) -> None:
    """Requests sent right after a burst of cancellations give what they give alone (vllm-project/vllm#39146)."""
    asked = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    prompts = [[10 + i] * (3 + 5 * i) for i in range(6)]
    for _ in range(10):
        streams = [shared.stream(prompt, **asked) for prompt in prompts]
        for stream in streams:
            await anext(stream)
        for stream in streams:
            await stream.aclose()
        results: dict[int, Choice] = {}

        async def again(at: int, into: dict[int, Choice] = results) -> None:
            into[at] = (await shared.generate(prompts[at], **asked)).choices[0]

        async with anyio.create_task_group() as group:
            for at in range(6):
                group.start_soon(again, at)
        assert [results[at] for at in range(6)] == [alone(prompt, **asked) for prompt in prompts]
    await settled(shared)


# ---------------------------------------------------------------- log-probabilities


async def test_prompt_scores_do_not_depend_on_the_order(tiny: Path) -> None:
    """Scores of prompts that share a prefix are the same in any order and without a cache
    (vllm-project/vllm#42019)."""
    prompts = [[*range(5, 37), 50 + i, *range(60, 60 + 7 * i)] for i in range(4)]
    asked = {"prompt_logprobs": 2, "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    seen: list[list[Any]] = []
    for cached in (True, False):
        config = EngineConfig(dtype="float32", kv_device_bytes="2MiB", prefix_cache=cached)
        async with Engine(tiny, config) as engine:
            for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
                results = {at: await engine.generate(prompts[at], **asked) for at in order}
                seen.append([results[at].prompt_logprobs for at in range(4)])
            overlapping = await together(engine, *[(prompt, asked) for prompt in prompts])
            for result, known in zip(overlapping, seen[0], strict=True):
                assert result.prompt_logprobs is not None
                for one, other in zip(result.prompt_logprobs[1:], known[1:], strict=True):
                    assert one.token_id == other.token_id
                    assert one.logprob == pytest.approx(other.logprob, abs=2e-5)
            await settled(engine)
    assert all(one == seen[0] for one in seen)


async def test_an_end_token_at_once_has_its_scores(shared: Engine) -> None:
    """Where the first token is the end, its log-probability is there (abetlen/llama-cpp-python#1528)."""
    result = await shared.generate(PROMPT, logit_bias={2: 100.0}, logprobs=3, temperature=0.0)
    assert (result.text, result.token_ids, result.finish_reason) == ("", (2,), "stop")
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == [2]
    assert len(result.logprobs[0].top) == 3


async def test_scores_are_the_models_own(shared: Engine) -> None:
    """Reported log-probabilities do not change with temperature, filters or bias (vllm-project/vllm#9453)."""
    seen = []
    for temperature in (0.2, 1.0, 2.0):
        result = await shared.generate(
            PROMPT, max_tokens=6, top_k=1, temperature=temperature, logprobs=2, seed=3, ignore_eos=True
        )
        seen.append(result.choices[0])
    biased = await shared.generate(
        PROMPT, max_tokens=6, temperature=0.0, logprobs=2, logit_bias={9: -50.0}, ignore_eos=True
    )
    assert seen[0] == seen[1] == seen[2]
    assert biased.logprobs is not None
    assert seen[0].logprobs is not None
    assert biased.logprobs[0].logprob == seen[0].logprobs[0].logprob


async def test_nothing_asked_for_is_dropped_in_silence(shared: Engine) -> None:
    """Unknown options raise, and asked-for prompt scores are complete (ggml-org/llama.cpp#27174)."""
    for option in ("echo", "best_of", "logprob", "max_new_tokens"):
        with pytest.raises(InvalidRequest, match=option):
            await shared.generate([5], **{option: 1})
    result = await shared.generate(list(range(5, 45)), prompt_logprobs=2, max_tokens=1)
    assert result.prompt_logprobs is not None
    assert [entry.token_id for entry in result.prompt_logprobs] == list(range(5, 45))
    assert result.prompt_logprobs[0].logprob is None
    assert all(entry.logprob is not None and len(entry.top) == 2 for entry in result.prompt_logprobs[1:])


# ---------------------------------------------------------------- penalties and choices


async def test_penalties_stay_with_their_request(shared: Engine, alone: Alone) -> None:
    """A penalty of one request does not change its neighbour (huggingface/text-generation-inference#1765)."""
    plain = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
    calls = [
        ("and", plain),
        (PROMPT * 3, {**plain, "frequency_penalty": 0.9}),
        (PROMPT, {**plain, "repetition_penalty": 1.3, "presence_penalty": 0.5}),
    ]
    for result, (prompt, asked) in zip(await together(shared, *calls), calls, strict=True):
        assert result.choices[0] == alone(prompt, **asked)
    await settled(shared)


async def test_all_choices_come_back(shared: Engine, alone: Alone) -> None:
    """n choices come back with their indices, streamed or not, and the usage is their sum
    (vllm-project/vllm#16863)."""
    asked = {"n": 4, "seed": 5, "max_tokens": 15, "ignore_eos": True}
    result = await shared.generate(PROMPT, **asked)
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
    assert len({choice.token_ids for choice in result.choices}) == 4
    assert result.usage.completion_tokens == 60
    assert list(result.choices) == [alone(PROMPT, index=i, **asked) for i in range(4)]
    single = {**asked, "n": 1}
    assert result.choices[0] == alone(PROMPT, **single)
    stream = shared.stream(PROMPT, **asked)
    chunks = await read(stream)
    for choice in result.choices:
        assert joined(chunks, choice.index) == choice.text
        assert ids_of(chunks, choice.index) == choice.token_ids
    assert sorted(chunk.index for chunk in chunks if chunk.finish_reason) == [0, 1, 2, 3]
    assert stream.result().usage == result.usage or stream.result().usage.cached_tokens
    await settled(shared)
