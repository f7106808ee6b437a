"""Lower tiers whose folder is damaged, full, somebody else's or gone: a clear error at the start, or a miss."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kimicore import Choice, ConfigError, Engine, EngineConfig
from kimicore.kv.disk import DiskStore
from rigs.settle import settled
from rigs.tiers import BLOCK_BYTES, GREEDY, always_load, at_rest, fill, prompt, small
from rigs.tiny import make_tiny

pytestmark = pytest.mark.anyio
Alone = Callable[..., Choice]


@pytest.mark.parametrize("change", ["weights", "rope", "block", "window", "tokenizer"])
async def test_what_another_setting_wrote_is_never_read(tmp_path: Path, change: str) -> None:
    """A folder that was filled under other weights, another rope, block size, window or tokenizer gives no hit and no
    error, and the text is right (waybarrios/vllm-mlx#365)."""
    disk, model = tmp_path / "kv", make_tiny(tmp_path / "model")
    await fill(model, disk, 2)
    more: dict[str, Any] = {}
    if change == "weights":
        make_tiny(model, seed=1)
    elif change == "rope":
        make_tiny(model, rope_theta=20_000.0)
    elif change == "block":
        more = {"block_tokens": 32}
    elif change == "window":
        make_tiny(model, model_type="mistral", sliding_window=48)
    else:
        path = model / "tokenizer.json"
        path.write_text(path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    async with Engine(model, EngineConfig(dtype="float32", prefix_cache=False)) as engine:
        right = await engine.generate(prompt(1), max_tokens=6, **GREEDY)
    async with Engine(model, small(disk, **more)) as engine:
        always_load(engine)
        result = await engine.generate(prompt(1), max_tokens=6, **GREEDY)
        assert (result.usage.cached_tokens, engine.stats().loads) == (0, 0)
        assert result.token_ids == right.token_ids


@pytest.mark.parametrize("damage", ["flip", "cut", "junk", "empty", "zeros"])
async def test_damaged_files_are_misses(tiny: Path, tmp_path: Path, alone: Alone, damage: str) -> None:
    """Flipped bits, cut files, junk behind them, empty ones and pages of zeros are counted misses; the text is right
    (LMCache/LMCache#3292)."""
    disk = tmp_path / "kv"
    await fill(tiny, disk, 4)
    chance = random.Random(damage)
    for path in disk.glob("segment-*"):
        data = bytearray(path.read_bytes())
        if damage == "flip":
            for page in range(1, len(data) // 4096):  # not the record's header, or it would not be found at all
                data[4096 * page + chance.randrange(300, 4096)] ^= 1 << chance.randrange(8)
        elif damage == "cut":
            del data[len(data) // 2 :]
        elif damage == "junk":
            data += chance.randbytes(9_000)
        elif damage == "empty":
            data.clear()
        else:
            data[len(data) // 3 : len(data) // 2] = bytes(len(data) // 2 - len(data) // 3)
        path.write_bytes(data)
    async with Engine(tiny, small(disk)) as engine:
        always_load(engine)
        for number in range(4):
            result = await engine.generate(prompt(number), max_tokens=6, **GREEDY)
            assert result.choices[0] == alone(prompt(number), max_tokens=6, **GREEDY)
        stats = engine.stats()
        assert stats.disk is not None
        if damage == "flip":
            assert stats.disk.missed_blocks > 0
            assert stats.disk.set_aside > 0
        await at_rest(engine)
        await settled(engine)


async def test_folders_that_cannot_serve_are_named_at_the_start(tiny: Path, tmp_path: Path) -> None:
    """A path that is a file, a loop of links, a folder that others may write to and one that is in use are refused
    when the engine opens, by name; a missing parent is made (grantjenks/python-diskcache#62)."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="kv_disk_bytes=1000000: at least"):
        await Engine(tiny, small(tmp_path / "small", kv_disk_bytes="1MB")).open()
    with pytest.raises(ConfigError, match="kv_disk_dir='~nobody-of-that-name/kv'"):
        await Engine(tiny, small(None, kv_disk_dir="~nobody-of-that-name/kv")).open()
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "theirs" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match=r"theirs: it holds files .*letter\.txt"):
        await Engine(tiny, small(tmp_path / "theirs")).open()
    for name in ("file", "loop", "open"):
        with pytest.raises(ConfigError, match=name):
            await Engine(tiny, small(tmp_path / name)).open()
    deep = tmp_path / "a" / "b" / "kv"
    async with Engine(tiny, small(deep)) as engine:
        assert deep.is_dir()
        assert deep.stat().st_mode & 0o077 == 0
        with pytest.raises(ConfigError, match="is using it"):
            await Engine(tiny, small(deep)).open()
        await engine.generate(prompt(0), max_tokens=2, **GREEDY)
    async with Engine(tiny, small(deep)) as engine:  # it was given back
        await engine.generate(prompt(0), max_tokens=2, **GREEDY)


async def test_an_engine_that_cannot_open_gives_the_folder_back(tiny: Path, tmp_path: Path) -> None:
    """Settings that are refused after the folder was opened leave it free for the next engine."""
    disk = tmp_path / "kv"
    with pytest.raises(ConfigError, match="context_tokens"):
        await Engine(tiny, small(disk, context_tokens=8_000)).open()
    with pytest.raises(ConfigError, match="memory are available"):
        await Engine(tiny, small(disk, kv_host_bytes="4TiB")).open()
    async with Engine(tiny, small(disk)) as engine:
        await engine.generate(prompt(0), max_tokens=2, **GREEDY)


async def test_a_folder_that_goes_away_costs_hits_only(tiny: Path, tmp_path: Path, alone: Alone) -> None:
    """When the folder is removed under a running engine, or its disk refuses writes, requests go on and are right."""
    import shutil

    disk = tmp_path / "kv"
    async with Engine(tiny, small(disk)) as engine:
        always_load(engine)
        for number in range(3):
            await engine.generate(prompt(number), max_tokens=4, **GREEDY)
        await at_rest(engine)
        shutil.rmtree(disk)
        for number in range(6):
            result = await engine.generate(prompt(number), max_tokens=6, **GREEDY)
            assert result.choices[0] == alone(prompt(number), max_tokens=6, **GREEDY)
        await at_rest(engine)
        await settled(engine)


async def test_a_disk_that_takes_nothing_stands_in_nobodys_way(
    tiny: Path, tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every write fails, blocks are dropped and counted, and the staging room is not clogged."""
    monkeypatch.setattr(DiskStore, "put", lambda self, blocks: [0] * len(blocks))
    async with Engine(tiny, small(tmp_path / "kv")) as engine:
        always_load(engine)
        for number in range(30):
            result = await engine.generate(prompt(number), max_tokens=6, **GREEDY)
            assert result.choices[0] == alone(prompt(number), max_tokens=6, **GREEDY)
        await at_rest(engine)
        stats = engine.stats()
        assert stats.disk is not None
        assert (stats.disk.blocks, stats.disk.stored_blocks) == (0, 0)
        assert stats.disk.dropped_blocks > 0
        await settled(engine)


async def test_memory_and_disk_stay_within_their_limits(tiny: Path, tmp_path: Path) -> None:
    """Hundreds of different prompts leave no tier over its limit, on the disk in bytes that are really used."""
    disk = tmp_path / "kv"
    limit = 16 << 20
    async with Engine(tiny, small(disk, 200, 100, kv_disk_bytes=limit)) as engine:
        always_load(engine)
        chance = random.Random(5)
        for batch in range(120):

            async def one(number: int) -> None:
                await engine.generate(prompt(number, chance.choice([200, 300])), max_tokens=2, **GREEDY)

            async with anyio.create_task_group() as group:
                for at in range(2):
                    group.start_soon(one, batch * 2 + at)
            await at_rest(engine)
            stats = engine.stats()
            assert stats.host is not None
            assert stats.host.used_bytes <= stats.host.limit_bytes <= 101 * BLOCK_BYTES
            assert sum(one.stat().st_blocks * 512 for one in disk.iterdir()) <= limit
        await settled(engine)
        assert stats.disk is not None
        assert stats.disk.stored_blocks > stats.disk.blocks  # some had to leave


async def test_a_fork_of_the_process_leaves_the_folder_alone(tiny: Path, tmp_path: Path) -> None:
    """A child that was forked while an engine has the folder neither holds it nor frees it for others."""
    disk = tmp_path / "kv"
    async with Engine(tiny, small(disk)) as engine:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(ConfigError, match="is using it"):
            await Engine(tiny, small(disk)).open()
        await engine.generate(prompt(0), max_tokens=2, **GREEDY)
