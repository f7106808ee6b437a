"""Rotary position embedding (Su et al., 2021) and the write of new keys and values into the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rotary_write"]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, layer: int, slots: Tensor
) -> None:
    """Rotate q in place, and write rotated k and plain v into the cache.

    q [T, H, D], k and v [T, KH, D] (their last dimension dense, others of any stride), cos and sin
    [T, D/2] float32 (half-split pairs: dimension i turns with i + D/2), kv [S, L, 2, KH, bt, D], layer: index
    within kv, slots [T] int64: slot * block_tokens + offset of each token. Slot 0 may be written many times.
    """
    q.copy_(_rotated(q, cos, sin))
    block_tokens = kv.shape[4]
    slot, offset = slots // block_tokens, slots % block_tokens
    kv[slot, layer, 0, :, offset] = _rotated(k, cos, sin).to(kv.dtype)
    kv[slot, layer, 1, :, offset] = v.to(kv.dtype)
