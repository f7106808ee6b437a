"""The state machine that puts a policy into an engine without a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kimicore.testing.engine_check import EngineDrive
from kimicore.testing.promises import Counterexample, Story
from kimicore.types import TIERS

__all__ = ["EngineMachine"]

REQUEST = st.fixed_dictionaries(
    {
        "base": st.integers(0, 3),
        "prompt_tokens": st.integers(1, 100),
        "max_tokens": st.integers(1, 12),
        "tenant": st.sampled_from(["", "a", "b"]),
        "priority": st.sampled_from([0, 0, 1, 3]),
        "tier": st.sampled_from(TIERS),
        "streamed": st.booleans(),
    }
)
COMING = st.lists(REQUEST, max_size=2)  # part of every rule, since a search may leave single rules out


class EngineMachine(RuleBasedStateMachine):
    """Requests of a few common beginnings come, go and are cancelled in a small arena."""

    def __init__(self, kind: str, maker: Callable[[], Any]) -> None:
        super().__init__()
        self.kind = kind
        self.maker = maker
        self.story = Story()
        self.broken = False

    @initialize(blocks=st.integers(8, 24), windows=st.sampled_from([(None,), (None, 24)]))
    def start(self, blocks: int, windows: tuple[int | None, ...]) -> None:
        """Begin with an empty engine."""
        self.drive = EngineDrive(self.kind, self.maker, self.story, blocks, windows)

    def _watch(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Counterexample:
            self.broken = True
            raise

    def _submit(self, coming: list[dict[str, Any]]) -> None:
        for request in coming:
            self.drive.submit(**request)

    @rule(coming=COMING, steps=st.integers(1, 8))
    def step(self, coming: list[dict[str, Any]], steps: int) -> None:
        """Requests come and the engine works."""
        self._submit(coming)
        for _ in range(steps):
            self._watch(self.drive.step)

    @rule(coming=COMING, pick=st.integers(0, 40))
    def cancel(self, coming: list[dict[str, Any]], pick: int) -> None:
        """Requests come and a caller goes away."""
        self._submit(coming)
        self.drive.cancel(pick)
        self._watch(self.drive.step)

    @rule(coming=COMING, seconds=st.sampled_from([0.01, 0.1, 2.0, 40.0]))
    def wait(self, coming: list[dict[str, Any]], seconds: float) -> None:
        """Time passes."""
        self.drive.wait(seconds)
        self._submit(coming)
        self._watch(self.drive.step)

    def teardown(self) -> None:
        """Everybody who came is served."""
        if not self.broken and hasattr(self, "drive"):
            self.drive.finish()
