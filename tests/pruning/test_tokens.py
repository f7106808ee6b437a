"""A model without some layers says what transformers says without them, skipped at load or written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.pruning.conftest import LAYERS, PROMPTS
from tests.quantize.conftest import CLASSES
from tests.rigs.tiers import GREEDY, always_load, at_rest, prompt

from kimicore import ConfigError, Engine, EngineConfig, ModelLoadError, SyncEngine
from kimicore.model.load import open_source
from kimicore.pruning.choosing import Choice, Removal
from kimicore.pruning.run import write_without

Answers = list[tuple[int, ...]]


def chosen(*layers: int) -> Choice:
    """Return a choice of these layers, whatever they do."""
    return Choice((0.5,) * LAYERS, tuple([Removal(one, 0.5) for one in layers]))


@pytest.mark.parametrize("skipped", [(1,), (0, 3), (4, 2, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("name", list(CLASSES))
def test_tokens_are_those_of_transformers(
    name: str,
    skipped: tuple[int, ...],
    layered: Callable[..., Path],
    oracle: Callable[[Path, Sequence[int]], Any],
    greedy: Callable[[Any], Answers],
    answers: Callable[..., Answers],
    tmp_path: Path,
) -> None:
    """For every family and any layers: skipped at load, and written out and read here or by transformers."""
    folder = layered(name)
    model = oracle(folder, skipped)
    right = greedy(model)
    assert answers(folder, skip_layers=skipped) == right
    made = write_without(open_source(folder), tmp_path / "out", chosen(*skipped)).folder
    assert answers(made) == right
    loaded = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    with torch.inference_mode():
        for ids in PROMPTS:
            whole = torch.tensor([ids])
            assert torch.equal(loaded(whole, use_cache=False).logits, model(whole, use_cache=False).logits)


def test_every_layer_matters(layered: Callable[..., Path], answers: Callable[..., Answers]) -> None:
    """The models of these tests answer otherwise without any one layer: no mistake could hide in them."""
    folder = layered("qwen3")
    assert len({tuple(answers(folder, skip_layers=skip)) for skip in [(), *((one,) for one in range(LAYERS))]}) == 6


def test_the_order_of_numbers_makes_no_difference(
    layered: Callable[..., Path], answers: Callable[..., Answers]
) -> None:
    """Layers are skipped whatever order they are named in."""
    folder = layered("llama")
    assert answers(folder, skip_layers=[3, 1]) == answers(folder, skip_layers=(1, 3))


def test_a_whole_kind_of_layers_may_go(layered: Callable[..., Path], answers: Callable[..., Answers]) -> None:
    """Where all layers with windows are skipped, or all others, there is one KV class less."""
    folder = layered("gemma3_text")  # layer 2 sees everything
    classes = {}
    for skipped in ((), (2,), (0, 1, 3, 4)):
        with SyncEngine(folder, EngineConfig(dtype="float32", skip_layers=skipped)) as engine:
            classes[skipped] = [(one.name, len(one.layers)) for one in engine.face.loop._book.ledger.classes]
    assert classes == {
        (): [("full", 1), ("window-24", 4)],
        (2,): [("window-24", 4)],
        (0, 1, 3, 4): [("full", 1)],
    }
    assert answers(folder, skip_layers=(2,)) != answers(folder)


@pytest.mark.parametrize(
    ("skipped", "told"),
    [
        ((5,), r"skip_layers\[0\]=5: the model has 5 layers, numbered from 0 to 4"),
        ((1, 9), r"skip_layers\[1\]=9: the model has 5 layers"),
        ((0, 1, 2, 3, 4), "these are all 5 layers; leave at least one"),
    ],
)
def test_layers_that_are_not_there_are_refused(
    skipped: tuple[int, ...], told: str, layered: Callable[..., Path]
) -> None:
    """A layer that the model has not, and all of them at once, are a ConfigError when the engine opens."""
    folder = layered("llama")
    with pytest.raises(ConfigError, match=told), SyncEngine(folder, EngineConfig(skip_layers=skipped)):
        raise AssertionError("it opened")


@pytest.mark.parametrize(
    ("skipped", "told"),
    [
        ((-1,), r"skip_layers\[0\]=-1: must be from 0"),
        ((1, 2, 1), r"skip_layers=\(1, 2, 1\): name each layer once"),
        ("12", "skip_layers='12': must be a list of layers"),
        (3, "skip_layers=3: must be a list of layers"),
        ((True,), r"skip_layers\[0\]=True: must be an integer"),
        ((0.5,), r"skip_layers\[0\]=0.5: must be an integer"),
    ],
)
def test_wrong_numbers_are_refused_in_the_settings(skipped: Any, told: str) -> None:
    """Numbers that no model could have are refused where the settings are made."""
    with pytest.raises(ConfigError, match=told):
        EngineConfig(skip_layers=skipped)


def test_settings_from_a_file(tmp_path: Path) -> None:
    """A TOML file names layers as a list."""
    file = tmp_path / "kimicore.toml"
    file.write_text("skip_layers = [3, 1]\n")
    assert EngineConfig.from_toml(file).skip_layers == (3, 1)


def test_a_tensor_is_missed_only_where_it_is_needed(layered: Callable[..., Path]) -> None:
    """A tensor that the file lacks is an error, by its number after the cut, unless its layer is skipped."""
    folder = layered("llama")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    small = {"dtype": "float32", "kv_device_bytes": "4MiB"}
    with (
        pytest.raises(ModelLoadError, match=r"missing tensors: model\.layers\.2\.mlp\.up_proj\.weight"),
        SyncEngine(folder, EngineConfig(skip_layers=(1,), **small)),
    ):
        raise AssertionError("it opened")
    with SyncEngine(folder, EngineConfig(skip_layers=(1, 3), **small)) as engine:
        assert engine.generate(PROMPTS[0], max_tokens=2, **GREEDY).usage.completion_tokens == 2


@pytest.mark.anyio
async def test_engines_share_no_blocks(layered: Callable[..., Path], tmp_path: Path) -> None:
    """What an engine wrote to disk is never read by one that skips other layers, only by one that skips the same."""
    folder = layered("llama")
    disk: dict[str, Any] = {"kv_disk_dir": tmp_path / "kv", "kv_disk_bytes": "64MiB", "kv_disk_uses": 1}
    seen: list[int] = []
    said: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for skipped in ((1,), (2,), (), (1, 2), (1,)):
        config = EngineConfig(dtype="float32", kv_device_bytes="1MiB", skip_layers=skipped, **disk)
        async with Engine(folder, config) as engine:
            always_load(engine)
            result = await engine.generate(prompt(1), max_tokens=8, **GREEDY)
            seen.append(result.usage.cached_tokens)
            said.setdefault(skipped, set()).add(result.token_ids)
            await at_rest(engine)
    assert seen == [0, 0, 0, 0, 80]
    assert all(len(one) == 1 for one in said.values())
    assert len(set.union(*said.values())) == 4


def test_two_engines_at_once(layered: Callable[..., Path], answers: Callable[..., Answers]) -> None:
    """Two engines of one model in one process, each without another layer, say what each says alone."""
    folder = layered("qwen3")
    skips = [(1,), (3,)]
    alone = [answers(folder, skip_layers=one) for one in skips]
    small = {"dtype": "float32", "kv_device_bytes": "4MiB"}
    with (
        SyncEngine(folder, EngineConfig(skip_layers=skips[0], **small)) as first,
        SyncEngine(folder, EngineConfig(skip_layers=skips[1], **small)) as second,
    ):
        for _ in range(2):  # the second time from cached prefixes
            for engine, right in zip((first, second), alone, strict=True):
                found = engine.generate_many(PROMPTS, max_tokens=16, **GREEDY)
                assert [one.token_ids for one in found] == right
