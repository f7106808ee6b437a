"""Byte planes in numpy: byte i of every item together, and back; and planes packed, as ``packed.h`` tells."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["join", "join_packed", "pack", "sampled_bits", "split"]

_LINE_BYTES: Final = 64
_SAMPLE_BYTES: Final = 16384
_CHUNK_BYTES: Final = 4096
_LAYERS: Final = 4
_WIDTHS: Final = range(7)
_RAW: Final = 8
_HEAD: Final = struct.Struct("<BH")  # width, escapes


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


def pack(plane: NDArray[np.uint8], most_bytes: int) -> bytes | None:
    """Return the plane packed, or None where that takes more than ``most_bytes``, or there is nothing to pack."""
    packed = b"".join([_layer(plane[at : at + _CHUNK_BYTES], _LAYERS) for at in range(0, plane.size, _CHUNK_BYTES)])
    return packed if 0 < len(packed) <= most_bytes else None


def _layer(values: NDArray[np.uint8], layers: int) -> bytes:
    """Return the layer of these values that takes the fewest bytes."""
    counts = np.bincount(values, minlength=256)
    ranked = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    _, width = _cheapest(counts[ranked], layers)
    if width == _RAW:
        return bytes([_RAW]) + values.tobytes()
    known = ranked[: 1 << width]
    if len(known) < len(ranked):
        known = known[:-1]
    code_of = np.full(256, len(known))
    code_of[known] = np.arange(len(known))
    codes = code_of[values]
    rest = values[codes == len(known)]
    bits = (codes[:, None] >> np.arange(width)) & 1
    table = np.zeros((1 << width) - (rest.size > 0), np.uint8)
    table[: len(known)] = known
    head = _HEAD.pack(width, rest.size) + table.tobytes() + np.packbits(bits, bitorder="little").tobytes()
    return head + (_layer(rest, layers - 1) if rest.size else b"")


def _cheapest(counts: NDArray[np.int64], layers: int) -> tuple[int, int]:
    """Return the fewest bytes of a layer of values this frequent, in falling order, and its width."""
    total = int(counts.sum())
    least, best = 1 + total, _RAW
    for width in _WIDTHS if layers > 1 else ():
        size = _HEAD.size + (1 << width) + -(-total * width // 8)
        if len(counts) > 1 << width:
            if not width or size - 1 >= least:
                continue
            size += _cheapest(counts[(1 << width) - 1 :], layers - 1)[0] - 1
        if size < least:
            least, best = size, width
    return least, best


def join_packed(parts: NDArray[np.uint8], lengths: Sequence[int], items: NDArray[np.uint8]) -> bool:
    """Write into ``items`` [count * item_bytes] what the planes hold that lie one behind the other in ``parts``.

    A plane whose length is ``count`` lies there as it is, a shorter one is packed. Returns whether every byte was of
    use; where not, ``items`` holds anything. Raises ValueError where ``lengths`` do not fit.
    """
    count = items.size // max(len(lengths), 1)
    if count * len(lengths) != items.size or max(lengths) > count or sum(lengths) != parts.size or min(lengths) < 0:
        raise ValueError(f"planes of {tuple(lengths)} bytes in {parts.size} bytes for {items.size}: they do not fit")
    planes = []
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        plane = parts[end - length : end]
        if length < count:
            try:
                plane = _unpacked(plane.tobytes(), count)
            except (ValueError, IndexError, struct.error):
                return False
        planes.append(plane)
    join(planes, items)
    return True


def _unpacked(data: bytes, count: int) -> NDArray[np.uint8]:
    found, at = [], 0
    for begin in range(0, count, _CHUNK_BYTES):
        values, at = _unpacked_layer(data, at, min(_CHUNK_BYTES, count - begin), _LAYERS)
        found.append(values)
    if at != len(data):
        raise ValueError("bytes behind the last layer")
    return np.concatenate(found)


def _unpacked_layer(data: bytes, at: int, count: int, layers: int) -> tuple[NDArray[np.uint8], int]:
    """Return the values of the layer at ``at``, and where it ends."""
    if data[at] == _RAW:
        return np.frombuffer(data, np.uint8, count, at + 1), at + 1 + count
    width, escapes = _HEAD.unpack_from(data, at)
    if layers == 1 or width not in _WIDTHS or escapes > count or (escapes and not width):
        raise ValueError("a layer that cannot be")
    at += _HEAD.size
    known = (1 << width) - (escapes > 0)
    size = -(-count * width // 8)
    table = np.frombuffer(data, np.uint8, known, at)
    stored = np.frombuffer(data, np.uint8, size, at + known) if size else np.empty(0, np.uint8)
    bits = np.unpackbits(stored, count=count * width, bitorder="little").reshape(count, width)
    codes = bits @ (1 << np.arange(width))
    at += known + size
    if not escapes:
        return table[codes], at
    rest, at = _unpacked_layer(data, at, escapes, layers - 1)
    values = np.append(table, np.uint8(0))[codes]
    places = codes == known
    if np.count_nonzero(places) != escapes:
        raise ValueError("other escapes than were counted")
    values[places] = rest
    return values, at
