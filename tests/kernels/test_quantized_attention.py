"""Attention over packed blocks: against float64, the same bits in every chunk and batch, and nothing else is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kimicore.kernels.kv_quantize import reference as packing
from kimicore.kernels.kv_quantize.layout import packed_layer_bytes
from kimicore.kernels.paged_attention import quantized, quantized_native

from .cases import Paged, dense_attention, guarded_outputs, implementations, paged
from .test_kv_quantize import unpacked
from .tolerances import DTYPES, assert_close

NATIVE = implementations(quantized_native.load())
OPS = implementations(
    quantized_native.load(),
    reference=quantized.quantized_attention,
    tiled=quantized.tiled_quantized_attention,
)
SHAPES = [((9, 3), 64, 16), ((4, 1), 256, 32), ((8, 8), 80, 16), ((6, 2), 6, 64), ((14, 2), 34, 16), ((2, 2), 128, 128)]
ROWS = [(20, 20), (1, 1), (7, 1), (300, 4), (530, 1), (70, 33), (64, 1), (65, 1), (128, 40)]


@frozen(eq=False)
class Packed:
    """A paged case whose whole blocks are packed as well; what is not packed holds NaN, slot 0 of both caches too."""

    case: Paged
    bits: int
    packed: Tensor
    slots: Tensor  # [B, N], of packed
    window: int | None

    def part(self, queries: Sequence[tuple[int, int, int]], unread: int = 0) -> tuple[Any, ...]:
        """The arguments for some (row, first, count) of the rows' queries; unread table entries are ``unread``."""
        case, block_tokens = self.case, self.case.kv.shape[4]
        size = (len(queries), case.table.shape[1])
        packed_table, tail_table = (torch.full(size, unread, dtype=torch.int32) for _ in "12")
        contexts, q = [], []
        for n, (row, first, count) in enumerate(queries):
            start, end = int(case.starts[row]), int(case.starts[row + 1])
            at = int(case.contexts[row]) - (end - start) + first
            own, last = at // block_tokens, (at + count - 1) // block_tokens
            seen = 0 if self.window is None else max(0, at - self.window + 1) // block_tokens
            packed_table[n, seen:last] = self.slots[row, seen:last]
            tail_table[n, own : last + 1] = case.table[row, own : last + 1]
            contexts.append(at + count)
            q.append(case.q[start + first : start + first + count])
        starts = torch.tensor([0, *(count for _, _, count in queries)]).cumsum(0).to(torch.int32)
        ends = torch.tensor(contexts, dtype=torch.int32)
        return torch.cat(q), self.packed, self.bits, case.kv, case.layer, packed_table, tail_table, starts, ends

    @property
    def call(self) -> tuple[Any, ...]:
        """The arguments for every query of every row."""
        counts = (self.case.starts[1:] - self.case.starts[:-1]).tolist()
        return self.part([(row, 0, count) for row, count in enumerate(counts)])

    def expected(self, **how: Any) -> Tensor:
        """The attention in float64, over what the packed bytes say and each query's own block as it is."""
        case, block_tokens = self.case, self.case.kv.shape[4]
        shape = (case.kv.shape[3], block_tokens, case.kv.shape[5])
        coarse = case.kv.clone()
        for row, context in enumerate(case.contexts.tolist()):
            for n in range(context // block_tokens):
                if self.slots[row, n]:
                    codes, minimum, step = unpacked(self.packed[self.slots[row, n], case.layer], shape, self.bits)
                    coarse[case.table[row, n], case.layer] = (minimum + step * codes).float().to(case.kv.dtype)
        out = []
        for row, context in enumerate(case.contexts.tolist()):
            count = int(case.starts[row + 1] - case.starts[row])
            first = 0
            while first < count:
                at = context - count + first
                own = at // block_tokens
                more = min((own + 1) * block_tokens - at, count - first)
                kv = coarse.clone()
                kv[case.table[row, own]] = case.kv[case.table[row, own]]
                q, _, layer, table, starts, contexts = case.only(row, first, more)
                out.append(dense_attention(Paged(q, kv, layer, table, starts, contexts), **how)[0])
                first += more
        return torch.cat(out)


def packed_case(
    rows: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    block_tokens: int,
    dtype: torch.dtype,
    bits: int,
    *,
    window: int | None = None,
) -> Packed:
    """Return a case as ``paged`` does, with every whole block packed in a random slot; slots lie far apart."""
    case = paged(rows, heads, dim, block_tokens, dtype, window=window)
    whole = [
        (row, n)
        for row, (context, _) in enumerate(rows)
        for n in range(context // block_tokens)
        if int(case.table[row, n])
    ]
    size = packed_layer_bytes(heads[1], block_tokens, dim, bits)
    buffer = torch.full((len(whole) + 2, 3 * size + 192), 255, dtype=torch.uint8)  # scales of 0xffff are NaN
    packed = buffer[:, : 3 * size].unflatten(1, (3, size))
    slots = torch.zeros(case.table.shape, dtype=torch.int32)
    order = (torch.randperm(len(whole), generator=torch.Generator().manual_seed(9)) + 1).to(torch.int32)
    for (row, n), slot in zip(whole, order, strict=True):
        slots[row, n] = slot
        packing.kv_quantize(case.kv, case.layer, case.table[row, n : n + 1], packed, slot.unsqueeze(0), bits)
    return Packed(case, bits, packed, slots, window)


def check(op: Any, case: Packed, **how: Any) -> None:
    with guarded_outputs():
        found = op(*case.call, **how)
    assert found.dtype == case.case.q.dtype
    assert_close("paged_attention", found, case.expected(**how), found.dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("heads", "dim", "block_tokens"), SHAPES)
def test_matches_float64(
    op: Any, dtype: torch.dtype, bits: int, heads: tuple[int, int], dim: int, block_tokens: int
) -> None:
    """Prompts, chunks over several blocks, contexts at block edges and single tokens get the float64 attention."""
    case = packed_case(ROWS, heads, dim, block_tokens, dtype, bits)
    check(op, case, scale=dim**-0.5)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("window", [1, 16, 37, 260, 4000])
def test_window_and_softcap(op: Any, dtype: torch.dtype, bits: int, window: int) -> None:
    """A window and a soft cap act together, and blocks that a window has left are never read."""
    case = packed_case([(600, 3), (40, 40), (1, 1), (257, 1), (90, 70)], (4, 2), 64, 16, dtype, bits, window=window)
    check(op, case, scale=0.125, window=window, softcap=20.0)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 7, 33, 65])
