"""Tiers with bounds on the first token: interactive, standard and background requests."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence, Set
from itertools import islice

from attrs import frozen

from kimicore.checks import boolean_field, float_field, int_field
from kimicore.contracts import Ranking, RowView, StepCost, StepLimits, StepView
from kimicore.errors import ConfigError
from kimicore.policies.batching.pace import Pace
from kimicore.types import TIERS

__all__ = ["Tiered"]

LOOK_AHEAD = 64  # prompts of a tier whose bound is looked at


@frozen
class Tiered:
    """Interactive requests first, then standard, then background ones, each tier in the order of arrival.

    ``interactive_s`` and ``standard_s``: the first token is due so many seconds after arrival. A request is *urgent*
    from ``urgent_within_s`` seconds before the last moment at which its prompt can still be read in time. Urgent
    standard requests go before interactive ones that are not urgent yet.

    Standard requests *merge*: while fewer than ``merge_count`` of them wait and a standard request has on average
    (decayed by ``merge_decay`` per request) less than ``merge_below_tokens`` tokens to go, they are held for up to
    ``scan_window_s`` seconds, so that short ones start together.

    Nobody starves: while a standard request has waited for ``standard_s`` seconds, or a background one for
    ``background_wait_s``, its tier gathers credit: ``standard_share`` or ``background_share`` of the prompt tokens of
    other tiers that are let in. Once the credit covers the prompt of the tier's oldest request, that one goes before
    all others until its prompt is read. The bound: from then on when a request has waited so long and is its
    tier's oldest, fewer than ``prompt_tokens / share`` prompt tokens of other tiers are let in before it goes first,
    beside those of one step.

    ``preempt``: interactive, urgent and promoted requests may take the place of running background ones, each at most
    ``most_preemptions`` times; after as many preemptions a running request goes before all others.
    ``other_share``: where an interactive and another prompt are read at the same time, no interactive prompt takes
    more than the rest of a step's chunk tokens, and no other prompt more than half of them.

    Raises :class:`~kimicore.ConfigError`.
    """

    interactive_s: float = float_field(1.0, 0.0, 3600.0, fault=ConfigError, above=True)
    standard_s: float = float_field(3.0, 0.0, 3600.0, fault=ConfigError, above=True)
    urgent_within_s: float = float_field(0.015, 0.0, 3600.0, fault=ConfigError)
    merge_count: int = int_field(3, 1, 65536, fault=ConfigError)
    merge_below_tokens: float = float_field(500.0, 0.0, 1e9, fault=ConfigError)
    merge_decay: float = float_field(0.95, 0.0, 0.9999, fault=ConfigError)
    scan_window_s: float = float_field(0.05, 0.0, 3600.0, fault=ConfigError)
    standard_share: float = float_field(0.2, 0.0, 1.0, fault=ConfigError, above=True)
    background_share: float = float_field(0.05, 0.0, 1.0, fault=ConfigError, above=True)
    background_wait_s: float = float_field(10.0, 0.0, 86400.0, fault=ConfigError)
    preempt: bool = boolean_field(True, fault=ConfigError)
    most_preemptions: int = int_field(2, 0, 1000, fault=ConfigError)
    other_share: float = float_field(0.25, 0.0, 0.5, fault=ConfigError)
    name: str = "tiered"

    def __attrs_post_init__(self) -> None:
        if self.standard_s < self.interactive_s:
            raise ConfigError(
                f"standard_s={self.standard_s}: must be at least interactive_s={self.interactive_s}, "
                "since interactive requests are the more urgent ones"
            )

    def start(self, limits: StepLimits) -> TieredState:
        """Return fresh state."""
        return TieredState(self)


def _arrival(row: RowView) -> tuple[float, int]:
    return row.arrived_s, row.request


def _need(row: RowView) -> int:
    return row.known_tokens - row.computed_tokens


def _reads(row: RowView) -> bool:
    """Whether the row has more to compute than its next token."""
    return row.state == "waiting" or row.known_tokens - row.computed_tokens > 1


class _Credits:
    """What the lower tiers have earned by waiting, and who goes before all because of it."""

    def __init__(self, policy: Tiered) -> None:
        self._shares = {"standard": policy.standard_share, "background": policy.background_share}
        self._passed_tokens = {"standard": 0.0, "background": 0.0}  # of others' prompts, while one has waited for long
        self._aged: set[str] = set()  # tiers with such a one
        self.promoted: set[int] = set()

    def let_in(self, row: RowView) -> None:
        """Count a request that stopped waiting."""
        for tier in self._aged:
            if tier != row.tier:
                self._passed_tokens[tier] += _need(row)

    def spend(self, tier: str, aged: Iterable[RowView]) -> None:
        """Promote those of a tier that have waited for long, oldest first, as far as the credit goes."""
        for oldest in aged:
            if oldest.request in self.promoted:
                continue
            self._aged.add(tier)
            price_tokens = _need(oldest) / self._shares[tier]
            if self._passed_tokens[tier] < price_tokens:
                return
            self._passed_tokens[tier] -= price_tokens
            self.promoted.add(oldest.request)
        self._aged.discard(tier)  # nobody is left to earn for
        self._passed_tokens[tier] = 0.0


class TieredState:
    """Remembers who waited, the credit of the lower tiers and the last answer, which holds until something changes."""

    def __init__(self, policy: Tiered) -> None:
        self._policy = policy
        self._due_s = {"interactive": policy.interactive_s, "standard": policy.standard_s}
        self._patience_s = {"standard": policy.standard_s, "background": policy.background_wait_s}
        self._credits = _Credits(policy)
        self._mean_tokens: float | None = None  # tokens that a standard request has to go when it comes
        self._newest = -1
        self._waiting: tuple[RowView, ...] = ()
        self._queues: dict[str, list[RowView]] = {tier: [] for tier in TIERS}
        self._running: list[int | tuple[int, int]] | None = None
        self._pace = Pace(1, 0.0)
        self._until_s = -math.inf
        self._answer = Ranking((), {}, {})

    def rank(self, view: StepView, cost: StepCost) -> Ranking:
        """Return the requests by class, their urgency, wishes for chunks, and the standard ones that are held."""
        running: list[int | tuple[int, int]] = [
            row.request if row.known_tokens - row.computed_tokens == 1 else (row.request, row.computed_tokens)
            for row in view.running
        ]
        changed = view.waiting is not self._waiting or running != self._running
        if changed:
            self._note(view)
            self._running = running
            self._pace = Pace.of(view, cost)
        if changed or view.now_s >= self._until_s:
            self._answer = self._rank(view)
        return self._answer

    def _note(self, view: StepView) -> None:
        """Learn from who came and who was let in since the last view."""
        if view.waiting is self._waiting:
            return
        here = {row.request for row in view.waiting}
        for row in self._waiting:
            if row.request not in here:
                self._credits.let_in(row)
        queues: dict[str, list[RowView]] = {tier: [] for tier in TIERS}
        for row in sorted(view.waiting, key=_arrival):
            queues[row.tier].append(row)
        self._queues = queues
        decay = self._policy.merge_decay
        for row in self._queues["standard"]:
            if row.request > self._newest:
                tokens = row.limit_tokens - row.computed_tokens
                mean = self._mean_tokens
                self._mean_tokens = tokens if mean is None else decay * mean + (1.0 - decay) * tokens
        self._newest = max(self._newest, *here) if here else self._newest
        self._waiting = view.waiting

    def _rank(self, view: StepView) -> Ranking:
        """Return the answer to a view, and note until when it holds as long as nothing but time changes."""
        self._until_s = math.inf
        by_tier: dict[str, list[RowView]] = {tier: [] for tier in TIERS}
        for row in sorted(view.running, key=_arrival):
            by_tier[row.tier].append(row)
        if self._credits.promoted:
            self._credits.promoted &= {row.request for row in (*view.running, *view.waiting) if _reads(row)}
        classes: list[list[RowView]] = []
        for tier in TIERS:
            running, queue = by_tier[tier], self._queues[tier]
            rows = running + queue
            if running and queue and _arrival(queue[0]) < _arrival(running[-1]):
                rows.sort(key=_arrival)
            self._age(tier, rows, view.now_s)
            classes += self._urgent(tier, rows, view.now_s)
        most = max(1, self._policy.most_preemptions)
        first = self._credits.promoted | {row.request for row in view.running if row.preemptions >= most}
        return self._answered(view, classes, first)

    def _age(self, tier: str, rows: Sequence[RowView], now_s: float) -> None:
        """Let those of a tier that have waited for long, and whose prompts are not read, spend their tier's credit."""
        if tier == "interactive":
            return
        patience_s = self._patience_s[tier]
        young = bisect_right(rows, now_s, key=lambda row: row.arrived_s + patience_s)
        self._credits.spend(tier, (row for row in islice(rows, young) if _reads(row)))
        if young < len(rows):
            self._until_s = min(self._until_s, rows[young].arrived_s + patience_s)

    def _urgent(self, tier: str, rows: list[RowView], now_s: float) -> list[list[RowView]]:
        """Return a tier's rows as (urgent, others); looked at are the first prompts of the tier."""
        if tier == "background":
            return [[], rows]
        queue, due_s = self._queues[tier], self._due_s[tier]
        token_s, until_s = self._pace.token_s, self._until_s
        if tier == "standard" and queue:
            if queue[0].arrived_s + due_s <= now_s:  # too late for the oldest: hurry would only turn the order around
                return [[], rows]
            until_s = min(until_s, queue[0].arrived_s + due_s)
        lead_s = due_s - self._policy.urgent_within_s
        urgent: list[RowView] = []
        calm: list[RowView] = []
        looked = 0
        for at, row in enumerate(rows):
            if _reads(row):
                if looked == LOOK_AHEAD:
                    calm += rows[at:]
                    break
                looked += 1
                urgent_s = row.arrived_s + lead_s - (row.known_tokens - row.computed_tokens) * token_s
                if urgent_s <= now_s:
                    urgent.append(row)
                    continue
                until_s = min(until_s, urgent_s)
            calm.append(row)
        self._until_s = until_s
        return [urgent, calm]

    def _answered(self, view: StepView, classes: list[list[RowView]], first: Set[int]) -> Ranking:
        pressing, interactive, soon, standard, _, background = classes
        groups = [pressing, soon, interactive, standard, background]
        if first:
            before = [row for group in groups for row in group if row.request in first]
            before.sort(key=_arrival)
            groups = [before, *([row for row in group if row.request not in first] for group in groups)]
        rows = [row for group in groups for row in group]
        order = tuple([row.request for row in rows])
        return Ranking(order, self._urgency(view, soon, first), self._chunks(rows), self._held(view, standard, first))

    def _urgency(self, view: StepView, soon: Sequence[RowView], first: Set[int]) -> dict[int, float]:
        """Return 1 for those that may take a background row's place, and for running rows that keep theirs."""
        policy = self._policy
        replaceable = any([row.tier == "background" and row.request not in first for row in view.running])
        if not replaceable or not policy.preempt or not policy.most_preemptions:
            return {}
        urgent = [row.request for row in view.running if row.tier != "background"]
        urgent += [row.request for row in (*self._queues["interactive"], *soon)]
        return dict.fromkeys([*urgent, *first], 1.0)

    def _held(self, view: StepView, standard: Sequence[RowView], first: Set[int]) -> frozenset[int]:
        """Return the standard requests that wait for company; none of them is urgent."""
        policy, mean = self._policy, self._mean_tokens
        queue = self._queues["standard"]
        if not queue or len(queue) >= policy.merge_count or mean is None or mean >= policy.merge_below_tokens:
            return frozenset()
        release_s = queue[0].arrived_s + policy.scan_window_s
        if release_s <= view.now_s:
            return frozenset()
        self._until_s = min(self._until_s, release_s)
        calm = {row.request for row in standard}
        return frozenset([row.request for row in queue if row.request in calm and row.request not in first])

    def _chunks(self, rows: Sequence[RowView]) -> dict[int, int]:
        """Return wishes for the first prompts, where interactive and other ones are read together."""
        share = self._policy.other_share
        if not share:
            return {}
        prompts: list[RowView] = []
        for row in rows:
            if row.known_tokens - row.computed_tokens > 1:
                prompts.append(row)
                if len(prompts) == LOOK_AHEAD:
                    break
        kinds = {row.tier == "interactive" for row in prompts}
        if len(kinds) < 2:
            return {}
        chunk = self._pace.chunk_tokens
        most = {True: max(1, int((1.0 - share) * chunk)), False: max(1, chunk // 2)}
        pairs = [(row, most[row.tier == "interactive"]) for row in prompts]
        return {row.request: own for row, own in pairs if _need(row) > own}
