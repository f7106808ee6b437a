"""Noise: the same bits from every implementation, and bits that are worth their name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimicore.kernels.gumbel import FusedGumbel, GumbelOp, draw
from kimicore.kernels.gumbel.reference import gumbel, gumbel_argmax, noise_of_words, philox4x32

from .oracle import native_gumbel, noise, noise_word, philox

KNOWN_ANSWERS = [  # Random123's kat_vectors: counter, key, output
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
WORDS = st.integers(0, 2**32 - 1)
SEEDS = st.integers(0, 2**64 - 1)


def bits(x: torch.Tensor) -> list[int]:
    return x.view(torch.int32).tolist()


def implementations() -> list[GumbelOp]:
    native = native_gumbel()
    return [gumbel] if native is None else [gumbel, native]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, output: str) -> None:
    """Philox4x32-10 gives the words that its authors publish."""
    words, keys, expected = ([int(word, 16) for word in text.split()] for text in (counter, key, output))
    result = philox4x32((keys[0], keys[1]), *np.array(words, dtype=np.uint64)[:, None])
    assert [int(word[0]) for word in result] == expected
    assert list(philox(tuple(words), tuple(keys))) == expected


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_the_oracle_of_philox_agrees_with_numpy(seed: int) -> None:
    """The oracle's rounds, run at 64 bits, give numpy's Philox stream, which starts at counter 1."""
    stream = np.random.Philox(key=np.array([seed, seed ^ 0x1234], dtype=np.uint64))
    expected = [int(word) for word in stream.random_raw(12)]
    got = [word for i in range(1, 4) for word in philox((i, 0, 0, 0), (seed, seed ^ 0x1234), bits=64)]
    assert got == expected


@given(counters=st.lists(st.tuples(WORDS, WORDS, WORDS, WORDS), min_size=1, max_size=9), key=st.tuples(WORDS, WORDS))
def test_philox_equals_integer_arithmetic(counters: list[tuple[int, ...]], key: tuple[int, int]) -> None:
    """For any counters and key the array form gives exactly what unbounded integers give."""
    result = philox4x32(key, *np.array(counters, dtype=np.uint64).T)
    assert np.stack(result, axis=1).tolist() == [list(philox(counter, key)) for counter in counters]


def test_noise_follows_the_double_logarithm_to_the_ends() -> None:
    """Noise is -log(-log(u)) to float32 precision, from the least word to the greatest, and monotone."""
    edges = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    words = np.unique(np.append(np.random.default_rng(1).integers(0, 2**32, 20_000), edges)).astype(np.uint64)
    values = noise_of_words(words)
    uniform = (words.astype(np.float64) + 0.5) / 2**32
    np.testing.assert_allclose(values, -np.log(-np.log(uniform)), rtol=1.2e-7, atol=1e-12)
    assert (np.diff(values) >= 0).all()
    assert values[0] == pytest.approx(-3.13, abs=1e-3)
    assert values[-1] == pytest.approx(22.87, abs=1e-2)


@given(seed=SEEDS, choice=WORDS, position=WORDS, ids=st.lists(st.integers(0, 2**31), max_size=40))
def test_every_implementation_gives_the_same_bits(seed: int, choice: int, position: int, ids: list[int]) -> None:
    """Each implementation's noise equals the reference bit for bit, and the oracle to float32 precision."""
    asked = torch.tensor(ids, dtype=torch.int64)
    expected = gumbel(seed, choice, position, asked)
    assert expected.dtype == torch.float32
    assert expected.tolist() == pytest.approx([noise(seed, choice, position, one) for one in ids], rel=1e-6, abs=1e-9)
    for implementation in implementations():
        assert bits(implementation(seed, choice, position, asked)) == bits(expected)


