"""How much attention each block of a paged cache gets from a few queries, by torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["block_mass"]


def block_mass(
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
) -> Tensor:
    """Return the share of the attention [B, N] float32 that each block gets from a row's queries.

    q [T, H, D]; kv [S, L, 2, KH, bt, D]; block_table [B, N] int32; row_starts [B+1] int32: row b's queries are
    ``q[row_starts[b]:row_starts[b+1]]``, the last of which stands at ``contexts[b] - 1``; contexts [B] int32. A query
    at p sees keys at positions in ``(p - window, p]``; scale and softcap are those of the attention.

    The shares are softmax weights, summed over a block's positions and averaged over queries and heads: a row adds up
    to 1, one without queries or context is zeros, and one whose queries or keys hold a NaN is NaN.
    """
    mass = torch.zeros(block_table.shape, dtype=torch.float32)
    heads, kv_heads, block_tokens = q.shape[1], kv.shape[3], kv.shape[4]
    for row, context in enumerate(contexts.tolist()):
        start, end = int(row_starts[row]), int(row_starts[row + 1])
        if end <= start or context <= 0:
            continue
        first = 0  # blocks that every query has left behind may be recycled: they are not read
        if window is not None:
            first = max(0, context - (end - start) - window + 1) // block_tokens
        last = -(-context // block_tokens)
        keys = kv[block_table[row, first:last].long(), layer, 0].float()  # [n, KH, bt, D]
        keys = keys.transpose(0, 1).flatten(1, 2)[:, : context - first * block_tokens]
        queries = q[start:end].float().transpose(0, 1).reshape(kv_heads, -1, q.shape[2])
        scores = (queries @ keys.transpose(1, 2) * scale).view(heads, end - start, -1)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query_at = torch.arange(context - (end - start), context).unsqueeze(1)
        key_at = torch.arange(first * block_tokens, context)
        hidden = key_at > query_at
        if window is not None:
            hidden |= key_at <= query_at - window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).mean(dim=(0, 1))
        padded = torch.nn.functional.pad(weights, (0, -len(weights) % block_tokens))
        mass[row, first:last] = padded.view(-1, block_tokens).sum(dim=1)
    return mass
