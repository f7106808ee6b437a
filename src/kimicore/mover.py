"""Carries blocks between tiers on threads of its own; it decides nothing.

Copies between device and host have one thread, reads from disk several, writes to disk one that gives way to everything
else. A worker survives whatever goes wrong: the transfer is told as failed, and the next one is taken.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from attrs import define
from numpy.typing import NDArray

from kimicore.clock import Clock
from kimicore.kv.ahead import Ahead
from kimicore.kv.disk import DiskBlock, DiskStore
from kimicore.moves import LOST, BlockMove, Transfer, Transferred
from kimicore.types import KVClass

__all__ = ["Mover"]

_log = logging.getLogger("kimicore")

WRITER_NICENESS = 10
READERS_EACH = 2  # threads per reader that may decode: the others fetch meanwhile what comes next


@define(eq=False)
class _Line:
    """Jobs of one kind of worker, first come first served."""

    jobs: deque[Transfer | list[bytes]]
    threads: list[threading.Thread]


class Mover:
    """The carrier of one engine.

    ``device``, ``host``: the arenas' bytes, flat. ``layouts``: per KV class what a block's bytes mean, 16 bytes;
    ``item_bytes``: size of its numbers. ``disk``: the store, or None. ``notify``: called from a worker, after every
    transfer that is over. Its methods are for one thread; ``poll`` and ``submit_nowait`` never wait.
    """

    def __init__(
        self,
        classes: Sequence[KVClass],
        device: NDArray[np.uint8],
        host: NDArray[np.uint8],
        disk: DiskStore | None,
        layouts: Sequence[bytes],
        clock: Clock,
        *,
        readers: int = 2,
    ) -> None:
        self._sizes = tuple(one.block_bytes for one in classes)
        # How far blocks lie apart depends on which classes an engine has; a record is the same for all engines.
        self._contents = tuple(one.content_bytes or one.block_bytes for one in classes)
        self._items = tuple(_item_bytes(one.dtype) for one in classes)
        self._device, self._host, self.disk = device, host, disk
        self._layouts = tuple(layouts)
        self._clock = clock
        self.notify: Callable[[], None] = lambda: None
        self._over: deque[Transferred] = deque()
        self._wakeup = threading.Condition()
        self._closing = False
        self._lines = {name: _Line(deque(), []) for name in ("copy", "read", "write")}
        self._readers = readers
        self._decoding = threading.Semaphore(readers)

    def start(self) -> None:
        """Start the workers."""
        counts = {"copy": 1, "read": READERS_EACH * self._readers if self.disk else 0, "write": 1 if self.disk else 0}
        for name, line in self._lines.items():
            for number in range(counts[name]):
                thread = threading.Thread(
                    target=self._work, args=(line, name), name=f"kimicore-{name}-{number}", daemon=True
                )
                line.threads.append(thread)
                thread.start()

    # ------------------------------------------------------------ the engine's side

    def submit_nowait(self, transfer: Transfer) -> None:
        """Have blocks moved; :meth:`poll` tells when it is over."""
        name = "write" if transfer.target == "disk" else "read" if transfer.source == "disk" else "copy"
        self._put(name, transfer)

    def copy(self, moves: Sequence[BlockMove]) -> Sequence[int]:
        """Copy blocks from the device to the host here and now; return the bytes of each, 0 where it failed."""
        transfer = Transfer(0, "device", "host", tuple(moves))
        return self._guarded(lambda: self._copy(transfer), len(moves))

    def discard_nowait(self, keys: Sequence[bytes]) -> None:
        """Have the disk forget records, after what it was given to write before."""
        self._put("write", list(keys))

    def _put(self, name: str, job: Transfer | list[bytes]) -> None:
        with self._wakeup:
            self._lines[name].jobs.append(job)
            self._wakeup.notify_all()

    def poll(self) -> list[Transferred]:
        """Return the transfers that ended since the last call, in that order."""
        over = self._over
        return [over.popleft() for _ in range(len(over))]

    @property
    def over(self) -> bool:
        """Whether :meth:`poll` has something to tell."""
        return bool(self._over)

    def faults(self) -> tuple[int, int]:
        """Return how many records proved damaged, and how many reads and writes the system refused."""
        if self.disk is None:
            return 0, 0
        stats = self.disk.stats()
        return stats.set_aside, stats.read_failures + stats.write_failures

    def close(self, wait_s: float) -> None:
        """End the workers after the jobs that they have in hand, waiting ``wait_s`` for them, and close the store."""
        with self._wakeup:
            self._closing = True
            self._wakeup.notify_all()
        until_s = self._clock() + wait_s
        threads = [thread for line in self._lines.values() for thread in line.threads]
        for thread in threads:
            thread.join(max(0.0, until_s - self._clock()))
        if self.disk is not None:
            self.disk.close()

    # ------------------------------------------------------------ the workers' side

    def _work(self, line: _Line, name: str) -> None:
        if name == "write":
            _give_way()
        while True:
            with self._wakeup:
                while not line.jobs and not self._closing:
                    self._wakeup.wait()
                if self._closing:
                    return
                job = line.jobs.popleft()
            if isinstance(job, Transfer):
                self._carry(job)
            else:
                self._discard(job)

    def _discard(self, keys: Sequence[bytes]) -> None:
        disk = self.disk
        if disk is not None:
            self._guarded(lambda: disk.discard(keys), 0)

    def _carry(self, transfer: Transfer) -> None:
        begun_s = self._clock()
        if transfer.target == "disk":
            stored = self._guarded(lambda: self._write(transfer), len(transfer.moves))
        elif transfer.source == "disk":
            stored = self._guarded(lambda: self._read(transfer), len(transfer.moves))
        else:
            stored = self._guarded(lambda: self._copy(transfer), len(transfer.moves))
        self._over.append(Transferred(transfer, tuple(stored), begun_s, self._clock()))
        self.notify()

    def _guarded(self, work: Callable[[], Sequence[int] | None], count: int) -> Sequence[int]:
        try:
            return work() or ()
        except Exception:
            _log.exception("a KV block move failed; it counts as a miss")
            return [0] * count

    def _copy(self, transfer: Transfer) -> list[int]:
        down = transfer.target == "host"
        source, target = (self._device, self._host) if down else (self._host, self._device)
        moves = transfer.moves
        begin = 0
        while begin < len(moves):
            end = begin + 1
            size, first = self._sizes[moves[begin].kind], moves[begin]
            while end < len(moves) and _follows(first, moves[end], end - begin):
                end += 1
            count = (end - begin) * size
            np.copyto(
                target[first.target * size : first.target * size + count],
                source[first.source * size : first.source * size + count],
            )
            begin = end
        return [self._sizes[move.kind] for move in moves]

    def _write(self, transfer: Transfer) -> list[int]:
        assert self.disk is not None
        blocks = []
        for move in transfer.moves:
            size = self._sizes[move.kind]
            raw = self._host[move.source * size :][: self._contents[move.kind]]
            blocks.append(DiskBlock(move.key, self._layouts[move.kind], self._items[move.kind], raw.data))
        return self.disk.put(blocks)

    def _read(self, transfer: Transfer) -> list[int]:
        disk = self.disk
        assert disk is not None
        moves = transfer.moves
        stored: list[int] = []
        while len(stored) < len(moves):
            left = moves[len(stored) :]
            ahead = disk.read_ahead([move.key for move in left])
            with self._decoding:
                stored += [self._decode(disk, move, ahead) for move in left[: ahead.keys]]
        return stored

    def _decode(self, disk: DiskStore, move: BlockMove, ahead: Ahead) -> int:
        size = self._sizes[move.kind]
        out = self._device[move.target * size :][: self._contents[move.kind]].data
        if disk.get(move.key, self._layouts[move.kind], out, ahead):
            return size
        return 0 if move.key in disk else LOST


def _follows(first: BlockMove, other: BlockMove, distance: int) -> bool:
    """Whether two moves, ``distance`` apart, lie side by side in both tiers, so that one copy serves both."""
    sources, targets = other.source - first.source, other.target - first.target
    return other.kind == first.kind and sources == targets == distance


def _item_bytes(dtype: str) -> int:
    return {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 1}[dtype]


def _give_way() -> None:
    """Let this thread alone yield to all others, where the system can."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
