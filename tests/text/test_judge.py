"""A request's tokens read as text, with its stop strings."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimicore import InvalidRequest, SamplingParams
from kimicore.text.judge import TextJudge, resolve_stops
from kimicore.text.stops import StopMatcher
from kimicore.text.tokenizer import Tokenizer

COUNTING = [582, 827, 1296, 1876, 2531, 2976]  # " one two three four five six" in SmolLM2


def run(judge: TextJudge, ids: list[int]) -> tuple[list[str], str | None]:
    """Return the text after every token, with the tail, and what stopped it."""
    shown = []
    for one in ids:
        stop = judge.accept(one)
        shown.append(judge.take())
        if stop is not None:
            return shown, stop
    judge.finish()
    return [*shown, judge.take()], None


def test_a_stop_over_two_tokens(smollm2: Tokenizer) -> None:
    """vllm#3574: no part of a stop string that spans tokens is ever shown, and the match is reported."""
    shown, stop = run(TextJudge(smollm2, SamplingParams(stop=[" three four"])), COUNTING)
    assert "".join(shown) == " one two"
    assert not any(" three" in bit for bit in shown)
    assert stop == " three four"


def test_a_stop_inside_a_token(smollm2: Tokenizer) -> None:
    """A stop string in the middle of a token cuts the token's text."""
    shown, stop = run(TextJudge(smollm2, SamplingParams(stop=["hre", "ou"])), COUNTING)
    assert ("".join(shown), stop) == (" one two t", "hre")


def test_the_stop_can_be_included(smollm2: Tokenizer) -> None:
    """With include_stop the text ends with the stop string and nothing after it."""
    shown, stop = run(TextJudge(smollm2, SamplingParams(stop=["hre"], include_stop=True)), COUNTING)
    assert ("".join(shown), stop) == (" one two thre", "hre")


def test_unlike_text_is_not_held_back(smollm2: Tokenizer) -> None:
    """vllm#11089: with a stop string that nothing resembles, every token's text is shown at once."""
    shown, stop = run(TextJudge(smollm2, SamplingParams(stop=["@" * 40])), COUNTING)
    assert shown == [" one", " two", " three", " four", " five", " six", ""]
    assert stop is None


@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_as_stop_string(smollm2: Tokenizer, skip: bool) -> None:
    """vllm#792: a stop string that is a special token's text stops at that token, hidden or not."""
    params = SamplingParams(stop=["<|im_end|>"], ignore_eos=True, skip_special_tokens=skip)
    assert resolve_stops(smollm2, params) == (("<|im_end|>",), (2,))
    shown, stop = run(TextJudge(smollm2, params), [582, 2, 827])
    assert ("".join(shown), stop) == (" one", "<|im_end|>")
    shown, stop = run(TextJudge(smollm2, params), [582, *smollm2.encode("<|im_end|>")])
    assert ("".join(shown), stop) == (" one", "<|im_end|>")


def test_a_special_token_among_other_text_is_refused(smollm2: Tokenizer) -> None:
    """vllm#792: a stop string that could never match is refused with the remedy, never silently ignored."""
    with pytest.raises(InvalidRequest, match=r"im_end.*skip_special_tokens=False"):
        TextJudge(smollm2, SamplingParams(stop=["x<|im_end|>"]))
    judge = TextJudge(smollm2, SamplingParams(stop=["e<|im_end|>"], skip_special_tokens=False, ignore_eos=True))
    assert run(judge, [582, 2, 827])[1] == "e<|im_end|>"


def test_min_tokens_lets_stops_pass(smollm2: Tokenizer) -> None:
    """A stop string that is complete before min_tokens tokens is text; one complete at that token ends it."""
    shown, stop = run(TextJudge(smollm2, SamplingParams(stop=[" two", " five"], min_tokens=3)), COUNTING)
    assert ("".join(shown), stop) == (" one two three four", " five")
    shown, stop = run(TextJudge(smollm2, SamplingParams(stop=[" two"], min_tokens=2)), COUNTING)
    assert ("".join(shown), stop) == (" one", " two")


def test_end_tokens_give_no_text(smollm2: Tokenizer) -> None:
    """End tokens and stop ids stand in no text; with ignore_eos and special tokens shown, the end token does."""
    params = SamplingParams(stop_token_ids=[827], skip_special_tokens=False)
    assert run(TextJudge(smollm2, params), [582, 2, 827])[0] == [" one", "", "", ""]
    params = SamplingParams(ignore_eos=True, skip_special_tokens=False)
    assert "".join(run(TextJudge(smollm2, params), [582, 2])[0]) == " one<|im_end|>"


def test_the_tail_rule(smollm2: Tokenizer) -> None:
    """A character cut by the end of a request is one U+FFFD, once; finishing twice changes nothing."""
    judge = TextJudge(smollm2, SamplingParams(stop=["@"]))
    shown, _ = run(judge, [582, 177, 137])
    assert "".join(shown) == " one\ufffd"
    judge.finish()
    assert judge.take() == ""


def test_text_is_merged(smollm2: Tokenizer) -> None:
    """What came since the last look is one text."""
    judge = TextJudge(smollm2, SamplingParams())
    for one in COUNTING:
        assert judge.accept(one) is None
    assert judge.take() == " one two three four five six"
    assert judge.take() == ""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), include=st.booleans())
def test_any_ids_and_stops(tokenizer: Tokenizer, data: st.DataObject, include: bool) -> None:
    """For any tokens the text is that of matching the stop strings in the whole decoded text."""
    ids = data.draw(st.lists(st.integers(0, 400) | st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    ids = [one for one in ids if one not in tokenizer.special_ids]
    whole = tokenizer.decode(ids)
    cuts = st.builds(lambda at, n: whole[at : at + n], st.integers(0, max(0, len(whole) - 1)), st.integers(1, 6))
    stops = [one for one in data.draw(st.lists(cuts, max_size=4)) if one and "\ufffd" not in one]
    stops = [one for one in stops if not tokenizer.specials.spans(one)]
    shown, stop = run(TextJudge(tokenizer, SamplingParams(stop=stops, include_stop=include)), ids)
    matcher = StopMatcher(stops, include)
    text, wanted = matcher.push(whole)
    assert ("".join(shown), stop) == (text + matcher.finish(), wanted)
