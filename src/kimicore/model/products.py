"""Products with weights, whatever form these have: plain, packed, or a stack of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch
from attrs import field, frozen
from torch import Tensor

from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.kernels.packed_linear.tiled import TiledWeight

if TYPE_CHECKING:
    from kimicore.kernels.ops import ArrangeOp
    from kimicore.kernels.registry import Ops

__all__ = [
    "Halves",
    "Stack",
    "Table",
    "Weight",
    "arranged",
    "arranged_parts",
    "by_halves",
    "holds_codes",
    "lookup",
    "packed_product",
    "product",
    "tensors_of",
]


Table: TypeAlias = Tensor | PackedWeight | TiledWeight
"""A weight of one form."""


@frozen(eq=False)
class Stack:
    """Weights of one product that have not one form, in the order of their outputs: [O1, C], [O2, C] and so on."""

    parts: tuple[Table, ...] = field(repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return sum([part.shape[0] for part in self.parts]), self.parts[0].shape[1]


Weight: TypeAlias = Table | Stack


@frozen(eq=False)
class Halves:
    """The rows of a product's inputs by how they enter it: ``rounded`` to 8 bits [m], or as they are [r].

    Both are indices in ascending order, int64; together they are all rows.
    """

    rounded: Tensor
    plain: Tensor

    @classmethod
    def of(cls, rows: int, rounded: Tensor) -> Halves | None:
        """Return the halves of so many rows, or None where none is rounded."""
        if not len(rounded):
            return None
        inside = torch.zeros(rows, dtype=torch.bool)
        inside[rounded] = True
        return cls(rounded, (~inside).nonzero().flatten())

    def among(self, chosen: Tensor) -> Halves | None:
        """Return the halves of the chosen rows [n], by their places among these."""
        inside = torch.zeros(len(self.rounded) + len(self.plain), dtype=torch.bool)
        inside[self.rounded] = True
        return self.of(len(chosen), inside[chosen].nonzero().flatten())


def packed_product(ops: Ops) -> tuple[bool, str]:
    """Return whether products with packed weights have a native version, and why it is so.

    Where they have none, a packed weight would be expanded anew in every product: it is better expanded at load.
    """
    for origin in ops.origins:
        if origin.op == "packed_linear":
            return origin.implementation == "native", origin.why
    return False, "no native version"


def holds_codes(weight: Weight) -> bool:
    """Return whether a weight is packed, or a part of it."""
    if isinstance(weight, Stack):
        return any([not isinstance(part, Tensor) for part in weight.parts])
    return not isinstance(weight, Tensor)


def by_halves(x: Tensor, halves: Halves | None, compute: Callable[[Tensor, bool], Tensor]) -> Tensor:
    """Return ``compute(rows of x, whether they are rounded)`` for each half, the results [T, O] in x's order."""
    if halves is None:
        return compute(x, False)
    if not len(halves.plain):
        return compute(x, True)
    rounded = compute(x.index_select(0, halves.rounded), True)
    result = rounded.new_empty((len(x), rounded.shape[1]))
    result.index_copy_(0, halves.rounded, rounded)
    return result.index_copy_(0, halves.plain, compute(x.index_select(0, halves.plain), False))


def product(ops: Ops, x: Tensor, weight: Weight, bias: Tensor | None = None, *, int8: bool = False) -> Tensor:
    """Return ``x @ weight.T + bias``: x [T, C], weight [O, C], bias [O] or None, result [T, O].

    ``int8``: x is rounded to 8 bits for what is packed of the weight.
    """
    if isinstance(weight, Tensor):
        return ops.linear(x, weight, bias)
    packed = ops.packed_linear_int8 if int8 else ops.packed_linear
    if not isinstance(weight, Stack):
        return packed(x, weight, bias)
    result = x.new_empty((len(x), weight.shape[0]))
    start = 0
    for part in weight.parts:
        stop = start + part.shape[0]
        own = None if bias is None else bias[start:stop]
        if isinstance(part, Tensor):
            result[:, start:stop] = ops.linear(x, part, own)
        else:
            packed(x, part, own, out=result[:, start:stop])
        start = stop
    return result


def lookup(ops: Ops, table: Table, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a table [V, C] in ``dtype``: ids [n] int64, result [n, C]."""
    if isinstance(table, Tensor):
        return torch.nn.functional.embedding(ids, table)
    return ops.packed_rows(table, ids, dtype)


def arranged(arrange: ArrangeOp | None, table: Table) -> Table:
    """Return a table in the form that this machine's products read, where it is packed; ``arrange`` None: as it is."""
    return arrange(table) if arrange is not None and isinstance(table, PackedWeight) else table


def arranged_parts(arrange: ArrangeOp | None, weight: Weight) -> Weight:
    """Return a weight with all its parts so."""
    if isinstance(weight, Stack):
        return Stack(tuple([arranged(arrange, part) for part in weight.parts]))
    return arranged(arrange, weight)


def tensors_of(weight: Weight | None) -> tuple[Tensor, ...]:
    """Return the tensors that a weight consists of."""
    if weight is None:
        return ()
    if isinstance(weight, Tensor):
        return (weight,)
    if not isinstance(weight, Stack):
        return weight.tensors
    return tuple([tensor for part in weight.parts for tensor in tensors_of(part)])
