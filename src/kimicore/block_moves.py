"""The engine's side of block moves between tiers: what is over is told to the book, what is due to the carrier."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from attrs import evolve

from kimicore.book import Book
from kimicore.clock import Clock
from kimicore.contracts import Carrier, StepCost
from kimicore.errors import KimiCoreError
from kimicore.handle import SinkCall
from kimicore.sinking import Sink
from kimicore.types import TierStats

__all__ = ["BlockMoves"]

_log = logging.getLogger("kimicore")

LOOK_S = 0.01
"""How often the end looks whether the last moves are over, should nobody say so."""


class BlockMoves:
    """Used from the engine's thread alone; without a ``carrier`` there is nothing to do. ``wakeup`` is notified, and
    held for that, from the carrier's threads.
    """

    def __init__(self, book: Book, carrier: Carrier | None, clock: Clock, wakeup: threading.Condition) -> None:
        self._carrier, self._clock, self._wakeup = carrier, clock, wakeup
        self._book, self._below = book, book.below
        self._calls: list[tuple[SinkCall, Sink]] = []
        if carrier is not None:
            carrier.notify = self._notify

    def start(self) -> None:
        """Let the carrier begin to work."""
        if self._carrier is not None:
            self._carrier.start()

    @property
    def over(self) -> bool:
        """Whether a move has ended that the book does not know of."""
        return self._carrier is not None and self._carrier.over

    def _notify(self) -> None:
        with self._wakeup:
            self._wakeup.notify_all()

    def tend(self, cost: StepCost) -> None:
        """Take in the block moves that are over, and begin those that are due."""
        carrier, below = self._carrier, self._below
        if carrier is None or below is None:
            return
        now_s = self._clock()
        moved = carrier.poll()
        if moved:
            below.moved(moved, now_s)
        due = below.tend(now_s, cost)
        self.before_writes()  # a slot that a load writes to may have been a block that is not copied yet
        for transfer in due:
            carrier.submit_nowait(transfer)
        discards = below.tiers.take_discards()
        if discards:
            carrier.discard_nowait(discards)

        if self._calls:
            self._answer(lambda sink: sink.done)

    def before_writes(self) -> None:
        """Copy what the device has dropped uncopied, before a step or a load writes over it."""
        if self._carrier is not None and self._below is not None:
            urgent = self._below.tiers.take_urgent()
            if urgent:
                self._below.tiers.urgent_done(self._carrier.copy(urgent))

    def sink(self, call: SinkCall) -> None:
        """Begin to write a sequence's KV to disk; the caller is told when that is over."""
        try:
            sink = self._book.sink(call.token_ids, call.prompt_tokens, call.tenant.encode(), call.precision or "full")
        except KimiCoreError as error:
            call.end(0, 0, error)
            return
        self._calls.append((call, sink))
        if sink.done:
            self._answer(lambda sink: sink.done)

    def _answer(self, over: Callable[[Sink], bool]) -> None:
        for call, sink in self._calls:
            if over(sink):
                call.end(sink.blocks, sink.blocks - sink.gone - len(sink.left))
        self._calls = [(call, sink) for call, sink in self._calls if not over(sink)]

    def with_faults(self, disk: TierStats) -> TierStats:
        """Return the disk's figures with what its store alone knows."""
        if self._carrier is None:
            return disk
        set_aside, failures = self._carrier.faults()
        return evolve(disk, set_aside=set_aside, failures=failures)

    def close(self, cost: StepCost, wait_s: float) -> None:
        """Write what is worth keeping to disk, for at most ``wait_s``, and end the carrier, which may take as long."""
        carrier, below = self._carrier, self._below
        if carrier is None or below is None:
            self._answer(lambda sink: True)
            return
        until_s = self._clock() + wait_s
        try:
            below.tiers.sinking = below.tiers.disk is not None
            self.tend(cost)
            while below.tiers.busy and self._clock() < until_s:
                with self._wakeup:
                    if not self.over:
                        self._wakeup.wait(LOOK_S)
                self.tend(cost)
        except Exception:
            _log.exception("the KV cache could not be written to disk")
        self._answer(lambda sink: True)
        carrier.close(wait_s)
