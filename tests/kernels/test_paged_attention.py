"""Paged attention: every implementation against float64, on caches whose unused entries are NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimicore.kernels.paged_attention import native, reference, tiled

from .cases import dense_attention, guarded_outputs, implementations, paged
from .tolerances import DTYPES, assert_close

OPS = implementations(native.load(), reference=reference.paged_attention, tiled=tiled.paged_attention)
SHAPES = [((9, 3), 64, 16), ((4, 1), 256, 32), ((8, 8), 80, 16), ((6, 2), 7, 64), ((14, 2), 33, 16), ((2, 2), 128, 128)]


def check(op: Any, case: Any, dtype: torch.dtype, **how: Any) -> None:
    importance = torch.ones(case.table.shape)
    expected, mass = dense_attention(case, **how)
    with guarded_outputs():
        found = op(*case.call, importance=importance, **how)
    assert found.dtype == dtype
    assert_close("paged_attention", found, expected, dtype)
    assert_close("importance", importance - 1, mass, dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim", "block_tokens"), SHAPES)
def test_matches_float64(op: Any, dtype: torch.dtype, heads: tuple[int, int], dim: int, block_tokens: int) -> None:
    """Prompts, chunks of prompts and single tokens in one step get the float64 attention, for even and odd sizes."""
    case = paged([(20, 20), (1, 1), (7, 1), (300, 4), (530, 1), (70, 33)], heads, dim, block_tokens, dtype)
    check(op, case, dtype, scale=dim**-0.5)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 16, 37, 260, 4000])
def test_window_softcap_and_bias(op: Any, dtype: torch.dtype, window: int) -> None:
    """A window, a soft cap and a bias per key act together, and blocks that a window has left are never read."""
    case = paged([(600, 3), (40, 40), (1, 1), (257, 1)], (4, 2), 64, 16, dtype, window=window)
    bias = torch.randn(4, case.table.shape[1] * 16, generator=torch.Generator().manual_seed(1))
    check(op, case, dtype, scale=0.125, window=window, softcap=20.0, bias=bias)


@pytest.mark.parametrize("op", OPS)
@given(
    rows=st.lists(st.tuples(st.integers(1, 330), st.integers(1, 40)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 7),
    dim=st.integers(1, 70),
    block_tokens=st.sampled_from((16, 32, 64)),
    window=st.none() | st.integers(1, 300),
)
def test_any_shape(
    op: Any, rows: list[tuple[int, int]], kv_heads: int, group: int, dim: int, block_tokens: int, window: int | None
) -> None:
    """Any mixture of rows, heads and sizes gets the float64 attention."""
    rows = [(max(context, count), count) for context, count in rows]
    case = paged(rows, (kv_heads * group, kv_heads), dim, block_tokens, torch.float32, window=window)
    check(op, case, torch.float32, scale=0.3, window=window)


@pytest.mark.parametrize("op", OPS)
def test_padding_gives_zeros(op: Any) -> None:
    """Rows without queries, rows without context and tokens behind the last row give zeros and read nothing."""
    case = paged([(5, 0), (30, 2), (0, 3), (9, 1)], (2, 1), 16, 16, torch.float32)
    q = torch.cat((case.q, case.q.new_full((4, 2, 16), torch.nan)))
    with guarded_outputs():
        found = op(q, *case.call[1:], scale=0.25)
    assert_close("paged_attention", found[:2], dense_attention(case, scale=0.25)[0][:2], torch.float32)
    assert not found[2:5].any() and not found[6:].any()


@pytest.mark.parametrize("op", OPS)
def test_strided_queries(op: Any) -> None:
    """Queries may be a part of a wider product, as they lie in it."""
    case = paged([(40, 40), (90, 1)], (6, 2), 24, 16, torch.float32)
    wide = torch.full((41, 10, 24), torch.nan)
    wide[:, 2:8] = case.q
    assert torch.equal(op(wide[:, 2:8], *case.call[1:], scale=0.2), op(*case.call, scale=0.2))


@pytest.mark.parametrize("op", OPS)
def test_hidden_keys(op: Any) -> None:
    """A bias of minus infinity hides a key, even every key of a part; a query that sees none gets zeros."""
    case = paged([(600, 1), (30, 1)], (2, 1), 16, 16, torch.float32)
    bias = torch.zeros(2, case.table.shape[1] * 16)
    bias[0, :256] = bias[0, 400:] = bias[1] = -torch.inf
    expected, _ = dense_attention(case, scale=0.25, bias=bias)
    importance = torch.zeros(case.table.shape)
    found = op(*case.call, scale=0.25, bias=bias, importance=importance)
    assert_close("paged_attention", found[:1], expected[:1], torch.float32)
    assert not found[1].any()
    assert importance[0].sum() == pytest.approx(2.0, abs=1e-5) and not importance[0, :16].any()
    assert not importance[1].any()


@pytest.mark.parametrize("op", OPS)
def test_nan_stays_with_its_row(op: Any) -> None:
    """A row whose cache holds a NaN gives NaN, and no other row does."""
    case = paged([(40, 1), (300, 1), (50, 9)], (4, 2), 32, 16, torch.float32)
    case.kv[int(case.table[1, 2]), case.layer, 0, 0, 3, 5] = torch.nan
    found = op(*case.call, scale=0.2)
    assert found[1].isnan().any()
    assert not found[0].isnan().any() and not found[2:].isnan().any()


def test_native_refuses_wrong_tables() -> None:
    """The native kernel reads nothing outside of the cache: wrong tables, contexts and row starts are refused."""
    op = native.load()[0]
    if op is None:
        pytest.skip("this machine cannot compile the native kernel")
    case = paged([(40, 2), (70, 1)], (2, 1), 16, 16, torch.float32)
    for slot in (-1, case.kv.shape[0]):
        table = case.table.clone()
        table[1, 4] = slot
        with pytest.raises(ValueError, match="block_table"):
            op(case.q, case.kv, 1, table, case.starts, case.contexts, scale=1.0)
    for context in (1, 16 * case.table.shape[1] + 1):
        contexts = torch.tensor([context, 70], dtype=torch.int32)
        with pytest.raises(ValueError, match="context"):
            op(case.q, case.kv, 1, case.table, case.starts, contexts, scale=1.0)
    for starts in ([0, 4, 3], [0, 2, 900], [-1, 2, 3]):
        with pytest.raises(ValueError, match="row_starts"):
            op(case.q, case.kv, 1, case.table, torch.tensor(starts, dtype=torch.int32), case.contexts, scale=1.0)
