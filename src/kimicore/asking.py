"""Asking policies about a step: what they answer is checked, and the built-in default stands in for a wrong answer."""

from __future__ import annotations

from math import isfinite

from kimicore.contracts import BatchingState, Padding, Ranking, StepCost, StepView
from kimicore.guard import RAISED, PolicyFaults
from kimicore.policies.batching.fcfs import in_order
from kimicore.types import Shape

__all__ = ["SPARE", "padded", "ranked"]

SPARE = 4096  # beyond twice its size, a direction of a step is never padded by more


def ranked(view: StepView, batching: BatchingState, cost: StepCost, faults: PolicyFaults) -> Ranking:
    """Return the policy's ranking, or first come first served where it breaks a promise."""
    if not faults.set_aside:
        faults.begin("rank()")
        try:
            ranking = batching.rank(view, cost)
        except RAISED as error:
            faults.end()
            faults.note("rank() answers without raising", error)
        else:
            if faults.end():
                try:
                    wrong = _fault_of(view, ranking)
                except RAISED as error:
                    faults.note("rank() answers with a Ranking", error)
                else:
                    if not wrong:
                        return ranking
                    faults.note(wrong)
    return Ranking(in_order(view), {}, {})


def _fault_of(view: StepView, ranking: Ranking) -> str:
    """Return which promise a ranking breaks, or nothing; raises where it is no ranking at all."""
    order = ranking.order
    here = {row.request for row in view.running}
    here.update([row.request for row in view.waiting])
    if len(order) != len(here) or here != set(order):
        return "rank() names every request of the view once and no other"
    if ranking.urgency and not all(map(isfinite, ranking.urgency.values())):
        return "urgencies are finite numbers"
    if ranking.chunks and not all(one >= 1 for one in ranking.chunks.values()):
        return "wishes for chunks are at least 1 token"
    if not isinstance(ranking.held, frozenset):
        return "held is a frozenset of requests"
    return ""


def padded(padding: Padding, tokens: int, rows: int, blocks: int, faults: PolicyFaults) -> Shape:
    """Return the policy's shape, or the size itself where it breaks a promise."""
    if not faults.set_aside:
        faults.begin("shape()")
        try:
            shape = padding.shape(tokens, rows, blocks)
            in_time = faults.end()
            given = (shape.tokens, shape.rows, shape.blocks)
            if not all(isinstance(one, int) for one in given):
                faults.note(f"shape() answers in integers: {shape}")
            elif any(one < size for one, size in zip(given, (tokens, rows, blocks), strict=True)):
                faults.note(f"shape() covers what it is given: ({tokens}, {rows}, {blocks}) does not fit into {shape}")
            elif any(one > 2 * size + SPARE for one, size in zip(given, (tokens, rows, blocks), strict=True)):
                faults.note(f"shape() stays near what it is given: ({tokens}, {rows}, {blocks}) became {shape}")
            elif in_time:
                return shape
        except RAISED as error:
            faults.end()
            faults.note("shape() answers without raising", error)
    return Shape(tokens, rows, blocks)
