"""The simulator's clock, its counting, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kimicore.errors import ConfigError, KimiCoreError, PluginError
from kimicore.sim.cost import StepTimes
from kimicore.sim.loads import multi_turn, poisson, with_tiers
from kimicore.sim.record import Outcome
from kimicore.sim.settings import SimConfig
from kimicore.sim.simulator import simulate
from kimicore.sim.traces import TraceRequest

SECOND_A_TOKEN = StepTimes(
    base_s=1.0, per_row_s=0.0, per_token_s=0.1, per_sample_s=0.0, per_context_s=0.0, per_pair_s=0.0
)


def outcomes(trace: list[TraceRequest], **settings: Any) -> list[Outcome]:
    """Return what becomes of a trace."""
    return list(simulate(trace, config=SimConfig(**settings)).outcomes)


def test_one_request_takes_its_steps() -> None:
    """A prompt of 10 tokens in one step, then a step for each further token."""
    (one,) = outcomes([TraceRequest(3.0, 10, 3)], times=SECOND_A_TOKEN)
    assert one.started_s == 3.0
    assert one.first_token_s == 3.0 + (1.0 + 1.0)
    assert one.finished_s == pytest.approx(5.0 + 2 * 1.1)
    assert one.tpot_s == pytest.approx(1.1)


def test_a_chunk_is_no_longer_than_the_step_allows() -> None:
    """A prompt of 10 tokens at 4 a step takes three steps to its first token."""
    (one,) = outcomes([TraceRequest(0.0, 10, 1)], times=SECOND_A_TOKEN, max_batch_size=4, max_batch_tokens=4)
    assert one.first_token_s == pytest.approx(1.4 + 1.4 + 1.2)
    assert one.finished_s == one.first_token_s


def test_who_comes_during_a_step_waits_for_its_end() -> None:
    """The second request joins at the step after the one during which it came."""
    first, second = outcomes(
        [TraceRequest(0.0, 10, 20), TraceRequest(2.5, 20, 1)], times=SECOND_A_TOKEN, streamed=False
    )
    assert first.first_token_s == 2.0
    assert second.started_s == pytest.approx(3.1)
    assert second.first_token_s == pytest.approx(3.1 + 1.0 + 0.1 * 21)


def test_dummy_tokens_take_time() -> None:
    """Under padding to powers of two, 9 tokens run as 16."""
    (one,) = outcomes([TraceRequest(0.0, 9, 1)], times=SECOND_A_TOKEN, padding="max-len")
    assert one.first_token_s == pytest.approx(1.0 + 1.6)
    report = simulate([TraceRequest(0.0, 9, 1)], config=SimConfig(padding="max-len"))
    assert report.summary()["padding"] == {"waste_share": pytest.approx(7 / 16), "shapes": 1}


def test_context_and_pairs_and_draws_take_time() -> None:
    """Each part of the model is asked for with the step's own load."""
    times = StepTimes(
        base_s=1.0, per_row_s=2.0, per_token_s=0.0, per_sample_s=4.0, per_context_s=0.01, per_pair_s=0.001
    )
    (one,) = outcomes([TraceRequest(0.0, 10, 2)], times=times, max_batch_size=6, max_batch_tokens=6)
    first = 1.0 + 2.0 + 0.06 + 0.018  # 6 tokens: 18 pairs, no draw
    second = 1.0 + 2.0 + 4.0 + 0.10 + 0.001 * (4 * 6 + 8)
    third = 1.0 + 2.0 + 4.0 + 0.11
    assert one.first_token_s == pytest.approx(first + second)
    assert one.finished_s == pytest.approx(first + second + third)


def test_shared_blocks_are_not_computed_again() -> None:
    """A second prompt with the same ids computes what it does not share; other ids share nothing."""
    same = [TraceRequest(at * 100.0, 60, 1, (1, 2, 3 + at), 20) for at in range(2)]
    first, second = outcomes(same, times=SECOND_A_TOKEN, block_tokens=20)
    assert (first.cached_tokens, second.cached_tokens) == (0, 40)
    assert second.ttft_s == pytest.approx(1.0 + 0.1 * 20)
    assert simulate(same, config=SimConfig(block_tokens=20)).summary()["hit_rate"] == {"device": pytest.approx(1 / 3)}


