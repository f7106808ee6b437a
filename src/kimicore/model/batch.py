"""One step's input as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import field, frozen
from torch import Tensor

__all__ = ["Batch", "Measured", "Part", "Whole"]


@frozen(eq=False)
class Measured:
    """The rows of a step whose attention is measured, by their last queries.

    ``tokens`` [n] int64: indices of these queries among the batch's tokens. ``row_starts`` [M+1], ``contexts`` [M] and
    ``block_tables`` (per KV class [M, N]), all int32, say of them what a batch's own say of its rows.
    """

    tokens: Tensor
    row_starts: Tensor
    contexts: Tensor
    block_tables: tuple[Tensor, ...]


@frozen(eq=False)
class Part:
    """Rows that stand together in a batch and read the cache in the same way: tokens ``first`` to ``last``.

    ``row_starts`` [b+1] (from 0) and ``contexts`` [b] are theirs. Per group of layers: ``views``, which arena view
    whole blocks are in, and ``block_tables`` [b, N]. ``bits``: 8 or 4 where these are packed; then ``tails`` [b, N] are
    the blocks of full precision that are being filled. ``keep`` [b] int32: how many blocks a row's one query reads at
    most in layers with full attention; None: all.
    """

    first: int
    last: int
    row_starts: Tensor
    contexts: Tensor
    views: tuple[int, ...]
    block_tables: tuple[Tensor, ...]
    bits: int = 0
    tails: tuple[Tensor, ...] = ()
    keep: Tensor | None = None


@frozen(eq=False)
class Whole:
    """Blocks that become whole in a step: [n] int32 slots per group of layers, in its full-precision view.

    ``bits`` 8 or 4: they are packed into ``targets``, of the arena views ``views``. 0: their keys are summarized, in
    place.
    """

    bits: int
    sources: tuple[Tensor, ...]
    views: tuple[int, ...] = ()
    targets: tuple[Tensor, ...] = ()


def _none() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@frozen(eq=False)
class Batch:
    """Rows packed one after another: T tokens of B rows, with n positions whose hidden state is wanted.

    ``token_ids`` and ``positions`` [T] int64. ``row_starts`` [B+1] int32: row b is tokens ``row_starts[b]`` to
    ``row_starts[b+1]``; tokens behind the last row are padding. ``contexts`` [B] int32: tokens of the row that are
    cached once this step has written its own. A *group* is the layers of one KV class of full precision.
    ``block_tables``: per group [B, N] int32, entries that have left a window are 0. ``slots``: per group [T] int64,
    ``slot * block_tokens + offset`` of each token, in the group's view; padding writes within slot 0. ``rope_tokens``
    [T] int64: length that fixes a dynamic rope's factor; None where all are within the trained length. ``selected``
    [n] int64: indices of the tokens whose final hidden state is wanted. ``measured``: None where no attention is
    measured. ``parts``: empty where all rows read all of their context in full precision, by ``block_tables``; else
    they have all tokens, padding included. ``whole``: what has to be done with blocks that become whole. ``middle``
    [m] int64: indices of the tokens whose inputs to products with packed weights are rounded to 8 bits, in order.
    """

    token_ids: Tensor
    positions: Tensor
    row_starts: Tensor
    contexts: Tensor
    block_tables: tuple[Tensor, ...]
    slots: tuple[Tensor, ...]
    rope_tokens: Tensor | None
    selected: Tensor
    measured: Measured | None = None
    parts: Sequence[Part] = ()
    whole: Sequence[Whole] = ()
    middle: Tensor = field(factory=_none)
