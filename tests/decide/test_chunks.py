"""How large the chunks of a prompt are beside rows that generate."""

from __future__ import annotations

from typing import Any

import pytest

from kimicore.contracts import RowView, StepLimits, StepView
from kimicore.plan import plan
from kimicore.plugins import resolve
from kimicore.policies.batching.pace import STRETCH

LIMITS = StepLimits(max_batch_size=64, max_batch_tokens=512, min_batch_size=1, max_wait_s=0.0, target_step_s=0.05)


class Affine:
    """A step takes ``base_s`` and a millisecond for each token."""

    def __init__(self, base_s: float) -> None:
        self.base_s = base_s

    def step_s(self, tokens: int, rows: int, context_tokens: int, attended_tokens: int = 0) -> float:
        return self.base_s + 1e-3 * tokens


def row(number: int, state: Any, known: int, computed: int, *, streamed: bool) -> RowView:
    generated = 5 if known - computed == 1 else 0
    prompt = known - generated
    return RowView(
        number, state, 0.0, 0, "", prompt, known, computed, known + 50, generated, 0, "last", (), 0, streamed
    )


def chunk(base_s: float, streamed: list[bool]) -> int:
    """Return the tokens of a 4,000-token prompt that a step takes beside generating rows."""
    running = tuple(row(at + 1, "running", 100, 99, streamed=one) for at, one in enumerate(streamed))
    waiting = (row(99, "waiting", 4000, 0, streamed=True),)
    view = StepView(1.0, running, waiting, LIMITS)
    fcfs = resolve("batching", "fcfs").start(LIMITS)
    rows = plan(view, fcfs, resolve("padding", "packed"), Affine(base_s)).rows
    return next(one.count for one in rows if one.request == 99)


def test_streams_bound_the_step() -> None:
    """Beside streams a step is predicted to take at most ``target_step_s``."""
    assert chunk(0.01, [True] * 8) == 50 - 10 - 8


@pytest.mark.parametrize("base_s", [0.03, 0.05, 0.2])
def test_a_step_may_stretch_what_its_streams_take_alone(base_s: float) -> None:
    """Where the streams alone come near the target, the step may stretch what they take."""
    alone_s = base_s + 8e-3
    allowed_s = max(LIMITS.target_step_s, STRETCH * alone_s)
    assert chunk(base_s, [True] * 8) == pytest.approx((allowed_s - alone_s) * 1e3, abs=1)


def test_rows_whose_pauses_nobody_sees_bound_nothing() -> None:
    """Beside rows that are read as a whole, chunks are as large as the budget of tokens; one stream is enough to bound
    them.
    """
    assert chunk(0.01, [False] * 8) == LIMITS.max_batch_tokens - 8
    assert chunk(0.01, [False] * 7 + [True]) == 50 - 10 - 8
