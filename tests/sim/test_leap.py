"""Leaping changes nothing: every figure of a simulation is that of single steps."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kimicore.plugins import KINDS
from kimicore.sim.cost import StepTimes
from kimicore.sim.settings import SimConfig
from kimicore.sim.simulator import simulate
from kimicore.sim.traces import TraceRequest
from kimicore.types import TIERS

EXAMPLES = 150
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking a trace takes minutes and shows little


@st.composite
def traces(draw: Any) -> list[TraceRequest]:
    """Requests in bursts and with pauses; some share the start of their prompts."""
    moments = draw(st.lists(st.sampled_from([0.0, 0.0, 0.003, 0.02, 0.1, 0.7, 5.0]), min_size=1, max_size=24))
    now_s, found = 0.0, []
    for wait_s in moments:
        now_s += wait_s
        prompt = draw(st.integers(1, 90))
        family = draw(st.integers(0, 3))
        ids = tuple(10 * family + at for at in range(min(4, -(-prompt // 16)))) if family else ()
        found.append(
            TraceRequest(
                now_s,
                prompt,
                draw(st.sampled_from([1, 2, 3, 7, 20, 20, 60])),
                ids,
                16 if ids else 0,
                draw(st.sampled_from([None, *TIERS])),
                draw(st.sampled_from(["", "other"])),
                draw(st.integers(-1, 2)),
            )
        )
    return found


CONFIGS = st.builds(
    SimConfig,
    batching=st.sampled_from(sorted(KINDS["batching"])),
    eviction=st.sampled_from(sorted(KINDS["eviction"])),
    padding=st.sampled_from(sorted(KINDS["padding"])),
    max_batch_size=st.sampled_from([1, 3, 8]),
    max_batch_tokens=st.sampled_from([8, 32, 256]),
    min_batch_size=st.just(1),
    max_wait_s=st.sampled_from([0.0, 0.05, 0.3]),
    target_step_s=st.sampled_from([0.004, 0.05]),
    max_waiting=st.sampled_from([4, 100]),
    kv_blocks=st.sampled_from([8, 12, 24, 200]),
    block_tokens=st.sampled_from([4, 16, 24]),
    streamed=st.booleans(),
    times=st.sampled_from([StepTimes(), StepTimes(base_s=1e-3, per_token_s=1e-4, per_context_s=3e-6)]),
)


def figures(trace: list[TraceRequest], config: SimConfig) -> dict[str, Any]:
    """Everything that a simulation measures, but the looks at gauges."""
    report = simulate(trace, config=config)
    record = report.record
    return {
        "outcomes": record.outcomes,
        "gaps": list(zip(record.gaps_s, record.gap_tokens, strict=True)),
        "shapes": dict(record.shapes),
        "sums": (record.busy_s, record.real_tokens, record.drawn_tokens, record.padded_tokens),
        "stats": report.stats,
        "makespan": report.makespan_s,
    }


def assert_same(trace: list[TraceRequest], config: SimConfig) -> None:
    leapt, single = figures(trace, config), figures(trace, evolve(config, leap=False))
    for name, value in single.items():
        assert leapt[name] == value, name


@settings(max_examples=EXAMPLES, deadline=None, phases=PHASES)
@given(traces(), CONFIGS)
def test_leaping_equals_single_steps(trace: list[TraceRequest], config: SimConfig) -> None:
    """Under every policy, with short memory and full queues, times and counters are the same to the last bit."""
    assert_same(trace, config)


@settings(max_examples=EXAMPLES // 3, deadline=None, phases=PHASES)
@given(traces(), CONFIGS, st.sampled_from([2, 3]))
def test_leaping_equals_single_steps_while_prompts_are_held_back(
    trace: list[TraceRequest], config: SimConfig, company: int
) -> None:
    """Prompts that wait for company are let in at the same moment."""
    assert_same(trace, evolve(config, min_batch_size=min(company, config.max_batch_size), max_waiting=100))


@pytest.mark.parametrize("batching", sorted(KINDS["batching"]))
def test_requests_that_end_together_end_in_the_policys_order(batching: str) -> None:
    """Where several requests end in one step, their blocks enter the cache in the order of single steps."""
    trace = [TraceRequest(0.0, 40 + at, 30, priority=at % 3) for at in range(8)]
    trace += [TraceRequest(3.0 + at, 100, 4, tuple(range(7)), 16) for at in range(8)]
    assert_same(trace, SimConfig(batching=batching, kv_blocks=40, block_tokens=16))


def test_leaps_replace_most_plans() -> None:
    """A long quiet generation is planned a few times, not once per token."""
    trace = [TraceRequest(0.0, 64, 4000), TraceRequest(30.0, 64, 4000)]
    report = simulate(trace, config=SimConfig())
    assert report.stats.steps > 4000
    assert len(report.record.samples) < 20


def test_prompts_that_were_held_back_start_when_their_wait_is_over() -> None:
    """A leap beside prompts that wait for company ends at the moment at which they wait no longer."""
    trace = [TraceRequest(0.0, 20, 200), TraceRequest(0.2, 30, 20), TraceRequest(0.2, 40, 20)]
    config = SimConfig(min_batch_size=4, max_wait_s=0.3)
    assert_same(trace, config)
    started_s = simulate(trace, config=config).outcomes[1].started_s
    assert started_s is not None
    assert 0.5 <= started_s < 0.52


def test_a_leap_of_no_step_takes_no_block() -> None:
    """Where several requests would end in the very next step, memory is as it was: nobody gives way for a block that
    was handed out for a step that was not done.
    """
    trace = [
        TraceRequest(0.0, 69, 3, (30, 31, 32, 33), 16, tier="interactive", priority=2),
        TraceRequest(0.003, 59, 20, (20, 21, 22, 23), 16, tier="interactive", tenant="other", priority=2),
        TraceRequest(0.006, 20, 7, (20, 21), 16, tenant="other", priority=1),
    ]
    config = SimConfig(batching="tiered", max_batch_size=8, max_batch_tokens=256, kv_blocks=24, block_tokens=4)
    assert_same(trace, config)
    assert [one.preemptions for one in simulate(trace, config=config).record.outcomes] == [0, 0, 0]
