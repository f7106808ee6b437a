"""Gated activation of a feed-forward layer (GLU variants; Shazeer, 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from kimicore.errors import ConfigError

__all__ = ["gated_act"]


def gated_act(gate_up: Tensor, kind: str) -> Tensor:
    """Return ``act(gate) * up``: gate_up [T, 2F], gate first -> [T, F]; kind "silu" or "gelu_tanh"."""
    gate, up = gate_up.chunk(2, dim=-1)
    if kind == "silu":
        return torch.nn.functional.silu(gate) * up
    if kind == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    raise ConfigError(f"activation {kind!r}: must be 'silu' or 'gelu_tanh'")
