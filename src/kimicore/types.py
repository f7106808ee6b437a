"""The records that the whole engine shares: what comes out of it, and what one step is.

Everything here is frozen and made of the standard library and attrs, so that both towers (decisions,
devices) and every plugin can use it without importing the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from attrs import frozen

from kimicore.checks import float_field, int_field
from kimicore.errors import InvalidRequest
from kimicore.records import swift
from kimicore.sampling_params import SamplingParams

__all__ = [
    "KV_PRECISIONS",
    "TIERS",
    "BoundRow",
    "BoundStep",
    "Candidate",
    "Choice",
    "EngineStats",
    "FinishReason",
    "GenerationResult",
    "KVClass",
    "KVPrecision",
    "LogitsAt",
    "Retention",
    "RowPlan",
    "RowResult",
    "Shape",
    "StepPlan",
    "StepResult",
    "StreamChunk",
    "Tier",
    "TierStats",
    "Timing",
    "TokenLogprob",
    "TokenScores",
    "Usage",
]

FinishReason = Literal["stop", "length"]
LogitsAt = Literal["none", "last", "drafts", "all"]
KVPrecision = Literal["full", "int8", "int4"]
Tier = Literal["interactive", "standard", "background"]
KV_PRECISIONS: tuple[KVPrecision, ...] = ("full", "int8", "int4")
TIERS: tuple[Tier, ...] = ("interactive", "standard", "background")


# ---------------------------------------------------------------- what a caller asks for


@frozen
class Retention:
    """A wish to keep the KV blocks of a prompt's tokens ``[start_tokens, end_tokens)`` cached for ``seconds`` more.

    While it holds, these blocks leave the cache after all that nobody asked to keep, and after those kept at a lower
    ``priority`` (0 to 100). ``end_tokens=None``: to the prompt's end. A block that lies in the range by a part counts.
    It is a wish: running requests come first. Raises :class:`~kimicore.InvalidRequest`.
    """

    start_tokens: int = int_field(0, 0, fault=InvalidRequest)
    end_tokens: int | None = int_field(None, 1, fault=InvalidRequest, optional=True)
    seconds: float = float_field(300.0, 0.0, 1e9, fault=InvalidRequest, above=True)
    priority: int = int_field(50, 0, 100, fault=InvalidRequest)

    def __attrs_post_init__(self) -> None:
        if self.end_tokens is not None and self.end_tokens <= self.start_tokens:
            raise InvalidRequest(
                f"end_tokens={self.end_tokens}: must be over start_tokens={self.start_tokens} (the end is not included)"
            )


# ---------------------------------------------------------------- what a caller gets


@frozen
class Candidate:
    """A token that could have stood at a position: its id, log-probability (natural log) and raw bytes."""

    token_id: int
    logprob: float
    bytes: bytes


@frozen
class TokenLogprob:
    """The token at a position, its log-probability under the raw model, and the best tokens there.

    ``bytes`` are the token's own; joined over a text they are the text's UTF-8, while single tokens may
    hold parts of characters. ``logprob`` is None for a prompt's first token, which nothing precedes.
    """

    token_id: int
    logprob: float | None
    bytes: bytes
    top: tuple[Candidate, ...] = ()


@frozen
class Usage:
    """Token counts of one request: prompt (once, however many choices), of these cached, and generated."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@frozen
class Timing:
    """Seconds of one request: waiting until its first step began, until its first token, until its end."""

    queue_s: float
    ttft_s: float
    total_s: float


@frozen
class Choice:
    """One generated continuation.

    ``token_ids`` holds every generated token, the end token included; ``text`` leaves special tokens and
    the stop string out. ``stop`` is what ended it: the stop string, the token id, or None for a length.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@frozen
class GenerationResult:
    """What :meth:`kimicore.Engine.generate` returns; the shortcuts read the first choice."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timing: Timing
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated token ids of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """Log-probabilities of the first choice, where asked for."""
        return self.choices[0].logprobs


