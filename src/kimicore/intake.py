"""From a caller's request to what the book takes; what only vocabulary and limits can tell is checked here."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from kimicore.errors import ConfigError, InvalidRequest
from kimicore.handle import Job
from kimicore.requests import NewRequest
from kimicore.sampling_params import SamplingParams
from kimicore.text.judge import TextJudge, resolve_stops
from kimicore.text.tokenizer import Tokenizer

__all__ = ["check_params", "context_limit", "make_group"]


def context_limit(wanted: int | None, model: int, arena: int) -> int:
    """Return the context that is served, in tokens; what was asked for is kept or refused, never lowered.

    Raises :class:`~kimicore.ConfigError` where ``wanted`` is over what the model was made for or the arena holds.
    """
    if wanted is None:
        return min(model, arena)
    if wanted > model:
        raise ConfigError(f"context_tokens={wanted}: the model was made for {model}; lower it, or leave it out")
    if wanted > arena:
        raise ConfigError(f"context_tokens={wanted}: the KV arena holds {arena}; raise kv_device_bytes, or lower it")
    return wanted


def check_params(params: SamplingParams, tokenizer: Tokenizer) -> None:
    """Raise :class:`~kimicore.InvalidRequest` for ids outside the vocabulary and stop strings that cannot match."""
    high = tokenizer.vocab_size - 1
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", [k for k, _ in params.logit_bias])):
        for one in ids:
            if one > high:
                raise InvalidRequest(f"{name}: token id {one} is outside the vocabulary (0 to {high})")
    resolve_stops(tokenizer, params)


def make_group(
    job: Job,
    ids: Sequence[int],
    seed: int,
    numbers: Sequence[int],
    limit_tokens: int,
    tokenizer: Tokenizer,
    use_cache: bool,
    streamed: bool,
) -> list[NewRequest]:
    """Return a request per choice, named by ``numbers``; the first leads, and scores the prompt for all."""
    params, asked = job.params, job.asked
    eos_ids = [one for one in tokenizer.eos_ids if one < tokenizer.vocab_size]
    end_ids = frozenset((*(() if params.ignore_eos else eos_ids), *params.stop_token_ids))
    _, spelled = resolve_stops(tokenizer, params)  # stop strings that are a special token
    banned = tuple(sorted({*eos_ids, *params.stop_token_ids, *spelled}))
    quiet = evolve(params, prompt_logprobs=None)
    return [
        NewRequest(
            number=number,
            prompt=ids,
            limit_tokens=limit_tokens,
            params=quiet if choice else params,
            seed=seed,
            choice=choice,
            tenant=asked.tenant,
            priority=asked.priority,
            arrived_s=job.submitted_s,
            deadline_s=None if asked.timeout_s is None else job.submitted_s + asked.timeout_s,
            salt=asked.tenant.encode(),
            use_cache=use_cache,
            leader=numbers[0] if choice else None,
            judge=TextJudge(tokenizer, params),
            end_ids=end_ids,
            banned_until_min=banned,
            streamed=streamed,
            tier=asked.tier,
            retain=tuple(asked.retain),
            keep=asked.keep,
        )
        for choice, number in enumerate(numbers)
    ]
