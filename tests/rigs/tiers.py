"""Engines with lower KV tiers, whose loads are taken whether they are worth it or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio

from kimicore import Engine, EngineConfig
from kimicore.rates import Rates

__all__ = ["BLOCK_BYTES", "EAGER", "GREEDY", "always_load", "at_rest", "fill", "prompt", "small"]

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # of the tiny models, all layers


class _Free(Rates):
    """A tier from which everything comes at once, by its own account."""

    def __init__(self) -> None:
        super().__init__(1e18, 0.0)

    def observe(self, load_bytes: int, seconds: float) -> None:
        """Learn nothing."""


EAGER = _Free


def always_load(engine: Engine) -> None:
    """Have an open engine load what it can: a tiny model computes faster than any disk reads."""
    below = engine.face.loop._book.below
    assert below is not None
    tiers = below.tiers
    tiers.rates = {"host": EAGER(), "disk": EAGER()}


async def at_rest(engine: Engine) -> None:
    """Wait until no block is on its way any more."""
    below = engine.face.loop._book.below
    assert below is not None
    tiers = below.tiers
    with anyio.fail_after(60):
        while tiers.busy or tiers.take_urgent():
            await engine.generate([5], max_tokens=1, temperature=0.0, ignore_eos=True, tenant="rest")
        await engine.generate([5], max_tokens=1, temperature=0.0, ignore_eos=True, tenant="rest")


def prompt(number: int, tokens: int = 90) -> list[int]:
    """Return a prompt for the tiny models that shares no block with another one."""
    return [5 + (11 * number + 3 * at + at * at * (number + 1)) % 290 for at in range(tokens)]


def small(folder: Path | None, blocks: int = 24, host_blocks: int = 0, **more: Any) -> EngineConfig:
    """Return settings with arenas of so many usable blocks of the tiny models, and a disk that takes everything."""
    host = (host_blocks + 1) * BLOCK_BYTES if host_blocks else None
    disk = {} if folder is None else {"kv_disk_dir": folder, "kv_disk_bytes": "64MiB", "kv_disk_uses": 1}
    settings = {"dtype": "float32", "kv_device_bytes": (blocks + 1) * BLOCK_BYTES, "kv_host_bytes": host, **disk}
    return EngineConfig(**{**settings, "max_batch_tokens": 64, "max_batch_size": 3, **more})


async def fill(model: Path, disk: Path, prompts: int, **more: Any) -> None:
    """Have so many prompts' blocks written to disk by an engine that is closed then."""
    async with Engine(model, small(disk, **more)) as engine:
        for number in range(prompts):
            await engine.generate(prompt(number), max_tokens=4, **GREEDY)
        await at_rest(engine)
