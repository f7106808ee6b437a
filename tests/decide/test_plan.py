"""The planner: budgets, order, fairness and memory, and policies that break their promises."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from bad_policies import BadRanking
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import Rig, kv_class, prompt_of

from kimicore.contracts import MemoryView, Ranking, RowView, StepLimits, StepView
from kimicore.guard import PolicyFaults
from kimicore.plan import SCORED_TOKENS, plan
from kimicore.plugins import resolve
from kimicore.policies.batching.pace import FLOOR_TOKENS
from kimicore.sampling_params import SamplingParams
from kimicore.types import Shape


class Linear:
    """A step takes ``token_s`` for each token."""

    def __init__(self, token_s: float = 1e-3) -> None:
        self.token_s = token_s

    def step_s(self, tokens: int, rows: int, context_tokens: int, attended_tokens: int = 0) -> float:
        return self.token_s * tokens


PACKED = resolve("padding", "packed")


def row(number: int, state: str, known: int, computed: int, **more: Any) -> RowView:
    """Return a row view with plain values where none are given."""
    values: dict[str, Any] = {
        "request": number,
        "state": state,
        "arrived_s": float(number),
        "priority": 0,
        "tenant": "",
        "prompt_tokens": known,
        "known_tokens": known,
        "computed_tokens": computed,
        "limit_tokens": known + 50,
        "generated_tokens": 0,
        "preemptions": 0,
        "logits_at": "last",
    }
    return RowView(**(values | more))


def views() -> st.SearchStrategy[StepView]:
    """Return views of every sort: rows at any point, tight memory, one or two classes."""

    @st.composite
    def draw_view(draw: Any) -> StepView:
        numbers = draw(st.permutations(range(1, 13)))
        running, waiting, held = [], [], {}
        classes = draw(st.sampled_from([(None,), (20, None)]))
        for at, number in enumerate(numbers[: draw(st.integers(0, 12))]):
            known = draw(st.integers(1, 200))
            more = {
                "priority": draw(st.integers(0, 3)),
                "generated_tokens": draw(st.integers(0, 1)),
                "logits_at": draw(st.sampled_from(["last", "last", "all", "none"])),
            }
            if draw(st.booleans()):
                computed = known - 1 if draw(st.booleans()) else draw(st.integers(0, known - 1))
                running.append(row(number, "running", known, computed, **more))
                held[number] = tuple([-(-computed // 16)] * len(classes))
            else:
                cached = draw(st.integers(0, (known - 1) // 16)) * 16
                waiting.append(row(number, "waiting", known, cached, **more))
            assert at < 12
        size = draw(st.integers(max(1, len(running)), 12))
        limits = StepLimits(
            size,
            draw(st.integers(size, 300)),
            draw(st.integers(1, size)),
            0.05,
            draw(st.sampled_from([0.01, 0.1, 1e9])),
        )
        per_slab = tuple(draw(st.integers(1, 3)) for _ in classes)
        spare = tuple(draw(st.integers(0, per - 1)) for per in per_slab)
        memory = MemoryView(16, classes, spare, per_slab, draw(st.integers(0, 20)))
        running.sort(key=lambda one: one.request)
        waiting.sort(key=lambda one: one.request)
        return StepView(20.0, tuple(running), tuple(waiting), limits, (), held, memory)

    return draw_view()


@settings(max_examples=400, deadline=None)
@given(views(), st.sampled_from(["fcfs", "priority"]))
def test_every_plan_is_within_its_budgets(view: StepView, name: str):
    """Any view gives a plan, the same each time, within tokens, rows and each row's known tokens, changing nothing."""
    state = resolve("batching", name).start(view.limits)
    before = copy.deepcopy((view.running, view.waiting, dict(view.held_blocks or {}), view.memory.spare))
    one = plan(view, state, PACKED, Linear())
    assert one == plan(view, resolve("batching", name).start(view.limits), PACKED, Linear())
    assert before == (view.running, view.waiting, dict(view.held_blocks or {}), view.memory.spare)
    rows = {each.request: each for each in (*view.running, *view.waiting)}
    running = {each.request for each in view.running}
    assert len({each.request for each in one.rows}) == len(one.rows)
    assert sum(each.count for each in one.rows) == one.shape.tokens <= view.limits.max_batch_tokens
    admitted = {each.request for each in one.rows} - running
    assert len(running - set(one.preempt)) + len(admitted) <= view.limits.max_batch_size
    for each in one.rows:
        assert each.start == rows[each.request].computed_tokens
        assert 0 < each.count <= rows[each.request].known_tokens - each.start
        assert each.request not in one.preempt
    assert set(one.preempt) <= running
    if name == "fcfs" and one.preempt:
        oldest = min(running)
        assert oldest not in one.preempt
    if view.running:
        assert one.rows, "the first of the running rows always goes on"


