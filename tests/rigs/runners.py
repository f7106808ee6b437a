"""Runners around an engine's own one: steps that wait for a permit, that tell of themselves, or that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kimicore.types import BoundStep, RowResult, StepResult

__all__ = ["Around", "Gate", "around", "gated"]


class Around:
    """Calls ``before`` with each step, on the engine's thread, and keeps which request computed what."""

    def __init__(self, inner: Any, before: Callable[[BoundStep], None] | None = None) -> None:
        self.inner = inner
        self.before = before
        self.steps: list[dict[int, tuple[int, int]]] = []
        self.fault: Callable[[BoundStep, int], BaseException | None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, step: BoundStep) -> StepResult:
        """Run the step; an exception that ``fault`` returns for a row is that row's error."""
        self.steps.append({row.plan.request: (row.plan.start, row.plan.count) for row in step.rows})
        if self.before is not None:
            self.before(step)
        result: StepResult = self.inner.run(step)
        if self.fault is None:
            return result
        errors = [self.fault(step, index) for index in range(len(step.rows))]
        rows = [RowResult(error=e) if e is not None else row for e, row in zip(errors, result.rows, strict=True)]
        return StepResult(tuple(rows), result.importance, result.step_s)

    def close(self) -> None:
        """Close the inner runner."""
        self.inner.close()

    def seen(self) -> set[int]:
        """Return the numbers of all requests that any step computed something for."""
        return {number for step in self.steps for number in step}


class Gate(Around):
    """Holds every step until :meth:`let` or :meth:`open`."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self._permits = threading.Semaphore(0)
        self._entered = threading.Semaphore(0)
        self._open = False

    def run(self, step: BoundStep) -> StepResult:
        """Wait for a permit, then run the step."""
        self._entered.release()
        if not self._open:
            self._permits.acquire()
        return super().run(step)

    def wait_step(self) -> None:
        """Wait until one more step has come to the gate."""
        if not self._entered.acquire(timeout=120):
            raise TimeoutError("no step came to the gate")

    def let(self, steps: int = 1) -> None:
        """Let so many steps through."""
        self._permits.release(steps)

    def open(self) -> None:
        """Let all steps through from now on."""
        self._open = True
        self._permits.release()


@contextmanager
def around(engine: Any, before: Callable[[BoundStep], None] | None = None) -> Iterator[Around]:
    """Put an :class:`Around` before an idle engine's runner for a while."""
    loop = engine.face.loop
    inner = loop.runner
    loop.runner = outer = Around(inner, before)
    try:
        yield outer
    finally:
        loop.runner = inner


@contextmanager
def gated(engine: Any) -> Iterator[Gate]:
    """Put a :class:`Gate` before an idle engine's runner for a while; leaving opens it."""
    loop = engine.face.loop
    inner = loop.runner
    loop.runner = gate = Gate(inner)
    try:
        yield gate
    finally:
        gate.open()
        loop.runner = inner
