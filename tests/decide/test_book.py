"""Requests from their coming to their end: choices, cancels, deadlines, failures, preemption, memory."""

from __future__ import annotations

import random

import pytest
from bad_policies import BadEviction
from rig import Rig, kv_class, prompt_of

from kimicore.errors import Overloaded, RequestFailed, RequestTimeout
from kimicore.guard import PolicyFaults
from kimicore.sampling_params import SamplingParams
from kimicore.types import RowResult, StepResult

# ---------------------------------------------------------------- choices


@pytest.mark.parametrize("use_cache", [True, False])
def test_choices_share_their_prompt(use_cache: bool):
    """Four choices give four texts of their own, and the prompt is computed once (vllm#16863)."""
    rig = Rig(max_batch_tokens=32)
    prompt = prompt_of(70)
    group = [
        rig.new(prompt, 20, choice=at, number=at + 1, leader=1 if at else None, use_cache=use_cache) for at in range(4)
    ]
    rig.submit_all(group)
    rig.step()
    assert rig.book.stats().requests_waiting == 3
    rig.finish()
    for at in range(1, 5):
        rig.assert_right(at)
        assert rig.out[at].finished.cached_tokens == (64 if at > 1 else 0)
    assert len({tuple(rig.out[at].tokens) for at in range(1, 5)}) == 4
    rig.assert_empty()
    assert bool(rig.ledger.counts().cached) == use_cache
    assert rig.run(prompt, 2, use_cache=use_cache).finished.cached_tokens == (64 if use_cache else 0)


@pytest.mark.parametrize("end", ["cancel", "fail", "expire"])
def test_choices_go_on_when_their_leader_dies(end: str):
    """When the choice that computes the prompt is cancelled, fails or runs out of time, the others compute it."""
    doomed: set[int] = set()
    rig = Rig(max_batch_tokens=16, fault=lambda row: RequestFailed("x") if row.plan.request in doomed else None)
    prompt = prompt_of(70)
    timeout_s = 0.015 if end == "expire" else None
    rig.submit_all([rig.new(prompt, 8, number=1, timeout_s=timeout_s)])
    rig.submit_all([rig.new(prompt, 8, choice=at, number=at + 1, leader=1) for at in (1, 2)])
    rig.step()
    if end == "cancel":
        assert rig.book.cancel(1)
    elif end == "fail":
        doomed.add(1)
        rig.step()
    else:
        rig.step()
        rig.take(rig.book.expire(rig.clock()))
    rig.book.check_integrity()
    rig.finish()
    for number in (2, 3):
        rig.assert_right(number)
    rig.assert_empty()


def test_a_group_is_taken_whole_or_not_at_all():
    """Where the queue has room for two of three choices, none is taken and the error says when to come back."""
    rig = Rig(max_waiting=2)
    with pytest.raises(Overloaded) as caught:
        rig.submit_all([rig.new(prompt_of(20), 8, number=at, leader=1 if at > 1 else None) for at in (1, 2, 3)])
    assert caught.value.retry_after_s == 1.0
    rig.assert_empty()
    assert rig.book.stats().requests_refused == 3


def test_a_full_queue_says_when_to_come_back():
    """A full queue refuses with a time that follows from how fast requests left it, and takes more later."""
    rig = Rig(max_waiting=2, max_batch_size=1, seconds=lambda step: 0.5)
    numbers = [rig.submit(prompt_of(10, at), 4) for at in range(2)]
    for _ in range(12):
        rig.step()
        if len(numbers) < 6 and rig.book.stats().requests_waiting < 2:
            numbers.append(rig.submit(prompt_of(10, len(numbers)), 4))
    while rig.book.stats().requests_waiting < 2:
        rig.submit(prompt_of(10), 4)
    with pytest.raises(Overloaded) as caught:
        rig.submit(prompt_of(10), 4)
    assert 0.5 < caught.value.retry_after_s < 5
    rig.finish()
    rig.assert_empty()


# ---------------------------------------------------------------- cancels and deadlines