def test_odd_sizes(op: Any, dtype: torch.dtype, dim: int) -> None:
    """Heads of an odd number of channels are served with 8 bits."""
    case = packed_case([(70, 33), (300, 1)], (6, 2), dim, 16, dtype, 8)
    check(op, case, scale=dim**-0.5)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("window", [None, 40])
def test_unread_entries_may_be_anything(op: Any, window: int | None) -> None:
    """Entries of blocks that a window has left, of packed own blocks and of earlier tails need not be slots at all."""
    case = packed_case([(90, 50), (300, 1)], (4, 2), 16, 16, torch.float32, 8, window=window)
    queries = [(0, 0, 50), (0, 30, 9), (1, 0, 1)]
    how = {"scale": 0.25, "window": window}
    found = op(*case.part(queries, unread=-7), **how)
    assert not found.isnan().any()
    assert torch.equal(found, op(*case.part(queries), **how))


@pytest.mark.parametrize("op", OPS)
@given(
    rows=st.lists(st.tuples(st.integers(1, 330), st.integers(1, 40)), min_size=1, max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 7),
    half=st.integers(1, 35),
    block_tokens=st.sampled_from((16, 32, 64)),
    bits=st.sampled_from((8, 4)),
    window=st.none() | st.integers(1, 300),
)
def test_any_shape(
    op: Any,
    rows: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    half: int,
    block_tokens: int,
    bits: int,
    window: int | None,
) -> None:
    """Any mixture of rows, heads and sizes gets the float64 attention."""
    rows = [(max(context, count), count) for context, count in rows]
    heads = (kv_heads * group, kv_heads)
    case = packed_case(rows, heads, 2 * half, block_tokens, torch.float32, bits, window=window)
    check(op, case, scale=0.3, window=window)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "dim", "block_tokens", "bits", "window"),
    [((9, 3), 64, 16, 8, None), ((4, 1), 256, 32, 4, 100), ((3, 3), 40, 16, 4, 300), ((6, 2), 34, 128, 8, None)],
)
@pytest.mark.parametrize("op", NATIVE)
def test_same_bits_in_every_chunk_and_batch(
    op: Any,
    heads: tuple[int, int],
    dim: int,
    block_tokens: int,
    bits: int,
    window: int | None,
    dtype: torch.dtype,
    threads: int,
) -> None:
    """Native attention gives a query the same bits whole, in chunks, alone, in a batch and with any threads."""
    tokens, before = 600, torch.get_num_threads()
    case = packed_case([(tokens, tokens)], heads, dim, block_tokens, dtype, bits, window=None)
    case = Packed(case.case, bits, case.packed, case.slots, window)
    how = {"scale": dim**-0.5, "window": window}
    try:
        torch.set_num_threads(1)
        whole = op(*case.call, **how)
        torch.set_num_threads(threads)
        assert not whole.isnan().any()
        assert torch.equal(op(*case.call, **how), whole)
        for size in (1, 7, 64, 333):
            starts = (
                range(0, tokens, size) if size > 1 else (0, 5, 15, 16, 17, 127, 128, 255, 256, 257, 511, tokens - 1)
            )
            for start in starts:
                count = min(size, tokens - start)
                assert torch.equal(op(*case.part([(0, start, count)]), **how), whole[start : start + count]), start
        ends = [1, 16, 17, 256, 257, tokens]
        batch = op(*case.part([(0, end - 1, 1) for end in ends]), **how)
        assert torch.equal(batch, whole[torch.tensor(ends) - 1])
        mixed = op(*case.part([(0, 40, 90), (0, 599, 1), (0, 0, 33), (0, 250, 7)]), **how)
        assert torch.equal(mixed, torch.cat((whole[40:130], whole[599:], whole[:33], whole[250:257])))
    finally:
        torch.set_num_threads(before)


