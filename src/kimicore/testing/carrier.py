"""A carrier without threads or bytes, for engines without a model: each move ends when and as the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from attrs import field, frozen

from kimicore.clock import Clock
from kimicore.moves import LOST, BlockMove, Transfer, Transferred
from kimicore.testing.runner import FakeRunner

__all__ = ["FakeCarrier", "Outcome"]

Outcome = Literal["done", "failed", "half", "lost"]

_POISON = -2


@frozen(eq=False)
class FakeCarrier:
    """Moves the make-believe blocks of a :class:`FakeRunner`.

    A move reads its source at the very end, and what it writes to holds nonsense until then: who frees a source too
    early, or reads a target too soon, gets other tokens. ``disk`` is what lies there, by key, and outlives an engine.
    """

    runner: FakeRunner
    clock: Clock
    disk: dict[bytes, list[int]] = field(factory=dict)
    stored_bytes: int = 64
    host: list[dict[int, list[int]]] = field(init=False, factory=list)
    pending: list[Transfer] = field(init=False, factory=list)
    notify: Callable[[], None] = field(init=False, default=lambda: None)

    def __attrs_post_init__(self) -> None:
        self.host.extend({} for _ in self.runner.classes)

    def submit(self, transfers: Iterable[Transfer]) -> None:
        """Take moves that wait for :meth:`finish`."""
        for transfer in transfers:
            self.pending.append(transfer)
            for move in transfer.moves:
                if transfer.target == "device":
                    self._device(move.kind, move.target)[:] = [_POISON] * self.runner.classes[0].shape[3]
                elif transfer.target == "host":
                    self.host[move.kind][move.target] = [_POISON]

    def copy(self, moves: Sequence[BlockMove]) -> list[int]:
        """Copy blocks from the device to the host at once."""
        for move in moves:
            self.host[move.kind][move.target] = list(self._device(move.kind, move.source))
        return [self.stored_bytes] * len(moves)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Forget records."""
        for key in keys:
            self.disk.pop(key, None)

    def finish(self, at: int = 0, outcome: Outcome = "done") -> list[Transferred]:
        """End the move that waits at place ``at`` (modulo their number) and return it; nothing where none waits.

        "half": every second block fails; "lost": the disk turns out not to have them.
        """
        if not self.pending:
            return []
        transfer = self.pending.pop(at % len(self.pending))
        stored: list[int] = []
        for place, move in enumerate(transfer.moves):
            good = outcome == "done" or (outcome == "half" and place % 2 == 0)
            lost = transfer.source == "disk" and (outcome == "lost" or move.key not in self.disk)
            if lost:
                self.disk.pop(move.key, None)
                stored.append(LOST)
            elif not good:
                stored.append(0)
            else:
                stored.append(self.stored_bytes)
                self._carry(transfer, place)
        now_s = self.clock()
        return [Transferred(transfer, tuple(stored), now_s - 0.001, now_s)]

    def finish_all(self) -> list[Transferred]:
        """End all moves as they should."""
        over: list[Transferred] = []
        while self.pending:
            over += self.finish()
        return over

    def _carry(self, transfer: Transfer, place: int) -> None:
        move = transfer.moves[place]
        if transfer.source == "disk":
            content: Sequence[int] = self.disk[move.key]
        elif transfer.source == "host":
            content = self.host[move.kind][move.source]
        else:
            content = self._device(move.kind, move.source)
        if transfer.target == "disk":
            self.disk[move.key] = list(content)
        elif transfer.target == "host":
            self.host[move.kind][move.target] = list(content)
        else:
            self._device(move.kind, move.target)[:] = content

    def _device(self, kind: int, slot: int) -> list[int]:
        return self.runner.block(kind, slot)
