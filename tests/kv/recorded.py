"""A record of everything that a store writes, and the folders that a crash at any point of it could leave."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import define, frozen

from kimicore.kv.files import Buffer, Files

__all__ = ["Operation", "RecordingFiles", "crashes"]

PAGE = 4096


@frozen
class Operation:
    """One change: its kind, the file it is of, an offset or length, the bytes. Notes of a test stand among them."""

    kind: str
    file: int = -1
    name: str = ""
    at: int = 0
    data: bytes = b""
    numbers: frozenset[int] = frozenset()


class RecordingFiles(Files):
    """The system's calls, which note what they change. ``most_bytes`` is the most that the files had together."""

    def __init__(self) -> None:
        self.log: list[Operation] = []
        self.most_bytes = 0
        self._files = 0
        self._of_fd: dict[int, int] = {}
        self._names: dict[str, int] = {}
        self._sizes: dict[int, int] = {}

    def note(self, kind: str, numbers: Sequence[int]) -> None:
        """Note what the test knows at this point."""
        self.log.append(Operation(kind, numbers=frozenset(numbers)))

    def _sized(self, file: int, size: int) -> None:
        self._sizes[file] = size
        self.most_bytes = max(self.most_bytes, sum(self._sizes.get(one, 0) for one in self._names.values()))

    def open(self, folder: int, name: str, flags: int) -> int:
        fd = super().open(folder, name, flags)
        if name not in self._names and flags & os.O_CREAT:
            self._files += 1
            self._names[name] = self._files
            self.log.append(Operation("create", self._files, name))
        self._of_fd[fd] = self._names[name]
        return fd

    def write(self, fd: int, parts: Sequence[Buffer], offset: int) -> int:
        count = super().write(fd, parts, offset)
        file = self._of_fd[fd]
        self.log.append(Operation("write", file, at=offset, data=b"".join(parts)[:count]))
        self._sized(file, max(self._sizes.get(file, 0), offset + count))
        return count

    def sync(self, fd: int) -> None:
        super().sync(fd)
        self.log.append(Operation("sync", self._of_fd[fd]))

    def sync_folder(self, folder: int) -> None:
        super().sync_folder(folder)
        self.log.append(Operation("sync_folder"))

    def cut(self, fd: int, size_bytes: int) -> None:
        super().cut(fd, size_bytes)
        self.log.append(Operation("cut", self._of_fd[fd], at=size_bytes))
        self._sized(self._of_fd[fd], size_bytes)

    def remove(self, folder: int, name: str) -> None:
        super().remove(folder, name)
        self.log.append(Operation("remove", self._names.pop(name), name))

    def replace(self, folder: int, old: str, new: str) -> None:
        super().replace(folder, old, new)
        self._names[new] = self._names.pop(old)
        self.log.append(Operation("replace", self._names[new], new, data=old.encode()))


@define
class _Disk:
    """What is on the disk for certain, and what was done since and may be there or not."""

    files: dict[int, bytearray]
    names: dict[str, int]
    waiting: dict[int, list[Operation]]
    waiting_names: list[Operation]

    def take(self, one: Operation) -> None:
        if one.kind in ("write", "cut"):
            self.waiting.setdefault(one.file, []).append(one)
        elif one.kind in ("create", "remove", "replace"):
            self.files.setdefault(one.file, bytearray())
            self.waiting_names.append(one)
        elif one.kind == "sync":
            for done in self.waiting.pop(one.file, []):
                _apply(self.files[one.file], done, None)
        elif one.kind == "sync_folder":
            for done in self.waiting_names:
                _rename(self.names, done)
            self.waiting_names.clear()

    def crash(self, folder: Path, rng: random.Random) -> None:
        """Write what may be found after a crash: of what was not synced, any pages of any writes, in any order."""
        names = dict(self.names)
        chance = rng.choice((0.0, 0.2, 0.5, 0.9, 1.0))
        for one in self.waiting_names:
            if rng.random() < chance:
                _rename(names, one)
        for name, file in names.items():
            content = bytearray(self.files[file])
            for one in self.waiting.get(file, []):
                _apply(content, one, (rng, chance))
            path = folder / name
            path.write_bytes(content)
            path.chmod(0o600)


def _rename(names: dict[str, int], one: Operation) -> None:
    if one.kind == "remove":
        names.pop(one.name, None)
        return
    names[one.name] = one.file
    if one.kind == "replace":
        names.pop(one.data.decode(), None)


def _apply(content: bytearray, one: Operation, lost: tuple[random.Random, float] | None) -> None:
    """Do a write or cut, or with ``lost`` only some of its pages; the length may grow without the bytes."""
    if one.kind == "cut":
        if lost is None or lost[0].random() < lost[1]:
            del content[one.at :]
        return
    for start in range(0, len(one.data), PAGE):
        begin, part = one.at + start, one.data[start : start + PAGE]
        kept = lost is None or lost[0].random() < lost[1]
        grown = kept or (lost is not None and lost[0].random() < 0.3)
        if grown and len(content) < begin + len(part):
            content.extend(bytes(begin + len(part) - len(content)))
        if kept:
            content[begin : begin + len(part)] = part


def crashes(log: Sequence[Operation], count: int, parent: Path, seed: int) -> Iterator[tuple[Path, set[int], int]]:
    """Yield ``count`` folders that a crash could leave, with the blocks that must be found there, and the point.

    Notes of kind "published" and "discarded" say which those are.
    """
    rng = random.Random(seed)
    points = sorted(rng.randrange(len(log) + 1) for _ in range(count))
    disk = _Disk({}, {}, {}, [])
    certain: set[int] = set()
    done = 0
    for number, point in enumerate(points):
        for one in log[done:point]:
            disk.take(one)
            if one.kind == "published":
                certain |= one.numbers
            elif one.kind == "discarded":
                certain -= one.numbers
        done = point
        folder = parent / f"crash-{number}"
        folder.mkdir(mode=0o700)
        disk.crash(folder, rng)
        yield folder, set(certain), point
