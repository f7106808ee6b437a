"""One step's input as tensors."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

__all__ = ["Batch", "Measured"]


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
class Batch:
    """Rows packed one after another: T tokens of B rows, with n positions whose hidden state is wanted.

    ``token_ids`` and ``positions`` [T] int64. ``row_starts`` [B+1] int32: row b is tokens ``row_starts[b]`` to
    ``row_starts[b+1]``; tokens behind the last row are padding. ``contexts`` [B] int32: tokens of the row that are
    cached once this step has written its own. ``block_tables``: per KV class [B, N] int32, entries that have left
    a window are 0. ``slots``: per KV class [T] int64, ``slot * block_tokens + offset`` of each token; padding
    writes within slot 0. ``rope_tokens`` [T] int64: length that fixes a dynamic rope's factor; None where all
    are within the trained length. ``selected`` [n] int64: indices of the tokens whose final hidden state is wanted.
    ``measured``: None where no attention is measured.
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
