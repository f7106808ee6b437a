"""Choosing a policy by its name changes what the engine does."""

import pytest

from kimicore import EngineConfig
from kimicore.testing import FakeEngine


def served(config):
    """Return whose requests start, in order: the first tenant has three, then the second comes with one."""
    engine = FakeEngine(config)
    for at, tenant in enumerate(["first", "first", "first", "second"]):
        engine.submit([at, 1, 2, 3], max_tokens=4, tenant=tenant)
    engine.run()
    return [request.tenant for request in engine.start_order]


def test_tenants_take_turns():
    """With one place, the second tenant waits for one request of the first and not for three."""
    assert served(EngineConfig(max_batch_size=1)) == ["first", "first", "first", "second"]
    assert served(EngineConfig(max_batch_size=1, batching="tenant-turns")) == ["first", "second", "first", "first"]


def test_a_setting_reaches_the_policy():
    """Two in a row are two before the turn goes on."""
    config = EngineConfig(max_batch_size=1, batching="tenant-turns", policy={"batching": {"in_a_row": 2}})
    assert served(config) == ["first", "first", "second", "first"]


@pytest.mark.parametrize(("eviction", "cached_tokens"), [("lru", 0), ("deepest-first", 32)])
def test_common_beginnings_stay(eviction, cached_tokens):
    """The beginning of an old sequence outlives the deeper blocks of a younger one."""
    engine = FakeEngine(EngineConfig(eviction=eviction), kv_blocks=8)
    old = [1] * 40
    for prompt in (old, [2] * 95, [3] * 40, old):
        request = engine.submit(prompt, max_tokens=1)
        engine.run()
    assert request.cached_tokens == cached_tokens
