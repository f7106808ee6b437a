"""Requests that come, run, wait again and go, and the views of them that a batching policy is asked about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from attrs import astuple, evolve, fields

from kimicore.contracts import MemoryView, Ranking, RowView, StepLimits, StepView
from kimicore.guard import RAISED
from kimicore.testing.names import Name
from kimicore.testing.promises import Judge

__all__ = ["FixedCost", "ViewDrive"]


class FixedCost:
    """A model of the step time that never learns."""

    def step_s(self, tokens: int, rows: int, context_tokens: int, attended_tokens: int = 0) -> float:
        """Return 1 ms, and a little for everything."""
        return 1e-3 + 1e-4 * tokens + 2e-5 * rows + 1e-7 * context_tokens + 1e-8 * attended_tokens


class ViewDrive:
    """One history of views.

    ``maker``: makes the settings. ``judge``: the promise that is looked at. ``salts``: one running state for each,
    which all see equal views with tenants whose names hash differently. As in the engine, ``waiting`` is the same
    object for as long as its rows are.
    """

    def __init__(self, maker: Callable[[], Any], judge: Judge, limits: StepLimits, salts: Sequence[int] = (0,)) -> None:
        self.judge = judge
        self.story = judge.story
        self.limits = limits
        self.now_s = 0.0
        self.rows: dict[int, RowView] = {}
        self._salts = tuple(salts)
        self._waiting: dict[int, tuple[RowView, ...]] = {}
        self._copies: dict[tuple[int, int], tuple[RowView, RowView]] = {}
        self._number = 0
        self._cost = FixedCost()
        self.story.tell(f"start({limits})")
        error: BaseException | None = None
        try:
            self._states = [maker().start(limits) for _ in self._salts]
        except RAISED as raised:
            error = raised
        if error is not None:
            self.story.end(f"making the settings or starting them raised {error!r}")

    # ------------------------------------------------------------ what happens to requests

    def arrive(self, prompt_tokens: int, output_tokens: int, cached_tokens: int, **more: Any) -> None:
        """A request comes; it came a moment ago where others of the same step came before it."""
        self._number += 1
        row = RowView(
            request=self._number,
            state="waiting",
            arrived_s=self.now_s,
            prompt_tokens=prompt_tokens,
            known_tokens=prompt_tokens,
            computed_tokens=min(cached_tokens, prompt_tokens - 1),
            limit_tokens=prompt_tokens + output_tokens,
            generated_tokens=0,
            preemptions=0,
            logits_at="last" if output_tokens else "none",
            shared_blocks=(cached_tokens // 32,),
            **more,
        )
        self.rows[row.request] = row

    def _some(self, state: str, pick: int) -> RowView | None:
        found = [row for row in self.rows.values() if row.state == state]
        return found[pick % len(found)] if found else None

    def admit(self, pick: int) -> None:
        """A waiting request starts to run, where there is a place."""
        row = self._some("waiting", pick)
        if row is not None and sum(one.state == "running" for one in self.rows.values()) < self.limits.max_batch_size:
            self.rows[row.request] = evolve(row, state="running", shared_blocks=())

    def advance(self, count: int) -> None:
        """A step is over: running requests have computed more and generated a token, or are done."""
        for row in [one for one in self.rows.values() if one.state == "running"]:
            computed = min(row.computed_tokens + count, row.known_tokens)
            row = evolve(row, computed_tokens=computed)
            if computed == row.known_tokens:
                row = evolve(row, known_tokens=computed + 1, generated_tokens=row.generated_tokens + 1)
            self.rows[row.request] = row
            if row.known_tokens >= row.limit_tokens:
                del self.rows[row.request]

    def preempt(self, pick: int) -> None:
        """A running request gives its blocks back and waits again."""
        row = self._some("running", pick)
        if row is not None:
            self.rows[row.request] = evolve(
                row, state="waiting", computed_tokens=0, preemptions=row.preemptions + 1, shared_blocks=(0,)
            )

    def leave(self, pick: int) -> None:
        """A request is cancelled."""
        if self.rows:
            del self.rows[list(self.rows)[pick % len(self.rows)]]

    # ------------------------------------------------------------ the policy

    def _view(self, salt: int) -> StepView:
        rows = [self._copy(row, salt) for row in self.rows.values()]
        waiting = tuple(
            sorted((one for one in rows if one.state == "waiting"), key=lambda one: (one.arrived_s, one.request))
        )
        before = self._waiting.get(salt)
        waiting = before if before == waiting else waiting
        self._waiting[salt] = waiting
        running = tuple([one for one in rows if one.state == "running"])
        held = {one.request: (-(-one.computed_tokens // 16),) for one in running}
        memory = MemoryView(16, (None,), (0,), (1,), 64)
        return StepView(self.now_s, running, waiting, self.limits, (64,), held, memory)

    def _copy(self, row: RowView, salt: int) -> RowView:
        """Return a row for the state of this salt: the same object for as long as it does not change."""
        original, copy = self._copies.get((row.request, salt), (None, row))
        if original is not row:
            copy = evolve(row, tenant=Name(row.tenant, salt))
            self._copies[row.request, salt] = row, copy
        return copy

    def rank(self) -> None:
        """Ask about the requests of this moment, and look at the answer."""
        if not self.rows:
            return  # the core asks about somebody
        answers: list[Ranking | None] = []
        for salt, state in zip(self._salts, self._states, strict=True):
            view = self._view(salt)
            before = _picture(view)
            if not answers:
                self.story.tell(partial(_shown, view))
            error: BaseException | None = None
            answer = None
            try:
                answer = state.rank(view, self._cost)
            except RAISED as raised:
                error = raised
            if error is not None:
                self.judge.broken("never-raises", f"rank() raised {error!r}")
            changed = _changed(before, _picture(view))
            if changed:
                self.judge.broken("unchanged", f"after rank() {changed}")
            answers.append(answer)
            if len(answers) == 1 and error is None:
                self._weigh(view, answer)
        first = _plain(answers[0])
        for other in answers[1:]:
            if _plain(other) != first:
                self.judge.broken(
                    "repeatable",
                    f"of two states that saw the same, one answered {first} and the other {_plain(other)} (for the "
                    "second, names hash differently, as in another process)",
                )

    def _weigh(self, view: StepView, answer: Any) -> None:
        waiting = {row.request for row in view.waiting}
        here = waiting | {row.request for row in view.running}
        for promise, look in (("complete", _order_fault), ("wishes", _wish_fault)):
            found = look(answer, here)
            if found:
                self.judge.broken(promise, found)
        held = getattr(answer, "held", None)
        if not isinstance(held, frozenset):
            self.judge.broken("held", f"held is {held!r}, not a frozenset")
        elif not held <= waiting:
            self.judge.broken("held", f"held names {sorted(held - waiting, key=repr)}, which do not wait")


def _arrival(row: RowView) -> tuple[float, int]:
    return row.arrived_s, row.request


def _order_fault(answer: Any, here: set[int]) -> str:
    order = getattr(answer, "order", None)
    if not isinstance(order, tuple):
        return (
            f"the order is {order!r}, not a tuple" if order is not None else f"the answer is {answer!r}, not a Ranking"
        )
    missing, strangers = here - set(order), [one for one in order if one not in here]
    if missing:
        return f"the order {order} lacks {sorted(missing)}"
    if strangers:
        return f"the order {order} names {strangers}, which are not in the view"
    if len(order) != len(here):
        return f"the order {order} names a request twice"
    return ""


def _wish_fault(answer: Any, here: set[int]) -> str:
    for name in ("urgency", "chunks"):
        wishes: Any = getattr(answer, name, None)
        if not hasattr(wishes, "items"):
            return f"{name} is {wishes!r}, not a mapping"
        for number, value in wishes.items():
            if number not in here:
                return f"{name} names request {number!r}, which is not in the view"
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
                return f"{name} of request {number} is {value!r}, not a finite number"
            if name == "chunks" and value < 1:
                return f"the chunk of request {number} is {value!r}; the least is 1 token"
    return ""


def _plain(answer: Any) -> Any:
    """Return a ranking as something that compares by what it says."""
    if isinstance(answer, Ranking):
        urgency = {number: repr(value) for number, value in answer.urgency.items()}  # so that nan equals nan
        return tuple(answer.order), urgency, dict(answer.chunks), set(answer.held)
    return answer


_ROW_FIELDS = tuple(one.name for one in fields(RowView))
_row_values = attrgetter(*_ROW_FIELDS)


def _picture(view: StepView) -> tuple[Any, ...]:
    """Return everything that a policy could change."""
    rows = [_row_values(row) for row in (*view.running, *view.waiting)]
    limits = view.limits
    return view.now_s, view.free_blocks, astuple(limits), dict(view.held_blocks or {}), len(view.running), rows


def _changed(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    """Return in words what differs between two pictures, or nothing."""
    if before == after:
        return ""
    for old, new in zip(before[-1], after[-1], strict=False):
        for name, one, other in zip(_ROW_FIELDS, old, new, strict=True):
            if one != other:
                return f"the {name} of request {old[0]} is {other!r}, and it was {one!r}"
    return f"the view is another one: {after[:-1]}, and it was {before[:-1]}"


def _shown(view: StepView) -> str:
    parts = []
    for name, rows in (("running", view.running), ("waiting", view.waiting)):
        if rows:
            parts.append(f"{name} " + "; ".join(_row(row) for row in rows))
    return f"rank() at {view.now_s:g} s: " + ", ".join(parts)


def _row(row: RowView) -> str:
    words = [f"{row.request} ({row.computed_tokens}/{row.known_tokens} of {row.limit_tokens} tokens"]
    words.append(f"since {row.arrived_s:g} s")
    if row.tenant:
        words.append(f"tenant {row.tenant}")
    if row.priority:
        words.append(f"priority {row.priority}")
    if row.tier != "standard":
        words.append(row.tier)
    return ", ".join(words) + ")"
