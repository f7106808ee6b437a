"""Log-probabilities: of the raw model, in a fixed order, and the same whoever else is scored."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimicore.errors import InvalidRequest, RequestFailed
from kimicore.model.logprobs import score_prompt
from kimicore.model.sampling import sample
from kimicore.types import TokenScores

from .oracle import operations, order, row


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """The exact log-probabilities, in float64."""
    values = logits.astype(np.float64)
    return values - (values.max() + math.log(math.fsum(np.exp(values - values.max()))))


@given(
    values=st.lists(st.one_of(st.floats(-40, 40, width=32), st.just(-math.inf)), min_size=1, max_size=30),
    top_n=st.integers(0, 40),
    data=st.data(),
)
def test_scores_equal_a_float64_log_softmax(values: list[float], top_n: int, data: st.DataObject) -> None:
    """A token's score and the best tokens' are log-softmax values, best first and the lower id first of equals."""
    values[data.draw(st.integers(0, len(values) - 1))] = 1.5
    logits = np.array(values, dtype=np.float32)
    token = data.draw(st.integers(0, len(values) - 1))
    (scores,) = score_prompt(torch.from_numpy(logits).unsqueeze(0), [token], top_n)
    expected = log_softmax(logits)
    assert scores.logprob == pytest.approx(expected[token], abs=1e-6)
    best = order(logits)[:top_n]
    assert [one for one, _ in scores.top] == best
    assert [logprob for _, logprob in scores.top] == pytest.approx(list(expected[best]), abs=1e-6)


def test_scores_of_a_large_vocabulary_are_accurate() -> None:
    """Over 262,144 tokens the scores are right to 1e-6, where adding in float32 would not be."""
    logits = torch.tensor(np.random.default_rng(0).normal(size=(2, 262_144)), dtype=torch.float32)
    for scores, values in zip(score_prompt(logits, [5, 7], 3), logits.numpy(), strict=True):
        expected = log_softmax(values)
        assert scores.top[0][1] == pytest.approx(expected.max(), abs=1e-6)
    assert scores.logprob == pytest.approx(expected[7], abs=1e-6)


def test_prompt_scores_do_not_depend_on_the_chunk() -> None:
    """A prompt scored whole, in chunks or position by position gives bit-equal scores, on one thread or two."""
    logits = torch.tensor(np.random.default_rng(1).normal(size=(9, 40_000)), dtype=torch.float32)
    ids = list(range(100, 109))
    whole = score_prompt(logits, ids, 4)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for size in (1, 4, 9):
                starts = range(0, 9, size)
                parts = [score_prompt(logits[i : i + size], ids[i : i + size], 4) for i in starts]
                assert sum(parts, ()) == whole
    finally:
        torch.set_num_threads(threads)


def test_generated_and_prompt_scores_agree() -> None:
    """A token scored as generated has the very score that it has as part of a prompt."""
    logits = torch.tensor(np.random.default_rng(2).normal(size=(1, 500)) * 4, dtype=torch.float32)
    (result,) = sample(logits, [row([1, 2], logprobs=5, temperature=0.8, seed=3)], operations())
    assert result.logprobs == score_prompt(logits, list(result.tokens), 5)


def test_logprobs_zero_scores_the_chosen_token_alone() -> None:
    """logprobs=0 is not "off": the chosen token is scored and no others are listed; None gives nothing."""
    logits = torch.zeros(2, 4)
    results = sample(logits, [row([1], logprobs=0, temperature=0.0), row([1], temperature=0.0)], operations())
    assert results[0].logprobs == (TokenScores(pytest.approx(-math.log(4)), ()),)
    assert results[1].logprobs is None


def test_broken_scores_are_refused_with_their_position() -> None:
    """NaN in a prompt's logits fails with the position; an id outside the vocabulary and a wrong count are refused."""
    logits = torch.zeros(3, 4)
    logits[1, 2] = math.nan
    with pytest.raises(RequestFailed, match="position 11"):
        score_prompt(logits, [0, 0, 0], 0, position=10)
    for wrong in (-1, 4):
        with pytest.raises(InvalidRequest, match=f"token id {wrong}"):
            score_prompt(torch.zeros(1, 4), [wrong], 0)
    with pytest.raises(ValueError, match="2 next ids for 3 rows"):
        score_prompt(logits, [0, 0], 0)
