"""Log-probabilities of the raw model: a token's own, and the best tokens at its position.

"Raw" is the log-softmax of the logits as they come from the model, before bias, penalties, temperature and filters.
Every row is worked on alone and by one thread, so that neither its neighbours nor the number of threads can
change a bit of what comes out; the only scratch memory is one row of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kimicore.errors import InvalidRequest, RequestFailed
from kimicore.types import TokenScores

__all__ = ["finite_top", "host_rows", "log_mass", "score_prompt", "score_token", "top_values"]

Row = NDArray[np.float32]


def host_rows(logits: Tensor) -> Row:
    """Return ``logits`` [R, V] as a numpy array on the host; float32 rows that are there already are not copied."""
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits of shape {tuple(logits.shape)}: must be [R, V] with a vocabulary")
    rows: Row = logits.detach().to("cpu", torch.float32).numpy()
    return rows


def finite_top(row: Row, best: int, position: int) -> float:
    """Return the largest logit, which stands at ``best`` = argmax of ``row`` [V], or refuse the row.

    numpy's argmax lets NaN win, and then +inf, so this one value tells whether any logit is NaN or +inf, or all are
    -inf. Raises :class:`~kimicore.RequestFailed` that names the value, its token id and the position.
    """
    top = float(row[best])
    if math.isfinite(top):
        return top
    if top == -math.inf:
        raise RequestFailed(f"every logit for position {position} is -inf: the model gave no token a chance")
    raise RequestFailed(f"the logit of token id {best} for position {position} is {top}: the model's output is broken")


def log_mass(row: Row, top: float, scratch: Row) -> float:
    """Return log(sum(exp(row))) of ``row`` [V], whose largest value is ``top``; ``scratch`` [V] is overwritten."""
    np.subtract(row, np.float32(top), out=scratch)
    np.exp(scratch, out=scratch)
    return top + math.log(float(scratch.sum(dtype=np.float64)))


def top_values(row: Row, count: int) -> Row:
    """Return the ``count`` largest values of ``row`` [V], largest first."""
    values: Row = torch.from_numpy(row).topk(count).values.numpy()
    return values


def _best_ids(row: Row, count: int) -> list[int]:
    """Return the ids of the ``count`` largest values of ``row``, largest first and the lower id first of equals."""
    ids = np.flatnonzero(row >= top_values(row, count)[-1])
    order = np.argsort(-row[ids], kind="stable")[:count]
    return [int(one) for one in ids[order]]


def score_token(row: Row, token_id: int, top_n: int, top: float, scratch: Row) -> TokenScores:
    """Return the scores of ``token_id`` and of the ``top_n`` best tokens of ``row`` [V], whose largest is ``top``."""
    mass = log_mass(row, top, scratch)
    best = _best_ids(row, min(top_n, row.shape[0])) if top_n else []
    return TokenScores(float(row[token_id]) - mass, tuple((one, float(row[one]) - mass) for one in best))


def score_prompt(logits: Tensor, next_ids: Sequence[int], top_n: int, *, position: int = 0) -> tuple[TokenScores, ...]:
    """Return the scores of known tokens: of ``next_ids[i]`` under row ``i`` of ``logits`` [C, V].

    ``top_n``: how many of the best tokens to list, best first and the lower id first of equals. ``position``:
    index in the sequence of ``next_ids[0]``, for messages. Raises :class:`~kimicore.RequestFailed` where a logit is
    NaN or +inf, and :class:`~kimicore.InvalidRequest` for an id outside the vocabulary.
    """
    rows = host_rows(logits)
    if len(next_ids) != rows.shape[0]:
        raise ValueError(f"{len(next_ids)} next ids for {rows.shape[0]} rows of logits: must be as many")
    size = rows.shape[1]
    scratch = np.empty(size, dtype=np.float32)
    scores = []
    with np.errstate(over="ignore", under="ignore"):
        for index, token_id in enumerate(next_ids):
            if not 0 <= token_id < size:
                raise InvalidRequest(f"token id {token_id}: must be from 0 to {size - 1}")
            row = rows[index]
            top = finite_top(row, int(row.argmax()), position + index)
            scores.append(score_token(row, token_id, top_n, top, scratch))
    return tuple(scores)
