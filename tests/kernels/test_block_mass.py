"""Attention per block: every implementation against float64, on caches whose unused entries are NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kimicore.kernels.block_mass import native, reference
from kimicore.kernels.paged_attention.reference import paged_attention

from .cases import Paged, guarded_outputs, implementations, paged
from .tolerances import DTYPES, assert_close

OPS = implementations(native.load(), reference=reference.block_mass)
SHAPES = [((9, 3), 64, 16), ((4, 1), 256, 32), ((8, 8), 80, 16), ((6, 2), 7, 64), ((14, 2), 33, 16), ((2, 2), 128, 128)]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def dense_mass(case: Paged, *, scale: float, window: int | None = None, softcap: float | None = None) -> Tensor:
    """Return the shares [B, N] in float64: one softmax over the gathered context for each query and head."""
    block_tokens, group = case.kv.shape[4], case.q.shape[1] // case.kv.shape[3]
    out = torch.zeros(case.table.shape, dtype=torch.float64)
    for row in range(len(case.contexts)):
        start, end, context = int(case.starts[row]), int(case.starts[row + 1]), int(case.contexts[row])
        for token in range(start, end if context else start):
            position = context - (end - token)
            seen = torch.arange(0 if window is None else max(0, position - window + 1), position + 1)
            slots, offsets = case.table[row, seen // block_tokens].long(), seen % block_tokens
            for head in range(case.q.shape[1]):
                keys = case.kv[slots, case.layer, 0, head // group, offsets].double()
                score = keys @ case.q[token, head].double() * scale
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                share = torch.exp(score - score.max())
                out[row].index_add_(0, seen // block_tokens, share / share.sum() / (end - start) / case.q.shape[1])
    return out


def check(op: Any, case: Paged, dtype: torch.dtype, **how: Any) -> None:
    with guarded_outputs():
        found = op(*case.call, **how)
    assert found.dtype == torch.float32 and found.shape == case.table.shape
    assert_close("block_mass", found, dense_mass(case, **how), dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim", "block_tokens"), SHAPES)
def test_matches_float64(op: Any, dtype: torch.dtype, heads: tuple[int, int], dim: int, block_tokens: int) -> None:
    """Short prompts, the ends of chunks and single tokens in one step get the float64 shares, even and odd sizes."""
    case = paged([(5, 5), (1, 1), (7, 1), (300, 4), (530, 1), (70, 16)], heads, dim, block_tokens, dtype)
    check(op, case, dtype, scale=dim**-0.5)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [1, 16, 37, 260, 4000])
def test_window_and_softcap(op: Any, dtype: torch.dtype, window: int) -> None:
    """A window and a soft cap act together, and blocks that a window has left are never read."""
    case = paged([(600, 3), (40, 16), (1, 1), (257, 1)], (4, 2), 64, 16, dtype, window=window)
    check(op, case, dtype, scale=0.5, window=window, softcap=20.0)


@pytest.mark.parametrize("op", OPS)
@given(
    rows=st.lists(st.tuples(st.integers(1, 330), st.integers(1, 16)), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 7),
    dim=st.integers(1, 70),
    block_tokens=st.sampled_from((16, 32, 64)),
    window=st.none() | st.integers(1, 300),
)
def test_any_shape(
    op: Any, rows: list[tuple[int, int]], kv_heads: int, group: int, dim: int, block_tokens: int, window: int | None
) -> None:
    """Any mixture of rows, heads and sizes gets the float64 shares."""
    rows = [(max(context, count), count) for context, count in rows]
    case = paged(rows, (kv_heads * group, kv_heads), dim, block_tokens, torch.float32, window=window)
    check(op, case, torch.float32, scale=0.3, window=window)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_adds_up_to_one(op: Any, window: int | None) -> None:
    """The shares of a row's blocks add up to 1 for any number of queries, and its unused entries are 0."""
    case = paged([(500, 1), (330, 16), (16, 3), (1, 1)], (6, 2), 64, 16, torch.float32, window=window)
    found = op(*case.call, scale=0.4, window=window)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(4), rtol=1e-5, atol=1e-5)
    used = torch.tensor([-(-int(one) // 16) for one in case.contexts])
    assert not found[torch.arange(found.shape[1]) >= used.unsqueeze(1)].any()


@pytest.mark.parametrize("op", OPS)
def test_agrees_with_the_attention(op: Any) -> None:
    """For single queries the shares are the weights with which the attention itself mixes the values."""
    case = paged([(90, 1), (300, 1), (17, 1)], (4, 2), 32, 16, torch.float32)
    mass = torch.zeros(case.table.shape)
    paged_attention(*case.call, scale=0.3, softcap=9.0, importance=mass)
    assert_close("block_mass", op(*case.call, scale=0.3, softcap=9.0), mass / 4, torch.float32)


@pytest.mark.parametrize("op", OPS)
def test_strong_scores(op: Any) -> None:
    """Scores far beyond what an exponential holds still give shares."""
    case = paged([(300, 2), (40, 1)], (2, 1), 32, 16, torch.float32)
    check(op, case, torch.float32, scale=40.0)


@pytest.mark.parametrize("op", OPS)
def test_padding_gives_zeros(op: Any) -> None:
    """Rows without queries and rows without context give zeros and read nothing."""
    case = paged([(5, 0), (30, 2), (0, 3), (9, 1)], (2, 1), 16, 16, torch.float32)
    with guarded_outputs():
        found = op(*case.call, scale=0.25)
    assert not found[0].any() and not found[2].any()
    assert_close("block_mass", found[1::2], dense_mass(case, scale=0.25)[1::2], torch.float32)


@pytest.mark.parametrize("op", OPS)
def test_nothing_to_measure(op: Any) -> None:
    """No rows give an answer without rows."""
    case = paged([(9, 1)], (2, 1), 16, 16, torch.float32)
    starts, none = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    assert op(case.q[:0], case.kv, 1, case.table[:0], starts, none, scale=1.0).shape == (0, case.table.shape[1])


@pytest.mark.parametrize("op", OPS)
def test_strided_queries(op: Any) -> None:
    """Queries may be a part of a wider product, as they lie in it."""
    case = paged([(40, 12), (90, 1)], (6, 2), 24, 16, torch.float32)
    wide = torch.full((13, 10, 24), torch.nan)
    wide[:, 2:8] = case.q
    assert torch.equal(op(wide[:, 2:8], *case.call[1:], scale=0.2), op(*case.call, scale=0.2))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("whole", [False, True])
def test_nan_stays_with_its_row(op: Any, whole: bool) -> None:
    """A row whose keys hold a NaN gives NaN, and no other row does."""
    case = paged([(40, 1), (300, 1), (50, 9)], (4, 2), 32, 16, torch.float32)
    block = case.kv[int(case.table[1, 2]), case.layer, 0, 0]
    block[... if whole else (3, 5)] = torch.nan
    found = op(*case.call, scale=0.2)
    assert found[1, :19].isnan().all()
    assert not found[0].isnan().any() and not found[2].isnan().any()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", implementations(native.load()))
def test_a_row_is_the_same_in_every_batch(op: Any, dtype: torch.dtype) -> None:
    """A row gets the same bits alone, beside others and with any number of threads."""
    case = paged([(3000, 16), (700, 1), (33, 2), (1500, 1)], (9, 3), 64, 16, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = op(*case.call, scale=0.125)
    torch.set_num_threads(before)
    assert torch.equal(op(*case.call, scale=0.125), whole)
    for row, count in enumerate((16, 1, 2, 1)):
        assert torch.equal(op(*case.only(row, 0, count), scale=0.125)[0], whole[row]), row


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
