"""The threads that carry blocks: bytes arrive as they left, and no worker dies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kimicore.clock import MonotonicClock
from kimicore.kv.disk import DiskStore
from kimicore.kv.host import HostArena
from kimicore.mover import Mover
from kimicore.moves import LOST, BlockMove, Transfer, Transferred
from kimicore.types import KVClass

SLOTS = 12


def classes(dtype: str) -> tuple[KVClass, ...]:
    """Return two classes whose blocks have 3 and 1 KiB."""
    return tuple(
        KVClass(f"class {kind}", tuple(range(layers)), None, dtype, (layers, 2, 1, 16, 4), layers * 1024)
        for kind, layers in enumerate((3, 1))
    )


class Rig:
    """A mover over arenas of random bytes, NaN patterns and all."""

    def __init__(self, folder: Path | None, dtype: str = "bfloat16") -> None:
        self.classes = classes(dtype)
        chance = np.random.default_rng(1)
        self.device = chance.integers(0, 256, SLOTS * 3072, np.uint8)
        self.host = HostArena(self.classes, 3072, SLOTS).memory
        self.store = None if folder is None else DiskStore.open(folder, 64 << 20)
        self.over = threading.Semaphore(0)
        self.mover = Mover(self.classes, self.device, self.host, self.store, [b"a" * 16, b"b" * 16], MonotonicClock())
        self.mover.notify = self.over.release
        self.mover.start()
        self.number = 0

    def move(self, source: Any, target: Any, *moves: BlockMove) -> Transferred:
        """Move blocks and wait until that is over."""
        self.number += 1
        self.mover.submit_nowait(Transfer(self.number, source, target, moves))
        assert self.over.acquire(timeout=20)
        (moved,) = self.mover.poll()
        assert moved.transfer.number == self.number
        assert moved.begun_s <= moved.ended_s
        return moved

    def bytes_of(self, memory: Any, kind: int, slot: int) -> bytes:
        """Return a block's bytes."""
        size = self.classes[kind].block_bytes
        return bytes(memory[slot * size : (slot + 1) * size])


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Make rigs that are closed at the end."""
    made: list[Rig] = []

    def make(dtype: str = "bfloat16", *, disk: bool = True) -> Rig:
        made.append(Rig(tmp_path / "kv" if disk else None, dtype))
        return made[-1]

    yield make
    for one in made:
        one.mover.close(5.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_bytes_that_come_back_are_those_that_left(rig: Callable[..., Rig], dtype: str) -> None:
    """Device to host to disk and back to another slot: each block has the bytes that it had, in every dtype."""
    made = rig(dtype)
    names = [(kind, bytes([kind, at]) * 8) for kind in (0, 1) for at in range(4)]
    left = {key: made.bytes_of(made.device, kind, 1 + at % 4) for at, (kind, key) in enumerate(names)}
    down = [BlockMove(kind, key, 1 + at % 4, 3 + at % 4 + 4 * kind) for at, (kind, key) in enumerate(names)]
    assert all(size > 0 for size in made.move("device", "host", *down).stored)
    out = [BlockMove(one.kind, one.key, one.target, 0) for one in down]
    assert all(size > 0 for size in made.move("host", "disk", *out).stored)
    made.device[:] = 0
    assert all(size > 0 for size in made.move("host", "device", *[_up(one) for one in down]).stored)
    for one in down:
        assert made.bytes_of(made.device, one.kind, one.source + 5) == left[one.key]
    made.device[:] = 0
    back = [BlockMove(one.kind, one.key, 0, one.source) for one in down]
    assert all(size > 0 for size in made.move("disk", "device", *back).stored)
    for one in down:
        assert made.bytes_of(made.device, one.kind, one.source) == left[one.key]


def _up(one: BlockMove) -> BlockMove:
    return BlockMove(one.kind, one.key, one.target, one.source + 5)


def test_neighbours_are_left_alone(rig: Callable[..., Rig]) -> None:
    """A move writes its targets and not a byte beside them, whether slots lie side by side or not."""
    made = rig(disk=False)
    made.host[:] = 7
    moves = [BlockMove(1, b"k" * 16, source, target) for source, target in ((1, 9), (2, 10), (3, 11), (7, 2), (8, 4))]
    made.move("device", "host", *moves)
    for slot in range(SLOTS):
        source = {9: 1, 10: 2, 11: 3, 2: 7, 4: 8}.get(slot)
        want = b"\7" * 1024 if source is None else made.bytes_of(made.device, 1, source)
        assert made.bytes_of(made.host, 1, slot) == want


def test_a_copy_in_place_is_over_when_it_returns(rig: Callable[..., Rig]) -> None:
    """What has to be copied before a step is copied on the calling thread."""
    made = rig(disk=False)
    assert made.mover.copy([BlockMove(0, b"k" * 16, 2, 5), BlockMove(1, b"l" * 16, 30, 1)]) == [3072, 1024]
    assert made.bytes_of(made.host, 0, 5) == made.bytes_of(made.device, 0, 2)
    assert made.bytes_of(made.host, 1, 1) == made.bytes_of(made.device, 1, 30)
    assert not made.mover.over


def test_what_the_disk_does_not_have_is_told_apart(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that is not there is lost; one that cannot be read just now is a failure."""
    made = rig()
    key = b"k" * 16
    made.move("device", "host", BlockMove(0, key, 1, 1))
    made.move("host", "disk", BlockMove(0, key, 1, 0))
    assert made.move("disk", "device", BlockMove(0, b"no" * 8, 0, 2)).stored == (LOST,)
    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "get", lambda *arguments: False)
        assert made.move("disk", "device", BlockMove(0, key, 0, 2)).stored == (0,)
    assert made.move("disk", "device", BlockMove(0, key, 0, 2)).stored == (3072,)
    made.mover.discard_nowait([key])
    made.move("host", "disk", BlockMove(0, b"o" * 16, 1, 0))  # behind it in the same line
    assert made.move("disk", "device", BlockMove(0, key, 0, 2)).stored == (LOST,)


