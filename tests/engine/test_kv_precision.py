"""KV in 8 and 4 bits beside full precision in one engine, as a caller sees it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
from safetensors.torch import load_file, save_file

from kimicore import ConfigError, Engine, EngineConfig, InvalidRequest, SyncEngine
from rigs.settle import settled
from rigs.tiers import GREEDY, always_load, at_rest, prompt

pytestmark = pytest.mark.anyio
LENGTH = 120
PRECISIONS = ("full", "int8", "int4")
ALL: dict[str, Any] = {"dtype": "float32", "kv_precisions": PRECISIONS}
TEXT = (Path(__file__).parents[1] / "data" / "alice.txt").read_text()


def tight(model: Path) -> int:
    """Return the bytes of an arena in which not everybody finds room at once."""
    with SyncEngine(model, EngineConfig(kv_device_bytes="8MiB", **ALL)) as engine:
        ledger = engine.face.loop._book.ledger
        return ledger.bytes_total // ledger.slabs.count * (2 + len(ledger.classes))


def alone(model: Path, count: int, **more: Any) -> dict[tuple[int, str], tuple[int, ...]]:
    """Return what each prompt gives under each precision when nobody else is there and nothing is cached."""
    config = EngineConfig(prefix_cache=False, kv_device_bytes="8MiB", **ALL, **more)
    with SyncEngine(model, config) as engine:
        return {
            (at, one): engine.generate(
                prompt(at, 70 + 13 * at), max_tokens=LENGTH, kv_precision=one, **GREEDY
            ).token_ids
            for at in range(count)
            for one in PRECISIONS
        }


async def together(engine: Engine, count: int) -> dict[tuple[int, str], tuple[int, ...]]:
    """Ask for the same, all at once."""
    found: dict[tuple[int, str], tuple[int, ...]] = {}

    async def ask(at: int, one: Any) -> None:
        ids = prompt(at, 70 + 13 * at)
        found[at, one] = (await engine.generate(ids, max_tokens=LENGTH, kv_precision=one, **GREEDY)).token_ids

    async with anyio.create_task_group() as group:
        for at in range(count):
            for one in PRECISIONS:
                group.start_soon(ask, at, one)
    return found


@pytest.mark.parametrize("model", ["tiny", "windowed", "mixed"])
async def test_a_request_gives_the_same_tokens_in_any_company(model: str, request: pytest.FixtureRequest) -> None:
    """In float32 chunks, neighbours of other precisions, cached prefixes and preemptions change nobody's tokens."""
    folder = request.getfixturevalue(model)
    right = alone(folder, 4)
    assert any(right[at, "full"] != right[at, "int4"] for at in range(4)), "the precision makes no difference"
    config = EngineConfig(kv_device_bytes=tight(folder), max_batch_tokens=24, max_batch_size=12, **ALL)
    async with Engine(folder, config) as engine:
        for _ in range(2):
            assert await together(engine, 4) == right
        await settled(engine)
        stats = engine.stats()
        assert stats.preemptions > 0 or model != "tiny"  # a window bounds what a request can need
        assert stats.cached_tokens > 0
        assert stats.kv_blocks_used == 0
        engine.face.loop._book.check_integrity()


@pytest.mark.parametrize("model", ["tiny", "mixed"])
async def test_the_same_without_native_kernels(model: str, request: pytest.FixtureRequest) -> None:
    """Torch's own operations keep the promise as well."""
    folder = request.getfixturevalue(model)
    right = alone(folder, 2, native_kernels=False)
    config = EngineConfig(kv_device_bytes="2MiB", max_batch_tokens=24, max_batch_size=6, native_kernels=False, **ALL)
    async with Engine(folder, config) as engine:
        assert await together(engine, 2) == right


