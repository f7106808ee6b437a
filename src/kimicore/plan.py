"""What the next step computes: a pure function of a view, a policy's ranking and the measured cost of steps."""

from __future__ import annotations

from collections.abc import Sequence

from kimicore.admission import limits_of
from kimicore.asking import padded, ranked
from kimicore.config import EngineConfig
from kimicore.contracts import (
    Batching,
    BatchingState,
    Padding,
    Ranking,
    RowView,
    StepCost,
    StepLimits,
    StepView,
)
from kimicore.guard import PolicyFaults
from kimicore.plugins import faults_of, resolve, started
from kimicore.policies.batching.pace import FLOOR_TOKENS, STRETCH
from kimicore.room import Room
from kimicore.types import LogitsAt, RowPlan, Shape, StepPlan

__all__ = ["Planner", "plan"]

SCORED_TOKENS = 256  # positions of a step whose logits are all wanted: a row of the vocabulary each
LOOK_AHEAD = 16  # waiting prompts that are considered beyond those that fill the budget


class Planner:
    """The engine's planner: running policies and their faults around :func:`plan`.

    ``batching``, ``padding``: policies' settings (see :func:`kimicore.plugins.resolve`). ``limits``: the budgets.
    """

    def __init__(
        self,
        batching: Batching,
        padding: Padding,
        limits: StepLimits,
        *,
        batching_faults: PolicyFaults | None = None,
        padding_faults: PolicyFaults | None = None,
    ) -> None:
        self.batching = batching
        self.padding = padding
        self.batching_faults = batching_faults or PolicyFaults("batching", batching.name)
        self.padding_faults = padding_faults or PolicyFaults("padding", padding.name)
        self._state = started("batching", batching, limits)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Planner:
        """Return the planner that the settings name; raises :class:`~kimicore.PluginError`."""
        return cls(
            resolve("batching", config.batching, config.policy.get("batching")),
            resolve("padding", config.padding, config.policy.get("padding")),
            limits_of(config),
            batching_faults=faults_of("batching", config.batching, config),
            padding_faults=faults_of("padding", config.padding, config),
        )

    @property
    def faults(self) -> tuple[PolicyFaults, ...]:
        """Promises that the two policies broke."""
        return self.batching_faults, self.padding_faults

    def plan(self, view: StepView, cost: StepCost) -> StepPlan:
        """Return the step that ``view`` calls for; see :func:`plan`."""
        faults, other = self.batching_faults, self.padding_faults
        return plan(view, self._state, self.padding, cost, batching_faults=faults, padding_faults=other)


def plan(
    view: StepView,
    batching: BatchingState,
    padding: Padding,
    cost: StepCost,
    *,
    batching_faults: PolicyFaults | None = None,
    padding_faults: PolicyFaults | None = None,
) -> StepPlan:
    """Return the step that ``view`` calls for; the same arguments give the same plan.

    There is one budget of ``max_batch_tokens``. Rows that generate come first with one token each, then chunks of
    prompts in the policy's order. While streamed rows generate (somebody sees their pauses), chunks are as large as
    keeps 95 of 100 such steps under ``target_step_s`` (or under 1.9 times what a step takes without them),
    and at least 11 tokens together. Where they cannot all be served whole, half of the chunk tokens go by rank and the
    other half to prompts with less than half of what the first has left, shortest first, so that a short prompt does
    not wait for a long one. A request is admitted when its known tokens and a small margin fit without anybody giving
    way, in the order of rank and never past one that does not fit.

    A running request gives way to a higher-ranked running one that is out of blocks, and to a waiting one that ranks
    before it and is strictly more urgent; never otherwise. A policy that raises or answers nonsense is replaced for
    this step (by first come first served; by no padding) and the fault is noted.
    """
    if not view.running and not view.waiting:
        return StepPlan((), Shape(0, 0, 0))
    ranking = ranked(view, batching, cost, batching_faults or PolicyFaults("batching", "unnamed"))
    draft = _Draft(view, ranking, cost)
    draft.decode()
    draft.prefill()
    return draft.finish(padding, padding_faults or PolicyFaults("padding", padding.name))


