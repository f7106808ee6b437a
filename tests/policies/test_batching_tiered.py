"""Tiers: who goes first, who is held, who gives way, and that nobody starves."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Rig, prompt_of

from kimicore.contracts import Ranking, RowView, StepLimits, StepView
from kimicore.errors import ConfigError
from kimicore.plan import Planner
from kimicore.policies.batching.tiered import Tiered, TieredState
from kimicore.policies.padding.packed import Packed
from kimicore.types import TIERS, Tier

LIMITS = StepLimits(8, 64, 1, 0.05, 1e9)


class Linear:
    """A token takes a millisecond, and nothing else takes time."""

    def step_s(self, tokens: int, rows: int, context_tokens: int, attended_tokens: int = 0) -> float:
        return 1e-3 * tokens


def row(
    request: int,
    tier: Tier,
    arrived_s: float = 0.0,
    *,
    state: Any = "waiting",
    prompt: int = 100,
    computed: int = 0,
    output: int = 900,
    generated: int = 0,
    preemptions: int = 0,
) -> RowView:
    return RowView(
        request,
        state,
        arrived_s,
        0,
        "",
        prompt,
        prompt + generated,
        computed,
        prompt + output,
        generated,
        preemptions,
        "last",
        tier=tier,
    )


def running(request: int, tier: Tier, arrived_s: float = 0.0, **more: Any) -> RowView:
    """Return a row that generates."""
    return row(request, tier, arrived_s, state="running", generated=1, computed=100, **more)


def view(now_s: float, rows: Sequence[RowView], limits: StepLimits = LIMITS) -> StepView:
    return StepView(
        now_s,
        tuple(one for one in rows if one.state == "running"),
        tuple(one for one in rows if one.state == "waiting"),
        limits,
    )


def rank(now_s: float, rows: Sequence[RowView], **policy: Any) -> Ranking:
    return Tiered(**policy).start(LIMITS).rank(view(now_s, rows), Linear())


@pytest.mark.parametrize(
    "wrong",
    [
        {"interactive_s": 0},
        {"standard_s": 0.5},
        {"urgent_within_s": -1},
        {"merge_decay": 1.0},
        {"background_share": 0.0},
        {"other_share": 0.6},
        {"preempt": 1},
        {"most_preemptions": -1},
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    """A setting that cannot be is a ConfigError with its name."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Tiered(**wrong)


def test_tiers_go_in_order_and_each_by_arrival() -> None:
    """Interactive requests stand before standard ones, these before background ones, each tier oldest first."""
    rows = [row(1, "background", 0.0), row(2, "standard", 0.1), row(3, "interactive", 0.3), row(4, "interactive", 0.2)]
    assert rank(0.4, rows).order == (4, 3, 2, 1)


@pytest.mark.parametrize(("now_s", "first"), [(2.884, 2), (2.886, 1)])
def test_a_standard_request_is_urgent_15_ms_before_its_last_moment(now_s: float, first: int) -> None:
    """With a bound of 3 s and 100 ms to read, a standard prompt goes before calm interactive ones from 2.885 s on."""
    assert rank(now_s, [row(1, "standard", 0.0), row(2, "interactive", 2.5)]).order[0] == first


def test_a_tier_that_is_late_goes_by_arrival() -> None:
    """When the oldest standard request that waits has missed its bound, no younger one passes it or an interactive one
    for being urgent."""
    rows = [row(1, "standard", 0.0), row(2, "standard", 0.2), row(3, "interactive", 2.9)]
    assert rank(2.99, rows).order == (1, 3, 2)
    assert rank(3.1, rows).order == (3, 1, 2)


def test_an_urgent_interactive_request_goes_before_all() -> None:
    """An interactive request at its last moment goes before an urgent standard one."""
    assert rank(3.0, [row(1, "standard", 0.0), row(2, "interactive", 2.0)]).order == (2, 1)


