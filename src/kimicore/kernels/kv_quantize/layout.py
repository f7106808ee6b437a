"""Where the pieces of a packed block lie: keys and values of one layer in 8 or 4 bits, with their scales.

A layer of a block holds, one behind the other: key codes ``[KH, bt, D * bits / 8]`` uint8, value codes of the same
shape, key scales ``[KH, 2, D]`` float16 (minimum and step of each channel within the block), value scales
``[KH, bt, 2]`` float16 (minimum and step of each token), and zeros up to a multiple of 64 bytes. With 4 bits, byte d
of a token holds channel d in its low half and channel ``d + D / 2`` in its high half.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["ALIGNMENT_BYTES", "BITS", "PackedLayout", "packed_layer_bytes", "packed_layout"]

BITS: Final = (8, 4)
ALIGNMENT_BYTES: Final = 64
_SCALE_BYTES: Final = 4  # minimum and step, float16 each


class PackedLayout(NamedTuple):
    """The pieces of one layer of a packed block: where each begins, and how much all take, in bytes."""

    token_bytes: int
    key_codes_at: int
    value_codes_at: int
    key_scales_at: int
    value_scales_at: int
    layer_bytes: int


def packed_layout(kv_heads: int, block_tokens: int, dim: int, bits: int) -> PackedLayout:
    """Return the layout of a layer of a block. Raises ValueError for bits other than 8 and 4, and 4 of an odd dim."""
    if bits not in BITS:
        raise ValueError(f"bits={bits}: must be 8 or 4")
    if dim * bits % 8:
        raise ValueError(f"dim={dim}: must be even for {bits} bits")
    token_bytes = dim * bits // 8
    codes = kv_heads * block_tokens * token_bytes
    key_scales = 2 * codes
    value_scales = key_scales + kv_heads * dim * _SCALE_BYTES
    end = value_scales + kv_heads * block_tokens * _SCALE_BYTES
    return PackedLayout(token_bytes, 0, codes, key_scales, value_scales, -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


def packed_layer_bytes(kv_heads: int, block_tokens: int, dim: int, bits: int) -> int:
    """Return the bytes that a layer of a packed block takes, a multiple of 64; raises as :func:`packed_layout`."""
    return packed_layout(kv_heads, block_tokens, dim, bits).layer_bytes
