"""The check that every kind that decides ends with: the policy inside the engine's own book, ledger and planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kimicore.config import EngineConfig
from kimicore.guard import RAISED, PolicyFaults
from kimicore.testing.engine import FakeEngine, FakeRequest
from kimicore.testing.promises import Effort, Story, explore_machine

__all__ = ["EngineDrive", "check_in_engine"]

CONFIG = EngineConfig(max_batch_size=4, max_batch_tokens=48, target_step_s=10.0, max_wait_s=0.05)


def check_in_engine(kind: str, maker: Callable[[], Any], effort: Effort) -> None:
    """Search for traffic under which the policy breaks a promise that the engine notices, or harms the engine."""

    def machine() -> Any:
        from kimicore.testing.engine_machine import EngineMachine

        return EngineMachine(kind, maker)

    explore_machine(
        machine, Effort(max(1, effort.examples // 3), max(1, effort.steps // 2), effort.seed, min(40, effort.shrinks))
    )


class _QuietFaults(PolicyFaults):
    """Counts faults and logs none: the check says what it found."""

    __slots__ = ()

    def note(self, promise: str, error: BaseException | None = None) -> None:
        """Count one broken promise."""
        self.count += 1
        self.last = promise if error is None else f"{promise}: {error!r}"


class _QuietEngine(FakeEngine):
    counter = _QuietFaults


class EngineDrive:
    """One history of one engine without a model, with a policy under test; every step is checked."""

    def __init__(
        self, kind: str, maker: Callable[[], Any], story: Story, kv_blocks: int, windows: tuple[int | None, ...]
    ) -> None:
        self.kind = kind
        self.story = story
        self.story.tell(f"an engine of {kv_blocks} KV blocks, windows {windows}, with {CONFIG.max_batch_size} places")
        error: BaseException | None = None
        try:
            self.engine = _QuietEngine(CONFIG, kv_blocks=kv_blocks, windows=windows, **{kind: maker()})
        except RAISED as raised:
            error = raised
        if error is not None:
            self.story.end(f"starting it raised {error!r}")

    def submit(self, base: int, prompt_tokens: int, max_tokens: int, **more: Any) -> None:
        """Take a request; prompts of one ``base`` begin alike."""
        limit = min(self.engine.book.capacity_tokens, 120)
        prompt_tokens = min(prompt_tokens, limit - max_tokens)
        prompt = [(base * 31 + at * at) % 50 for at in range(prompt_tokens)]
        request = self.engine.submit(prompt, max_tokens, **more)
        shown = "".join(f", {name}={value!r}" for name, value in more.items())
        self.story.tell(f"request {request.number}: {prompt_tokens} + {max_tokens} tokens of prompt {base}{shown}")

    def cancel(self, pick: int) -> None:
        """Cancel some request."""
        if self.engine.requests:
            number = 1 + pick % len(self.engine.requests)
            if self.engine.cancel(self.engine.requests[number]):
                self.story.tell(f"request {number} is cancelled")

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.engine.wait(seconds)

    def step(self) -> None:
        """Do a step and look at what it left."""
        error: BaseException | None = None
        try:
            bound = self.engine.step()
            self.engine.check_integrity()
        except RAISED as raised:
            error = raised
        if error is not None:
            self.story.end(f"the step raised {error!r}")
        self.story.tell("step: " + (", ".join(f"{row.plan.request}:{row.plan.count}" for row in bound.rows) or "empty"))
        faults = self.engine.faults(self.kind)
        if faults.count:
            self.story.end(f"the engine noted: {faults.last}")

    def finish(self) -> None:
        """Step until all have ended, and compare every text with what it is alone."""
        empty = 0
        for _ in range(100 + 40 * len(self.engine.requests)):
            if self.engine.book.idle:
                break
            before = len(self.engine.steps)
            self.step()
            if self.engine.steps[before].rows:
                empty = 0
                continue
            empty += 1
            self.engine.wait(CONFIG.max_wait_s + 0.01)
            if empty > 8:
                break
        if not self.engine.book.idle:
            view = self.engine.view()
            self.story.end(
                f"requests {[row.request for row in (*view.running, *view.waiting)]} live and do not come to an end"
            )
        for request in self.engine.requests.values():
            self._compare(request)

    def _compare(self, request: FakeRequest) -> None:
        expected = self.engine.expected(request)
        if request.error is not None:
            self.story.end(f"request {request.number} failed: {request.error!r}")
        if request.tokens != expected[: len(request.tokens)]:
            self.story.end(f"request {request.number} gave other tokens than alone")
        if not request.cancelled and len(request.tokens) != len(expected):
            self.story.end(f"request {request.number} gave {len(request.tokens)} of {len(expected)} tokens")
