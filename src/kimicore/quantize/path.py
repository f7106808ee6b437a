"""The way up: from a map to 16 bits, a matrix and a precision at a time, bytes going where they gain most."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Final, Self

from attrs import evolve, frozen

from kimicore.policies.precision.formats import PRECISIONS
from kimicore.policies.precision.resolving import ResolvedMap
from kimicore.quantize.sensitivity import Cost, total

__all__ = ["ClimbPath", "PathStep"]

_NOTHING: Final = 1e-9  # summed loss in nats a token that no judge sees


@frozen
class PathStep:
    """A module that gets a finer precision, and the loss that each byte more takes away."""

    module: str
    precision: str
    worth: float


@frozen
class ClimbPath:
    """Maps from ``found`` up to 16 bits for all that it rounds; position n is the map after the first n steps.

    ``losses``: the summed loss of each position, which is one more than there are steps. Made by :meth:`of`.
    """

    found: ResolvedMap
    steps: tuple[PathStep, ...]
    losses: tuple[float, ...]

    @classmethod
    def of(cls, found: ResolvedMap, costs: Sequence[Cost]) -> Self:
        """Return the path on which each step takes away the most loss for each byte that it adds.

        A step may pass over a precision that is worth less than what lies behind it: a matrix of a few large weights
        loses more with one scale a row than with five bits in groups.
        """
        steps = tuple(heapq.merge(*map(_own_steps, costs), key=lambda step: -step.worth))
        chosen = {one.module.module.name: one.module.precision for one in costs}
        losses = [total(costs, chosen)]
        now = {one.module.module.name: one.losses[one.module.precision] for one in costs}
        after = {one.module.module.name: one.losses for one in costs}
        for step in steps:
            now[step.module] = after[step.module][step.precision]
            losses.append(sum(now.values()))
        return cls(found, steps, tuple(losses))

    @property
    def last(self) -> int:
        """The position where nothing is rounded."""
        return len(self.steps)

    def map_at(self, position: int) -> ResolvedMap:
        """Return the map at a position; the rule of what has climbed is then "ladder"."""
        chosen: Mapping[str, str] = {step.module: step.precision for step in self.steps[:position]}
        modules = tuple(
            evolve(one, precision=chosen[one.module.name], rule="ladder") if one.module.name in chosen else one
            for one in self.found.modules
        )
        return evolve(self.found, modules=modules)

    def position(self, most: float, after: int = -1) -> int:
        """Return the first position behind ``after`` whose losses sum up to at most ``most``; else the last one."""
        if most < _NOTHING:
            return self.last
        return next((at for at in range(after + 1, self.last) if self.losses[at] <= most), self.last)

    def between(self, low: int, high: int) -> int | None:
        """Return the position in the middle of two, by the logarithm of the summed loss; None: there is none."""
        if high - low < 2:
            return None
        some = [loss for loss in self.losses[low : high + 1] if loss >= _NOTHING]  # 16 bits for all have no logarithm
        most = math.sqrt(some[0] * some[-1]) if some else 0.0
        return min(max(self.position(most, low), low + 1), high - 1)


def _own_steps(cost: Cost) -> list[PathStep]:
    """Return the steps of one matrix, each worth no more than the one before it."""
    rungs = list(cost.losses)
    sizes = [PRECISIONS[rung].weight_bytes(cost.module.module.shape) for rung in rungs]
    losses = list(cost.losses.values())
    steps: list[PathStep] = []
    at = 0
    while at + 1 < len(rungs):
        worths = [(losses[at] - losses[to]) / (sizes[to] - sizes[at]) for to in range(at + 1, len(rungs))]
        best = max(range(len(worths)), key=worths.__getitem__)
        at += 1 + best
        steps.append(PathStep(cost.module.module.name, rungs[at], worths[best]))
    return steps
