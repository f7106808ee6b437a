"""Lower tiers that fail, hang, are damaged or belong to somebody else: generation goes on, and stays right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from kimicore import Choice, Engine, EngineConfig, RequestTimeout
from kimicore.kv.disk import DiskStore
from rigs.settle import settled
from rigs.tiers import GREEDY, always_load, at_rest, fill, prompt, small

pytestmark = pytest.mark.anyio
Alone = Callable[..., Choice]


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Have reads of the disk hang until the event is set."""
    go = threading.Event()
    real = DiskStore.get

    def get(self: DiskStore, *arguments: Any) -> bool:
        go.wait(30)
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "get", get)
        try:
            yield go
        finally:
            go.set()


async def loading(engine: Engine) -> None:
    """Wait until a request is set aside for its blocks."""
    while not engine.stats().loads:
        await anyio.sleep(0.002)


async def test_code_words_stay_with_their_prompts(tiny: Path, tmp_path: Path) -> None:
    """Thirty prompts, each with a word of its own, cycled through three small tiers give what unlimited memory gives
    (NVIDIA/TensorRT-LLM#8813)."""
    prompts = [[*prompt(number, 70), 290 - number, 17, *prompt(number + 40, 30)] for number in range(30)]
    async with Engine(tiny, EngineConfig(dtype="float32", kv_device_bytes="64MiB")) as engine:
        right = [(await engine.generate(one, max_tokens=6, **GREEDY)).token_ids for one in prompts]
    async with Engine(tiny, small(tmp_path / "kv", 24, 40)) as engine:
        always_load(engine)
        for _ in range(3):
            results: list[Any] = [None] * len(prompts)

            async def one(at: int, results: list[Any] = results) -> None:
                results[at] = (await engine.generate(prompts[at], max_tokens=6, **GREEDY)).token_ids

            for begin in range(0, len(prompts), 5):
                async with anyio.create_task_group() as group:
                    for at in range(begin, begin + 5):
                        group.start_soon(one, at)
                await at_rest(engine)  # a busy machine's disk would keep up with less
            assert results == right
        stats = engine.stats()
        assert stats.host is not None
        assert stats.disk is not None
        assert min(stats.host.hit_blocks, stats.disk.hit_blocks) > 0
        await at_rest(engine)
        await settled(engine)


async def test_sessions_that_return_see_their_own_facts(tiny: Path, tmp_path: Path) -> None:
    """Eight long contexts, sent to disk and asked again, have the log-probabilities of an engine without a cache
    (LMCache/LMCache#4385)."""
    options = {"max_tokens": 1, "logprobs": 5, **GREEDY}
    async with Engine(tiny, EngineConfig(dtype="float32", kv_device_bytes="64MiB", prefix_cache=False)) as engine:
        right = [(await engine.generate(prompt(at, 300), **options)).logprobs for at in range(8)]
    async with Engine(tiny, small(tmp_path / "kv", 44)) as engine:
        always_load(engine)
        for _ in range(2):
            for at in range(8):
                found = (await engine.generate(prompt(at, 300), **options)).logprobs
                assert found is not None
                assert right[at] is not None
                for got, want in zip(found, right[at] or (), strict=True):
                    assert [one.token_id for one in got.top] == [one.token_id for one in want.top]
                    assert [one.logprob for one in got.top] == pytest.approx(
                        [one.logprob for one in want.top], abs=1e-5
                    )
            await at_rest(engine)
        assert engine.stats().loads > 0


async def test_a_staging_room_of_two_blocks_serves_a_long_prefix(tiny: Path, tmp_path: Path, alone: Alone) -> None:
    """Where the host has room for two blocks only, a prefix of five on disk is a hit whole or in part, never filled
    with what was not read (LMCache/LMCache#3022)."""
    async with Engine(tiny, small(tmp_path / "kv", 24, 2)) as engine:
        always_load(engine)
        for _ in range(3):
            for number in range(5):
                result = await engine.generate(prompt(number), max_tokens=6, **GREEDY)
                assert result.choices[0] == alone(prompt(number), max_tokens=6, **GREEDY)
            await at_rest(engine)
        await settled(engine)


async def test_a_restart_reports_what_it_really_saves(tiny: Path, tmp_path: Path, alone: Alone) -> None:
    """After a restart on a warm folder the cached tokens that are reported were really not computed
    (ggml-org/llama.cpp#26676)."""
    disk = tmp_path / "kv"
    await fill(tiny, disk, 3)
    async with Engine(tiny, small(disk)) as engine:
        always_load(engine)
        before = engine.stats()
        result = await engine.generate(prompt(1), max_tokens=6, **GREEDY)
        after = engine.stats()
        assert result.choices[0] == alone(prompt(1), max_tokens=6, **GREEDY)
        assert result.usage.cached_tokens == 80
        assert after.cached_tokens - before.cached_tokens == 80
        assert after.loads - before.loads == 1
        rows = 6  # one for the last ten tokens and the first new one, and five of one token
        assert after.steps - before.steps == rows


