"""No padding: rows lie one behind the other."""

from __future__ import annotations

from attrs import frozen

from kimicore.types import Shape

__all__ = ["Packed"]


@frozen
class Packed:
    """Every step runs at its own size; nothing is wasted, and there are as many shapes as steps."""

    name: str = "packed"

    def shape(self, tokens: int, rows: int, blocks: int) -> Shape:
        """Return the given size."""
        return Shape(tokens, rows, blocks)
