"""Figures from pairs of logits and texts, against plainer ways to compute them."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kimicore.verify.tally as module
from kimicore.errors import RequestFailed
from kimicore.verify.tally import compare, distance, estimate, losses, perplexity, similarity

short = st.lists(st.integers(0, 3), max_size=9).map(tuple)


def plain_distance(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The definition, by recursion over first letters."""

    @cache
    def rest(i: int, j: int) -> int:
        if i == len(one) or j == len(other):
            return len(one) - i + len(other) - j
        if one[i] == other[j]:
            return rest(i + 1, j + 1)
        return 1 + min(rest(i + 1, j), rest(i, j + 1), rest(i + 1, j + 1))

    return rest(0, 0)


@given(short, short)
def test_distance_is_levenshtein_s(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    """The distance is the least number of edits, and the similarity what it leaves of the length."""
    assert distance(one, other) == plain_distance(one, other)
    longer = max(len(one), len(other))
    assert similarity(one, other) == (1.0 - plain_distance(one, other) / longer if longer else 1.0)


def giver(table: torch.Tensor) -> Any:
    """A model whose hidden state is a row number and whose logits are that row."""
    return SimpleNamespace(logits=lambda hidden: table[hidden[:, 0].long()].clone())


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_comparing_is_exact_however_it_is_cut(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agreement, KL and losses are those of whole distributions in float64, whatever is computed at a time."""
    generator = torch.Generator().manual_seed(rows)
    first = 4 * torch.randn(23, 50, generator=generator)
    second = first + torch.randn(23, 50, generator=generator)
    first[:, 47:] = second[:, 47:] = -torch.inf  # ids that no text has
    monkeypatch.setattr(module, "LOGITS_BYTES", rows * 4 * 47)
    targets = torch.randint(0, 47, (23,), generator=generator)
    hidden = torch.arange(23.0)[:, None]
    found = compare(giver(first), hidden, giver(second), hidden, 47)
    p, q = (one[:, :47].double().softmax(-1) for one in (first, second))
    assert found.agree.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()
    np.testing.assert_allclose(found.kl, (p * (p / q).log()).sum(-1), rtol=2e-5, atol=1e-6)
    at = torch.arange(23)
    np.testing.assert_allclose(losses(giver(first), hidden, targets.tolist(), 47), -p[at, targets].log(), rtol=1e-5)


def test_a_large_vocabulary_is_taken_in_pieces() -> None:
    """Of 262,144 token ids no more logits are made at a time than fit into a few megabytes."""
    tokens, sizes = 262_144, []

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        found = hidden.expand(-1, tokens).clone()
        sizes.append(found.numel() * found.element_size())
        return found

    model: Any = SimpleNamespace(logits=logits)
    found = compare(model, torch.zeros(150, 1), model, torch.ones(150, 1), tokens)
    assert max(sizes) <= module.LOGITS_BYTES
    np.testing.assert_allclose(losses(model, torch.ones(150, 1), [7] * 150, tokens), np.log(tokens), rtol=1e-5)
    assert max(sizes) <= module.LOGITS_BYTES
    assert found.kl.max() < 1e-5


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error(value: float) -> None:
    """A model whose logits are not finite has no figures but an error that says which of the two it is."""
    good, bad = torch.zeros(2, 5), torch.zeros(2, 5)
    bad[1, 3] = value
    hidden = torch.arange(2.0)[:, None]
    with pytest.raises(RequestFailed, match=r"^the model: logits are not finite"):
        compare(giver(good), hidden, giver(bad), hidden, 5)
    with pytest.raises(RequestFailed, match=r"^the baseline: "):
        compare(giver(bad), hidden, giver(good), hidden, 5)
    with pytest.raises(RequestFailed, match=r"^the model: "):
        losses(giver(bad), hidden, [0, 0], 5)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(0, 5))
def test_an_estimate_lies_within_its_bounds(numbers: list[float], seed: int) -> None:
    """The value is the mean, the bounds enclose it and lie within the values, and a seed repeats them."""
    values = np.array(numbers)
    found = estimate(values, seed)
    assert found == estimate(values, seed)
    assert found.value == pytest.approx(sum(numbers) / len(numbers))
    assert values.min() - 1e-9 <= found.low <= found.value <= found.high <= values.max() + 1e-9


def test_bounds_are_those_of_a_mean() -> None:
    """On many prompts the bounds are about two standard errors on either side."""
    values = np.random.default_rng(1).random(2000)
    found = estimate(values, 0)
    error = values.std() / 2000**0.5
    assert found.high - found.value == pytest.approx(1.96 * error, rel=0.15)
    assert found.value - found.low == pytest.approx(1.96 * error, rel=0.15)


def test_perplexity_of_a_uniform_guess() -> None:
    """Guessing evenly among n tokens has the perplexity n; beyond a double it is infinite."""
    assert perplexity(np.full(9, np.log(300.0))) == pytest.approx(300.0)
    assert perplexity(np.array([1e4])) == float("inf")