class _Draft:
    """A plan in the making."""

    def __init__(self, view: StepView, ranking: Ranking, cost: StepCost) -> None:
        self.view = view
        self.limits = view.limits
        self.ranking = ranking
        self.cost = cost
        running = {row.request: row for row in view.running}
        waiting = {row.request: row for row in view.waiting}
        if view.solo is not None and (view.solo in running or view.solo in waiting):
            waiting = {number: row for number, row in waiting.items() if number == view.solo}
        self.waiting = waiting
        self.running = running  # without those that give way
        self.order = ranking.order
        self.ranked = [running[number] for number in ranking.order if number in running]
        self.room = Room(view.memory, view.limits.max_batch_tokens)
        self.preempt: list[int] = []
        self.counts: dict[int, int] = {}
        self.unsure: set[int] = set()  # prompts whose blocks are not all there
        self.tokens = 0
        self.place: dict[int, int] = {}  # in the order, once somebody's urgency asks for it

    # ------------------------------------------------------------ rows that generate

    def decode(self) -> None:
        """Plan one token for every row that lacks just one."""
        room, counts = self.room, self.counts
        size = room.size
        for row in self.ranked:
            number = row.request
            if row.known_tokens - row.computed_tokens != 1 or number not in self.running:
                continue
            if self.tokens >= self.limits.max_batch_tokens:
                break
            if row.computed_tokens % size == 0:
                needs = room.growth(row, row.computed_tokens, row.known_tokens)
                served = room.take(row, needs) or self._make_way(row, needs)
                if not served and number != self.ranked[0].request:
                    continue  # it keeps its blocks and waits for those of the others
            counts[number] = 1
            self.tokens += 1

    def _make_way(self, row: RowView, needs: Sequence[int]) -> bool:
        """Let the lowest-ranked rows give way until ``needs`` fit; nobody does where that would not be enough."""
        below = self.ranked[self.ranked.index(row) + 1 :]
        return self._preempt_from(row, [one for one in below if one.request in self.running], needs, 0)

    def _preempt_from(self, row: RowView, rows: Sequence[RowView], needs: Sequence[int], margin: int) -> bool:
        held = self.view.held_blocks
        if held is None:
            return False
        room = self.room
        before, slabs = list(room.spare), room.slabs
        gone: list[RowView] = []
        for other in reversed(rows):
            gone.append(other)
            room.give(held[other.request])
            if room.take(row, needs, margin):
                for one in gone:
                    self._drop(one)
                return True
        room.spare, room.slabs = before, slabs
        return False

    def _drop(self, row: RowView) -> None:
        del self.running[row.request]
        self.preempt.append(row.request)
        self.tokens -= self.counts.pop(row.request, 0)

    # ------------------------------------------------------------ prompts

    def prefill(self) -> None:
        """Plan chunks of prompts: of running rows, and of waiting ones that can be admitted."""
        candidates = self._candidates()
        if not candidates:
            return
        budget = self._budget(candidates)
        for row, count in zip(candidates, self._shares(candidates, budget), strict=True):
            if row.request not in self.running and row.request not in self.waiting:
                continue
            if row.request in self.unsure:
                fitted = self._fitted(row, count)
                if not fitted and (not self.running or row.request == self.ranked[0].request):
                    fitted = 1  # nobody is left to give way: binding the step makes room, or begins anew
                count = min(count, fitted)
            if count > 0:
                self.counts[row.request] = count
                self.tokens += count

    def _candidates(self) -> list[RowView]:
        """Return the rows that could take prompt tokens, by rank."""
        for row in self.ranked:
            prompt = row.known_tokens - row.computed_tokens > 1 and row.request in self.running
            if prompt and not self.room.take(row, self.room.growth(row, row.computed_tokens, row.known_tokens)):
                self.unsure.add(row.request)
        found: list[RowView] = []
        budget = self.limits.max_batch_tokens - self.tokens
        open_ = bool(self.waiting) and not self.unsure and not self._held_back()
        held = self.ranking.held if self.running and self.view.solo is None else frozenset()
        left, looked = budget, 0
        for number in self.order:
            own = self.running.get(number)
            if own is not None:
                if own.known_tokens - own.computed_tokens > 1:
                    found.append(own)
                    left -= own.known_tokens - own.computed_tokens
                continue
            if not open_ or number not in self.waiting:
                continue
            row = self.waiting[number]
            if left <= 0:
                looked += 1
            if number in held and self.view.now_s - row.arrived_s < self.limits.max_wait_s:
                continue
            if looked > LOOK_AHEAD or budget <= 0 or not self._admissible(row, found):
                open_ = False
                continue
            found.append(row)
            left -= row.known_tokens - row.computed_tokens
            open_ = not self.unsure
        return found

    def _held_back(self) -> bool:
        """Whether new prompts wait for company: fewer wait than a batch wants, and the oldest not for long."""
        if not self.running or self.view.solo is not None:
            return False
        limits = self.limits
        wanted = min(limits.min_batch_size, limits.max_batch_size - len(self.running))
        if len(self.waiting) >= wanted:
            return False
        if self.view.now_s - min(row.arrived_s for row in self.waiting.values()) >= limits.max_wait_s:
            return False
        urgency = self.ranking.urgency
        if not urgency:
            return True
        most = max(urgency.get(number, 0.0) for number in self.running)
        return all(urgency.get(number, 0.0) <= most for number in self.waiting)

    def _admissible(self, row: RowView, found: Sequence[RowView]) -> bool:
        """Whether a waiting request gets a slot and blocks; less urgent, lower-ranked rows give way to it."""
        entering = sum([1 for one in found if one.request in self.waiting])
        company = len(self.running) + entering
        slots = company < self.limits.max_batch_size
        margin = company + 1 if company and self.view.solo is None else 0  # the next block of each, its own too
        alone = not company and self.view.memory is not None
        needs = self.room.whole(row, row.known_tokens)
        if slots and self.room.take(row, needs, margin):
            return True
        if alone:  # its chunk shrinks to what the windows leave
            self.unsure.add(row.request)
            return True
        urgency = self.ranking.urgency
        own = urgency.get(row.request, 0.0)
        if urgency and not self.place:
            self.place = {number: at for at, number in enumerate(self.order)}
        place = self.place
        below = [
            one
            for one in self.ranked
            if one.request in self.running
            and urgency.get(one.request, 0.0) < own
            and place[one.request] > place[row.request]
        ]
        if not below:
            return False
        if slots:
            return self._preempt_from(row, below, needs, margin)
        if self.room.take(row, needs, margin):
            self._drop(below[-1])
            return True
        return self._preempt_from(row, below, needs, margin)

    def _fitted(self, row: RowView, count: int) -> int:
        """Return the most tokens of ``count`` whose blocks are there, taking them; a running row may claim others'."""
        room, start = self.room, row.computed_tokens
        while count > 0:
            if row.request in self.running:
                needs = room.growth(row, start, start + count)
                if room.take(row, needs) or self._make_way(row, needs):
                    return count
            elif room.take(row, room.whole(row, start + count)):
                return count
            whole = (start + count - 1) // room.size * room.size - start  # up to the last edge of a block before
            count = whole if whole > 0 else count - 1
        return 0

    def _budget(self, candidates: Sequence[RowView]) -> int:
        """Return how many prompt tokens the step takes."""
        budget = self.limits.max_batch_tokens - self.tokens
        busy = [self.running[number] for number in self.counts]
        if not any(row.generated_tokens and row.streamed for row in busy) or budget <= FLOOR_TOKENS:
            return budget
        context = sum([row.known_tokens for row in busy])
        alone_s = self.cost.step_s(self.tokens, len(busy), context)
        allowed_s = max(self.limits.target_step_s, STRETCH * alone_s)
        start = candidates[0].computed_tokens
        wanted = sum([row.known_tokens - row.computed_tokens for row in candidates])
        low, high = FLOOR_TOKENS, max(FLOOR_TOKENS, min(budget, wanted))
        while low < high:
            middle = (low + high + 1) >> 1
            attended = middle * start + middle * middle // 2
            predicted_s = self.cost.step_s(self.tokens + middle, len(busy) + 1, context + start + middle, attended)
            if predicted_s <= allowed_s:
                low = middle
            else:
                high = middle - 1
        return low

    def _shares(self, candidates: Sequence[RowView], budget: int) -> list[int]:
        """Return each candidate's tokens: all, or half by rank and half to much shorter ones."""
        wishes = self.ranking.chunks
        needs = [row.known_tokens - row.computed_tokens for row in candidates]
        if wishes:
            needs = [
                min(need, max(1, int(wishes.get(row.request, need))))
                for row, need in zip(candidates, needs, strict=True)
            ]
        scored = SCORED_TOKENS
        for at, row in enumerate(candidates):
            if row.logits_at == "all":
                needs[at] = min(needs[at], scored)
                scored -= needs[at]
        if sum(needs) <= budget:
            return needs
        shares = [0] * len(needs)
        shares[0] = min(needs[0], budget - budget // 2)
        left = budget - shares[0]
        for at in sorted(range(1, len(needs)), key=lambda one: (needs[one], one)):
            if 2 * needs[at] > needs[0]:
                break
            shares[at] = min(needs[at], left)
            left -= shares[at]
        for at, need in enumerate(needs):
            more = min(need - shares[at], left)
            shares[at] += more
            left -= more
        return shares

    # ------------------------------------------------------------ the end

    def finish(self, padding: Padding, faults: PolicyFaults) -> StepPlan:
        """Return the plan."""
        rows = []
        longest = 0  # tokens of the longest block table
        running = self.running
        for number, count in self.counts.items():
            own = running.get(number)
            row = own or self.waiting[number]
            start = row.computed_tokens
            end = start + count
            at: LogitsAt = "none"
            if row.logits_at == "all":
                at = "all"
            elif end == row.known_tokens and row.limit_tokens > end:
                at = "last"
            rows.append(RowPlan(number, start, count, (), at))
            tokens = end if own is not None else row.known_tokens
            if tokens > longest:
                longest = tokens
        yields = tuple([row.request for row in reversed(self.ranked) if row.request in running])
        shape = padded(padding, self.tokens, len(rows), -(-longest // self.room.size), faults)
        return StepPlan(tuple(rows), shape, tuple(self.preempt), yields)
