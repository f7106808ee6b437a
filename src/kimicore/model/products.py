"""Products with weights, whatever form these have: plain, packed, or a stack of both."""

from __future__ import annotations

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
    "Stack",
    "Table",
    "Weight",
    "arranged",
    "arranged_parts",
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


def packed_product(ops: Ops) -> tuple[bool, str]:
    """Return whether products with packed weights have a native version, and why it is so.

    Where they have none, a packed weight would be expanded anew in every product: it is better expanded at load.
    """
    for origin in ops.origins:
        if origin.op == "packed_linear":
            return origin.implementation == "native", origin.why
    return False, "no native version"


def product(ops: Ops, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: x [T, C], weight [O, C], bias [O] or None, result [T, O]."""
    if isinstance(weight, Tensor):
        return ops.linear(x, weight, bias)
    if not isinstance(weight, Stack):
        return ops.packed_linear(x, weight, bias)
    result = x.new_empty((len(x), weight.shape[0]))
    start = 0
    for part in weight.parts:
        stop = start + part.shape[0]
        own = None if bias is None else bias[start:stop]
        if isinstance(part, Tensor):
            result[:, start:stop] = ops.linear(x, part, own)
        else:
            ops.packed_linear(x, part, own, out=result[:, start:stop])
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