@frozen
class StreamChunk:
    """New text and tokens of one choice since the last chunk; a slow reader gets larger chunks.

    The last chunk of a choice has ``finish_reason``. Joined over the stream, the texts are the choice's text.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


@frozen
class TierStats:
    """A lower tier of the KV cache: what is in it now, and totals.

    On disk, bytes are those of records that can be read. ``hit_blocks`` came from it, ``missed_blocks`` were asked for
    and could not be read. ``stored_bytes`` are as they lie there (compressed, on disk). ``dropped_blocks`` left the
    tier above without a copy: for want of room or of a second use, or since the write failed. ``set_aside``: records
    that proved damaged. ``failures``: reads and writes that the system refused.
    """

    blocks: int
    used_bytes: int
    limit_bytes: int
    hit_blocks: int = 0
    missed_blocks: int = 0
    loaded_bytes: int = 0
    stored_blocks: int = 0
    stored_bytes: int = 0
    dropped_blocks: int = 0
    set_aside: int = 0
    failures: int = 0


@frozen
class EngineStats:
    """Counters and gauges of an engine at one moment.

    ``kv_blocks_used`` are referenced by requests, ``kv_blocks_cached`` hold reusable prefixes; with
    ``kv_blocks_free`` they add up to ``kv_blocks_total``. With several KV classes a block is counted in
    units of the smallest common share of the arena (see ``docs/design.md``). ``padded_tokens`` were computed for the
    padding policy's sake, in steps of ``padded_shapes`` different shapes (counted up to 65,536).
    ``policies_set_aside`` names those that broke their promises too often, as ``"kind:name"``.

    ``loads``: requests whose prefix was fetched from a lower tier; ``loads_late``: those that did not wait for it to
    the end and computed the rest; ``loads_declined``: prefixes that were there and faster to compute. ``host`` and
    ``disk``: the lower tiers, None where there is none.
    """

    requests_running: int
    requests_waiting: int
    requests_finished: int
    requests_cancelled: int
    requests_timed_out: int
    requests_failed: int
    requests_refused: int
    preemptions: int
    steps: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    recomputed_tokens: int
    padded_tokens: int
    kv_blocks_used: int
    kv_blocks_cached: int
    kv_blocks_free: int
    kv_blocks_total: int
    kv_bytes_total: int
    evicted_blocks: int
    step_s: float
    policy_faults: int = 0
    policies_set_aside: tuple[str, ...] = ()
    padded_shapes: int = 0
    loads: int = 0
    loads_late: int = 0
    loads_declined: int = 0
    host: TierStats | None = None
    disk: TierStats | None = None


# ---------------------------------------------------------------- what one step is


@frozen
class KVClass:
    """A kind of KV block: which layers share it, their window in tokens (None: all), and its size.

    ``shape`` is one block's ``(layers, 2, kv_heads, block_tokens, head_dim)``; ``dtype`` a name such as
    ``"bfloat16"``. Every class has its own block tables and slot numbers. ``precision``: a request uses the classes of
    its own. ``tail``: blocks that are being filled, in full precision, on their way to a quantized class; nobody shares
    them. ``summaries``: behind its keys and values a block has the least and the greatest of its keys. Blocks are
    ``block_bytes`` apart, of which their content takes ``content_bytes`` (0: all).
    """

    name: str
    layers: tuple[int, ...]
    window: int | None
    dtype: str
    shape: tuple[int, int, int, int, int]
    block_bytes: int
    latent: bool = False
    precision: KVPrecision = "full"
    tail: bool = False
    summaries: bool = False
    content_bytes: int = 0


@swift
@frozen(weakref_slot=False)
class RowPlan:
    """What a request computes in a step: ``count`` tokens from position ``start``.

    ``logits_at``: where logits are wanted. "last" samples one token after the last position; "all" scores
    every position (prompt log-probabilities) and samples as "last" does once the known tokens are computed.
    """

    request: int
    start: int
    count: int
    drafts: tuple[int, ...] = ()
    logits_at: LogitsAt = "none"
    kv_class: str = ""
    adapter: str | None = None
    bias: Any = None


@frozen
class Shape:
    """The padded size that a step runs at: tokens, rows, and entries of the widest block table."""

    tokens: int
    rows: int
    blocks: int


@frozen
class StepPlan:
    """One step as decided: rows to run, and what has to happen first.

    ``preempt``: requests that give their blocks back and wait again. ``yields``: running requests, lowest-ranked
    first, in the order in which they give way where memory turns out shorter than the view said. ``refusals``:
    requests that cannot be served any more, with the reason.
    """

    rows: tuple[RowPlan, ...]
    shape: Shape
    preempt: tuple[int, ...] = ()
    yields: tuple[int, ...] = ()
    refusals: tuple[tuple[int, str], ...] = ()


@swift
@frozen(eq=False, weakref_slot=False)
class BoundRow:
    """A planned row with everything that the runner needs for it.

    ``known``: all token ids known so far (prompt, then output; not to be changed); the row computes
    ``known[plan.start : plan.start + plan.count]``. ``tables``: per KV class the row's block slots, one per
    ``block_tokens`` positions from position 0; entries that have left a window are 0. ``sample``: whether a
    token is drawn after the last position. ``banned``: token ids that must not be drawn. ``rope_tokens``:
    length that fixes a dynamic rope's factor. ``precision``: of its KV; tables of other classes are empty. ``share``:
    of its blocks that a generated token attends to, None: all of them.
    """

    plan: RowPlan
    known: Sequence[int]
    prompt_tokens: int
    tables: tuple[Sequence[int], ...]
    sample: bool
    params: SamplingParams
    seed: int
    choice: int
    banned: tuple[int, ...]
    rope_tokens: int
    precision: KVPrecision = "full"
    share: float | None = None


@frozen(eq=False)
class BoundStep:
    """A step with block numbers: what the runner runs. ``number`` counts the engine's steps.

    ``measured``: indices of the rows whose attention is to be measured by block.
    """

    number: int
    rows: tuple[BoundRow, ...]
    shape: Shape
    measured: tuple[int, ...] = ()


@frozen
class TokenScores:
    """Raw log-probabilities at one position: of the token that stands there, and the best ``(id, logprob)``."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen
class RowResult:
    """What a row gave: up to ``1 + len(drafts)`` tokens, their scores where asked for, or its own error.

    ``prompt_scores``: for ``logits_at="all"``, scores of the known tokens at positions ``start + 1`` to
    ``start + count`` as far as they belong to the prompt.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenScores, ...] | None = None
    prompt_scores: tuple[TokenScores, ...] | None = None
    error: BaseException | None = None


@frozen
class StepResult:
    """What a step gave: one result per planned row, in order, and how many seconds it took.

    ``importance``: None, or for each row None or, where it was measured, per KV class a value by block (1 is the mean
    of those that were compared, NaN was not compared; None: nothing to compare).
    """

    rows: tuple[RowResult, ...]
    importance: Any = None
    step_s: float = 0.0
