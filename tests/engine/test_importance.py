"""Measuring attention in a running engine: it changes no token, the policy hears of it, and warm-up prepares it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from attrs import evolve

from kimicore import Choice, ConfigError, Engine, EngineConfig, SyncEngine
from kimicore.cli.main import main
from kimicore.cli.warmup import beginnings
from kimicore.kernels.build import cache_folder
from kimicore.model.importance import MEASURED_QUERIES
from kimicore.model.importance_table import ImportanceTable, table_path
from kimicore.model.load import open_source
from kimicore.types import BoundStep, StepResult
from rigs.runners import Around, around, gated
from rigs.settle import settled

pytestmark = pytest.mark.anyio
Alone = Callable[[Path], Callable[..., Choice]]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PROMPTS = [[5 + (7 * i + 3 * at + at * at * (i + 1)) % 290 for at in range(30 + 50 * i)] for i in range(6)]


def config(**more: Any) -> EngineConfig:
    settings: dict[str, Any] = {"dtype": "float32", "kv_device_bytes": "8MiB", "importance": "attention"}
    return EngineConfig(**{**settings, "eviction": "activity-importance", **more})


@contextmanager
def heard(engine: Any) -> Iterator[list[tuple[int, list[bytes], list[float]]]]:
    """Note what the policies of an engine hear of importance: class, keys, values."""
    told: list[tuple[int, list[bytes], list[float]]] = []
    for kind, blocks in enumerate(engine.face.loop._book.ledger._blocks):
        tell = blocks.policy.importance

        def note(keys: Any, values: Any, kind: int = kind, tell: Any = tell) -> None:
            told.append((kind, list(keys), list(values)))
            tell(keys, values)

        blocks.policy.importance = note
    yield told
    for blocks in engine.face.loop._book.ledger._blocks:
        del blocks.policy.importance


class Weighing(Around):
    """Runs each step once more, with the weights that the attention itself gives each block, and keeps both."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.found: list[tuple[int, Any, torch.Tensor]] = []  # context, what the step gave, the attention's own

    def run(self, step: BoundStep) -> StepResult:
        result = super().run(step)
        batch = self.inner._packer.pack(step)
        mass = torch.zeros(batch.block_tables[0].shape)
        model, layers = self.inner.model, self.inner.model._attention
        ops = evolve(model.ops, paged_attention=partial(model.ops.paged_attention, importance=mass))
        model._attention = [evolve(one, ops=ops) for one in layers]
        with torch.inference_mode():
            model.forward(batch, self.inner._arena.views, [torch.zeros(1, mass.shape[1])])
        model._attention = layers
        ((found,),) = result.importance
        self.found.append((int(batch.contexts[0]), found, mass[0]))
        return result


async def ask_all(engine: Engine, **more: Any) -> list[Choice]:
    found: list[Any] = [None] * len(PROMPTS)

    async def one(at: int) -> None:
        found[at] = (await engine.generate(PROMPTS[at], max_tokens=12, **GREEDY, **more)).choices[0]

    async with anyio.create_task_group() as group:
        for at in range(len(PROMPTS)):
            group.start_soon(one, at)
    return found


