"""Least remaining work first: what counts as work, what is learned, and who is overtaken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Rig, prompt_of

from kimicore.contracts import RowView, StepLimits, StepView
from kimicore.cost import StepTimeModel
from kimicore.errors import ConfigError
from kimicore.plan import Planner
from kimicore.policies.batching.shortest_remaining import TENANTS, ShortestRemaining
from kimicore.policies.padding.packed import Packed

LIMITS = StepLimits(8, 64, 1, 0.05, 1e9)
COST = StepTimeModel()


def row(
    request: int,
    *,
    arrived_s: float = 0.0,
    state: Any = "waiting",
    prompt: int = 100,
    computed: int = 0,
    generated: int = 0,
    output: int = 100,
    tenant: str = "",
    preemptions: int = 0,
) -> RowView:
    known = prompt + generated
    limit = prompt + output
    return RowView(request, state, arrived_s, 0, tenant, prompt, known, computed, limit, generated, preemptions, "last")


def view(*rows: RowView) -> StepView:
    by_state = {state: tuple(one for one in rows if one.state == state) for state in ("running", "waiting")}
    return StepView(1.0, by_state["running"], by_state["waiting"], LIMITS)


@pytest.mark.parametrize(
    "wrong",
    [{"aging_tokens_per_s": 0}, {"output_weight": -1}, {"decay": 1.0}, {"preempt_ratio": 1.0}, {"preempt_ratio": "2"}],
)
def test_a_setting_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    """A setting that cannot be is a ConfigError with its name."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ShortestRemaining(**wrong)


def test_what_is_computed_already_does_not_count() -> None:
    """The order is by prompt tokens left plus output left, before anything was learned by the limit."""
    rows = [
        row(1, prompt=300, output=50, state="running", computed=200),  # 100 + 50
        row(2, prompt=90, output=50),  # 140
        row(3, prompt=10, output=200),  # 210
        row(4, prompt=10, output=100, generated=90, state="running", computed=99),  # 1 + 10
    ]
    assert ShortestRemaining().start(LIMITS).rank(view(*rows), COST).order == (4, 2, 1, 3)
    heavy = ShortestRemaining(output_weight=3.0).start(LIMITS)
    assert heavy.rank(view(*rows), COST).order == (4, 2, 1, 3)
    assert ShortestRemaining(output_weight=0.0).start(LIMITS).rank(view(*rows), COST).order == (4, 3, 2, 1)


def test_a_second_of_waiting_counts() -> None:
    """A request with 100 tokens more goes first once it has waited for a second longer, and not before."""
    policy = ShortestRemaining(aging_tokens_per_s=100.0)
    newer = [row(2, arrived_s=0.99, prompt=100), row(3, arrived_s=1.01, prompt=100)]
    assert policy.start(LIMITS).rank(view(row(1, prompt=200), *newer), COST).order == (2, 1, 3)


def learned(tenant_outputs: Sequence[tuple[str, int]], policy: ShortestRemaining | None = None) -> Any:
    """Return a state that has seen requests of these tenants end after so many tokens."""
    state = (policy or ShortestRemaining()).start(LIMITS)
    for at, (tenant, tokens) in enumerate(tenant_outputs):
        ran = row(1000 + at, state="running", generated=tokens - 1, output=500, computed=99 + tokens, tenant=tenant)
        state.rank(view(ran), COST)
        state.rank(view(), COST)
    return state


def test_outputs_are_learned_by_tenant() -> None:
    """A tenant whose requests end early goes before one whose requests use their limit; limits still cap."""
    state = learned([("short", 10)] * 3 + [("long", 400)] * 3)
    rows = [row(1, tenant="long", output=500), row(2, tenant="short", output=500), row(3, tenant="long", output=5)]
    assert state.rank(view(*rows), COST).order == (3, 2, 1)


def test_a_new_tenant_is_taken_for_an_average_one() -> None:
    """Requests of a tenant that nothing is known of stand between those of quick and slow tenants."""
    state = learned([("short", 10), ("long", 400)] * 30)
    rows = [row(at, tenant=tenant, output=500) for at, tenant in enumerate(("long", "new", "short"))]
    assert state.rank(view(*rows), COST).order == (2, 1, 0)


