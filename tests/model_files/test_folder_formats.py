"""Folders that other tools quantized mean here what they mean there, packed or read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.kernels.packed_linear.reference import unpack
from kimicore.model.load import open_source
from kimicore.model.packed.words import spaced_codes, stream_codes
from kimicore.model.safetensors_source import SafetensorsSource

from .coded import Written, act_order, awq, compressed, compressed_config, gptq, spaced, stream

NAME = "model.layers.0.mlp.up_proj"


def folder_of(path: Path, tensors: Mapping[str, torch.Tensor], quantization: Any, **config: Any) -> Path:
    """Write a folder with a quantization config."""
    path.mkdir(exist_ok=True)
    whole = {"model_type": "llama", "quantization_config": quantization, **config}
    (path / "config.json").write_text(json.dumps(whole))
    (path / "tokenizer.json").write_text("{}")
    save_file(dict(tensors), path / "model.safetensors")
    return path


def opened(path: Path, written: Written, quantization: Any) -> SafetensorsSource:
    """Return a folder that holds one quantized matrix and one norm."""
    tensors = {f"{NAME}.{word}": part for word, part in written.parts.items()}
    source = open_source(folder_of(path, {**tensors, "model.norm.weight": torch.ones(4)}, quantization))
    assert isinstance(source, SafetensorsSource)
    return source


def unordered(packed: PackedWeight) -> torch.Tensor:
    """Return the float32 weight with its columns in the input's order."""
    values = unpack(packed, torch.float32)
    if packed.order is not None:
        values = values[:, torch.argsort(packed.order.long())]
    return values


def agrees(path: Path, written: Written, quantization: Any, *, bits: int) -> PackedWeight:
    """Check the one matrix of a folder in every way that it can be had; return it packed."""
    source = opened(path, written, quantization)
    name = f"{NAME}.weight"
    assert sorted(source.names()) == sorted([name, "model.norm.weight"])
    assert source.shape(name) == tuple(written.values.shape)
    packed = source.packed(name)
    assert packed is not None
    assert packed.bits == bits
    assert torch.equal(unordered(packed), written.values)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(source.read(name, dtype), written.values.to(dtype))
    assert source.packed("model.norm.weight") is None
    assert "quantization_config" not in source.config
    return packed


@given(seed=st.integers(0, 1 << 32), bits=st.integers(1, 8), count=st.integers(1, 200))
def test_words_come_apart(seed: int, bits: int, count: int) -> None:
    """Codes of 1 to 8 bits come out of their words as they went in, across words and within them."""
    codes = torch.randint(0, 1 << bits, (3, count), generator=torch.Generator().manual_seed(seed % (1 << 62)))
    words = torch.from_numpy(stream(codes.numpy(), bits))
    assert torch.equal(stream_codes(words, bits, count).long(), codes)
    words = torch.from_numpy(spaced(codes.numpy(), bits))
    assert torch.equal(spaced_codes(words, bits)[:, :count].long(), codes)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "kept"), [(2, 4), (3, 4), (4, 4), (5, 5), (6, 6), (7, 8), (8, 8)])