@pytest.mark.filterwarnings("default")
def test_a_worker_survives_whatever_goes_wrong(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A move that raises is told as failed, and the same worker carries the next one."""
    made = rig()
    with monkeypatch.context() as patch:
        for name in ("get", "put"):
            patch.setattr(DiskStore, name, _broken)
        moves = (BlockMove(0, b"k" * 16, 1, 0), BlockMove(0, b"l" * 16, 2, 0))
        assert made.move("host", "disk", *moves).stored == (0, 0)
        assert made.move("disk", "device", BlockMove(0, b"k" * 16, 0, 1)).stored == (0,)
        assert made.move("device", "host", BlockMove(0, b"k" * 16, 99, 1)).stored == (0,)  # outside of the arena
    assert "counts as a miss" in caplog.text
    for source, target in (("device", "host"), ("host", "disk"), ("disk", "device")):
        assert made.move(source, target, BlockMove(0, b"k" * 16, 1, 1)).stored[0] > 0


def _broken(*arguments: object) -> Any:
    raise RuntimeError("planted")


def test_closing_waits_so_long_and_no_longer(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing ends idle workers at once, and leaves one that hangs to itself."""
    made = rig()
    go = threading.Event()
    monkeypatch.setattr(DiskStore, "put", lambda self, blocks: go.wait(30) and [0])
    made.mover.submit_nowait(Transfer(1, "host", "disk", (BlockMove(0, b"k" * 16, 1, 0),)))
    clock = MonotonicClock()
    begun_s = clock()
    made.mover.close(0.3)
    assert clock() - begun_s < 5.0
    go.set()
    made.mover.close(5.0)
    names = {one.name for one in threading.enumerate()}
    assert not any(name.startswith(("kimicore-copy", "kimicore-read", "kimicore-write")) for name in names)


def test_a_long_load_in_portions(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that is larger than what is read ahead at once comes in portions; in it, what was damaged or was never
    there is lost, and every other block is right.
    """
    monkeypatch.setattr("kimicore.kv.ahead.AHEAD_BYTES", 10_000)
    made = rig()
    names = [bytes([at]) * 16 for at in range(10)]
    down = [BlockMove(0, key, at, at + 1) for at, key in enumerate(names)]
    made.move("device", "host", *down)
    made.move("host", "disk", *[BlockMove(0, one.key, one.target, 0) for one in down])
    left = [made.bytes_of(made.device, 0, at) for at in range(10)]
    assert made.store is not None
    place = made.store._log.index[names[4]]
    path = Path(made.store._folder.path) / place.segment.name
    with path.open("r+b") as file:
        file.seek(place.record.offset + 300)
        file.write(b"planted")
    made.device[:] = 0
    back = [BlockMove(0, key, 0, at) for at, key in enumerate(names)]
    stored = made.move("disk", "device", *back[:7], BlockMove(0, b"no" * 8, 0, 11), *back[7:]).stored
    assert stored == (3072, 3072, 3072, 3072, LOST, 3072, 3072, LOST, 3072, 3072, 3072)
    assert [made.bytes_of(made.device, 0, at) for at in range(10) if at != 4] == left[:4] + left[5:]
    assert made.mover.faults() == (1, 0)


def test_others_read_ahead_while_one_decodes(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many threads as there are readers decode at once; the disk is read meanwhile, and all ends when they go on."""
    made = rig()
    names = [bytes([at]) * 16 for at in range(6)]
    down = [BlockMove(0, key, at, at + 1) for at, key in enumerate(names)]
    made.move("device", "host", *down)
    made.move("host", "disk", *[BlockMove(0, one.key, one.target, 0) for one in down])
    go, fetched, inside = threading.Event(), threading.Semaphore(0), []
    read_ahead, get = DiskStore.read_ahead, DiskStore.get

    def fetching(self: DiskStore, *arguments: Any) -> Any:
        ahead = read_ahead(self, *arguments)
        fetched.release()
        return ahead

    def getting(self: DiskStore, *arguments: Any) -> bool:
        inside.append(threading.get_ident())
        assert go.wait(20)
        return get(self, *arguments)

    monkeypatch.setattr(DiskStore, "read_ahead", fetching)
    monkeypatch.setattr(DiskStore, "get", getting)
    made.device[:] = 0
    for at, key in enumerate(names):
        made.mover.submit_nowait(Transfer(100 + at, "disk", "device", (BlockMove(0, key, 0, at),)))
    for _ in range(4):
        assert fetched.acquire(timeout=20)
    assert not fetched.acquire(timeout=0.05), "each thread reads ahead once"
    assert len(inside) <= 2
    go.set()
    for _ in names:
        assert made.over.acquire(timeout=20)
    assert {one.stored for one in made.mover.poll()} == {(3072,)}
    assert [made.bytes_of(made.device, 0, at) for at in range(6)] == [
        made.bytes_of(made.host, 0, at + 1) for at in range(6)
    ]


@pytest.mark.filterwarnings("default")
def test_a_failure_keeps_nobody_from_decoding(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads that raise, more often than threads may decode at once, leave the turn to the next one."""
    made = rig()
    made.move("device", "host", BlockMove(0, b"k" * 16, 1, 1))
    made.move("host", "disk", BlockMove(0, b"k" * 16, 1, 0))
    for name in ("get", "read_ahead"):
        with monkeypatch.context() as patch:
            patch.setattr(DiskStore, name, _broken)
            for _ in range(6):
                assert made.move("disk", "device", BlockMove(0, b"k" * 16, 0, 2)).stored == (0,)
    assert made.move("disk", "device", BlockMove(0, b"k" * 16, 0, 2)).stored == (3072,)


def test_closing_while_a_read_hangs(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits so long for a read that is under way; when it comes, it gives nothing, and its thread ends."""
    made = rig()
    made.move("device", "host", BlockMove(0, b"k" * 16, 1, 1))
    made.move("host", "disk", BlockMove(0, b"k" * 16, 1, 0))
    go, begun = threading.Event(), threading.Event()
    store = made.store
    assert store is not None
    files = store._log._files
    real = files.read

    def read(fd: int, into: memoryview, offset: int) -> int:
        begun.set()
        assert go.wait(20)
        return real(fd, into, offset)

    monkeypatch.setattr(files, "read", read)
    segment = store._log.index[b"k" * 16].segment
    made.mover.submit_nowait(Transfer(9, "disk", "device", (BlockMove(0, b"k" * 16, 0, 2),)))
    assert begun.wait(20)
    made.mover.close(0.1)
    assert segment.read_fd >= 0, "still being read"
    go.set()
    assert made.over.acquire(timeout=20)
    assert [one.stored for one in made.mover.poll()] == [(LOST,)]
    made.mover.close(5.0)
    assert segment.read_fd == -1
