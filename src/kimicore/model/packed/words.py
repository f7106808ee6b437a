"""Codes in 32-bit words, as the formats of model folders pack them."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["INTERLEAVED", "spaced_codes", "spaced_words", "stream_codes", "stream_words"]

INTERLEAVED: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ: where output i of eight stands in its word, which holds outputs 0, 2, 4, 6, 1, 3, 5, 7."""


def stream_words(count: int, bits: int) -> int:
    """Return the words of ``count`` codes that follow each other bit by bit."""
    return -(-count * bits // 32)


def spaced_words(count: int, bits: int) -> int:
    """Return the words of ``count`` codes of which each word holds as many as fit whole."""
    return -(-count // (32 // bits))


def spaced_codes(words: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Return the codes [R, W * (32 // bits)] uint8 of words [R, W] int32, the lowest bits first.

    ``places``: where in its word each code stands, if they are not in order.
    """
    each = 32 // bits
    shifts = torch.tensor([bits * place for place in places or range(each)], dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).reshape(len(words), -1)


def stream_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Return ``count`` codes [R, count] uint8 of each row of words [R, W] int32, which may lie across two words."""
    if 32 % bits == 0:
        return spaced_codes(words, bits)[:, :count]
    first = torch.arange(count) * bits
    at, shift = first // 32, (first % 32).to(torch.int64)
    wide = words.to(torch.int64) & 0xFFFFFFFF
    following = torch.cat((wide[:, 1:], wide.new_zeros((len(wide), 1))), dim=1)
    pairs = wide.index_select(1, at) | (following.index_select(1, at) << 32)
    return ((pairs >> shift) & ((1 << bits) - 1)).to(torch.uint8)