def test_compressed_tensors_packed(bits: int, kept: int, symmetric: bool, tmp_path: Path) -> None:
    """Pack-quantized matrices of every number of bits, in groups and rows, with zeros and without, mean the same."""
    forms = ["stream", "spaced"] if 32 % bits else ["stream"]
    for index, form in enumerate(forms):
        for group in (32, 0):
            written = compressed(bits, 70, 96, bits=bits, group=group, symmetric=symmetric, form=form)
            strategy = (
                {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
            )
            config = compressed_config(num_bits=bits, symmetric=symmetric, **strategy)
            packed = agrees(tmp_path / f"{index}-{group}", written, config, bits=kept)
            assert packed.group == (group or 96)
            assert (packed.zeros is None) == symmetric


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_compressed_tensors_in_bytes(dtype: torch.dtype, tmp_path: Path) -> None:
    """Int-quantized and naive-quantized matrices, by row, by group and as a whole, mean the same."""
    rows = {"num_bits": 8, "strategy": "channel", "group_size": None}
    for index, (form, symmetric) in enumerate([("int-quantized", True), ("naive-quantized", False)]):
        written = compressed(1, 40, 80, bits=8, symmetric=symmetric, dtype=dtype, form="bytes")
        agrees(tmp_path / f"{index}", written, compressed_config(form, symmetric=symmetric, **rows), bits=8)
    written = compressed(2, 40, 96, bits=8, group=32, dtype=dtype, form="bytes")
    agrees(tmp_path / "group", written, compressed_config("int-quantized", num_bits=8, group_size=32), bits=8)
    whole = compressed(3, 40, 80, bits=8, dtype=dtype, form="bytes")
    scale = whole.parts["weight_scale"][:1].reshape(1)
    values = whole.parts["weight"].float() * scale.float()
    config = compressed_config("int-quantized", num_bits=8, strategy="tensor", group_size=None)
    agrees(tmp_path / "whole", Written({**whole.parts, "weight_scale": scale}, values), config, bits=8)


def test_activations_of_eight_bits_are_no_hindrance(tmp_path: Path) -> None:
    """A W8A8 folder whose activations are rounded as they come has its weights read; they are what it stores."""
    config = compressed_config("int-quantized", num_bits=8, strategy="channel", group_size=None)
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    agrees(tmp_path / "m", compressed(1, 40, 80, bits=8, form="bytes"), config, bits=8)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("form", "bits", "group"),
    [("pack-quantized", 4, 32), ("pack-quantized", 4, None), ("pack-quantized", 5, 32), ("pack-quantized", 8, 64),
     ("int-quantized", 8, None), ("naive-quantized", 8, 32)],
)  # fmt: skip
def test_what_compressed_tensors_writes(
    form: str, bits: int, group: int | None, symmetric: bool, tmp_path: Path
) -> None:
    """What the library itself has compressed is read here as it decompresses it, bit for bit in its own type."""
    args = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy="group" if group else "channel", group_size=group
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    generator = torch.Generator().manual_seed(bits)
    weight = torch.randn((48, 128), generator=generator)
    groups = 128 // group if group else 1
    scale = (weight.view(48, groups, -1).abs().amax(dim=2) / (2 ** (bits - 1) - 1)).to(torch.bfloat16)
    state = {"weight": weight.to(torch.bfloat16), "weight_scale": scale}
    if not symmetric:
        half = 1 << (bits - 1)
        state["weight_zero_point"] = torch.randint(-half, half, (48, groups), generator=generator).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    config = compressed_config(form, **args.model_dump(exclude_none=True))
    source = opened(tmp_path / "m", Written(stored, expected), config)
    assert torch.equal(source.read(f"{NAME}.weight", torch.bfloat16), expected)
    packed = source.packed(f"{NAME}.weight")
    assert packed is not None
    assert torch.equal(unpack(packed, torch.bfloat16), expected)


@pytest.mark.parametrize("group", [32, 128, 0])
def test_awq(group: int, tmp_path: Path) -> None:
    """AWQ's matrices come out of their interleaved words as they went in."""
    config = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "version": "gemm", "zero_point": True}
    packed = agrees(tmp_path / "m", awq(5, 72, 256, group=group), config, bits=4)
    assert packed.zeros is not None


def test_awq_as_the_published_code_unpacks_it(tmp_path: Path) -> None:
    """Shifting all columns of AWQ's words and reordering them by AutoAWQ's table gives what is read here."""
    written = awq(9, 64, 128, group=64)
    reverse = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    shifts = torch.arange(0, 32, 4)

    def apart(words: torch.Tensor) -> torch.Tensor:
        flat = (words[:, :, None] >> shifts).view(len(words), -1)
        return flat.view(len(words), -1, 8)[..., reverse].reshape(len(words), -1) & 15

    codes, zeros = apart(written.parts["qweight"]), apart(written.parts["qzeros"])
    wide = written.parts["scales"].repeat_interleave(64, dim=0)
    expected = ((codes - zeros.repeat_interleave(64, dim=0)) * wide).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": 64}
    source = opened(tmp_path / "m", written, config)
    assert torch.equal(source.read(f"{NAME}.weight", torch.float16), expected)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 0])
def test_gptq(group: int, bits: int, version: int, tmp_path: Path) -> None:
    """GPTQ's matrices of 4 and 8 bits in both of its formats mean the same."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": False}
    config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    packed = agrees(tmp_path / "m", gptq(6, 72, 256, bits=bits, group=group, version=version), config, bits=bits)
    assert packed.order is None


def test_gptq_with_act_order(tmp_path: Path) -> None:
    """With act-order every input finds its own group; without a group for rows there is nothing to order."""
    written = gptq(7, 40, 256, group=32, order=act_order(1, 256, 32))
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}
    packed = agrees(tmp_path / "m", written, config, bits=4)
    assert packed.order is not None
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    from kimicore.kernels.packed_linear.reference import packed_linear, packed_rows

    assert torch.allclose(packed_linear(x, packed), x @ written.values.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(packed_rows(packed, torch.tensor([3, 0]), torch.float32), written.values[[3, 0]])
    rows = gptq(7, 40, 256, order=act_order(1, 256, 256))
    assert agrees(tmp_path / "r", rows, {**config, "group_size": -1}, bits=4).order is None


def test_gptq_without_a_table_of_groups(tmp_path: Path) -> None:
    """Where groups are neighbours the table of them may be absent."""
    written = gptq(8, 40, 128, group=32)
    del written.parts["g_idx"]
    agrees(tmp_path / "m", written, {"quant_method": "gptq", "bits": 4, "group_size": 32}, bits=4)


def test_gptq_settings_by_module(tmp_path: Path) -> None:
    """A pattern of GPTQ's ``dynamic`` settings gives the modules that it matches their own bits and groups."""
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "dynamic": {r"+:.*\.up_proj": {"bits": 8, "group_size": 32}},
    }
    agrees(tmp_path / "m", gptq(4, 40, 128, bits=8, group=32), config, bits=8)


