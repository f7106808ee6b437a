"""The figures of a report: quantiles, shares, fairness."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

__all__ = ["QUANTILES", "jain", "quantiles", "share", "spread"]

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}


def quantiles(values: Sequence[float], weights: Sequence[int] | None = None) -> dict[str, float] | None:
    """Return mean, quantiles by nearest rank, and the largest of ``values``, each counted ``weights`` times (None:
    once); None where there are none."""
    if not values:
        return None
    import numpy as np

    numbers = np.asarray(values, float)
    counts = np.ones(len(numbers), np.int64) if weights is None else np.asarray(weights, np.int64)
    order = np.argsort(numbers, kind="stable")
    numbers, counts = numbers[order], counts[order]
    upto = np.cumsum(counts)
    total = int(upto[-1])
    found = {"mean": math.fsum((numbers * counts).tolist()) / total}
    for name, at in QUANTILES.items():
        found[name] = float(numbers[np.searchsorted(upto, math.ceil(at * total))])
    found["max"] = float(numbers[-1])
    return found


def share(part: float, whole: float) -> float:
    """Return ``part / whole``, 0 where there is nothing."""
    return part / whole if whole else 0.0


def jain(values: Iterable[float]) -> float:
    """Return Jain's index of fairness: 1 where all are alike, 1/n where one has everything (R. Jain, D. Chiu, W. Hawe,
    DEC research report TR-301, 1984)."""
    numbers = list(values)
    squares = sum([one * one for one in numbers])
    return sum(numbers) ** 2 / (len(numbers) * squares) if squares else 1.0


def spread(values: Iterable[float]) -> float:
    """Return how many times the smallest the largest is; 1 where there are fewer than two."""
    numbers = list(values)
    if len(numbers) < 2:
        return 1.0
    return max(numbers) / min(numbers) if min(numbers) > 0.0 else math.inf
