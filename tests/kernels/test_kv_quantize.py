"""Keys and values in 8 and 4 bits: the layout, the error bounds, and the same bytes from every implementation."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kimicore.kernels.kv_quantize import native, reference
from kimicore.kernels.kv_quantize.layout import packed_layer_bytes

from .cases import implementations
from .tolerances import DTYPES

OPS = implementations(native.load(), reference=reference.kv_quantize)
NATIVE = implementations(native.load())
SHAPES = [(3, 16, 64), (1, 32, 256), (2, 16, 80), (2, 64, 6), (1, 16, 34), (5, 4, 2)]
MOST = 65504.0  # of float16


def unpacked(block: Tensor, shape: tuple[int, int, int], bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return (codes, minimum, step) of one layer of a block, each [2, KH, bt, D] in float64, read byte by byte."""
    kv_heads, block_tokens, dim = shape
    raw = block.numpy().tobytes()
    token_bytes = dim * bits // 8
    codes = np.frombuffer(raw, np.uint8, 2 * kv_heads * block_tokens * token_bytes)
    codes = codes.reshape(2, kv_heads, block_tokens, token_bytes)
    if bits == 4:
        codes = np.concatenate([codes % 16, codes // 16], axis=3)
    at = 2 * kv_heads * block_tokens * token_bytes
    keys = np.frombuffer(raw, np.float16, kv_heads * 2 * dim, at).reshape(kv_heads, 2, 1, dim)
    at += kv_heads * dim * 4
    values = np.frombuffer(raw, np.float16, kv_heads * block_tokens * 2, at).reshape(kv_heads, block_tokens, 2, 1)
    assert not any(raw[at + kv_heads * block_tokens * 4 :]), "the filling is not zero"
    full = (kv_heads, block_tokens, dim)
    minimum, step = (
        np.stack([np.broadcast_to(keys[:, i], full), np.broadcast_to(values[:, :, i], full)]).astype(np.float64)
        for i in (0, 1)
    )
    return torch.tensor(codes, dtype=torch.float64), torch.tensor(minimum), torch.tensor(step)


def quantized(op: Any, block: Tensor, bits: int) -> Tensor:
    """Return the bytes of one block [2, KH, bt, D], written between two others that stay as they are."""
    _, kv_heads, block_tokens, dim = block.shape
    kv = torch.full((3, 2, *block.shape), nan, dtype=block.dtype)
    kv[2, 1] = block
    size = packed_layer_bytes(kv_heads, block_tokens, dim, bits)
    # Slots lie further apart than their layers take.
    packed = torch.full((4, 3 * size + 64), 170, dtype=torch.uint8)[:, : 3 * size].unflatten(1, (3, size))
    op(kv, 1, torch.tensor([2], dtype=torch.int32), packed, torch.tensor([3], dtype=torch.int32), bits)
    assert (packed[:3] == 170).all() and (packed[3, 0] == 170).all() and (packed[3, 2] == 170).all()
    return packed[3, 1]


def noise(shape: tuple[int, int, int], seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    spread = torch.randn(2, shape[0], 1, shape[2], generator=random).exp()
    return torch.randn(2, *shape, generator=random) * spread + spread.log()


def check_bounds(block: Tensor, raw: Tensor, bits: int) -> None:
    codes, minimum, step = unpacked(raw, tuple(block.shape[1:]), bits)  # type: ignore[arg-type]
    x = block.double()
    error = (minimum + step * codes - x).abs()
    # float32 and float16 round the range: a few units in the last place of the largest number.
    assert (error <= step / 2 + 1e-6 * (x.abs() + minimum.abs() + step)).all()
    axes = ((0, 2), (1, 3))  # keys share a step per channel, values per token
    for which, along in axes:
        least, greatest = x[which].amin(along - 1, keepdim=True), x[which].amax(along - 1, keepdim=True)
        assert (minimum[which] <= least).all()
        levels = (1 << bits) - 1
        wide = torch.maximum((greatest - minimum[which]) / levels, torch.tensor(2.0**-24))
        assert (step[which] <= wide * (1 + 2**-9) + 2.0**-24).all(), "the step is wider than it has to be"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_is_half_a_step(op: Any, dtype: torch.dtype, shape: tuple[int, int, int], bits: int) -> None:
    """A value comes back within half a step of its channel's (keys) or token's (values) range."""
    block = noise(shape).to(dtype)
    check_bounds(block, quantized(op, block, bits), bits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", NATIVE)
def test_bytes_are_the_reference_s(op: Any, dtype: torch.dtype, shape: tuple[int, int, int], bits: int) -> None:
    """Native gives the reference's bytes, for groups of every kind that one block can mix."""
    block = noise(shape, seed=1)
    tokens = block[0].shape[1]
    block[:, :, :, 0] *= 1e-6
    block[:, 0, 1] *= 1e-7
    block[:, 0, 2 % tokens] = 3e38
    block[:, :, 3 % tokens, 1] = -2e5
    block[:, -1, 0] = torch.where(block[:, -1, 0] > 0, -0.0, 0.0)
    if shape[2] > 2:
        block[0, 0, 0, 2], block[0, 0, 1, 3], block[1, 0, 1, 4] = nan, inf, -inf
    block = block.to(dtype)
    assert torch.equal(quantized(op, block, bits), quantized(reference.kv_quantize, block, bits))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("op", NATIVE)
@given(data=st.lists(st.floats(width=32), min_size=16, max_size=64), dim=st.sampled_from([2, 6, 18, 40]))
def test_any_numbers_give_the_reference_s_bytes(op: Any, bits: int, data: list[float], dim: int) -> None:
    """Native gives the reference's bytes for any float32 numbers, special ones among them."""
    block = torch.tensor(data).repeat(2 * 16 * dim)[: 2 * 16 * dim].view(2, 1, 16, dim)
    assert torch.equal(quantized(op, block, bits), quantized(reference.kv_quantize, block, bits))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [nan, inf, -inf])
def test_what_is_not_finite_is_seen(op: Any, bits: int, bad: float) -> None:
    """A NaN or an infinity makes its channel (of keys) or token (of values) NaN, and nothing else."""
    block = noise((2, 16, 20))
    block[:, 1, 5, 7] = bad
    codes, minimum, step = unpacked(quantized(op, block, bits), (2, 16, 20), bits)
    found = minimum + step * codes
    expected = torch.zeros(found.shape, dtype=torch.bool)
    expected[0, 1, :, 7] = expected[1, 1, 5] = True
    assert torch.equal(found.isnan(), expected)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.0, 0.1, -0.1, 1e-9, -1e-9, 1e-40, 6e-8, 40000.0, MOST, -MOST])
def test_constant_groups(op: Any, bits: int, value: float) -> None:
    """ggml-org/llama.cpp#7313: a group of one number, however small, has finite scales; it comes back as it is where
    float16 holds it, else within half of a small step."""
    block = torch.full((2, 1, 16, 6), value)
    codes, minimum, step = unpacked(quantized(op, block, bits), (1, 16, 6), bits)
    if float(torch.tensor(value).half()) == value:
        assert not step.any() and not codes.any() and (minimum == value).all()
    else:
        assert (step > 0).all() and (step <= max(abs(value) / 1000, 2.0**-24)).all()
        check_bounds(block, quantized(op, block, bits), bits)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-30, 1e-8, 1e-4, 1e4, 6e4])
