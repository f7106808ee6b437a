"""Reading streams, and what every engine test ends with."""

from __future__ import annotations

from collections.abc import Iterable

from kimicore import Engine, StreamChunk
from kimicore.engine import Stream

__all__ = ["ids_of", "joined", "read", "settled"]


async def settled(engine: Engine) -> None:
    """Wait until the engine has seen everything before this, and check that nothing is held any more."""
    await engine.generate([5], max_tokens=1, temperature=0.0, ignore_eos=True, tenant="settled")
    loop = engine.face.loop
    stats = engine.stats()
    assert stats.kv_blocks_used == 0
    assert stats.kv_blocks_used + stats.kv_blocks_cached + stats.kv_blocks_free == stats.kv_blocks_total
    assert stats.requests_running == stats.requests_waiting == 0
    assert not loop._live
    loop._book.check_integrity()


async def read(stream: Stream) -> list[StreamChunk]:
    """Return all chunks of a stream."""
    async with stream:
        return [chunk async for chunk in stream]


def joined(chunks: Iterable[StreamChunk], index: int = 0) -> str:
    """Return the text of one choice."""
    return "".join(chunk.text for chunk in chunks if chunk.index == index)


def ids_of(chunks: Iterable[StreamChunk], index: int = 0) -> tuple[int, ...]:
    """Return the token ids of one choice."""
    return tuple(one for chunk in chunks if chunk.index == index for one in chunk.token_ids)
