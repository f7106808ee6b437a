"""Summaries of keys: every implementation against plain comparisons, beside keys in the same memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kimicore.kernels.key_summary import native, reference

from .cases import implementations
from .tolerances import DTYPES

OPS = implementations(native.load(), reference=reference.key_summary)
SHAPES = [(3, 16, 64), (1, 32, 256), (8, 1, 80), (2, 64, 7), (2, 16, 33)]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def one_memory(slots: int, layers: int, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return kv and summary, a block's summary right behind its keys and values, and one spare element after it."""
    kv_heads, block_tokens, dim = shape
    keys, ends = layers * 2 * kv_heads * block_tokens * dim, layers * kv_heads * 2 * dim
    memory = torch.full((slots, keys + ends + 1), math.nan, dtype=dtype)
    kv = memory[:, :keys].unflatten(1, (layers, 2, kv_heads, block_tokens, dim))
    return kv, memory[:, keys:-1].unflatten(1, (layers, kv_heads, 2, dim))


def plain(keys: Tensor) -> tuple[float, float]:
    """Return the least and the largest of one channel's keys by comparisons of Python's numbers."""
    values = keys.tolist()
    if any(math.isnan(value) for value in values):
        return math.nan, math.nan
    return min(values), max(values)


def check(op: Any, shape: tuple[int, int, int], dtype: torch.dtype, chosen: list[int], wrong: int = 0) -> None:
    """Summarize chosen blocks at layer 1 and compare with :func:`plain`; nothing else may change."""
    random = torch.Generator().manual_seed(sum(shape))
    kv, summary = one_memory(6, 3, shape, dtype)
    kv[:, 1, 0] = torch.randn(6, *shape, generator=random).to(dtype)
    for _ in range(wrong):
        at = [int(torch.randint(size, (1,), generator=random)) for size in (6, *shape)]
        kv[at[0], 1, 0, at[1], at[2], at[3]] = math.nan
    before, keys = summary.clone(), kv.clone()
    assert op(kv, 1, torch.tensor(chosen, dtype=torch.int32), summary) is None
    expected = before.clone()
    for slot in chosen:
        for head in range(shape[0]):
            pairs = [plain(kv[slot, 1, 0, head, :, d]) for d in range(shape[2])]
            expected[slot, 1, head] = torch.tensor(pairs).T
    torch.testing.assert_close(summary, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(kv, keys, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_plain_comparisons(op: Any, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    """Chosen blocks get the exact extremes at the layer, behind their keys in one memory, and nothing else changes."""
    check(op, shape, dtype, [4, 0, 3])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_gives_nan_in_both(op: Any, dtype: torch.dtype) -> None:
    """A NaN in any key gives NaN as minimum and maximum of its channel, and of no other."""
    check(op, (2, 16, 40), dtype, [1, 2, 3], wrong=60)


@pytest.mark.parametrize("op", OPS)
@given(
    kv_heads=st.integers(1, 3),
    block_tokens=st.sampled_from((1, 2, 16, 32)),
    dim=st.integers(1, 70),
    chosen=st.lists(st.integers(0, 5), max_size=6),
)
def test_any_shape(op: Any, kv_heads: int, block_tokens: int, dim: int, chosen: list[int]) -> None:
    """Any sizes and any blocks, none and repeated ones too, get their extremes."""
    check(op, (kv_heads, block_tokens, dim), torch.float32, chosen)


@pytest.mark.parametrize("op", implementations(native.load()))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bits_as_the_reference(op: Any, dtype: torch.dtype) -> None:
    """Native and reference give equal bits, for zeros of both signs, NaN, infinities and least numbers as well."""
    random = torch.Generator().manual_seed(1)
    odd = torch.tensor(
        [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, torch.finfo(dtype).smallest_normal / 2, 1.0]
    )
    kv, found = one_memory(8, 2, (3, 16, 40), dtype)
    kv[:] = odd[torch.randint(len(odd), kv.shape, generator=random)].to(dtype)
    kv[4:] = odd[torch.tensor([0, 1, 6])][torch.randint(3, kv[4:].shape, generator=random)].to(dtype)
    expected = found.clone()
    op(kv, 1, torch.arange(8, dtype=torch.int32), found)
    reference.key_summary(kv, 1, torch.arange(8, dtype=torch.int32), expected)
    assert torch.equal(found[:, 1].contiguous().view(BITS[dtype]), expected[:, 1].contiguous().view(BITS[dtype]))


@pytest.mark.parametrize("op", implementations(native.load()))
def test_many_blocks_on_threads(op: Any) -> None:
    """Blocks shared among threads get what they get alone."""
    kv, found = one_memory(50, 1, (3, 16, 64), torch.bfloat16)
    kv[:] = torch.randn(kv.shape, generator=torch.Generator().manual_seed(1)).to(kv.dtype)
    slots, expected = torch.randperm(50, generator=torch.Generator().manual_seed(2)).int(), found.clone()
    for slot in slots:
        op(kv, 0, slot.view(1), expected)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    op(kv, 0, slots, found)
    torch.set_num_threads(before)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("slot", [-1, 4])
def test_native_refuses_wrong_slots(slot: int) -> None:
    """The native kernel touches nothing outside of the cache, and nothing at all where a slot is wrong."""
    op = native.load()[0]
    if op is None:
        pytest.skip("this machine cannot compile the native kernel")
    kv, summary = torch.zeros(4, 1, 2, 1, 16, 8), torch.full((4, 1, 1, 2, 8), 7.0)
    with pytest.raises(ValueError, match="slot"):
        op(kv, 0, torch.tensor([0, slot], dtype=torch.int32), summary)
    assert (summary == 7).all()
