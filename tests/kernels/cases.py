"""Inputs of the kernel tests, the float64 attention they are held to, and which implementations this machine has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attrs import frozen
from torch import Tensor

__all__ = ["Paged", "dense_attention", "guarded_outputs", "implementations", "paged"]


def implementations(native: tuple[Any | None, str], **others: Any) -> list[Any]:
    """Return pytest parameters: the named functions, and the native one where this machine can compile it."""
    found = {**others, **({} if native[0] is None else {"native": native[0]})}
    return [pytest.param(op, id=name) for name, op in found.items()]


@contextmanager
def guarded_outputs() -> Iterator[None]:
    """Give every new tensor NaN as its content and a guard of NaN on both sides, and check the guards at the end."""
    whole: list[tuple[Tensor, int]] = []
    plain = torch.empty
    guard = 1024

    def empty(*size: Any, dtype: torch.dtype | None = None) -> Tensor:
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        count = int(torch.Size(shape).numel())
        buffer = torch.full((count + 2 * guard,), torch.nan, dtype=dtype or torch.get_default_dtype())
        whole.append((buffer, count))
        return buffer[guard : guard + count].view(shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        yield
    assert plain is torch.empty
    for buffer, count in whole:
        assert buffer[:guard].isnan().all() and buffer[guard + count :].isnan().all(), "written outside of the output"


@frozen(eq=False)
class Paged:
    """A paged cache whose every unused entry is NaN, and the queries of a step over it."""

    q: Tensor
    kv: Tensor
    layer: int
    table: Tensor
    starts: Tensor
    contexts: Tensor

    @property
    def call(self) -> tuple[Tensor, Tensor, int, Tensor, Tensor, Tensor]:
        """The positional arguments of a paged attention."""
        return self.q, self.kv, self.layer, self.table, self.starts, self.contexts

    def only(self, row: int, first: int, count: int) -> tuple[Tensor, Tensor, int, Tensor, Tensor, Tensor]:
        """The arguments of row ``row`` alone, for ``count`` of its queries from its ``first`` on."""
        start, end = int(self.starts[row]), int(self.starts[row + 1])
        context = int(self.contexts[row]) - (end - start) + first + count
        queries = self.q[start + first : start + first + count]
        starts, contexts = (torch.tensor(n, dtype=torch.int32) for n in ([0, count], [context]))
        return queries, self.kv, self.layer, self.table[row : row + 1], starts, contexts


def paged(
    rows: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    block_tokens: int,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    window: int | None = None,
) -> Paged:
    """Return a case: rows are (context, queries), heads (query heads, key-value heads).

    Blocks lie in random slots, table entries behind a context and those that a window has left are 0, and slot 0,
    other layers and the rest of every last block are NaN.
    """
    random = torch.Generator().manual_seed(seed)
    blocks = [-(-context // block_tokens) for context, _ in rows]
    slots = (torch.randperm(sum(blocks), generator=random) + 1).tolist()
    kv = torch.full((sum(blocks) + 1, 3, 2, heads[1], block_tokens, dim), torch.nan, dtype=dtype)
    table = torch.zeros(len(rows), max([*blocks, 1]) + 1, dtype=torch.int32)
    for row, (context, count) in enumerate(rows):
        first = 0 if window is None else max(0, context - count - window + 1) // block_tokens
        for n in range(first, blocks[row]):
            table[row, n] = slots.pop()
            used = min(block_tokens, context - n * block_tokens)
            noise = torch.randn(2, heads[1], used, dim, generator=random)
            kv[int(table[row, n]), 1, :, :, :used] = noise.to(dtype)
    starts = torch.tensor([0, *(count for _, count in rows)]).cumsum(0).to(torch.int32)
    q = torch.randn(int(starts[-1]), heads[0], dim, generator=random).to(dtype)
    contexts = torch.tensor([context for context, _ in rows], dtype=torch.int32)
    return Paged(q, kv, 1, table, starts, contexts)


def dense_attention(
    case: Paged, *, scale: float, window: int | None = None, softcap: float | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention [T, H, D] and importance [B, N] in float64, one query and one key at a time."""
    block_tokens, group = case.kv.shape[4], case.q.shape[1] // case.kv.shape[3]
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    importance = torch.zeros(case.table.shape, dtype=torch.float64)
    for row in range(len(case.contexts)):
        start, end, context = int(case.starts[row]), int(case.starts[row + 1]), int(case.contexts[row])
        for token in range(start, end if context else start):
            position = context - (end - token)
            seen = torch.arange(0 if window is None else max(0, position - window + 1), position + 1)
            at = case.table[row, seen // block_tokens].long(), seen % block_tokens
            keys, values = (case.kv[at[0], case.layer, w, :, at[1]].double() for w in (0, 1))  # [n, KH, D]
            query = case.q[token].double().unflatten(0, (-1, group))
            score = torch.einsum("kgd,nkd->kgn", query, keys) * scale
            if softcap is not None:
                score = torch.tanh(score / softcap) * softcap
            if bias is not None:
                score = score + bias[row, seen].double()
            share = torch.exp(score - torch.logsumexp(score, dim=-1, keepdim=True))
            out[token] = torch.einsum("kgn,nkd->kgd", share, values).flatten(0, 1)
            if token == end - 1:
                importance[row].index_add_(0, seen // block_tokens, share.sum(dim=(0, 1)))
    return out, importance
