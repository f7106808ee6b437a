"""A request as the book keeps it, what it is made from, and what the book tells about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from attrs import frozen

from kimicore.contracts import Judge, RowView
from kimicore.prefix import Chains
from kimicore.records import swift
from kimicore.sampling_params import SamplingParams
from kimicore.types import FinishReason, KVPrecision, LogitsAt, Retention, Tier, TokenScores

__all__ = ["Event", "Failed", "Finished", "NewRequest", "Preempted", "Request", "Tokens"]


@frozen(eq=False)
class NewRequest:
    """One choice of a request, checked and tokenized.

    ``number`` names it; numbers grow. ``limit_tokens``: prompt and output together. ``seed`` and ``choice`` fix its
    noise. ``arrived_s``, ``deadline_s``: on the engine's clock. ``salt``: requests share cached blocks only under the
    same salt. ``use_cache``: False keeps its blocks from everyone but its own group. ``leader``: number of the choice
    that computes the prompt for this one; it waits until that is done, or until the leader has ended. ``end_ids``:
    tokens that end it (the model's end tokens unless ignored, and stop ids). ``banned_until_min``: tokens that cannot
    be drawn before ``params.min_tokens`` are there. ``streamed``: somebody reads its tokens as they come. ``tier``: how
    soon its caller wants the first. ``retain``: parts of its prompt to keep cached. ``keep``: its blocks are to reach
    the disk when they leave, though they were used once. ``kv_precision``: of its KV. ``share``: of its blocks that a
    generated token attends to (None: all).
    """

    number: int
    prompt: Sequence[int]
    limit_tokens: int
    params: SamplingParams
    seed: int
    choice: int
    tenant: str
    priority: int
    arrived_s: float
    deadline_s: float | None
    salt: bytes
    use_cache: bool
    leader: int | None
    judge: Judge
    end_ids: frozenset[int]
    banned_until_min: tuple[int, ...] = ()
    streamed: bool = True
    tier: Tier = "standard"
    retain: tuple[Retention, ...] = ()
    keep: bool = False
    kv_precision: KVPrecision = "full"
    share: float | None = None


@swift
@frozen(eq=False, weakref_slot=False)
class Tokens:
    """New tokens of a request; ``first``: these are its first. ``prompt_scores``: of the next prompt positions."""

    request: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenScores, ...] | None = None
    prompt_scores: tuple[TokenScores, ...] | None = None
    first: bool = False


@frozen(eq=False)
class Finished:
    """A request ended as it should; its blocks are given back. Times are on the engine's clock.

    ``cached_tokens`` were found in the cache when it was first admitted; ``started_s``: its first step began (None:
    it needed none); ``first_token_s``: None where it generated nothing. Tokens of the same step come before, in a
    :class:`Tokens`.
    """

    request: int
    reason: FinishReason
    stop: str | int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    arrived_s: float
    started_s: float | None
    first_token_s: float | None
    finished_s: float


@frozen(eq=False)
class Failed:
    """A request ended with an error."""

    request: int
    error: BaseException


@frozen(eq=False)
class Preempted:
    """A request gave its blocks back and waits again; it keeps its tokens."""

    request: int


Event = Tokens | Finished | Failed | Preempted


class Request:
    """A living request: ``cached <= computed <= known <= known + pending <= limit``, in tokens.

    ``tables``: per KV class the slots of its blocks; entries before ``live[c]`` have left the window and are 0. Only
    classes of its precision, ``kinds``, have any.
    """

    __slots__ = (
        "attention",
        "banned",
        "cached",
        "cancelled",
        "chains",
        "computed",
        "declined_s",
        "first_cached",
        "first_token_s",
        "generated",
        "group",
        "held_by",
        "in_flight",
        "kinds",
        "known",
        "limit",
        "live",
        "loading",
        "looked_at",
        "lost",
        "new",
        "number",
        "pending",
        "preemptions",
        "prompt_tokens",
        "rope_tokens",
        "row_view",
        "scored",
        "sealed",
        "seen_at",
        "shared",
        "started_s",
        "state",
        "tables",
        "tries",
    )

    def __init__(self, new: NewRequest, chains: Chains, kinds: tuple[int, ...], group: int) -> None:
        self.new = new
        self.number = new.number
        self.chains = chains
        self.kinds = kinds
        self.group = group
        self.held_by: int | None = None
        self.known: list[int] = list(new.prompt)
        self.prompt_tokens = len(self.known)
        self.limit = new.limit_tokens
        self.rope_tokens = self.prompt_tokens
        self.cached = self.computed = self.pending = self.generated = 0
        self.first_cached = 0
        self.scored = 0 if new.params.prompt_logprobs is not None else self.prompt_tokens
        self.sealed = 0  # blocks sealed or hit, from the start
        self.lost = 0  # computed tokens that a preemption threw away
        self.preemptions = 0
        self.state: Literal["waiting", "running"] = "waiting"
        self.tables: list[list[int]] = [[] for _ in chains]
        self.live = [0] * len(chains)
        self.in_flight = False
        self.cancelled = False
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.banned = new.banned_until_min if new.params.min_tokens > 0 else ()
        self.row_view: RowView | None = None
        self.seen_at = -1  # the cache's age at the last look
        self.shared: tuple[int, ...] = ()
        self.loading: Any = None  # its load from a lower tier, while that is on its way
        self.tries = 0  # loads so far
        self.looked_at = -1  # the cache's age when the lower tiers were last looked at
        self.declined_s = float("-inf")  # until then, what lay there was faster to compute
        self.attention: list[Any] | None = None  # per KV class what its blocks get; None: nobody is told

    @property
    def table(self) -> list[int]:
        """Its table in the first of its classes, which is as long as those of the others."""
        return self.tables[self.kinds[0]]

    @property
    def logits_at(self) -> LogitsAt:
        """What its steps have to score."""
        if self.scored < self.prompt_tokens - 1:
            return "all"
        return "last" if self.limit > self.prompt_tokens else "none"

    def view(self) -> RowView:
        """Return what a policy sees; made anew only after a change."""
        row = self.row_view
        if row is None:
            new, state = self.new, self.state
            row = self.row_view = RowView(
                self.number,
                state,
                new.arrived_s,
                new.priority,
                new.tenant,
                self.prompt_tokens,
                len(self.known),
                self.computed if state == "running" else self.cached,
                self.limit,
                self.generated,
                self.preemptions,
                self.logits_at,
                self.shared,
                self.scored,
                new.streamed,
                new.tier,
                new.kv_precision,
            )
        return row
