"""From a caller's request to what the book takes; what only vocabulary and limits can tell is checked here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from kimicore.checks import number
from kimicore.config import EngineConfig
from kimicore.errors import ConfigError, InvalidRequest
from kimicore.handle import Job, KVWish
from kimicore.requests import NewRequest
from kimicore.sampling_params import SamplingParams
from kimicore.text.judge import TextJudge, resolve_stops
from kimicore.text.tokenizer import Tokenizer
from kimicore.types import KV_PRECISIONS, KVPrecision

__all__ = ["check_params", "context_limit", "make_group", "resolve_kv"]


NAMED = 12  # domains that an error names


def context_limit(config: EngineConfig, model: int, capacities: Mapping[KVPrecision, int]) -> int:
    """Return the context that is served, in tokens; what was asked for is kept or refused, never lowered.

    ``model``: what the model was made for; ``capacities``: what the arena holds, by precision. Raises
    :class:`~kimicore.ConfigError` where ``context_tokens`` is over either, for requests that name no precision.
    """
    wanted, arena = config.context_tokens, capacities[config.kv_precision]
    if wanted is None:
        return min(model, max(capacities.values()))
    if wanted > model:
        raise ConfigError(f"context_tokens={wanted}: the model was made for {model}; lower it, or leave it out")
    if wanted > arena:
        raise ConfigError(f"context_tokens={wanted}: the KV arena holds {arena}; raise kv_device_bytes, or lower it")
    return wanted


def resolve_kv(wish: KVWish, config: EngineConfig) -> KVWish:
    """Return the wish with the precision that serves it, and no domain any more.

    Raises :class:`~kimicore.InvalidRequest` that names the value for what cannot be had.
    """
    domains = config.domains
    if wish.domain is not None and (not isinstance(wish.domain, str) or wish.domain not in domains):
        known = ", ".join(list(domains)[:NAMED]) + (", ..." if len(domains) > NAMED else "")
        raise InvalidRequest(f"domain={wish.domain!r:.80}: must be one of {known}; add others with kv_domains")
    if wish.precision is not None and (not isinstance(wish.precision, str) or wish.precision not in KV_PRECISIONS):
        raise InvalidRequest(f"kv_precision={wish.precision!r:.80}: must be one of {', '.join(KV_PRECISIONS)}")
    meant = None if wish.domain is None else domains[wish.domain]
    if meant is not None and wish.precision not in (None, meant):
        raise InvalidRequest(
            f"kv_precision={wish.precision!r}: domain={wish.domain!r} stands for {meant!r}; leave one of them out"
        )
    precision = meant or wish.precision or config.kv_precision
    if precision not in config.precisions:
        held = ", ".join(config.precisions)
        raise InvalidRequest(f"kv_precision={precision!r}: this engine holds {held}; name it in kv_precisions")
    return KVWish(None, precision, _share(wish.share, precision, config))


def _share(wanted: float | None, precision: KVPrecision, config: EngineConfig) -> float | None:
    if wanted is None:
        return None
    share = number("sparse_decode", wanted, 0.0, 1.0, InvalidRequest)
    if not share:
        raise InvalidRequest("sparse_decode=0: must be a share over 0, such as 0.25")
    if share == 1.0:
        return None
    if not config.sparse_decode:
        raise InvalidRequest(f"sparse_decode={share}: this engine keeps no summaries; set sparse_decode=True for it")
    if precision != "full":
        raise InvalidRequest(f"sparse_decode={share}: it needs KV of full precision, and this request's is {precision}")
    return share


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
            kv_precision=job.precision,
            share=asked.kv.share,
        )
        for choice, number in enumerate(numbers)
    ]
