"""Byte planes in numpy: byte i of every item together, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["join", "sampled_bits", "split"]

_LINE_BYTES: Final = 64
_SAMPLE_BYTES: Final = 16384


def split(items: NDArray[np.uint8], planes: NDArray[np.uint8]) -> None:
    """Write into ``planes`` [item_bytes, count] the bytes of ``items`` [count * item_bytes]; the two do not overlap."""
    planes[:] = items.reshape(planes.shape[1], planes.shape[0]).T


def join(planes: Sequence[NDArray[np.uint8]], items: NDArray[np.uint8]) -> None:
    """Write into ``items`` [count * item_bytes] what ``planes`` hold, item_bytes arrays [count] that may lie apart."""
    table = items.reshape(-1, len(planes))
    for index, plane in enumerate(planes):
        table[:, index] = plane


def sampled_bits(plane: NDArray[np.uint8]) -> float:
    """Return the entropy in bits per byte of about 16 KiB of ``plane``, byte by byte: 8.0 is noise, 0.0 one value.

    The sample is lines of 64 bytes at an odd number of lines from each other, so that it meets every part of a period
    that is a power of two.
    """
    if not plane.size:
        return 0.0
    step = (plane.size // _SAMPLE_BYTES | 1) * _LINE_BYTES
    places = np.arange(0, plane.size, step)[:, None] + np.arange(_LINE_BYTES)
    counts = np.bincount(plane[places[places < plane.size]])
    counts = counts[counts > 0]
    taken = int(counts.sum())
    return float(np.log2(taken) - (counts * np.log2(counts)).sum() / taken)
