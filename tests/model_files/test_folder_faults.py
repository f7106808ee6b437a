"""A quantized folder that is out of order is refused before it is read, by the names of what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kimicore.errors import ModelLoadError
from kimicore.kernels.registry import select_ops
from kimicore.model.load import open_source
from kimicore.model.spec import spec_from_config
from kimicore.model.transformer import Transformer

from .coded import Written, compressed, compressed_config, config_as, quantized, written_as
from .test_folder_formats import NAME, folder_of, opened

Tensors = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj"
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True,
}  # fmt: skip


def model() -> Tensors:
    """A tiny model's tensors."""
    generator = torch.Generator().manual_seed(5)
    at = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (40, 64), "model.norm.weight": (64,)}
    shapes |= {f"{at}{name}.weight": (64,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {
        f"{at}self_attn.{name}_proj.weight": size
        for name, size in zip("qkvo", [(64, 64), (32, 64), (32, 64), (64, 64)], strict=True)
    }
    shapes |= {
        f"{at}mlp.{name}_proj.weight": size for name, size in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96)))
    }
    return {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}


def load(folder: Path, **kwargs: Any) -> Transformer:
    """Load a folder's model."""
    source = open_source(folder)
    ops = select_ops("cpu", torch.float32, native=False)
    return Transformer.load(spec_from_config(source.config), source, ops, torch.float32, **kwargs)


def refused(folder: Path, match: str) -> None:
    """Check that a folder cannot be loaded, packed or plain."""
    for packed in (True, False):
        with pytest.raises(ModelLoadError, match=f"(?s){match}") as caught:
            load(folder, packed=packed)
        assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "word"),
    [("packed", "weight_scale"), ("packed", "weight_packed"), ("packed", "weight_shape"), ("bytes", "weight_scale"),
     ("awq", "qweight"), ("awq", "qzeros"), ("awq", "scales"), ("gptq", "qzeros"), ("gptq", "scales"),
     ("act-order", "g_idx")],
)  # fmt: skip
def test_missing_parts_are_named(kind: str, word: str, tmp_path: Path) -> None:
    """sgl-project/sglang#35228: a matrix without its scale, its zeros or its order is refused, as these are alone."""
    tensors, _ = quantized(model(), kind)
    del tensors[f"{UP}.{word}"]
    refused(
        folder_of(tmp_path / "m", tensors, config_as(kind), **SIZES),
        rf"tensor '{UP}\.{word}' is missing|'{UP}\.{word}'.* is missing",
    )


def test_a_matrix_of_bytes_without_scales_at_all(tmp_path: Path) -> None:
    """A matrix of bytes is never read as numbers, whether its folder speaks of quantization or not."""
    tensors, _ = quantized(model(), "bytes")
    del tensors[f"{UP}.weight_scale"]
    refused(folder_of(tmp_path / "m", tensors, config_as("bytes"), **SIZES), "up_proj.weight_scale'.* is missing")
    refused(folder_of(tmp_path / "n", tensors, None, **SIZES), "weight_scale")


@pytest.mark.parametrize(
    ("kind", "extra", "match"),
    [
        ("packed", f"{UP}.input_scale", "has not: .*up_proj.input_scale"),
        ("packed", f"{UP}.weight_global_scale", "has not: .*up_proj.weight_global_scale"),
        ("packed", "model.layers.0.mlp.x_proj.weight_scale", r"x_proj\.weight_packed.*is missing"),
        ("packed", "lm_head.weight_scale", "leaves 'lm_head' plain, but there are tensor 'lm_head.weight_scale'"),
        ("awq", "model.norm.scales", r"model\.norm\.qweight.*is missing"),
        ("awq", f"{UP}.g_idx", "has not: .*up_proj.g_idx"),
        ("gptq", f"{UP}.weight", "is there as floats and quantized"),
        ("gptq", f"{UP}.absmax", "has not: .*up_proj.absmax"),
    ],
)
def test_unused_parts_are_named(kind: str, extra: str, match: str, tmp_path: Path) -> None:
    """sgl-project/sglang#35228: a scale, or any other tensor, that no matrix uses is refused by its name."""
    tensors, _ = quantized(model(), kind)
    tensors[extra] = torch.ones(96, 1)
    refused(folder_of(tmp_path / "m", tensors, config_as(kind), **SIZES), match)


