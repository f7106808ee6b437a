"""Failures of other engines' samplers, each named by its public thread, as promises of this one."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from kimicore.errors import InvalidRequest, RequestFailed
from kimicore.model.logprobs import score_prompt
from kimicore.model.sampling import sample
from kimicore.sampling_params import SamplingParams
from kimicore.types import BoundRow, RowResult

from .oracle import operations, row

SIZE = 400
OPS = operations()


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=(rows, SIZE)) * 4.0, dtype=torch.float32)


def run(logits: torch.Tensor, rows: list[BoundRow]) -> list[RowResult]:
    return sample(logits, rows, OPS)


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-300, 1e-7, 1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("scale", [1.0, 1e36])
def test_tiny_temperatures_are_greedy(temperature: float, scale: float) -> None:
    """Temperatures down to nothing take the best token without NaN or warnings (vllm#3063, TensorRT-LLM#15715)."""
    logits = logits_of(40) * scale
    logits[torch.arange(40), logits.argmax(dim=1)] += scale  # no near-ties
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = run(logits, [row([1] * (i + 1), temperature=temperature, seed=i, logprobs=1) for i in range(40)])
    assert [result.tokens[0] for result in results] == logits.argmax(dim=1).tolist()
    assert all(math.isfinite(result.logprobs[0].logprob) for result in results if result.logprobs)


@pytest.mark.parametrize("temperature", [-1, -1e-9, math.nan, math.inf, -math.inf])
def test_impossible_temperatures_are_refused(temperature: float) -> None:
    """Negative, NaN and infinite temperatures are refused before any work (TensorRT-LLM#15715)."""
    with pytest.raises(InvalidRequest, match="temperature"):
        SamplingParams(temperature=temperature)


def test_explicit_zeros_are_honoured() -> None:
    """seed=0, top_p=0.0, min_p=0, top_k=0 and logprobs=0 mean what they say (LlamaFactory#10709)."""
    logits = logits_of(1).expand(60, SIZE)
    best = int(logits[0].argmax())
    strict = run(logits, [row([1] * (i + 1), top_p=0.0, temperature=5.0) for i in range(60)])
    assert {result.tokens[0] for result in strict} == {best}
    loose = [row([1] * (i + 1), min_p=0, top_k=0, logprobs=0, temperature=5.0, seed=0) for i in range(60)]
    first, second = run(logits, loose), run(logits, loose)
    assert first == second
    assert len({result.tokens[0] for result in first}) > 20
    assert all(result.logprobs is not None and result.logprobs[0].top == () for result in first)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("index", [0, SIZE // 2, SIZE - 1])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_broken_logit_fails_its_request(value: float, index: int, temperature: float) -> None:
    """A NaN or infinite logit ends its own request with an error, never an endless token 0 (colibri#369)."""
    logits = logits_of(2)
    rows = [row([1, 2], temperature=temperature, seed=4) for _ in range(2)]
    alone = run(logits[1:], rows[1:])
    logits[0, index] = value
    broken, healthy = run(logits, rows)
    assert isinstance(broken.error, RequestFailed)
    assert broken.tokens == ()
    assert [healthy] == alone


def test_a_seeded_row_does_not_see_an_unseeded_neighbour() -> None:
    """A seeded row's 24 tokens are the same alone and in five pairs with neighbours of other seeds (vllm#51226)."""

    def tokens(neighbour_seed: int | None) -> list[int]:
        known, result = [5], []
        for step in range(24):
            rows = [row(list(known), 1, seed=11, temperature=0.9)]
            if neighbour_seed is not None:
                rows.append(row([9] * (step + 1), 1, seed=neighbour_seed, temperature=1.3, top_k=20))
            result.append(run(logits_of(2, seed=step)[: len(rows)], rows)[0].tokens[0])
            known.append(result[-1])
        return result

    assert [tokens(seed) for seed in (17, 2**63, 11, 0, 12345)] == [tokens(None)] * 5


def test_a_neighbours_content_never_reaches_another_row() -> None:
    """In two batches of one shape with other neighbours, row 0 is bit-equal (imp#1314)."""
    shared, results = logits_of(1, seed=1), []
    for seed in (2, 3):
        logits = torch.cat((shared, logits_of(2, seed=seed) * seed))
        rows = [row([1, 2, 3], seed=6, logprobs=5), *(row([seed] * 9, 1, seed=seed, frequency_penalty=2.0),) * 2]
        results.append(run(logits, rows)[0])
    assert results[0] == results[1]


def test_scores_do_not_depend_on_the_order_of_prompts() -> None:
    """Prompts scored as ABCD, as DCBA and one by one have identical scores: nothing is left behind (vllm#42019)."""
    prompts = [(logits_of(6, seed=i), [i * 7 + j for j in range(6)]) for i in range(4)]
    forward = [score_prompt(logits, ids, 3) for logits, ids in prompts]
    backward = [score_prompt(logits, ids, 3) for logits, ids in reversed(prompts)]
    single = [
        tuple(one for i in range(6) for one in score_prompt(logits[i : i + 1], ids[i : i + 1], 3))
        for logits, ids in prompts
    ]
    assert forward == backward[::-1] == single


def test_an_end_token_has_log_probabilities_as_well() -> None:
    """An end token forced by bias +100 as the first token comes with its scores (llama-cpp-python#1528)."""
    eos = 2
    (result,) = run(logits_of(1), [row([7], logprobs=3, logit_bias={eos: 100.0})])
    assert result.tokens == (eos,)
    assert result.logprobs is not None
    assert len(result.logprobs) == 1
    assert len(result.logprobs[0].top) == 3


@pytest.mark.parametrize("options", [{"temperature": 0.2}, {"temperature": 2.0}, {"top_k": 1}, {"top_p": 0.01}])
def test_log_probabilities_are_the_raw_models(options: dict[str, Any]) -> None:
    """Bias, penalties, temperature and filters change what is chosen, never the reported values (vllm#9453)."""
    logits, forced = logits_of(1), 123
    (plain,) = score_prompt(logits, [forced], 4)
    changes = {"logit_bias": {forced: 500.0}, "repetition_penalty": 1.7, "presence_penalty": 1.0}
    (result,) = run(logits, [row([3, 4, 4], 2, logprobs=4, **changes, **options)])
    assert result.tokens == (forced,)
    assert result.logprobs == (plain,)


@pytest.mark.parametrize("name", ["echo", "logprob", "top_logprobs", "best_of", "typical_p"])
def test_an_unknown_option_is_refused(name: str) -> None:
    """An option that does not exist raises and is named; nothing asked for is dropped in silence (llama.cpp#27174)."""
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams.of(None, {name: 1})


def test_penalties_of_one_row_leave_the_others_alone() -> None:
    """A row without penalties beside a long one with frequency_penalty=0.9 is as alone, and so is the other
    (text-generation-inference#1765)."""
    logits = logits_of(2)
    rows = [row([1, 2], temperature=0.0), row([0] * 50 + [7] * 40, 50, frequency_penalty=0.9, temperature=0.0)]
    assert run(logits, rows) == run(logits[:1], rows[:1]) + run(logits[1:], rows[1:])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_repetition_penalty_counts_a_token_once(sign: float) -> None:
    """A token seen three times is penalized once: divided by 1.3 where positive, multiplied where not
    (transformers.js#1062)."""
    logits = torch.full((1, 3), -10.0)
    logits[0, 0] = sign * 2.6
    penalized = 2.0 if sign > 0 else -3.38
    for rival, winner in ((penalized + 0.01, 1), (penalized - 0.01, 0)):
        logits[0, 1] = rival
        (result,) = run(logits, [row([0, 0, 0], 2, repetition_penalty=1.3, temperature=0.0)])
        assert result.tokens == (winner,)


@pytest.mark.parametrize(
    "bias",
    [{"cat": -50}, {None: 1}, {3.5: 1}, {1: "x"}, {1: math.nan}, {1: math.inf}, {True: 1}, {1: None}, [1, 2]],
)
def test_a_bias_that_is_no_number_is_refused_at_once(bias: Any) -> None:
    """A logit-bias key or value that is not a number is refused where it is given, not in the sampler (vllm#5963)."""
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias=bias)


@pytest.mark.parametrize("wrong", [-1, -49153, -(2**31) - 1])
def test_negative_ids_never_count_from_the_end(wrong: int) -> None:
    """Negative biased and banned ids are errors; the vocabulary's last entries are unchanged (LightLLM#1457)."""
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias={wrong: 5.0})
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        SamplingParams(stop_token_ids=[wrong])
    logits = logits_of(2)
    results = run(logits, [row([1], banned=(wrong,), temperature=0.0), row([1], temperature=0.0)])
    assert isinstance(results[0].error, InvalidRequest)
    assert results[1].tokens == (int(logits[1].argmax()),)