async def test_a_read_that_hangs_is_not_waited_for(
    tiny: Path, tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request goes on without its blocks when their read takes too long, and others are served meanwhile; what
    arrives later joins the cache."""
    disk = tmp_path / "kv"
    await fill(tiny, disk, 2)
    async with Engine(tiny, small(disk)) as engine:
        always_load(engine)
        with held(monkeypatch) as go:
            result: Any = None

            async def ask() -> None:
                nonlocal result
                result = await engine.generate(prompt(1), max_tokens=6, **GREEDY)

            async with anyio.create_task_group() as group:
                group.start_soon(ask)
                await loading(engine)
                other = await engine.generate(prompt(7), max_tokens=6, **GREEDY)
                assert other.choices[0] == alone(prompt(7), max_tokens=6, **GREEDY)
            assert result.choices[0] == alone(prompt(1), max_tokens=6, **GREEDY)
            assert engine.stats().loads_late == 1
            go.set()
            await at_rest(engine)
        await settled(engine)


@pytest.mark.parametrize("how", ["cancel", "timeout", "close"])
async def test_requests_end_while_their_blocks_are_on_the_way(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A request that is cancelled, times out or loses its engine while it loads ends at once, and its blocks are free
    when the read is over."""
    disk = tmp_path / "kv"
    await fill(tiny, disk, 2)
    engine = Engine(tiny, small(disk, shutdown_s=0.5))
    await engine.open()
    always_load(engine)
    with held(monkeypatch) as go:
        if how == "timeout":
            with pytest.raises(RequestTimeout, match="waiting"):
                await engine.generate(prompt(1), max_tokens=6, timeout_s=0.1, **GREEDY)
        else:
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: engine.generate(prompt(1), max_tokens=6, **GREEDY))
                await loading(engine)
                group.cancel_scope.cancel()
        if how == "close":
            with anyio.fail_after(5):
                await engine.aclose()
            return
        go.set()
        await at_rest(engine)
    await settled(engine)
    await engine.aclose()


async def test_cancels_during_slow_loads_leak_nothing(
    tiny: Path, tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round after round a request is cancelled while its blocks are being read: they are held until the read is over
    and not longer, and the next request with that prefix is right (vllm-project/vllm-ascend#16662)."""
    disk = tmp_path / "kv"
    await fill(tiny, disk, 2)
    async with Engine(tiny, small(disk)) as engine:
        always_load(engine)
        book = engine.face.loop._book
        for turn in range(20):
            before = engine.stats().loads
            with held(monkeypatch) as go:
                async with anyio.create_task_group() as group:
                    group.start_soon(lambda: engine.generate(prompt(1), max_tokens=6, **GREEDY))
                    while engine.stats().loads == before:
                        await anyio.sleep(0.002)
                    group.cancel_scope.cancel()
                while engine.stats().requests_waiting:
                    await anyio.sleep(0.002)
                assert book.ledger.counts().used == 5  # what is being written to belongs to the read
                go.set()
                await at_rest(engine)
            await settled(engine)
            if turn % 5 == 0:
                result = await engine.generate(prompt(1), max_tokens=6, **GREEDY)
                assert result.usage.cached_tokens == 80
                assert result.choices[0] == alone(prompt(1), max_tokens=6, **GREEDY)
            book.ledger.flush()
            host = book.below.tiers.host  # type: ignore[union-attr]
            await at_rest(engine)
            for key in list(host.slots[0]):
                host.drop(0, key)


async def test_preempted_requests_come_back_from_the_host(tiny: Path, alone: Alone) -> None:
    """Where memory holds two of four sequences and the host the rest, those that gave way come back, and each has all
    of its tokens (vllm-project/vllm#16832)."""
    async with Engine(tiny, small(None, 16, 64, max_batch_size=4)) as engine:
        always_load(engine)
        results: list[Any] = [None] * 4

        async def one(at: int) -> None:
            results[at] = await engine.generate(prompt(at, 40), max_tokens=100, **GREEDY)

        async with anyio.create_task_group() as group:
            for at in range(4):
                group.start_soon(one, at)
        for at, result in enumerate(results):
            assert result.choices[0] == alone(prompt(at, 40), max_tokens=100, **GREEDY)
            assert (len(result.token_ids), result.finish_reason) == (100, "length")
        stats = engine.stats()
        assert stats.preemptions > 0
        await at_rest(engine)
        await settled(engine)
