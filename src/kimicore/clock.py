"""Time as a thing that is handed in, so that every decision can be replayed and tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "MonotonicClock"]


class Clock(Protocol):
    """Something that tells the time in seconds from an arbitrary start and never goes back."""

    def __call__(self) -> float:
        """Return the time in seconds."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def __call__(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()
