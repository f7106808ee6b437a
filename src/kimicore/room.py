"""The memory that a plan in the making has left."""

from __future__ import annotations

from collections.abc import Sequence

from kimicore.admission import window_blocks
from kimicore.contracts import MemoryView, RowView

__all__ = ["Room"]


class Room:
    """Counts down the memory of a view as rows are planned."""

    def __init__(self, memory: MemoryView | None, chunk_tokens: int) -> None:
        self.endless = memory is None
        self.chunk_tokens = chunk_tokens  # most that a row computes in a step: what a window holds at once
        self.size = 16 if memory is None else memory.block_tokens
        self.windows: tuple[int | None, ...] = () if memory is None else memory.windows
        self.kinds = {} if memory is None else memory.kinds
        self.all_kinds = tuple(range(len(self.windows)))
        self.per_slab = () if memory is None else memory.per_slab
        self.spare = [] if memory is None else list(memory.spare)
        self.slabs = 0 if memory is None else memory.slabs

    def of(self, row: RowView) -> tuple[int, ...]:
        """Return the classes that a row's blocks are of."""
        return self.kinds.get(row.kv_precision, self.all_kinds)

    def take(self, row: RowView, needs: Sequence[int], margin: int = 0) -> bool:
        """Take so many blocks per class for a row, if they and ``margin`` more of each of its classes are there."""
        if self.endless:
            return True
        kinds = self.of(row)
        slabs = with_margin = 0
        for kind in kinds:
            need, spare, per = needs[kind], self.spare[kind], self.per_slab[kind]
            if need > spare:
                slabs += -((spare - need) // per)
            if need + margin > spare:
                with_margin += -((spare - need - margin) // per)
        if with_margin > self.slabs:
            return False
        self.slabs -= slabs
        for kind in kinds:
            left = self.spare[kind] - needs[kind]
            self.spare[kind] = left if left >= 0 else left % self.per_slab[kind]
        return True

    def give(self, blocks: Sequence[int]) -> None:
        """Count blocks that come back."""
        for kind, count in enumerate(blocks):
            self.spare[kind] += count

    def growth(self, row: RowView, start: int, end: int) -> list[int]:
        """Return per class the blocks that a row needs to go from ``start`` to ``end`` computed tokens."""
        needs = [0] * len(self.windows)
        blocks = -(-end // self.size) - -(-start // self.size)
        passing = -(-self.chunk_tokens // self.size) + 1  # a window gives back as many as it takes, a step later
        for kind in self.of(row):
            needs[kind] = blocks if self.windows[kind] is None else min(blocks, passing)
        return needs

    def whole(self, row: RowView, tokens: int) -> list[int]:
        """Return per class the blocks that a waiting request needs for ``tokens`` tokens and does not share."""
        needs = [0] * len(self.windows)
        for kind in self.of(row):
            window = self.windows[kind]
            blocks = -(-tokens // self.size)
            if window is not None:
                chunk = min(self.chunk_tokens, max(1, tokens - row.computed_tokens))
                blocks = min(blocks, window_blocks(window, chunk, self.size))
            if row.shared_blocks:
                blocks -= min(blocks, row.shared_blocks[kind])
            needs[kind] = blocks
        return needs