def test_a_cancel_around_the_last_step_leaks_nothing():
    """A request cancelled at any step, before or after it is bound, ends once and frees its blocks (vllm#29987)."""
    for at in range(10):
        for bound_first in (False, True):
            rig = Rig()
            number = rig.submit(prompt_of(20, at), 8)
            for _ in range(at):
                if not rig.book.idle:
                    rig.step()
            if rig.book.idle:
                assert not rig.book.cancel(number)
            elif bound_first:
                bound = rig.bind()
                assert rig.book.cancel(number)
                assert not rig.book.cancel(number)
                assert rig.ledger.counts().used > 0
                rig.commit(bound)
            else:
                assert rig.book.cancel(number)
            assert rig.out[number].ends == (0 if rig.book.stats().requests_cancelled else 1)
            rig.assert_empty()


def test_a_cancelled_turn_leaves_no_trace():
    """A turn after a cancelled one gives what a fresh engine gives (sglang#36475)."""
    rig = Rig()
    history = prompt_of(40)
    first = rig.run(history, 10)
    second = rig.submit([*history, *first.tokens, 7, 8, 9], 30)
    rig.step()
    rig.step()
    assert rig.book.cancel(second)
    third = rig.submit([*history, *first.tokens, 3, 2, 1], 10)
    rig.finish()
    rig.assert_right(third)
    rig.assert_empty()


def test_a_cancel_before_the_first_token_stops_the_work():
    """Cancelled in the queue it never starts; cancelled in its prompt it stops within one chunk (litellm#31499)."""
    rig = Rig(max_batch_size=1, max_batch_tokens=16)
    first, queued = rig.submit(prompt_of(100), 4), rig.submit(prompt_of(100, 1), 4)
    rig.step()
    assert rig.book.cancel(queued)
    rig.step()
    assert rig.book.cancel(first)
    assert not rig.bind().rows
    rig.assert_empty()
    assert all(row.plan.request == first for step in rig.steps for row in step.rows)


def test_a_deadline_in_the_queue_costs_no_step():
    """A deadline that passes in the queue is a RequestTimeout without tokens and without a model step (atlas#482)."""
    rig = Rig(max_batch_size=1, seconds=lambda step: 0.05)
    first, late = rig.submit(prompt_of(20), 40), rig.submit(prompt_of(20, 1), 4, timeout_s=0.1)
    assert rig.book.next_deadline_s() == pytest.approx(0.1)
    while not rig.book.idle:
        rig.step()
        rig.take(rig.book.expire(rig.clock()))
    assert isinstance(rig.out[late].error, RequestTimeout)
    assert rig.out[late].tokens == []
    assert all(row.plan.request == first for step in rig.steps for row in step.rows)
    rig.assert_right(first)
    assert rig.book.next_deadline_s() is None
    assert rig.book.stats().requests_timed_out == 1


def test_a_deadline_while_a_step_runs_frees_at_its_end():
    """A deadline that passes while the step runs is told at once; blocks come back when the step is committed."""
    rig = Rig()
    number = rig.submit(prompt_of(20), 40, timeout_s=0.1)
    bound = rig.bind()
    rig.clock.advance(1.0)
    rig.take(rig.book.expire(rig.clock()))
    assert isinstance(rig.out[number].error, RequestTimeout)
    assert rig.ledger.counts().used > 0
    rig.commit(bound)
    rig.assert_empty()


# ---------------------------------------------------------------- failures


def test_one_failing_row_hurts_nobody_else():
    """A row's own error ends its request with that error; its blocks are not found by others, who stay right."""
    doomed: set[int] = set()
    error = RequestFailed("logits are not finite")
    rig = Rig(fault=lambda row: error if row.plan.request in doomed else None)
    bad, good = rig.submit(prompt_of(40), 20), rig.submit(prompt_of(40, 1), 20)
    rig.step()
    rig.step()
    doomed.add(bad)
    rig.finish()
    assert rig.out[bad].error is error
    rig.assert_right(good)
    rig.assert_empty()
    assert rig.run(prompt_of(40), 4).finished.cached_tokens == 0