@pytest.mark.parametrize("below", ["host", "disk"])
async def test_quantized_blocks_come_back_from_the_lower_tiers(below: str, mixed: Path, tmp_path: Path) -> None:
    """Blocks of every precision that left the device and came back give the same tokens, also after a restart."""
    right = alone(mixed, 4)
    disk = {"kv_disk_dir": tmp_path / "kv", "kv_disk_bytes": "64MiB", "kv_disk_uses": 1}
    lower: dict[str, Any] = {"kv_host_bytes": "4MiB"} if below == "host" else disk
    for life in range(1 if below == "host" else 2):
        async with Engine(mixed, EngineConfig(kv_device_bytes="1MiB", **ALL, **lower)) as engine:
            always_load(engine)
            for _ in range(3 - life):
                assert await together(engine, 4) == right
                await at_rest(engine)
                engine.face.loop._book.ledger.flush()
                await at_rest(engine)
            assert await together(engine, 4) == right
            await settled(engine)
            assert engine.stats().loads > 0


async def test_precisions_never_share_blocks(tiny: Path) -> None:
    """A prompt that is cached in one precision is computed anew in another, and found again in its own."""
    async with Engine(tiny, EngineConfig(kv_device_bytes="8MiB", **ALL)) as engine:
        for _ in range(2):
            cached = [
                (await engine.generate(prompt(0), max_tokens=2, kv_precision=one, **GREEDY)).usage.cached_tokens
                for one in PRECISIONS
            ]
        assert cached == [80, 80, 80]
        engine.face.loop._book.ledger.flush()
        assert (await engine.generate(prompt(0), max_tokens=2, **GREEDY)).usage.cached_tokens == 0
        assert (await engine.generate(prompt(0), max_tokens=2, kv_precision="int8", **GREEDY)).usage.cached_tokens == 0


@pytest.mark.parametrize("model", ["smollm2", "gemma"])
async def test_demo_models_say_nearly_the_same(model: str, request: pytest.FixtureRequest, anyio_backend: str) -> None:
    """Under 8 bits a real text is as likely as before, under 4 bits nearly, and neither is full precision by mistake;
    the arena holds half as much again and more."""
    if anyio_backend == "trio":
        pytest.skip("the device's side is the same on every event loop, and this takes a while")
    path = request.getfixturevalue(f"{model}_path")
    async with Engine(path, EngineConfig(kv_device_bytes="256MiB", **ALL)) as engine:
        ids = engine.face.tokenizer.encode(TEXT[:6000])[:700]
        means = {}
        for one in PRECISIONS:
            result = await engine.generate(
                ids, max_tokens=1, temperature=0.0, prompt_logprobs=0, kv_precision=one, tenant=one
            )
            assert result.prompt_logprobs is not None
            scores = [score.logprob for score in result.prompt_logprobs if score.logprob is not None]
            means[one] = sum(scores) / len(scores)
        held = engine.face.loop._book.capacities
    assert 0 < abs(means["int8"] - means["full"]) < 0.01
    assert 0 < abs(means["int4"] - means["full"]) < 0.1
    assert held["int8"] > 1.5 * held["full"]
    assert held["int4"] > 2.5 * held["full"]


async def test_a_channel_that_is_always_zero(tiny: Path, tmp_path: Path) -> None:
    """ROCm/aiter#4289: KV of which a channel is 0 in every token has no range there; nothing turns into NaN."""
    folder = tmp_path / "zero"
    shutil.copytree(tiny, folder)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if "k_proj.weight" in name or "v_proj.weight" in name:
                weight[3] = 0.0
                weight[11] = 0.0  # the other half of the rotation of channel 3
        save_file(weights, file, {"format": "pt"})
    means = {}
    async with Engine(folder, EngineConfig(kv_device_bytes="8MiB", **ALL)) as engine:
        for one in PRECISIONS:
            result = await engine.generate(prompt(0, 200), max_tokens=8, prompt_logprobs=0, kv_precision=one, **GREEDY)
            assert result.prompt_logprobs is not None
            scores = [score.logprob for score in result.prompt_logprobs if score.logprob is not None]
            means[one] = sum(scores) / len(scores)
    assert abs(means["int8"] - means["full"]) < 0.01
    assert abs(means["int4"] - means["full"]) < 0.2