def test_tiled_gives_the_same_bits_in_every_chunk() -> None:
    """Without a compiler, too, float32 attention gives a query the same bits in any chunk and any batch."""
    case = packed_case([(300, 300), (90, 40)], (6, 2), 48, 16, torch.float32, 8)
    op = quantized.tiled_quantized_attention
    whole = op(*case.call, scale=0.2)
    for start, count in ((0, 1), (0, 7), (5, 40), (255, 1), (256, 1), (130, 150), (299, 1)):
        assert torch.equal(op(*case.part([(0, start, count)]), scale=0.2), whole[start : start + count]), (start, count)
    assert torch.equal(op(*case.part([(1, 10, 30)]), scale=0.2), whole[310:340])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("op", NATIVE)
def test_the_own_block_is_not_coarse(op: Any, bits: int) -> None:
    """A query sees its own block as it is even where the block is whole, and the one before it as it is packed."""
    case = packed_case([(32, 32)], (2, 1), 32, 16, torch.float32, bits)
    found = op(*case.call, scale=0.2)
    exact = dense_attention(case.case, scale=0.2)[0]
    assert_close("paged_attention", found[:16], exact[:16], torch.float32)
    assert (found[16:].double() - exact[16:]).abs().amax(dim=(1, 2)).min() > 1e-5


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("op", OPS)
def test_padding_gives_zeros(op: Any, bits: int) -> None:
    """Rows without queries, rows without context and tokens behind the last row give zeros and read nothing."""
    case = packed_case([(40, 2), (9, 1)], (2, 1), 16, 16, torch.float32, bits)
    q, packed, _, kv, layer, packed_table, tail_table, _, _ = case.call
    wanted = case.expected(scale=0.25)
    q = torch.cat((q[:2], q.new_full((3, 2, 16), torch.nan), q[2:], q.new_full((4, 2, 16), torch.nan)))
    nothing = torch.zeros_like(packed_table[:1])
    tables = [torch.cat((nothing, t[:1], nothing, t[1:])) for t in (packed_table, tail_table)]
    starts, contexts = (torch.tensor(n, dtype=torch.int32) for n in ([0, 0, 2, 5, 6], [5, 40, 0, 9]))
    with guarded_outputs():
        found = op(q, packed, bits, kv, layer, *tables, starts, contexts, scale=0.25)
    assert_close("paged_attention", torch.cat((found[:2], found[5:6])), wanted, torch.float32)
    assert not found[2:5].any() and not found[6:].any()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_with_its_row(op: Any, dtype: torch.dtype, bits: int) -> None:
    """A row with a block whose numbers were not finite gives NaN, and no other row does."""
    case = packed_case([(40, 1), (300, 1), (50, 9)], (4, 2), 32, 16, dtype, bits)
    slot = case.case.table[1, 2:3]
    case.case.kv[int(slot), case.case.layer, 0, 0, 3, 5] = torch.inf
    packing.kv_quantize(case.case.kv, case.case.layer, slot, case.packed, case.slots[1, 2:3], bits)
    found = op(*case.call, scale=0.2)
    assert found[1].isnan().any()
    assert not found[0].isnan().any() and not found[2:].isnan().any()


