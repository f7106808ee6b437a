"""Activations in 8 bits in the middle of a prompt: the same tokens however a request is computed and cached."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file

from kimicore import ConfigError, Engine, EngineConfig, ModelLoadError, SyncEngine
from kimicore.kernels.registry import select_ops
from kimicore.model.load import open_source
from kimicore.model.modules import modules_of
from kimicore.model.products import packed_product
from kimicore.model.spec import spec_from_config
from kimicore.policies.precision import ActivationPrecision
from kimicore.policies.precision.named import policy_named, resolved_by
from kimicore.prefix import BlockKeys
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.run import quantize_model
from rigs.sessions import prompt_of
from rigs.settle import settled
from rigs.tiers import BLOCK_BYTES, GREEDY, always_load, at_rest, prompt
from rigs.tiny import make_tiny

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        not packed_product(select_ops("cpu", torch.float32))[0], reason="no native product with packed weights here"
    ),
]
COUNTS = {"first_tokens": 4, "last_tokens": 6}
ROUNDED: dict[str, Any] = {"dtype": "float32", "precision": "asymmetric", "policy": {"precision": COUNTS}}
PLAIN: dict[str, Any] = {**ROUNDED, "activations": "16-bit"}
LENGTHS = (90, 85, 86, 70, 33, 9)
"""Of prompts that begin alike: the classes of their last tokens differ."""

Answers = list[tuple[int, ...]]


def rough(folder: Path, **changes: Any) -> Path:
    """Write a tiny model whose feed-forward inputs have one channel far larger than the rest: 8 bits hurt it."""
    make_tiny(folder, **changes)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("post_attention_layernorm.weight"):
            tensor[0] = 60.0
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensor[:, 0] /= 60.0
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a model of one KV class."""
    return rough(tmp_path_factory.mktemp("rough"))


@pytest.fixture(scope="module")
def two_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a model with a full layer and one with a window of 24 tokens."""
    window = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    return rough(tmp_path_factory.mktemp("windows"), model_type="qwen2", **window)


@pytest.fixture(params=["llama", "two_classes"])
def model(request: pytest.FixtureRequest) -> Path:
    """Either of them."""
    folder: Path = request.getfixturevalue(request.param)
    return folder


def prompts() -> list[list[int]]:
    """Return prompts of which some are the beginning of others."""
    return [prompt(number, 100)[:length] for number in (1, 2) for length in LENGTHS]


def alone(model: Path, count: int = 24, **settings: Any) -> Answers:
    """Return what each gives in an engine that serves nobody else, keeps nothing, and computes prompts in one go."""
    with SyncEngine(model, EngineConfig(prefix_cache=False, kv_device_bytes="8MiB", **settings)) as engine:
        return [engine.generate(one, max_tokens=count, **GREEDY).token_ids for one in prompts()]


async def together(engine: Engine, count: int = 24) -> Answers:
    """Return what they give when they are asked for at once."""
    found: dict[int, tuple[int, ...]] = {}

    async def ask(at: int, ids: list[int]) -> None:
        found[at] = (await engine.generate(ids, max_tokens=count, **GREEDY)).token_ids

    async with anyio.create_task_group() as group:
        for at, ids in enumerate(prompts()):
            group.start_soon(ask, at, ids)
    return [found[at] for at in range(len(found))]


def classless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the class of positions out of the keys of blocks."""
    monkeypatch.setattr(BlockKeys, "middle", lambda self, prompt_tokens: (0, 0))


# ---------------------------------------------------------------- one engine


@pytest.mark.parametrize("chunk", [7, 16, 512])
def test_chunks_change_no_token(model: Path, chunk: int) -> None:
    """However a prompt is cut into chunks, it gives the same tokens; 8 bits make a difference to them."""
    right = alone(model, **ROUNDED)
    assert alone(model, max_batch_size=4, max_batch_tokens=chunk, **ROUNDED) == right
    assert alone(model, **PLAIN) != right


async def test_company_and_prefixes_change_no_token(model: Path) -> None:
    """Neighbours and cached prefixes of prompts of other lengths change nobody's tokens."""
    right = alone(model, **ROUNDED)
    config = EngineConfig(kv_device_bytes="2MiB", max_batch_tokens=24, max_batch_size=8, **ROUNDED)
    async with Engine(model, config) as engine:
        for _ in range(2):
            assert await together(engine) == right
        await settled(engine)
        assert engine.stats().cached_tokens > 0
        engine.face.loop._book.check_integrity()