def test_a_row_without_a_token_fails_alone():
    """A runner that gives no token for a row that samples fails that request and no other."""
    rig = Rig()
    bad, good = rig.submit(prompt_of(10), 4), rig.submit(prompt_of(10, 1), 4)
    bound = rig.bind()
    rig.take(rig.book.commit(bound, StepResult((RowResult(), RowResult((5,)))), 0.0))
    assert isinstance(rig.out[bad].error, RequestFailed)
    assert rig.out[good].tokens == [5]


def test_a_failed_step_ends_everyone_and_frees_everything():
    """After a failed step every living request has the cause, and all blocks are back."""
    rig = Rig()
    numbers = [rig.submit(prompt_of(30, at), 10) for at in range(12)]
    rig.step()
    rig.bind()
    cause = RuntimeError("device lost")
    rig.take(rig.book.fail_all(cause))
    assert all(rig.out[number].error is cause for number in numbers)
    rig.assert_empty()


def test_steps_are_committed_once_and_in_turn():
    """Binding over an open step, committing twice, or a result of another size is refused."""
    rig = Rig()
    rig.submit(prompt_of(10), 4)
    bound = rig.bind()
    with pytest.raises(ValueError, match="not committed"):
        rig.bind()
    with pytest.raises(ValueError, match="rows"):
        rig.book.commit(bound, StepResult(()), 0.0)
    rig.commit(bound)
    with pytest.raises(ValueError, match="committed before"):
        rig.book.commit(bound, rig.runner.run(bound), 0.0)


# ---------------------------------------------------------------- preemption and memory


def test_preempted_requests_come_back_whole():
    """In a pool for two of four sequences all four give 100 tokens, each as it does alone (vllm#16832)."""
    rig = Rig(slabs=17)
    numbers = [rig.submit(prompt_of(20, at), 100) for at in range(4)]
    rig.finish()
    for number in numbers:
        rig.assert_right(number)
        assert rig.out[number].firsts == 1
    stats = rig.book.stats()
    assert stats.preemptions == sum(out.preemptions for out in rig.out.values()) > 0
    assert stats.recomputed_tokens > 0
    rig.assert_empty()


def test_preempted_prompt_scores_are_told_once():
    """A request that is preempted while its prompt is scored tells every position's score once."""
    rig = Rig(slabs=9, max_batch_tokens=16, batching="priority")
    params = SamplingParams(max_tokens=4, prompt_logprobs=0)
    low = rig.submit(prompt_of(100), 4, params=params)
    for _ in range(3):
        rig.step()
    high = rig.submit(prompt_of(60, 1), 4, priority=5)
    rig.finish()
    assert rig.out[low].preemptions == 1
    assert [one.logprob for one in rig.out[low].prompt_scores] == [-float(at) for at in range(1, 100)]
    rig.assert_right(low)
    rig.assert_right(high)


def test_nobody_sees_anothers_blocks():
    """Thirty prompts cycled through a pool for four give what unlimited memory gives (TensorRT-LLM#8813)."""
    rig = Rig(slabs=20, max_batch_size=6)
    prompts = [prompt_of(40 + at, at) for at in range(30)]
    numbers = [rig.submit(prompt, 12) for _ in range(3) for prompt in prompts]
    rig.finish()
    for number in numbers:
        rig.assert_right(number)
    assert rig.ledger.evicted_blocks > 100
    rig.assert_empty()


@pytest.mark.parametrize("rows", [1, 4])
def test_the_cap_on_memory_holds_for_one_and_for_many(rows: int):
    """With a cache that must drop blocks the cap holds, and texts are those of one alone (VeloxQuant-MLX#371)."""
    rig = Rig(slabs=13, max_batch_size=rows)
    numbers = [rig.submit(prompt_of(40, at % 3), 30) for at in range(8)]
    while not rig.book.idle:
        rig.step()
        assert rig.ledger.counts().used <= 12
    for number in numbers:
        rig.assert_right(number)


