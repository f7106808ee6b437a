"""Padding to powers of two: few shapes."""

from __future__ import annotations

import math

from attrs import frozen

from kimicore.checks import int_field
from kimicore.errors import ConfigError
from kimicore.types import Shape

__all__ = ["MaxLen"]


@frozen
class MaxLen:
    """Every direction is rounded up to ``smallest`` times a power of two.

    At most one shape per power and direction exists, and less than half of a step of ``smallest`` or more is padding.
    """

    smallest: int = int_field(1, 1, 1 << 20, fault=ConfigError)
    name: str = "max-len"

    def shape(self, tokens: int, rows: int, blocks: int) -> Shape:
        """Return the next powers of two."""
        return Shape(self._up(tokens), self._up(rows), self._up(blocks))

    def waste_tokens(self, tokens: int) -> int:
        """Return what is missing to the next power of two."""
        return self._up(tokens) - tokens

    def shapes(self, tokens: int, rows: int, blocks: int) -> int:
        """Return the product of the powers up to each size."""
        return math.prod((self._up(size) // self.smallest).bit_length() for size in (tokens, rows, blocks))

    def _up(self, size: int) -> int:
        return self.smallest << max(0, -(-size // self.smallest) - 1).bit_length()
