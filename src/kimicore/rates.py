"""How fast blocks come up from a tier, as measured."""

from __future__ import annotations

__all__ = ["Rates"]


class Rates:
    """How fast blocks come from a tier, learned from every transfer."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.queued_bytes = 0  # on their way now
        self._measured = False

    def load_s(self, load_bytes: int) -> float:
        """Return the seconds until so many bytes are here, those before them included."""
        return self.latency_s + (self.queued_bytes + load_bytes) / self.bytes_per_s if load_bytes else 0.0

    def observe(self, load_bytes: int, seconds: float) -> None:
        """Learn from a transfer; several at once are each slower than the tier is, which errs on the careful side."""
        if load_bytes and seconds > 0.0:
            weight = 0.1 if self._measured else 0.5
            self._measured = True
            per_byte = (1.0 - weight) / self.bytes_per_s + weight * seconds / load_bytes
            self.bytes_per_s = 1.0 / per_byte
