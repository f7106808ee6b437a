"""How much a request may be, and how it ends: limits, end tokens, stops, counts."""

from __future__ import annotations

import pytest
from rig import Rig, Words, kv_class, prompt_of

from kimicore.errors import ConfigError, InvalidRequest, PromptTooLong, RequestFailed
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