@settings(max_examples=100, deadline=None)
@given(views())
def test_no_policy_can_break_a_budget(view: StepView):
    """Whatever order, urgency and chunks a policy wishes for, the budgets hold."""

    class Wild:
        def rank(self, view: StepView, cost: Any) -> Ranking:
            numbers = [one.request for one in (*view.waiting, *view.running)][::-1]
            return Ranking(tuple(numbers), {one: float(one % 3) for one in numbers}, dict.fromkeys(numbers, 10**9))

    one = plan(view, Wild(), PACKED, Linear())
    assert sum(each.count for each in one.rows) <= view.limits.max_batch_tokens


@pytest.mark.parametrize("how", ["raises", "missing", "twice", "stranger", "nothing"])
def test_a_bad_batching_policy_is_contained(how: str):
    """A policy that raises or does not name every request once is replaced by first come first served, and noted."""
    limits = StepLimits(4, 64, 1, 0.05, 1e9)
    view = StepView(9.0, (row(1, "running", 20, 19),), (row(2, "waiting", 30, 0), row(3, "waiting", 30, 0)), limits)
    faults = PolicyFaults("batching", how)
    right = plan(view, resolve("batching", "fcfs").start(limits), PACKED, Linear())
    for _ in range(20):
        assert plan(view, BadRanking(how), PACKED, Linear(), batching_faults=faults) == right
    assert faults.count == 16
    assert faults.set_aside


@pytest.mark.parametrize("shape", [Shape(1, 1, 1), None])
def test_a_bad_padding_policy_is_contained(shape: Shape | None):
    """A shape that does not cover the rows, or none at all, is replaced by the rows' own, and noted."""

    class Bad:
        name = "bad"

        def shape(self, tokens: int, rows: int, blocks: int) -> Any:
            return shape

    limits = StepLimits(4, 64, 1, 0.05, 1e9)
    view = StepView(9.0, (), (row(2, "waiting", 30, 0), row(3, "waiting", 30, 0)), limits)
    faults = PolicyFaults("padding", "bad")
    one = plan(view, resolve("batching", "fcfs").start(limits), Bad(), Linear(), padding_faults=faults)
    assert one.shape == Shape(60, 2, 2)
    assert faults.count == 1


def test_chunks_keep_to_the_target():
    """While streams generate, chunks keep the step under its target; otherwise, they are as large as fits."""
    limits = StepLimits(8, 512, 1, 0.05, 0.1)
    fcfs = resolve("batching", "fcfs").start(limits)
    waiting = (row(9, "waiting", 4000, 0),)
    busy = tuple(row(at, "running", 20, 19, generated_tokens=3) for at in range(1, 6))
    assert plan(StepView(9.0, (), waiting, limits), fcfs, PACKED, Linear()).rows[-1].count == 512
    assert plan(StepView(9.0, busy, waiting, limits), fcfs, PACKED, Linear(1e-3)).rows[-1].count == 95
    assert plan(StepView(9.0, busy, waiting, limits), fcfs, PACKED, Linear(1.0)).rows[-1].count == FLOOR_TOKENS
    assert plan(StepView(9.0, busy, waiting, limits), fcfs, PACKED, Linear(1e-9)).rows[-1].count == 507


def test_scored_prompts_take_smaller_chunks():
    """A step scores a bounded number of positions, since each needs a row of the whole vocabulary."""
    rig = Rig(slabs=200, max_batch_tokens=1024)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    rig.submit(prompt_of(700), 1, params=params)
    other = rig.submit(prompt_of(700, 1), 1)
    first = rig.step()
    assert [one.plan.count for one in first.rows] == [SCORED_TOKENS, 700]
    rig.finish()
    rig.assert_right(other)


