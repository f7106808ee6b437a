"""Given texts through a model: the final hidden states at the positions whose next token is scored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from kimicore.kv.arena import Arena, slab_bytes
from kimicore.model.kv_layout import kv_classes
from kimicore.model.packing import Packer
from kimicore.model.transformer import Transformer
from kimicore.sampling_params import SamplingParams
from kimicore.types import BoundRow, BoundStep, RowPlan, Shape

__all__ = ["ForcedText", "Forcing", "batches_of"]

BATCH_TOKENS = 1024
BLOCK_TOKENS = 16


@frozen
class ForcedText:
    """Tokens that a model is led through: those from ``first`` on are scored, each given all before it.

    ``prompt_tokens``: how many of them count as the prompt, which a token's class of position depends on.
    """

    tokens: tuple[int, ...]
    first: int
    prompt_tokens: int

    @property
    def computed(self) -> int:
        """Positions that are computed: nothing reads the last token."""
        return len(self.tokens) - 1

    @property
    def targets(self) -> tuple[int, ...]:
        """The tokens that are scored."""
        return self.tokens[self.first :]


def batches_of(texts: Sequence[ForcedText]) -> tuple[tuple[int, ...], ...]:
    """Return indices of ``texts`` in batches of at most 1,024 tokens, in order; a longer text is one alone."""
    found: list[list[int]] = []
    room = 0
    for index, one in enumerate(texts):
        if one.computed > room or not found:
            found.append([])
            room = BATCH_TOKENS
        found[-1].append(index)
        room -= one.computed
    return tuple([tuple(one) for one in found])


class Forcing:
    """Runs batches of given texts through one model, over KV memory of its own."""

    def __init__(self, model: Transformer, texts: Sequence[ForcedText], batches: Sequence[Sequence[int]]) -> None:
        self.model, self._texts, self._batches = model, texts, batches
        classes = kv_classes(model.spec, str(model.dtype).removeprefix("torch."), BLOCK_TOKENS)
        blocks = max(sum(_blocks(texts[index]) for index in batch) for batch in batches)
        slab = slab_bytes(classes)
        slabs = [-(-blocks * one.block_bytes // slab) for one in classes]
        self._arena = Arena(classes, (1 + sum(slabs)) * slab)
        # Each class has slabs of its own, behind slab 0, which takes what padding writes.
        before = [1 + sum(slabs[:index]) for index in range(len(classes))]
        self._first = [at * each for at, each in zip(before, self._arena.blocks_per_slab, strict=True)]
        dynamic = any(rope.kind == "dynamic" for rope in model.spec.ropes)
        self._packer = Packer(classes, BLOCK_TOKENS, dynamic=dynamic, activations=model.activations)

    def hidden(self, number: int) -> Tensor:
        """Return the final hidden states [n, C] that the batch's scored tokens are predicted from, text by text."""
        batch = self._batches[number]
        rows: list[BoundRow] = []
        kept: list[int] = []
        start = used = 0
        for index in batch:
            one = self._texts[index]
            rows.append(self._row(one, used))
            kept += range(start + one.first - 1, start + one.computed)
            start += one.computed
            used += _blocks(one)
        shape = Shape(start, len(rows), max(len(row.tables[0]) for row in rows))
        with torch.inference_mode():
            packed = self._packer.pack(BoundStep(number, tuple(rows), shape))
            states = self.model.forward(packed, self._arena.views, (), self._arena.summaries)
            return states.index_select(0, torch.tensor(kept))

    def _row(self, one: ForcedText, used: int) -> BoundRow:
        """Return a text as a row that is computed whole, its blocks behind the ``used`` ones of each class."""
        blocks = _blocks(one)
        tables = tuple([range(first + used, first + used + blocks) for first in self._first])
        plan = RowPlan(0, 0, one.computed, logits_at="all")
        params = SamplingParams(temperature=0.0)
        return BoundRow(plan, one.tokens, one.prompt_tokens, tables, False, params, 0, 0, (), len(one.tokens))


def _blocks(one: ForcedText) -> int:
    return -(-one.computed // BLOCK_TOKENS)
