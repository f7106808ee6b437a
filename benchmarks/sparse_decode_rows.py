"""What the sparse benchmark computes with: sequences on a runner that is driven directly, and ways to choose blocks.

A step computes a token of any sequence with any share of its blocks, whether the token was generated or not, and
sequences branch off one another, so that a context is computed once for all that is asked of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from attrs import define, evolve, field
from torch import Tensor

import kimicore
from engine import TEXT
from kimicore.assembly import assemble
from kimicore.runner import ModelRunner
from kimicore.sampling_params import SamplingParams
from kimicore.types import BoundRow, BoundStep, RowPlan, Shape

SIZE = 16  # tokens of a block
CHUNK = 512


@define(eq=False)
class Row:
    """A sequence: the ids that are known, how many are computed, and its block slots per KV class."""

    known: list[int]
    tables: tuple[list[int], ...]
    computed: int = 0
    prompt_tokens: int = 0
    share: float | None = None
    made: list[int] = field(factory=list)


def latest_blocks(
    q: Tensor,
    summary: Tensor,
    layer: int,
    block_table: Tensor,
    contexts: Tensor,
    keep: Tensor,
    *,
    block_tokens: int,
    scale: float,
    first: int = 1,
    recent: int = 2,
) -> tuple[Tensor, Tensor]:
    """Choose the first block and the latest ones, as many in all as ``choose_blocks`` does."""
    found, shrunk = [], []
    for row, (context, most) in enumerate(zip(contexts.tolist(), keep.tolist(), strict=True)):
        blocks = -(-context // block_tokens)
        kept = min(blocks, max(most, first + recent))
        table = block_table[row]
        found.append(torch.cat((table[:first], table[blocks - kept + first : blocks])))
        shrunk.append(context - (blocks - kept) * block_tokens)
    chosen = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    wide = chosen.unsqueeze(1).expand(-1, summary.shape[2], -1).contiguous()
    return wide, torch.tensor(shrunk, dtype=torch.int32)


def best_blocks(
    weigh: Callable[[Tensor, Tensor, int, int], Tensor],
    q: Tensor,
    summary: Tensor,
    layer: int,
    block_table: Tensor,
    contexts: Tensor,
    keep: Tensor,
    *,
    block_tokens: int,
    scale: float,
    first: int = 1,
    recent: int = 2,
) -> tuple[Tensor, Tensor]:
    """Choose the blocks that ``weigh(heads * scale, slots, layer, context)`` gives the largest [KH, blocks]."""
    kv_heads, found, shrunk = summary.shape[2], [], []
    for row, (context, most) in enumerate(zip(contexts.tolist(), keep.tolist(), strict=True)):
        blocks = -(-context // block_tokens)
        kept = min(blocks, max(most, first + recent))
        slots = block_table[row, :blocks].long()
        weights = weigh(scale * q[row].float().view(kv_heads, -1, q.shape[2]), slots, layer, context)
        weights[:, :first] = weights[:, blocks - recent :] = torch.inf
        at = weights.topk(kept, dim=1).indices.sort(dim=1).values
        found.append(block_table[row][at].T)
        shrunk.append(context - (blocks - kept) * block_tokens)
    table = torch.nn.utils.rnn.pad_sequence(found, batch_first=True).permute(0, 2, 1).contiguous()
    return table, torch.tensor(shrunk, dtype=torch.int32)


def exact_weights(kv: Tensor, heads: Tensor, slots: Tensor, layer: int, context: int) -> Tensor:
    """Return the attention that each block gets, over the query heads of a key-value head."""
    keys = kv[slots, layer, 0].transpose(0, 1).flatten(1, 2)[:, :context].float()  # [KH, tokens, D]
    mass = torch.zeros(len(keys), len(slots) * SIZE)
    mass[:, :context] = (heads @ keys.transpose(1, 2)).softmax(dim=-1).sum(dim=1)
    return mass.view(len(keys), len(slots), SIZE).sum(dim=-1)


def range_weights(part: float, summary: Tensor, heads: Tensor, slots: Tensor, layer: int, context: int) -> Tensor:
    """Return what the engine's bound gives when a channel's range is ``part`` as wide, about the same middle."""
    lowest, highest = summary[slots[: context // SIZE], layer].float().unbind(2)  # [n, KH, D], of whole blocks
    middle, half = (lowest + highest) / 2, part * (highest - lowest) / 2
    scores = torch.einsum("kgd,nkd->kgn", heads, middle) + torch.einsum("kgd,nkd->kgn", heads.abs(), half)
    found = torch.zeros(len(heads), len(slots))
    found[:, : scores.shape[2]] = scores.softmax(dim=-1).sum(dim=1)
    return found


class Bench:
    """A runner with an arena whose slots are given out here, and token ids of a text."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        settings = kimicore.EngineConfig(
            dtype=options.dtype, sparse_decode=True, prefix_cache=False, kv_device_bytes=options.arena
        )
        loop = assemble(options.model, settings, None)
        self.runner = runner = cast(ModelRunner, loop.runner)
        self.tokenizer = loop.tokenizer
        self.model, self.arena, self.packer = runner.model, runner._arena, runner._packer
        self.text = self.tokenizer.encode(TEXT.read_text(), add_bos=False)
        bos = self.tokenizer.bos_id
        self.begin = [bos] if self.tokenizer.add_bos and bos is not None else []
        self.free: list[list[int]] = []
        self.reset()

    def reset(self) -> None:
        """Take every slot back: slabs are split between the KV classes by the size of their blocks."""
        arena = self.arena
        whole = sum(one.block_bytes for one in arena.classes)
        self.free, slab = [], 1
        for one, per in zip(arena.classes, arena.blocks_per_slab, strict=True):
            slabs = (arena.slabs - 1) * one.block_bytes // whole
            self.free.append(list(range(slab * per, (slab + slabs) * per))[::-1])
            slab += slabs

    def take(self, tokens: int) -> tuple[list[int], ...]:
        """Return slots for so many tokens, per KV class."""
        return tuple([[free.pop() for _ in range(-(-tokens // SIZE))] for free in self.free])

    def choose(self, choice: str) -> None:
        """Have blocks chosen in this way from here on."""
        found = []
        for layer in self.model._attention:
            ops = self.model.ops
            if choice == "latest":
                ops = evolve(ops, choose_blocks=latest_blocks)
            elif choice == "exact":
                weigh = partial(exact_weights, self.arena.views[layer.group])
                ops = evolve(ops, choose_blocks=partial(best_blocks, weigh))
            elif choice.startswith("range-"):
                part, summary = float(choice.removeprefix("range-")), self.arena.summaries[layer.group]
                if summary is not None:  # else a window's layer, which reads all that it sees
                    weigh = partial(range_weights, part, summary)
                    ops = evolve(ops, choose_blocks=partial(best_blocks, weigh))
            found.append(evolve(layer, ops=ops))
        self.model._attention = found

    def branch(self, row: Row, known: Sequence[int], more: int, share: float | None = None) -> Row:
        """Return a row that shares the whole blocks of what ``row`` has computed, with room for ``more`` tokens."""
        whole = row.computed // SIZE
        tails = self.take(row.computed % SIZE + more)
        if row.computed % SIZE:
            for view, table, tail in zip(self.arena.views, row.tables, tails, strict=True):
                view[tail[0]].copy_(view[table[whole]])
        tables = tuple([table[:whole] + tail for table, tail in zip(row.tables, tails, strict=True)])
        return Row(list(known), tables, row.computed, row.computed, share)

    def step(self, rows: Sequence[Row], count: int = 1, *, sample: bool = True) -> BoundStep:
        """Return a step that computes ``count`` tokens of every row."""
        bound = []
        for number, row in enumerate(rows):
            plan = RowPlan(number, row.computed, count, logits_at="last" if sample else "none")
            bound.append(
                BoundRow(
                    plan,
                    row.known,
                    row.prompt_tokens,
                    row.tables,
                    sample,
                    SamplingParams(temperature=0.0),
                    0,
                    0,
                    (),
                    row.computed + count,
                    share=row.share,
                )
            )
        widest = max(len(table) for row in rows for table in row.tables)
        return BoundStep(0, tuple(bound), Shape(count * len(rows), len(rows), widest))

    def logits(self, rows: Sequence[Row], among: Sequence[int] | None = None) -> Tensor:
        """Compute a token of every row, all of which read alike, and return the logits of these rows."""
        with torch.inference_mode():
            batch = self.packer.pack(self.step(rows))
            hidden = self.model.forward(batch, self.arena.views, (), self.arena.summaries)
            logits: Tensor = self.model.logits(hidden if among is None else hidden[list(among)])
            return logits

    def mark(self) -> list[list[int]]:
        """Return which slots are free now, for :meth:`restore`."""
        return [list(free) for free in self.free]

    def restore(self, mark: list[list[int]]) -> None:
        """Take back what was taken since then."""
        self.free = mark

    def prefill(self, row: Row, tokens: int) -> None:
        """Compute the row's first ``tokens`` tokens with full attention."""
        while row.computed < tokens:
            count = min(CHUNK, tokens - row.computed)
            self.runner.run(self.step([row], count, sample=False))
            row.computed += count

    def window(self, end: int, tokens: int, more: int = 0) -> list[int]:
        """Return the ``tokens`` ids before place ``end`` of the text (a begin token counts), and ``more`` behind it."""
        low = end - tokens + len(self.begin)
        return [*self.begin, *self.text[low : end + more]]
