"""A store against a plain model of it: whatever is done, and whatever befalls its files, it gives what was put."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kimicore.kv.ahead import Ahead

from .rig import LIMIT, folder_bytes, found, key, numbers, opened, put, segments

LIMIT_BYTES = LIMIT // 2
NUMBERS = st.integers(0, 60)
SOME = st.lists(NUMBERS, min_size=1, max_size=8)


def damage(paths: list[Path], how: str, rng: random.Random) -> None:
    """Do something to one or two of the files."""
    path = rng.choice(paths)
    data = path.read_bytes()
    at = rng.randrange(len(data) + 1)
    if how == "cut":
        os.truncate(path, at)
    elif how == "swap":
        other = rng.choice(paths)
        theirs = other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(data)
    elif how == "remove":
        path.unlink()
    else:
        page = at // 4096 * 4096
        count = rng.choice((1, 40, 4096))
        changed = {
            "flip": data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if at < len(data) else data,
            "noise": data[:at] + rng.randbytes(min(count, len(data) - at)) + data[at + count :],
            "zero page": data[:page] + bytes(min(4096, len(data) - page)) + data[page + 4096 :],
            "shift": data[:page] + data[page + 4096 :],
            "junk": data + rng.randbytes(count // 4 + 1),
        }[how]
        with path.open("r+b") as file:
            file.write(changed)
            file.truncate(len(changed))


class StoreMachine(RuleBasedStateMachine):
    """``sure``: blocks that must be found. ``put_ever``: blocks that may be. ``gone``: discarded since the start.

    A start reads no payloads, so blocks that were there while files were damaged are in ``doubt`` until they are read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kimicore-tier-"))
        self.sure: set[int] = set()
        self.put_ever: set[int] = set()
        self.gone: set[int] = set()
        self.doubt: set[int] = set()
        self.damaged = False  # since the start
        self.ahead: Ahead | None = None

    @initialize(direct=st.sampled_from(["auto", "off"]))
    def start(self, direct: str) -> None:
        self.store = opened(self.folder, LIMIT_BYTES, direct=direct)

    @rule(wanted=SOME)
    def put(self, wanted: list[int]) -> None:
        room = self.store.room_bytes
        sizes = put(self.store, wanted)
        for number, size in zip(wanted, sizes, strict=True):
            assert size % 4096 == 0
            if size:
                self.put_ever.add(number)
                self.gone.discard(number)
                self.sure |= {number} if not self.damaged and number not in self.doubt else set()
        if room >= 12288 * len(wanted) and not self.damaged:
            assert all(sizes), "there was room"

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        hit = found(self.store, number, ahead=self.ahead)
        if number not in self.gone:
            self.doubt.discard(number)
        assert hit or number not in self.sure
        assert not hit or (number in self.put_ever and number not in self.gone)

    @rule(wanted=SOME)
    def read_ahead(self, wanted: list[int]) -> None:
        self.ahead = self.store.read_ahead([key(number) for number in wanted])
        assert self.ahead.keys == len(wanted)

    @rule(wanted=SOME)
    def discard(self, wanted: list[int]) -> None:
        self.store.discard(map(key, wanted))
        self.sure -= set(wanted)
        self.gone |= set(wanted)

    @rule()
    def compact(self) -> None:
        before = set(numbers(self.store))
        self.store.compact()
        after = set(numbers(self.store))
        assert after <= before
        assert self.damaged or before - after <= self.doubt
        self.doubt &= after | self.gone

    @rule(direct=st.sampled_from(["auto", "off"]))
    def restart(self, direct: str) -> None:
        self.store.close()
        self.store = opened(self.folder, LIMIT_BYTES, direct=direct)
        self.gone.clear()
        if self.damaged:
            self.doubt |= set(numbers(self.store))
        self.damaged = False

    @precondition(lambda self: segments(self.folder))
    @rule(
        how=st.sampled_from(["cut", "swap", "remove", "flip", "noise", "zero page", "shift", "junk"]),
        seed=st.integers(0, 2**32 - 1),
    )
    def damage(self, how: str, seed: int) -> None:
        damage(segments(self.folder), how, random.Random(seed))
        self.sure.clear()
        self.damaged = True

    @invariant()
    def limit_is_kept(self) -> None:
        if not hasattr(self, "store"):
            return
        assert folder_bytes(self.folder) <= LIMIT_BYTES
        if not self.damaged:
            assert folder_bytes(self.folder) <= self.store.used_bytes <= LIMIT_BYTES
        self.store._log.check_integrity()
        listed = numbers(self.store)
        assert len(set(listed)) == len(listed)
        assert self.sure <= set(listed) <= self.put_ever - self.gone
        stats = self.store.stats()
        assert stats.live_bytes == sum(entry.stored_bytes for entry in self.store.entries())
        assert (stats.write_failures, stats.read_failures) == (0, 0) or self.damaged

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                self.restart("auto")
                assert all(found(self.store, number) for number in self.sure)
                for number in self.put_ever:
                    found(self.store, number)
                self.store.close()
        finally:
            shutil.rmtree(self.folder)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.__doc__ = """Put, read ahead, get, discard, compact, restart and damage in any order: right bytes or a
miss, within the limit, and what is not damaged is found.
"""