@pytest.mark.parametrize(
    ("kind", "word", "change", "match"),
    [
        ("packed", "weight_scale", lambda t: t[:, :1].contiguous(), r"BF16 \[96, 1\], expected .*\[96, 2\]"),
        ("packed", "weight_scale", lambda t: t.double(), r"is F64 \[96, 2\], expected F16 or BF16 or F32"),
        ("packed", "weight_shape", lambda t: t + 1, r"says \[97, 65\], but .* is \[96, 8\], in 4 bits each"),
        ("packed", "weight_shape", lambda t: t * 0, r"says \[0, 0\]"),
        ("packed", "weight_packed", lambda t: t.float(), r"is F32 \[96, 8\], expected I32"),
        ("zeros", "weight_zero_point", lambda t: t[:5].contiguous(), r"I32 \[5, 2\], expected I32 \[12, 2\]"),
        ("bytes", "weight", lambda t: t.to(torch.uint8), r"is U8 \[96, 64\], expected I8"),
        ("awq", "qzeros", lambda t: t[:1].contiguous(), r"is I32 \[1, 12\], expected I32 \[2, 12\]"),
        ("awq", "scales", lambda t: t.t().contiguous(), r"is F16 \[96, 2\], expected .*\[2, 96\]"),
        ("gptq", "g_idx", lambda t: t[:-1].contiguous(), r"is I32 \[63\], expected I32 or I64 \[64\]"),
        ("gptq", "g_idx", lambda t: t * 0, "does not give each of 2 groups its 32 inputs"),
        ("gptq", "g_idx", lambda t: t - 1, "does not give each of 2 groups its 32 inputs"),
        ("gptq", "g_idx", lambda t: t + 1_000_000, "does not give each of 2 groups its 32 inputs"),
    ],
)  # fmt: skip
def test_wrong_shapes_and_types_are_named(
    kind: str, word: str, change: Callable[[torch.Tensor], torch.Tensor], match: str, tmp_path: Path
) -> None:
    """A part of another shape or type than its matrix gives it is refused with both before it is read."""
    tensors, _ = quantized(model(), kind)
    tensors[f"{UP}.{word}"] = change(tensors[f"{UP}.{word}"])
    refused(folder_of(tmp_path / "m", tensors, config_as(kind), **SIZES), match)


