"""A clock that moves when it is told to."""

from __future__ import annotations

__all__ = ["ManualClock"]


class ManualClock:
    """Tells ``now_s`` and goes forward by :meth:`advance` only."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Go forward; a clock never goes back, so a negative number is a ValueError."""
        if seconds < 0:
            raise ValueError(f"seconds={seconds}: a clock never goes back")
        self.now_s += seconds
