"""The written folder: others load it to the same numbers, it loads by itself, and it says how it was made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.quantize.conftest import CLASSES
from tests.quantize.test_layers import ids, whole_logits

from kimicore.errors import ConfigError
from kimicore.model.load import open_source
from kimicore.model.modules import modules_of
from kimicore.model.spec import spec_from_config
from kimicore.policies.precision import ResolvedMap
from kimicore.policies.precision.named import policy_named, resolved_by
from kimicore.quantize.calibration import calibration_texts
from kimicore.quantize.finish import read_record
from kimicore.quantize.layout import bit_words
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.reading import ModelReader
from kimicore.quantize.run import Quantized, quantize_model
from kimicore.text.tokenizer import Tokenizer

SMALL = {"samples": 5, "sample_tokens": 32}
MIXED = {
    "patterns": [
        ["*.0.mlp.*_proj", "int4"],
        ["*.1.mlp.*_proj", "int5"],
        ["*.mlp.down_proj", "int4-g32"],
        ["*.mlp.*_proj", "int8"],
        ["*.q_proj", "int4-g64"],
        ["*norm", "float32"],
    ]
}


def resolved(folder: Path, name: str, settings: dict[str, Any] | None = None) -> ResolvedMap:
    return resolved_by(policy_named(name, settings), modules_of(spec_from_config(open_source(folder).config)))


def quantized(
    folder: Path, out: Path, name: str = "asymmetric", settings: dict[str, Any] | None = None, method: str = "gptq"
) -> Quantized:
    return quantize_model(folder, out, resolved(folder, name, settings), QuantizeSettings(method=method, **SMALL))


@given(st.integers(0, 1 << 30), st.integers(1, 200), st.sampled_from([4, 5, 6, 8]))
def test_bits_lie_as_compressed_tensors_has_them(seed: int, depth: int, bits: int) -> None:
    """Codes of any width and number lie in the words in which the library itself puts them."""
    codes = torch.randint(0, 1 << bits, (3, depth), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(bit_words(codes, bits), pack_to_int32((codes - (1 << bits - 1)).to(torch.int8), bits))


def check_with_transformers(folder: Path) -> None:
    """Load a folder with transformers and with our reader, and compare the logits in float32."""
    reader = ModelReader.of(open_source(folder))
    layers = [reader.layer(index) for index in range(len(reader.spec.layers))]
    with torch.inference_mode():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        oracle = model(ids()).logits
        found = whole_logits(reader, layers, ids())
    torch.testing.assert_close(found, oracle, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", list(CLASSES))
def test_transformers_reads_the_same_numbers(name: str, family: Callable[..., Path], tmp_path: Path) -> None:
    """For every family, transformers loads the folder and has the logits of the weights as they are read here."""
    quantized(family(name, intermediate_size=128), tmp_path / "out", settings={"ffn": "int4-g32"}, method="awq")
    check_with_transformers(tmp_path / "out")


@pytest.mark.parametrize("tied", [False, True])
def test_several_formats_in_one_folder(tied: bool, family: Callable[..., Path], tmp_path: Path) -> None:
    """Groups of 128, 64 and 32, five and eight bits, and float32 norms stand side by side, and others read them."""
    source = family("llama", hidden_size=128, intermediate_size=128, tie_word_embeddings=tied)
    quantized(source, tmp_path / "out", "custom", MIXED)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert {(one["weights"]["num_bits"], one["weights"]["group_size"]) for one in config["config_groups"].values()} == {
        (4, 128), (5, 32), (4, 32), (8, None), (4, 64),
    }  # fmt: skip
    check_with_transformers(tmp_path / "out")


def test_an_untied_head_can_be_rounded(family: Callable[..., Path], tmp_path: Path) -> None:
    """Where the head is a matrix of its own, a uniform map rounds it as well, and others read it."""
    settings = {
        "patterns": [["embed_tokens", "bfloat16"], ["*norm", "bfloat16"], ["*.bias", "bfloat16"], ["*", "int8"]]
    }
    quantized(family("qwen2", tie_word_embeddings=False), tmp_path / "out", "custom", settings)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["lm_head.weight"].dtype == torch.int8
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    check_with_transformers(tmp_path / "out")


def test_a_head_of_its_own_stays(family: Callable[..., Path], tmp_path: Path) -> None:
    """Where a tied model's file has an output matrix that differs, it stays, in 16 bits beside a rounded embedding."""
    source = family("llama", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    own = torch.randn((300, 64), generator=torch.Generator().manual_seed(5))
    save_file({**tensors, "lm_head.weight": own}, source / "model.safetensors")
    quantized(source, tmp_path / "out", "uniform-int8", method="nearest")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], own.to(torch.bfloat16))
    assert found["model.embed_tokens.weight"].dtype == torch.int8


