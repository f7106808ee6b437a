"""Keys and values in 8 or 4 bits, by torch: the oracle of the packed cache's bytes.

A code c stands for ``minimum + step * c``. All arithmetic is float32, and every rounding is to nearest with ties to
even except for the two scales, so that every implementation gives the same bytes:

- minimum: the group's least value (a zero is +0) held to float16's range, rounded down to float16;
- step: ``(greatest - minimum) / (2^bits - 1)`` held to float16's range, rounded up to float16, so that the greatest
  value is reached (by a range that is almost nothing, too: the least step is 2^-24); 0 where the range is 0 or less;
- code: ``(x - minimum) / step`` rounded and held to 0 .. 2^bits - 1; 0 where the step is 0.

A group that holds a NaN or an infinity has a minimum of 0, a step of NaN and codes of 0: its values are NaN. What lies
beyond 65504 times the number of steps (far outside of what float16 can hold) is cut off there.
"""

from __future__ import annotations

from math import prod
from typing import Final

import torch
from torch import Tensor

from kimicore.kernels.kv_quantize.layout import packed_layout

__all__ = ["dequantized", "kv_quantize"]

_MOST: Final = 65504.0  # of float16
_LEAST_STEP: Final = 1  # as bits of float16


def _scales(x: Tensor, levels: int, along: int) -> tuple[Tensor, Tensor]:
    """Return minimum and step (float16, ``along`` kept as 1) of the groups of x float32 that lie along a dimension."""
    finite = x.isfinite().all(dim=along, keepdim=True)
    least, greatest = x.amin(dim=along, keepdim=True) + 0.0, x.amax(dim=along, keepdim=True)
    minimum = torch.where(finite, least, 0.0).clamp(-_MOST, _MOST)
    near = minimum.to(torch.float16)
    bits = near.view(torch.int16)
    below = torch.where(bits < 0, bits + 1, bits - 1)
    low = torch.where(near.float() > minimum, below, bits).view(torch.float16)
    spread = torch.where(finite, greatest, 0.0) - low.float()
    exact = (spread / levels).clamp(max=_MOST)
    near = exact.to(torch.float16)
    bits = near.view(torch.int16)
    bits = torch.where(near.float() < exact, bits + 1, bits).clamp(min=_LEAST_STEP)
    step = torch.where(spread > 0, bits.view(torch.float16), 0.0)
    return low, torch.where(finite, step, torch.nan)


def _codes(x: Tensor, minimum: Tensor, step: Tensor, levels: int) -> Tensor:
    """Return the codes uint8, shaped as x."""
    steps = ((x - minimum.float()) / step.float()).round().clamp(0, levels)
    return torch.where(step > 0, steps, 0.0).to(torch.uint8)


def _halves_packed(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4


def _halves_apart(codes: Tensor, bits: int) -> Tensor:
    return codes if bits == 8 else torch.cat((codes & 15, codes >> 4), dim=-1)


def kv_quantize(kv: Tensor, layer: int, sources: Tensor, packed: Tensor, targets: Tensor, bits: int) -> None:
    """Write layer ``layer`` of whole blocks of ``kv`` into ``packed`` with ``bits`` (8 or 4) bits per value.

    kv [S, L, 2, KH, bt, D]; packed [P, L, layer_bytes] uint8, laid out as ``layout`` says; sources, targets [n] int32:
    slots of kv and of packed. Both may be strided by slot. No target may be named twice.
    """
    _, _, _, kv_heads, block_tokens, dim = kv.shape
    layout = packed_layout(kv_heads, block_tokens, dim, bits)
    levels, count = (1 << bits) - 1, len(sources)
    if not count:
        return
    keys, values = kv[sources.long(), layer].float().unbind(1)  # [n, KH, bt, D]
    key_scales, value_scales = _scales(keys, levels, 2), _scales(values, levels, 3)
    out = torch.zeros(count, layout.layer_bytes, dtype=torch.uint8)
    for at, x, scales in ((layout.key_codes_at, keys, key_scales), (layout.value_codes_at, values, value_scales)):
        codes = _halves_packed(_codes(x, *scales, levels), bits).reshape(count, -1)
        out[:, at : at + codes.shape[1]] = codes
    for at, scales, along in ((layout.key_scales_at, key_scales, 2), (layout.value_scales_at, value_scales, 3)):
        both = torch.cat(scales, dim=along).reshape(count, -1).view(torch.uint8)
        out[:, at : at + both.shape[1]] = both
    packed[targets.long(), layer] = out


def dequantized(
    packed: Tensor, layer: int, slots: Tensor, shape: tuple[int, int, int], bits: int, dtype: torch.dtype
) -> Tensor:
    """Return blocks [n, 2, KH, bt, D] of ``dtype``: ``minimum + step * code`` in one rounding to float32, then to it.

    shape: (KH, bt, D); slots [n]: those of packed [P, L, layer_bytes].
    """
    kv_heads, block_tokens, dim = shape
    layout = packed_layout(kv_heads, block_tokens, dim, bits)
    raw = packed[slots.long(), layer]
    count, codes_bytes = len(raw), kv_heads * block_tokens * layout.token_bytes

    def codes(at: int) -> Tensor:
        own = raw[:, at : at + codes_bytes].view(count, kv_heads, block_tokens, layout.token_bytes)
        return _halves_apart(own, bits).double()

    def scales(at: int, *per_head: int) -> Tensor:
        own = raw[:, at : at + kv_heads * prod(per_head) * 2].contiguous().view(torch.float16)
        return own.view(count, kv_heads, *per_head).double()

    key_scales = scales(layout.key_scales_at, 2, 1, dim)
    value_scales = scales(layout.value_scales_at, block_tokens, 2, 1)
    # Products and sums of float16 and 8 bits are exact in float64: rounding them once is what a fused step does.
    keys = codes(layout.key_codes_at) * key_scales[:, :, 1] + key_scales[:, :, 0]
    values = codes(layout.value_codes_at) * value_scales[:, :, :, 1] + value_scales[:, :, :, 0]
    return torch.stack((keys, values), dim=1).float().to(dtype)
