"""Attention over a paged key-value cache, by torch: gather each row's blocks, then softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["paged_attention"]


def _gathered(kv: Tensor, layer: int, slots: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return a row's keys and values [KH, context, D] in float32."""
    blocks = kv[slots.long(), layer].float()  # [N, 2, KH, bt, D]
    flat = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :context]
    return flat[0], flat[1]


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
    """
    out = torch.zeros(q.shape, dtype=q.dtype)
    heads, kv_heads, block_tokens = q.shape[1], kv.shape[3], kv.shape[4]
    for row, context in enumerate(contexts.tolist()):
        start, end = int(row_starts[row]), int(row_starts[row + 1])
        if end <= start or context <= 0:
            continue
        first = 0  # blocks that every query of the row has left behind may be recycled: they are not read
        if window is not None:
            first = max(0, context - (end - start) - window + 1) // block_tokens
        slots = block_table[row, first : -(-context // block_tokens)]
        low = first * block_tokens
        keys, values = _gathered(kv, layer, slots, context - low)
        queries = q[start:end].float().transpose(0, 1).reshape(kv_heads, -1, q.shape[2])  # [KH, G*n, D]
        scores = (queries @ keys.transpose(1, 2) * scale).view(heads, end - start, -1)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[row, low:context]
        query_at = torch.arange(context - (end - start), context).unsqueeze(1)
        key_at = torch.arange(low, context)
        hidden = key_at > query_at
        if window is not None:
            hidden |= key_at <= query_at - window
        scores = scores.masked_fill(hidden, -torch.inf)
        weights = scores.softmax(dim=-1).masked_fill((scores == -torch.inf).all(dim=-1, keepdim=True), 0.0)
        mixed = weights.view(kv_heads, -1, context - low) @ values  # [KH, G*n, D]
        out[start:end] = mixed.view(heads, end - start, -1).transpose(0, 1).to(q.dtype)
        if importance is not None:
            mass = weights[:, -1].sum(dim=0)
            blocks = torch.nn.functional.pad(mass, (0, -len(mass) % block_tokens)).view(-1, block_tokens)
            importance[row, first : first + len(blocks)] += blocks.sum(dim=1)
    return out
