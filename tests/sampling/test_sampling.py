"""The sampler as a whole: greedy and drawn tokens, broken rows, and rows that do not see each other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from kimicore.errors import InvalidRequest, RequestFailed
from kimicore.kernels.gumbel.reference import gumbel
from kimicore.model.sampling import sample
from kimicore.types import BoundRow, RowResult

from .oracle import changed, filtered, noise, operations, row

OPS = operations()
REFERENCE = operations(native=False)


def one(logits: torch.Tensor, bound: BoundRow) -> RowResult:
    return sample(logits.unsqueeze(0), [bound], OPS)[0]


def random_logits(rows: int, size: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=(rows, size)) * 3.0, dtype=torch.float32)


def test_greedy_takes_the_best_token_and_the_lowest_id_of_equals() -> None:
    """temperature=0 takes the largest logit; the lowest id wins among equals."""
    logits = torch.tensor([[0.0, 5.0, 5.0], [7.0, -1.0, 7.0], [-math.inf, -3e38, -math.inf]])
    results = sample(logits, [row([4], temperature=0.0) for _ in range(3)], OPS)
    assert [result.tokens for result in results] == [(1,), (0,), (1,)]
    assert all(result.logprobs is None and result.error is None for result in results)


def test_logits_are_only_read() -> None:
    """Sampling with every option on leaves the caller's logits as they were, and needs float32 or converts."""
    logits = random_logits(4, 100)
    before = logits.clone()
    options = {"repetition_penalty": 1.3, "frequency_penalty": 1.0, "logit_bias": {3: 2.0}, "top_k": 5, "top_p": 0.9}
    sample(logits, [row([1, 2, 3], 1, banned=(7,), logprobs=3, **options) for _ in range(4)], OPS)
    assert torch.equal(logits, before)
    bound = [row([1], temperature=0.0) for _ in range(4)]
    assert [r.tokens for r in sample(logits.bfloat16(), bound, OPS)] == [
        (int(i),) for i in logits.bfloat16().argmax(dim=1)
    ]


def test_a_row_that_is_not_sampled_gives_nothing() -> None:
    """A row that is still catching up with its prompt gives no token, whatever its logits are."""
    results = sample(torch.full((2, 5), math.nan), [row([1], sample=False), row([1], sample=False)], OPS)
    assert results == [RowResult(), RowResult()]
    assert sample(torch.empty(0, 5), [], OPS) == []


def test_rows_and_logits_must_match() -> None:
    """A wrong number of rows is refused before anything is drawn."""
    with pytest.raises(ValueError, match="2 rows for 1 rows of logits"):
        sample(torch.zeros(1, 5), [row([1]), row([1])], OPS)
    with pytest.raises(ValueError, match=r"\[R, V\]"):
        sample(torch.zeros(5), [row([1])], OPS)


@settings(max_examples=5 * settings().max_examples)
@given(data=st.data())
def test_a_draw_is_the_noisy_best_of_what_the_filters_keep(data: st.DataObject) -> None:
    """For any options the token is the argmax of scaled logits plus noise over the tokens kept, as the oracle says."""
    size = data.draw(st.integers(1, 60))
    logits = random_logits(1, size, data.draw(st.integers(0, 2**32)))
    token = st.integers(0, size - 1)
    known = data.draw(st.lists(token, min_size=1, max_size=12))
    options: dict[str, Any] = data.draw(
        st.fixed_dictionaries(
            {"temperature": st.sampled_from([0.0, 1e-4, 0.3, 1.0, 2.5]), "seed": st.integers(0, 2**64 - 1)},
            optional={
                "top_k": st.integers(0, 70),
                "top_p": st.sampled_from([0.0, 0.31, 0.77, 1.0]),
                "min_p": st.sampled_from([0.0, 0.013, 1.0]),
                "repetition_penalty": st.sampled_from([0.5, 1.3]),
                "frequency_penalty": st.sampled_from([-0.7, 0.7]),
                "presence_penalty": st.sampled_from([-0.4, 0.4]),
                "logit_bias": st.dictionaries(token, st.sampled_from([-100.0, -1.5, 2.5]), max_size=3),
                "banned": st.lists(token, max_size=size - 1),
                "choice": st.integers(0, 127),
            },
        )
    )
    bound = row(known, data.draw(st.integers(0, len(known))), **options)
    result = one(logits[0], bound)
    assert result.error is None
    values = changed(logits[0].numpy(), bound)
    if bound.params.greedy:
        assert result.tokens == (int(values.argmax()),)
        return
    kept = sorted(filtered(values, bound.params))
    place = (bound.seed, bound.choice, len(known))
    noisy = {i: (float(values[i]) - float(values.max())) / bound.params.temperature + noise(*place, i) for i in kept}
    assert noisy[result.tokens[0]] >= max(noisy.values()) - 1e-4


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("index", [0, 25, 49])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"logit_bias": {3: 1.0}, "logprobs": 2}])
def test_a_broken_row_fails_alone(value: float, index: int, options: dict[str, Any]) -> None:
    """NaN or +inf fails its own row with an error that names value, token id and position; neighbours are as alone."""
    logits = random_logits(3, 50)
    bound = [row([1, 2, 3], seed=i, **options) for i in range(3)]
    alone = [one(logits[i], bound[i]) for i in (0, 2)]
    logits[1, index] = value
    results = sample(logits, bound, OPS)
    assert [results[0], results[2]] == alone
    assert results[1].tokens == ()
    assert isinstance(results[1].error, RequestFailed)
    assert str(index) in str(results[1].error)
    assert str(value) in str(results[1].error)
    assert "position 3" in str(results[1].error)