async def test_domains_say_what_precision_a_request_has(tiny: Path) -> None:
    """Medical, legal and finance keep full precision under a default of int4; settings add domains of their own."""
    config = EngineConfig(
        dtype="float32", kv_device_bytes="8MiB", kv_precision="int4", kv_domains={"chat": "int8"}, prefix_cache=False
    )
    right = alone(tiny, 1)
    ids = prompt(0, 70)
    async with Engine(tiny, config) as engine:

        async def ask(**kv: Any) -> tuple[int, ...]:
            return (await engine.generate(ids, max_tokens=LENGTH, **GREEDY, **kv)).token_ids

        assert await ask() == right[0, "int4"]
        assert await ask(domain="chat") == right[0, "int8"]
        for domain in ("medical", "legal", "finance"):
            assert await ask(domain=domain) == right[0, "full"]
        assert await ask(domain="chat", kv_precision="int8") == right[0, "int8"]


WRONG = [
    ({"kv_precision": "int2"}, "kv_precision='int2': must be one of full, int8, int4"),
    ({"kv_precision": "int4"}, "kv_precision='int4': this engine holds full, int8; name it in kv_precisions"),
    ({"domain": "medcial"}, "domain='medcial': must be one of medical, legal, finance; add others with kv_domains"),
    ({"domain": "legal", "kv_precision": "int8"}, "domain='legal' stands for 'full'; leave one of them out"),
    ({"kv_precision": 8}, "kv_precision=8: must be one of"),
    ({"domain": 3}, "domain=3: must be one of"),
    ({"domain": []}, r"domain=\[\]: must be one of"),
    ({"kv_precision": ["int8"]}, r"kv_precision=\['int8'\]: must be one of"),
    ({"domain": "x" * 100_000}, r"domain='x{79}: must be one of"),
]


@pytest.mark.parametrize(("asked", "message"), WRONG)
async def test_what_cannot_be_had_is_refused_by_name(asked: dict[str, Any], message: str, tiny: Path) -> None:
    """A precision or a domain that this engine does not have is refused before any work, and nothing else is lost."""
    config = EngineConfig(dtype="float32", kv_device_bytes="8MiB", kv_precisions="int8")
    async with Engine(tiny, config) as engine:
        with pytest.raises(InvalidRequest, match=message):
            await engine.generate(prompt(0), max_tokens=2, **asked)
        with pytest.raises(InvalidRequest, match=message):
            engine.session(**asked)
        assert (await engine.generate(prompt(0), max_tokens=2, kv_precision="int8")).usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_precision": "int3"}, "kv_precision='int3': must be one of full, int8, int4"),
        ({"kv_precisions": ["int8", "fp8"]}, r"kv_precisions\[1\]='fp8': must be one of"),
        ({"kv_precisions": 8}, "kv_precisions=8: must be a list"),
        ({"kv_precisions": b"int8"}, "kv_precisions=b'int8': must be a list"),
        ({"kv_precision": ["int8"]}, r"kv_precision=\['int8'\]: must be one of"),
        ({"kv_domains": {"chat": "int9"}}, r"kv_domains\['chat'\]='int9'"),
        ({"kv_domains": ["chat"]}, r"kv_domains=\['chat'\]: must map"),
        ({"sparse_decode": 0.5}, "sparse_decode=0.5: must be True or False"),
    ],
)
async def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    """A setting that means nothing names itself and what it may be."""
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


