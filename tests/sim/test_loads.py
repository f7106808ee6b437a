"""Drawn loads are repeatable and have the rates, lengths and shares that were asked for."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from kimicore.errors import ConfigError
from kimicore.sim.loads import CHAT, CODE, LOADS, Lengths, bursts, diurnal, multi_turn, poisson, scaled, with_tiers
from kimicore.sim.traces import TraceRequest


@pytest.mark.parametrize("name", sorted(LOADS))
def test_a_seed_gives_the_same_load(name: str) -> None:
    """The same arguments give the same requests, another seed gives others, and they come in order."""
    make = LOADS[name]
    load = make(2.0, 200.0, seed=3, tenants=4)
    assert load == make(2.0, 200.0, seed=3, tenants=4)
    assert load != make(2.0, 200.0, seed=4, tenants=4)
    assert load == sorted(load, key=lambda one: one.arrived_s)
    assert {one.tenant for one in load} == {f"tenant-{at}" for at in range(4)}


@pytest.mark.parametrize("make", [poisson, bursts, diurnal])
def test_the_mean_rate_is_kept(make: Any) -> None:
    """Over a long time a load has the rate that was asked for."""
    more = {"period_s": 1000.0} if make is diurnal else {}
    load = make(5.0, 8000.0, seed=1, **more)
    assert len(load) == pytest.approx(40_000, rel=0.06)


def test_arrivals_vary_as_their_process_does() -> None:
    """Counts per 10 seconds vary as their mean in a Poisson process, and much more with bursts."""

    def dispersion(load: list[TraceRequest]) -> float:
        counts = Counter(int(one.arrived_s / 10.0) for one in load)
        bins = [counts[at] for at in range(400)]
        return statistics.variance(bins) / statistics.mean(bins)

    assert 0.8 < dispersion(poisson(5.0, 4000.0, seed=2)) < 1.25
    assert dispersion(bursts(5.0, 4000.0, seed=2)) > 5.0


def test_the_day_swings() -> None:
    """The first and last quarters of a period, at night, have far fewer requests than the middle."""
    load = diurnal(2.0, 4000.0, seed=1, period_s=4000.0)
    night = sum(1 for one in load if not 1000.0 <= one.arrived_s < 3000.0)
    assert night < 0.5 * (len(load) - night)


@pytest.mark.parametrize(("lengths", "prompt", "output"), [(CHAT, 759, 151), (CODE, 1095, 16)])
def test_lengths_follow_their_distribution(lengths: Lengths, prompt: int, output: int) -> None:
    """Medians are the published ones, and no length passes its limit."""
    load = poisson(50.0, 200.0, seed=1, lengths=lengths)
    assert statistics.median(one.prompt_tokens for one in load) == pytest.approx(prompt, rel=0.05)
    assert statistics.median(one.output_tokens for one in load) == pytest.approx(output, rel=0.05)
    assert max(one.prompt_tokens for one in load) <= lengths.most_prompt_tokens


def test_turns_repeat_what_was_said() -> None:
    """A later turn's prompt begins with the blocks of the one before it; conversations share the system's start."""
    load = multi_turn(0.5, 400.0, seed=1, system_tokens=128)
    talks: dict[int, list[TraceRequest]] = {}
    for one in load:
        talks.setdefault(one.blocks[2] >> 20 if len(one.blocks) > 2 else -1, []).append(one)
    talks.pop(-1, None)
    assert max(map(len, talks.values())) > 3
    for turns in talks.values():
        for before, after in pairwise(turns):
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert after.blocks[: len(before.blocks)] == before.blocks
    assert {one.blocks[:2] for one in load if len(one.blocks) > 2} == {(0, 1)}
    several = sum(1 for turns in talks.values() if len(turns) > 1)
    assert several / len(talks) == pytest.approx(0.73, abs=0.08)


def test_scaling_draws_arrivals_together() -> None:
    """Twice the load has the same requests in half the time."""
    load = poisson(2.0, 100.0)
    twice = scaled(load, 2.0)
    assert [one.arrived_s for one in twice] == [one.arrived_s / 2.0 for one in load]
    assert [one.prompt_tokens for one in twice] == [one.prompt_tokens for one in load]


def test_tiers_are_drawn_by_share() -> None:
    """Shares are kept, the draw is repeatable, and a tier that a request has stays."""
    load = poisson(50.0, 200.0)
    counts = Counter(one.tier for one in with_tiers(load))
    assert counts["interactive"] / len(load) == pytest.approx(0.2, abs=0.02)
    assert counts["background"] / len(load) == pytest.approx(0.2, abs=0.02)
    assert with_tiers(load, seed=1) == with_tiers(load, seed=1) != with_tiers(load, seed=2)
    assert {one.tier for one in with_tiers(with_tiers(load, {"background": 1.0}))} == {"background"}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: poisson(0.0, 10.0), "rate"),
        (lambda: poisson(1.0, -1.0), "duration_s"),
        (lambda: poisson(1e5, 1e6), "lower one"),
        (lambda: poisson(1e-9, 1.0), "no request"),
        (lambda: poisson(1.0, 10.0, tenants=0), "tenants"),
        (lambda: bursts(1.0, 10.0, factor=0.5), "factor"),
        (lambda: diurnal(1.0, 10.0, swing=2.0), "swing"),
        (lambda: multi_turn(1.0, 10.0, turns=0.0), "turns"),
        (lambda: Lengths(prompt_median=0.0), "prompt_median"),
        (lambda: scaled([], 0.0), "load"),
        (lambda: with_tiers([], {"urgent": 1.0}), "urgent"),
        (lambda: with_tiers([], {"standard": 0.0}), "shares"),
    ],
)
def test_wrong_figures_are_refused(make: Any, match: str) -> None:
    """Each is a ConfigError that names the argument."""
    with pytest.raises(ConfigError, match=match):
        make()
