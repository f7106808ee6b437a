"""Gumbel noise, plainly: the oracle for every other implementation, bit for bit.

Philox4x32-10 gives 32 random bits for each (seed, choice, position, token id). They become a uniform number
and then Gumbel noise in float64, through a logarithm that is written here in additions, multiplications and
divisions only: each of them rounds the same way on every device, which no library's logarithm promises.

The arithmetic is numpy's, whose unsigned integers wrap by definition, and whose calls cost little on the few
tokens that a filter leaves.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), for Philox; Gumbel (1954) and
Maddison et al., "A* sampling" (2014), for drawing from a softmax by an argmax over noisy logits.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["gumbel", "gumbel_argmax", "noise_of_words", "philox4x32"]

Words = NDArray[np.uint64]

_MASK: Final = 0xFFFFFFFF
_LOW: Final = np.uint64(_MASK)
_HALF: Final = np.uint64(32)
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10

_SQRT_HALF_BITS: Final = 0x3FE6A09E667F3BCD
_LN2: Final = math.log(2.0)
_SERIES: Final = tuple(2.0 / (2 * k + 1) for k in range(10, -1, -1))

_SLACK: Final = 1e-3


def philox4x32(key: tuple[int, int], c0: Words, c1: Words, c2: Words, c3: Words) -> tuple[Words, Words, Words, Words]:
    """Return the four output words of Philox4x32-10 for counters of four words each.

    Counters and results are arrays of one shape [N] of 32-bit words in uint64; ``key`` is two 32-bit words.
    """
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0)
        c2 = (p0 >> _HALF) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & _LOW, p0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the natural logarithm of positive, normal numbers: 2 artanh((m - 1) / (m + 1)) + e ln 2."""
    bits = x.view(np.int64)
    exponent = (bits - _SQRT_HALF_BITS) >> 52
    f = (bits - (exponent << 52)).view(np.float64) - 1.0
    s = f / (f + 2.0)
    z = s * s
    series = z * _SERIES[0] + _SERIES[1]
    for coefficient in _SERIES[2:]:
        series *= z
        series += coefficient
    return exponent * _LN2 + s * series


def noise_of_words(words: Words) -> NDArray[np.float32]:
    """Return the Gumbel noise [N] of 32-bit words [N]: -log(-log((word + 1/2) / 2**32))."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    return (-_log(-_log(uniform))).astype(np.float32)


def _block_words(seed: int, choice: int, position: int, blocks: Words) -> NDArray[np.uint64]:
    """Return the words [4, N] of the blocks of four tokens."""
    # The last counter word is 0 for tokens drawn from the model; other values are free for other uses of a seed.
    rest = (np.full_like(blocks, value) for value in (position, choice, 0))
    return np.stack(philox4x32((seed & _MASK, seed >> 32), blocks, *rest))


def gumbel(seed: int, choice: int, position: int, ids: Tensor) -> Tensor:
    """Return the Gumbel noise float32 [N] of the token ids int64 [N].

    ``seed``: 0 to 2**64 - 1. ``choice``: which continuation of the prompt. ``position``: index in the sequence
    of the token that is drawn. Each of ``choice``, ``position`` and the ids is below 2**32. Token ``id`` gets
    word ``id % 4`` of the block ``id // 4``, so its noise is the same in every subset of the vocabulary.
    """
    wanted = ids.cpu().numpy().astype(np.uint64)
    words = _block_words(seed, choice, position, wanted >> np.uint64(2))
    lanes = (wanted & np.uint64(3)).astype(np.intp)
    return torch.from_numpy(noise_of_words(words[lanes, np.arange(len(wanted))])).to(ids.device)


def gumbel_argmax(scores: Tensor, seed: int, choice: int, position: int) -> int:
    """Return the id with the largest ``scores + gumbel``, the lowest of equals.

    ``scores``: float32 [V], without NaN or +inf and with at least one finite value; the result is distributed by
    softmax(scores). Equal, bit for bit, to adding :func:`gumbel` to every score, but the logarithms of it are
    taken only where they can matter: with u the uniform number, -log(-log(u)) <= -log(1 - u), so a token whose
    score plus that bound stays under a noisy score already reached cannot win.
    """
    values = scores.cpu().numpy()
    size = len(values)
    blocks = np.arange((size + 3) // 4, dtype=np.uint64)
    words = _block_words(seed, choice, position, blocks).T.reshape(-1)[:size]
    best = int(values.argmax())
    reached = (values[best] + noise_of_words(words[best : best + 1]))[0]
    rest = ((_LOW - words).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    ids = np.flatnonzero(values + (np.float32(_SLACK) - np.log(rest)) >= reached)
    return int(ids[(values[ids] + noise_of_words(words[ids])).argmax()])