def test_noise_of_a_token_is_the_same_in_every_subset() -> None:
    """A token has its own noise whatever other tokens are asked for and in whatever order."""
    everything = gumbel(7, 1, 30, torch.arange(1000))
    for implementation in implementations():
        some = torch.tensor([999, 3, 3, 0, 500])
        assert bits(implementation(7, 1, 30, some)) == bits(everything[some])
        assert implementation(7, 1, 30, some[:0]).shape == (0,)


def test_noise_depends_on_everything_that_names_it() -> None:
    """Seed (all 64 bits), choice, position and token id each change the noise: no two words of a grid coincide."""
    seeds = (0, 1, 2**32, 2**63)
    words = {
        noise_word(seed, choice, position, token)
        for seed in seeds
        for choice in range(4)
        for position in range(8)
        for token in range(16)
    }
    assert len(words) == 4 * 4 * 8 * 16
    assert gumbel(2**32, 0, 5, torch.arange(4)).tolist() != gumbel(0, 0, 5, torch.arange(4)).tolist()


@st.composite
def score_rows(draw_from: st.DrawFn) -> torch.Tensor:
    size = draw_from(st.sampled_from([1, 2, 3, 5, 16, 17, 255, 256, 257, 300, 1029]))
    generator = np.random.default_rng(draw_from(st.integers(0, 2**32)))
    kind = draw_from(st.sampled_from(["normal", "wide", "ties", "holes", "huge"]))
    scores = generator.normal(size=size) * {"wide": 30.0, "huge": 1e37}.get(kind, 2.0)
    if kind == "ties":
        scores = np.round(scores)
    if kind == "holes":
        scores[generator.random(size) < 0.7] = -np.inf
        scores[generator.integers(size)] = 0.0
    return torch.tensor(scores - scores.max(), dtype=torch.float32)


@settings(max_examples=5 * settings().max_examples)
@given(scores=score_rows(), seed=SEEDS, choice=st.integers(0, 127), position=st.integers(0, 2**20))
def test_pruned_draws_equal_the_whole_vocabulary(scores: torch.Tensor, seed: int, choice: int, position: int) -> None:
    """Leaving out noise that cannot win never changes the winner, with ties, -inf and huge spreads."""
    expected = int((scores + gumbel(seed, choice, position, torch.arange(scores.shape[0]))).argmax())
    assert gumbel_argmax(scores, seed, choice, position) == expected
    for implementation in implementations():
        assert draw(implementation, scores, seed, choice, position) == expected


@pytest.mark.parametrize("size", [49_152, 49_155])
def test_pruned_draws_equal_a_real_vocabulary(size: int) -> None:
    """The same at the size of a real vocabulary, over 40 positions."""
    scores = torch.tensor(np.random.default_rng(3).normal(size=size) * 3.0, dtype=torch.float32)
    scores -= scores.max()
    for position in range(40):
        expected = int((scores + gumbel(11, 0, position, torch.arange(size))).argmax())
        assert all(draw(one, scores, 11, 0, position) == expected for one in implementations())


def test_equal_noisy_scores_go_to_the_lowest_id() -> None:
    """Where float32 makes noisy scores equal, the lowest id wins in every implementation."""
    scores = torch.full((600,), -3e38)
    scores[[17, 300, 599]] = 1e30  # so large that the noise vanishes in rounding
    for implementation in implementations():
        assert draw(implementation, scores, 5, 0, 9) == 17


def test_native_noise_is_fused_and_refuses_bad_input() -> None:
    """Native noise, where a compiler built it, draws without a noise tensor and refuses what it cannot read."""
    native = native_gumbel()
    if native is None:
        assert not isinstance(gumbel, FusedGumbel)
        return
    assert isinstance(native, FusedGumbel)
    with pytest.raises(ValueError, match="int64"):
        native(0, 0, 0, torch.arange(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="float32"):
        native.argmax(torch.zeros(4, dtype=torch.float64), 0, 0, 0)
    strided = torch.arange(20)[::2]
    assert bits(native(1, 2, 3, strided)) == bits(gumbel(1, 2, 3, strided))
