"""What happens around a step: block numbers before it, tokens after it."""

from __future__ import annotations

from attrs import evolve

from kimicore.errors import RequestFailed
from kimicore.requests import Request, Tokens
from kimicore.roster import Roster
from kimicore.types import (
    BoundRow,
    BoundStep,
    FinishReason,
    LogitsAt,
    RowPlan,
    RowResult,
    StepPlan,
    StepResult,
    TokenScores,
)

__all__ = ["Steps"]


class Steps:
    """Binds plans and commits results, one step at a time."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.bound: BoundStep | None = None

    def bind(self, plan: StepPlan, now_s: float) -> BoundStep:
        """Carry out a plan's memory side; see :meth:`kimicore.book.Book.bind`."""
        if self.bound is not None:
            raise ValueError("the step before was not committed")
        roster = self._roster
        for number, reason in plan.refusals:
            if number in roster.requests:
                roster.fail(roster.requests[number], RequestFailed(reason))
        for number in plan.preempt:
            if number in roster.running:
                roster.preempt(roster.running[number])
        admitted: dict[int, Request] = {}
        for row in plan.rows:
            waiting = roster.waiting.get(row.request)
            if waiting is not None:  # hits are held first, so that no allocation of this step takes them
                roster.take_hit(waiting)
                admitted[waiting.number] = waiting
        rows: list[BoundRow] = []
        done: set[int] = set()
        for row in plan.rows:
            request = admitted.get(row.request) or roster.running.get(row.request)
            if request is None or request.number in done:
                continue
            room = max(0, request.limit - len(request.known) - 1)
            if len(row.drafts) > room:  # no token beyond the limit is ever accepted
                row = evolve(row, drafts=row.drafts[:room])
            count = min(row.count, len(request.known) - request.computed)
            if count > 0 and self._grow(request, count, row, plan, done):
                if request.number in admitted:
                    roster.admit(request, now_s)
                done.add(request.number)
                rows.append(_bound_row(request, row, count))
        for request in admitted.values():
            if request.state == "waiting":
                roster.decline(request)
        if not rows and len(admitted) == 1 and not roster.running:
            roster.start_compact(next(iter(admitted.values())))
        return self._begin(rows, plan)

    def _grow(self, request: Request, count: int, row: RowPlan, plan: StepPlan, done: set[int]) -> bool:
        roster = self._roster
        count += len(row.drafts)
        if roster.allocate(request, count):
            return True
        if request.state == "waiting":
            return False
        if roster.make_way(request, count, plan.yields, done):
            return True
        if not done and len(roster.running) == 1:
            roster.start_compact(request)
        return False

    def _begin(self, rows: list[BoundRow], plan: StepPlan) -> BoundStep:
        roster = self._roster
        shape = plan.shape
        blocks = max([len(row.tables[0]) for row in rows], default=0)
        if blocks > shape.blocks:
            shape = evolve(shape, blocks=blocks)
        step = BoundStep(roster.counts["steps"], tuple(rows), shape)
        if rows:
            self.bound = step
            roster.counts["steps"] += 1
            used = sum([row.plan.count + len(row.plan.drafts) for row in rows])
            roster.counts["padded_tokens"] += max(0, shape.tokens - used)
        return step

    def commit(self, step: BoundStep, result: StepResult, now_s: float) -> None:
        """Take in what a step gave; see :meth:`kimicore.book.Book.commit`."""
        if not step.rows and self.bound is None:
            return
        if step is not self.bound:
            raise ValueError("this step was not bound, or was committed before")
        if len(result.rows) != len(step.rows):
            raise ValueError(f"the step has {len(step.rows)} rows and its result {len(result.rows)}")
        self.bound = None
        roster = self._roster
        for row, given in zip(step.rows, result.rows, strict=True):
            request = roster.requests[row.plan.request]
            request.in_flight = False
            request.pending = 0
            request.row_view = None
            if request.cancelled:
                roster.leave(request)
            elif given.error is not None:
                roster.fail(request, given.error)
            else:
                self._advance(request, row, given, now_s)

    def _advance(self, request: Request, row: BoundRow, given: RowResult, now_s: float) -> None:
        roster = self._roster
        before = len(request.known)
        reason: FinishReason | None = None
        stop: str | int | None = None
        if row.sample:
            if not given.tokens:
                roster.fail(request, RequestFailed("the step gave no token for this request"))
                return
            try:
                reason, stop = _accept(request, given.tokens[: 1 + len(row.plan.drafts)])
            except Exception as error:
                failure = RequestFailed(f"reading the tokens failed: {error!r}")
                failure.__cause__ = error
                roster.fail(request, failure)
                return
        count = len(request.known) - before
        request.computed = row.plan.start + row.plan.count + max(0, count - 1)
        roster.seal(request)
        scores = _new_scores(request, row, given)
        if count or scores:
            logprobs = None if given.logprobs is None else given.logprobs[:count]
            first = count > 0 and request.first_token_s is None
            if first:
                request.first_token_s = now_s
            roster.counts["completion_tokens"] += count
            tokens = tuple(request.known[before:])
            roster.events.append(Tokens(request.number, tokens, logprobs, scores, first))
        if request.number in roster.followers and request.computed >= request.prompt_tokens:
            roster.free_followers(request.number)
        if reason is None and request.computed >= request.limit:
            reason = "length"  # nothing was to be generated, and the prompt is done
        if reason is not None:
            roster.finish(request, reason, stop, now_s)


def _bound_row(request: Request, row: RowPlan, count: int) -> BoundRow:
    start = request.computed
    end = start + count
    sample = end == len(request.known) and request.limit > end
    logits_at: LogitsAt = "last" if sample else "none"
    if request.scored < request.prompt_tokens - 1:
        logits_at = "all"
    elif row.drafts and sample:
        logits_at = row.logits_at
    if row.start != start or row.count != count or row.logits_at != logits_at:
        row = evolve(row, start=start, count=count, logits_at=logits_at)
    request.in_flight = True
    request.pending = 1 + len(row.drafts) if sample else 0
    new = request.new
    return BoundRow(
        row,
        request.known,
        request.prompt_tokens,
        tuple(request.tables),
        sample,
        new.params,
        new.seed,
        new.choice,
        request.banned,
        request.rope_tokens,
    )


def _accept(request: Request, tokens: tuple[int, ...]) -> tuple[FinishReason | None, str | int | None]:
    """Take tokens one by one up to the first end: an end token, then a stop string, then the length."""
    new, known = request.new, request.known
    least = new.params.min_tokens
    for token in tokens:
        known.append(token)
        request.generated += 1
        if token in new.end_ids and request.generated > least:
            return "stop", token
        stop = new.judge.accept(token)
        if stop is not None and request.generated >= least:
            return "stop", stop
        if len(known) >= request.limit:
            return "length", None
    if request.generated >= least:
        request.banned = ()
    return None, None


def _new_scores(request: Request, row: BoundRow, given: RowResult) -> tuple[TokenScores, ...] | None:
    """Return the scores of prompt positions that were not told before (after a preemption they come twice)."""
    if not given.prompt_scores:
        return None
    known_already = request.scored - row.plan.start
    scores = given.prompt_scores[max(0, known_already) :]
    request.scored += len(scores)
    return scores or None
