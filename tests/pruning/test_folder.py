"""The written folder: the same bytes under new names, what a quantized one says of itself, and nothing half done."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model_files.coded import config_as, quantized
from tests.model_files.coded_gguf import coded_gguf
from tests.pruning.conftest import LAYERS, PROMPTS
from tests.pruning.test_tokens import chosen
from tests.quantize.test_folder import resolved

from kimicore import EngineConfig, SyncEngine
from kimicore.errors import ConfigError
from kimicore.model.load import open_source
from kimicore.model.modules import modules_of
from kimicore.model.safetensors_source import SafetensorsSource
from kimicore.model.skipping import LayerCut, without_layers
from kimicore.model.spec import spec_from_config
from kimicore.policies.precision import ResolvedMap
from kimicore.pruning.run import PruneSettings, prune_model, write_without
from kimicore.quantize import files
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.run import quantize_model

Answers = list[tuple[int, ...]]
CUT = LayerCut.of(LAYERS, (1, 3))
SMALL = PruneSettings(samples=5, sample_tokens=40, prompts=5)


def names_of(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def coded(folder: Path, kind: str, config: dict[str, Any] | None = None) -> Path:
    """Have a folder's projections quantized in one of the layouts of others."""
    tensors, _ = quantized(load_file(folder / "model.safetensors"), kind)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tree = json.loads((folder / "config.json").read_text())
    tree["quantization_config"] = config or config_as(kind)
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


def test_tensors_keep_their_bytes(layered: Callable[..., Path], tmp_path: Path) -> None:
    """Each tensor that is left has the type and the bytes that it had, under its new name."""
    source = layered("qwen2")
    made = write_without(open_source(source), tmp_path / "out", chosen(1, 3))
    before, after = load_file(source / "model.safetensors"), load_file(made.folder / "model.safetensors")
    wanted = {new: tensor for name, tensor in before.items() if (new := CUT.renamed(name)) is not None}
    assert after.keys() == wanted.keys()
    assert all(after[name].dtype == one.dtype and torch.equal(after[name], one) for name, one in wanted.items())
    assert made.weight_bytes == sum(one.numel() * one.element_size() for one in wanted.values())
    assert names_of(tmp_path) == ["out", "source-qwen2"]


def test_the_record_says_what_went(layered: Callable[..., Path], tmp_path: Path) -> None:
    """``kimicore.json`` has the source, the settings, every layer's influence, and the removals in their order."""
    source = layered("llama")
    made = prune_model(source, tmp_path / "out", 2, SMALL)
    record = json.loads((made.folder / "kimicore.json").read_text())
    assert record["format"] == "kimicore prune"
    assert record["source"] == open_source(source).fingerprint
    assert record["influence"] == list(made.choice.influence)
    assert [one["layer"] for one in record["removed"]] == [one.layer for one in made.choice.removals]
    assert record["settings"].items() >= {"measure": "influence", "samples": 5, "sample_tokens": 40}.items()
    assert "map" not in record
    with SyncEngine(made.folder, EngineConfig(dtype="float32", kv_device_bytes="4MiB")) as engine:
        assert len(engine.face.loop.runner.model.weights.layers) == 3


@pytest.mark.parametrize("kind", ["packed", "bytes", "awq", "gptq", "act-order"])
def test_quantized_matrices_stay_as_they_are(
    kind: str, layered: Callable[..., Path], answers: Callable[..., Answers], tmp_path: Path
) -> None:
    """A folder in any layout stays in it, and says what the source says with the same layers skipped."""
    source = coded(layered("llama", attention_bias=False, mlp_bias=False), kind)
    made = write_without(open_source(source), tmp_path / "out", chosen(1, 3)).folder
    before, after = load_file(source / "model.safetensors"), load_file(made / "model.safetensors")
    wanted = {new: tensor for name, tensor in before.items() if (new := CUT.renamed(name)) is not None}
    assert after.keys() == wanted.keys()
    assert all(torch.equal(after[name], one) for name, one in wanted.items())
    assert answers(made) == answers(source, skip_layers=(1, 3))