def test_a_quantized_matrix_of_another_shape(tmp_path: Path) -> None:
    """A matrix whose parts fit together, but not into the model, is refused with its shape."""
    tensors, _ = quantized({**model(), f"{UP}.weight": torch.randn(64, 96)}, "awq")
    refused(
        folder_of(tmp_path / "m", tensors, config_as("awq"), **SIZES),
        r"up_proj.weight is \[64, 96\], expected \[96, 64\]",
    )


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "'bitsandbytes' is not supported; supported are compr",
        ),
        ({"quant_method": "fp8"}, "'fp8' is not supported"),
        ({"bits": 4}, "None is not supported"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "'gemv' of AWQ is not supported"),
        ({"quant_method": "awq", "bits": 3, "group_size": 32}, "bits: 3 is not supported; supported are 4"),
        ({"quant_method": "awq", "bits": 4}, "quantization_config.group_size: is missing"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size: is 0"),
        ({"quant_method": "awq", "bits": 4, "group_size": "32"}, "group_size='32': must be an integer"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 8},
            "group_size: 8 is not supported; groups are multiples of 16|is I32",
        ),
        ({"quant_method": "gptq", "bits": 2, "group_size": 32}, "bits: 2 is not supported; supported are 4, 8"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
            "'marlin' of GPTQ is not",
        ),
        (compressed_config("nvfp4-pack-quantized"), "'nvfp4-pack-quantized' is not supported"),
        (compressed_config("marlin-24"), "'marlin-24' is not supported"),
        (compressed_config("dense"), "'dense' is not supported"),
        (compressed_config(type="float", num_bits=8), "8 bits of type 'float' are not supported"),
        (
            compressed_config(strategy="block", group_size=None),
            "'block' is not supported; use group, channel or tensor",
        ),
        (compressed_config(num_bits=16), "num_bits=16: must be from 1 to 8"),
        (compressed_config(dynamic=True), "are not supported"),
        ({**compressed_config(), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: .* is not supported"),
        ({**compressed_config(), "sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config: .* is not"),
        ({**compressed_config(), "config_groups": {}}, "config_groups: must be an object with at least one group"),
        ({**compressed_config(), "config_groups": {"g": ["Linear"]}}, "must be an object with the field 'weights'"),
        ({**compressed_config(), "ignore": [1]}, "ignore: must be a list of names"),
        (compressed_config(ignore=["re:(a+)+b"]), "the pattern '.*' is too long or repeats too much"),
        (compressed_config(ignore=["re:" + ".*a" * 9]), "is too long or repeats too much"),
        (compressed_config(ignore=["re:("]), "is no pattern"),
        ("gptq", "'gptq' is no object"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: Any, match: str, tmp_path: Path) -> None:
    """A method, a format or a setting that is not read here is refused by its name when the folder is opened."""
    with pytest.raises(ModelLoadError, match=f"(?s){match}") as caught:
        opened(tmp_path / "m", written_as("gptq", torch.randn(16, 64)), config)
    assert "config.json" in str(caught.value)


def test_scales_of_activations_are_refused(tmp_path: Path) -> None:
    """A folder whose activations have stored scales is refused: they would be left out."""
    config = compressed_config("int-quantized", num_bits=8, strategy="channel", group_size=None)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": False, "strategy": "tensor"}
    with pytest.raises(ModelLoadError, match="activations with scales of their own are not supported"):
        opened(tmp_path / "m", compressed(1, 40, 80, bits=8, form="bytes"), config)


def test_modules_that_a_config_leaves_plain(tmp_path: Path) -> None:
    """A module that the config ignores is read as the floats that it is; quantized after all, it is refused."""
    written = compressed(1, 40, 64, group=32)
    for ignored in (NAME, r"re:.*up_proj"):
        config = compressed_config(group_size=32, ignore=[ignored])
        with pytest.raises(ModelLoadError, match=f"leaves '{NAME}' plain, but there are tensor '{NAME}.weight_packed'"):
            opened(tmp_path / "m", written, config)
        source = opened(tmp_path / "m", Written({"weight": torch.eye(4)}, torch.eye(4)), config)
        assert source.packed(f"{NAME}.weight") is None
        assert torch.equal(source.read(f"{NAME}.weight", torch.float32), torch.eye(4))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("coded", [True, False])
def test_tied_or_not_and_with_an_output_matrix_or_not(
    coded: bool, present: bool, tied: bool, packed: bool, tmp_path: Path
) -> None:
    """sgl-project/sglang#2935: a stored output matrix is used, tied or not; tied without one the embedding serves."""
    tensors, _ = quantized(model(), "packed")
    head = compressed(9, 40, 64, group=32)
    if present and coded:
        tensors |= {f"lm_head.{word}": part for word, part in head.parts.items()}
    elif present:
        tensors["lm_head.weight"] = head.values
    config = compressed_config(group_size=32, ignore=[] if coded else ["lm_head"])
    folder = folder_of(tmp_path / "m", tensors, config, **{**SIZES, "tie_word_embeddings": tied})
    if not tied and not present:
        refused(folder, r"missing tensors: lm_head.weight \(tie_word_embeddings is false\)")
        return
    loaded = load(folder, packed=packed)
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    table = head.values if present else tensors["model.embed_tokens.weight"]
    assert torch.allclose(loaded.logits(hidden), hidden @ table.T, rtol=1e-4, atol=1e-5)
    assert (loaded.weights.head is loaded.weights.embedding) == (not present)


def test_a_tied_output_matrix_that_is_the_embedding(tmp_path: Path) -> None:
    """A quantized output matrix with the numbers of the embedding is kept once, whatever form each of them has."""
    tensors, _ = quantized(model(), "packed")
    head = compressed(9, 40, 64, group=32)
    tensors |= {f"lm_head.{word}": part for word, part in head.parts.items()}
    tensors["model.embed_tokens.weight"] = head.values
    config = compressed_config(group_size=32, ignore=[])
    loaded = load(folder_of(tmp_path / "m", tensors, config, **SIZES), packed=True)
    assert loaded.weights.head is loaded.weights.embedding
