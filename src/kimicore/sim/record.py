"""What is written down while a simulation runs."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from attrs import define, field, frozen

from kimicore.sim.traces import TraceRequest
from kimicore.types import Shape

__all__ = ["Outcome", "Record", "Sample"]


@frozen
class Sample:
    """A look at the engine after a step: at ``now_s``, how many requests run and wait, the blocks that they hold, and
    sums until then: tokens through the model, of these drawn in a decode or after a prompt, tokens of padding, and
    entries in the list of gaps."""

    now_s: float
    running: int
    waiting: int
    used_blocks: int
    real_tokens: int
    drawn_tokens: int
    padded_tokens: int
    gaps: int


@define(eq=True, slots=True)
class Outcome:
    """What became of a request; times in seconds on the trace's clock, None where it did not come to it.

    ``reason``: why it was refused ("" where it was not).
    """

    request: TraceRequest
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    reason: Literal["", "overloaded", "too long"] = ""

    @property
    def ttft_s(self) -> float | None:
        """Seconds until its first token."""
        return None if self.first_token_s is None else self.first_token_s - self.request.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; 0 where there was just one."""
        if self.first_token_s is None or self.finished_s is None:
            return None
        return (self.finished_s - self.first_token_s) / max(1, self.request.output_tokens - 1)


@define(eq=False)
class Record:
    """Outcomes by request, and sums over steps.

    ``gaps_s``: how long somebody waited for the next token, ``gap_tokens`` how many tokens came so (a pair per step and
    length). ``shapes``: how many steps ran at each padded size. ``busy_s``: seconds in steps.
    """

    outcomes: list[Outcome]
    gaps_s: array[float] = field(factory=lambda: array("d"))
    gap_tokens: array[int] = field(factory=lambda: array("L"))
    shapes: Counter[Shape] = field(factory=Counter)
    samples: list[Sample] = field(factory=list)
    busy_s: float = 0.0
    real_tokens: int = 0
    drawn_tokens: int = 0
    padded_tokens: int = 0

    @classmethod
    def of(cls, requests: Sequence[TraceRequest]) -> Record:
        """Return an empty record."""
        return cls([Outcome(one) for one in requests])

    def count(self, shape: Shape, steps: int, tokens: int, drawn: int) -> None:
        """Count ``steps`` steps at one shape, each of ``tokens`` tokens, ``drawn`` of which are drawn in it."""
        self.shapes[shape] += steps
        self.real_tokens += steps * tokens
        self.drawn_tokens += steps * drawn
        self.padded_tokens += steps * max(0, shape.tokens - tokens)

    def look(self, now_s: float, running: int, waiting: int, used_blocks: int) -> None:
        """Note the gauges of a moment, and the sums until then."""
        self.samples.append(
            Sample(
                now_s,
                running,
                waiting,
                used_blocks,
                self.real_tokens,
                self.drawn_tokens,
                self.padded_tokens,
                len(self.gaps_s),
            )
        )

    def gap(self, seconds: float, tokens: int) -> None:
        """Note that ``tokens`` tokens came ``seconds`` after those before them."""
        self.gaps_s.append(seconds)
        self.gap_tokens.append(tokens)
