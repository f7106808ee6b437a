"""Draws have the distribution that the filtered softmax says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kimicore.model.sampling import sample
from kimicore.types import BoundRow

from .oracle import changed, operations, probabilities, row

DRAWS, SIZE, BATCH = 20_000, 40, 1_000
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.6},
    "top_k": {"top_k": 9, "temperature": 1.5},
    "top_p": {"top_p": 0.83},
    "min_p": {"min_p": 0.07, "temperature": 2.0},
    "all": {
        "top_k": 25, "top_p": 0.95, "min_p": 0.01, "temperature": 1.7,
        "repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {4: 1.5},
    },
}  # fmt: skip


def upper_bound(degrees: int) -> float:
    """The value that chi-square exceeds once in 100,000 times (Wilson and Hilferty, 1931)."""
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + 4.265 * math.sqrt(spread)) ** 3


def rows_over(kind: str, options: dict[str, Any]) -> list[BoundRow]:
    """20,000 rows that differ in their position, their seed or their choice alone, with the same tokens seen."""
    seen = [3, 8, 8, 15]
    if kind == "positions":
        known = [seen * (1 + i // 4) + seen[: i % 4] for i in range(DRAWS // 10)]
        return [row(ids, len(ids) - 1, seed=seed, **options) for seed in range(10) for ids in known]
    if kind == "choices":
        return [row(seen, 3, seed=i // 100, choice=i % 100, **options) for i in range(DRAWS)]
    return [row(seen, 3, seed=i * 0x9E3779B97F4A7C15 % 2**64, **options) for i in range(DRAWS)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("plain", "positions"),
        ("cool", "choices"),
        ("top_k", "seeds"),
        ("top_p", "choices"),
        ("min_p", "positions"),
        ("all", "seeds"),
    ],
)
def test_draws_follow_the_filtered_softmax(name: str, kind: str) -> None:
    """20,000 draws over positions, seeds or choices pass a chi-square test against the exact distribution."""
    options = OPTIONS[name]
    logits = torch.tensor(np.random.default_rng(8).normal(size=SIZE) * 1.5, dtype=torch.float32)
    rows, operations_ = rows_over(kind, options), operations()
    expected = probabilities(changed(logits.numpy(), rows[0]), rows[0].params) * DRAWS
    counts = np.zeros(SIZE)
    for start in range(0, DRAWS, BATCH):
        results = sample(logits.expand(BATCH, SIZE), rows[start : start + BATCH], operations_)
        np.add.at(counts, [result.tokens[0] for result in results], 1)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    rare = possible & (expected < 5)  # pooled, as the test's approximation asks for
    cells = [*zip(counts[possible & ~rare], expected[possible & ~rare], strict=True)]
    if rare.any():
        cells.append((counts[rare].sum(), expected[rare].sum()))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    assert statistic < upper_bound(len(cells) - 1)
