"""A step's rows as one packed batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from attrs import define, frozen
from numpy.typing import NDArray

from kimicore.block_records import kinds_of
from kimicore.model.batch import Batch, Measured, Part, Whole
from kimicore.model.importance import MEASURED_QUERIES
from kimicore.model.kv_layout import BITS
from kimicore.policies.precision import ActivationPrecision
from kimicore.types import BoundRow, BoundStep, KVClass, KVPrecision

__all__ = ["Packer", "wanted"]

Ints = NDArray[np.int64]
Table = NDArray[np.int32]


def wanted(row: BoundRow) -> int:
    """Return how many of the row's last positions need logits."""
    if row.plan.logits_at == "all":
        return row.plan.count
    return 1 if row.sample else 0


@frozen
class _Kinds:
    """The KV classes of a precision, one per group of layers: of whole blocks, and of those that are being filled."""

    mains: tuple[int, ...]
    tails: tuple[int, ...]


@define(eq=False)
class _Rows:
    """What the packing of one step looks at: its rows in the batch's order, and per row counts and tables."""

    rows: Sequence[BoundRow]
    counts: Ints
    starts: Ints
    ends: Ints
    tables: list[Table]

    @property
    def contexts(self) -> Ints:
        return self.starts + self.counts


class Packer:
    """Packs steps for one engine.

    ``dynamic``: the model has a rope whose factor depends on a row's length. ``activations``: by position, where any
    are rounded to 8 bits.
    """

    def __init__(
        self,
        classes: Sequence[KVClass],
        block_tokens: int,
        *,
        dynamic: bool = False,
        activations: ActivationPrecision | None = None,
    ) -> None:
        self.block_tokens = block_tokens
        self._dynamic = dynamic
        self._activations = activations
        self._summaries = any(one.summaries for one in classes)
        self._kinds: dict[KVPrecision, _Kinds] = {}
        for precision, kinds in kinds_of(classes).items():
            mains = tuple([kind for kind in kinds if not classes[kind].tail])
            tails = tuple([kind for kind in kinds if classes[kind].tail])
            self._kinds[precision] = _Kinds(mains, tails or mains)
        self._plain = len(self._kinds) == 1 and not self._summaries

    def order(self, rows: Sequence[BoundRow]) -> list[int] | None:
        """Return the order in which the rows have to be packed, those that read alike together; None: as they are."""
        if self._plain:
            return None
        keys = [(row.precision, _sparse(row)) for row in rows]
        order = sorted(range(len(rows)), key=keys.__getitem__)
        return None if order == list(range(len(rows))) else order

    def pack(self, step: BoundStep) -> Batch:
        """Return the step's rows as one packed batch, padded with dummy tokens to the step's shape.

        Dummy tokens write to slot 0, which belongs to no request, and no row reads them. Rows that read alike have to
        stand together: see :meth:`order`.
        """
        rows = step.rows
        counts = np.fromiter((row.plan.count for row in rows), np.int64, len(rows))
        starts = np.fromiter((row.plan.start for row in rows), np.int64, len(rows))
        ends = np.cumsum(counts)
        real = int(ends[-1])
        total = max(real, step.shape.tokens)
        token_ids = np.zeros(total, np.int64)
        for row, begin, end in zip(rows, (ends - counts).tolist(), ends.tolist(), strict=True):
            token_ids[begin:end] = row.known[row.plan.start : row.plan.start + row.plan.count]
        of_row = np.repeat(np.arange(len(rows)), counts)
        positions = np.zeros(total, np.int64)
        positions[:real] = starts[of_row] + np.arange(real) - (ends - counts)[of_row]
        packed = _Rows(rows, counts, starts, ends, self._tables(step))
        groups = range(len(self._kinds["full"].mains))
        read = [packed.tables[self._kinds["full"].mains[group]] for group in groups]
        selected = [
            end - n + i for row, end in zip(rows, ends.tolist(), strict=True) for n in (wanted(row),) for i in range(n)
        ]
        rope_tokens = None
        if self._dynamic:
            lengths = np.zeros(total, np.int64)
            lengths[:real] = np.fromiter((row.rope_tokens for row in rows), np.int64, len(rows))[of_row]
            rope_tokens = torch.from_numpy(lengths)
        row_starts = np.zeros(len(rows) + 1, np.int32)
        row_starts[1:] = ends
        return Batch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            row_starts=torch.from_numpy(row_starts),
            contexts=torch.from_numpy(packed.contexts.astype(np.int32)),
            block_tables=tuple(torch.from_numpy(table) for table in read),
            slots=tuple(self._slots(packed, group, of_row, positions, real) for group in groups),
            rope_tokens=rope_tokens,
            selected=torch.tensor(selected, dtype=torch.int64),
            measured=_measured(step.measured, packed, read) if step.measured else None,
            parts=() if self._plain else self._parts(packed, total),
            whole=() if self._plain else self._whole(packed),
            middle=self._middle(rows, of_row, positions[:real]),
        )

    def _middle(self, rows: Sequence[BoundRow], of_row: Ints, positions: Ints) -> torch.Tensor:
        """Return the indices of tokens whose inputs are rounded to 8 bits [m]: ``of_row`` and ``positions`` [T].

        Neither how a prompt was cut into chunks nor what was generated since changes a token's class.
        """
        own = self._activations
        if own is None:
            return torch.empty(0, dtype=torch.int64)
        first, stop = own.span(np.fromiter((row.prompt_tokens for row in rows), np.int64, len(rows)))
        inside = (positions >= first) & (positions < stop[of_row])
        return torch.from_numpy(np.flatnonzero(np.where(inside, own.middle == "int8", own.ends == "int8")))

    def _tables(self, step: BoundStep) -> list[Table]:
        """Return per KV class the block tables [B, N]."""
        tables: list[Table] = []
        for index in range(len(step.rows[0].tables)):
            width = max(step.shape.blocks, max(len(row.tables[index]) for row in step.rows))
            table = np.zeros((len(step.rows), width), np.int32)
            for line, row in zip(table, step.rows, strict=True):
                line[: len(row.tables[index])] = row.tables[index]
            tables.append(table)
        return tables

    def _slots(self, packed: _Rows, group: int, of_row: Ints, positions: Ints, real: int) -> torch.Tensor:
        """Return the place in the group's full-precision view that each token is written to [T]."""
        size = self.block_tokens
        table = packed.tables[self._kinds["full"].mains[group]]
        for precision, kinds in self._kinds.items():
            if precision != "full":  # a row has a table in the classes of its own precision alone
                table = table + packed.tables[kinds.tails[group]]
        places = np.zeros(len(positions), np.int64)
        block = table[of_row, positions[:real] // size].astype(np.int64)
        places[:real] = block * size + positions[:real] % size
        return torch.from_numpy(places)

    def _parts(self, packed: _Rows, total: int) -> list[Part]:
        """Return the runs of rows that read alike; the last has the padding as well."""
        keys = [(row.precision, _sparse(row)) for row in packed.rows]
        edges = [at for at in range(len(keys)) if at == 0 or keys[at] != keys[at - 1]]
        found = []
        for low, high in zip(edges, [*edges[1:], len(keys)], strict=True):
            precision, sparse = keys[low]
            kinds = self._kinds[precision]
            first = int(packed.ends[low] - packed.counts[low])
            bounds = np.zeros(high - low + 1, np.int32)
            bounds[1:] = packed.ends[low:high] - first
            tails = kinds.tails if precision != "full" else ()
            found.append(
                Part(
                    first=first,
                    last=total if high == len(keys) else int(packed.ends[high - 1]),
                    row_starts=torch.from_numpy(bounds),
                    contexts=torch.from_numpy(packed.contexts[low:high].astype(np.int32)),
                    views=kinds.mains,
                    block_tables=tuple([torch.from_numpy(packed.tables[kind][low:high]) for kind in kinds.mains]),
                    bits=BITS.get(precision, 0),
                    tails=tuple([torch.from_numpy(packed.tables[kind][low:high]) for kind in tails]),
                    keep=self._keep(packed, low, high) if sparse else None,
                )
            )
        return found

    def _keep(self, packed: _Rows, low: int, high: int) -> torch.Tensor:
        blocks = -(-packed.contexts[low:high] // self.block_tokens)
        shares = [row.share or 1.0 for row in packed.rows[low:high]]
        kept = [math.ceil(share * count) for share, count in zip(shares, blocks.tolist(), strict=True)]
        return torch.tensor(kept, dtype=torch.int32)

    def _whole(self, packed: _Rows) -> list[Whole]:
        """Return what has to be done with the blocks that become whole in this step."""
        size = self.block_tokens
        found = []
        for precision, kinds in self._kinds.items():
            if precision == "full" and not self._summaries:
                continue
            spans = [
                (at, first, last)
                for at, row in enumerate(packed.rows)
                if row.precision == precision
                for first, last in [(int(packed.starts[at]) // size, int(packed.contexts[at]) // size)]
                if last > first
            ]
            if spans:
                sources = tuple([_gathered(packed.tables[kind], spans) for kind in kinds.tails])
                targets = tuple([_gathered(packed.tables[kind], spans) for kind in kinds.mains])
                packs = precision != "full"
                found.append(
                    Whole(BITS.get(precision, 0), sources, kinds.mains if packs else (), targets if packs else ())
                )
        return found


def _sparse(row: BoundRow) -> bool:
    """Whether a row's query reads a part of its context: it is of a token that was generated."""
    return row.share is not None and row.plan.count == 1 and row.plan.start >= row.prompt_tokens


def _gathered(table: Table, spans: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([table[at, first:last] for at, first, last in spans]))


def _measured(rows: Sequence[int], packed: _Rows, tables: Sequence[Table]) -> Measured:
    """Return the last queries of these rows."""
    chosen = np.asarray(rows, np.int64)
    few = np.minimum(packed.counts[chosen], MEASURED_QUERIES)
    row_starts = np.zeros(len(chosen) + 1, np.int32)
    row_starts[1:] = np.cumsum(few)
    tokens = np.repeat(packed.ends[chosen] - row_starts[1:], few) + np.arange(row_starts[-1])
    return Measured(
        tokens=torch.from_numpy(tokens),
        row_starts=torch.from_numpy(row_starts),
        contexts=torch.from_numpy(packed.contexts[chosen].astype(np.int32)),
        block_tables=tuple(torch.from_numpy(table[chosen]) for table in tables),
    )
