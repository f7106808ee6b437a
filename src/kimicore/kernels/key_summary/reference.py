"""Per-channel extremes of a block's keys, by which sparse attention judges the block (after Tang et al., 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["key_summary"]


def key_summary(kv: Tensor, layer: int, slots: Tensor, summary: Tensor) -> None:
    """Write the minimum and maximum of each channel over all keys of the blocks ``slots`` at ``layer``.

    kv [S, L, 2, KH, bt, D]; slots [n] int32; summary [S, L, KH, 2, D] of kv's type, perhaps a view into the same
    memory: ``summary[slot, layer, h, 0]`` gets the minimum, ``[..., 1]`` the maximum. The values are exact: a zero is
    +0, and a channel with a NaN in any key gets NaN in both.
    """
    lowest, highest = kv[slots.long(), layer, 0].aminmax(dim=2)
    found = torch.stack((lowest, highest), dim=2) + 0.0  # -0 becomes +0, so that the order of keys does not matter
    summary[:, layer][slots.long()] = found.masked_fill(found.isnan(), torch.nan)
