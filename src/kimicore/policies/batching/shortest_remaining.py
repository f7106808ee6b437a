"""Least remaining work first, with aging so that nobody waits for ever."""

from __future__ import annotations

import math
from collections import OrderedDict

from attrs import frozen

from kimicore.checks import float_field
from kimicore.contracts import Ranking, RowView, StepCost, StepLimits, StepView
from kimicore.errors import ConfigError

__all__ = ["ShortestRemaining"]

TENANTS = 1024  # whose outputs are remembered
LEVELS = 1024.0  # over any level of work, so that urgencies are positive


@frozen
class ShortestRemaining:
    """Least remaining work first: prompt tokens to compute, and ``output_weight`` times the output expected to come.

    The output expected of a request is what its tenant's requests gave (a mean that ``decay`` fades with each request;
    all tenants' mean for a new tenant), never more than its own limit leaves, nor less than a quarter of what it has
    given already. Every second of waiting counts as ``aging_tokens_per_s`` tokens less to do.

    The bound: a request with ``W`` tokens to go is overtaken only by requests that arrive within
    ``W / aging_tokens_per_s`` seconds after it; from then on it stands before all newcomers.

    ``preempt_ratio``: None, and nobody runs at the cost of another. A number over 1: a waiting request may take the
    place of a running one that stands behind it and has more than about that many times its work to go, what would
    have to be computed again taken off.

    Shortest remaining processing time minimizes the mean time in the system where sizes are known (L. Schrage, "A proof
    of the optimality of the shortest remaining processing time discipline", Operations Research 16, 1968).
    Raises :class:`~kimicore.ConfigError`.
    """

    aging_tokens_per_s: float = float_field(100.0, 0.0, 1e9, fault=ConfigError, above=True)
    output_weight: float = float_field(1.0, 0.0, 1e6, fault=ConfigError)
    decay: float = float_field(0.95, 0.0, 0.9999, fault=ConfigError)
    preempt_ratio: float | None = float_field(None, 1.0, 1e6, fault=ConfigError, above=True, optional=True)
    name: str = "shortest-remaining"

    def start(self, limits: StepLimits) -> ShortestRemainingState:
        """Return fresh state."""
        return ShortestRemainingState(self)


class _Outputs:
    """How many tokens requests gave: decayed means, of all and of the tenants seen last."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._all: float | None = None
        self._tenants: OrderedDict[str, float] = OrderedDict()

    def ended(self, tenant: str, tokens: int) -> None:
        """Learn from a request that has ended."""
        decay = self._decay
        overall = float(tokens) if self._all is None else self._all
        self._all = decay * overall + (1.0 - decay) * tokens
        self._tenants[tenant] = decay * self._tenants.get(tenant, overall) + (1.0 - decay) * tokens
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)

    def left(self, row: RowView) -> float:
        """Return how many tokens a request is expected to give yet."""
        left = float(row.limit_tokens - row.known_tokens)
        mean = self._tenants.get(row.tenant, self._all)
        if mean is None:
            return left
        given = row.generated_tokens
        return min(left, max(mean - given, 0.25 * given, 1.0))


class ShortestRemainingState:
    """Remembers outputs and the last order, which holds for as long as nobody comes or goes and no prompt advances.

    What a request has to do is looked at anew where its row has changed.
    """

    def __init__(self, policy: ShortestRemaining) -> None:
        self._policy = policy
        self._outputs = _Outputs(policy.decay)
        self._before: tuple[RowView, ...] = ()
        self._waiting: tuple[RowView, ...] | None = None
        self._running: list[int | tuple[int, int]] = []
        self._works: dict[int, tuple[RowView, float, float]] = {}  # of waiting requests: row, work, key
        self._answer = Ranking((), {}, {})

    def rank(self, view: StepView, cost: StepCost) -> Ranking:
        """Return the requests by what they have to do yet, less what they have waited."""
        running: list[int | tuple[int, int]] = [
            row.request if row.known_tokens - row.computed_tokens == 1 else (row.request, row.computed_tokens)
            for row in view.running
        ]
        if view.waiting is not self._waiting or running != self._running:
            self._learn(view)
            self._answer = self._rank(view)
            self._waiting, self._running = view.waiting, running
        self._before = view.running
        return self._answer

    def _learn(self, view: StepView) -> None:
        """Take in the outputs of those that ran and are gone."""
        here = {row.request for row in view.running}
        gone = [row for row in self._before if row.request not in here]
        if gone:
            back = {row.request for row in view.waiting if row.preemptions}
            for row in gone:
                if row.request not in back:
                    self._outputs.ended(row.tenant, row.generated_tokens + 1)  # the token that ended it was not seen

    def _work(self, row: RowView) -> float:
        return row.known_tokens - row.computed_tokens + self._policy.output_weight * self._outputs.left(row)

    def _rank(self, view: StepView) -> Ranking:
        per_s = self._policy.aging_tokens_per_s
        if view.waiting is not self._waiting:
            old, self._works = self._works, {}
            for row in view.waiting:
                found = old.get(row.request)
                if found is None or found[0] is not row:
                    work = self._work(row)
                    found = (row, work, row.arrived_s * per_s + work)
                self._works[row.request] = found
        works = {row.request: self._work(row) for row in view.running}
        keys = {number: found[2] for number, found in self._works.items()}
        keys.update({row.request: row.arrived_s * per_s + works[row.request] for row in view.running})
        oldest_first = sorted(view.running, key=_arrival) + list(view.waiting)  # equal keys: as they came
        order = sorted([row.request for row in oldest_first], key=keys.__getitem__)
        return Ranking(tuple(order), self._urgency(view, works), {})

    def _urgency(self, view: StepView, works: dict[int, float]) -> dict[int, float]:
        """Return by how many factors of the ratio each has less to do; flat where nobody may preempt."""
        ratio = self._policy.preempt_ratio
        if ratio is None or not view.running or not view.waiting:
            return {}
        base = math.log(ratio)
        left = {number: found[1] for number, found in self._works.items()}
        left.update({row.request: works[row.request] - row.computed_tokens for row in view.running})
        return {number: max(0.0, LEVELS - math.log(max(work, 1.0)) // base) for number, work in left.items()}


def _arrival(row: RowView) -> tuple[float, int]:
    return row.arrived_s, row.request
