"""The lower tiers under the two demo models: the same tokens in float32, the same bytes in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from kimicore import Engine, EngineConfig
from kimicore.handle import SinkCall
from kimicore.wake import AsyncWaker
from rigs.settle import settled
from rigs.tiers import always_load, at_rest

pytestmark = pytest.mark.anyio
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
TEXT = (Path(__file__).parents[1] / "data" / "alice.txt").read_text()


def texts(engine: Engine, tokens: int) -> list[list[int]]:
    """Return three contexts that share nothing."""
    ids = engine.face.tokenizer.encode(TEXT[:20_000])
    return [[100 + at, *ids[at * 300 : at * 300 + tokens]] for at in range(3)]


async def everyone(engine: Engine, contexts: list[list[int]]) -> list[Any]:
    """Ask for all contexts at once and return their tokens."""
    found: list[Any] = [None] * len(contexts)

    async def one(at: int) -> None:
        found[at] = (await engine.generate(contexts[at], **GREEDY)).token_ids

    async with anyio.create_task_group() as group:
        for at in range(len(contexts)):
            group.start_soon(one, at)
    return found


async def push_out(engine: Engine) -> None:
    """Have every cached block leave the idle engine's device, with a copy below."""
    await at_rest(engine)
    engine.face.loop._book.ledger.flush()
    await at_rest(engine)


async def written(engine: Engine, ids: list[int]) -> None:
    """Have a context written to disk."""
    call = SinkCall(ids, len(ids), "", "full", AsyncWaker())
    engine.face.loop.sink(call)
    with anyio.fail_after(60):
        while not call.done:
            await call.waker.wait()  # type: ignore[attr-defined]
    assert call.stored == call.blocks > 0


@pytest.mark.parametrize("model", ["smollm2", "gemma"])
async def test_any_mix_of_tiers_gives_the_same_tokens(
    model: str, request: pytest.FixtureRequest, tmp_path: Path, anyio_backend: str
) -> None:
    """In float32 contexts that came back from the host, from disk, from both and after a restart give the tokens of an
    engine that kept everything on the device."""
    if anyio_backend == "trio":
        pytest.skip("the device's side is the same on every event loop, and this takes a while")
    path = request.getfixturevalue(f"{model}_path")
    tokens = 250 if model == "smollm2" else 620  # over Gemma's window of 512
    async with Engine(path, EngineConfig(dtype="float32", kv_device_bytes="512MiB")) as engine:
        contexts = texts(engine, tokens)
        right = await everyone(engine, contexts)
    disk = {"kv_disk_dir": tmp_path / "kv", "kv_disk_bytes": "1GiB", "kv_disk_uses": 1}
    settings = EngineConfig(dtype="float32", kv_device_bytes="256MiB", kv_host_bytes="192MiB", **disk)
    async with Engine(path, settings) as engine:
        always_load(engine)
        assert await everyone(engine, contexts) == right
        for place in ("host", "disk", "both"):
            if place == "disk":
                for ids in contexts:
                    await written(engine, ids)
            await push_out(engine)
            if place != "host":
                host = engine.face.loop._book.below.tiers.host  # type: ignore[union-attr]
                for kind, slots in enumerate(host.slots):
                    for key in list(slots)[:: 1 if place == "disk" else 2]:
                        host.drop(kind, key)
            before = engine.stats()
            assert await everyone(engine, contexts) == right
            after = engine.stats()
            assert after.loads - before.loads == 3
            assert after.cached_tokens - before.cached_tokens == 3 * (tokens // 16 * 16)
        await at_rest(engine)
        await settled(engine)
    async with Engine(path, settings) as engine:
        always_load(engine)
        assert await everyone(engine, contexts) == right
        assert engine.stats().cached_tokens == 3 * (tokens // 16 * 16)


@pytest.mark.parametrize("model", ["smollm2", "gemma"])
@pytest.mark.parametrize("place", ["host", "disk"])
async def test_the_bytes_that_come_back_are_those_that_left(
    model: str, place: str, request: pytest.FixtureRequest, tmp_path: Path, anyio_backend: str
) -> None:
    """In 16 bits every block has the same bytes after it was in a lower tier."""
    if anyio_backend == "trio":
        pytest.skip("the device's side is the same on every event loop")
    path = request.getfixturevalue(f"{model}_path")
    disk = {"kv_disk_dir": tmp_path / "kv", "kv_disk_bytes": "1GiB", "kv_disk_uses": 1}
    async with Engine(
        path, EngineConfig(dtype="bfloat16", kv_device_bytes="256MiB", kv_host_bytes="128MiB", **disk)
    ) as engine:
        always_load(engine)
        ids = texts(engine, 600)[0]
        await engine.generate(ids, **GREEDY)
        left = blocks_of(engine)
        await written(engine, ids)
        await push_out(engine)
        assert not set(blocks_of(engine)) & set(left)
        if place == "disk":
            host = engine.face.loop._book.below.tiers.host  # type: ignore[union-attr]
            for kind, slots in enumerate(host.slots):
                for key in list(slots):
                    host.drop(kind, key)
        result = await engine.generate(ids, **GREEDY)
        assert result.usage.cached_tokens == 592
        back = blocks_of(engine)
        same = [key for key in left if key in back]
        assert len(same) >= 37
        assert all(left[key] == back[key] for key in same)


def blocks_of(engine: Engine) -> dict[Any, bytes]:
    """Return the bytes of every block that can be found on the device."""
    loop = engine.face.loop
    memory = loop.runner._arena.memory.numpy()  # type: ignore[attr-defined]
    found = {}
    for kind, one in enumerate(loop._book.ledger.classes):
        for key, slot in loop._book.ledger.index(kind).slots.items():
            found[kind, key] = memory[slot * one.block_bytes : (slot + 1) * one.block_bytes].tobytes()
    return found
