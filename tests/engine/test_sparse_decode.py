"""Sparse decoding as a caller sees it: opt-in, apart from everybody else, and close to full attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from kimicore import Engine, EngineConfig, InvalidRequest
from rigs.settle import settled
from rigs.tiers import GREEDY, prompt

pytestmark = pytest.mark.anyio
SPARSE: dict[str, Any] = {"dtype": "float32", "sparse_decode": True}
TEXT = (Path(__file__).parents[1] / "data" / "alice.txt").read_text()


async def test_a_share_of_all_is_full_attention(tiny: Path, alone_in: Any) -> None:
    """Where every block is kept, the tokens are those of full attention, to the bit."""
    alone = alone_in(tiny)
    async with Engine(tiny, EngineConfig(kv_device_bytes="8MiB", **SPARSE)) as engine:
        for at in range(3):
            ids = prompt(at, 150)
            right = alone(ids, max_tokens=24, **GREEDY).token_ids
            for share in (None, 1.0, 0.999):
                result = await engine.generate(ids, max_tokens=24, sparse_decode=share, tenant=str(share), **GREEDY)
                assert result.token_ids == right


@pytest.mark.parametrize("model", ["tiny", "mixed"])
async def test_company_changes_nothing(model: str, request: pytest.FixtureRequest) -> None:
    """In float32 a sparse request gives the same tokens alone and among sparse and full ones, whose own stay right."""
    folder = request.getfixturevalue(model)
    shares = (None, 0.5, 0.2)
    found: dict[tuple[int, float | None], tuple[int, ...]] = {}
    async with Engine(folder, EngineConfig(kv_device_bytes="8MiB", prefix_cache=False, **SPARSE)) as engine:

        async def ask(at: int, share: float | None) -> None:
            ids = prompt(at, 130 + 7 * at)
            found[at, share] = (await engine.generate(ids, max_tokens=24, sparse_decode=share, **GREEDY)).token_ids

        for at in range(3):
            for share in shares:
                await ask(at, share)
        right = dict(found)
        async with anyio.create_task_group() as group:
            for at in range(3):
                for share in shares:
                    group.start_soon(ask, at, share)
        assert found == right
    assert any(right[at, 0.2] != right[at, None] for at in range(3)), "the share makes no difference"


async def test_what_is_generated_sparsely_is_for_nobody_else(tiny: Path) -> None:
    """A prompt's blocks are shared with everybody, since prompts are computed with all of the context; those of tokens
    that were generated from a part of it are not."""
    ids = prompt(0, 100)
    async with Engine(tiny, EngineConfig(kv_device_bytes="8MiB", **SPARSE)) as engine:
        first = await engine.generate(ids, max_tokens=60, sparse_decode=0.3, **GREEDY)
        assert (await engine.generate(ids, max_tokens=2, **GREEDY)).usage.cached_tokens == 96
        more = [*ids, *first.token_ids, 7]
        assert (await engine.generate(more, max_tokens=2, **GREEDY)).usage.cached_tokens == 96
        assert (await engine.generate(more, max_tokens=2, **GREEDY)).usage.cached_tokens == 160
        await settled(engine)
        assert engine.stats().kv_blocks_used == 0
        engine.face.loop._book.check_integrity()


@pytest.mark.parametrize("kv", [{}, {"kv_host_bytes": "4MiB"}])
async def test_memory_that_runs_short(kv: dict[str, Any], tiny: Path) -> None:
    """Sparse requests are preempted and go on like others; everybody gets all tokens, and full ones the right ones."""
    settings = EngineConfig(kv_device_bytes="256KiB", max_batch_tokens=64, **SPARSE, **kv)
    found: dict[tuple[int, float | None], tuple[int, ...]] = {}
    async with Engine(tiny, settings) as engine:

        async def ask(at: int, share: float | None) -> None:
            result = await engine.generate(prompt(at, 90), max_tokens=40, sparse_decode=share, **GREEDY)
            found[at, share] = result.token_ids

        async with anyio.create_task_group() as group:
            for at in range(5):
                for share in (None, 0.4):
                    group.start_soon(ask, at, share)
        await settled(engine)
        assert engine.stats().preemptions > 0
        assert engine.stats().kv_blocks_used == 0
    async with Engine(tiny, EngineConfig(dtype="float32", kv_device_bytes="8MiB")) as engine:
        for at in range(5):
            right = await engine.generate(prompt(at, 90), max_tokens=40, **GREEDY)
            assert found[at, None] == right.token_ids
            assert len(found[at, 0.4]) == 40


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sparse_decode": 0.0}, "sparse_decode=0: must be a share over 0"),
        ({"sparse_decode": 1.5}, "sparse_decode=1.5"),
        ({"sparse_decode": "half"}, "sparse_decode='half'"),
        ({"sparse_decode": float("nan")}, "sparse_decode=nan"),
        ({"sparse_decode": True}, "sparse_decode=True"),
        ({"sparse_decode": 0.5, "kv_precision": "int8"}, "needs KV of full precision, and this request's is int8"),
    ],
)
async def test_what_cannot_be_had_is_refused_by_name(asked: dict[str, Any], message: str, tiny: Path) -> None:
    """A share that means nothing, or that goes with nothing, is refused before any work."""
    async with Engine(tiny, EngineConfig(kv_device_bytes="8MiB", kv_precisions="int8", **SPARSE)) as engine:
        with pytest.raises(InvalidRequest, match=message):
            await engine.generate(prompt(0), max_tokens=2, **asked)


async def test_an_engine_without_summaries_says_so(tiny: Path) -> None:
    """Sparse decoding has to be asked for in the settings as well, since it needs memory of its own."""
    async with Engine(tiny, EngineConfig(dtype="float32", kv_device_bytes="8MiB")) as engine:
        with pytest.raises(InvalidRequest, match="keeps no summaries; set sparse_decode=True"):
            await engine.generate(prompt(0), max_tokens=2, sparse_decode=0.5)


@pytest.mark.parametrize("model", ["smollm2", "gemma"])
async def test_demo_models_go_on_from_a_part(model: str, request: pytest.FixtureRequest, anyio_backend: str) -> None:
    """At three quarters of the blocks a real model goes on as with full attention for most of 16 tokens."""
    if anyio_backend == "trio":
        pytest.skip("the device's side is the same on every event loop, and this takes a while")
    path = request.getfixturevalue(f"{model}_path")
    async with Engine(path, EngineConfig(kv_device_bytes="256MiB", **SPARSE)) as engine:
        same = 0
        for at in range(3):
            ids = engine.face.tokenizer.encode(TEXT[4000 * at : 4000 * at + 4000])[:700]
            full = await engine.generate(ids, max_tokens=16, **GREEDY)
            part = await engine.generate(ids, max_tokens=16, sparse_decode=0.75, **GREEDY)
            pairs = zip(full.token_ids, part.token_ids, strict=True)
            same += next((at for at, (one, other) in enumerate(pairs) if one != other), 16)
    assert same >= 36


@pytest.mark.parametrize("share", [1, 0.5, np.float32(0.5)])
async def test_a_sparse_session_goes_on(share: Any, tiny: Path, tmp_path: Path) -> None:
    """Whatever number the share was given as, its session is saved and goes on."""
    template = "{% for one in messages %}{{ one.content }} {% endfor %}"
    async with Engine(tiny, EngineConfig(kv_device_bytes="8MiB", **SPARSE)) as engine:
        session = engine.session(sparse_decode=share, template=template)
        await session.chat("abc " * 40, max_tokens=8, **GREEDY)
        await session.save(tmp_path / "saved")
        resumed = engine.session(resume=tmp_path / "saved")
        assert resumed._turns.kv.share == (None if share == 1 else 0.5)
        await resumed.chat("abc", max_tokens=8, **GREEDY)
