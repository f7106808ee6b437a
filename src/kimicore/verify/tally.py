"""Two models' logits at the same positions, compared; and what many such comparisons say together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import asdict, frozen
from numpy.typing import NDArray
from torch import Tensor

from kimicore.errors import RequestFailed
from kimicore.model.transformer import Transformer

__all__ = [
    "Compared",
    "Estimate",
    "Floats",
    "Measured",
    "Scores",
    "compare",
    "distance",
    "estimate",
    "losses",
    "perplexity",
    "similarity",
]

LOGITS_BYTES = 64 << 20
"""Logits are made in pieces of about this many bytes: a large vocabulary needs no more memory than a small one."""
RESAMPLES = 1000

Floats = NDArray[np.float64]


@frozen
class Estimate:
    """A mean over prompts, and the bounds that 95 % of bootstrap samples of the prompts lie within."""

    value: float
    low: float
    high: float


@frozen
class Scores:
    """What a model shows beside the baseline on some prompts.

    ``agreement``: share of positions whose most likely token is the baseline's. ``kl``: mean of KL(baseline || model)
    in nats a token. ``edit``: 1 - Levenshtein distance / length of its own greedy continuation against the baseline's;
    None where it was not generated. ``perplexity``: of the category's text (None: not measured), and
    ``baseline_perplexity`` the baseline's own.
    """

    prompts: int
    positions: int
    agreement: Estimate
    kl: Estimate
    edit: Estimate | None = None
    perplexity: float | None = None
    baseline_perplexity: float | None = None


@frozen
class Measured:
    """Scores of one model: over all prompts and by category."""

    all: Scores
    by_category: Mapping[str, Scores]

    @property
    def worst(self) -> str:
        """The category of least agreement; of several, the one of largest KL."""
        return min(self.by_category, key=lambda one: self._rank(self.by_category[one]))

    @staticmethod
    def _rank(one: Scores) -> tuple[float, float]:
        return one.agreement.value, -one.kl.value

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as plain JSON values."""
        return {"all": asdict(self.all), "by_category": {key: asdict(one) for key, one in self.by_category.items()}}


@frozen(eq=False)
class Compared:
    """Two models at n positions: whether their likeliest tokens agree, and KL(baseline || model)."""

    agree: NDArray[np.bool_]
    kl: Floats


def compare(baseline: Transformer, known: Tensor, model: Transformer, found: Tensor, tokens: int) -> Compared:
    """Compare what two models predict from their hidden states ``known`` and ``found`` [n, C], over ``tokens`` ids.

    All in float32, a piece of the positions at a time. Raises :class:`~kimicore.RequestFailed` where logits are not
    finite.
    """
    agrees, divergences = [], []
    with torch.inference_mode():
        for piece in _pieces(len(known), tokens):
            first = torch.log_softmax(_logits(baseline, known[piece], tokens, "the baseline"), -1)
            other = torch.log_softmax(_logits(model, found[piece], tokens, "the model"), -1)
            agrees.append(first.argmax(-1) == other.argmax(-1))
            other.neg_().add_(first).mul_(first.exp_())
            divergences.append(other.sum(-1, dtype=torch.float64).clamp_(min=0.0))
    return Compared(torch.cat(agrees).numpy(), torch.cat(divergences).numpy())


def losses(model: Transformer, hidden: Tensor, targets: Sequence[int], tokens: int) -> Floats:
    """Return -log p of each target under what a model predicts from its hidden states [n, C]; else as above."""
    parts = []
    wanted = torch.tensor(targets, dtype=torch.int64)
    with torch.inference_mode():
        for piece in _pieces(len(wanted), tokens):
            logits = _logits(model, hidden[piece], tokens, "the model")
            parts.append(torch.logsumexp(logits, -1) - logits.gather(1, wanted[piece, None])[:, 0])
    return torch.cat(parts).double().numpy()


def _pieces(count: int, tokens: int) -> list[slice]:
    rows = max(1, LOGITS_BYTES // (4 * tokens))
    return [slice(start, start + rows) for start in range(0, count, rows)]


def _logits(model: Transformer, hidden: Tensor, tokens: int, who: str) -> Tensor:
    logits = model.logits(hidden)[:, :tokens]
    if not torch.isfinite(logits.sum(-1)).all():
        raise RequestFailed(f"{who}: logits are not finite: its weights are damaged, or too large for its dtype")
    return logits


def estimate(values: Floats, seed: int) -> Estimate:
    """Return the mean of a value per prompt, with its bounds by bootstrap over the prompts."""
    mean = float(values.mean())
    drawn = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(1), (0.025, 0.975))
    return Estimate(mean, min(mean, float(low)), max(mean, float(high)))


def distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the least number of insertions, deletions and substitutions that make one of the other (Levenshtein)."""
    before = list(range(len(other) + 1))
    for row, a in enumerate(one, 1):
        now = [row]
        for column, b in enumerate(other):
            now.append(min(before[column] + (a != b), before[column + 1] + 1, now[column] + 1))
        before = now
    return before[-1]


def similarity(one: Sequence[int], other: Sequence[int]) -> float:
    """Return 1 - distance / the longer one's length: 1 for the same, 0 for nothing in common."""
    longer = max(len(one), len(other))
    return 1.0 - distance(one, other) / longer if longer else 1.0


def perplexity(losses: Floats) -> float:
    """Return e to the mean loss; infinite where that is beyond a double."""
    mean = float(losses.mean())
    return math.exp(mean) if mean < 700.0 else math.inf
