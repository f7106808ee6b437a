"""Requests from their coming to their end: limits, ends, choices, cancels, deadlines, failures, memory."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
from bad_policies import BadEviction
from rig import Rig, Words, kv_class, prompt_of

from kimicore.errors import ConfigError, InvalidRequest, Overloaded, PromptTooLong, RequestFailed, RequestTimeout
from kimicore.requests import Request
from kimicore.sampling_params import SamplingParams
from kimicore.types import RowPlan, RowResult, Shape, StepPlan, StepResult

# ---------------------------------------------------------------- limits


def test_an_empty_prompt_is_refused_alone():
    """An empty prompt is an InvalidRequest for its caller while another request goes on (vllm#7632)."""
    rig = Rig()
    number = rig.submit(prompt_of(20), 8)
    rig.step()
    with pytest.raises(InvalidRequest, match="empty"):
        rig.submit([], 8)
    rig.finish()
    rig.assert_right(number)


def test_the_limit_ends_a_request_with_length():
    """A request with room for 44 more tokens gives 44 and ends with "length" (llama-cpp-python#1438)."""
    rig = Rig()
    out = rig.run(prompt_of(20), None, limit=64)
    assert len(out.tokens) == 44
    assert out.finished.reason == "length"


def test_more_than_the_arena_is_refused_at_once():
    """A prompt larger than the whole arena fails at once with the figures, and what is behind it runs (vllm#35541)."""
    rig = Rig(slabs=9, max_batch_tokens=256)
    assert rig.book.capacity_tokens == 128
    with pytest.raises(PromptTooLong, match="200") as caught:
        rig.submit(prompt_of(200), 8)
    assert (caught.value.prompt_tokens, caught.value.limit_tokens) == (200, 128)
    assert not rig.book.fits(200, 208)
    assert rig.book.fits(100, 128)
    number = rig.submit(prompt_of(10), 8)
    rig.finish()
    rig.assert_right(number)


@pytest.mark.parametrize("slabs", [2, 3, 5, 9])
def test_what_fits_finishes(slabs: int):
    """The longest request that the book accepts finishes alone, however small the arena."""
    rig = Rig(slabs, classes=(kv_class("full", 1, block_tokens=4),), block_tokens=4)
    number = rig.submit(prompt_of(1), None, limit=rig.book.capacity_tokens)
    rig.finish()
    rig.assert_right(number)
    rig.assert_empty()


def test_an_arena_without_room_is_refused():
    """An arena that does not hold one block of every class is a ConfigError."""
    with pytest.raises(ConfigError, match="does not hold"):
        Rig(2, classes=(kv_class("window", 3, window=8), kv_class("full", 1)))


def test_token_ids_that_are_none_are_refused():
    """A prompt with something that is no token id is an InvalidRequest and leaves nothing behind."""
    rig = Rig()
    for bad in (1 << 40, "a", 1.5):
        with pytest.raises(InvalidRequest, match="token id"):
            rig.submit([1] * 15 + [bad], 8)
    rig.assert_empty()


@pytest.mark.parametrize("count", [1, 5, 20])
def test_counts_at_the_cap_are_right(count: int):
    """A cap of 1, 5 or 20 tokens gives that many, counts that many and says "length" (lmstudio-bug-tracker#2335)."""
    out = Rig().run(prompt_of(33), count)
    assert len(out.tokens) == out.finished.completion_tokens == count
    assert (out.finished.reason, out.finished.stop) == ("length", None)


def test_no_tokens_need_no_step():
    """max_tokens=0 without scores ends at once; with prompt scores it ends when the prompt is done."""
    rig = Rig()
    number = rig.submit(prompt_of(20), 0)
    assert rig.out[number].finished.reason == "length"
    assert rig.out[number].finished.started_s is None
    out = rig.run(prompt_of(100), 0, params=SamplingParams(max_tokens=0, prompt_logprobs=2))
    assert len(out.prompt_scores) == 99
    assert out.tokens == []
    assert out.finished.first_token_s is None
    assert all(not row.sample for step in rig.steps for row in step.rows)
    rig.assert_empty()


# ---------------------------------------------------------------- how a request ends


def end_of(rig: Rig, prompt: list[int], at: int) -> int:
    """Return the token that the prompt gives at output position ``at``, where it is the first of its kind."""
    tokens = rig.alone(rig.new(prompt, 40))
    while tokens[at] in tokens[:at]:
        at += 1
    return tokens[at]


def test_an_end_token_ends_and_stands_in_the_tokens():
    """An end token ends the request with "stop", is the last token and is named; the judge never sees it."""
    rig = Rig()
    prompt = prompt_of(20)
    end = end_of(rig, prompt, 5)
    judge = Words()
    out = rig.run(prompt, 40, ends=[end], judge=judge)
    assert (out.finished.reason, out.finished.stop) == ("stop", end)
    assert out.tokens[-1] == end
    assert judge.seen == out.tokens[:-1]


def test_ignored_ends_do_not_end():
    """Without end ids exactly 200 tokens come, whatever they are (ScaleLLM#304)."""
    out = Rig().run(prompt_of(20), 200)
    assert len(out.tokens) == 200
    assert out.finished.reason == "length"


def test_the_least_counts_generated_tokens_only():
    """With a 40-token prompt and a least of 20, no end token is drawn before 20 generated ones (TensorRT-LLM#12358)."""
    rig = Rig(vocabulary=3)
    params = SamplingParams(max_tokens=60, min_tokens=20)
    out = rig.run([at % 3 for at in range(40)], 60, params=params, ends=[0, 1, 2], banned=[0, 1])
    assert len(out.tokens) == 21
    assert set(out.tokens[:20]) == {2}
    banned = [row.banned for step in rig.steps for row in step.rows if row.sample]
    assert banned == [(0, 1)] * 20 + [()]


def test_every_end_id_waits_for_the_least():
    """All end ids are held back for the least, not only the main one, and each ends it afterwards (vllm#15407)."""
    for end in (1, 2):
        rig = Rig(vocabulary=4)
        params = SamplingParams(max_tokens=60, min_tokens=5)
        out = rig.run([3] * 10, 60, params=params, ends=[end, 1, 2], banned=[1, 2])
        assert not {1, 2} & set(out.tokens[:5])
        assert out.finished.stop in (1, 2)


def test_a_stop_string_waits_for_the_least():
    """A stop string that is complete before the least does not end the text."""
    rig = Rig()
    prompt = prompt_of(20)
    tokens = rig.alone(rig.new(prompt, 30))
    params = SamplingParams(max_tokens=30, min_tokens=10)
    out = rig.run(prompt, 30, params=params, judge=Words(tokens[3:5]))
    assert len(out.tokens) >= 10


def drafted(rig: Rig, number: int, drafts: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    """Run one step of a generating request with drafts, of which the runner accepts ``tokens``."""
    view = rig.book.view(rig.clock())
    (row,) = view.running
    plan = RowPlan(number, row.computed_tokens, 1, drafts, "drafts")
    shape = Shape(1 + len(drafts), 1, 8)
    bound = rig.book.bind(StepPlan((plan,), shape))
    rig.book.check_integrity()
    rig.take(rig.book.commit(bound, StepResult((RowResult(tokens),)), rig.clock()))
    rig.book.check_integrity()


def test_several_tokens_of_a_step_stop_at_the_first_end():
    """Of a run of accepted tokens that goes over the cap, the stop at the fourth ends the text (sglang#31599)."""
    rig = Rig()
    number = rig.submit(prompt_of(20), 7, judge=Words([13, 14]))
    rig.step()
    drafted(rig, number, (11, 12, 13, 14, 15, 16), (11, 12, 13, 14, 15, 16, 17))
    out = rig.out[number]
    assert out.tokens[1:] == [11, 12, 13, 14]
    assert (out.finished.reason, out.finished.stop) == ("stop", "no")
    assert out.finished.completion_tokens == 5
    rig.assert_empty()


def test_several_tokens_of_a_step_stop_at_the_cap():
    """Tokens beyond the cap are not told, not counted and not kept (onnxruntime-genai#2528)."""
    rig = Rig()
    number = rig.submit(prompt_of(20), 4)
    rig.step()
    drafted(rig, number, (1, 2, 3), (1, 2, 3, 4))
    assert rig.out[number].tokens[1:] == [1, 2, 3]
    assert rig.out[number].finished.reason == "length"
    rig.assert_empty()


def test_a_rejected_draft_leaves_no_trace():
    """After rejected drafts the request goes on from the accepted tokens, and only full accepted blocks are named."""
    rig = Rig()
    number = rig.submit(prompt_of(14), 12)
    rig.step()
    known = rig.out[number].tokens
    right = rig.alone(rig.news[number])
    drafted(rig, number, (right[1], 99, 98, 97), (right[1], right[2]))
    assert known == right[:3]
    (row,) = rig.book.view(rig.clock()).running
    assert (row.computed_tokens, row.known_tokens) == (16, 17)
    assert rig.book.bind(StepPlan((RowPlan(number, 16, 1, (), "last"),), Shape(1, 1, 2))).rows[0].plan.start == 16


def test_an_error_in_the_judge_ends_its_request_only():
    """A judge that raises fails its own request with the cause; the other request is right."""

    class Broken(Words):
        def accept(self, token_id: int) -> str | None:
            raise KeyError(token_id)

    rig = Rig()
    bad, good = rig.submit(prompt_of(20), 8, judge=Broken()), rig.submit(prompt_of(30, 1), 8)
    rig.finish()
    assert isinstance(rig.out[bad].error, RequestFailed)
    assert isinstance(rig.out[bad].error.__cause__, KeyError)
    rig.assert_right(good)
    rig.assert_empty()


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


def test_no_request_outlives_its_end():
    """After 5,000 tiny requests, half of them cancelled, not one request object is left (vllm-mlx#154)."""
    rig = Rig(slabs=200, max_batch_size=64, max_batch_tokens=512)
    living: list[weakref.ref[object]] = []
    for at in range(5000):
        number = rig.submit([at % 50, at // 50 % 50, 3], 1, timeout_s=1e6)
        living.append(weakref.ref(rig.news.pop(number)))
        del rig.out[number]
        rig.out = Ignore()
        if at % 2:
            rig.book.cancel(number)
        if at % 50 == 49:
            while not rig.book.idle:
                rig.commit(rig.bind())
            rig.steps.clear()
    gc.collect()
    assert not any(one() for one in living)
    assert not [one for one in gc.get_objects() if isinstance(one, Request)]
    assert len(rig.book._deadlines) < 200


class Ignore(dict):
    """Outputs that nobody reads."""

    def __missing__(self, key: int):
        from rig import Output

        return Output()


def test_statistics_add_up():
    """Counters and gauges agree with what was told, and blocks used, cached and free are all there are."""
    rig = Rig(max_batch_size=2)
    numbers = [rig.submit(prompt_of(20, at), 5) for at in range(5)]
    rig.step()
    stats = rig.book.stats(0.25, 3)
    assert (stats.requests_running, stats.requests_waiting) == (2, 3)
    assert stats.kv_blocks_used + stats.kv_blocks_cached + stats.kv_blocks_free == stats.kv_blocks_total == 64
    assert stats.kv_blocks_used == 4
    rig.book.cancel(numbers[-1])
    rig.finish()
    stats = rig.book.stats(0.25, 3)
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