# ---------------------------------------------------------------- waiting and company


def test_a_lone_prompt_starts_at_once():
    """An idle engine starts a prompt at once, however large a batch it would like."""
    rig = Rig(min_batch_size=4)
    rig.submit(prompt_of(20), 8)
    assert rig.step().rows


def test_new_prompts_wait_for_company_only_so_long():
    """Beside running rows a new prompt waits for a batch, and never longer than max_wait_s."""
    rig = Rig(min_batch_size=3, max_wait_s=0.05)
    rig.submit(prompt_of(20), 100)
    rig.step()
    begun = rig.clock()
    late = rig.submit(prompt_of(20, 1), 8)
    while late not in {one.plan.request for one in rig.step().rows}:
        pass
    assert 0.05 <= rig.clock() - begun <= 0.08
    rig.submit(prompt_of(20, 2), 8)
    rig.step()
    assert rig.book.stats().requests_waiting == 1
    for at in (3, 4):
        rig.submit(prompt_of(20, at), 8)
    rig.step()
    assert rig.book.stats().requests_waiting == 0
    rig.finish()


def test_an_urgent_prompt_does_not_wait_for_company():
    """A request more urgent than all that run is not held back."""
    rig = Rig(min_batch_size=4, max_wait_s=60.0, batching="priority")
    rig.submit(prompt_of(20), 100)
    rig.step()
    low, high = rig.submit(prompt_of(20, 1), 8), None
    rig.step()
    assert rig.book.stats().requests_waiting == 1
    high = rig.submit(prompt_of(20, 2), 8, priority=1)
    assert high in {one.plan.request for one in rig.step().rows}
    rig.finish()
    rig.assert_right(low)


# ---------------------------------------------------------------- fairness


def test_an_urgent_request_takes_a_slot_and_equals_do_not():
    """With the slots taken a more urgent request starts at once; equals never preempt each other (vllm#54530)."""
    rig = Rig(max_batch_size=2, batching="priority")
    low = [rig.submit(prompt_of(20, at), 50) for at in range(2)]
    for _ in range(5):
        rig.step()
    high = rig.submit(prompt_of(20, 5), 5, priority=3)
    assert high in {one.plan.request for one in rig.step().rows}
    rig.finish()
    for number in (*low, high):
        rig.assert_right(number)
    assert rig.book.stats().preemptions == 1
    rig = Rig(max_batch_size=2, batching="priority")
    numbers = [rig.submit(prompt_of(20, at), 50, priority=1) for at in range(3)]
    rig.finish()
    assert rig.book.stats().preemptions == 0
    for number in numbers:
        rig.assert_right(number)


def test_equals_do_not_preempt_in_turn_for_memory():
    """Where memory is short the youngest gives way, the oldest never, and nobody gives way again and again."""
    rig = Rig(slabs=13, max_batch_size=3)
    numbers = [rig.submit(prompt_of(30, at), 100) for at in range(3)]
    rig.finish()
    for number in numbers:
        rig.assert_right(number)
    assert rig.out[numbers[0]].preemptions == 0
    assert rig.book.stats().preemptions <= 3


def test_the_low_one_is_not_starved():
    """Under a steady full load of urgent requests a low one starts within the stated aging bound (vllm#56843)."""
    rig = Rig(max_batch_size=1, batching="priority", seconds=lambda step: 0.05)
    rig.submit(prompt_of(10), 4, priority=1)
    low = rig.submit(prompt_of(10, 1), 4, priority=0)
    arrived_s = rig.clock()
    for at in itertools.count(2):
        if rig.out[low].finished:
            break
        if rig.book.stats().requests_waiting < 3:
            rig.submit(prompt_of(10, at), 4, priority=1)
        rig.step()
    aging_s = 5.0
    started_s = rig.out[low].finished.started_s - arrived_s
    assert aging_s <= started_s <= aging_s + 5 * 4 * 0.05
    assert rig.out[low].preemptions == 0


