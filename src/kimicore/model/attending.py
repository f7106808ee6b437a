"""Attention of a batch whose rows read the cache in different ways, and what their whole blocks need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from kimicore.kernels.registry import Ops
from kimicore.model.batch import Batch, Part, Whole

__all__ = ["LayerAttention"]


@frozen(eq=False)
class LayerAttention:
    """One layer's attention: ``group`` of layers and ``place`` in it, and how it attends."""

    ops: Ops
    group: int
    place: int
    scale: float
    window: int | None
    softcap: float | None

    def attend(self, q: Tensor, batch: Batch, arenas: Sequence[Tensor], summaries: Sequence[Tensor | None]) -> Tensor:
        """Return the attention output [T, H, D] of queries [T, H, D] over what the batch's rows can see."""
        if not batch.parts:
            tables, rows = batch.block_tables[self.group], (batch.row_starts, batch.contexts)
            return self._paged(q, arenas[self.group], tables, *rows)
        found = [self._part(q[part.first : part.last], part, arenas, summaries) for part in batch.parts]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _paged(self, q: Tensor, kv: Tensor, table: Tensor, row_starts: Tensor, contexts: Tensor) -> Tensor:
        return self.ops.paged_attention(
            q,
            kv,
            self.place,
            table,
            row_starts,
            contexts,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )

    def _part(self, q: Tensor, part: Part, arenas: Sequence[Tensor], summaries: Sequence[Tensor | None]) -> Tensor:
        kv, table = arenas[part.views[self.group]], part.block_tables[self.group]
        if part.bits:
            return self.ops.quantized_attention(
                q,
                kv,
                part.bits,
                arenas[self.group],
                self.place,
                table,
                part.tails[self.group],
                part.row_starts,
                part.contexts,
                scale=self.scale,
                window=self.window,
                softcap=self.softcap,
            )
        summary = summaries[self.group] if part.keep is not None and self.window is None else None
        if part.keep is None or summary is None:
            return self._paged(q, kv, table, part.row_starts, part.contexts)
        rows = len(part.contexts)
        chosen, contexts = self.ops.choose_blocks(
            q[:rows],
            summary,
            self.place,
            table,
            part.contexts,
            part.keep,
            block_tokens=kv.shape[4],
            scale=self.scale,
        )
        return self._paged(q, kv, chosen, part.row_starts, contexts)

    def finish(self, whole: Whole, arenas: Sequence[Tensor], summaries: Sequence[Tensor | None]) -> None:
        """Pack or summarize this layer of blocks that have become whole."""
        sources = whole.sources[self.group]
        if whole.bits:
            packed, targets = arenas[whole.views[self.group]], whole.targets[self.group]
            self.ops.kv_quantize(arenas[self.group], self.place, sources, packed, targets, whole.bits)
            return
        summary = summaries[self.group]
        if summary is not None:
            self.ops.key_summary(arenas[self.group], self.place, sources, summary)
