"""What a policy, a runner and a judge of text promise: the seams of the engine.

A policy is a frozen settings class with a ``start(...)`` method that returns its state; the state answers
the engine's questions. Policies propose and the core disposes: budgets and memory are checked
outside of them. That nothing starves is a batching policy's own promise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from attrs import Factory, frozen

from kimicore.moves import BlockMove, Transfer, Transferred
from kimicore.records import swift
from kimicore.types import BoundStep, KVPrecision, LogitsAt, Shape, StepResult, Tier

__all__ = [
    "Batching",
    "BatchingState",
    "BlockKey",
    "Carrier",
    "Eviction",
    "EvictionState",
    "Judge",
    "MemoryView",
    "ModuleView",
    "Padding",
    "Precision",
    "PrecisionRules",
    "Ranking",
    "RowView",
    "Runner",
    "StepCost",
    "StepLimits",
    "StepView",
]

BlockKey = bytes
"""Name of a block's content: a keyed digest over its parent's key, its tokens and its context."""


# ---------------------------------------------------------------- batching


@swift
@frozen(weakref_slot=False)
class RowView:
    """A request as a batching policy sees it. Counts are tokens; times are seconds of the engine's clock.

    ``computed_tokens`` of a waiting request is what the prefix cache would give it now. ``generated_tokens``
    counts this choice's output. ``logits_at`` is "all" while the positions of its prompt are being scored (so many
    are done: ``scored_tokens``), "none" where nothing is to be generated, and "last" otherwise. ``shared_blocks``, of
    a waiting request: per KV class the blocks that it would share with running ones (empty: none). ``streamed``: its
    tokens are read as they come, so pauses between them are seen. ``tier``: how soon its caller wants its first token.
    ``kv_precision``: of its KV, which says what classes its blocks are of.
    """

    request: int
    state: Literal["waiting", "running"]
    arrived_s: float
    priority: int
    tenant: str
    prompt_tokens: int
    known_tokens: int
    computed_tokens: int
    limit_tokens: int
    generated_tokens: int
    preemptions: int
    logits_at: LogitsAt
    shared_blocks: tuple[int, ...] = ()
    scored_tokens: int = 0
    streamed: bool = True
    tier: Tier = "standard"
    kv_precision: KVPrecision = "full"


@frozen
class StepLimits:
    """The budgets of a step, enforced by the core whatever a policy says."""

    max_batch_size: int
    max_batch_tokens: int
    min_batch_size: int
    max_wait_s: float
    target_step_s: float


@frozen(eq=False)
class MemoryView:
    """How much more KV can be held: per class ``spare`` blocks in slabs that hold a row's block already, and ``slabs``
    that are free or could be emptied of cached blocks, of which any class may take one for ``per_slab`` blocks.

    ``windows``: per class its window in tokens, or None. A set of needs fits exactly when, for each class, what exceeds
    its ``spare`` is rounded up to slabs, and the sum of these is at most ``slabs``. ``kinds``: the classes that a
    request of each precision uses (all of them where it is not named).
    """

    block_tokens: int
    windows: tuple[int | None, ...]
    spare: tuple[int, ...]
    per_slab: tuple[int, ...]
    slabs: int
    kinds: Mapping[KVPrecision, tuple[int, ...]] = Factory(dict)


@frozen(eq=False)
class StepView:
    """Everything that may be decided on: frozen rows, oldest first, and the memory that is left.

    ``free_blocks[c]``: blocks of KV class ``c`` that can be had without touching a running request (free, or
    cached and evictable); classes draw on the same arena, so the ledger has the last word. ``held_blocks`` of
    a running request tells what preempting it would bring back (counted when asked for; good until the step is bound).
    ``waiting`` is the same object from view to view for as long as its rows are. ``solo``: a request that has
    to run alone, because memory has come apart into pieces too small for it in company.
    """

    now_s: float
    running: tuple[RowView, ...]
    waiting: tuple[RowView, ...]
    limits: StepLimits
    free_blocks: tuple[int, ...] = ()
    held_blocks: Mapping[int, tuple[int, ...]] | None = None
    memory: MemoryView | None = None
    solo: int | None = None


class StepCost(Protocol):
    """A measured model of how long a step takes."""

    def step_s(self, tokens: int, rows: int, context_tokens: int, attended_tokens: int = 0) -> float:
        """Return the seconds that a step of ``tokens`` tokens in ``rows`` rows over ``context_tokens`` cached
        key-value tokens (summed over rows) is expected to take. ``attended_tokens``: pairs of a query and a key in rows
        of several tokens, which a chunk of a prompt pays for and a single token does not."""
        ...


@frozen
class Ranking:
    """A batching policy's answer: every request, most deserving first, and wishes for chunk sizes in tokens.

    ``may_preempt(a, b)`` pairs are not listed: the core preempts the lowest-ranked running request for a
    higher-ranked one only where ``urgency`` differs strictly, so that equals never evict each other in turn.
    A request that ``urgency`` leaves out has 0.0; one that ``chunks`` leaves out takes what the core gives.
    ``held``: waiting requests that should not be admitted yet, so that more of them can start together. The core
    holds none back while nothing runs, and none that has waited for ``max_wait_s`` of the limits.
    """

    order: tuple[int, ...]
    urgency: Mapping[int, float]
    chunks: Mapping[int, int]
    held: frozenset[int] = frozenset()


@runtime_checkable
class BatchingState(Protocol):
    """A running batching policy: repeatable, changes nothing it is given."""

    def rank(self, view: StepView, cost: StepCost) -> Ranking:
        """Return a complete order of the view's requests."""
        ...


