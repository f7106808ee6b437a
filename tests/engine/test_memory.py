"""What many requests and slow readers leave in memory: nothing that grows."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kimicore import Choice, Engine
from kimicore.handle import Handle
from kimicore.memory import give_back
from kimicore.requests import Request
from rigs.settle import settled

pytestmark = pytest.mark.anyio
Alone = Callable[..., Choice]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def living() -> int:
    """Return how many handles and requests there are."""
    gc.collect()
    return sum(type(one) in (Handle, Request) for one in gc.get_objects())  # isinstance() would ask lazy proxies


async def test_ended_requests_are_forgotten(shared: Engine) -> None:
    """Of 5,000 requests, half of them cancelled, nothing is left (waybarrios/vllm-mlx#154)."""
    await settled(shared)
    before = living()

    async def client(requests: int) -> None:
        for at in range(requests):
            if at % 2:
                await shared.generate([5 + at % 200], max_tokens=1, **GREEDY)
            else:
                stream = shared.stream([5 + at % 200], max_tokens=8, **GREEDY)
                await stream.__aenter__()
                await stream.aclose()

    async def round_of(requests: int) -> int:
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(client, requests // 20)
        await settled(shared)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    warm = await round_of(1000)
    end = await round_of(4000)
    with anyio.fail_after(10):  # the engine's thread may be on its way out of its last pass
        while living() > before:
            await anyio.sleep(0.01)
    loop = shared.face.loop
    assert not (loop._live or loop._inbox or loop._book._deadlines or loop._book._roster.groups)
    assert end - warm < 8 << 20
    assert shared.stats().requests_cancelled > 0


async def test_a_slow_reader_holds_up_nobody_and_misses_nothing(shared: Engine, alone: Alone) -> None:
    """Output waits merged in one place for a reader who pauses; others run on, and the reader gets all of it
    (flux0-ai/flux0#108)."""
    expected = alone([5], max_tokens=2000, **GREEDY)
    async with shared.stream([5], max_tokens=2000, **GREEDY) as slow:
        chunks = [await anext(slow)]
        other = await shared.generate([6], max_tokens=1500, **GREEDY)  # the reader pauses for as long as this takes
        assert other.choices[0] == alone([6], max_tokens=1500, **GREEDY)
        assert slow._handle is not None
        held = slow._handle._pieces
        assert len(held) == 1
        chunks.append(await anext(slow))
        assert len(chunks[1].token_ids) >= 1000
        chunks.extend([chunk async for chunk in slow])
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert tuple(one for chunk in chunks for one in chunk.token_ids) == expected.token_ids
    await settled(shared)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps what is freed, or does not")
def test_freed_pieces_go_back_to_the_system() -> None:
    """What was allocated in pieces and freed below one that is still there leaves the resident set."""
    libc = ctypes.CDLL(None)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    pieces = [libc.malloc(64 << 10) for _ in range(1024)]
    for piece in pieces:
        ctypes.memset(piece, 1, 64 << 10)
    for piece in pieces[:-1]:
        libc.free(piece)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    kept = resident()
    give_back()
    assert resident() < kept - (48 << 20)
    libc.free(pieces[-1])
