"""Top-k, top-p and min-p against a full sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from kimicore.model.filters import kept_ids
from kimicore.sampling_params import SamplingParams

from .oracle import filtered, order, weights

KINDS = ["normal", "flat", "peaked", "ties", "holes", "huge", "equal"]


def logits_of(kind: str, size: int, seed: int) -> np.ndarray:
    """Random logits float32 [size] of one kind."""
    generator = np.random.default_rng(seed)
    scale = {"flat": 0.01, "peaked": 12.0, "huge": 1e38, "equal": 0.0}.get(kind, 3.0)
    values = generator.normal(size=size) * scale
    if kind == "ties":
        values = np.round(values)
    if kind == "holes":
        values[generator.random(size) < 0.6] = -np.inf
        values[generator.integers(size)] = 1.0
    return np.clip(values, -3e38, 3e38, where=np.isfinite(values), out=values).astype(np.float32)


def kept(logits: np.ndarray, params: SamplingParams) -> list[int]:
    with np.errstate(over="ignore", under="ignore"):
        ids = kept_ids(logits, float(logits.max()), params)
    return list(range(len(logits))) if ids is None else ids.tolist()


@settings(max_examples=5 * settings().max_examples)
@given(
    kind=st.sampled_from(KINDS),
    size=st.integers(1, 80),
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([1e-4, 0.01, 0.7, 1.0, 3.0, 100.0]),
    top_k=st.one_of(st.just(0), st.integers(1, 90)),
    top_p=st.one_of(st.just(1.0), st.sampled_from([0.0, 1e-9, 1 - 1e-9]), st.floats(0.0, 1.0)),
    min_p=st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 1.0)),
)
def test_what_is_kept_equals_a_full_sort(kind: str, size: int, seed: int, **options: Any) -> None:
    """Filters keep what sorting all tokens keeps; only a boundary within 1e-5 of the asked mass may fall either way."""
    logits, params = logits_of(kind, size, seed), SamplingParams(**options)
    ids = kept(logits, params)
    assert ids == sorted(set(ids))
    top_p, min_p = params.top_p, params.min_p
    least = evolve(params, top_p=top_p * (1 - 1e-5), min_p=min(1.0, min_p * (1 + 1e-5)))
    most = evolve(params, top_p=min(1.0, top_p * (1 + 1e-5)), min_p=min_p * (1 - 1e-5))
    assert filtered(logits, least) <= set(ids) <= filtered(logits, most)
    assert order(logits)[0] in ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_a_nucleus_of_a_large_vocabulary_is_exact(kind: str, top_p: float) -> None:
    """Over 50,000 tokens the nucleus is a prefix of the order that reaches the mass and would not without its last."""
    logits = logits_of(kind, 50_000, 5)
    ids = kept(logits, SamplingParams(top_p=top_p))
    best_first = np.lexsort((np.arange(len(logits)), -logits.astype(np.float64)))[: len(ids)]
    assert ids == sorted(best_first.tolist())
    weight = weights(logits, 1.0)
    share = weight[best_first].sum() / weight.sum()
    assert share >= top_p - 1e-6
    assert share - weight[best_first[-1]] / weight.sum() < top_p + 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_top_p_zero_leaves_the_best_token(kind: str) -> None:
    """top_p=0.0 is honoured, not read as off: the best token alone is left, the lowest id of equals."""
    logits = logits_of(kind, 300, 9)
    assert kept(logits, SamplingParams(top_p=0.0)) == [int(logits.argmax())]


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    """Among tokens with equal logits top-k keeps the lowest ids, and never more than k tokens."""
    logits = np.array([1, 2, 2, 2, 0, 2], dtype=np.float32)
    assert kept(logits, SamplingParams(top_k=2)) == [1, 2]
    assert kept(logits, SamplingParams(top_k=5)) == [0, 1, 2, 3, 5]
    assert kept(logits, SamplingParams(top_k=6)) == kept(logits, SamplingParams(top_k=0)) == [0, 1, 2, 3, 4, 5]


def test_top_p_counts_mass_after_top_k() -> None:
    """Top-p is taken of the mass that top-k left, and min-p compares with the best token."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    assert kept(logits, SamplingParams(top_p=0.6)) == [0, 1]
    assert kept(logits, SamplingParams(top_k=2, top_p=0.55)) == [0]
    assert kept(logits, SamplingParams(min_p=0.45)) == [0, 1, 2]
    assert kept(logits, SamplingParams(top_k=3, top_p=0.99, min_p=0.6)) == [0, 1]
    assert kept(logits, SamplingParams(min_p=1.0)) == [0]


def test_a_mass_that_is_reached_exactly_is_enough() -> None:
    """Top-p keeps the fewest tokens that reach the mass: half of four equal tokens is two of them, not three."""
    assert kept(np.zeros(4, dtype=np.float32), SamplingParams(top_p=0.5)) == [0, 1]
    assert kept(np.zeros(1024, dtype=np.float32), SamplingParams(top_p=0.25)) == list(range(256))
    assert kept(np.zeros(9, dtype=np.float32), SamplingParams(top_k=8, top_p=0.5)) == [0, 1, 2, 3]


def test_banned_tokens_are_never_brought_back_by_a_wide_top_k() -> None:
    """With fewer possible tokens than top_k, impossible ones may fill it up but keep no chance."""
    logits = np.full(100, -np.inf, dtype=np.float32)
    logits[[40, 70]] = [1.0, 2.0]
    ids = kept(logits, SamplingParams(top_k=10, top_p=0.9999999))
    assert {40, 70} <= set(ids)
    assert len(ids) <= 10
