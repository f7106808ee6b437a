"""What changes logits before a token is chosen: bias, penalties on tokens seen, and banned tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kimicore.errors import InvalidRequest
from kimicore.types import BoundRow

__all__ = ["adjusted", "is_adjusted"]

Row = NDArray[np.float32]
_LARGEST = float(np.finfo(np.float32).max)


def is_adjusted(row: BoundRow) -> bool:
    """Whether anything but the model decides ``row``'s logits."""
    return bool(row.banned or row.params.logit_bias or row.params.penalized)


def _token_ids(name: str, ids: Sequence[int], size: int) -> NDArray[np.int64]:
    """Return ``ids`` as an array, or refuse them: a negative id would silently count from the vocabulary's end."""
    try:
        array = np.asarray(ids, dtype=np.int64)
    except OverflowError as error:
        raise InvalidRequest(f"{name}: a token id does not fit 64 bits") from error
    if array.size and not (array.min() >= 0 and array.max() < size):
        wrong = array[(array < 0) | (array >= size)][0]
        raise InvalidRequest(f"{name}: token id {wrong} is outside the vocabulary, 0 to {size - 1}")
    return array


def _store(logits: Row, ids: NDArray[np.int64], values: NDArray[np.float64]) -> None:
    # A finite logit stays finite: setting it to an infinity would ban the token or make it certain.
    np.clip(values, -_LARGEST, _LARGEST, out=values, where=values != -np.inf)
    logits[ids] = values


def _add_bias(logits: Row, bias: Sequence[tuple[int, float]]) -> None:
    ids = _token_ids("logit_bias", [one for one, _ in bias], logits.shape[0])
    _store(logits, ids, logits[ids].astype(np.float64) + np.array([value for _, value in bias]))


def _penalize(logits: Row, row: BoundRow) -> None:
    params, size = row.params, logits.shape[0]
    if params.repetition_penalty != 1.0:
        ids = _token_ids("known tokens", row.known, size)
        # An id that occurs twice is read before either write, so both write the same: once per distinct token.
        values = logits[ids].astype(np.float64)
        factor = params.repetition_penalty
        _store(logits, ids, np.where(values > 0, values / factor, values * factor))
    if params.frequency_penalty or params.presence_penalty:
        generated = _token_ids("generated tokens", row.known[row.prompt_tokens :], size)
        ids, counts = np.unique(generated, return_counts=True)
        values = logits[ids].astype(np.float64)
        _store(logits, ids, values - counts * params.frequency_penalty - params.presence_penalty)


def adjusted(logits: Row, row: BoundRow) -> Row:
    """Return a copy of ``logits`` [V] with ``row``'s logit bias, then its penalties, then its bans.

    Repetition counts each distinct token of prompt and output once: a positive logit is divided, another one
    multiplied (Keskar et al., "CTRL", 2019). Frequency and presence count generated tokens only. Values are computed in
    float64 and rounded to float32 after each step. Raises :class:`~kimicore.InvalidRequest` for an id outside the
    vocabulary.
    """
    changed = logits.copy()
    with np.errstate(over="ignore", under="ignore"):
        if row.params.logit_bias:
            _add_bias(changed, row.params.logit_bias)
        if row.params.penalized:
            _penalize(changed, row)
        if row.banned:
            changed[_token_ids("banned tokens", row.banned, changed.shape[0])] = -np.inf
    return changed
