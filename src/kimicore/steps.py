"""What happens around a step: block numbers before it, tokens after it."""

from __future__ import annotations

from collections.abc import Iterable

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
    Shape,
    StepPlan,
    StepResult,
    TokenScores,
)

__all__ = ["Steps"]

SHAPES = 1 << 16  # different shapes of steps that are counted


class Steps:
    """Binds plans and commits results, one step at a time."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.bound: BoundStep | None = None
        self._shapes: set[Shape] = set()

    @property
    def shapes(self) -> int:
        """Different shapes of the steps so far, counted up to SHAPES."""
        return len(self._shapes)

    def count_shapes(self, shapes: Iterable[Shape]) -> None:
        """Note that steps of these shapes were run."""
        if len(self._shapes) < SHAPES:
            self._shapes.update(shapes)

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
        for row in plan.rows if roster.waiting else ():
            waiting = roster.waiting.get(row.request)
            if waiting is not None:  # hits are held first, so that no allocation of this step takes them
                roster.take_hit(waiting)
                admitted[waiting.number] = waiting
        rows: list[BoundRow] = []
        done: set[int] = set()
        size = roster.ledger.block_tokens
        for row in plan.rows:
            number = row.request
            request = roster.running.get(number) or admitted.get(number)
            if request is None or number in done:
                continue
            if row.drafts:  # no token beyond the limit is ever accepted
                row = evolve(row, drafts=row.drafts[: max(0, request.limit - len(request.known) - 1)])
            count, left = row.count, len(request.known) - request.computed
            if count > left:
                count = left
            if count <= 0:
                continue
            end = request.computed + count + len(row.drafts)
            if end <= len(request.table) * size or self._grow(request, count, row, plan, done):
                if number in admitted:
                    roster.admit(request, now_s)
                done.add(number)
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
        blocks = max([max(map(len, row.tables)) for row in rows], default=0)
        if blocks > shape.blocks:
            shape = evolve(shape, blocks=blocks)
        number, importance = roster.counts["steps"], roster.importance
        measured = () if importance is None else importance.measured(number, rows, roster.requests)
        step = BoundStep(number, tuple(rows), shape, measured)
        if rows:
            self.bound = step
            roster.counts["steps"] += 1
            used = sum([row.plan.count + len(row.plan.drafts) for row in rows])
            self.count_shapes((shape,))
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
        if result.importance is not None and roster.importance is not None:
            for row, found in zip(step.rows, result.importance, strict=True):
                if found is not None:
                    roster.importance.hear(roster.requests[row.plan.request], found)
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
        roster, plan = self._roster, row.plan
        count = 0
        reason: FinishReason | None = None
        stop: str | int | None = None
        if row.sample:
            before = len(request.known)
            if not given.tokens:
                roster.fail(request, RequestFailed("the step gave no token for this request"))
                return
            try:
                reason, stop = _accept(request, given.tokens[: 1 + len(plan.drafts)])
            except Exception as error:
                failure = RequestFailed(f"reading the tokens failed: {error!r}")
                failure.__cause__ = error
                roster.fail(request, failure)
                return
            count = len(request.known) - before
        computed = request.computed = plan.start + plan.count + (count - 1 if count > 1 else 0)
        if computed // roster.ledger.block_tokens != request.sealed:
            roster.seal(request)
        scores = _new_scores(request, row, given) if given.prompt_scores else None
        if count or scores:
            logprobs = None if given.logprobs is None else given.logprobs[:count]
            first = count > 0 and request.first_token_s is None
            if first:
                request.first_token_s = now_s
            roster.counts["completion_tokens"] += count
            roster.events.append(Tokens(request.number, given.tokens[:count], logprobs, scores, first))
        if roster.followers and request.number in roster.followers and computed >= request.prompt_tokens:
            roster.free_followers(request.number)
        if reason is None and computed >= request.limit:
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
        new.kv_precision,
        new.share,
    )


def _accept(request: Request, tokens: tuple[int, ...]) -> tuple[FinishReason | None, str | int | None]:
    """Take tokens one by one up to the first end: an end token, then a stop string, then the length."""
    new, known = request.new, request.known
    least, generated = new.params.min_tokens, request.generated
    for token in tokens:
        known.append(token)
        generated += 1
        request.generated = generated
        if token in new.end_ids and generated > least:
            return "stop", token
        stop = new.judge.accept(token)
        if stop is not None and generated >= least:
            return "stop", stop
        if len(known) >= request.limit:
            return "length", None
    if request.banned and generated >= least:
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
