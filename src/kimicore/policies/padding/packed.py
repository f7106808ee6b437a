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

    def waste_tokens(self, tokens: int) -> int:
        """Return 0."""
        return 0

    def shapes(self, tokens: int, rows: int, blocks: int) -> int:
        """Return how many sizes there are."""
        few = min(tokens, rows)
        return blocks * (few * (few + 1) // 2 + (tokens - few) * few)
