"""Block tables per key-value head: each head of a row reads blocks of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kimicore.kernels.paged_attention import native, reference, tiled

from .cases import Paged, dense_attention, guarded_outputs, implementations, paged
from .tolerances import DTYPES, assert_close

NATIVE = implementations(native.load())
OPS = implementations(native.load(), reference=reference.paged_attention, tiled=tiled.paged_attention)
SHAPES = [((9, 3), 64, 16), ((4, 1), 256, 32), ((8, 8), 80, 16), ((6, 2), 7, 64), ((14, 2), 33, 16)]


def chosen(case: Paged, keep: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return tables [B, KH, N] of ``keep`` random blocks per head, the own one last, and the tokens they cover."""
    random = torch.Generator().manual_seed(seed)
    rows, kv_heads, block_tokens = len(case.contexts), case.kv.shape[3], case.kv.shape[4]
    table = torch.zeros(rows, kv_heads, keep + 1, dtype=torch.int32)
    contexts = case.contexts.clone()
    for row, context in enumerate(case.contexts.tolist()):
        whole = max(0, context - 1) // block_tokens
        kept = min(keep - 1, whole)
        for head in range(kv_heads):
            some = torch.randperm(whole, generator=random)[:kept].sort().values
            table[row, head, :kept] = case.table[row, some]
            table[row, head, kept] = case.table[row, whole]
        contexts[row] = context - (whole - kept) * block_tokens
    return table, contexts


def expected(case: Paged, table: Tensor, contexts: Tensor, scale: float) -> Tensor:
    """The attention in float64, one key-value head after another."""
    group = case.q.shape[1] // case.kv.shape[3]
    heads = [
        Paged(
            case.q[:, h * group : (h + 1) * group], case.kv[:, :, :, h : h + 1], case.layer, table[:, h], case.starts,
            contexts,
        )
        for h in range(case.kv.shape[3])
    ]  # fmt: skip
    return torch.cat([dense_attention(head, scale=scale)[0] for head in heads], dim=1)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim", "block_tokens"), SHAPES)
def test_matches_float64(op: Any, dtype: torch.dtype, heads: tuple[int, int], dim: int, block_tokens: int) -> None:
    """Each head of a row attends over the blocks of its own table, the last one in part."""
    case = paged([(20, 1), (1, 1), (64, 1), (65, 1), (530, 1), (700, 1)], heads, dim, block_tokens, dtype)
    table, contexts = chosen(case, 6)
    with guarded_outputs():
        found = op(case.q, case.kv, case.layer, table, case.starts, contexts, scale=dim**-0.5)
    assert found.dtype == dtype
    assert_close("paged_attention", found, expected(case, table, contexts, dim**-0.5), dtype)


@pytest.mark.parametrize("op", OPS)
@given(
    contexts=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    keep=st.integers(1, 20),
    seed=st.integers(0, 99),
)
def test_any_choice(op: Any, contexts: list[int], kv_heads: int, group: int, keep: int, seed: int) -> None:
    """Any number of blocks per head gets the float64 attention over them."""
    case = paged([(n, 1) for n in contexts], (kv_heads * group, kv_heads), 20, 16, torch.float32)
    table, covered = chosen(case, keep, seed)
    found = op(case.q, case.kv, case.layer, table, case.starts, covered, scale=0.2)
    assert_close("paged_attention", found, expected(case, table, covered, 0.2), torch.float32)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim", "block_tokens"), SHAPES)
def test_all_blocks_in_order_change_no_bit(
    op: Any, dtype: torch.dtype, heads: tuple[int, int], dim: int, block_tokens: int
) -> None:
    """Tables that list every block in order give the bits of one table for all heads, shared in memory or not."""
    case = paged([(20, 1), (1, 1), (300, 1), (256, 1), (900, 1)], heads, dim, block_tokens, dtype)
    plain = op(*case.call, scale=0.2)
    shared = case.table.unsqueeze(1).expand(-1, heads[1], -1)
    for table in (shared, shared.contiguous()):
        assert torch.equal(op(case.q, case.kv, case.layer, table, case.starts, case.contexts, scale=0.2), plain)


@pytest.mark.parametrize("op", NATIVE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_in_every_batch(op: Any, dtype: torch.dtype) -> None:
    """A row with tables per head gets the same bits alone and in a batch, with any threads."""
    case = paged([(20, 1), (600, 1), (2000, 1), (333, 1)], (9, 3), 64, 16, dtype)
    table, contexts = chosen(case, 40)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = op(case.q, case.kv, case.layer, table, case.starts, contexts, scale=0.125)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            starts = torch.tensor([0, 1], dtype=torch.int32)
            for row in range(4):
                one = slice(row, row + 1)
                alone = op(case.q[one], case.kv, case.layer, table[one], starts, contexts[one], scale=0.125)
                assert torch.equal(alone, whole[one])
            assert torch.equal(op(case.q, case.kv, case.layer, table, case.starts, contexts, scale=0.125), whole)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("op", OPS)
def test_padding_gives_zeros(op: Any) -> None:
    """Rows without a query or without context give zeros, and read nothing."""
    case = paged([(40, 1), (30, 0), (0, 1), (9, 1)], (2, 2), 16, 16, torch.float32)
    table, contexts = chosen(case, 3)
    found = op(case.q, case.kv, case.layer, table, case.starts, contexts, scale=0.25)
    assert not found[1].any() and not found.isnan().any() and found[0].any() and found[2].any()


@pytest.mark.parametrize("op", OPS)
def test_refusals(op: Any) -> None:
    """Several queries, a window, importance and tables of another number of heads are refused."""
    case = paged([(40, 1), (50, 2)], (4, 2), 16, 16, torch.float32)
    table, contexts = chosen(case, 4)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match="one query"):
        op(case.q, case.kv, case.layer, table, case.starts, contexts, scale=0.2)
    with pytest.raises(ValueError, match="window"):
        op(case.q[:2], case.kv, case.layer, table, starts, contexts, scale=0.2, window=5)
    with pytest.raises(ValueError, match="importance"):
        op(case.q[:2], case.kv, case.layer, table, starts, contexts, scale=0.2, importance=torch.zeros(2, 5))
    with pytest.raises(ValueError, match="heads"):
        op(case.q[:2], case.kv, case.layer, table[:, :1], starts, contexts, scale=0.2)


@pytest.mark.parametrize("op", NATIVE)
def test_native_refuses_wrong_tables(op: Any) -> None:
    """A slot outside of the cache in any head's table is refused."""
    case = paged([(40, 1), (70, 1)], (4, 2), 16, 16, torch.float32)
    for slot in (-1, case.kv.shape[0]):
        table, contexts = chosen(case, 4)
        table[1, 1, 2] = slot
        with pytest.raises(ValueError, match="block_table"):
            op(case.q, case.kv, case.layer, table, case.starts, contexts, scale=0.2)
