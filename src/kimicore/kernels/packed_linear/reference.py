"""The oracle of products with packed weights: the weight as it is meant, and torch's product with it."""

from __future__ import annotations

import torch
from torch import Tensor

from kimicore.kernels.packed_linear.layout import PackedWeight, unpack_codes
from kimicore.kernels.packed_linear.tiled import TiledWeight, untiled

__all__ = ["arrange", "packed_linear", "packed_rows", "unpack"]


def _grouped(values: Tensor, supers: Tensor | None) -> Tensor:
    """Return scales or offsets [O, G] in float32, both levels multiplied."""
    if supers is None:
        return values.float()
    return values.float() * supers.float().repeat_interleave(values.shape[1] // supers.shape[1], dim=1)


def unpack(weight: PackedWeight, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
    """Return the weight [outs, depth] in ``dtype``, or the rows [n, depth] of the given numbers.

    Columns are in the weight's own order: those that ``order`` names.
    """

    def of(tensor: Tensor) -> Tensor:
        return tensor if rows is None else tensor.index_select(0, rows)

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(weight.group, dim=1)[:, : weight.depth]

    codes = unpack_codes(of(weight.codes), weight.depth, weight.bits).float()
    supers = None if weight.super_scales is None else of(weight.super_scales)
    scales = spread(_grouped(of(weight.scales), supers))
    codes -= weight.zero if weight.zeros is None else spread(of(weight.zeros).float())
    codes *= scales
    if weight.offsets is not None:
        supers = None if weight.super_offsets is None else of(weight.super_offsets)
        codes += spread(_grouped(of(weight.offsets), supers))
    return codes.to(dtype)


def packed_linear(
    x: Tensor, weight: PackedWeight | TiledWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return ``x @ weight.T + bias`` in x's dtype: x [T, C], bias [O] or None, result [T, O].

    The same as the dense product with :func:`unpack`. ``out``: write the result there, a view [T, O] whose rows are
    contiguous.
    """
    if isinstance(weight, TiledWeight):
        weight = untiled(weight)
    if weight.order is not None:
        x = x.index_select(1, weight.order.long())
    y = torch.nn.functional.linear(x, unpack(weight, x.dtype), bias)
    return y if out is None else out.copy_(y)


def packed_rows(weight: PackedWeight | TiledWeight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of the weight, as an embedding is read: rows [n] int64, result [n, C] in the input's order."""
    if isinstance(weight, TiledWeight):
        weight = untiled(weight)
    found = unpack(weight, dtype, rows)
    if weight.order is None:
        return found
    result = torch.empty_like(found)
    result[:, weight.order.long()] = found
    return result


def arrange(weight: PackedWeight) -> PackedWeight:
    """Return the weight as it is: products of the reference read it so."""
    return weight