@runtime_checkable
class Batching(Protocol):
    """Settings of a batching policy.

    A settings class may have ``starvation_bound_s`` (a number, or None): no request waits, for the first time or again,
    while another one is started that arrived more than ``starvation_bound_s * max(1, d)`` seconds after it, where ``d``
    is how much higher the other's priority is. One that claims no bound has no such attribute.
    """

    @property
    def name(self) -> str:
        """The name under which it is reported."""
        ...

    def start(self, limits: StepLimits) -> BatchingState:
        """Return fresh state."""
        ...


# ---------------------------------------------------------------- eviction


@runtime_checkable
class EvictionState(Protocol):
    """A running eviction policy over the blocks of one cache (one KV class). State is bounded; the same events give the
    same answers.

    Its blocks stand in one order: those named when few are asked for are the first of those named for many. Of two
    blocks with the same history the one used later is never named first, and a block that was told a higher importance,
    all else being equal, is never named earlier.

    Each use of a block is told once, when the request lets go of it, from the end of its sequence to the start: a
    root is always more recent than its leaves.
    """

    def added(self, key: BlockKey, parent: BlockKey | None, depth_blocks: int, now_s: float) -> None:
        """A sealed block, ``depth_blocks`` blocks from its sequence's start, was let go for the first time.

        ``parent`` is the block before it (None: it is the first, or of a class with a window). It may itself be told
        only after this one, since a sequence is told from its end to its start. All blocks that one request lets go of
        have the same ``now_s``.
        """
        ...

    def touched(self, key: BlockKey, now_s: float) -> None:
        """One more request used the block and has let go of it."""
        ...

    def removed(self, key: BlockKey) -> None:
        """The block left the cache."""
        ...

    def importance(self, keys: Sequence[BlockKey], values: Sequence[float]) -> None:
        """Attention gave these blocks this much weight (1.0 is uniform)."""
        ...

    def victims(self, count: int, evictable: Callable[[BlockKey], bool], now_s: float) -> Sequence[BlockKey]:
        """Return ``count`` distinct blocks to drop (fewer only where there are fewer), least worthy first; each must be
        ``evictable`` once the ones before it in the list are gone (a leaf goes before its root). What is named beyond
        ``count`` is not looked at.

        ``evictable(key)`` says whether nobody holds the block and no cached block follows it other than those it has
        said yes to during this call: ask in the order in which the blocks would go, and name those it says yes to.
        """
        ...


@runtime_checkable
class Eviction(Protocol):
    """Settings of an eviction policy."""

    @property
    def name(self) -> str:
        """The name under which it is reported."""
        ...

    def start(self, capacity_blocks: int, ghost_blocks: int, seed: int) -> EvictionState:
        """Return fresh state for a cache of ``capacity_blocks`` that may remember ``ghost_blocks`` that left."""
        ...


