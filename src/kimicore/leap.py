"""Many decode steps at once, for a simulation: what the book would do in them, without planning each."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Literal, Protocol

from kimicore.requests import Request
from kimicore.roster import Roster
from kimicore.types import Shape

__all__ = ["DecodeSteps", "Ends", "Leap"]

Ends = Literal["all", "one", "none"]
"""How many steps of a leap may bring ends of requests: any, the last one, or none."""


class DecodeSteps(Protocol):
    """Says what a decode step looks like and how long it takes."""

    def shape(self, rows: int, blocks: int) -> Shape | None:
        """Return the shape of a step of so many rows of one token; None ends the leap."""
        ...

    def run(
        self, now_s: float, until_s: float, most: int, rows: int, context_tokens: int, shape: Shape
    ) -> tuple[int, float]:
        """Run up to ``most`` such steps that begin before ``until_s``; return how many, and when the last one ends.

        The first begins at ``now_s`` and sees ``context_tokens`` cached tokens, its own included; each further one sees
        ``rows`` more.
        """
        ...


class Leap:
    """The steps that follow when every running request generates and nobody else can get in.

    It does what planning, binding and committing one step after the other would do: blocks are taken at the same
    moments and in the same number, requests finish at the same times. It ends before memory runs short, and before a
    step in which several requests finish, since the policy has the word on their order. Drawn tokens are 0 and end
    nobody.
    """

    def __init__(self, roster: Roster, steps: DecodeSteps) -> None:
        self._roster = roster
        self._ledger = roster.ledger
        self._steps = steps
        self._size = roster.ledger.block_tokens
        self._rows = list(roster.running.values())
        self._at = 0  # steps done
        self._seen = {row.number: 0 for row in self._rows}  # steps that a request's own counters include
        self._events: list[tuple[int, int, Request]] = []  # when a block is full or a request finishes
        self._due: list[Request] = []  # need a block for the next step
        self._given: list[Request] = []  # were given one for the step at hand
        self.shapes: set[Shape] = set()
        """The shapes of the steps that were done."""
        self._sized = (0, 0)  # rows, and entries of the longest table, that the shape is for
        self._shape: Shape | None = None

    def possible(self) -> bool:
        """Whether the next step is one that a leap can do; requests that wait are the caller's to judge."""
        ledger = self._ledger
        if not self._rows or self._roster.solo is not None or len(ledger.classes) != 1 or ledger.windows[0] is not None:
            return False
        return all(
            len(row.known) - row.computed == 1
            and row.generated > 0
            and not row.in_flight
            and not row.cancelled
            and row.scored >= row.prompt_tokens - 1
            for row in self._rows
        )

    def run(self, now_s: float, until_s: float, ends: Ends) -> float:
        """Do steps that begin before ``until_s``; return when the last one ends."""
        context = self._begin()
        most_ends = 0 if ends == "none" else 1
        while self._bind(now_s) and self._shape is not None:
            count = len(self._rows)
            stop, crowd = self._next_stop(most_ends)
            if stop == self._at:
                self._unbind()
                break
            steps, now_s = self._steps.run(now_s, until_s, stop - self._at, count, context, self._shape)
            self._at += steps
            context += count * steps
            self._count(steps, count, self._shape)
            finished = self._commit(now_s)
            context -= sum([len(row.known) for row in finished])
            if crowd or now_s >= until_s or not self._rows or (finished and ends != "all"):
                break
        for row in self._rows:
            self._catch_up(row)
        return now_s

    def _begin(self) -> int:
        """Note when something happens to each row; return the tokens that the first step sees."""
        size, context = self._size, 0
        for row in self._rows:
            context += row.computed + 1
            full = -row.computed % size
            if full == 0:
                self._due.append(row)
            else:
                self._events.append((min(full, row.limit - len(row.known)), row.number, row))
        heapify(self._events)
        return context

    def _fit_shape(self) -> None:
        """Ask for the shape where the rows or the longest table have changed."""
        size = (len(self._rows), max([len(row.table) for row in self._rows], default=0))
        if size != self._sized:
            self._sized = size
            self._shape = self._steps.shape(*size)

    def _bind(self, now_s: float) -> bool:
        """Give blocks to the rows that need one; False (and nothing changed) where they are not all there."""
        due = self._due
        self._given = list(due)
        if due:
            if not self._ledger.fits([len(due)]):
                return False
            self._ledger.now_s = now_s
            for row in due:
                if not self._roster.allocate(row, 1):
                    return False
                ends = row.limit - len(row.known)
                heappush(self._events, (self._at + min(self._size, ends), row.number, row))
            due.clear()
        self._fit_shape()
        return True

    def _unbind(self) -> None:
        """Take back the blocks of a step that is not done after all: a plan takes a row's next block to be missing."""
        for row in reversed(self._given):
            self._ledger.release(0, [row.table.pop()], drop=True)

    def _next_stop(self, most_ends: int) -> tuple[int, bool]:
        """Return the step after which something happens, or the one before where too many requests finish then."""
        events = self._events
        at = events[0][0]
        if most_ends and at not in [when for when, _, _ in events[1:3]]:  # a heap's second smallest is one of these
            return at, False
        ends = 0
        for when, _, row in events:
            if when == at and len(row.known) + at - self._seen[row.number] >= row.limit:
                ends += 1
        return (at - 1, True) if ends > most_ends else (at, False)

    def _commit(self, now_s: float) -> list[Request]:
        """Take in what the last step brought: full blocks, and the ends of requests, which are returned."""
        events, finished = self._events, []
        self._ledger.now_s = now_s
        while events and events[0][0] == self._at:
            row = heappop(events)[2]
            self._catch_up(row)
            self._roster.seal(row)
            if len(row.known) >= row.limit:
                finished.append(row)
            else:
                self._due.append(row)
        for row in finished:
            self._rows.remove(row)
            self._roster.finish(row, "length", None, now_s)
        return finished

    def _catch_up(self, row: Request) -> None:
        steps = self._at - self._seen[row.number]
        self._seen[row.number] = self._at
        row.known.extend([0] * steps)
        row.computed += steps
        row.generated += steps
        row.row_view = None

    def _count(self, steps: int, rows: int, shape: Shape) -> None:
        if steps:
            self.shapes.add(shape)
        counts = self._roster.counts
        counts["steps"] += steps
        counts["completion_tokens"] += steps * rows
        counts["padded_tokens"] += steps * max(0, shape.tokens - rows)