def test_pieces_too_small_are_put_together():
    """With two classes in few slabs, whatever was accepted finishes, though the arena comes apart on the way."""
    classes = (kv_class("window", 5, window=20, block_tokens=4), kv_class("full", 1, block_tokens=4))
    for slabs in range(8, 14):
        rig = Rig(slabs, classes=classes, block_tokens=4, max_batch_tokens=24)
        longest = rig.book.capacity_tokens
        numbers = [rig.submit(prompt_of(5 + 3 * at, at), None, limit=longest) for at in range(5)]
        rig.finish(20_000)
        for number in numbers:
            rig.assert_right(number)
        rig.assert_empty()


def test_a_hit_in_scattered_pieces_never_blocks_the_queue():
    """Where a hit lies in so many slabs that nothing more fits beside it, the request begins anew without it."""
    classes = (kv_class("window", 5, window=7, block_tokens=4), kv_class("full", 1, block_tokens=4))
    for seed in range(40):
        draw = random.Random(seed)
        rig = Rig(
            6, classes=classes, block_tokens=4, max_batch_size=4, max_batch_tokens=14, eviction=BadEviction("held")
        )
        numbers = []
        for _ in range(12):
            length = draw.randint(1, 36)
            prompt = prompt_of(length, draw.randint(0, 2))
            numbers.append(rig.submit(prompt, None, limit=min(40, length + draw.randint(1, 20))))
            for _ in range(draw.randint(0, 8)):
                rig.step()
        rig.finish()
        for number in numbers:
            rig.assert_right(number)
        rig.assert_empty()


def test_a_window_gives_its_blocks_back():
    """A long text in a window class holds no more blocks than the window and a step need."""
    rig = Rig(slabs=9, classes=(kv_class("window", 1, window=20),), max_batch_tokens=16)
    number = rig.submit(prompt_of(20), 500)
    while not rig.book.idle:
        rig.step()
        assert rig.ledger.counts().used <= 4
    rig.assert_right(number)


def test_statistics_add_up():
    """Counters and gauges agree with what was told, and blocks used, cached and free are all there are."""
    rig = Rig(max_batch_size=2)
    numbers = [rig.submit(prompt_of(20, at), 5) for at in range(5)]
    rig.step()
    faults = PolicyFaults("padding", "mine", limit=3)
    for _ in range(3):
        faults.note("it keeps its promises")
    stats = rig.book.stats(0.25, (faults,))
    assert stats.policies_set_aside == ("padding:mine",)
    assert stats.padded_shapes == 1
    assert (stats.requests_running, stats.requests_waiting) == (2, 3)
    assert stats.kv_blocks_used + stats.kv_blocks_cached + stats.kv_blocks_free == stats.kv_blocks_total == 64
    assert stats.kv_blocks_used == 4
    rig.book.cancel(numbers[-1])
    rig.finish()
    stats = rig.book.stats(0.25, (faults,))
    assert (stats.requests_finished, stats.requests_cancelled, stats.steps) == (4, 1, len(rig.steps))
    assert (stats.prompt_tokens, stats.completion_tokens) == (80, 20)
    assert (stats.step_s, stats.policy_faults) == (0.25, 3)
    assert stats.kv_blocks_used == 0


def test_padding_counts():
    """Padded tokens of the steps' shapes are counted, and shapes cover what runs."""
    rig = Rig(padding="max-len")
    rig.run(prompt_of(21), 6)
    padded = sum(step.shape.tokens - sum(row.plan.count for row in step.rows) for step in rig.steps)
    assert rig.book.stats().padded_tokens == padded == 32 - 21


def test_times_are_told():
    """The end tells when the request came, began, gave its first token and ended."""
    rig = Rig(max_batch_tokens=16, seconds=lambda step: 1.0)
    rig.clock.advance(5)
    out = rig.run(prompt_of(40), 3)
    end = out.finished
    assert (end.arrived_s, end.started_s, end.first_token_s, end.finished_s) == (5, 5, 8, 10)
