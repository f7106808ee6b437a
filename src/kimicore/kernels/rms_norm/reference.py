"""Root-mean-square normalization (Zhang and Sennrich, 2019), with the residual addition that precedes it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ``(normalized, x + residual)`` over the last dimension.

    x [..., C] of any floating type, weight [C], residual like x. The sum is rounded to x's type, the
    normalization is computed in float32 and returned in x's type. A weight of x's type multiplies after the
    rounding (Llama); a float32 weight beside a 16-bit x multiplies before it (Gemma, weight given as 1 + w).
    """
    total = x if residual is None else x + residual
    wide = total.float()
    normalized = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight.dtype != total.dtype:
        return (normalized * weight).to(total.dtype), total
    return normalized.to(total.dtype) * weight, total
