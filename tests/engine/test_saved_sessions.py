"""Sessions on disk: their files, their KV, and how they go on after a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kimicore import Choice, Engine, EngineConfig, InvalidRequest, Session, SyncEngine
from kimicore.prefix import first_seen
from kimicore.saved_turns import read_saved
from rigs.sessions import full_blocks, prompt_of
from rigs.settle import settled
from rigs.tiers import always_load
from rigs.tiny import TEMPLATE

pytestmark = pytest.mark.anyio
Alone = Callable[..., Choice]
LETTERS = {3 + byte: 1000.0 for byte in b"abcdefghijklmnopqrstuvwxyz"}  # other bytes would seldom make characters
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12, "logit_bias": LETTERS}
QUESTIONS = ("in the other " * 3, "on and on", "of what? <|end|>", "é 漏")
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # of the tiny model


def config(**more: Any) -> EngineConfig:
    """Return settings of a small engine."""
    return EngineConfig(**{"dtype": "float32", "kv_device_bytes": "8MiB", **more})


async def talk(session: Session, questions: tuple[str, ...] = QUESTIONS) -> None:
    """Have some turns."""
    for question in questions:
        await session.chat(question, **GREEDY)


async def until(engine: Engine, reached: Callable[[], bool]) -> None:
    """Go on until the engine's thread has done something; each round is one of its own."""
    with anyio.fail_after(30):
        while not reached():
            await engine.generate([5], max_tokens=1, tenant="until")


def stored(engine: Engine) -> int:
    """Return how many blocks were written to disk so far."""
    disk = engine.stats().disk
    assert disk is not None
    return disk.stored_blocks


# ---------------------------------------------------------------- going on


