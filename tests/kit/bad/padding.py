"""Padding policies that each break one promise; ``Good`` breaks none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import field, frozen

from kimicore.types import Shape


@frozen
class Good:
    """Tokens are rounded up to a multiple of eight."""

    name: str = "planted"

    def shape(self, tokens: int, rows: int, blocks: int) -> Shape:
        return Shape(-(-tokens // 8) * 8, rows, blocks)

    def waste_tokens(self, tokens: int) -> int:
        return -tokens % 8

    def shapes(self, tokens: int, rows: int, blocks: int) -> Any:
        return -(-tokens // 8) * rows * blocks


class Mutable(Good):
    """Settings that can be changed."""

    __setattr__ = object.__setattr__


@frozen
class Raises(Good):
    def shape(self, tokens: int, rows: int, blocks: int) -> Shape:
        if tokens > 8192:
            raise ValueError(tokens)
        return super().shape(tokens, rows, blocks)


@frozen
class Fractions(Good):
    def shape(self, tokens: int, rows: int, blocks: int) -> Shape:
        return Shape((tokens + 7) / 8 * 8, rows, blocks)  # type: ignore[arg-type]


@frozen
class CutsRows(Good):
    def shape(self, tokens: int, rows: int, blocks: int) -> Shape:
        return Shape(-(-tokens // 8) * 8, min(rows, 64), blocks)


@frozen
class Huge(Good):
    """The LCM of ever more sizes, as it were."""

    def shape(self, tokens: int, rows: int, blocks: int) -> Shape:
        return Shape(tokens * tokens, rows, blocks)

    def waste_tokens(self, tokens: int) -> int:
        return tokens * tokens

    def shapes(self, tokens: int, rows: int, blocks: int) -> Any:
        return tokens * rows * blocks


@frozen
class Remembers(Good):
    """Never goes back to a smaller shape."""

    largest: list[int] = field(factory=lambda: [0])

    def shape(self, tokens: int, rows: int, blocks: int) -> Shape:
        self.largest[0] = max(self.largest[0], min(tokens, 64))
        return Shape(max(tokens, self.largest[0]), rows, blocks)

    def waste_tokens(self, tokens: int) -> int:
        return 64

    def shapes(self, tokens: int, rows: int, blocks: int) -> Any:
        return (tokens + 64) * rows * blocks


@frozen
class Boasts(Good):
    def waste_tokens(self, tokens: int) -> int:
        return 0


@frozen
class Shrinks(Good):
    def shapes(self, tokens: int, rows: int, blocks: int) -> Any:
        return 1_000_000_000 - tokens


@frozen
class Unending(Good):
    def shapes(self, tokens: int, rows: int, blocks: int) -> Any:
        return float("inf")


@frozen
class ClaimsFew(Good):
    def shapes(self, tokens: int, rows: int, blocks: int) -> Any:
        return rows * blocks


@frozen
class FewRows(Good):
    def shape(self, tokens: int, rows: int, blocks: int) -> Shape:
        return Shape(-(-tokens // 8) * 8, min(rows, 2), blocks)


BAD: list[tuple[str, Callable[[], Any]]] = [
    ("settings", Mutable),
    ("never-raises", Raises),
    ("never-raises", Fractions),
    ("covers", CutsRows),
    ("near", Huge),
    ("pure", Remembers),
    ("waste", Boasts),
    ("claims", Shrinks),
    ("claims", Unending),
    ("bounded", ClaimsFew),
]
