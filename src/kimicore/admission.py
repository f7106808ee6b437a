"""What the arena can hold, what a preemption would bring back, and when an overloaded engine has room again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kimicore.config import EngineConfig
from kimicore.contracts import StepLimits
from kimicore.ledger import Ledger
from kimicore.requests import Request

__all__ = ["Capacity", "HeldBlocks", "Traffic", "limits_of", "window_blocks"]

_ENDLESS_TOKENS = 1 << 30


def limits_of(config: EngineConfig) -> StepLimits:
    """Return the budgets of a step that the settings name."""
    return StepLimits(
        max_batch_size=config.max_batch_size,
        max_batch_tokens=config.max_batch_tokens,
        min_batch_size=config.min_batch_size,
        max_wait_s=config.max_wait_s,
        target_step_s=config.target_step_s,
    )


def window_blocks(window: int, count: int, block_tokens: int) -> int:
    """Return the most blocks that ``count`` successive queries of a class with this window see together."""
    return (window + count + block_tokens - 3) // block_tokens + 1


class Capacity:
    """How long a request with blocks of these classes can be that has the arena to itself; ``tokens`` is the length."""

    def __init__(self, ledger: Ledger, kinds: Sequence[int]) -> None:
        self._ledger, self._kinds = ledger, kinds
        low, high = 0, _ENDLESS_TOKENS
        while low < high:
            middle = (low + high + 1) >> 1
            if self.slabs(middle) < ledger.slabs.count:  # slab 0 is never given out
                low = middle
            else:
                high = middle - 1
        self.tokens = low

    def slabs(self, tokens: int) -> int:
        """Return the slabs that a request of this length needs at its end, alone and computed token by token."""
        ledger = self._ledger
        size = ledger.block_tokens
        total = 0
        for kind in self._kinds:
            window, per = ledger.windows[kind], ledger.slabs.per_slab[kind]
            blocks = -(-tokens // size)
            if window is not None:
                blocks = min(blocks, window_blocks(window, 1, size))
            total += -(-blocks // per)
        return total


class HeldBlocks(Mapping[int, tuple[int, ...]]):
    """Per running request the blocks that nobody else holds, by KV class; counted when asked for."""

    def __init__(self, running: Mapping[int, Request], ledger: Ledger) -> None:
        self._running = running
        self._ledger = ledger

    def __getitem__(self, number: int) -> tuple[int, ...]:
        refs = self._ledger.refs
        tables = self._running[number].tables
        return tuple(
            [sum([1 for slot in table if slot and refs(kind, slot) == 1]) for kind, table in enumerate(tables)]
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self._running)

    def __len__(self) -> int:
        return len(self._running)


class Traffic:
    """Measures how fast requests leave the queue."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._interval_s: float | None = None

    def left(self, now_s: float) -> None:
        """Note that a request stopped waiting."""
        if self._last_s is not None:
            interval_s = max(0.0, now_s - self._last_s)
            old_s = self._interval_s
            self._interval_s = interval_s if old_s is None else 0.95 * old_s + 0.05 * interval_s
        self._last_s = now_s

    def retry_after_s(self, places: int) -> float:
        """Return when about so many places will be free: from 0.05 to 60 seconds, 1 before anything was measured."""
        if self._interval_s is None:
            return 1.0
        return min(60.0, max(0.05, places * self._interval_s))
