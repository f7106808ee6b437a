"""What the ledger tells of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, frozen

from kimicore.types import KV_PRECISIONS, KVClass, KVPrecision

__all__ = ["BlockCounts", "Pin", "kinds_of"]


@frozen
class BlockCounts:
    """Blocks in the units of :class:`~kimicore.EngineStats`: ``used + cached + free == total``."""

    used: int
    cached: int
    free: int
    total: int


@define(eq=False)
class Pin:
    """A block that is kept while its bytes move, and those before it: its ``slots``, last first."""

    kind: int
    slots: list[int]


def kinds_of(classes: Sequence[KVClass]) -> dict[KVPrecision, tuple[int, ...]]:
    """Return for each precision that there are classes of the numbers of these, the first one without a tail."""
    found: dict[KVPrecision, tuple[int, ...]] = {}
    for precision in KV_PRECISIONS:
        kinds = [kind for kind, one in enumerate(classes) if one.precision == precision]
        if kinds:
            found[precision] = tuple(sorted(kinds, key=lambda kind: (classes[kind].tail, kind)))
    return found