def test_compressed_tensors_with_an_order(tmp_path: Path) -> None:
    """Groups in activation order are followed in compressed-tensors as well."""
    written = compressed(3, 40, 128, group=32, symmetric=False, order=act_order(4, 128, 32))
    packed = agrees(
        tmp_path / "m", written, compressed_config(group_size=32, symmetric=False, actorder="group"), bits=4
    )
    assert packed.order is not None


def test_targets_from_the_closest_rule(tmp_path: Path) -> None:
    """A module's name goes before a pattern, and that before a class, whatever the order of the groups."""
    written = compressed(3, 40, 128, bits=5, group=32)
    for index, target in enumerate([NAME, r"re:.*mlp\.(up|down)_proj$"]):
        config = compressed_config(group_size=64)
        own = {"num_bits": 5, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
        config["config_groups"]["group_1"] = {"targets": [target], "weights": own}
        agrees(tmp_path / str(index), written, config, bits=5)


def test_constant_zeros_are_one_number(tmp_path: Path) -> None:
    """Zeros that are all the same, as symmetric GPTQ stores them, are kept as one number."""
    written = gptq(4, 40, 128, group=32)
    written.parts["qzeros"].fill_(0x77777777)  # one less than 8
    source = opened(tmp_path / "m", written, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True})
    packed = source.packed(f"{NAME}.weight")
    assert packed is not None
    assert (packed.zero, packed.zeros) == (8, None)


@pytest.mark.parametrize("value", [0.0, 6e-8, float("inf"), float("nan")])
def test_odd_scales_stay_as_they_are(value: float, tmp_path: Path) -> None:
    """Zero, subnormal, infinite and NaN scales of a file give what multiplying by them gives, in both readings."""
    written = awq(5, 40, 64, group=32)
    written.parts["scales"][0, :5] = value
    source = opened(tmp_path / "m", written, {"quant_method": "awq", "bits": 4, "group_size": 32})
    plain, packed = source.read(f"{NAME}.weight", torch.float32), source.packed(f"{NAME}.weight")
    assert packed is not None
    assert torch.equal(plain, unpack(packed, torch.float32)) or value != value or value == float("inf")
    assert torch.equal(plain.isfinite(), unpack(packed, torch.float32).isfinite())
    assert torch.equal(plain[5:], written.values[5:])
    finite = value == value and value != float("inf")
    assert bool(plain[:5, :32].isfinite().all()) == finite


def test_the_text_part_of_a_model_that_also_sees_pictures(tmp_path: Path) -> None:
    """The outer config of a Gemma 3 with a vision tower says what is quantized, by the names that its files have."""
    stored = "language_model.model.layers.0.mlp."
    written = compressed(1, 40, 64, group=32)
    tensors = {f"{stored}up_proj.{word}": part for word, part in written.parts.items()}
    tensors |= {f"{stored}down_proj.weight": torch.eye(4), "vision_tower.x.weight_scale": torch.ones(1)}
    for ignored in (f"{stored}down_proj", r"re:.*down_proj", "model.layers.0.mlp.down_proj"):
        config = compressed_config(group_size=32, ignore=[ignored])
        folder = folder_of(tmp_path / "m", tensors, config, model_type="gemma3", text_config={"hidden_size": 64})
        source = open_source(folder)
        assert "quantization_config" not in source.config
        assert torch.equal(source.read(f"{NAME}.weight", torch.float32), written.values)
        assert source.packed("model.layers.0.mlp.down_proj.weight") is None


def test_the_older_name_of_the_config(tmp_path: Path) -> None:
    """A config that calls it ``compression_config`` and does not name the method is one of compressed-tensors."""
    written = compressed(1, 40, 64, group=32)
    tensors = {f"{NAME}.{word}": part for word, part in written.parts.items()}
    config = compressed_config(group_size=32)
    del config["quant_method"]
    source = open_source(folder_of(tmp_path / "m", tensors, None, compression_config=config))
    assert torch.equal(source.read(f"{NAME}.weight", torch.float32), written.values)


def test_fingerprints_tell_what_a_config_says(tmp_path: Path) -> None:
    """Two folders with the same tensors and another word about how they are quantized have two fingerprints."""
    written = gptq(6, 72, 256, group=32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    first = opened(tmp_path / "a", written, config)
    second = opened(tmp_path / "b", written, {**config, "checkpoint_format": "gptq_v2"})
    assert first.fingerprint == opened(tmp_path / "c", written, config).fingerprint
    assert first.fingerprint != second.fingerprint
