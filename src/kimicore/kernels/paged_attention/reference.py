"""Attention over a paged key-value cache, by torch: gather each row's blocks, then softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_head_tables", "check_single_queries", "paged_attention"]


def check_head_tables(block_table: Tensor, kv_heads: int, window: int | None, importance: Tensor | None) -> None:
    """Raise ValueError where a table per head [B, KH, N] is used with what needs the place of every key."""
    if block_table.dim() != 3:
        return
    if block_table.shape[1] != kv_heads:
        raise ValueError(f"paged_attention: block_table has {block_table.shape[1]} heads, the cache {kv_heads}")
    if window is not None or importance is not None:
        raise ValueError("paged_attention: tables per head go with neither a window nor importance")


def check_single_queries(block_table: Tensor, row_starts: Tensor, contexts: Tensor) -> None:
    """Raise ValueError where a row with tables per head has more than one query."""
    if block_table.dim() == 3 and bool(((row_starts.diff() > 1) & (contexts > 0)).any()):
        raise ValueError("paged_attention: a row whose heads have tables of their own has more than one query")


def _gathered(kv: Tensor, layer: int, slots: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return a row's keys and values [KH, context, D] in float32; slots [N], or [KH, N]."""
    if slots.dim() == 2:
        heads = torch.arange(kv.shape[3]).unsqueeze(1)
        blocks = kv[slots.long(), layer, :, heads].permute(1, 2, 0, 3, 4).float()  # [N, 2, KH, bt, D]
    else:
        blocks = kv[slots.long(), layer].float()
    flat = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
    return flat[0], flat[1]


def _hidden(context: int, queries: int, low: int, window: int | None) -> Tensor:
    """Return which keys from ``low`` on the last queries of a context do not see [queries, context - low]."""
    query_at = torch.arange(context - queries, context).unsqueeze(1)
    key_at = torch.arange(low, context)
    hidden = key_at > query_at
    return hidden if window is None else hidden | (key_at <= query_at - window)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    layer: int,
    block_table: Tensor,
    row_starts: Tensor,
    contexts: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    importance: Tensor | None = None,
) -> Tensor:
    """Return the attention output [T, H, D] of every row's queries over the row's cached keys and values.

    q [T, H, D]; kv [S, L, 2, KH, bt, D]; block_table [B, N] int32; row_starts [B+1] int32: row b's queries
    are ``q[row_starts[b]:row_starts[b+1]]``; contexts [B] int32: cached tokens of the row, its last query
    stands at ``contexts[b] - 1``. A query at p sees keys at positions in ``(p - window, p]``.

    scale multiplies the products; softcap c turns a score s into ``c * tanh(s / c)``; bias [B, N*bt] float32 is
    added to the scores by key position; importance [B, N] float32 gains the softmax mass of the row's last
    query per block, summed over heads. Rows without queries or context, tokens outside of every row
    and queries that a bias lets see nothing give zeros.

    block_table may be [B, KH, N]: each key-value head of a row reads blocks of its own, whole ones and in the end the
    query's own one. Then contexts counts the tokens that a table covers, every row has one query at most, and there is
    no window and no importance (ValueError).
    """
    out = torch.zeros(q.shape, dtype=q.dtype)
    heads, kv_heads, block_tokens = q.shape[1], kv.shape[3], kv.shape[4]
    check_head_tables(block_table, kv_heads, window, importance)
    check_single_queries(block_table, row_starts, contexts)
    for row, context in enumerate(contexts.tolist()):
        start, end = int(row_starts[row]), int(row_starts[row + 1])
        if end <= start or context <= 0:
            continue
        first = 0  # blocks that every query of the row has left behind may be recycled: they are not read
        if window is not None:
            first = max(0, context - (end - start) - window + 1) // block_tokens
        slots = block_table[row, ..., first : -(-context // block_tokens)]
        low = first * block_tokens
        keys, values = _gathered(kv, layer, slots, context - low)
        queries = q[start:end].float().transpose(0, 1).reshape(kv_heads, -1, q.shape[2])  # [KH, G*n, D]
        scores = (queries @ keys.transpose(1, 2) * scale).view(heads, end - start, -1)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[row, low:context]
        scores = scores.masked_fill(_hidden(context, end - start, low, window), -torch.inf)
        weights = scores.softmax(dim=-1).masked_fill((scores == -torch.inf).all(dim=-1, keepdim=True), 0.0)
        mixed = weights.view(kv_heads, -1, context - low) @ values  # [KH, G*n, D]
        out[start:end] = mixed.view(heads, end - start, -1).transpose(0, 1).to(q.dtype)
        if importance is not None:
            mass = weights[:, -1].sum(dim=0)
            blocks = torch.nn.functional.pad(mass, (0, -len(mass) % block_tokens)).view(-1, block_tokens)
            importance[row, first : first + len(blocks)] += blocks.sum(dim=1)
    return out
