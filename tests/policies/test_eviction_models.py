"""The queue policies against slow models of them, written from their definitions, on random streams of events."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimicore.plugins import resolve

CAPACITY = 8
STREAMS = st.lists(st.integers(0, 14), max_size=80)


def key(number: int) -> bytes:
    return b"k%d" % number


class Model:
    """A cache of single blocks: what is there, and how the policy would choose; lists, oldest first."""

    def __init__(self) -> None:
        self.cached: list[int] = []

    def add(self, number: int) -> None:
        raise NotImplementedError

    def touch(self, number: int) -> None:
        raise NotImplementedError

    def evict(self) -> int:
        raise NotImplementedError


class LruModel(Model):
    def add(self, number: int) -> None:
        self.cached.append(number)

    def touch(self, number: int) -> None:
        self.cached.remove(number)
        self.cached.append(number)

    def evict(self) -> int:
        return self.cached.pop(0)


class LfuModel(LruModel):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []

    def add(self, number: int) -> None:
        super().add(number)
        self.log.append(number)

    def touch(self, number: int) -> None:
        super().touch(number)
        self.log.append(number)

    def evict(self) -> int:
        gone = min(self.cached, key=lambda one: (self.log.count(one), self.cached.index(one)))
        self.cached.remove(gone)
        self.log = [one for one in self.log if one != gone]
        return gone


class S3FifoModel(Model):
    """Algorithm 1 of the paper: S of a tenth, M, ghosts as many as M; one block is evicted at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.freq: dict[int, int] = {}

    def add(self, number: int) -> None:
        self.cached.append(number)
        self.freq[number] = 0
        if number in self.ghosts:
            self.ghosts.remove(number)
            self.main.append(number)
        else:
            self.small.append(number)

    def touch(self, number: int) -> None:
        self.freq[number] = min(self.freq[number] + 1, 3)

    def evict(self) -> int:
        while True:
            if self.small and len(self.small) >= 1 and len(self.main) <= CAPACITY - 1:
                number = self.small.pop(0)
                if self.freq[number] >= 2:
                    self.freq[number] = 0
                    self.main.append(number)
                    continue
                self.ghosts = [*self.ghosts, number][-(CAPACITY - 1) :]
            else:
                number = self.main.pop(0)
                if self.freq[number] > 0:
                    self.freq[number] -= 1
                    self.main.append(number)
                    continue
            self.cached.remove(number)
            return number


class ArcModel(Model):
    """ARC of the paper in its names; the victim is chosen before the next block is known."""

    def __init__(self) -> None:
        super().__init__()
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []
        self.p = 0.0

    def add(self, number: int) -> None:
        self.cached.append(number)
        if number in self.b1:
            self.p = min(self.p + max(len(self.b2) / len(self.b1), 1), CAPACITY)
            self.b1.remove(number)
            self.t2.append(number)
        elif number in self.b2:
            self.p = max(self.p - max(len(self.b1) / len(self.b2), 1), 0)
            self.b2.remove(number)
            self.t2.append(number)
        else:
            self.t1.append(number)

    def touch(self, number: int) -> None:
        (self.t1 if number in self.t1 else self.t2).remove(number)
        self.t2.append(number)

    def evict(self) -> int:
        if self.t1 and (len(self.t1) > self.p or not self.t2):
            number = self.t1.pop(0)
            self.b1.append(number)
        else:
            number = self.t2.pop(0)
            self.b2.append(number)
        self.cached.remove(number)
        while self.b1 and len(self.t1) + len(self.b1) > CAPACITY:
            self.b1.pop(0)
        while self.b2 and len(self.t1 + self.t2 + self.b1 + self.b2) > 2 * CAPACITY:
            self.b2.pop(0)
        return number


MODELS: dict[str, Callable[[], Model]] = {"arc": ArcModel, "lfu": LfuModel, "lru": LruModel, "s3-fifo": S3FifoModel}


@pytest.mark.parametrize("name", sorted(MODELS))
@settings(max_examples=200, deadline=None)
@given(stream=STREAMS)
def test_victims_are_those_of_the_model(name: str, stream: list[int]):
    """On any stream of uses the policy evicts the very blocks that a plain model of its definition evicts."""
    model = MODELS[name]()
    state = resolve("eviction", name).start(CAPACITY, 4 * CAPACITY, 0)
    for at, number in enumerate(stream):
        if number in model.cached:
            model.touch(number)
            state.touched(key(number), float(at))
            continue
        if len(model.cached) == CAPACITY:
            gone = key(model.evict())
            assert state.victims(1, lambda one: True, float(at)) == [gone]
            state.removed(gone)
        model.add(number)
        state.added(key(number), None, 0, float(at))


@pytest.mark.parametrize("name", ["activity-importance", *sorted(MODELS)])
@settings(max_examples=60, deadline=None)
@given(stream=STREAMS, held=st.sets(st.integers(0, 14)))
def test_held_blocks_are_asked_about_once(name: str, stream: list[int], held: set[int]):
    """A block that was found held is not asked about again while there are others, and comes back once it is used."""
    state = resolve("eviction", name).start(100, 400, 0)
    known: set[int] = set()
    for at, number in enumerate(stream):
        if number in known:
            state.touched(key(number), float(at))
        else:
            state.added(key(number), None, 0, float(at))
        known.add(number)
    busy = {key(one) for one in held}
    free = sorted(key(one) for one in known - held)
    asked: list[bytes] = []

    def evictable(one: bytes) -> bool:
        asked.append(one)
        return one not in busy

    named = state.victims(len(free), evictable, 100.0)
    assert sorted(named) == free
    assert len(set(asked)) == len(asked)
    for one in named:
        state.removed(one)
    for number in sorted(known & held):
        state.touched(key(number), 101.0)
    busy.clear()
    assert sorted(state.victims(20, evictable, 102.0)) == sorted(key(one) for one in known & held)