@pytest.mark.parametrize("name", ["uniform-int4", "uniform-int8", "none"])
def test_short_names_of_maps(name: str, family: Callable[..., Path], tmp_path: Path) -> None:
    """A uniform map reaches the embedding, a tied head with it; "none" writes plain 16-bit weights."""
    made = quantized(family("llama", tie_word_embeddings=True), tmp_path / "out", name, method="nearest")
    reader = ModelReader.of(open_source(made.folder))
    own = ModelReader.of(open_source(tmp_path / "source-llama"))
    gap = (reader.embedding() - own.embedding()).abs().max()
    assert gap < {"uniform-int4": 0.06, "uniform-int8": 0.004, "none": 0.002}[name]
    assert reader.own_head() is None
    tensors = load_file(made.folder / "model.safetensors")
    packed = [one for one in tensors if one.endswith("_scale")]
    assert bool(packed) == (name != "none")
    assert ("quantization_config" in json.loads((made.folder / "config.json").read_text())) == (name != "none")


def test_it_says_how_it_was_made(family: Callable[..., Path], tmp_path: Path) -> None:
    """The folder keeps the map, the method, its settings and the source's digest; a damaged record is told."""
    source = family("qwen3")
    made = quantized(source, tmp_path / "out", settings={"ffn": "int4-g32", "middle": "bfloat16"})
    tree, found = read_record(made.folder)
    assert found == made.found
    assert tree["method"] == "gptq"
    assert tree["settings"] == {"samples": 5, "sample_tokens": 32, "damping": 0.01, "act_order": True}
    assert tree["source"] == open_source(source).fingerprint
    assert tree["calibration"]["tokens"] == 160
    assert made.ffn_share == 1.0
    assert made.weight_bytes == sum(one.numel() * one.element_size() for one in load_file(
        made.folder / "model.safetensors").values())  # fmt: skip
    for text in ("{", "[]", '{"format": "kimicore quantize", "version": 9}'):
        (made.folder / "kimicore.json").write_text(text)
        with pytest.raises(ConfigError, match=r"kimicore\.json: is no record"):
            read_record(made.folder)


def test_the_text_side_comes_along(family: Callable[..., Path], tmp_path: Path) -> None:
    """The folder's tokenizer is the source's, so that it loads without it."""
    source = family("llama")
    made = quantized(source, tmp_path / "out", settings={"ffn": "int4-g32"}, method="nearest")
    own, other = (Tokenizer.from_source(open_source(one).text) for one in (source, made.folder))
    assert own.version == other.version


@pytest.mark.parametrize("path", ["smollm2_path", "gemma_path"])
def test_a_gguf_vocabulary_becomes_a_tokenizer_file(path: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The written tokenizer.json gives the ids of the GGUF file's own vocabulary, here and in transformers."""
    from kimicore.quantize.text_files import write_text_files

    source = open_source(request.getfixturevalue(path))
    write_text_files(source, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    from kimicore.model.folder_text import folder_text

    text = folder_text(tmp_path, {})
    own, other = Tokenizer.from_source(source.text), Tokenizer.from_source(text)
    assert (other.eos_ids, other.bos_id, other.add_bos) == (own.eos_ids, own.bos_id, own.add_bos)
    assert text.chat_template == source.text.chat_template
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for sample in calibration_texts().values():
        wanted = own.encode(sample)
        assert other.encode(sample) == wanted
        assert theirs.encode(sample) == wanted
        assert other.decode(wanted, skip_special=True) == own.decode(wanted, skip_special=True)
    assert own.special_ids == other.special_ids