@pytest.mark.parametrize("cached", [False, True])
async def test_preemptions_change_no_token(llama: Path, cached: bool) -> None:
    """Who gave its blocks back computes its prompt's middle and what it had generated as before."""
    right = alone(llama, 160, **ROUNDED)
    config = EngineConfig(
        kv_device_bytes=25 * BLOCK_BYTES, max_batch_tokens=24, max_batch_size=8, prefix_cache=cached, **ROUNDED
    )
    async with Engine(llama, config) as engine:
        assert await together(engine, 160) == right
        await settled(engine)
        assert engine.stats().preemptions > 0
        assert engine.stats().recomputed_tokens > 0


@pytest.mark.parametrize("activations", ["map", "16-bit"])
async def test_blocks_are_shared_where_classes_agree(llama: Path, activations: str) -> None:
    """A prompt finds those blocks of a longer one whose positions are of the same class in both, and all without."""
    config = EngineConfig(kv_device_bytes="8MiB", activations=activations, **ROUNDED)
    ids = prompt(3, 120)
    async with Engine(llama, config) as engine:
        await engine.generate(ids, max_tokens=1, **GREEDY)
        for length in (86, 85, 70, 54, 53, 33, 10):
            whole = (length - 1) // 16
            agree = min(whole, max(0, length - 6) // 16) if activations == "map" else whole
            result = await engine.generate(ids[:length], max_tokens=1, **GREEDY)
            assert result.usage.cached_tokens == 16 * agree, length
        again = await engine.generate(ids[:85], max_tokens=1, **GREEDY)
        assert again.usage.cached_tokens == 80  # its own, by now


async def test_generated_tokens_are_last(llama: Path) -> None:
    """Whoever asks for what was generated as a prompt computes its middle anew, and shares what was middle before."""
    async with Engine(llama, EngineConfig(kv_device_bytes="8MiB", **ROUNDED)) as engine:
        first = await engine.generate(prompt(4, 70), max_tokens=60, **GREEDY)
        more = [*prompt(4, 70), *first.token_ids]
        second = await engine.generate(more, max_tokens=8, **GREEDY)
        assert second.usage.cached_tokens == 64  # the prompt's middle ended at 64
        own = await engine.generate(more, max_tokens=8, **GREEDY)
        assert (own.usage.cached_tokens, own.token_ids) == (128, second.token_ids)
    with SyncEngine(llama, EngineConfig(prefix_cache=False, **ROUNDED)) as fresh:
        assert fresh.generate(more, max_tokens=8, **GREEDY).token_ids == second.token_ids


@pytest.mark.parametrize("planted", [False, True])
def test_keys_without_classes_would_give_wrong_tokens(
    llama: Path, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If keys left classes out, prompts of other lengths would get blocks that are not theirs, and other tokens."""
    own: dict[str, Any] = {**ROUNDED, "policy": {"precision": {"first_tokens": 4, "last_tokens": 48}}}
    lengths = (85, 70, 100)
    with SyncEngine(llama, EngineConfig(prefix_cache=False, **own)) as engine:
        right = [engine.generate(prompt(5, 200)[:n], max_tokens=24, **GREEDY).token_ids for n in lengths]
    if planted:
        classless(monkeypatch)
    with SyncEngine(llama, EngineConfig(**own)) as engine:
        engine.generate(prompt(5, 200), max_tokens=1, **GREEDY)
        found = [engine.generate(prompt(5, 200)[:n], max_tokens=24, **GREEDY) for n in lengths]
    assert [one.usage.cached_tokens for one in found] == ([80, 64, 96] if planted else [32, 16, 48])
    assert ([one.token_ids for one in found] == right) is not planted


# ---------------------------------------------------------------- tiers and sessions


@pytest.mark.parametrize("below", ["host", "disk"])
async def test_blocks_come_back_from_the_lower_tiers(model: Path, below: str, tmp_path: Path) -> None:
    """Blocks that left the device and came back give the same tokens, also after a restart."""
    right = alone(model, **ROUNDED)
    disk: dict[str, Any] = {"kv_disk_dir": tmp_path / "kv", "kv_disk_bytes": "64MiB", "kv_disk_uses": 1}
    lower: dict[str, Any] = {"kv_host_bytes": "4MiB"} if below == "host" else disk
    for _ in range(1 if below == "host" else 2):
        async with Engine(model, EngineConfig(kv_device_bytes="1MiB", **ROUNDED, **lower)) as engine:
            always_load(engine)
            for _ in range(2):
                assert await together(engine) == right
                await at_rest(engine)
                engine.face.loop._book.ledger.flush()
                await at_rest(engine)
            assert await together(engine) == right
            await settled(engine)
            assert engine.stats().loads > 0


async def test_disks_are_not_shared_with_other_activations(llama: Path, tmp_path: Path) -> None:
    """What an engine without 8-bit activations wrote is never read by one that has them, and the other way round."""
    disk: dict[str, Any] = {"kv_disk_dir": tmp_path / "kv", "kv_disk_bytes": "64MiB", "kv_disk_uses": 1}
    seen = []
    for settings in (ROUNDED, PLAIN, ROUNDED):
        async with Engine(llama, EngineConfig(kv_device_bytes="1MiB", **settings, **disk)) as engine:
            always_load(engine)
            seen.append((await engine.generate(prompt(1), max_tokens=1, **GREEDY)).usage.cached_tokens)
            await at_rest(engine)
    assert seen == [0, 0, 80]


async def test_a_saved_session_finds_its_blocks(llama: Path, tmp_path: Path) -> None:
    """A session's turns give the tokens of a fresh engine, and after a restart its last turn's blocks are on disk:
    as much of them is found as is of the same class in the next turn's prompt."""
    letters = {3 + byte: 1000.0 for byte in b"abcdefghijklmnopqrstuvwxyz"}
    how: dict[str, Any] = {**GREEDY, "max_tokens": 12, "logit_bias": letters}
    own: dict[str, Any] = {"kv_device_bytes": "8MiB", **ROUNDED}
    disk: dict[str, Any] = {"kv_disk_dir": tmp_path / "kv", "kv_disk_bytes": "64MiB"}
    asked = []
    async with Engine(llama, EngineConfig(**own, **disk)) as engine:
        session = engine.session(tenant="blue")
        for question in ("in the other " * 3, "on and on", "of what?"):
            result = await session.chat(question, **how)
            asked.append((prompt_of(session, result), result.token_ids))
        saved = await session.save(tmp_path / "session.json")
        before = len(asked[-1][0])
        assert saved.blocks == saved.stored_blocks == (len(session.token_ids) - 1) // 16
        await settled(engine)
    async with Engine(llama, EngineConfig(**own, **disk)) as engine:
        always_load(engine)
        session = engine.session(resume=tmp_path / "session.json")
        result = await session.chat("next", **how)
        asked.append((prompt_of(session, result), result.token_ids))
        assert result.usage.cached_tokens == (before - 6) // 16 * 16 > 0
        await settled(engine)
    with SyncEngine(llama, EngineConfig(prefix_cache=False, **own)) as fresh:
        for ids, tokens in asked:
            assert fresh.generate(list(ids), **how).token_ids == tokens


# ---------------------------------------------------------------- which precision is in effect


def in_effect(model: Path, **settings: Any) -> tuple[Answers, ActivationPrecision | None, list[bytes]]:
    """Return what prompts give, the engine's activation precision, and that part of its block keys."""
    with SyncEngine(model, EngineConfig(prefix_cache=False, **{"dtype": "float32", **settings})) as engine:
        tokens = [engine.generate(one, max_tokens=24, **GREEDY).token_ids for one in prompts()]
        loop: Any = engine.face.loop
        return tokens, loop.runner.model.activations, [one.activation for one in loop._book._contexts]


def test_switched_off_is_16_bits_everywhere(llama: Path) -> None:
    """With activations="16-bit" tokens are those of a map whose first positions are all there are, and of one with a
    middle in 16 bits; keys of blocks know no class."""
    off, rounds, marks = in_effect(llama, **PLAIN)
    assert (rounds, marks) == (None, [b""])
    wide, rounds, marks = in_effect(llama, precision="asymmetric", policy={"precision": {"first_tokens": 1000}})
    assert (wide, marks) == (off, [b"middle"])
    assert rounds is not None
    assert rounds.first_tokens == 1000
    same = in_effect(llama, precision="asymmetric", policy={"precision": {**COUNTS, "middle": "bfloat16"}})
    assert same == (off, None, [b""])


def test_plain_weights_are_multiplied_in_16_bits(llama: Path) -> None:
    """Where a map packs no matrix, or this machine expands them, its activations have no effect."""
    unpacked = {"default": "float32", "activations": {"middle": "int8", **COUNTS}}
    assert in_effect(llama, precision="custom", policy={"precision": unpacked})[1:] == (None, [b""])
    expanded, rounds, marks = in_effect(llama, native_kernels=False, **ROUNDED)
    assert (rounds, marks) == (None, [b""])
    assert expanded == in_effect(llama, native_kernels=False, **PLAIN)[0]


@pytest.mark.parametrize("chunk", [7, 512])
def test_attention_is_rounded_where_the_map_packs_it(llama: Path, chunk: int) -> None:
    """Maps that pack all matrices, or round all positions, give the same tokens for any chunks as well."""
    packs = {"default": "int8", "patterns": [["*norm*", "float32"]], "activations": {"middle": "int8", **COUNTS}}
    custom: dict[str, Any] = {"precision": "custom", "policy": {"precision": packs}}
    everywhere: dict[str, Any] = {"precision": "uniform-int8", "policy": {"precision": {"activations": "int8"}}}
    for settings, mark in ((custom, b"middle"), (everywhere, b"ends middle")):
        right, rounds, marks = in_effect(llama, **settings)
        assert rounds is not None
        assert marks == [mark]
        cut = {"max_batch_size": 4, "max_batch_tokens": chunk}
        assert in_effect(llama, **settings, **cut)[0] == right
        assert in_effect(llama, activations="16-bit", **settings)[0] != right


async def test_all_positions_alike_share_as_without(llama: Path) -> None:
    """Where ends are rounded as the middle is, prompts of any length share all of their blocks."""
    everywhere: dict[str, Any] = {"precision": "uniform-int8", "policy": {"precision": {"activations": "int8"}}}
    async with Engine(llama, EngineConfig(dtype="float32", kv_device_bytes="8MiB", **everywhere)) as engine:
        await engine.generate(prompt(3, 120), max_tokens=1, **GREEDY)
        assert (await engine.generate(prompt(3, 120)[:85], max_tokens=1, **GREEDY)).usage.cached_tokens == 80


def quantized(model: Path, out: Path) -> Path:
    """Quantize a model by the map that the other tests apply at load."""
    source = open_source(model)
    found = resolved_by(policy_named("asymmetric", COUNTS), modules_of(spec_from_config(source.config)))
    return quantize_model(source, out, found, QuantizeSettings(method="nearest")).folder


def test_the_map_beside_the_weights_counts(llama: Path, tmp_path: Path) -> None:
    """A folder that kimicore quantize wrote is run as its map says; without that record in 16 bits."""
    folder = quantized(llama, tmp_path / "out")
    tokens, rounds, marks = in_effect(folder)
    assert rounds == ActivationPrecision("bfloat16", "int8", **COUNTS)
    assert marks == [b"middle"]
    off = in_effect(folder, activations="16-bit")
    assert off[0] != tokens
    assert in_effect(folder, precision="none")[1] is None
    (folder / "kimicore.json").unlink()
    assert in_effect(folder) == off


@pytest.mark.parametrize("change", ["text", "list", "no map", "no format", "version", "middle", "bytes", "deep"])
def test_a_damaged_record_is_refused_by_name(llama: Path, tmp_path: Path, change: str) -> None:
    """A record beside the weights that cannot be read is an error that names it and says what to do."""
    folder = quantized(llama, tmp_path / "out")
    path = folder / "kimicore.json"
    tree = json.loads(path.read_text())
    broken: dict[str, Callable[[], bytes]] = {
        "text": lambda: path.read_bytes()[:-40],
        "list": lambda: b"[]",
        "no map": lambda: json.dumps({key: one for key, one in tree.items() if key != "map"}).encode(),
        "no format": lambda: b"{}",
        "version": lambda: json.dumps({**tree, "map": {**tree["map"], "version": 9}}).encode(),
        "middle": lambda: json.dumps({**tree, "map": {**tree["map"], "activations": {"middle": "int3"}}}).encode(),
        "bytes": lambda: b"\xff\xfe",
        "deep": lambda: b"[" * 100_000,
    }
    path.write_bytes(broken[change]())
    with pytest.raises(ModelLoadError, match=r"kimicore\.json: holds no precision map .*activations='16-bit'"):
        in_effect(folder)
    assert in_effect(folder, activations="16-bit")[1] is None


def test_a_record_of_something_else_is_passed_over(llama: Path, tmp_path: Path) -> None:
    """A record that another command left, and that has no map, says nothing of activations."""
    folder = rough(tmp_path / "m")
    (folder / "kimicore.json").write_text('{"format": "kimicore prune", "version": 1}')
    assert in_effect(folder)[1] is None


def test_other_values_are_refused() -> None:
    """The setting has two values."""
    with pytest.raises(ConfigError, match="activations="):
        EngineConfig(activations="int8")
