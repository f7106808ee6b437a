"""From logits to tokens, row by row: stateless, and deaf to what else is in the batch.

Everything that decides a token stands in its row: parameters, seed, choice and the tokens so far. Sampling is by
Gumbel-max: the noise of a token depends on (seed, choice, position, token id) alone, so that the same seed gives
the same token after a preemption, in any batch and under any chunk size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kimicore.errors import KimiCoreError, RequestFailed
from kimicore.kernels.gumbel import GumbelOp, draw
from kimicore.kernels.registry import Ops
from kimicore.model.filters import kept_ids, scaled
from kimicore.model.logprobs import finite_top, host_rows, score_token
from kimicore.model.penalties import adjusted, is_adjusted
from kimicore.types import BoundRow, RowResult

__all__ = ["sample"]

Row = NDArray[np.float32]

_LISTED: Final = 1024  # more tokens are drawn from through the whole vocabulary; the result is the same


def _noisy_choice(logits: Row, top: float, row: BoundRow, gumbel: GumbelOp, scratch: Row) -> int:
    """Return a token drawn from ``logits`` [V] as ``row`` asks; ``scratch`` [V] is overwritten."""
    params, position = row.params, len(row.known)
    ids = kept_ids(logits, top, params)
    if ids is not None and len(ids) == 1:
        return int(ids[0])
    if ids is not None and len(ids) <= _LISTED:
        noise = gumbel(row.seed, row.choice, position, torch.from_numpy(ids)).numpy()
        return int(ids[(scaled(logits[ids], top, params.temperature) + noise).argmax()])
    if ids is None:
        scores = scaled(logits, top, params.temperature, scratch)
    else:
        scores = scratch
        scores.fill(-np.inf)
        scores[ids] = scaled(logits[ids], top, params.temperature)
    return draw(gumbel, torch.from_numpy(scores), row.seed, row.choice, position)


def _choose(raw: Row, best: int, row: BoundRow, gumbel: GumbelOp, scratch: Row) -> RowResult:
    position = len(row.known)
    raw_top = finite_top(raw, best, position)
    logits, top = raw, raw_top
    if is_adjusted(row):
        logits = adjusted(raw, row)
        best = int(logits.argmax())
        top = float(logits[best])
        if top == -np.inf:
            raise RequestFailed(f"every token that the model could give at position {position} is banned")
    token = best if row.params.greedy else _noisy_choice(logits, top, row, gumbel, scratch)
    if row.params.logprobs is None:
        return RowResult((token,))
    return RowResult((token,), (score_token(raw, token, row.params.logprobs, raw_top, scratch),))


def sample(logits: Tensor, rows: Sequence[BoundRow], ops: Ops) -> list[RowResult]:
    """Return one token (and its scores where asked for) for each of ``rows``, from ``logits`` [R, V].

    Row ``i`` of ``logits`` belongs to ``rows[i]``, whose next token stands at position ``len(known)``; a row that is
    not to be sampled gives an empty result. The order is: log-probabilities of the raw logits, logit bias, repetition,
    frequency and presence penalty, bans, temperature, top-k, top-p, min-p, noise. The lowest id wins among equals.
    ``logits`` is only read.

    A row whose logits hold NaN or +inf, or nothing but -inf, or that bans every token, gets a
    :class:`~kimicore.RequestFailed` as its error, one with a token id outside the vocabulary an
    :class:`~kimicore.InvalidRequest`; other rows are unaffected.
    """
    values = host_rows(logits)
    if len(rows) != values.shape[0]:
        raise ValueError(f"{len(rows)} rows for {values.shape[0]} rows of logits: must be as many")
    scratch = np.empty(values.shape[1], dtype=np.float32)
    results = []
    with np.errstate(over="ignore", under="ignore"):
        for raw, best, row in zip(values, values.argmax(axis=1).tolist(), rows, strict=True):
            try:
                results.append(_choose(raw, best, row, ops.gumbel, scratch) if row.sample else RowResult())
            except KimiCoreError as error:
                results.append(RowResult(error=error))
    return results
