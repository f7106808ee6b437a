"""Loads that are drawn: arrivals by a process, lengths by distributions fitted to published traces.

Everything is seeded: the same arguments give the same load.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from attrs import evolve, frozen

from kimicore.checks import float_field, int_field, integer, number
from kimicore.errors import ConfigError
from kimicore.sim.traces import TraceRequest
from kimicore.types import TIERS, Tier

__all__ = ["CHAT", "CODE", "LOADS", "Lengths", "bursts", "diurnal", "multi_turn", "poisson", "scaled", "with_tiers"]

_MOST_REQUESTS = 10_000_000
TURN_BLOCK_TOKENS = 64
"""Tokens of a block of the prompts of :func:`multi_turn`."""


@frozen
class Lengths:
    """Log-normal lengths in tokens: median and the logarithm's standard deviation, of prompts and of outputs.

    ``most_prompt_tokens`` and ``most_output_tokens`` cut off. Raises :class:`~kimicore.ConfigError`.
    """

    prompt_median: float = float_field(759.0, 1.0, 1e7, fault=ConfigError)
    prompt_sigma: float = float_field(0.985, 0.0, 10.0, fault=ConfigError)
    output_median: float = float_field(151.0, 1.0, 1e7, fault=ConfigError)
    output_sigma: float = float_field(0.859, 0.0, 10.0, fault=ConfigError)
    most_prompt_tokens: int = int_field(14050, 1, 1 << 24, fault=ConfigError)
    most_output_tokens: int = int_field(1000, 1, 1 << 24, fault=ConfigError)

    def draw(self, source: random.Random) -> tuple[int, int]:
        """Return the lengths of a prompt and its output."""
        return self._one(source, self.prompt_median, self.prompt_sigma, self.most_prompt_tokens), self.output(source)

    def output(self, source: random.Random) -> int:
        """Return the length of an output."""
        return self._one(source, self.output_median, self.output_sigma, self.most_output_tokens)

    @staticmethod
    def _one(source: random.Random, median: float, sigma: float, most: int) -> int:
        return min(most, max(1, round(source.lognormvariate(math.log(median), sigma))))


CHAT = Lengths()
"""Conversation: moments of the logarithms in Azure's ``conv`` trace of 2023-11-16 (P. Patel et al., "Splitwise", ISCA
2024; Azure Public Dataset)."""
CODE = Lengths(
    prompt_median=1095.0,
    prompt_sigma=1.36,
    output_median=16.2,
    output_sigma=0.847,
    most_prompt_tokens=7437,
    most_output_tokens=1899,
)
"""Code completion: the same of Azure's ``code`` trace."""


def poisson(
    rate: float, duration_s: float, *, seed: int = 0, lengths: Lengths = CHAT, tenants: int = 1
) -> list[TraceRequest]:
    """Return requests that come independently of each other, ``rate`` a second on average, for ``duration_s``.

    ``tenants``: each request belongs to one of so many, drawn evenly. Raises :class:`~kimicore.ConfigError`.
    """
    return _drawn(rate, duration_s, seed, lengths, tenants, lambda now_s: 1.0, 1.0)


def bursts(
    rate: float,
    duration_s: float,
    *,
    seed: int = 0,
    lengths: Lengths = CHAT,
    tenants: int = 1,
    factor: float = 5.0,
    burst_s: float = 10.0,
    pause_s: float = 50.0,
) -> list[TraceRequest]:
    """Return requests whose rate jumps: ``factor`` times as high during bursts of ``burst_s`` seconds on average as in
    the pauses of ``pause_s`` between them; ``rate`` is the mean over both.

    A Markov-modulated Poisson process of two states (H. Heffes, D. Lucantoni, IEEE JSAC 4(6), 1986).
    """
    number("factor", factor, 1.0, 1e6, ConfigError)
    number("burst_s", burst_s, 0.0, 1e9, ConfigError, above=True)
    number("pause_s", pause_s, 0.0, 1e9, ConfigError, above=True)
    number("duration_s", duration_s, 0.0, 1e9, ConfigError, above=True)
    switch = random.Random(f"bursts {seed}")
    low = (burst_s + pause_s) / (factor * burst_s + pause_s)
    edges: list[tuple[float, float]] = []  # when a state begins, and its factor of the mean
    now_s, high = 0.0, False
    while now_s < duration_s:
        edges.append((now_s, low * (factor if high else 1.0)))
        now_s += switch.expovariate(1.0 / (burst_s if high else pause_s))
        high = not high
    at = 0

    def intensity(now_s: float) -> float:
        nonlocal at
        while at + 1 < len(edges) and edges[at + 1][0] <= now_s:
            at += 1
        return edges[at][1]

    return _drawn(rate, duration_s, seed, lengths, tenants, intensity, low * factor)


def diurnal(
    rate: float,
    duration_s: float,
    *,
    seed: int = 0,
    lengths: Lengths = CHAT,
    tenants: int = 1,
    period_s: float = 86400.0,
    swing: float = 0.8,
) -> list[TraceRequest]:
    """Return requests whose rate follows the day: a sine of ``period_s`` around ``rate``, from its lowest point on, by
    ``swing`` (0 to 1) of it up and down."""
    number("period_s", period_s, 0.0, 1e9, ConfigError, above=True)
    number("swing", swing, 0.0, 1.0, ConfigError)
    turn = 2.0 * math.pi / period_s
    return _drawn(
        rate, duration_s, seed, lengths, tenants, lambda now_s: 1.0 - swing * math.cos(turn * now_s), 1.0 + swing
    )