# ---------------------------------------------------------------- padding


@runtime_checkable
class Padding(Protocol):
    """A padding policy: which shapes a step may run at, and what it claims about them."""

    @property
    def name(self) -> str:
        """The name under which it is reported."""
        ...

    def shape(self, tokens: int, rows: int, blocks: int) -> Shape:
        """Return a shape at least as large as the given one in every direction; the same for the same three sizes.

        A direction that is more than twice its size plus 4,096 is not taken.
        """
        ...

    def waste_tokens(self, tokens: int) -> int:
        """Return the most tokens that padding ever adds to a step of ``tokens`` tokens."""
        ...

    def shapes(self, tokens: int, rows: int, blocks: int) -> int:
        """Return the most different shapes that steps of up to so many tokens, rows and blocks can get.

        Each is at least 1, and a step never has more rows than tokens.
        """
        ...


# ---------------------------------------------------------------- precision


@frozen
class ModuleView:
    """A module with weights as a precision map sees it.

    ``name``: dotted, such as ``"layers.3.mlp.down_proj"``. ``kind``: "attention", "ffn", "embedding", "norm" or "head".
    ``shape``: of its weight, (outputs, inputs), or (size,) of a norm or a bias.
    """

    name: str
    kind: str
    shape: tuple[int, ...]


@frozen
class PrecisionRules:
    """What a precision policy answers: names of precisions (see :mod:`kimicore.policies.precision`) for modules.

    ``exact``: by module name. ``patterns``: by shell pattern (``*`` also matches dots), the first that matches counts.
    ``default``: for the rest; None makes a module that nothing matches an error.
    """

    exact: Mapping[str, str]
    patterns: tuple[tuple[str, str], ...]
    default: str | None


@runtime_checkable
class Precision(Protocol):
    """Settings of a precision policy."""

    @property
    def name(self) -> str:
        """The name under which it is reported."""
        ...

    def rules(self, modules: Sequence[ModuleView]) -> PrecisionRules:
        """Return the rules for a model of these modules; the same modules give the same rules."""
        ...


# ---------------------------------------------------------------- device and text


class Runner(Protocol):
    """The device's side of a step."""

    def run(self, step: BoundStep) -> StepResult:
        """Compute the step. One row's failure is in its result; an exception means that the step failed."""
        ...

    def close(self) -> None:
        """Give back what the device holds; may be called twice."""
        ...


class Carrier(Protocol):
    """Carries blocks between tiers; nothing here waits but ``close``."""

    notify: Callable[[], None]
    """Called from a thread of the carrier's after each transfer."""

    @property
    def over(self) -> bool:
        """Whether :meth:`poll` has something to tell."""
        ...

    def start(self) -> None:
        """Begin to work."""
        ...

    def submit_nowait(self, transfer: Transfer) -> None:
        """Have blocks moved; each is told once by :meth:`poll`, whatever came of it."""
        ...

    def copy(self, moves: Sequence[BlockMove]) -> Sequence[int]:
        """Copy blocks from the device to the host before anything else is done to the device; return the bytes of each,
        0 where it failed. Where copies are ordered with the device's work this does not wait for them.
        """
        ...

    def discard_nowait(self, keys: Sequence[BlockKey]) -> None:
        """Have the disk forget records, after all that it was given to write before."""
        ...

    def poll(self) -> Sequence[Transferred]:
        """Return the transfers that ended since the last call."""
        ...

    def faults(self) -> tuple[int, int]:
        """Return how many records proved damaged, and how many reads and writes the system refused."""
        ...

    def close(self, wait_s: float) -> None:
        """End the work in hand, waiting at most so many seconds."""
        ...


class Judge(Protocol):
    """Reads a request's tokens as they come and says when the text itself ends it (a stop string)."""

    def accept(self, token_id: int) -> str | None:
        """Take the next token; return the stop string that ends the text, or None.

        It gets every generated token once and in order, except one that ends the request by its id. ``min_tokens`` is
        the judge's to keep as far as stop strings go: the book ignores a match that comes before.
        """
        ...
