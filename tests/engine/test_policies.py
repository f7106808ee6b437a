"""Policies inside a running engine: their settings, their faults, and what requests say to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kimicore import Choice, ConfigError, Engine, EngineConfig, InvalidRequest, PluginError, Retention
from rigs.installed import bad_policies
from rigs.settle import settled

pytestmark = pytest.mark.anyio
Alone = Callable[..., Choice]
FLOAT: dict[str, Any] = {"dtype": "float32"}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}

POLICIES = """
import time

from attrs import frozen

from kimicore.policies.batching.fcfs import Fcfs, FcfsState
from kimicore.policies.eviction.lru import Lru, LruState
from kimicore.policies.padding.packed import Packed


class BadRank(FcfsState):
    def rank(self, view, cost):
        raise RuntimeError("no order today")


class ExitRank(FcfsState):
    def rank(self, view, cost):
        raise SystemExit(3)


class SlowRank(FcfsState):
    def rank(self, view, cost):
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            pass
        return super().rank(view, cost)


class BadVictims(LruState):
    def victims(self, count, evictable, now_s):
        return [b"nobody"] * count


@frozen
class Batching:
    how: str = "raises"
    name: str = "bad-batching"

    def start(self, limits):
        if self.how == "cannot start":
            raise RuntimeError("no start today")
        if self.how == "exits at start":
            raise SystemExit(3)
        if self.how == "no state":
            return None
        return {"raises": BadRank, "slow": SlowRank, "exits": ExitRank}[self.how]()


class Eviction:
    name = "bad-eviction"

    def start(self, capacity_blocks, ghost_blocks, seed):
        return BadVictims()


class Padding(Packed):
    def __init__(self):
        super().__init__(name="bad-padding")

    def shape(self, tokens, rows, blocks):
        return None
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with policies that break their promises, on the path."""
    bad_policies(tmp_path, monkeypatch, "bad_engine_policies", POLICIES, KINDS)


KINDS = ("batching", "eviction", "padding")


async def _many(engine: Engine, count: int, **asked: Any) -> list[Choice]:
    results: list[Any] = [None] * count

    async def one(at: int) -> None:
        results[at] = (await engine.generate([5 + at, *range(30, 70)], **asked)).choices[0]

    async with anyio.create_task_group() as group:
        for at in range(count):
            group.start_soon(one, at)
    return results


async def test_broken_policies_cost_no_request_anything(installed: None, tiny: Path, alone: Alone) -> None:
    """With all three policies broken, every request gets what it gets alone; faults are counted, policies set aside."""
    config = EngineConfig(
        **{kind: f"bad-{kind}" for kind in KINDS},
        policy_fault_limit=5,
        kv_device_bytes="64KiB",
        max_batch_size=4,
        **FLOAT,
    )
    async with Engine(tiny, config) as engine:
        got = await _many(engine, 12, max_tokens=12, **GREEDY)
        stats = engine.stats()
        assert stats.evicted_blocks > 0
        assert stats.policy_faults == 15
        assert stats.policies_set_aside == ("batching:bad-batching", "padding:bad-padding", "eviction:bad-eviction")
        await settled(engine)
    assert got == [alone([5 + at, *range(30, 70)], max_tokens=12, **GREEDY) for at in range(12)]


async def test_a_policy_that_fails_is_named_in_the_log(
    installed: None, tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the default serves in a policy's place, a warning says why, and the statistics say for whom
    (vllm-project/vllm#48277)."""
    config = EngineConfig(batching="bad-batching", policy_fault_limit=2, **FLOAT)
    async with Engine(tiny, config) as engine:
        assert engine.config.batching == "bad-batching"
        await engine.generate([5, 6], max_tokens=4, **GREEDY)
        assert engine.stats().policies_set_aside == ("batching:bad-batching",)
    text = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len([one for one in text if "'bad-batching'" in one and "no order today" in one]) == 2
    assert "it is set aside, the default serves from now on" in text[-1]


