"""The prefix cache as a caller sees it: never a wrong token, never another tenant's, never a stale one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimicore import Choice, Engine, EngineConfig
from kimicore.prefix import BlockKeys, KeyContext
from rigs.settle import settled
from rigs.tiny import make_tiny

pytestmark = pytest.mark.anyio
Alone = Callable[..., Choice]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4


def config(blocks: int = 256, **more: Any) -> EngineConfig:
    """Return settings with an arena of so many usable blocks."""
    return EngineConfig(dtype="float32", kv_device_bytes=(blocks + 1) * BLOCK_BYTES, **more)


async def test_keys_cannot_be_prepared() -> None:
    """Block names are 128-bit digests under a secret that every engine draws for itself
    (vllm-project/vllm#12621)."""
    tokens = list(range(64))
    chains = [BlockKeys(16).chain(KeyContext()).extend(tokens, 4) for _ in range(2)]
    assert all(len(key) == 16 for chain in chains for key in chain)
    assert not set(chains[0]) & set(chains[1])


async def test_replaced_weights_meet_no_old_cache(tmp_path: Path) -> None:
    """An engine on replaced weights under the same path has no hit and gives the new weights' text
    (vllm-project/vllm#42125)."""
    prompt = list(range(5, 70))
    seen = []
    for seed in (0, 1, 0):
        async with Engine(make_tiny(tmp_path / "model", seed=seed), config()) as engine:
            first = await engine.generate(prompt, max_tokens=8, **GREEDY)
            again = await engine.generate(prompt, max_tokens=8, **GREEDY)
            assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, 64)
            seen.append((first.token_ids, engine.face.loop._book._contexts[0].weights))
    assert seen[0] == seen[2]
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]


async def test_tenants_share_nothing(tiny: Path) -> None:
    """A tenant hits its own prefixes and no other's; not even the number of steps tells
    (vllm-project/vllm#16016)."""
    secret = [5 + i * 7 % 290 for i in range(512)]
    async with Engine(tiny, config()) as engine:
        await engine.generate(secret, max_tokens=1, tenant="a", **GREEDY)
        right = await engine.generate(secret, max_tokens=1, tenant="b", **GREEDY)
        steps = engine.stats().steps
        guess = await engine.generate([6, *secret[1:]], max_tokens=1, tenant="c", **GREEDY)
        assert engine.stats().steps - steps == 1
        own = await engine.generate(secret, max_tokens=1, tenant="a", **GREEDY)
        unnamed = await engine.generate(secret, max_tokens=1, **GREEDY)
        assert (right.usage.cached_tokens, guess.usage.cached_tokens, unnamed.usage.cached_tokens) == (0, 0, 0)
        assert own.usage.cached_tokens == 496
        assert right.token_ids == own.token_ids == unnamed.token_ids
        await settled(engine)


@pytest.mark.parametrize("tokens", [15, 16, 17, 32, 33])
async def test_a_wholly_cached_prompt_still_computes_its_last_token(tiny: Path, alone: Alone, tokens: int) -> None:
    """A prompt that ends at a block's end is served twice alike, with a token left to compute
    (vllm-project/vllm#9972)."""
    prompt = [5 + i for i in range(tokens)]
    async with Engine(tiny, config()) as engine:
        for hit in (0, (tokens - 1) // 16 * 16):
            result = await engine.generate(prompt, max_tokens=6, **GREEDY)
            assert result.choices[0] == alone(prompt, max_tokens=6, **GREEDY)
            assert result.usage.cached_tokens == hit
        await settled(engine)


async def test_a_partly_filled_block_is_no_hit(tiny: Path, alone: Alone) -> None:
    """Only whole blocks are shared: of 37 common tokens 32 (kvcache-ai/Mooncake#4164)."""
    common = [5 + i for i in range(37)]
    async with Engine(tiny, config()) as engine:
        for prompt, hit in (([*common, 100], 0), ([*common, 101], 32), (common, 32), (common, 32)):
            result = await engine.generate(prompt, max_tokens=1, **GREEDY)
            assert result.choices[0] == alone(prompt, max_tokens=1, **GREEDY)
            assert result.usage.cached_tokens == hit
        await settled(engine)


async def test_a_pushed_out_prefix_is_gone(tiny: Path, alone: Alone) -> None:
    """A prefix whose blocks were given to others is a miss and is computed anew (vllm-project/vllm#4761)."""
    prompt = [5 + i for i in range(64)]
    async with Engine(tiny, config(blocks=8)) as engine:
        expected = alone(prompt, max_tokens=4, **GREEDY)
        assert (await engine.generate(prompt, max_tokens=4, **GREEDY)).choices[0] == expected
        for first in range(100, 104):
            await engine.generate([first, *[5 + i for i in range(99)]], max_tokens=2, **GREEDY)
        again = await engine.generate(prompt, max_tokens=4, **GREEDY)
        assert again.usage.cached_tokens == 0
        assert again.choices[0] == expected
        assert engine.stats().evicted_blocks > 0
        await settled(engine)


@pytest.mark.parametrize("cached", [True, False])
async def test_nothing_is_left_from_one_prompt_to_the_next(tiny: Path, alone: Alone, cached: bool) -> None:
    """A prompt gives the same text whatever ran in between, with and without the cache
    (EricLBuehler/mistral.rs#1026)."""
    p, q, r = ([first, *range(5, 45)] for first in (200, 210, 220))
    async with Engine(tiny, config(prefix_cache=cached)) as engine:
        for prompt in (p, q, p, r, p):
            result = await engine.generate(prompt, max_tokens=12, **GREEDY)
            assert result.choices[0] == alone(prompt, max_tokens=12, **GREEDY)
        assert (engine.stats().cached_tokens > 0) == cached
        await settled(engine)


async def test_a_cancelled_turn_leaves_no_trace(shared: Engine) -> None:
    """After a chat turn that was cancelled in mid-answer, the next one is a fresh engine's
    (sgl-project/sglang#36475)."""
    asked: dict[str, Any] = {"max_tokens": 16, **GREEDY}
    history = [{"role": "user", "content": "in the other and on the"}]
    reply = await shared.chat(history, **asked)
    history.append({"role": "assistant", "content": "and on"})
    stream = shared.stream_chat([*history, {"role": "user", "content": "not this"}], **asked)
    async with stream:
        await anext(stream)
    turn = [*history, {"role": "user", "content": "but this"}]
    result = await shared.chat(turn, **asked)
    fresh = await shared.chat(turn, tenant=f"fresh {shared.stats().steps}", **asked)
    assert fresh.usage.cached_tokens == 0
    assert result.choices == fresh.choices
    assert (await shared.chat(history[:1], **asked)).choices == reply.choices
    await settled(shared)


async def test_a_dynamic_rope_belongs_to_one_request(tmp_path: Path) -> None:
    """A prompt over the trained length changes nothing for short ones, before, beside or after it
    (huggingface/transformers#25306)."""
    rope = {"rope_type": "dynamic", "factor": 4.0}
    folder = make_tiny(tmp_path / "dynamic", rope_scaling=rope, max_position_embeddings=64)
    short, long = list(range(5, 45)), [5 + i % 200 for i in range(150)]
    async with Engine(folder, config()) as engine:
        first = await engine.generate(short, max_tokens=8, **GREEDY)
        async with engine.stream(long, max_tokens=30, **GREEDY) as stream:
            await anext(stream)
            beside = await engine.generate(short, max_tokens=8, **GREEDY)
        again = await engine.generate(short, max_tokens=8, **GREEDY)
        assert first.choices == beside.choices == again.choices
        assert again.usage.cached_tokens == 32
        await settled(engine)
