"""What the tests of the disk tier share: blocks whose bytes follow from their number, and planted faults."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kimicore.kv.ahead import Ahead
from kimicore.kv.disk import DiskBlock, DiskStore
from kimicore.kv.files import Buffer, Files
from kimicore.kv.record import PAGE_BYTES, Record, parse_record

__all__ = [
    "LAYOUT",
    "LIMIT",
    "SEGMENT",
    "Clock",
    "FaultyFiles",
    "block",
    "content",
    "flip",
    "folder_bytes",
    "found",
    "key",
    "numbers",
    "opened",
    "overwrite",
    "put",
    "records",
    "segments",
]

LAYOUT = hashlib.blake2b(b"layout", digest_size=16).digest()
SEGMENT = 64 << 10
LIMIT = 8 * SEGMENT


def key(number: int) -> bytes:
    """The key of block ``number``."""
    return number.to_bytes(16, "little")


@lru_cache(maxsize=1024)
def content(number: int, size: int = 6000) -> bytes:
    """The bytes of block ``number``: bfloat16-like, so that they shrink, but for every fourth block, which is noise."""
    rng = np.random.default_rng(number)
    if number % 4 == 0:
        return rng.bytes(size)
    wide = rng.standard_normal(size // 2 + 1).astype(np.float32).view(np.uint32)
    return bytes((wide >> 16).astype(np.uint16).tobytes()[:size])


def block(number: int, size: int = 6000) -> DiskBlock:
    """Block ``number``, to put."""
    return DiskBlock(key(number), LAYOUT, 2, memoryview(content(number, size)))


def put(store: DiskStore, wanted: Iterable[int], size: int = 6000) -> list[int]:
    """Put blocks by number."""
    return store.put([block(number, size) for number in wanted])


def found(store: DiskStore, number: int, size: int = 6000, ahead: Ahead | None = None) -> bool:
    """Whether the store gives block ``number``; what it gives is right."""
    out = memoryview(bytearray(b"\xee" * size))
    if not store.get(key(number), LAYOUT, out, ahead):
        return False
    assert out == content(number, size), f"block {number} came back with other bytes"
    return True


def numbers(store: DiskStore) -> list[int]:
    """The numbers of the blocks that the store says it has, oldest first."""
    return [int.from_bytes(entry.key, "little") for entry in store.entries()]


def opened(folder: Path, limit: int = LIMIT, **settings: Any) -> DiskStore:
    """A store of small segments."""
    return DiskStore.open(folder, limit, **{"segment_bytes": SEGMENT, **settings})


def segments(folder: Path) -> list[Path]:
    """The folder's segment files, oldest first."""
    return sorted(folder.glob("segment-*.kv"))


def folder_bytes(folder: Path) -> int:
    """What the files of the folder take up, as the system says: length or disk space, whichever is more."""
    total = 0
    for name in os.listdir(folder):
        status = os.lstat(folder / name)
        total += max(status.st_size, status.st_blocks * 512)
    return total


def records(path: Path) -> list[Record]:
    """The records of a segment file whose headers are whole."""
    data = memoryview(path.read_bytes())
    pages = (parse_record(data[at:]) for at in range(PAGE_BYTES, len(data), PAGE_BYTES))
    return [one for one in pages if isinstance(one, Record)]


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Write into the middle of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    """Flip a bit of a file."""
    overwrite(path, offset, bytes([path.read_bytes()[offset] ^ 0x10]))


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FaultyFiles(Files):
    """The system's calls, of which some fail: ``plan`` is asked before each call by its name and may raise.

    ``room`` bytes can still be written in all; a write that does not fit is cut short, as on a full disk.
    """

    def __init__(self) -> None:
        self.plan: Callable[[str], None] = lambda call: None
        self.room: int | None = None
        self.calls: list[str] = []
        self._direct: set[int] = set()

    def fail(self, *calls: str, code: int = errno.EIO) -> None:
        """From now on these calls fail; none: all work again."""

        def plan(call: str) -> None:
            if call in calls:
                raise OSError(code, os.strerror(code))

        self.plan = plan

    def _before(self, call: str) -> None:
        self.calls.append(call)
        self.plan(call)

    def open(self, folder: int, name: str, flags: int) -> int:
        direct = bool(flags & os.O_DIRECT)
        self._before("create" if flags & os.O_CREAT else "open_direct" if direct else "open")
        fd = super().open(folder, name, flags)
        (self._direct.add if direct else self._direct.discard)(fd)
        return fd

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self._before("read_direct" if fd in self._direct else "read")
        return super().read(fd, into, offset)

    def write(self, fd: int, parts: Sequence[Buffer], offset: int) -> int:
        self._before("write")
        if self.room is None:
            return super().write(fd, parts, offset)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = super().write(fd, [memoryview(b"".join(parts))[: self.room]], offset)
        self.room -= count
        return count

    def sync(self, fd: int) -> None:
        self._before("sync")
        super().sync(fd)

    def sync_folder(self, folder: int) -> None:
        self._before("sync_folder")
        super().sync_folder(folder)

    def cut(self, fd: int, size_bytes: int) -> None:
        self._before("cut")
        super().cut(fd, size_bytes)

    def remove(self, folder: int, name: str) -> None:
        self._before("remove")
        super().remove(folder, name)

    def status(self, fd: int) -> os.stat_result:
        self._before("status")
        return super().status(fd)
