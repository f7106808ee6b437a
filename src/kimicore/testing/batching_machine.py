"""The state machine behind the checks of batching policies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kimicore.contracts import StepLimits
from kimicore.testing.promises import Judge, Story
from kimicore.testing.view_model import ViewDrive
from kimicore.types import TIERS

__all__ = ["BatchingMachine"]

LIMITS = st.builds(
    StepLimits,
    max_batch_size=st.integers(1, 6),
    max_batch_tokens=st.sampled_from([8, 64, 512]),
    min_batch_size=st.just(1),
    max_wait_s=st.sampled_from([0.0, 0.05]),
    target_step_s=st.sampled_from([0.02, 1.0]),
)
REQUEST = st.fixed_dictionaries(
    {
        "prompt_tokens": st.sampled_from([1, 2, 15, 16, 70, 900]),
        "output_tokens": st.sampled_from([1, 5, 300, 0]),
        "cached_tokens": st.sampled_from([0, 0, 16, 64]),
        "tenant": st.sampled_from(["", "a", "b", "c"]),
        "priority": st.integers(-1, 3),
        "tier": st.sampled_from(TIERS),
        "streamed": st.booleans(),
    }
)
COMING = st.lists(REQUEST, max_size=2)  # part of every rule, since a search may leave single rules out


class BatchingMachine(RuleBasedStateMachine):
    """Requests come, run and go; the policy is asked again and again, also when nothing has changed."""

    def __init__(self, maker: Callable[[], Any], promises: Collection[str]) -> None:
        super().__init__()
        self.maker = maker
        self.story = Story()
        self.judge = Judge(promises, self.story)

    @initialize(limits=LIMITS, coming=st.lists(REQUEST, min_size=1, max_size=6))
    def start(self, limits: StepLimits, coming: list[dict[str, Any]]) -> None:
        """Begin with a few requests."""
        salts = (0, 1) if self.judge.looks_at("repeatable") else (0,)
        self.drive = ViewDrive(self.maker, self.judge, limits, salts)
        self._arrive(coming)
        self.drive.rank()

    def _arrive(self, coming: list[dict[str, Any]]) -> None:
        for request in coming:
            self.drive.arrive(**request)

    @rule(picks=st.lists(st.integers(0, 9), min_size=1, max_size=4), coming=COMING)
    def admit(self, picks: list[int], coming: list[dict[str, Any]]) -> None:
        """Requests start to run."""
        self._arrive(coming)
        for pick in picks:
            self.drive.admit(pick)
        self.drive.rank()

    @rule(count=st.sampled_from([1, 8, 64]), seconds=st.sampled_from([0.001, 0.05, 1.0]), coming=COMING)
    def step(self, count: int, seconds: float, coming: list[dict[str, Any]]) -> None:
        """A step was run."""
        self.drive.now_s += seconds
        self.drive.advance(count)
        self._arrive(coming)
        self.drive.rank()

    @rule(pick=st.integers(0, 9), preempted=st.booleans(), coming=COMING)
    def lose(self, pick: int, preempted: bool, coming: list[dict[str, Any]]) -> None:
        """A request has to wait again, or its caller went away."""
        self._arrive(coming)
        (self.drive.preempt if preempted else self.drive.leave)(pick)

    @rule(seconds=st.sampled_from([0.0, 0.02, 0.9, 5.0, 400.0]), coming=COMING)
    def ask_later(self, seconds: float, coming: list[dict[str, Any]]) -> None:
        """Time passes and the policy is asked."""
        self.drive.now_s += seconds
        self._arrive(coming)
        self.drive.rank()