def test_first_come_is_first_served():
    """With one slot, requests start in the order in which they came."""
    rig = Rig(max_batch_size=1)
    numbers = [rig.submit(prompt_of(10 + 9 * (at % 3), at), 3) for at in range(6)]
    rig.finish()
    starts = [rig.out[number].finished.started_s for number in numbers]
    assert starts == sorted(starts)
    assert len(set(starts)) == 6


def test_a_short_prompt_is_not_stuck_behind_a_long_one():
    """Beside a 4,000-token prompt a 10-token one starts within a few chunks, and a stream goes on (sglang#34623)."""
    rig = Rig(slabs=400, max_batch_tokens=64)
    stream = rig.submit(prompt_of(20, 1), 200)
    rig.step()
    long = rig.submit(prompt_of(4000, 2), 4)
    rig.step()
    short = rig.submit(prompt_of(10, 3), 4)
    for _ in range(3):
        before = len(rig.out[stream].tokens)
        rig.step()
        assert len(rig.out[stream].tokens) == before + 1
    assert rig.out[short].firsts == 1
    assert not rig.out[long].tokens
    rig.finish()
    for number in (stream, long, short):
        rig.assert_right(number)


def test_two_long_prompts_are_served_one_after_the_other():
    """Prompts of the same length do not share their chunks, so that the first is done in half the time of both."""
    rig = Rig(slabs=400, max_batch_tokens=64)
    one, other = rig.submit(prompt_of(640, 1), 1), rig.submit(prompt_of(640, 2), 1)
    rig.finish()
    assert rig.out[one].finished.first_token_s == pytest.approx(0.1)
    assert rig.out[other].finished.first_token_s == pytest.approx(0.2)


def test_admission_leaves_a_margin():
    """A request is not admitted where it or the running ones would need more blocks at once, nor one behind it."""
    rig = Rig(slabs=12)
    first = rig.submit(prompt_of(63), 30)
    rig.step()
    second = rig.submit(prompt_of(96, 1), 2)
    third = rig.submit(prompt_of(15, 2), 2)
    rig.step()
    assert rig.book.stats().requests_running == 1
    rig.finish()
    assert rig.book.stats().preemptions == 0
    assert rig.out[first].finished.finished_s <= rig.out[second].finished.started_s
    assert rig.out[second].finished.started_s <= rig.out[third].finished.started_s


def test_admission_goes_on_after_cancels_at_the_cap():
    """When the slots were all taken and their requests are cancelled, new ones are admitted (vllm#53130)."""
    rig = Rig(max_batch_size=3)
    numbers = [rig.submit(prompt_of(100, at), 50) for at in range(3)]
    rig.step()
    for number in numbers:
        rig.book.cancel(number)
    new = rig.submit(prompt_of(20), 4)
    rig.finish()
    rig.assert_right(new)


def test_shared_prefixes_count_once():
    """Requests whose prefix is held already are admitted by what they add to it."""
    rig = Rig(slabs=40, max_batch_size=16, max_batch_tokens=512)
    prefix = prompt_of(400)
    rig.run(prefix, 1)
    numbers = [rig.submit([*prefix, at, at], 20) for at in range(6)]
    rig.step()
    rig.step()
    assert rig.book.stats().requests_running == 6
    rig.finish()
    for number in numbers:
        rig.assert_right(number)
    assert rig.book.stats().preemptions == 0


@pytest.mark.parametrize("classes", [(), (kv_class("window", 2, window=40), kv_class("full", 1))])
def test_the_same_tokens_under_any_plan(classes: tuple[Any, ...]):
    """Chunk sizes, batch sizes and policies change when tokens come and never which."""
    texts = []
    for tokens, size, name, padding in (
        (16, 1, "fcfs", "packed"),
        (64, 8, "priority", "max-len"),
        (37, 5, "fcfs", "packed"),
    ):
        rig = Rig(30, classes=classes, max_batch_tokens=tokens, max_batch_size=size, batching=name, padding=padding)
        numbers = [rig.submit(prompt_of(30 + 7 * at, at), 20, priority=at % 3) for at in range(8)]
        rig.finish()
        texts.append([rig.out[number].tokens for number in numbers])
        for number in numbers:
            rig.assert_right(number)
    assert texts[0] == texts[1] == texts[2]