async def test_a_session_goes_on_from_its_file(tiny: Path, alone: Alone, tmp_path: Path) -> None:
    """A resumed session has the messages, tenant and tokens of the saved one: in the same engine it finds its KV, in a
    new one it computes the same tokens, and both go on as the saved one does."""
    path = tmp_path / "session.json"
    async with Engine(tiny, config()) as engine:
        session = engine.session(tenant="blue", messages=[{"role": "system", "content": "a"}])
        await talk(session)
        saved = await session.save(path)
        assert (saved.turns, saved.tokens, saved.stored_blocks) == (4, len(session.token_ids), 0)
        before = (session.messages, session.turns, session.token_ids)
        again = engine.session(resume=path)
        assert (again.messages, again.turns, again.token_ids) == before
        went_on = await session.chat("next", **GREEDY)
        resumed = await again.chat("next", **GREEDY)
        assert resumed.choices == went_on.choices
        assert resumed.usage.cached_tokens >= went_on.usage.cached_tokens == full_blocks(len(before[2]))
        await settled(engine)
    async with Engine(tiny, config()) as engine:
        fresh = engine.session(resume=str(path), tenant="blue")
        assert (fresh.messages, fresh.turns, fresh.token_ids) == before
        result = await fresh.chat("next", **GREEDY)
        assert (result.choices, result.usage.cached_tokens) == (went_on.choices, 0)
        assert result.choices[0] == alone(prompt_of(fresh, result), **GREEDY)
        assert (fresh.messages, fresh.token_ids) == (session.messages, session.token_ids)
        with pytest.raises(InvalidRequest, match="tenant"):
            engine.session(resume=path, tenant="red")
        with pytest.raises(InvalidRequest, match="messages"):
            engine.session(resume=path, messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize("model", ["tiny", "mixed"])
@pytest.mark.parametrize("host_bytes", [None, "256KiB"])
async def test_the_kv_comes_back_after_a_restart(
    model: str,
    host_bytes: str | None,
    request: pytest.FixtureRequest,
    alone_in: Callable[[Path], Alone],
    tmp_path: Path,
) -> None:
    """save() puts every block of the conversation on disk, and a new engine's first turn reads them all."""
    folder = request.getfixturevalue(model)
    settings = config(kv_disk_dir=tmp_path / "kv", kv_disk_bytes="64MiB", kv_host_bytes=host_bytes)
    async with Engine(folder, settings) as engine:
        session = engine.session(tenant="blue")
        await talk(session)
        assert stored(engine) == 0  # nothing had to go, and nobody asked for it
        saved = await session.save(tmp_path / "session.json")
        tokens = len(session.token_ids)
        full = full_blocks(tokens)
        seen = [
            0,
            *([first_seen(full, 24, 16)] if model == "mixed" else []),
        ]  # the first block that the next turn needs
        assert saved.blocks == sum(full // 16 - first for first in seen)
        assert saved.stored_blocks == saved.blocks == stored(engine)
        twice = await session.save(tmp_path / "session.json")
        assert (twice.stored_blocks, stored(engine)) == (saved.blocks, saved.blocks)
        await settled(engine)
    async with Engine(folder, settings) as engine:
        always_load(engine)
        session = engine.session(resume=tmp_path / "session.json")
        result = await session.chat("next", **GREEDY)
        assert result.usage.cached_tokens == full_blocks(tokens)
        assert result.choices[0] == alone_in(folder)(prompt_of(session, result), **GREEDY)
        disk = engine.stats().disk
        assert disk is not None
        assert disk.hit_blocks > 0
        await settled(engine)


def test_the_sync_face_saves_and_resumes(tiny: Path, tmp_path: Path) -> None:
    """Plain calls write the KV and the file, and go on after a restart."""
    settings = config(kv_disk_dir=tmp_path / "kv", kv_disk_bytes="64MiB")
    with SyncEngine(tiny, settings) as engine:
        session = engine.session()
        session.chat(QUESTIONS[0], **GREEDY)
        saved = session.save(tmp_path / "a", timeout_s=20)
        assert saved.stored_blocks == saved.blocks == full_blocks(saved.tokens) // 16
    with SyncEngine(tiny, settings) as engine:
        again = engine.session(resume=tmp_path / "a")
        assert again.messages == session.messages
        again.chat(QUESTIONS[1], **GREEDY)
        assert again.turns == 2
    assert again.save(tmp_path / "a").stored_blocks == 0  # the engine is closed; the text is kept
    assert read_saved(tmp_path / "a").history.turns == 2


# ---------------------------------------------------------------- sinking by itself


async def test_old_turns_sink_by_themselves(tiny: Path, tmp_path: Path) -> None:
    """With more turns than may be in memory alone, each turn has the oldest ones written to disk, and no others."""
    settings = config(kv_disk_dir=tmp_path / "kv", kv_disk_bytes="64MiB")
    async with Engine(tiny, settings) as engine:
        session = engine.session(sink_after_turns=2, sink_turns=1)
        ends: list[int] = []
        for turn, question in enumerate(QUESTIONS, 1):
            await session.chat(question, **GREEDY)
            ends.append(len(session.token_ids) - 1)
            due = ends[turn - 3] // 16 if turn > 2 else 0
            await until(engine, lambda due=due: stored(engine) >= due)
            assert stored(engine) == due
        assert due > 0
        await settled(engine)


async def test_a_past_that_is_rewritten_sinks_again(tiny: Path, tmp_path: Path) -> None:
    """Where the template changes the beginning, turns that were written in the old form count as not written."""
    template = "{{ 'long ago ' if messages | length > 6 }}" + TEMPLATE
    settings = config(kv_disk_dir=tmp_path / "kv", kv_disk_bytes="64MiB")
    async with Engine(tiny, settings) as engine:
        session = engine.session(template=template, sink_after_turns=2, sink_turns=2)
        ends: list[int] = []
        for question in QUESTIONS:
            result = await session.chat(question, **GREEDY)
            ends.append(len(session.token_ids) - 1)
        prompt = prompt_of(session, result)
        due = ends[1] // 16 + len(prompt) // 16
        await until(engine, lambda: stored(engine) >= due)
        assert stored(engine) == due


async def test_turns_sink_in_company(tiny: Path, tmp_path: Path) -> None:
    """``sink_turns`` turns are written at once, and a stream's turn counts like any other."""
    settings = config(kv_disk_dir=tmp_path / "kv", kv_disk_bytes="64MiB")
    async with Engine(tiny, settings) as engine:
        session = engine.session(sink_after_turns=1, sink_turns=10)
        await session.chat(QUESTIONS[0], **GREEDY)
        await settled(engine)
        assert stored(engine) == 0
        async with session.stream_chat(QUESTIONS[1], **GREEDY) as chunks:
            async for _ in chunks:
                pass
        await until(engine, lambda: stored(engine) >= (len(session.token_ids) - 1) // 16)


async def test_blocks_of_a_session_reach_the_disk_when_they_leave(tiny: Path, tmp_path: Path) -> None:
    """What a session computed is written when memory runs short although it was used once; other requests' is not."""
    settings = config(
        kv_device_bytes=25 * BLOCK_BYTES,
        kv_disk_dir=tmp_path / "kv",
        kv_disk_bytes="64MiB",
        max_batch_size=2,
        max_batch_tokens=64,
    )
    async with Engine(tiny, settings) as engine:
        session = engine.session()
        await session.chat("in the other " * 12, **GREEDY)
        blocks = (len(session.token_ids) - 1) // 16
        for at in range(6):
            await engine.generate([7 + at] * 200, max_tokens=2, ignore_eos=True)
        await until(engine, lambda: stored(engine) >= blocks)
        for at in range(6):
            await engine.generate([17 + at] * 200, max_tokens=2, ignore_eos=True)
        assert stored(engine) == blocks > 0
