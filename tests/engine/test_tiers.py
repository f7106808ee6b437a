"""The KV cache in host memory and on disk as a caller sees it: more hits, never a wrong token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kimicore import Choice, Engine, EngineConfig
from rigs.settle import settled
from rigs.tiers import always_load, at_rest

pytestmark = pytest.mark.anyio
Alone = Callable[[Path], Callable[..., Choice]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # of the tiny models, all layers
PROMPTS = [[5 + (7 * i + 3 * at + at * at * (i + 1)) % 290 for at in range(90 + 16 * i)] for i in range(8)]


def config(blocks: int = 24, host_blocks: int = 0, **more: Any) -> EngineConfig:
    """Return settings with arenas of so many usable blocks."""
    host = (host_blocks + 1) * BLOCK_BYTES if host_blocks else None
    settings = {"dtype": "float32", "kv_device_bytes": (blocks + 1) * BLOCK_BYTES, "kv_host_bytes": host}
    return EngineConfig(**{**settings, "max_batch_tokens": 64, "max_batch_size": 3, **more})


async def rounds(engine: Engine, count: int, **more: Any) -> list[list[Any]]:
    """Ask for all prompts at once, several times over, and return the results of each round."""
    found: list[list[Any]] = []
    for _ in range(count):
        results: list[Any] = [None] * len(PROMPTS)

        async def one(at: int, results: list[Any] = results) -> None:
            results[at] = await engine.generate(PROMPTS[at], max_tokens=6, **GREEDY, **more)

        async with anyio.create_task_group() as group:
            for at in range(len(PROMPTS)):
                group.start_soon(one, at)
        found.append(results)
    return found


@pytest.mark.parametrize("model", ["tiny", "windowed", "mixed"])
@pytest.mark.parametrize("below", ["host", "disk", "both"])
async def test_every_mix_of_tiers_gives_the_same_tokens(
    model: str, below: str, request: pytest.FixtureRequest, alone_in: Alone, tmp_path: Path
) -> None:
    """Requests whose prefixes left the device and came back give what they give alone, from each tier and both."""
    folder = request.getfixturevalue(model)
    alone = alone_in(folder)
    disk = {"kv_disk_dir": tmp_path / "kv", "kv_disk_bytes": "64MiB", "kv_disk_uses": 1}
    settings = config(24, 0 if below == "disk" else 40, **({} if below == "host" else disk))
    async with Engine(folder, settings) as engine:
        always_load(engine)
        for results in await rounds(engine, 4):
            for prompt, result in zip(PROMPTS, results, strict=True):
                assert result.choices[0] == alone(prompt, max_tokens=6, **GREEDY)
        await at_rest(engine)
        await settled(engine)
        stats = engine.stats()
        assert stats.loads > 0
        assert stats.host is not None
        assert stats.host.used_bytes <= stats.host.limit_bytes
        assert (stats.disk is None) == (below == "host")
        tiers = [one for one in (stats.host, stats.disk) if one is not None]
        assert sum(one.hit_blocks for one in tiers) > 0
        assert sum(one.missed_blocks for one in tiers) == 0
        engine.face.loop._book.check_integrity()
