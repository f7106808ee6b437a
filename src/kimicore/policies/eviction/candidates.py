"""What eviction policies with an order of their own share: blocks that cannot go yet wait apart, and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kimicore.contracts import BlockKey

__all__ = ["Candidates"]


class Candidates:
    """Asks for victims in a policy's order, at a cost that does not depend on how many blocks are held.

    A policy gives its next candidate with ``_next``, which takes it out of the policy's queues, and takes one back with
    ``_back``. A candidate that may not go, since it is held or a cached block follows it, is put aside. It comes back
    when it is used, which letting it go is, or when a block that follows it has left. A block that was named is put
    aside as well, until it is told to have left: so it is not lost where the caller kept it.
    """

    def __init__(self) -> None:
        self._parent: dict[BlockKey, BlockKey | None] = {}  # of the blocks that are there
        self._aside: dict[BlockKey, None] = {}

    def _next(self, now_s: float) -> BlockKey | None:
        """Take the block that would go first out of the queues, or return None where they are empty."""
        raise NotImplementedError

    def _back(self, key: BlockKey) -> None:
        """Put a block that was taken out back as the next candidate of its queue."""
        raise NotImplementedError

    def importance(self, keys: Sequence[BlockKey], values: Sequence[float]) -> None:
        """Attention does not count here."""

    def victims(self, count: int, evictable: Callable[[BlockKey], bool], now_s: float) -> list[BlockKey]:
        """Return the blocks that go first."""
        found: list[BlockKey] = []
        named: set[BlockKey] = set()
        parents, aside = self._parent, self._aside
        while len(found) < count:
            key = self._next(now_s)
            if key is None:
                break
            aside[key] = None
            if evictable(key):
                found.append(key)
                named.add(key)
                parent = parents[key]
                if parent is not None and parent in aside and parent not in named:
                    del aside[parent]
                    self._back(parent)
        if len(found) < count:
            self._from_aside(found, named, count, evictable)
        return found

    def _from_aside(
        self, found: list[BlockKey], named: set[BlockKey], count: int, evictable: Callable[[BlockKey], bool]
    ) -> None:
        """Ask about the blocks that were put aside: some may be free to go without having been used."""
        for first in list(self._aside):
            key: BlockKey | None = first
            while len(found) < count and key is not None and key in self._aside and key not in named:
                if not evictable(key):
                    break
                found.append(key)
                named.add(key)
                key = self._parent[key]
            if len(found) == count:
                return

    def _left(self, key: BlockKey) -> bool:
        """Forget a block that left; True where it was aside, so that it stands in no queue."""
        parent = self._parent.pop(key)
        if parent is not None and parent in self._aside:
            del self._aside[parent]
            self._back(parent)
        if key in self._aside:
            del self._aside[key]
            return True
        return False