@pytest.mark.parametrize("model", ["tiny", "windowed", "mixed"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
async def test_the_same_tokens(model: str, native: bool, request: pytest.FixtureRequest, alone_in: Alone) -> None:
    """With attention measured at every step requests give what they give alone in an engine that measures none,
    through chunks, hits and an arena that is too small for all."""
    folder = request.getfixturevalue(model)
    small = (24 if model == "tiny" else 30) * 8192
    how = {"importance_every": 1, "max_batch_tokens": 64, "kv_device_bytes": small, "native_kernels": native}
    async with Engine(folder, config(**how)) as engine:
        for _ in range(2 if native else 1):
            found = await ask_all(engine)
            for prompt, choice in zip(PROMPTS, found, strict=True):
                assert choice == alone_in(folder)(prompt, max_tokens=12, **GREEDY)
        await settled(engine)
        assert engine.stats().policy_faults == 0


@pytest.mark.parametrize("model", ["tiny", "mixed"])
async def test_the_policy_hears_of_it(model: str, request: pytest.FixtureRequest) -> None:
    """The policy hears of the blocks after the first that lie far behind a request's end, each with its own value."""
    folder = request.getfixturevalue(model)
    async with Engine(folder, config(importance_every=1000)) as engine:
        await engine.generate([5], max_tokens=1, **GREEDY)  # step 0, which measures all rows
        with heard(engine) as told:
            await engine.generate(PROMPTS[5], max_tokens=2, **GREEDY)
            await settled(engine)
        ((kind, keys, values),) = told  # the window of 24 tokens holds no two whole blocks to compare
        assert kind == 0 and len(PROMPTS[5]) == 280
        assert len(set(keys)) == len(keys) == (280 - MEASURED_QUERIES - 64) // 16 - 1
        assert sum(values) == pytest.approx(len(values), rel=1e-4) and max(values) > 1.05 > 0.95 > min(values) > 0


async def test_measured_as_the_attention_is(tiny: Path) -> None:
    """What a step gives are the weights that the attention itself has, in float32 over the chosen layers."""
    async with Engine(tiny, config(importance_every=1)) as engine:
        loop = engine.face.loop
        inner, loop.runner = loop.runner, (weighing := Weighing(loop.runner))
        await engine.generate(PROMPTS[5], max_tokens=4, **GREEDY)
        loop.runner = inner
    assert [context for context, _, _ in weighing.found] == [280, 281, 282, 283]
    for context, found, mass in weighing.found[1:]:  # the attention measures single queries only
        high = (context - 1 - 64) // 16
        assert len(found) == high and math.isnan(found[0])
        expected = mass[1:high] * (high - 1) / mass[1:high].sum()
        torch.testing.assert_close(torch.from_numpy(found[1:]), expected, rtol=1e-4, atol=1e-5)


async def test_off_by_default(tiny: Path) -> None:
    """Nothing is measured and nothing told unless it is asked for."""
    async with Engine(tiny, EngineConfig(dtype="float32", kv_device_bytes="8MiB")) as engine:
        with around(engine, lambda step: steps.append(step.measured)), heard(engine) as told:
            steps: list[tuple[int, ...]] = []
            await engine.generate(PROMPTS[5], max_tokens=12, **GREEDY)
        assert steps and not any(steps) and not told


async def test_a_cancelled_request_tells_nothing(tiny: Path) -> None:
    """A request that is cancelled within a step leaves its blocks, and nothing of what was measured."""
    async with Engine(tiny, config(importance_every=1)) as engine:
        await engine.generate([5], max_tokens=1, **GREEDY)
        with heard(engine) as told:
            with gated(engine) as gate, anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:

                    async def stop() -> None:
                        gate.let(2)
                        for _ in range(3):
                            await anyio.to_thread.run_sync(gate.wait_step)
                        scope.cancel()

                    group.start_soon(stop)
                    await engine.generate(PROMPTS[5], max_tokens=50, **GREEDY)
            await settled(engine)
            assert told == []
        again = await engine.generate(PROMPTS[5], max_tokens=1, **GREEDY)
        assert again.usage.cached_tokens > 200


# ---------------------------------------------------------------- the table


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own, but for the compiled kernels."""
    (tmp_path / "native").symlink_to(cache_folder())
    monkeypatch.setenv("KIMICORE_CACHE", str(tmp_path))
    return tmp_path


def test_warm_up_and_use(tiny: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``kimicore warmup`` writes the table beside the cache, and an engine with importance="table" tells its values."""
    with pytest.raises(ConfigError, match=rf"importance='table': there is no table at .*run: kimicore warmup {tiny}$"):
        SyncEngine(tiny, config(importance="table")).open()
    assert main(["warmup", str(tiny), "--samples", "9", "--tokens", "160", "--dtype", "float32", "-q"]) == 0
    fingerprint = open_source(tiny).fingerprint
    path = table_path(fingerprint, 16)
    assert f"9 samples, written to {path}" in capsys.readouterr().out and path.is_relative_to(cache)
    (values,) = ImportanceTable.read(path, fingerprint, 16, ["full"]).values
    assert 3 <= len(values) <= (160 - 1 - 64) // 16  # as far as eight samples reach
    assert math.isnan(values[0]) and all(0.2 < one < 5.0 for one in values[1:])
    with SyncEngine(tiny, config(importance="table")) as engine, heard(engine) as told:
        engine.generate(PROMPTS[5], max_tokens=2, **GREEDY)
    ((_, _, found),) = told
    assert found == pytest.approx(list(values[1:]))
    with SyncEngine(tiny, config(importance_every=1)) as engine, heard(engine) as told:
        engine.generate(PROMPTS[0], max_tokens=20, **GREEDY)  # too short to be measured: the table serves
        engine.generate(PROMPTS[5], max_tokens=2, **GREEDY)
    (_, _, first), (_, _, second) = told
    assert first == found[:2]
    assert len(second) > len(found) and second[: len(found)] != pytest.approx(found)


def test_texts_of_a_file(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --text the samples are a file's own pieces, and --out keeps the table elsewhere, for importance_table."""
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("the sea and the wind " * 200, encoding="utf-8")
    how = ["--samples", "3", "--tokens", "256", "--dtype", "float32", "-q"]
    assert main(["warmup", str(tiny), "--text", str(text), "--out", str(out), *how]) == 0
    assert "3 samples" in capsys.readouterr().out and json.loads(out.read_text())["samples"] == 3
    with SyncEngine(tiny, config(importance="table", importance_table=out)) as engine, heard(engine) as told:
        engine.generate(PROMPTS[5], max_tokens=2, **GREEDY)
    assert len(told) == 1
    out.write_text("{}")
    for importance in ("table", "attention"):
        with pytest.raises(ConfigError, match=rf"{out}.*run: kimicore warmup {tiny} --out {out}$"):
            SyncEngine(tiny, config(importance=importance, importance_table=out)).open()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (["--samples", "0"], "--samples=0"),
        (["--tokens", "63"], "--tokens=63"),
        (["--tokens", "64", "--block-tokens", "32"], "--tokens=64"),
        (["--block-tokens", "17"], "block_tokens=17"),
        (["--text", "no-such-file"], "--text no-such-file"),
        (["--out", "no-such-folder/table"], "there is no folder"),
        (["--text", "short"], "at least 64 are needed"),
    ],
)
def test_warm_up_refuses(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, how: list[str], reason: str
) -> None:
    """Options that make no sense are refused by name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("a word")
    assert main(["warmup", str(tiny), "-q", *how]) == 2
    assert reason in capsys.readouterr().err


def test_beginnings_differ() -> None:
    """The built-in beginnings are a hundred different ones, and come again after them."""
    assert len(set(beginnings(100))) == 100 and beginnings(101)[100] == beginnings(1)[0]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"importance": "on"}, "importance='on'"),
        ({"importance_every": 0}, "importance_every=0"),
        ({"importance_table": 7}, "importance_table=7"),
        ({"importance": "table", "prefix_cache": False}, "prefix_cache=False: importance='table'"),
    ],
)
def test_settings_are_refused_by_name(settings: dict[str, Any], reason: str) -> None:
    """A wrong setting names itself."""
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(**settings)
