"""Paged attention by torch in tiles of one fixed size: slower than the reference, and the same in every batch.

Matrix libraries pick their order of summation by the shape of a product. Here every product has the same shape:
queries are cut at multiples of :data:`QUERIES` of their position, keys at multiples of :data:`KEYS`, both filled up
with zeros, and parts are combined in order. It serves float32, whose tokens are promised to be the same in every
batch, where there is no compiler.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kimicore.kernels.paged_attention.reference import check_head_tables, check_single_queries

__all__ = ["KEYS", "QUERIES", "paged_attention"]

QUERIES: Final = 16
KEYS: Final = 256


def _keys_and_values(kv: Tensor, layer: int, table: Tensor, low: int, high: int, start: int) -> Tensor:
    """Return keys and values [2, KH, KEYS, D] of positions from ``start`` on; zeros outside of [low, high)."""
    block_tokens = kv.shape[4]
    first, last = low // block_tokens, -(-high // block_tokens)
    slots = table[..., first:last].long()
    if slots.dim() == 2:  # a table per head
        blocks = kv[slots, layer, :, torch.arange(kv.shape[3]).unsqueeze(1)].permute(2, 0, 1, 3, 4).flatten(2, 3)
    else:
        blocks = kv[slots, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)
    at = first * block_tokens
    out = torch.zeros(2, kv.shape[3], KEYS, kv.shape[5])
    out[:, :, low - start : high - start] = blocks[:, :, low - at : high - at]
    return out


class _Row:
    """One row's settings; ``window`` is its context where there is none."""

    def __init__(self, kv: Tensor, layer: int, table: Tensor, scale: float, window: int, softcap: float | None) -> None:
        self.kv, self.layer, self.table = kv, layer, table
        self.scale, self.window, self.softcap = scale, window, softcap

    def tile(self, q: Tensor, start: int, count: int, bias: Tensor | None) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Return the output [H, count, D] of queries q [H, count, D] at positions from ``start`` on, and the
        weights of the last one in every part: (first key, mass [KEYS] summed over heads)."""
        heads, _, dim = q.shape
        kv_heads, lead = self.kv.shape[3], start % QUERIES
        tile = torch.zeros(heads, QUERIES, dim)
        tile[:, lead : lead + count] = q
        grouped = tile.view(kv_heads, -1, dim)
        position = torch.arange(start - lead, start - lead + QUERIES).unsqueeze(1)
        top = torch.full((heads, QUERIES, 1), -torch.inf)
        total, mixed = torch.zeros_like(top), torch.zeros_like(tile)
        parts: list[tuple[int, Tensor, Tensor]] = []
        low, high = max(0, start - self.window + 1), start + count
        for base in range(low // KEYS * KEYS, high, KEYS):
            stop = min(high, base + KEYS)
            keys, values = _keys_and_values(self.kv, self.layer, self.table, max(low, base), stop, base)
            scores = torch.bmm(grouped, keys.transpose(1, 2)).view(heads, QUERIES, KEYS) * self.scale
            if self.softcap is not None:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            if bias is not None:
                scores[:, :, : stop - base] += bias[base:stop]
            at = torch.arange(base, base + KEYS)
            hidden = (at > position) | (at <= position - self.window)
            scores.masked_fill_(hidden, -torch.inf)
            part_top = scores.amax(dim=-1, keepdim=True)
            weights = torch.exp(scores - part_top.clamp(min=torch.finfo(torch.float32).min))
            part = torch.bmm(weights.view(kv_heads, -1, KEYS), values).view(heads, QUERIES, dim)
            fresh_top = torch.maximum(top, part_top).clamp(min=torch.finfo(torch.float32).min)
            old, fresh = torch.exp(top - fresh_top), torch.exp(part_top - fresh_top)
            total = total * old + weights.sum(dim=-1, keepdim=True) * fresh
            mixed = mixed * old + part * fresh
            top = torch.maximum(top, part_top)
            parts.append((base, weights[:, lead + count - 1], part_top[:, lead + count - 1]))
        own = slice(lead, lead + count)
        out = torch.where(total > 0, mixed / total, mixed)[:, own]
        last_top, last_total = top[:, lead + count - 1], total[:, lead + count - 1]
        mass = [(base, (w * torch.exp(t - last_top) / last_total).nan_to_num(0.0).sum(dim=0)) for base, w, t in parts]
        return out, mass


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
    """See :func:`kimicore.kernels.paged_attention.reference.paged_attention`."""
    out = torch.zeros(q.shape, dtype=q.dtype)
    block_tokens = kv.shape[4]
    check_head_tables(block_table, kv.shape[3], window, importance)
    check_single_queries(block_table, row_starts, contexts)
    for row, context in enumerate(contexts.tolist()):
        start, end = int(row_starts[row]), int(row_starts[row + 1])
        if end <= start or context <= 0:
            continue
        settings = _Row(kv, layer, block_table[row], scale, window or context, softcap)
        at = start
        mass: list[tuple[int, Tensor]] = []
        while at < end:
            position = context - (end - at)
            count = min(QUERIES - position % QUERIES, end - at)
            queries = q[at : at + count].float().transpose(0, 1)
            result, mass = settings.tile(queries, position, count, None if bias is None else bias[row])
            out[at : at + count] = result.transpose(0, 1).to(q.dtype)
            at += count
        if importance is not None:
            for base, weights in mass:
                blocks = weights.view(-1, block_tokens).sum(dim=1)
                place = slice(base // block_tokens, min(importance.shape[1], base // block_tokens + len(blocks)))
                importance[row, place] += blocks[: place.stop - place.start]
    return out
