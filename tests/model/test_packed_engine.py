"""Engines over packed weights generate what they generate over the same weights expanded."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimicore import ConfigError, EngineConfig, PluginError, SyncEngine, assembly
from kimicore.kernels.registry import select_ops
from kimicore.model.gguf_source import GGUFSource
from kimicore.model.packed.joining import expand
from kimicore.model.packed.rounding import round_to_nearest
from kimicore.model.spec import spec_from_config
from kimicore.model.transformer import Transformer

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the rigs and the writers

from model_files.coded import KINDS, config_as, quantized
from model_files.coded_gguf import CODED, coded_gguf
from rigs.tiny import make_tiny, tiny_tokenizer

SMALL: dict[str, Any] = {"dtype": "float32", "kv_device_bytes": "8MiB"}
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 300}
PROMPTS = ([5, 9, 12, 40], list(range(10, 60)), [7] * 21)


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings under which weights stay packed, by native products or, where they are told to stay, by torch's."""
    if not request.param:
        monkeypatch.setattr(assembly, "packed_product", lambda ops: (True, "told so"))
    elif not assembly.packed_product(select_ops("cpu", torch.float32))[0]:
        pytest.skip("no native product with packed weights on this machine")
    return {"native_kernels": request.param}


def generated(model: Path, **settings: Any) -> tuple[list[tuple[int, ...]], Transformer]:
    """Return what prompts give in an engine of their own, and its model."""
    with SyncEngine(model, EngineConfig(**SMALL, **settings)) as engine:
        tokens = [engine.generate(ids, max_tokens=16, temperature=0.0, ignore_eos=True).token_ids for ids in PROMPTS]
        return tokens, engine.face.loop.runner.model  # type: ignore[attr-defined]


def same_tokens(model: Path, settings: dict[str, Any]) -> Transformer:
    """Check that packed and expanded weights give the same tokens; return the packed model."""
    packed, kept = generated(model, **settings)
    plain, expanded = generated(model, precision="none", **settings)
    assert kept.packed
    assert not expanded.packed
    assert kept.weight_bytes < expanded.weight_bytes
    assert packed == plain
    return kept


def folder_as(kind: str, family: str, tiny: Any, tmp_path: Path) -> tuple[Path, Path]:
    """Write a random model of a family quantized, and as floats that mean the same."""
    made = tiny(family, **WIDE)
    coded, plain = quantized(load_file(made.folder / "model.safetensors"), kind)
    folders = []
    for name, tensors, config in (("coded", coded, {"quantization_config": config_as(kind)}), ("plain", plain, {})):
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**made.config, **config}))
        (folder / "tokenizer.json").write_text(tiny_tokenizer())
        folders.append(folder)
    return folders[0], folders[1]


@pytest.mark.parametrize("kept", [True], ids=["native"], indirect=True)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_folders(kind: str, family: str, kept: dict[str, Any], tiny: Any, tmp_path: Path) -> None:
    """A folder of any format and family gives the same tokens packed, expanded, and as the floats that it means."""
    coded, plain = folder_as(kind, family, tiny, tmp_path)
    same_tokens(coded, kept)
    assert generated(coded, **kept)[0] == generated(plain, **kept)[0]


