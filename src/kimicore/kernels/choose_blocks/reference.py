"""Which blocks of a paged cache a query attends to, by their keys' ranges (after Quest; Tang et al., 2024).

Quest takes the largest score that any key within a block's ranges could have. Over 16 tokens that is far from what a
key there has. On SmolLM2-135M a planted number is found more often where a quarter of each range is taken, about the
same middle (10 texts of 2,000 tokens: 9 and 7 of them at 1/4 and 1/8 of the blocks, beside 7 and 3), at the same
perplexity.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kimicore.errors import ConfigError

__all__ = ["RANGE", "choose_blocks", "estimates"]

RANGE: Final = 0.25
"""How much of a channel's range counts."""


def estimates(q: Tensor, summary: Tensor, *, scale: float) -> Tensor:
    """Return how much each block can weigh with the query [KH, n] float32: q [H, D], summary [n, KH, 2, D].

    A query head's score of a block is ``scale * sum_d (q_d * middle_d + RANGE * |q_d| * half_d)``, with the middle of
    a channel's keys and half of their range. The estimate is the share that the block has of the head's softmax over
    these scores, added up over the query heads of a key-value head. It is NaN where a summary or query holds a NaN or
    an infinity (such a block has no share of the others'), and 0, like others, where every head's score lies further
    below its largest than float32 holds (about 87).
    """
    heads = q.float().reshape(summary.shape[1], -1, q.shape[1])  # [KH, G, D]
    wide = RANGE * heads.abs()
    halves = torch.cat((0.5 * (heads - wide), 0.5 * (heads + wide)), dim=-1)  # of the minimum, of the maximum
    ranges = summary.float().flatten(2).transpose(0, 1)  # [KH, n, 2D]
    # One sum for each block: a matrix product rounds equal blocks at different places differently.
    scores = scale * (halves.unsqueeze(2) * ranges.unsqueeze(1)).sum(dim=-1)  # [KH, G, n]
    scores = scores.masked_fill(~scores.isfinite(), torch.nan)
    tops = scores.nan_to_num(nan=-torch.inf).amax(dim=-1, keepdim=True)
    weights = (scores - tops.masked_fill(tops == -torch.inf, 0)).exp()
    totals = weights.nan_to_num(nan=0.0).sum(dim=-1, keepdim=True)
    return (weights / totals.masked_fill(totals == 0, 1)).sum(dim=1)


def choose_blocks(
    q: Tensor,
    summary: Tensor,
    layer: int,
    block_table: Tensor,
    contexts: Tensor,
    keep: Tensor,
    *,
    block_tokens: int,
    scale: float,
    first: int = 1,
    recent: int = 2,
) -> tuple[Tensor, Tensor]:
    """Return per row and key-value head the blocks to attend to, and each row's context over them in tokens.

    q [B, H, D]: one query per row, the last token of its context; summary [S, L, KH, 2, D] as ``key_summary`` writes
    it; block_table [B, N] int32; contexts [B] int32; keep [B] int32: how many blocks a row may keep, its last one
    included, raised to ``first + recent``. Gives (table [B, KH, K] int32, contexts [B] int32): a row keeps
    ``k = min(blocks, keep)`` blocks in each head, K is the most of any row, and entries behind k are 0.

    The first ``first`` and the last ``recent`` blocks are kept, and their summaries not read; the other places go to
    the blocks with the largest :func:`estimates`, the later one where two are equal; a NaN counts as the largest, so
    that it is seen. Blocks keep their order. A row without context keeps none. Raises ConfigError for ``first`` below 0
    or ``recent`` below 1.
    """
    if first < 0 or recent < 1:
        raise ConfigError(f"first={first}, recent={recent}: must be at least 0 and 1")
    kv_heads = summary.shape[2]
    blocks = [-(-max(context, 0) // block_tokens) for context in contexts.tolist()]
    kept = [min(n, max(most, first + recent)) for n, most in zip(blocks, keep.tolist(), strict=True)]
    table = torch.zeros(len(blocks), kv_heads, max(kept, default=0), dtype=torch.int32)
    for row, (n, k) in enumerate(zip(blocks, kept, strict=True)):
        at = torch.arange(n).expand(kv_heads, n)
        if k < n:
            rivals = block_table[row, first : n - recent].long()
            found = estimates(q[row], summary[rivals, layer], scale=scale)
            order = (
                found.nan_to_num(nan=torch.inf, posinf=torch.inf).flip(1).argsort(dim=1, descending=True, stable=True)
            )
            middle = first + len(rivals) - 1 - order[:, : k - first - recent]
            at = torch.cat((at[:, :first], middle.sort(dim=1).values, at[:, n - recent :]), dim=1)
        table[row, :, :k] = block_table[row, at]
    shrunk = [max(n, 0) - (b - k) * block_tokens for n, b, k in zip(contexts.tolist(), blocks, kept, strict=True)]
    return table, torch.tensor(shrunk, dtype=torch.int32)