@pytest.mark.parametrize("op", NATIVE)
def test_unusual_shapes_are_served_by_the_reference(op: Any) -> None:
    """Blocks and strides that the native kernel does not take get the reference's result."""
    case = packed_case([(50, 9), (33, 1)], (4, 2), 16, 8, torch.float32, 8)
    assert torch.equal(op(*case.call, scale=0.2), quantized.quantized_attention(*case.call, scale=0.2))
    case = packed_case([(50, 9), (33, 1)], (4, 2), 16, 16, torch.float32, 8)
    q, packed, bits, kv, layer, packed_table, tail_table, starts, contexts = case.call
    strided = packed_table.repeat_interleave(2, dim=1)[:, ::2]
    found = op(q, packed, bits, kv, layer, strided, tail_table, starts, contexts, scale=0.2)
    assert_close("paged_attention", found, case.expected(scale=0.2), torch.float32)


@pytest.mark.parametrize("op", NATIVE)
def test_native_refuses_wrong_tables(op: Any) -> None:
    """The native kernel reads nothing outside of the caches: wrong tables, contexts and sizes are refused."""
    case = packed_case([(40, 20), (70, 1)], (2, 1), 16, 16, torch.float32, 8)
    q, packed, bits, kv, layer, packed_table, tail_table, starts, contexts = case.call
    for slot in (-1, packed.shape[0]):
        table = packed_table.clone()
        table[1, 3] = slot
        with pytest.raises(ValueError, match="table"):
            op(q, packed, bits, kv, layer, table, tail_table, starts, contexts, scale=1.0)
    for slot in (-1, kv.shape[0]):
        table = tail_table.clone()
        table[0, 1] = slot
        with pytest.raises(ValueError, match="table"):
            op(q, packed, bits, kv, layer, packed_table, table, starts, contexts, scale=1.0)
    short = torch.tensor([19, 70], dtype=torch.int32)
    with pytest.raises(ValueError, match="context"):
        op(q, packed, bits, kv, layer, packed_table, tail_table, starts, short, scale=1.0)
    with pytest.raises(ValueError, match="bytes"):
        op(q, packed[:, :, 64:], bits, kv, layer, packed_table, tail_table, starts, contexts, scale=1.0)
