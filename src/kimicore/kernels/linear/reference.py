"""Matrix product with weights, by torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: x [T, C], weight [O, C], bias [O] -> [T, O]."""
    return torch.nn.functional.linear(x, weight, bias)