async def test_three_engines_import_a_policy_once(installed: None, tiny: Path, tmp_path: Path) -> None:
    """A plugin's module is run once in a process, whatever number of engines choose it, and never where none does
    (vllm-project/vllm#10443)."""
    source = tmp_path / "bad_engine_policies.py"
    note = tmp_path / "imports"
    source.write_text(f"{POLICIES}\nwith open({str(note)!r}, 'a') as file:\n    file.write('imported ')\n")
    async with Engine(tiny, EngineConfig(**FLOAT)):
        assert not note.exists()
    for _ in range(3):
        async with Engine(tiny, EngineConfig(batching="bad-batching", **FLOAT)):
            assert note.read_text() == "imported "


async def test_a_slow_policy_is_set_aside(installed: None, tiny: Path, alone: Alone) -> None:
    """An installed policy that takes longer than its limit is a fault each time, and then not asked any more."""
    config = EngineConfig(
        batching="bad-batching",
        policy={"batching": {"how": "slow"}},
        policy_limit_s=0.01,
        policy_fault_limit=3,
        **FLOAT,
    )
    async with Engine(tiny, config) as engine:
        got = await engine.generate([5, 6], max_tokens=8, **GREEDY)
        assert engine.stats().policy_faults == 3
        assert engine.stats().policies_set_aside == ("batching:bad-batching",)
    assert got.choices[0] == alone([5, 6], max_tokens=8, **GREEDY)


async def test_a_policy_that_exits_ends_nothing(installed: None, tiny: Path, alone: Alone) -> None:
    """SystemExit out of a policy is a fault like another: the engine serves on."""
    config = EngineConfig(batching="bad-batching", policy={"batching": {"how": "exits"}}, **FLOAT)
    async with Engine(tiny, config) as engine:
        got = await engine.generate([5, 6], max_tokens=8, **GREEDY)
        assert engine.stats().policy_faults > 0
    assert got.choices[0] == alone([5, 6], max_tokens=8, **GREEDY)


async def test_a_policy_that_cannot_start_is_an_error_of_opening(installed: None, tiny: Path) -> None:
    """start() that raises or gives no state, a setting that is none and a name that is none end the opening, named
    (vllm-project/vllm#48277)."""
    for config, fault, message in (
        ({"batching": "bad-batching", "policy": {"batching": {"how": "exits at start"}}}, PluginError, "SystemExit"),
        (
            {"batching": "bad-batching", "policy": {"batching": {"how": "no state"}}},
            PluginError,
            r"batching='bad-batching': start\(\) gave no batching state but a NoneType: it lacks rank",
        ),
        ({"batching": "bad-batching", "policy": {"batching": {"how": "cannot start"}}}, PluginError, "no start today"),
        ({"policy": {"batching": {"aging_s": 1}}}, ConfigError, r"policy\.batching\.aging_s: 'fcfs' has no such"),
        ({"batching": "priority", "policy": {"batching": {"aging_s": -1}}}, ConfigError, "aging_s=-1"),
        ({"eviction": "lruu"}, PluginError, "did you mean 'lru'"),
    ):
        with pytest.raises(fault, match=message):
            await Engine(tiny, EngineConfig(**config, **FLOAT)).open()


async def test_a_kept_prefix_is_found_again(tiny: Path) -> None:
    """A prompt that was asked to be kept is still cached after others have filled the arena; another one is not."""
    prompt = [7, *range(40, 104)]
    for wish, cached in (((), 0), ([Retention(seconds=1e6)], 64)):
        async with Engine(tiny, EngineConfig(kv_device_bytes="96KiB", max_batch_size=1, **FLOAT)) as engine:
            await engine.generate(prompt, max_tokens=1, retain=wish, **GREEDY)
            await _many(engine, 12, max_tokens=12, **GREEDY)
            assert engine.stats().evicted_blocks > 0
            assert (await engine.generate(prompt, max_tokens=1, **GREEDY)).usage.cached_tokens == cached


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tier": "vip"}, "tier='vip': must be one of interactive, standard, background"),
        ({"tier": None}, "tier=None"),
        ({"retain": [3]}, r"retain=\[3\]: must be a list of kimicore.Retention"),
        ({"retain": 3}, "retain=3: must be a list"),
    ],
)
async def test_wrong_wishes_are_refused(shared: Engine, fields: dict[str, Any], message: str) -> None:
    """A tier that is none and a retention that is none are refused before any work."""
    with pytest.raises(InvalidRequest, match=message):
        await shared.generate([5], **fields)
    await settled(shared)
