"""The conformance kit of batching policies."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from kimicore.contracts import Batching, BatchingState, StepLimits
from kimicore.testing.engine_check import check_in_engine
from kimicore.testing.overload import check_starvation, claims_a_bound
from kimicore.testing.promises import Check, Effort, Together, explore_machine, named
from kimicore.testing.settings_check import check_settings

__all__ = ["check_batching"]

PROMISES = {
    "settings": "the settings are a frozen record with a name, and each start() gives a state of its own",
    "never-raises": "no view of requests makes it raise",
    "complete": "the order names every request of the view once and no other",
    "wishes": "urgency and chunks name requests of the view only; they are finite, and a chunk is at least 1 token",
    "held": "only waiting requests are held back",
    "unchanged": "it changes nothing that it is given",
    "repeatable": "the same views give the same answers, in every process",
    "starvation": "nobody waits while somebody is started who came later by more than the bound that it claims",
    "engine": "in the engine's own book and planner it serves real traffic without a fault, and everybody to the end",
}
_BY_MACHINE = ("never-raises", "complete", "wishes", "held", "unchanged", "repeatable")
_LIMITS = StepLimits(max_batch_size=8, max_batch_tokens=64, min_batch_size=1, max_wait_s=0.05, target_step_s=0.05)


def check_batching(maker: Callable[[], Batching], *, examples: int = 60, steps: int = 30, seed: int = 0) -> list[Check]:
    """Return the checks of a batching policy, one for each promise of :class:`~kimicore.contracts.BatchingState`.

    ``maker``: called without arguments, returns the settings: the class itself, or a function that gives some.
    ``examples``, ``steps``: how many histories each check tries and how many events one has; ``seed`` chooses them.
    The check "starvation" is there where the settings have a ``starvation_bound_s`` that is not None.
    Under pytest: ``@pytest.mark.parametrize("check", check_batching(MyPolicy), ids=str)`` over a test that calls
    ``check()``. Nothing runs before that.
    """
    effort = Effort(examples, steps, seed)
    together = Together(partial(_by_machine, maker, effort), _BY_MACHINE)
    searches: dict[str, Callable[[], None]] = {
        "settings": lambda: check_settings("batching", maker, lambda made: made.start(_LIMITS), BatchingState),
        **{name: partial(together.check, name) for name in _BY_MACHINE},
        "engine": lambda: check_in_engine("batching", maker, effort),
    }
    if claims_a_bound(maker):
        searches["starvation"] = lambda: check_starvation(maker, effort)
    policy = named(maker)
    return [
        Check("batching", policy, name, promise, searches[name])
        for name, promise in PROMISES.items()
        if name in searches
    ]


def _by_machine(maker: Callable[[], Any], effort: Effort, promises: Collection[str]) -> None:
    def machine() -> Any:
        from kimicore.testing.batching_machine import BatchingMachine

        return BatchingMachine(maker, promises)

    explore_machine(machine, effort)
