"""Sliding windows through chunks, caches and preemption: the same tokens as one whole prompt gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimicore import Choice, Engine, EngineConfig
from rigs.settle import settled
from rigs.tiny import make_tiny

pytestmark = pytest.mark.anyio
Alone = Callable[..., Choice]
ASKED: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with a window of 8 tokens."""
    return make_tiny(tmp_path_factory.mktemp("narrow"), model_type="mistral", sliding_window=8)


@pytest.mark.parametrize("cached", [True, False])
async def test_prompts_around_the_window(narrow: Path, alone_in: Callable[[Path], Alone], cached: bool) -> None:
    """Prompts about as long as the window, in chunks of four, give what they give whole
    (huggingface/transformers#47708)."""
    alone = alone_in(narrow)
    config = EngineConfig(
        dtype="float32", kv_device_bytes="1MiB", max_batch_size=4, max_batch_tokens=4, prefix_cache=cached
    )
    async with Engine(narrow, config) as engine:
        for tokens in (1, 3, 7, 8, 9, 15, 16, 17, 40):
            prompt = [5 + 3 * at for at in range(tokens)]
            for _ in range(2):
                result = await engine.generate(prompt, **ASKED)
                assert result.choices[0] == alone(prompt, **ASKED)
        await settled(engine)


async def test_a_window_bounds_the_blocks(windowed: Path, alone_in: Callable[[Path], Alone]) -> None:
    """A request longer than the arena runs where its window fits, and gives back what left the window
    (vllm-project/vllm#35541)."""
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4
    config = EngineConfig(dtype="float32", kv_device_bytes=7 * block_bytes)
    long = {**ASKED, "max_tokens": 400}
    async with Engine(windowed, config) as engine:
        assert engine.stats().kv_blocks_total == 6
        result = await engine.generate([5, 6, 7], **long)
        assert result.choices[0] == alone_in(windowed)([5, 6, 7], **long)
        await settled(engine)
