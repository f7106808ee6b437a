"""Eviction policies that each break one promise; ``Good`` breaks none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from attrs import define, frozen

from kimicore.contracts import BlockKey

Evictable = Callable[[BlockKey], bool]


class GoodState:
    """The longest unused first, written in the plainest way: the whole order is found each time."""

    def __init__(self) -> None:
        self.used: dict[BlockKey, int] = {}
        self.parent: dict[BlockKey, BlockKey | None] = {}
        self.depth: dict[BlockKey, int] = {}
        self.clock = 0

    def added(self, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float) -> None:
        self.parent[key] = parent
        self.depth[key] = depth_blocks
        self.touched(key, now_s)

    def touched(self, key: BlockKey, now_s: float) -> None:
        self.clock += 1
        self.used[key] = self.clock

    def removed(self, key: BlockKey) -> None:
        self.used.pop(key, None)
        self.parent.pop(key, None)
        self.depth.pop(key, None)

    def importance(self, keys: Sequence[BlockKey], values: Sequence[float]) -> None:
        pass

    def ranked(self) -> list[BlockKey]:
        return sorted(self.used, key=self.used.__getitem__)

    def order(self, evictable: Evictable) -> list[BlockKey]:
        """Everything that can go, in the order in which it goes."""
        found: list[BlockKey] = []
        left = self.ranked()
        while True:
            more = [key for key in left if evictable(key)]
            if not more:
                return found
            found += more
            left = [key for key in left if key not in more]

    def victims(self, count: int, evictable: Evictable, now_s: float) -> Any:
        return self.order(evictable)[:count]


class Raises(GoodState):
    def importance(self, keys: Sequence[BlockKey], values: Sequence[float]) -> None:
        if max(values) > 3.0:
            raise RuntimeError("too important")


class NamesHeld(GoodState):
    def victims(self, count: int, evictable: Evictable, now_s: float) -> Any:
        right = self.order(evictable)
        rest = [key for key in self.ranked() if key not in right]
        return [*right, *rest][:count]


class NamesTwice(GoodState):
    def order(self, evictable: Evictable) -> list[BlockKey]:
        right = super().order(evictable)
        return [*right[:2], right[0], *right[2:]] if len(right) > 2 else right


class RootsFirst(GoodState):
    def order(self, evictable: Evictable) -> list[BlockKey]:
        return sorted(super().order(evictable), key=self.depth.__getitem__)


class TooFew(GoodState):
    def victims(self, count: int, evictable: Evictable, now_s: float) -> Any:
        return self.order(evictable)[: max(1, count - 1)]


class TooMany(GoodState):
    def victims(self, count: int, evictable: Evictable, now_s: float) -> Any:
        return self.order(evictable)[: count + 1]


class Endless(GoodState):
    def victims(self, count: int, evictable: Evictable, now_s: float) -> Any:
        return itertools.cycle(self.order(evictable) or [b"nobody"])


class Exits(GoodState):
    def importance(self, keys: Sequence[BlockKey], values: Sequence[float]) -> None:
        if max(values) > 3.0:
            raise SystemExit(3)


class AsksAboutGone(GoodState):
    def __init__(self) -> None:
        super().__init__()
        self.gone: list[BlockKey] = []

    def added(self, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float) -> None:
        super().added(key, parent, depth_blocks, now_s)
        self.gone = []

    def removed(self, key: BlockKey) -> None:
        super().removed(key)
        self.gone = [key]

    def victims(self, count: int, evictable: Evictable, now_s: float) -> Any:
        for key in self.gone:
            evictable(key)
        return super().victims(count, evictable, now_s)


class DependsOnCount(GoodState):
    """Asked for one block it takes the last that nothing is built on, asked for more the longest unused."""

    def victims(self, count: int, evictable: Evictable, now_s: float) -> Any:
        right = self.order(evictable)
        if count != 1:
            return right[:count]
        above = {self.parent[key] for key in self.used}
        return [key for key in right if key not in above][-1:]


class NewestFirst(GoodState):
    def ranked(self) -> list[BlockKey]:
        return super().ranked()[::-1]


class ImportantFirst(GoodState):
    def __init__(self) -> None:
        super().__init__()
        self.values: dict[BlockKey, float] = {}

    def importance(self, keys: Sequence[BlockKey], values: Sequence[float]) -> None:
        self.values.update(zip(keys, values, strict=True))

    def removed(self, key: BlockKey) -> None:
        super().removed(key)
        self.values.pop(key, None)

    def ranked(self) -> list[BlockKey]:
        return sorted(super().ranked(), key=lambda key: -self.values.get(key, 1.0))


class RemembersAll(GoodState):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[BlockKey] = set()

    def touched(self, key: BlockKey, now_s: float) -> None:
        super().touched(key, now_s)
        self.seen.add(key)


class GrowsWithoutKeys(GoodState):
    """Keeps no key, and yet a number for every event."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def touched(self, key: BlockKey, now_s: float) -> None:
        super().touched(key, now_s)
        self.times.append(now_s + 0.5)


class HashOrder(GoodState):
    """Blocks let go at one moment go in the order of a set."""

    def __init__(self) -> None:
        super().__init__()
        self.when: dict[BlockKey, float] = {}

    def touched(self, key: BlockKey, now_s: float) -> None:
        super().touched(key, now_s)
        self.when[key] = now_s

    def removed(self, key: BlockKey) -> None:
        super().removed(key)
        self.when.pop(key, None)

    def ranked(self) -> list[BlockKey]:
        return sorted(set(self.used), key=self.when.__getitem__)


class ShallowOnly(GoodState):
    """Was never tried on sequences of more than five blocks."""

    def added(self, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float) -> None:
        if depth_blocks > 4:
            raise IndexError(depth_blocks)
        super().added(key, parent, depth_blocks, now_s)


@frozen
class Good:
    """Settings that start a given state."""

    state: Callable[[], Any] = GoodState
    name: str = "planted"

    def start(self, capacity_blocks: int, ghost_blocks: int, seed: int) -> Any:
        return self.state()


@define
class Mutable:
    """Settings that can be changed."""

    name: str = "planted"

    def start(self, capacity_blocks: int, ghost_blocks: int, seed: int) -> GoodState:
        return GoodState()


BAD: list[tuple[str, Callable[[], Any]]] = [
    ("settings", Mutable),
    ("never-raises", lambda: Good(Raises)),
    ("never-raises", lambda: Good(Exits)),
    ("evictable", lambda: Good(NamesHeld)),
    ("distinct", lambda: Good(NamesTwice)),
    ("leaf-first", lambda: Good(RootsFirst)),
    ("enough", lambda: Good(TooFew)),
    ("enough", lambda: Good(TooMany)),
    ("asks", lambda: Good(AsksAboutGone)),
    ("order", lambda: Good(DependsOnCount)),
    ("recent", lambda: Good(NewestFirst)),
    ("important", lambda: Good(ImportantFirst)),
    ("bounded", lambda: Good(RemembersAll)),
    ("bounded", lambda: Good(GrowsWithoutKeys)),
    ("repeatable", lambda: Good(HashOrder)),
    ("engine", lambda: Good(ShallowOnly)),
]