@pytest.mark.parametrize("kept", [False], ids=["torch"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_folders_by_torch(kind: str, kept: dict[str, Any], tiny: Any, tmp_path: Path) -> None:
    """Weights that are told to stay packed where torch alone serves give the same tokens as well."""
    same_tokens(folder_as(kind, "llama", tiny, tmp_path)[0], kept)


@pytest.mark.parametrize("name", CODED)
def test_gguf_types(name: str, kept: dict[str, Any], tmp_path: Path) -> None:
    """A GGUF file of any quantized type gives the same tokens packed and expanded."""
    path = coded_gguf(tmp_path / "m.gguf", name, layers=2)
    model = same_tokens(path, kept)
    most = {"Q2_K": 2.0, "Q3_K": 1.4}.get(name, 1.15)  # two and three bits lie in four
    assert model.weight_bytes <= most * path.stat().st_size


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_gguf_families(architecture: str, kept: dict[str, Any], tmp_path: Path) -> None:
    """A file of several types gives the same tokens packed and expanded, in every family."""
    path = coded_gguf(tmp_path / "m.gguf", "Q4_K", "Q6_K", "Q8_0", architecture=architecture, layers=2)
    same_tokens(path, kept)


def test_packed_is_the_usual_way(tmp_path: Path) -> None:
    """Unless a setting says otherwise, quantized weights stay packed where a native product with them exists."""
    path = coded_gguf(tmp_path / "m.gguf", "Q4_0")
    native = assembly.packed_product(select_ops("cpu", torch.float32))[0]
    assert generated(path)[1].packed == native


def test_without_a_native_product_weights_are_expanded(tmp_path: Path) -> None:
    """Where torch alone serves, quantized weights are expanded at load, and it can be told why."""
    path = coded_gguf(tmp_path / "m.gguf", "Q4_0")
    model = generated(path, native_kernels=False)[1]
    assert not model.packed
    ops = select_ops("cpu", torch.float32, native=False)
    keeps, why = assembly.keeps_packed(EngineConfig(), ops)
    assert not keeps
    assert "native" in why
    assert assembly.keeps_packed(EngineConfig(precision="none"), ops) == (False, "precision='none' expands them")


@pytest.mark.parametrize("precision", ["asymmetric", "uniform-int4", "uniform-int8"])
def test_maps_round_at_load(precision: str, kept: dict[str, Any], tmp_path: Path) -> None:
    """A plain model under a map gives what its rounded weights give expanded, and its map can be read."""
    folder = make_tiny(tmp_path / "m")
    tokens, model = generated(folder, precision=precision, activations="16-bit", **kept)
    assert model.packed
    assert model.precision is not None
    assert model.precision.precision("layers.0.mlp.up_proj") == ("int8" if precision == "uniform-int8" else "int4-g64")
    expanded = shutil.copytree(folder, tmp_path / "expanded")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        module = name.removeprefix("model.").removesuffix(".weight")
        form = model.precision.precision(module)
        if form.startswith("int"):
            tensors[name] = expand(round_to_nearest(tensors[name], form), torch.float32)
    save_file(tensors, expanded / "model.safetensors")
    assert tokens == generated(expanded, **kept)[0]
    assert tokens != generated(folder, **kept)[0]


def test_settings_of_maps(tmp_path: Path) -> None:
    """A map's own settings stand under policy.precision; wrong names and values are refused before a model is read."""
    folder = make_tiny(tmp_path / "m")
    model = generated(folder, precision="custom", policy={"precision": {"patterns": {"*.down_proj": "int4-g32"}}})[1]
    assert model.precision is not None
    assert model.precision.precision("layers.1.mlp.down_proj") == "int4-g32"
    assert model.precision.precision("layers.1.mlp.up_proj") == "bfloat16"
    with pytest.raises(PluginError, match="precision='asymetric' is not known"):
        generated(tmp_path / "nowhere", precision="asymetric")
    with pytest.raises(ConfigError, match="has no such setting"):
        generated(tmp_path / "nowhere", precision="asymmetric", policy={"precision": {"ffm": "int4"}})
    with pytest.raises(ConfigError, match="precision='stored': has no settings"):
        EngineConfig(policy={"precision": {"ffn": "int4"}})


def test_blocks_are_not_shared_between_precisions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keys of KV blocks differ between packed and expanded weights and between maps, and only there."""
    monkeypatch.setattr(assembly, "packed_product", lambda ops: (True, "told so"))
    folder, path = make_tiny(tmp_path / "m"), coded_gguf(tmp_path / "m.gguf", "Q4_0")

    def weights(model: Path, **settings: Any) -> bytes:
        with SyncEngine(model, EngineConfig(**SMALL, native_kernels=False, **settings)) as engine:
            return engine.face.loop._book._contexts[0].weights

    assert weights(path) != weights(path, precision="none")
    assert weights(folder) == weights(folder, precision="none")
    ffn = {"policy": {"precision": {"ffn": "int8"}}}
    seen = [weights(folder), weights(folder, precision="asymmetric"), weights(folder, precision="asymmetric", **ffn)]
    assert len(set(seen)) == 3
    assert weights(folder, precision="asymmetric") == seen[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("demo", ["smollm2_path", "gemma_path"])
def test_demo_models_keep_their_tokens(demo: str, dtype: str, request: pytest.FixtureRequest) -> None:
    """The demo models generate the same packed as expanded, in at most 1.15 times the memory of their files.

    In bfloat16 products with packed weights may round otherwise: there the likeliest first token is as likely.
    """
    path: Path = request.getfixturevalue(demo)
    text = "The history of the lighthouse begins in 1811, when"
    found = {}
    for precision in ("stored", "none"):
        config = EngineConfig(dtype=dtype, kv_device_bytes="64MiB", precision=precision)
        with SyncEngine(path, config) as engine:
            model = engine.face.loop.runner.model  # type: ignore[attr-defined]
            found[precision] = engine.generate(text, max_tokens=24, temperature=0.0, logprobs=1)
            if precision == "stored" and model.packed:
                assert model.weight_bytes <= 1.15 * path.stat().st_size
    stored, plain = found["stored"], found["none"]
    assert stored.token_ids[0] == plain.token_ids[0] and stored.logprobs and plain.logprobs
    assert abs(stored.logprobs[0].logprob - plain.logprobs[0].logprob) < 0.05
    if dtype == "float32":
        assert stored.token_ids == plain.token_ids


def test_every_matrix_of_a_demo_model_is_packed(smollm2_path: Path) -> None:
    """Every matrix of the demo model's file has its codes, and a layer's products are one each."""
    source = GGUFSource(smollm2_path)
    matrices = [name for name in source.names() if len(source.shape(name)) == 2]
    assert [name for name in matrices if source.packed(name) is None] == []
    spec = spec_from_config(source.config)
    model = Transformer.load(spec, source, select_ops("cpu", torch.float32), torch.float32, packed=True)
    assert sum(count for form, count, _ in model.forms() if "bits" in form) == 4 * len(spec.layers) + 1