def multi_turn(
    rate: float,
    duration_s: float,
    *,
    seed: int = 0,
    lengths: Lengths = CHAT,
    tenants: int = 1,
    turns: float = 3.7,
    think_s: float = 30.0,
    system_tokens: int = 512,
) -> list[TraceRequest]:
    """Return conversations: each turn's prompt is all that was said before and a new message.

    ``rate``: conversations begun a second. ``turns``: on average, of a geometric distribution; at 3.7, 73 % of the
    conversations have several turns, as in ShareGPT (B. Gao et al., "CachedAttention", USENIX ATC 2024). ``think_s``:
    mean of the exponential time from a turn to the next. ``system_tokens``: a start that all conversations of a tenant
    share. ``lengths``: of first messages and outputs; later messages are a quarter as long.
    """
    number("turns", turns, 1.0, 1e6, ConfigError)
    number("think_s", think_s, 0.0, 1e9, ConfigError)
    integer("system_tokens", system_tokens, 0, 1 << 24, ConfigError)
    source = random.Random(f"turns {seed}")
    found: list[TraceRequest] = []
    for talk, first in enumerate(poisson(rate, duration_s, seed=seed, lengths=lengths, tenants=tenants)):
        now_s, length = first.arrived_s, system_tokens
        message, output = first.prompt_tokens, first.output_tokens
        while True:
            length += message
            ids = tuple(_turn_blocks(talk, length, system_tokens))
            found.append(evolve(first, arrived_s=now_s, prompt_tokens=length, output_tokens=output,
                                blocks=ids, block_tokens=TURN_BLOCK_TOKENS))  # fmt: skip
            if source.random() < 1.0 / turns:
                break
            length += output
            now_s += source.expovariate(1.0 / think_s) if think_s else 0.0
            message, output = max(1, lengths.draw(source)[0] // 4), lengths.output(source)
    return sorted(found, key=lambda one: one.arrived_s)


def _turn_blocks(talk: int, length: int, system_tokens: int) -> Iterator[int]:
    """Yield the ids of a prompt's full blocks: of the shared start, then of the conversation."""
    shared = system_tokens // TURN_BLOCK_TOKENS
    for at in range(length // TURN_BLOCK_TOKENS):
        yield at if at < shared else (talk + 1) * (1 << 20) + at


def _drawn(
    rate: float,
    duration_s: float,
    seed: int,
    lengths: Lengths,
    tenants: int,
    intensity: Callable[[float], float],
    highest: float,
) -> list[TraceRequest]:
    """Draw arrivals of a rate that changes with time, by thinning (P. Lewis, G. Shedler, 1979)."""
    number("rate", rate, 0.0, 1e6, ConfigError, above=True)
    number("duration_s", duration_s, 0.0, 1e9, ConfigError, above=True)
    integer("seed", seed, 0, None, ConfigError)
    integer("tenants", tenants, 1, 1 << 20, ConfigError)
    if rate * duration_s > _MOST_REQUESTS:
        raise ConfigError(f"rate={rate} for duration_s={duration_s}: over {_MOST_REQUESTS} requests; lower one of them")
    times, sizes = random.Random(f"times {seed}"), random.Random(f"sizes {seed}")
    found: list[TraceRequest] = []
    now_s = times.expovariate(rate * highest)
    while now_s < duration_s:
        if times.random() * highest < intensity(now_s):
            prompt, output = lengths.draw(sizes)
            tenant = f"tenant-{sizes.randrange(tenants)}" if tenants > 1 else ""
            found.append(TraceRequest(now_s, prompt, output, tenant=tenant))
        now_s += times.expovariate(rate * highest)
    if not found:
        raise ConfigError(f"rate={rate} for duration_s={duration_s} gave no request; raise one of them")
    return found


LOADS: Mapping[str, Callable[..., list[TraceRequest]]] = {
    "poisson": poisson,
    "bursts": bursts,
    "diurnal": diurnal,
    "multi-turn": multi_turn,
}


# ---------------------------------------------------------------- changing a load


def scaled(requests: Sequence[TraceRequest], load: float) -> list[TraceRequest]:
    """Return the same requests ``load`` times as close together."""
    number("load", load, 0.0, 1e6, ConfigError, above=True)
    return [evolve(one, arrived_s=one.arrived_s / load) for one in requests]


def with_tiers(
    requests: Sequence[TraceRequest], shares: Mapping[str, float] | None = None, seed: int = 0
) -> list[TraceRequest]:
    """Return the requests with tiers, drawn by a hash of seed and place; those that have one keep it.

    ``shares``: by tier (None: 20 interactive, 60 standard, 20 background), in any unit.
    """
    given = {"interactive": 20.0, "standard": 60.0, "background": 20.0} if shares is None else dict(shares)
    for name, value in given.items():
        if name not in TIERS:
            raise ConfigError(f"shares: there is no tier {name!r}; tiers are {', '.join(TIERS)}")
        number(f"shares[{name!r}]", value, 0.0, 1e9, ConfigError)
    whole = sum(given.values())
    if whole <= 0.0:
        raise ConfigError("shares: all are 0; at least one tier needs some")
    return [
        one if one.tier is not None else evolve(one, tier=_tier(at, seed, given, whole))
        for at, one in enumerate(requests)
    ]


def _tier(at: int, seed: int, shares: Mapping[str, float], whole: float) -> Tier:
    digest = hashlib.blake2b(f"{seed} {at}".encode(), digest_size=8).digest()
    place = int.from_bytes(digest, "little") / 2**64 * whole
    for name, value in shares.items():
        if place < value:
            return cast(Tier, name)
        place -= value
    return cast(Tier, next(name for name, value in reversed(list(shares.items())) if value > 0.0))