def test_small_and_large_ranges(op: Any, bits: int, size: float) -> None:
    """Ranges that float16's steps can only just describe keep the bound, where the least step is 2^-24."""
    block = noise((2, 16, 20))
    block = block / block.abs().max() * size
    check_bounds(block, quantized(op, block, bits), bits)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bits", [8, 4])
def test_beyond_float16_is_held_to_its_range(op: Any, bits: int) -> None:
    """Finite numbers beyond what the scales can say are held to the nearest that they can, not turned to infinity."""
    block = torch.zeros(2, 1, 16, 6)
    block[:, :, 0], block[:, :, 1] = 3e38, -3e38
    block[1, 0, :, 0], block[1, 0, :, 1] = 3e38, -3e38
    codes, minimum, step = unpacked(quantized(op, block, bits), (1, 16, 6), bits)
    found = minimum + step * codes
    assert found.isfinite().all()
    assert (found[0, 0, 1] == -MOST).all() and (found[0, 0, 0] == -MOST + MOST * ((1 << bits) - 1)).all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [0, 1, 37])
def test_many_blocks(op: Any, bits: int, count: int) -> None:
    """Many blocks at once get the bytes that each gets alone, in the slots they are meant for."""
    random = torch.Generator().manual_seed(5)
    kv = torch.randn(40, 2, 2, 3, 16, 24, generator=random).to(torch.bfloat16)
    size = packed_layer_bytes(3, 16, 24, bits)
    packed = torch.full((50, 2, size), 170, dtype=torch.uint8)
    sources = torch.randperm(40, generator=random)[:count].to(torch.int32)
    targets = torch.randperm(50, generator=random)[:count].to(torch.int32)
    op(kv, 1, sources, packed, targets, bits)
    rest = torch.ones(50, dtype=torch.bool)
    rest[targets.long()] = False
    assert (packed[rest] == 170).all() and (packed[:, 0] == 170).all()
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        assert torch.equal(packed[target, 1], quantized(reference.kv_quantize, kv[source, 1], bits))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantized_is_minimum_and_steps(dtype: torch.dtype, shape: tuple[int, int, int], bits: int) -> None:
    """The reference unpacks ``minimum + step * code``, rounded to float32 once and then to the type."""
    raw = quantized(reference.kv_quantize, noise(shape), bits)
    packed = torch.stack((torch.full_like(raw, 255), raw)).unsqueeze(1)
    found = reference.dequantized(packed, 0, torch.tensor([1]), shape, bits, dtype)
    codes, minimum, step = unpacked(raw, shape, bits)
    assert torch.equal(found[0], (minimum + step * codes).float().to(dtype))


def test_layout_sizes() -> None:
    """A layer takes its codes and 4 bytes per channel and token of each head; odd halves are refused."""
    assert packed_layer_bytes(3, 16, 64, 8) == 2 * 3 * 16 * 64 + 3 * (64 + 16) * 4
    assert packed_layer_bytes(3, 16, 64, 4) == 3 * 16 * 64 + 3 * (64 + 16) * 4
    assert packed_layer_bytes(1, 16, 7, 8) == 320  # 224 + 92
    with pytest.raises(ValueError, match="even"):
        packed_layer_bytes(1, 16, 7, 4)
    with pytest.raises(ValueError, match="bits"):
        packed_layer_bytes(1, 16, 8, 2)


@pytest.mark.parametrize("op", NATIVE)
def test_native_refuses_wrong_slots(op: Any) -> None:
    """The native kernel writes nothing where a slot lies outside of its cache."""
    kv, packed = torch.zeros(3, 1, 2, 1, 16, 8), torch.full((2, 1, packed_layer_bytes(1, 16, 8, 8)), 170).byte()
    for source, target in ((3, 0), (-1, 0), (0, 2), (0, -1)):
        slots = (torch.tensor([0, n], dtype=torch.int32) for n in (source, target))
        sources, targets = slots
        with pytest.raises(ValueError, match="slot"):
            op(kv, 0, sources, packed, targets, 8)
    assert (packed == 170).all()
