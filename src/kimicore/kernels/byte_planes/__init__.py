"""The operation ``byte_planes``: byte i of every item together, so that like bytes are compressed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kimicore.kernels.byte_planes import native, reference

__all__ = ["BytePlanes", "select_byte_planes"]


@frozen(eq=False)
class BytePlanes:
    """Split into planes, join them, pack them and join packed ones, and how even their bytes are.

    Each is called as its reference is. All are safe on any thread. ``implementation`` is "native" or "numpy", and
    ``why`` the reason.
    """

    split: Callable[[NDArray[np.uint8], NDArray[np.uint8]], None]
    join: Callable[[Sequence[NDArray[np.uint8]], NDArray[np.uint8]], None]
    sampled_bits: Callable[[NDArray[np.uint8]], float]
    pack: Callable[[NDArray[np.uint8], int], bytes | None]
    join_packed: Callable[[NDArray[np.uint8], Sequence[int], NDArray[np.uint8]], bool]
    implementation: str
    why: str


def select_byte_planes(*, use_native: bool = True) -> BytePlanes:
    """Return the native operations where they can be built and agree with the reference, else those of numpy.

    The library is compiled on first use, which takes about a second. Never fails for want of a compiler.
    """
    found, why = native.load() if use_native else (None, "native kernels are turned off")
    if found is not None and _agrees(found):
        return _of(found, "native", why)
    if found is not None:
        why += ", but its results differ from the reference"
    return _of(reference, "numpy", why)


def _of(found: Any, implementation: str, why: str) -> BytePlanes:
    return BytePlanes(found.split, found.join, found.sampled_bits, found.pack, found.join_packed, implementation, why)


def _agrees(found: Any) -> bool:
    """Return whether ``found`` does what the reference does, with sizes that fill no vector."""
    for item_bytes in (1, 2, 4):
        items = (np.arange(331 * item_bytes) ** 2 % 251).astype(np.uint8)
        planes, wanted = np.zeros((2, item_bytes, 331), np.uint8)
        back = np.zeros_like(items)
        found.split(items, planes)
        reference.split(items, wanted)
        found.join(list(wanted), back)
        if not (np.array_equal(planes, wanted) and np.array_equal(back, items)):
            return False
        parts = [plane.tobytes() if (part := found.pack(plane, 330)) is None else part for plane in wanted]
        whole, back[:] = np.frombuffer(b"".join(parts), np.uint8), 0
        if not (found.join_packed(whole, list(map(len, parts)), back) and np.array_equal(back, items)):
            return False
        if abs(found.sampled_bits(items) - reference.sampled_bits(items)) > 1e-6:
            return False
    return True