def test_what_cannot_be_served_is_refused_and_missed() -> None:
    """A prompt beyond the arena and one beyond the queue are counted, and no target is met by them."""
    trace = [TraceRequest(0.0, 100, 5), TraceRequest(0.0, 10_000, 5), *[TraceRequest(0.1, 20, 5)] * 4]
    report = simulate(
        trace, config=SimConfig(kv_blocks=10, block_tokens=16, max_waiting=2, max_batch_size=1, max_batch_tokens=64)
    )
    reasons = [one.reason for one in report.outcomes]
    assert reasons == ["", "too long", "", "", "overloaded", "overloaded"]
    figures = report.summary()
    assert figures["refused"] == {"overloaded": 2, "too long": 1}
    assert figures["finished"] == 3
    assert figures["goodput"]["share"] == pytest.approx(0.5)
    assert figures["tiers"]["standard"]["requests"] == 6


def test_short_memory_preempts_and_everybody_finishes() -> None:
    """Where the arena is short, requests give way, compute again and end with all their tokens."""
    trace = [TraceRequest(0.0, 30, 100) for _ in range(6)]
    report = simulate(trace, config=SimConfig(kv_blocks=20, block_tokens=16))
    assert report.stats.preemptions > 0
    assert all(one.finished_s is not None for one in report.outcomes)
    assert sum(one.preemptions for one in report.outcomes) == report.stats.preemptions
    assert report.stats.completion_tokens == 600
    assert sum(report.record.gap_tokens) == 600 - 6, "each token but a request's first has a gap"


def test_gaps_add_up_to_the_time_from_first_to_last_token() -> None:
    """Nothing of the time between a request's tokens is lost, also across preemptions."""
    trace = with_tiers(poisson(30.0, 5.0, seed=2))
    report = simulate(trace, config=SimConfig(kv_blocks=60, max_batch_size=8, batching="tiered"))
    spans = math.fsum((one.finished_s or 0.0) - (one.first_token_s or 0.0) for one in report.outcomes if not one.reason)
    gaps = math.fsum(s * n for s, n in zip(report.record.gaps_s, report.record.gap_tokens, strict=True))
    assert gaps == pytest.approx(spans)


def test_a_simulation_repeats_itself() -> None:
    """The same arguments give the same report."""
    trace = multi_turn(1.0, 60.0, seed=5)
    config = SimConfig(kv_blocks=300)
    assert simulate(trace, config=config).summary() == simulate(trace, config=config).summary()


def test_progress_is_told_to_the_end() -> None:
    """The last word is that all requests are over."""
    told: list[tuple[int, int, float]] = []
    report = simulate(poisson(5.0, 20.0), progress=lambda *how: told.append(how))
    assert told[-1] == (len(report.outcomes), len(report.outcomes), report.makespan_s)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"eviction": "no-such"}, PluginError, "no-such"),
        ({"policy": {"batching": {"speed": 1}}}, ConfigError, "speed"),
        ({"policy": {"precision": {}}}, ConfigError, "precision"),
        ({"policy": {"eviction": 3}}, ConfigError, "policy"),
        ({"kv_blocks": 0}, ConfigError, "kv_blocks"),
        ({"max_batch_tokens": 8}, ConfigError, "max_batch_tokens"),
        ({"min_batch_size": 65}, ConfigError, "min_batch_size"),
        ({"ttft_s": {"urgent": 1.0}}, ConfigError, "urgent"),
        ({"ttft_s": {"standard": 0.0}}, ConfigError, "standard"),
        ({"ttft_s": 3}, ConfigError, "ttft_s"),
        ({"times": 3}, ConfigError, "times"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], error: type[KimiCoreError], match: str) -> None:
    """Each is refused by name before anything is simulated."""
    with pytest.raises(error, match=match):
        simulate([TraceRequest(0.0, 1, 1)], config=SimConfig(**settings))


def test_a_trace_out_of_order_is_refused() -> None:
    """Requests have to come in the order of their arrivals, and there has to be one."""
    with pytest.raises(ConfigError, match="request 1"):
        simulate([TraceRequest(1.0, 1, 1), TraceRequest(0.0, 1, 1)])
    with pytest.raises(ConfigError, match="no requests"):
        simulate([])


def test_a_priority_under_zero_gives_way() -> None:
    """A waiting request of priority 0 may take the place of a running one of a lower priority."""
    trace = [
        TraceRequest(0.0, 40, 60, priority=-1),
        TraceRequest(0.1, 61, 1, priority=0),
        TraceRequest(0.2, 61, 60, priority=2),
    ]
    report = simulate(trace, config=SimConfig(batching="priority", kv_blocks=8, block_tokens=16))
    assert all(one.finished_s is not None for one in report.outcomes)
    assert report.outcomes[0].preemptions