def test_minus_infinity_is_a_logit_unless_everything_is() -> None:
    """-inf excludes a token; a row of nothing else, or one that bans all that is possible, fails by itself."""
    logits = torch.full((3, 8), -math.inf)
    logits[0, 5] = logits[2, 5] = 0.0
    for options in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        results = sample(logits, [row([1], **options), row([1], **options), row([1], banned=(5,), **options)], OPS)
        assert results[0].tokens == (5,)
        assert isinstance(results[1].error, RequestFailed)
        assert "every logit" in str(results[1].error)
        assert isinstance(results[2].error, RequestFailed)
        assert "banned" in str(results[2].error)


@pytest.mark.parametrize("bad", [{"banned": (-1,)}, {"banned": (50,)}, {"logit_bias": {50: 1.0}}])
def test_an_id_outside_the_vocabulary_fails_its_row(bad: dict[str, Any]) -> None:
    """A token id outside the vocabulary is an error of its row, never an index from the end."""
    logits = random_logits(2, 50)
    results = sample(logits, [row([1], temperature=0.0, **bad), row([1], temperature=0.0)], OPS)
    assert isinstance(results[0].error, InvalidRequest)
    assert results[1].tokens == (int(logits[1].argmax()),)


def mixed_rows(count: int, size: int) -> list[BoundRow]:
    """Rows with many kinds of options."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"top_k": 7, "logprobs": 3},
        {"top_p": 0.8, "temperature": 1.4},
        {"min_p": 0.05, "frequency_penalty": 0.9},
        {"repetition_penalty": 1.2, "temperature": 0.0, "logprobs": 0},
        {"logit_bias": {2: 5.0}, "banned": (4, 5)},
    ]
    return [
        row([(7 * i + j) % size for j in range(5 + i)], 4, seed=1000 + i, choice=i % 3, **kinds[i % len(kinds)])
        for i in range(count)
    ]


def test_a_row_gives_the_same_in_every_batch_and_thread_count() -> None:
    """Tokens and log-probabilities are bit-equal alone, in any order of neighbours, and on one thread or two."""
    size = 40_000
    logits, bound = random_logits(14, size), mixed_rows(14, size)
    together = sample(logits, bound, OPS)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert [one(logits[i], bound[i]) for i in range(14)] == together
    finally:
        torch.set_num_threads(threads)
    order = [3, 11, 0, 7, 13, 2]
    assert sample(logits[order], [bound[i] for i in order], OPS) == [together[i] for i in order]


def test_native_and_reference_noise_give_the_same_tokens() -> None:
    """The table of references and the one with native operations give identical results."""
    logits, bound = random_logits(14, 5_000), mixed_rows(14, 5_000)
    assert sample(logits, bound, OPS) == sample(logits, bound, REFERENCE)


@pytest.mark.parametrize("options", [{"top_k": 1500}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 2000, "top_p": 0.9}])
def test_a_wide_filter_draws_from_what_it_keeps(options: dict[str, Any]) -> None:
    """With over a thousand tokens kept, a draw is still the noisy best of exactly these, native or not."""
    logits = random_logits(1, 5_000)[0] * 0.2
    kept = torch.tensor(sorted(filtered(logits.numpy(), row([0], **options).params)))
    assert len(kept) > 1_024
    for position in range(1, 40):
        bound = row([0] * position, seed=2, temperature=1.0, **options)
        expected = kept[(logits[kept] - logits.max() + gumbel(2, 0, position, kept)).argmax()]
        for ops in (OPS, REFERENCE):
            assert sample(logits.unsqueeze(0), [bound], ops)[0].tokens == (int(expected),)


def test_choices_and_seeds_draw_independently() -> None:
    """Two choices, seeds or positions agree no more often than two independent draws would."""
    size, count = 50, 1_000
    logits = torch.zeros(count, size)  # uniform: two draws agree once in 50

    def drawn(seed: int, choice: int, offset: int) -> list[int]:
        rows = [row([0], seed=seed, choice=choice) for _ in range(count)]
        known = [[0] * (1 + i + offset) for i in range(count)]
        rows = [evolve(bound, known=ids) for bound, ids in zip(rows, known, strict=True)]
        return [result.tokens[0] for result in sample(logits, rows, OPS)]

    base = drawn(0, 0, 0)
    for other in (drawn(0, 1, 0), drawn(1, 0, 0), drawn(0, 0, count), drawn(2**32, 0, 0), drawn(2**63, 5, 0)):
        same = sum(a == b for a, b in zip(base, other, strict=True))
        assert same / count == pytest.approx(1 / size, abs=5 * math.sqrt(1 / size / count))
    assert drawn(0, 0, 0) == base