def test_a_preempted_request_has_not_ended() -> None:
    """A running request that waits again teaches nothing about outputs."""
    state = ShortestRemaining().start(LIMITS)
    state.rank(view(row(1, state="running", generated=1, computed=100, output=500)), COST)
    state.rank(view(row(1, generated=1, output=500, preemptions=1)), COST)
    rows = [row(2, prompt=10, output=300), row(3, prompt=100, output=200)]
    assert state.rank(view(*rows), COST).order == (3, 2)


def test_what_is_remembered_is_bounded() -> None:
    """Means of at most 1024 tenants are kept, those seen last."""
    state = learned([(f"tenant-{at}", 5) for at in range(TENANTS + 50)])
    assert len(state._outputs._tenants) == TENANTS
    assert "tenant-0" not in state._outputs._tenants
    assert f"tenant-{TENANTS + 49}" in state._outputs._tenants


def test_nobody_is_preempted_unless_asked_for() -> None:
    """Urgency is flat by default; with a ratio a waiting request is more urgent than one with far more left to do."""
    rows = [row(1, state="running", computed=10, prompt=2000), row(2, prompt=20, output=20), row(3, prompt=1900)]
    assert ShortestRemaining().start(LIMITS).rank(view(*rows), COST).urgency == {}
    urgency = ShortestRemaining(preempt_ratio=4.0).start(LIMITS).rank(view(*rows), COST).urgency
    assert urgency[2] > urgency[1] >= urgency[3]


def test_what_would_be_computed_again_keeps_a_row_its_place() -> None:
    """A running request that has computed as much as it has left is not worth replacing."""
    rows = [row(1, state="running", computed=1000, prompt=2000), row(2, prompt=100, output=20)]
    urgency = ShortestRemaining(preempt_ratio=4.0).start(LIMITS).rank(view(*rows), COST).urgency
    assert urgency[1] >= urgency[2]


ROWS = st.lists(
    st.tuples(st.integers(1, 400), st.integers(1, 400), st.integers(0, 300), st.booleans(), st.integers(0, 5)),
    max_size=10,
)


@given(st.lists(ROWS, min_size=1, max_size=3))
def test_every_answer_is_complete_and_repeatable(seen: list[list[tuple[int, int, int, bool, int]]]) -> None:
    """Any sequence of views is answered with every request once, the same when it is told again or asked twice."""
    states = [ShortestRemaining(preempt_ratio=2.0).start(LIMITS) for _ in range(2)]
    for rows in seen:
        now = view(
            *[
                row(
                    at,
                    prompt=prompt,
                    output=output,
                    arrived_s=0.1 * at,
                    state="running" if runs else "waiting",
                    computed=min(computed, prompt - 1) if runs else 0,
                    tenant=str(tenant),
                )
                for at, (prompt, output, computed, runs, tenant) in enumerate(rows)
            ]
        )
        answers = [state.rank(now, COST) for state in (*states, states[0])]
        assert answers[0] == answers[1] == answers[2]
        assert sorted(answers[0].order) == list(range(len(rows)))
        assert all(urgency > 0.0 for urgency in answers[0].urgency.values())


@settings(max_examples=15, deadline=None)
@given(st.integers(20, 60), st.integers(1, 20), st.floats(50.0, 400.0))
def test_a_long_request_is_overtaken_only_for_a_while(prompt: int, output: int, per_s: float) -> None:
    """In an endless overload of short requests a long one is passed only by such as arrive within its work over the
    rate of aging after it."""
    rig = Rig(max_batch_size=2, max_batch_tokens=64, seconds=lambda step: 0.01)
    rig.planner = Planner(ShortestRemaining(aging_tokens_per_s=per_s), Packed(), rig.limits)
    number = -1
    for at in range(600):
        while len(rig.book.view(rig.clock()).waiting) < 6:
            rig.submit(prompt_of(4, at + 7), 2)
        if at == 3:
            number = rig.submit(prompt_of(prompt, 1), output)
        if any(one.plan.request == number for one in rig.step().rows):
            break
    else:
        raise AssertionError("it never began")
    arrived_s = rig.news[number].arrived_s
    begun = [new for new in rig.news.values() if rig.out[new.number].firsts and new.number != number]
    latest_s = max(new.arrived_s for new in begun)
    assert latest_s <= arrived_s + (prompt + output) / per_s
    rig.finish()
    rig.assert_right(number)
