"""Whether nobody starves: more requests than can be served, and who is started past whom."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

from kimicore.config import EngineConfig
from kimicore.guard import RAISED
from kimicore.testing.engine import FakeEngine, FakeRequest
from kimicore.testing.promises import Effort, Story, explore
from kimicore.types import TIERS

__all__ = ["check_starvation", "claims_a_bound"]

CONFIG = EngineConfig(max_batch_size=2, max_batch_tokens=64, target_step_s=1e3, max_wait_s=0.0)
MOST_REQUESTS = 40
SPAN = 8.0  # the requests come over this many times the claimed bound
UNIT_S = 0.05  # between requests, where the claimed bound is 0


def claims_a_bound(maker: Callable[[], Any]) -> bool:
    """Return whether the policy has a ``starvation_bound_s`` that is not None."""
    try:
        return getattr(maker(), "starvation_bound_s", None) is not None
    except RAISED:  # the settings' own check says what is wrong
        return False


def check_starvation(maker: Callable[[], Any], effort: Effort) -> None:
    """Search for an overload in which a request waits past the bound that the policy claims.

    The claim of ``starvation_bound_s``: no request waits, for the first time or again, while another one is started
    that arrived more than ``starvation_bound_s * max(1, d)`` seconds after it, where ``d`` is how much higher the
    other's priority is. So from then on only those are served before it that are there already. Requests are of similar
    length and memory is plenty, since the core may serve a short prompt beside a long one whatever a policy says.
    """
    from hypothesis import strategies as st

    request = st.tuples(
        st.sampled_from([0, 1, 1, 1, 2]),  # units since the one before
        st.integers(20, 39),
        st.integers(1, 8),
        st.integers(0, 2),
        st.sampled_from(TIERS),
        st.sampled_from(["a", "b"]),
    )
    requests = st.lists(request, min_size=8, max_size=MOST_REQUESTS)

    def run(requests: list[tuple[int, int, int, int, Any, str]]) -> None:
        _Overload(maker, requests).run()

    explore(
        run, Effort(max(1, effort.examples // 2), effort.steps, effort.seed, effort.shrinks // 3), requests=requests
    )


class _Overload:
    def __init__(self, maker: Callable[[], Any], requests: list[tuple[int, int, int, int, Any, str]]) -> None:
        self.story = Story()
        made = maker()
        self.story.tell("the settings are asked for starvation_bound_s")
        self.bound_s = made.starvation_bound_s
        usable = isinstance(self.bound_s, (int, float)) and not isinstance(self.bound_s, bool)
        if not usable or not isfinite(self.bound_s) or self.bound_s < 0:
            self.story.end(f"starvation_bound_s is {self.bound_s!r}; it is a number of seconds of at least 0, or None")
        unit_s = SPAN * self.bound_s / MOST_REQUESTS or UNIT_S
        self.engine = FakeEngine(CONFIG, batching=made, kv_blocks=256, step_s=0.9 * unit_s)
        self.coming: list[tuple[float, tuple[int, int, int, int, Any, str]]] = []
        at_s = 0.0
        for one in requests:
            at_s += one[0] * unit_s
            self.coming.append((at_s, one))
        self.story.tell(
            f"places for {CONFIG.max_batch_size} requests, steps of {0.9 * unit_s:g} s; the bound is {self.bound_s:g} s"
        )

    def run(self) -> None:
        """Serve them all and look at every start."""
        engine = self.engine
        for _ in range(5000):
            self._arrivals()
            if engine.book.idle:
                if not self.coming:
                    return
                engine.wait(max(0.0, self.coming[0][0] - engine.clock()))
                continue
            waiting = {row.request for row in engine.view().waiting}
            now_s = engine.clock()
            bound = engine.step()
            started = [engine.requests[row.plan.request] for row in bound.rows if row.plan.request in waiting]
            if started:
                self.story.tell(f"at {now_s:g} s started: {', '.join(str(one.number) for one in started)}")
                still = {row.request for row in engine.view().waiting}
                for request in [engine.requests[number] for number in sorted(still)]:
                    self._compare(request, started)
            if not bound.rows:
                engine.wait(UNIT_S)
        self.story.end("the requests do not come to an end")

    def _arrivals(self) -> None:
        engine = self.engine
        while self.coming and self.coming[0][0] <= engine.clock() + 1e-12:
            at_s, (_, prompt_tokens, max_tokens, priority, tier, tenant) = self.coming.pop(0)
            number = len(engine.requests)
            prompt = [number, *range(1, prompt_tokens)]
            engine.submit(prompt, max_tokens, priority=priority, tier=tier, tenant=tenant, arrived_s=at_s)
            self.story.tell(
                f"at {at_s:g} s request {number + 1} arrives: {prompt_tokens} + {max_tokens} tokens, "
                f"priority {priority}, {tier}, tenant {tenant}"
            )

    def _compare(self, left: FakeRequest, started: list[FakeRequest]) -> None:
        for other in started:
            allowed_s = self.bound_s * max(1, other.priority - left.priority)
            later_s = other.arrived_s - left.arrived_s
            if later_s > allowed_s + 1e-9:
                self.story.end(
                    f"request {other.number} was started while request {left.number} waited, which had arrived "
                    f"{later_s:g} s earlier; {allowed_s:g} s are claimed for their priorities"
                )