def test_the_answer_follows_the_clock_while_nothing_else_changes() -> None:
    """The same waiting requests are ranked anew when one of them becomes urgent."""
    state = Tiered().start(LIMITS)
    rows = [row(1, "standard", 0.0), row(2, "interactive", 2.5)]
    same = view(2.5, rows)
    assert state.rank(same, Linear()).order == (2, 1)
    assert state.rank(evolve(same, now_s=2.8), Linear()).order == (2, 1)
    assert state.rank(evolve(same, now_s=2.9), Linear()).order == (1, 2)


def test_short_standard_requests_merge() -> None:
    """Two short standard requests are held for the scan window; a third lets all go; other tiers are never held."""
    two = [row(1, "standard", 0.0, output=10), row(2, "standard", 0.01, output=10)]
    others = [row(5, "interactive", 0.0, output=10), row(6, "background", 0.0, output=10)]
    assert rank(0.02, [*two, *others]).held == {1, 2}
    assert rank(0.051, [*two, *others]).held == frozenset()
    assert rank(0.02, [*two, row(3, "standard", 0.02, output=10), *others]).held == frozenset()


def test_long_standard_requests_do_not_merge() -> None:
    """Requests with 500 tokens to go or more on average are not held, since company would not help them."""
    assert rank(0.01, [row(1, "standard", 0.0, output=400)]).held == frozenset()
    assert rank(0.01, [row(1, "standard", 0.0, output=399)]).held == {1}


def test_the_mean_of_tokens_to_go_is_decayed() -> None:
    """Each standard request that comes moves the mean by a twentieth of its distance, once."""
    state = Tiered().start(LIMITS)
    rows = [row(1, "standard", 0.0, output=380)]  # 480 tokens to go
    assert state.rank(view(0.0, rows), Linear()).held == {1}
    rows.append(row(2, "standard", 0.01, output=700))  # 0.95 * 480 + 0.05 * 800 = 496
    for now_s in (0.01, 0.02):
        assert state.rank(view(now_s, rows), Linear()).held == {1, 2}
    rows[0] = row(3, "standard", 0.02, output=500)  # 0.95 * 496 + 0.05 * 600 = 501.2
    assert state.rank(view(0.03, rows), Linear()).held == frozenset()


def test_only_interactive_and_urgent_requests_take_a_background_row_s_place() -> None:
    """Who may replace a running background row is more urgent than it; all other running rows keep their places."""
    rows = [running(1, "background"), running(2, "standard"), row(3, "interactive", 2.9), row(4, "standard", 2.9)]
    urgency = rank(3.0, rows).urgency
    assert {number: urgency.get(number, 0.0) for number in (1, 2, 3, 4)} == {1: 0.0, 2: 1.0, 3: 1.0, 4: 0.0}
    assert rank(5.8, rows).urgency[4] == 1.0
    assert rank(3.0, rows, preempt=False).urgency == {}


def test_who_was_thrown_out_often_enough_goes_first() -> None:
    """A running request that gave way ``most_preemptions`` times goes before all and keeps its place."""
    rows = [running(1, "background", preemptions=2), running(2, "background"), row(3, "interactive", 2.9)]
    answer = rank(3.0, rows)
    assert answer.order == (1, 3, 2)
    assert answer.urgency.get(1, 0.0) == answer.urgency[3] > answer.urgency.get(2, 0.0)


def test_prompts_of_two_tiers_share_a_step() -> None:
    """Beside an interactive prompt another one takes at most half of the chunk tokens, and leaves it a quarter."""
    rows = [row(1, "interactive", 0.0, prompt=500), row(2, "standard", 0.0, prompt=500)]
    assert rank(0.0, rows).chunks == {1: 48, 2: 32}
    assert rank(0.0, rows[:1]).chunks == {}
    assert rank(0.0, rows[1:]).chunks == {}


# ---------------------------------------------------------------- any view