async def test_a_longer_context_fits_in_fewer_bits(tiny: Path) -> None:
    """A prompt that the arena holds in 8 bits alone is served so, and refused in full precision with the figures."""
    async with Engine(tiny, EngineConfig(kv_device_bytes=tight(tiny), **ALL)) as engine:
        held = engine.face.loop._book.capacities
        assert held["full"] < held["int8"] < held["int4"]
        ids = prompt(0, held["full"] + 20)
        with pytest.raises(InvalidRequest, match=f"takes at most {held['full'] - 1}"):
            await engine.generate(ids, max_tokens=4)
        result = await engine.generate(ids, max_tokens=4, kv_precision="int8", **GREEDY)
        assert result.usage.completion_tokens == 4


async def test_a_session_keeps_its_precision(tiny: Path, tmp_path: Path) -> None:
    """Every turn of a session has its precision and finds the turns before; a saved one goes on in the same."""
    template = "{% for one in messages %}{{ one.content }} {% endfor %}"
    async with Engine(tiny, EngineConfig(kv_device_bytes="8MiB", **ALL)) as engine:
        session = engine.session(kv_precision="int8", template=template)
        text = " ".join(["abc"] * 30)
        await session.chat(text, max_tokens=8, **GREEDY)
        again = await session.chat(text, max_tokens=8, **GREEDY)
        assert again.usage.cached_tokens > 0
        await session.save(tmp_path / "saved")
        resumed = engine.session(resume=tmp_path / "saved")
        third = await resumed.chat(text, max_tokens=8, **GREEDY)
        assert third.usage.cached_tokens > again.usage.cached_tokens
        other = engine.session(resume=tmp_path / "saved", kv_precision="full")
        fourth = await other.chat(text, max_tokens=8, **GREEDY)
        assert fourth.usage.cached_tokens == 0
    async with Engine(tiny, EngineConfig(dtype="float32", kv_device_bytes="8MiB")) as engine:
        with pytest.raises(InvalidRequest, match="kv_precision='int8': this engine holds full; name it in"):
            engine.session(resume=tmp_path / "saved")
        await engine.session(resume=tmp_path / "saved", kv_precision="full").chat(text, max_tokens=2, **GREEDY)


async def test_a_session_s_domain_is_kept_as_it_was_meant(tiny: Path, tmp_path: Path) -> None:
    """What a domain stood for when a session began holds for all its turns, whatever later settings say."""
    template = "{% for one in messages %}{{ one.content }} {% endfor %}"
    async with Engine(tiny, EngineConfig(kv_device_bytes="8MiB", **ALL)) as engine:
        session = engine.session(domain="medical", template=template)
        await session.chat("abc " * 30, max_tokens=4, **GREEDY)
        await session.save(tmp_path / "saved")
    changed = EngineConfig(dtype="float32", kv_device_bytes="8MiB", kv_precision="int8", kv_domains={"medical": "int4"})
    async with Engine(tiny, changed) as engine:
        resumed = engine.session(resume=tmp_path / "saved")
        assert resumed._turns.kv.precision == "full"


@pytest.mark.parametrize("more", [{"kv_precisions": "int8"}, {"kv_precision": "int8", "kv_precisions": ["int4"]}])
async def test_records_are_the_same_whatever_else_an_engine_holds(
    more: dict[str, Any], mixed: Path, tmp_path: Path
) -> None:
    """How far blocks lie apart in the arena depends on its other classes; what was written to disk is found all the
    same."""
    disk = {"kv_disk_dir": tmp_path / "kv", "kv_disk_bytes": "64MiB", "kv_disk_uses": 1}
    for settings in ({}, more, {}):
        async with Engine(mixed, EngineConfig(dtype="float32", kv_device_bytes="8MiB", **disk, **settings)) as engine:
            always_load(engine)
            result = await engine.generate(prompt(0), max_tokens=2, kv_precision="full", **GREEDY)
            assert result.usage.cached_tokens == (0 if not settings and not engine.stats().loads else 80)
            await at_rest(engine)
            await settled(engine)
            stats = engine.stats().disk
            assert stats is not None
            assert stats.missed_blocks == 0
