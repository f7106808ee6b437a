"""Top-k, top-p and min-p: each keeps the best tokens down to some point of one fixed order.

The order is by logit, largest first, and the lower id first of equals. A filter is therefore a cut: the logit of the
last token that is kept, and how many of the tokens with that very logit are. Nothing sorts the vocabulary.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from kimicore.model.logprobs import top_values
from kimicore.sampling_params import SamplingParams

__all__ = ["kept_ids", "scaled"]

Row = NDArray[np.float32]
Ids = NDArray[np.int64]

_SORTED: Final = 256  # how few candidates are sorted; any number gives the same result


@frozen
class _Cut:
    """The logit of the last token that is kept, and how many of the tokens with that logit are."""

    last: float
    ties: int


def scaled(logits: Row, top: float, temperature: float, out: Row | None = None) -> Row:
    """Return ``(logits - top) / temperature`` in float32, at most 0: dividing first could overflow."""
    scores: Row = np.subtract(logits, np.float32(top), out=out)
    np.divide(scores, np.float32(temperature), out=scores)
    return scores


def _cut_after(values: Row, count: int) -> _Cut:
    """Return the cut that keeps ``count`` of ``values``, which are sorted, largest first."""
    last = values[count - 1]
    return _Cut(float(last), count - int(np.searchsorted(-values, -last, side="left")))


def _cut_at_mass(values: Row, weights: Row, wanted: float) -> _Cut:
    """Return the cut that keeps the fewest of ``values``, the largest first, whose ``weights`` add up to ``wanted``.

    A selection by mass: the values over the mean either reach the mass, and the others are dropped, or they do
    not, and are kept as a whole; so the work is a few passes whatever the distribution.
    """
    while len(values) > _SORTED:
        pivot = values.mean(dtype=np.float64)
        over = values > np.float32(pivot)
        if not over.any():  # all are equal, or next to it
            break
        mass = float(weights.compress(over).sum(dtype=np.float64))
        if mass < wanted:
            over = ~over
            wanted -= mass
        values, weights = values.compress(over), weights.compress(over)
    order = np.argsort(-values, kind="stable")
    reached = weights[order].cumsum(dtype=np.float64)
    count = int(np.searchsorted(reached, wanted, side="left")) + 1
    return _cut_after(values[order], min(count, len(values)))


def _nucleus(logits: Row, top: float, params: SamplingParams) -> _Cut:
    """Return the cut of top-p over the whole vocabulary.

    Tokens with less than ``(1 - top_p) / V`` of the mass hold less than ``1 - top_p`` of it together, so the nucleus is
    among the others, which are few in most contexts.
    """
    scores = scaled(logits, top, params.temperature)
    weights = np.exp(scores)
    mass = float(weights.sum(dtype=np.float64))
    some = scores >= min(math.log((1.0 - params.top_p) * mass / len(logits)), 0.0)
    return _cut_at_mass(logits.compress(some), weights.compress(some), params.top_p * mass)


def _ids(logits: Row, cut: _Cut) -> Ids:
    """Return the ids, ascending, that ``cut`` keeps of ``logits``."""
    ids = np.flatnonzero(logits >= np.float32(cut.last))
    at_last = np.flatnonzero(logits[ids] == np.float32(cut.last))
    return np.delete(ids, at_last[cut.ties :]) if len(at_last) > cut.ties else ids


def kept_ids(logits: Row, top: float, params: SamplingParams) -> Ids | None:
    """Return the ids, ascending, that top-k, then top-p, then min-p leave of ``logits`` [V]; None is all of them.

    ``top`` is the largest logit, which is always kept. Top-k keeps exactly ``top_k`` tokens; top-p the fewest that hold
    ``top_p`` of the mass that top-k left; min-p those that are at least ``min_p`` times as likely as the best one.
    Sources: Fan et al. (2018) for top-k, Holtzman et al. (2019) for top-p, Nguyen et al. (2024) for min-p.
    """
    ids = None
    if 0 < params.top_k < len(logits):
        values = top_values(logits, params.top_k)
        cut = _cut_after(values, len(values))
        if params.top_p < 1.0:
            weights = np.exp(scaled(values, top, params.temperature))
            cut = _cut_at_mass(values, weights, params.top_p * float(weights.sum(dtype=np.float64)))
        ids = _ids(logits, cut)
    elif params.top_p < 1.0:
        ids = _ids(logits, _nucleus(logits, top, params))
    if params.min_p > 0.0:
        scores = scaled(logits if ids is None else logits[ids], top, params.temperature)
        likely = np.flatnonzero(scores >= math.log(params.min_p))
        ids = likely if ids is None else ids[likely]
    return ids
