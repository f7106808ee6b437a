"""Bias, penalties and bans: what they change, in which order, and what they leave alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimicore.errors import InvalidRequest
from kimicore.model.penalties import adjusted, is_adjusted

from .oracle import changed, row

SIZE = 12
LARGEST = float(np.finfo(np.float32).max)
TOKEN = st.integers(0, SIZE - 1)
LOGIT = st.one_of(st.floats(-30, 30, width=32), st.sampled_from([0.0, -0.0, -math.inf, 3e38, -3e38, 1e-40]))


@given(
    logits=st.lists(LOGIT, min_size=SIZE, max_size=SIZE),
    known=st.lists(TOKEN, max_size=20),
    prompt_tokens=st.integers(0, 20),
    options=st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.one_of(st.floats(0.01, 100.0), st.sampled_from([5e-324, 1e-40, 1.0])),
            "frequency_penalty": st.floats(-100, 100),
            "presence_penalty": st.floats(-100, 100),
            "logit_bias": st.dictionaries(TOKEN, st.floats(-1e6, 1e6), max_size=5),
            "banned": st.lists(TOKEN, max_size=4),
        },
    ),
)
def test_adjustments_equal_the_token_by_token_oracle(
    logits: list[float], known: list[int], prompt_tokens: int, options: dict[str, Any]
) -> None:
    """Every logit is what bias, repetition, frequency and presence, and bans make of it in turn; none becomes NaN."""
    raw = np.array(logits, dtype=np.float32)
    bound = row(known, min(prompt_tokens, len(known)), **options)
    result = adjusted(raw, bound)
    np.testing.assert_allclose(result, changed(raw, bound), rtol=2e-7, atol=1e-45)
    assert np.array_equal(raw, np.array(logits, dtype=np.float32))
    assert not np.isnan(result).any()
    assert not np.isposinf(result).any()


def test_repetition_counts_prompt_and_output_and_the_others_output_only() -> None:
    """The repetition penalty sees prompt and output; frequency and presence see generated tokens alone."""
    raw = np.full(6, 2.0, dtype=np.float32)
    known = [0, 1, 1, 2, 2, 2]  # prompt 0, 1, 1; output 2, 2, 2
    assert adjusted(raw, row(known, 3, repetition_penalty=2.0)).tolist() == [1, 1, 1, 2, 2, 2]
    assert adjusted(raw, row(known, 3, frequency_penalty=0.5)).tolist() == [2, 2, 0.5, 2, 2, 2]
    assert adjusted(raw, row(known, 3, presence_penalty=0.5)).tolist() == [2, 2, 1.5, 2, 2, 2]
    assert adjusted(raw, row(known[:3], 3, frequency_penalty=0.5)).tolist() == raw.tolist()


def test_bias_comes_before_penalties() -> None:
    """The repetition penalty is taken of the biased logit, so bias can change its direction."""
    raw = np.array([1.0, 0.0], dtype=np.float32)
    bound = row([0], repetition_penalty=2.0, logit_bias={0: -3.0})
    assert adjusted(raw, bound).tolist() == [-4.0, 0.0]


def test_a_finite_logit_stays_finite() -> None:
    """Extreme settings saturate at float32's ends; they neither ban a token nor make it certain."""
    raw = np.array([3e38, -3e38, -np.inf], dtype=np.float32)
    assert adjusted(raw, row([0, 1, 2], repetition_penalty=100.0)).tolist()[1:] == [-LARGEST, -math.inf]
    assert adjusted(raw, row([0, 1, 2], repetition_penalty=1e-40)).tolist()[::2] == [LARGEST, -math.inf]


def test_an_untouched_row_is_known_as_such() -> None:
    """Only bias, a penalty or a ban makes a row take the longer way."""
    assert not is_adjusted(row([1, 2], repetition_penalty=1.0, logit_bias={}, top_k=3))
    for options in ({"banned": (1,)}, {"logit_bias": {0: 0.0}}, {"presence_penalty": 0.1}):
        assert is_adjusted(row([1, 2], **options))


@pytest.mark.parametrize("wrong", [-1, SIZE, 2**63])
def test_ids_outside_the_vocabulary_are_named(wrong: int) -> None:
    """A known, biased or banned id outside the vocabulary is refused by name."""
    raw = np.zeros(SIZE, dtype=np.float32)
    with pytest.raises(InvalidRequest, match="banned tokens"):
        adjusted(raw, row([1], banned=(wrong,)))
    with pytest.raises(InvalidRequest, match="known tokens"):
        adjusted(raw, row([wrong], repetition_penalty=1.1))
    with pytest.raises(InvalidRequest, match="generated tokens"):
        adjusted(raw, row([1, wrong], 1, presence_penalty=1.1))
