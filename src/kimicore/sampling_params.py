"""How tokens are chosen for one request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Attribute, Converter, evolve, field, fields, frozen

from kimicore.checks import boolean_field, float_field, int_field, integer, number
from kimicore.errors import InvalidRequest

__all__ = ["SamplingParams"]

MAX_LOGPROBS = 64
MAX_CHOICES = 128
MAX_STOPS = 64
GREEDY_BELOW = 1e-4
MAX_SEED = 2**64 - 1


def _stops(value: Any, attribute: Attribute[Any]) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else None
    if stops is None or not all(isinstance(stop, str) for stop in stops):
        raise InvalidRequest(f"{attribute.name}={value!r}: must be a string or a list of strings")
    if any("\ud800" <= one <= "\udfff" for stop in stops for one in stop):
        raise InvalidRequest(f"{attribute.name}={value!r}: a lone surrogate can never match; give text")
    if "" in stops:
        raise InvalidRequest(f"{attribute.name}={value!r}: an empty stop string would stop at once; leave it out")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"{attribute.name}: {len(stops)} stop strings, at most {MAX_STOPS} are taken")
    return stops


def _ids(value: Any, attribute: Attribute[Any]) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidRequest(f"{attribute.name}={value!r}: must be a list of token ids")
    return tuple(integer(attribute.name, one, 0, None, InvalidRequest) for one in value)


def _bias(value: Any, attribute: Attribute[Any]) -> tuple[tuple[int, float], ...]:
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, tuple):  # as stored, so that evolve() can pass it on
        pairs = list(value)
    else:
        raise InvalidRequest(f"{attribute.name}={value!r}: must map token ids to numbers")
    name = attribute.name
    checked = (
        (integer(f"{name} key", k, 0, None, InvalidRequest), number(f"{name}[{k!r}]", v, -1e6, 1e6, InvalidRequest))
        for k, v in pairs
    )
    return tuple(sorted(checked))


def _converted(default: Any, convert: Any) -> Any:
    return field(default=default, kw_only=True, converter=Converter(convert, takes_field=True))


@frozen(slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends; every value is checked here, before any work.

    ``max_tokens``: most tokens to generate (None: as many as the context has room for; 0: none, which is
    useful with ``prompt_logprobs``). ``min_tokens``: end tokens and stop ids cannot be chosen, and stop strings
    do not end the text, before that many tokens were generated. ``temperature``: 0 takes the most likely token,
    and so does anything below 1e-4, where dividing by it would overflow. ``top_k``: 0 means off. ``top_p``: 0.0
    leaves only the most likely token. ``min_p``: tokens less likely than ``min_p`` times the most likely one are
    dropped. The order is: logit bias, repetition, frequency and presence penalty, temperature, top-k, top-p, min-p.

    ``repetition_penalty`` divides a positive logit (multiplies a negative one) of every token seen in the
    prompt or the output, once per distinct token; ``frequency_penalty`` and ``presence_penalty`` count
    generated tokens only. ``logit_bias`` maps token ids to numbers that are added (also readable as sorted pairs).

    ``seed``: the same seed gives the same text alone, in any batch, after a preemption and under any chunk
    size; None draws one. ``n``: number of choices; choice ``i`` uses its own stream of the seed.
    ``stop``: strings that end the text and are left out of it unless ``include_stop``. ``stop_token_ids``
    end it as well; like the end token they stand in ``token_ids`` and not in ``text``. ``ignore_eos``: the
    model's end tokens no longer end the request. ``logprobs``: log-probabilities of each chosen token and of the
    given number of best tokens, by the raw model (before temperature, penalties and bias); None is off, 0 is the
    chosen token alone.
    ``prompt_logprobs``: the same for the prompt. ``skip_special_tokens``: special tokens give no text.

    Raises :class:`~kimicore.InvalidRequest` that names the field, the value and what is allowed.
    """

    max_tokens: int | None = int_field(256, 0, fault=InvalidRequest, optional=True)
    min_tokens: int = int_field(0, 0, fault=InvalidRequest)
    temperature: float = float_field(1.0, 0.0, 100.0, fault=InvalidRequest)
    top_k: int = int_field(0, 0, fault=InvalidRequest)
    top_p: float = float_field(1.0, 0.0, 1.0, fault=InvalidRequest)
    min_p: float = float_field(0.0, 0.0, 1.0, fault=InvalidRequest)
    repetition_penalty: float = float_field(1.0, 0.0, 100.0, fault=InvalidRequest, above=True)
    frequency_penalty: float = float_field(0.0, -100.0, 100.0, fault=InvalidRequest)
    presence_penalty: float = float_field(0.0, -100.0, 100.0, fault=InvalidRequest)
    logit_bias: Any = _converted((), _bias)
    seed: int | None = int_field(None, 0, MAX_SEED, fault=InvalidRequest, optional=True)
    n: int = int_field(1, 1, MAX_CHOICES, fault=InvalidRequest)
    stop: Any = _converted((), _stops)
    stop_token_ids: Any = _converted((), _ids)
    include_stop: bool = boolean_field(False, fault=InvalidRequest)
    ignore_eos: bool = boolean_field(False, fault=InvalidRequest)
    logprobs: int | None = int_field(None, 0, MAX_LOGPROBS, fault=InvalidRequest, optional=True)
    prompt_logprobs: int | None = int_field(None, 0, MAX_LOGPROBS, fault=InvalidRequest, optional=True)
    skip_special_tokens: bool = boolean_field(True, fault=InvalidRequest)

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens={self.min_tokens} is over max_tokens={self.max_tokens}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalized(self) -> bool:
        """Whether the tokens so far change the logits."""
        return bool(self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty)

    @classmethod
    def of(cls, params: SamplingParams | None, changes: Mapping[str, Any]) -> SamplingParams:
        """Return ``params`` (or the defaults) with ``changes``; an unknown name is refused with the known ones."""
        known = {one.name for one in fields(cls)}
        for name in changes:
            if name not in known:
                raise InvalidRequest(f"unknown option {name!r}; known are: {', '.join(sorted(known))}")
        if params is None:
            return cls(**changes)
        if not isinstance(params, cls):
            raise InvalidRequest(f"params={params!r}: must be SamplingParams")
        return evolve(params, **changes) if changes else params