@st.composite
def views(draw: st.DrawFn) -> StepView:
    """Views as a book gives them: rows of any tier, state and progress, waiting ones oldest first."""
    rows = []
    for number in draw(st.lists(st.integers(0, 99), unique=True, max_size=12)):
        prompt = draw(st.integers(1, 600))
        state = draw(st.sampled_from(["waiting", "running"]))
        generated = draw(st.integers(0, 3))
        rows.append(
            row(
                number,
                draw(st.sampled_from(TIERS)),
                draw(st.sampled_from([0.0, 0.5, 2.0, 9.97, 10.0])),
                state=state,
                prompt=prompt,
                computed=draw(st.integers(0, prompt + generated - 1)) if state == "running" else 0,
                output=draw(st.integers(4, 600)),
                generated=generated,
                preemptions=draw(st.integers(0, 3)),
            )
        )
    return view(10.0, sorted(rows, key=lambda one: (one.arrived_s, one.request)))


def check(answer: Ranking, given_view: StepView) -> None:
    """Assert what every answer promises."""
    rows = {one.request: one for one in (*given_view.running, *given_view.waiting)}
    assert sorted(answer.order) == sorted(rows)
    assert all(rows[number].state == "waiting" and rows[number].tier == "standard" for number in answer.held)
    assert set(answer.urgency) <= rows.keys()
    assert set(answer.chunks) <= rows.keys()
    assert all(count >= 1 for count in answer.chunks.values())
    for number, urgency in answer.urgency.items():
        if rows[number].state == "waiting" and urgency > 0.0:
            own = rows[number]
            assert own.tier == "interactive" or given_view.now_s - own.arrived_s > 0.015


@given(st.lists(views(), min_size=1, max_size=4))
def test_every_answer_is_complete_and_repeatable(seen: list[StepView]) -> None:
    """Any sequence of views gets complete answers that hold only standard requests which wait; asked twice, or told
    again from the start, the policy answers the same, and nothing that it is given changes."""
    states: list[TieredState] = [Tiered().start(LIMITS) for _ in range(2)]
    for one in seen:
        before = copy.deepcopy((one.running, one.waiting))
        answers = [state.rank(one, Linear()) for state in (*states, states[0])]
        check(answers[0], one)
        assert answers[0] == answers[1] == answers[2]
        assert (one.running, one.waiting) == before


@given(views())
def test_urgent_goes_before_calm(seen: StepView) -> None:
    """Of fresh state: an interactive prompt at its last moment stands before all that is not, an urgent standard one
    before all calm ones unless the oldest that waits is late already, worn-out running rows apart."""
    answer = Tiered().start(LIMITS).rank(seen, Linear())
    chunk = max(1, 64 - sum(1 for one in seen.running if one.known_tokens - one.computed_tokens == 1))
    token_s = (64e-3 if chunk < 64 else 1e-3 * chunk) / chunk
    bounds = {"interactive": 1.0, "standard": 3.0}
    late = any(one.tier == "standard" and one.arrived_s + 3.0 <= seen.now_s for one in seen.waiting)

    def place(one: RowView) -> int:
        need = one.known_tokens - one.computed_tokens
        reads = one.state == "waiting" or need > 1
        if one.state == "running" and one.preemptions >= 2:
            return 0
        if one.tier == "background":
            return 5
        urgent = reads and one.arrived_s + bounds[one.tier] - 0.015 - need * token_s <= seen.now_s
        if one.tier == "interactive":
            return 1 if urgent else 3
        return 2 if urgent and not late else 4

    rows = {one.request: one for one in (*seen.running, *seen.waiting)}
    keys = [(place(rows[number]), rows[number].arrived_s, number) for number in answer.order]
    assert keys == sorted(keys)


# ---------------------------------------------------------------- in the engine


