"""KV blocks on their way between tiers: what the decide tower asks for and what it is told when it is done."""

from __future__ import annotations

from typing import Final, Literal

from attrs import frozen

__all__ = ["LOST", "BlockMove", "TierName", "Transfer", "Transferred"]

TierName = Literal["device", "host", "disk"]

LOST: Final = -1
"""In place of stored bytes: the source did not have the block, and will not have it later."""


@frozen(eq=False)
class BlockMove:
    """A block on its way between tiers: its class, its name, and its slots there (0 on disk, which knows no slots)."""

    kind: int
    key: bytes
    source: int
    target: int


@frozen(eq=False)
class Transfer:
    """Blocks that move together from one tier to another; who asked for it names it by ``number``.

    The slots are the transfer's own until it is told as done: nobody else writes to them.
    """

    number: int
    source: TierName
    target: TierName
    moves: tuple[BlockMove, ...]


@frozen(eq=False)
class Transferred:
    """A transfer that is over. ``stored``: per move the bytes that it took in the target tier, 0 where it failed, and
    LOST where the source turned out not to have the block. Times are on the engine's clock."""

    transfer: Transfer
    stored: tuple[int, ...]
    begun_s: float
    ended_s: float
