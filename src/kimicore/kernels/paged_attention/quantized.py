"""Attention over a cache whose whole blocks are packed in 8 or 4 bits, by torch: unpack, then attend."""

from __future__ import annotations

import torch
from torch import Tensor

from kimicore.kernels.kv_quantize.reference import dequantized
from kimicore.kernels.ops import PagedAttentionOp
from kimicore.kernels.paged_attention import reference, tiled

__all__ = ["quantized_attention", "tiled_quantized_attention"]


def _one_block(
    attention: PagedAttentionOp,
    q: Tensor,
    position: int,
    packed: Tensor,
    bits: int,
    kv: Tensor,
    layer: int,
    packed_slots: Tensor,
    tail_slots: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Return the output of queries q [n, H, D] that stand in one block, the first at ``position``; slots [N]."""
    kv_heads, block_tokens, dim = kv.shape[3:]
    own = position // block_tokens
    first = 0 if window is None else max(0, position - window + 1) // block_tokens
    earlier = dequantized(packed, layer, packed_slots[first:own], (kv_heads, block_tokens, dim), bits, kv.dtype)
    blocks = torch.cat((earlier, kv[tail_slots[own].long(), layer].unsqueeze(0)))
    # Blocks keep their numbers, since an attention in parts cuts keys by position; those before `first` are not read.
    table = (torch.arange(own + 1, dtype=torch.int32) - first).clamp(min=0).unsqueeze(0)
    starts = torch.tensor([0, len(q)], dtype=torch.int32)
    contexts = torch.tensor([position + len(q)], dtype=torch.int32)
    return attention(
        q, blocks.unsqueeze(1), 0, table, starts, contexts, scale=scale, window=window, softcap=softcap
    )  # fmt: skip


def _by_blocks(
    attention: PagedAttentionOp,
    q: Tensor,
    packed: Tensor,
    bits: int,
    kv: Tensor,
    layer: int,
    packed_table: Tensor,
    tail_table: Tensor,
    row_starts: Tensor,
    contexts: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype)
    block_tokens = kv.shape[4]
    for row, context in enumerate(contexts.tolist()):
        at, end = int(row_starts[row]), int(row_starts[row + 1])
        if context <= 0:
            continue
        while at < end:
            position = context - (end - at)
            stop = min(end, at + block_tokens - position % block_tokens)
            out[at:stop] = _one_block(
                attention, q[at:stop], position, packed, bits, kv, layer, packed_table[row], tail_table[row],
                scale, window, softcap,
            )  # fmt: skip
            at = stop
    return out


def quantized_attention(
    q: Tensor,
    packed: Tensor,
    bits: int,
    kv: Tensor,
    layer: int,
    packed_table: Tensor,
    tail_table: Tensor,
    row_starts: Tensor,
    contexts: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the attention output [T, H, D] of every row's queries over packed blocks, and their own block as it is.

    A query at position p sees the keys and values of blocks before block ``p // bt`` as they are packed (``bits`` 8
    or 4; unpacked in float32 and rounded to the type of kv), and those of its own block, up to p, from ``kv``: so what
    it gets does not depend on how a prompt is cut into chunks.

    q [T, H, D]; packed [P, L, layer_bytes] uint8, laid out as ``kv_quantize.layout`` says; kv [S, L, 2, KH, bt, D];
    packed_table [B, N] int32: slots of packed; tail_table [B, N] int32: slots of kv, of every block from the first
    query's own to the last one's. Entries of packed_table from the last query's own block on and of blocks that every
    query's window has left, and entries of tail_table before the first query's own block, are not read. The other
    arguments are those of ``paged_attention``, as are zeros for rows without queries or context and tokens outside of
    every row.
    """
    return _by_blocks(
        reference.paged_attention, q, packed, bits, kv, layer, packed_table, tail_table, row_starts, contexts,
        scale, window, softcap,
    )  # fmt: skip


def tiled_quantized_attention(
    q: Tensor,
    packed: Tensor,
    bits: int,
    kv: Tensor,
    layer: int,
    packed_table: Tensor,
    tail_table: Tensor,
    row_starts: Tensor,
    contexts: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """See :func:`quantized_attention`; float32 gets the same bits in every chunk, for blocks of 16 tokens or more."""
    return _by_blocks(
        tiled.paged_attention, q, packed, bits, kv, layer, packed_table, tail_table, row_starts, contexts,
        scale, window, softcap,
    )  # fmt: skip
