"""How long a step takes: a linear model that learns from every step."""

from __future__ import annotations

from collections.abc import Iterable

from kimicore.types import BoundRow

__all__ = ["StepTimeModel", "step_load"]

_SCALES = (1.0, 100.0, 10.0, 10_000.0, 100_000.0)  # about what each feature is in a full step
_CONTEXT, _ATTENDED = 3, 4
_PAIRS = 0.4  # a context token costs about what 4 attended pairs do: its memory is read, they are multiplied
_PULL = 0.02  # how much that counts where steps do not tell
_PRIOR_S = (2e-3, 15e-3, 1e-3, 2e-3, 1e-3)  # seconds per scaled feature before anything was measured


def step_load(rows: Iterable[BoundRow]) -> tuple[int, int, int, int]:
    """Return ``(tokens, rows, context_tokens, attended_tokens)`` of a bound step, as the model counts them."""
    tokens = count = context = attended = 0
    for row in rows:
        own = row.plan.count + len(row.plan.drafts)
        tokens += own
        count += 1
        context += row.plan.start + own
        if own > 1:
            attended += own * row.plan.start + own * own // 2
    return tokens, count, context, attended


class StepTimeModel:
    """``step_s = a + b*tokens + c*rows + d*context_tokens + e*attended_tokens``, fitted while the engine runs.

    Coefficients are never negative. Errors count relative to the step's time, so that short steps count as much as
    long ones; old steps fade with a half-life of ``half_life`` steps of their kind (with chunks of prompts, or
    without); the first ``skip`` steps (lazy initialization) and later outliers hardly count. ``step_s`` is the mean
    times a factor that is moved so that 95 % of the real steps stay under it. ``warm``: steps of one row each and their
    seconds, run on nobody's behalf, for a first notion of this machine.
    """

    def __init__(
        self,
        warm: Iterable[tuple[float, BoundRow]] = (),
        *,
        half_life: float = 200.0,
        skip: int = 2,
        refit_every: int = 8,
    ) -> None:
        size = len(_SCALES)
        self._keep = 0.5 ** (1.0 / half_life)
        self._skip = skip
        self._every = refit_every
        self.steps = 0
        self._weights = [one / scale for one, scale in zip(_PRIOR_S, _SCALES, strict=True)]
        # Two sums, with chunks and without: hours of single tokens must not make it forget what a chunk costs.
        self._grams = [[[0.0] * size for _ in range(size)] for _ in range(2)]
        self._rights = [[0.0] * size for _ in range(2)]
        for i, prior in enumerate(_PRIOR_S):  # next to nothing beside one measured step
            self._grams[1][i][i] = 0.1
            self._rights[1][i] = 0.1 * prior
        self._spread = 0.5  # usual relative error
        self._tail = 1.1
        self._begin(warm)

    def mean_s(self, tokens: int, rows: int, context_tokens: int, attended_tokens: int = 0) -> float:
        """Return the expected seconds of a step."""
        a, b, c, d, e = self._weights
        return a + b * tokens + c * rows + d * context_tokens + e * attended_tokens

    def step_s(self, tokens: int, rows: int, context_tokens: int, attended_tokens: int = 0) -> float:
        """Return the seconds that 95 % of such steps stay under."""
        return self._tail * self.mean_s(tokens, rows, context_tokens, attended_tokens)

    def _begin(self, steps: Iterable[tuple[float, BoundRow]]) -> None:
        """Scale what is assumed so that it fits these steps; it counts as little as before."""
        for step_s, row in steps:
            load = step_load([row])
            ratio = step_s / self.mean_s(*load)
            if load[0] > 1 and ratio > 0.0:
                self._weights = [ratio * one for one in self._weights]
                for rights in self._rights:
                    rights[:] = [ratio * one for one in rights]

    def observe(self, step_s: float, tokens: int, rows: int, context_tokens: int, attended_tokens: int = 0) -> None:
        """Learn from a step that took ``step_s`` seconds."""
        self.steps += 1
        if self.steps <= self._skip or step_s <= 0.0:
            return
        mean = self.mean_s(tokens, rows, context_tokens, attended_tokens)
        error = abs(step_s - mean) / max(step_s, 1e-6)
        young = self.steps <= self._skip + 32
        if not young:
            ratio = step_s / max(mean, 1e-6)
            self._tail = min(3.0, max(1.0, self._tail + (0.02 * 0.95 if ratio > self._tail else -0.02 * 0.05)))
        limit = 3.0 * self._spread
        trust = 1.0 if young or error <= limit else limit / error
        self._spread += 0.05 * (min(error, 2.0 * limit) - self._spread)
        self._spread = max(self._spread, 0.02)
        self._add(step_s, (1.0, float(tokens), float(rows), float(context_tokens), float(attended_tokens)), trust)
        if self.steps % self._every == 0 or young:
            self._fit()

    def _add(self, step_s: float, features: tuple[float, ...], trust: float) -> None:
        weight = trust / (step_s * step_s)
        scaled = [one / scale for one, scale in zip(features, _SCALES, strict=True)]
        keep = self._keep
        chunks = int(features[-1] > 0.0)
        gram, own = self._grams[chunks], self._rights[chunks]
        for i, left in enumerate(scaled):
            row = gram[i]
            left_weight = weight * left
            for j, right in enumerate(scaled):
                row[j] = keep * row[j] + left_weight * right
            own[i] = keep * own[i] + left_weight * step_s

    def _fit(self) -> None:
        """Solve the least squares; coefficients that come out negative are set to 0 and the others solved anew."""
        right = [own + more for own, more in zip(*self._rights, strict=True)]
        free = list(range(len(right)))
        answer = [0.0] * len(free)
        while free:
            gram = [[self._grams[0][i][j] + self._grams[1][i][j] for j in range(len(right))] for i in range(len(right))]
            if _CONTEXT in free and _ATTENDED in free:
                _pull(gram)
            found = _solve([[gram[i][j] for j in free] for i in free], [right[i] for i in free])
            if min(found) >= 0.0:
                for i, value in zip(free, found, strict=True):
                    answer[i] = value
                break
            free = [i for i, value in zip(free, found, strict=True) if value > 0.0]
        self._weights = [value / scale for value, scale in zip(answer, _SCALES, strict=True)]


def _pull(gram: list[list[float]]) -> None:
    """Hold context tokens and attended pairs to their usual ratio where both grow together, as beside a long prompt."""
    strength = _PULL * gram[_CONTEXT][_CONTEXT]
    gram[_CONTEXT][_CONTEXT] += strength
    gram[_CONTEXT][_ATTENDED] -= strength * _PAIRS
    gram[_ATTENDED][_CONTEXT] -= strength * _PAIRS
    gram[_ATTENDED][_ATTENDED] += strength * _PAIRS * _PAIRS


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Return x of ``matrix x = right`` for a symmetric positive matrix, with a trace of damping; both are used up."""
    size = len(right)
    for i in range(size):
        matrix[i][i] *= 1.0 + 1e-9
    for i in range(size):
        top = matrix[i]
        pivot = top[i]
        for k in range(i + 1, size):
            row = matrix[k]
            factor = row[i] / pivot
            for j in range(i + 1, size):
                row[j] -= factor * top[j]
            right[k] -= factor * right[i]
    for i in range(size - 1, -1, -1):
        row = matrix[i]
        right[i] = (right[i] - sum([row[j] * right[j] for j in range(i + 1, size)])) / row[i]
    return right
