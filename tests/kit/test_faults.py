"""Fault injection: policies that fail on purpose do so in an engine, which goes on."""

from __future__ import annotations

import pytest

from kimicore.config import EngineConfig
from kimicore.errors import ConfigError
from kimicore.policies.batching.fcfs import Fcfs
from kimicore.policies.eviction.lru import Lru
from kimicore.policies.padding.packed import Packed
from kimicore.testing import FakeEngine, ManualClock
from kimicore.testing.faults import Nonsense, Raising, Slow
from kimicore.types import Shape

CONFIG = EngineConfig(max_batch_size=4)


def served(**policies: object) -> FakeEngine:
    """Serve requests that fill a small arena, and see that each gives what it gives alone."""
    engine = FakeEngine(CONFIG, kv_blocks=8, **policies)
    for at in range(12):
        engine.submit([at] * 50, max_tokens=6)
    engine.run()
    engine.check_integrity()
    for request in engine.requests.values():
        assert request.tokens == engine.expected(request)
    return engine


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("batching", Raising(Fcfs(), on="rank", every=3)),
        ("batching", Nonsense(Fcfs(), on="rank", every=2)),
        ("eviction", Raising(Lru(), on="victims", every=2)),
        ("eviction", Raising(Lru(), on="added", every=4, error=KeyError("lost"))),
        ("eviction", Nonsense(Lru(), on="victims")),
        ("eviction", Nonsense(Lru(), on="victims", answer=lambda right: right[:0])),
        ("padding", Raising(Packed(), on="shape", every=5)),
        ("padding", Nonsense(Packed(), on="shape", answer=lambda right: Shape(right.tokens, 0, right.blocks))),
    ],
)
def test_the_engine_outlives_a_failing_policy(kind: str, fault: Raising | Nonsense):
    """Every text is right, and the faults are counted under the policy's own name, whatever it does."""
    engine = served(**{kind: fault})
    assert engine.faults(kind).count > 0
    assert engine.faults(kind).name == fault.policy.name
    assert engine.faults(kind).count >= fault.calls // fault.every > 0
    assert engine.stats().policy_faults == sum(engine.faults(one).count for one in ("batching", "eviction", "padding"))


def test_without_a_fault_nothing_is_counted():
    """The same traffic under sound policies leaves no fault."""
    engine = served(batching=Fcfs(), eviction=Lru(), padding=Packed())
    assert engine.stats().policy_faults == 0
    assert engine.stats().evicted_blocks > 0


def test_slowness_is_told_to_a_clock():
    """A slow policy answers rightly, later by what it was told to take."""
    clock = ManualClock()
    slow = Slow(Fcfs(), on="rank", seconds=0.5, every=2, wait=clock.advance)
    engine = served(batching=slow)
    assert engine.faults("batching").count == 0
    assert clock() == pytest.approx(0.5 * (slow.calls // 2))
    assert slow.calls >= 2


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Raising(Fcfs(), on="rang"), "on='rang'"),
        (lambda: Raising(Fcfs(), on="rank", every=0), "every=0"),
        (lambda: Raising(Packed(), on="rank"), "on='rank'"),
        (lambda: Nonsense(Lru(), on="touched"), "on='touched'"),
        (lambda: Raising(Fcfs(), on="victims").start(None), "on='victims'"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(make: object, named: str):
    """A method that the policy has not, or a rhythm that is none, is a ConfigError that names it."""
    with pytest.raises(ConfigError, match=named):
        make()