@pytest.mark.parametrize(
    ("ignore", "told"),
    [
        (["lm_head", "model.layers.3.mlp.up_proj", "model.layers.4.mlp.up_proj"], None),
        (["lm_head", r"re:.*layers\.4\.mlp\.up.*"], None),
        (["lm_head", r"re:.*layers\.[34]\.mlp\.up_proj"], "by patterns that cannot be told anew"),
    ],
)
def test_names_in_a_config_follow(
    ignore: list[str], told: str | None, layered: Callable[..., Path], answers: Callable[..., Answers], tmp_path: Path
) -> None:
    """Names and simple patterns of layers are told anew; a pattern that cannot be is refused, and nothing is left."""
    source = layered("llama", attention_bias=False, mlp_bias=False)
    plain = load_file(source / "model.safetensors")
    coded(source, "packed", config_as("packed") | {"ignore": ignore})
    tensors = load_file(source / "model.safetensors")
    for layer in (3, 4) if ignore[1] != r"re:.*layers\.4\.mlp\.up.*" else (4,):
        stem = f"model.layers.{layer}.mlp.up_proj."
        tensors = {name: one for name, one in tensors.items() if not name.startswith(stem)}
        tensors[f"{stem}weight"] = plain[f"{stem}weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    if told is not None:
        with pytest.raises(ConfigError, match=told):
            write_without(open_source(source), tmp_path / "out", chosen(1, 3))
        assert names_of(tmp_path) == ["source-llama"]
        return
    made = write_without(open_source(source), tmp_path / "out", chosen(1, 3)).folder
    config = json.loads((made / "config.json").read_text())["quantization_config"]
    assert all("4" not in one and "3" not in one for one in config["ignore"])
    assert answers(made) == answers(source, skip_layers=(1, 3))


def test_a_map_beside_the_weights_follows(
    layered: Callable[..., Path], answers: Callable[..., Answers], tmp_path: Path
) -> None:
    """What ``kimicore quantize`` wrote stays packed by its map, which names the layers that are left."""
    source = tmp_path / "int4"
    plain = layered("llama", attention_bias=False, mlp_bias=False)
    patterns = [["*.4.mlp.*_proj", "int8"], ["*.mlp.*_proj", "int4-g32"]]
    found = resolved(plain, "custom", {"patterns": patterns})
    quantize_model(plain, source, found, QuantizeSettings(method="nearest"))
    made = write_without(open_source(source), tmp_path / "out", chosen(1, 3)).folder
    record = json.loads((made / "kimicore.json").read_text())
    told = ResolvedMap.from_json(json.dumps(record["map"]))
    assert [one.module for one in told.modules] == list(modules_of(spec_from_config(open_source(made).config)))
    assert told.precision("layers.2.mlp.up_proj") == "int8"
    assert told.precision("layers.1.mlp.up_proj") == "int4-g32"
    assert told.activations == found.activations
    opened = open_source(made)
    assert isinstance(opened, SafetensorsSource)
    assert opened.coded["model.layers.2.mlp.up_proj.weight"].scheme.bits == 8
    assert answers(made) == answers(source, skip_layers=(1, 3))


def test_a_model_whose_only_quantized_layer_goes_is_plain(layered: Callable[..., Path], tmp_path: Path) -> None:
    """Where no quantized matrix is left, the config speaks of none."""
    plain = layered("llama", attention_bias=False, mlp_bias=False)
    found = resolved(plain, "custom", {"patterns": [["*.1.mlp.*_proj", "int4-g32"]]})
    quantize_model(plain, tmp_path / "one", found, QuantizeSettings(method="nearest"))
    made = write_without(open_source(tmp_path / "one"), tmp_path / "out", chosen(1)).folder
    assert "quantization_config" not in json.loads((made / "config.json").read_text())
    assert len(spec_from_config(open_source(made).config).layers) == 4


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_gguf_file_comes_in_bfloat16(architecture: str, tmp_path: Path) -> None:
    """The values of a GGUF file are those of its kept layers in bfloat16, and the folder loads by itself."""
    source = open_source(coded_gguf(tmp_path / "tiny.gguf", "Q8_0", "Q4_0", architecture=architecture, layers=3))
    made = write_without(source, tmp_path / "out", _three(1)).folder
    view, opened = without_layers(source, (1,)), open_source(made)
    assert spec_from_config(opened.config) == spec_from_config(view.config)
    assert set(opened.names()) == set(view.names())
    for name in view.names():
        assert torch.equal(opened.read(name, torch.bfloat16), view.read(name, torch.bfloat16))
    assert json.loads((made / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert opened.text.eos_ids == source.text.eos_ids


def _three(*layers: int) -> Any:
    return type(chosen())((0.5,) * 3, chosen(*layers).removals)


def test_large_models_come_in_several_files(
    layered: Callable[..., Path], answers: Callable[..., Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files stay under the limit, an index names them, and a folder of several files can itself be pruned."""
    source = layered("llama")
    right = answers(source, skip_layers=(1, 2, 3))
    monkeypatch.setattr(files, "_SHARD_BYTES", 100_000)
    made = write_without(open_source(source), tmp_path / "out", chosen(1, 3)).folder
    shards = sorted(made.glob("model-*.safetensors"))
    assert len(shards) > 2
    index = json.loads((made / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {one.name for one in shards}
    again = write_without(open_source(made), tmp_path / "again", _three(1)).folder
    assert answers(again) == right


# ------------------------------------------------------------ places and faults


def test_a_place_that_is_taken_is_left_alone(layered: Callable[..., Path], tmp_path: Path) -> None:
    """What is there is replaced only by ``overwrite``, and what is no model's folder never."""
    source = layered("llama")
    out = tmp_path / "out"
    prune_model(source, out, 1, SMALL)
    before = (out / "kimicore.json").read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        prune_model(source, out, 2, SMALL)
    assert (out / "kimicore.json").read_bytes() == before
    made = prune_model(source, out, 2, SMALL, overwrite=True)
    assert len(made.choice.removals) == 2
    assert len(spec_from_config(open_source(out).config).layers) == 3
    with pytest.raises(ConfigError, match="where the model itself lies"):
        prune_model(source, source, 1, SMALL, overwrite=True)
    other = tmp_path / "letters"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="is no model's folder"):
        prune_model(source, other, 1, SMALL, overwrite=True)
    with pytest.raises(ConfigError, match="there is no folder"):
        prune_model(source, tmp_path / "no" / "out", 1, SMALL)


def test_a_full_disk_leaves_nothing(
    layered: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where writing fails, what was there before is still there, and no part of the new folder."""
    source = layered("llama")
    out = tmp_path / "out"
    prune_model(source, out, 1, SMALL)
    before = {one.name: one.read_bytes() for one in out.iterdir()}

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(ConfigError, match="the disk is full"):
        prune_model(source, out, 2, SMALL, overwrite=True)
    assert {one.name: one.read_bytes() for one in out.iterdir()} == before
    assert names_of(tmp_path) == ["out", "source-llama"]


def test_what_an_interrupted_run_left_is_not_taken(layered: Callable[..., Path], tmp_path: Path) -> None:
    """A partial folder, of whatever command, is refused before anything is measured, unless it may be replaced."""
    source = layered("llama")
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match="is left of an interrupted run"):
        prune_model(source, tmp_path / "out", 1, SMALL)
    assert names_of(partial) == ["state.json"]
    prune_model(source, tmp_path / "out", 1, SMALL, overwrite=True)
    assert not partial.exists()


def test_a_disk_without_room_is_refused_first(
    layered: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk has not the room for the weights, nothing is measured or written."""
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage)
    shown: list[str] = []
    with pytest.raises(ConfigError, match="MB are free and"):
        prune_model(layered("llama"), tmp_path / "out", 1, SMALL, progress=lambda what, done, total: shown.append(what))
    assert shown == []


def test_types_that_cannot_be_carried_are_named(layered: Callable[..., Path], tmp_path: Path) -> None:
    """A tensor in float64 is refused by its name before anything is measured."""
    source = layered("llama")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight' is of the type F64"):
        prune_model(source, tmp_path / "out", 1, SMALL)


def test_a_damaged_record_is_named(layered: Callable[..., Path], tmp_path: Path) -> None:
    """A record beside the weights that cannot be read is an error, not a map that is lost in silence."""
    source = layered("llama")
    (source / "kimicore.json").write_text('{"map": {"version": 1, "modules": 3}}')
    with pytest.raises(ConfigError, match="holds no precision map that can be read"):
        write_without(open_source(source), tmp_path / "out", chosen(1))
    assert names_of(tmp_path) == ["source-llama"]


def test_a_pruned_model_reads_like_any_other(layered: Callable[..., Path], tmp_path: Path) -> None:
    """A pruned folder with no map has no activations in 8 bits, and answers."""
    made = prune_model(layered("qwen3"), tmp_path / "out", 3, SMALL).folder
    with SyncEngine(made, EngineConfig(kv_device_bytes="4MiB")) as engine:
        assert engine.generate(PROMPTS[0], max_tokens=4, temperature=0.0).token_ids
