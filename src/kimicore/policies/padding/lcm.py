"""Padding to what the hardware and the cache need: few shapes, little waste."""

from __future__ import annotations

import math

from attrs import frozen

from kimicore.checks import int_field
from kimicore.errors import ConfigError
from kimicore.types import Shape

__all__ = ["Lcm"]


@frozen
class Lcm:
    """Every direction is rounded up to a multiple of a least common multiple (LCM), in steps that grow with the size.

    Tokens: the LCM of ``tile_tokens`` (rows of the hardware's product tile), ``block_tokens`` (of the KV cache) and
    ``graph_tokens`` (a captured graph's bucket). Rows: ``graph_rows``. Blocks of a table: as many as make whole tiles
    of keys, ``lcm(tile_tokens, block_tokens) / block_tokens``, and a multiple of ``graph_blocks``.

    Up to ``2 * per_doubling`` units every multiple is a size; from there on each doubling has ``per_doubling`` sizes.
    So with unit ``u`` less than ``max(u, size / per_doubling)`` is added to a direction, and the number of sizes grows
    by ``per_doubling`` when the largest size doubles. ``per_doubling=0``: every multiple is a size.

    The LCM is never that of the sequences' own lengths. Raises :class:`~kimicore.ConfigError`.
    """

    tile_tokens: int = int_field(16, 1, 4096, fault=ConfigError)
    block_tokens: int = int_field(16, 1, 4096, fault=ConfigError)
    graph_tokens: int = int_field(1, 1, 4096, fault=ConfigError)
    graph_rows: int = int_field(8, 1, 4096, fault=ConfigError)
    graph_blocks: int = int_field(1, 1, 4096, fault=ConfigError)
    per_doubling: int = int_field(4, 0, 1024, fault=ConfigError)
    name: str = "lcm"

    def __attrs_post_init__(self) -> None:
        if self.per_doubling & (self.per_doubling - 1):
            raise ConfigError(f"per_doubling={self.per_doubling}: must be a power of two, or 0 for every multiple")
        if max(self.units) > 4096:
            raise ConfigError(
                f"tile_tokens={self.tile_tokens}, block_tokens={self.block_tokens}, graph_tokens={self.graph_tokens} "
                f"and graph_blocks={self.graph_blocks} have the common multiples {self.units}, over 4096: choose sizes "
                "that divide each other"
            )

    @property
    def units(self) -> tuple[int, int, int]:
        """Of what tokens, rows and blocks are multiples."""
        tile = math.lcm(self.tile_tokens, self.block_tokens)
        return (
            math.lcm(tile, self.graph_tokens),
            self.graph_rows,
            math.lcm(tile // self.block_tokens, self.graph_blocks),
        )

    def shape(self, tokens: int, rows: int, blocks: int) -> Shape:
        """Return the next sizes; there are never more rows than tokens."""
        by_token, by_row, by_block = self.units
        rows = self._up(rows, by_row)
        return Shape(self._up(max(tokens, rows), by_token), rows, self._up(blocks, by_block))

    def waste_tokens(self, tokens: int) -> int:
        """Return what is missing to the next size, where the step has a row per token."""
        by_token, by_row, _ = self.units
        return self._up(max(tokens, self._up(tokens, by_row)), by_token) - tokens

    def shapes(self, tokens: int, rows: int, blocks: int) -> int:
        """Return the product of the numbers of sizes in each direction."""
        by_token, by_row, by_block = self.units
        most = self._up(rows, by_row)
        return self._count(max(tokens, most), by_token) * self._count(rows, by_row) * self._count(blocks, by_block)

    def _shift(self, multiple: int) -> int:
        """Return the power of two of which a size of so many units has to be a multiple."""
        if not self.per_doubling:
            return 0
        return max(0, (multiple - 1).bit_length() - self.per_doubling.bit_length())

    def _up(self, size: int, unit: int) -> int:
        multiple = -(-size // unit)
        shift = self._shift(multiple)
        return (-(-multiple // (1 << shift)) << shift) * unit

    def _count(self, size: int, unit: int) -> int:
        """Return how many sizes there are up to the one that covers ``size``."""
        multiple = max(1, -(-size // unit))
        shift = self._shift(multiple)
        steps = -(-multiple // (1 << shift))
        return multiple if not shift else steps + shift * self.per_doubling