class Crowd:
    """An engine under tiers, with endless requests of the upper tiers."""

    def __init__(self, policy: Tiered, *, slots: int = 4, step_s: float = 0.01, slabs: int = 65) -> None:
        self.rig = Rig(slabs, max_batch_size=slots, max_batch_tokens=64, seconds=lambda step: step_s)
        self.rig.planner = Planner(policy, Packed(), self.rig.limits)
        self.tiers: dict[int, Tier] = {}

    def submit(self, tier: Tier, prompt: int, output: int = 3) -> int:
        number = self.rig._next
        new = evolve(self.rig.new(prompt_of(prompt, number), output), tier=tier)
        self.rig.submit_all([new])
        self.tiers[number] = tier
        return number

    def waiting(self, tier: Tier) -> int:
        return sum(1 for one in self.rig.book.view(self.rig.clock()).waiting if one.tier == tier)

    def step(self) -> set[int]:
        """Do a step; return who began in it."""
        before = {one.request for one in self.rig.book.view(self.rig.clock()).running}
        bound = self.rig.step()
        return {one.plan.request for one in bound.rows} - before


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 40),
    st.sampled_from([0.1, 0.3]),
    st.lists(st.tuples(st.sampled_from(["interactive", "standard"]), st.integers(8, 60)), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_background_starts_within_its_bound(
    prompt: int, share: float, crowd: list[tuple[Tier, int]], slots: int
) -> None:
    """However many requests of the upper tiers come, a background one that has waited for ``background_wait_s`` is let
    in after fewer than its prompt over its share of their prompt tokens, and one step more; and it ends."""
    policy = Tiered(background_wait_s=0.2, background_share=share, standard_s=3600.0)
    own = Crowd(policy, slots=slots)
    number, passed, began = -1, 0, set[int]()
    for at in range(400):
        while own.waiting("interactive") + own.waiting("standard") < 8:
            own.submit(*crowd[at % len(crowd)])
        if at == 3:
            number = own.submit("background", prompt)
        aged = number >= 0 and own.rig.news[number].arrived_s + 0.2 <= own.rig.clock()
        began = own.step()
        if number in began:
            break
        if aged and began:
            assert passed < prompt / share
            passed += sum(len(own.rig.news[one].prompt) for one in began)
    assert number in began
    for _ in range(400):
        if own.rig.out[number].finished:
            break
        while own.waiting("interactive") < 4:
            own.submit("interactive", 20)
        own.step()
    own.rig.assert_right(number)
    assert not own.rig.planner.batching_faults.count


@settings(max_examples=8, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_everybody_ends_in_a_small_arena(random: Any, preempt: bool) -> None:
    """Requests of all tiers, far more than slots and memory hold at once, all end with the tokens they have alone."""
    policy = Tiered(background_wait_s=0.1, standard_s=1.0, preempt=preempt)
    own = Crowd(policy, slots=3, slabs=14)
    for _ in range(40):
        own.submit(random.choice(TIERS), random.randint(1, 70), random.randint(1, 60))
        if random.random() < 0.6:
            own.step()
    own.rig.finish()
    for number in own.tiers:
        own.rig.assert_right(number)
    own.rig.assert_empty()
    assert not own.rig.planner.batching_faults.count


def test_an_interactive_request_takes_a_background_row_s_place() -> None:
    """With all slots taken by background rows an interactive request begins in the next step, a standard one does not,
    and no background row gives way more than twice."""
    own = Crowd(Tiered(), slots=2)
    slow = [own.submit("background", 20, 300) for _ in range(2)]
    own.step()
    standard = own.submit("standard", 20)
    assert standard not in own.step()
    for _ in range(12):
        quick = own.submit("interactive", 20, 1)
        began = own.step()
        if max(own.rig.out[number].preemptions for number in slow) < 2:
            assert quick in began
    preemptions = [own.rig.out[number].preemptions for number in slow]
    assert 0 < max(preemptions) <= 2
    own.rig.finish()
    for number in own.tiers:
        own.rig.assert_right(number)
