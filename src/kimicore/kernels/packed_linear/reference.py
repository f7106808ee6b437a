"""The oracle of products with packed weights: the weight as it is meant, and torch's product with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kimicore.kernels.packed_linear.layout import PackedWeight, unpack_codes
from kimicore.kernels.packed_linear.tiled import TiledWeight, untiled

if TYPE_CHECKING:
    from kimicore.kernels.ops import PackedLinearInt8Op, PackedLinearOp

__all__ = ["after_rounding", "arrange", "packed_linear", "packed_linear_int8", "packed_rows", "rounded_rows", "unpack"]

_MOST_CODE = 127


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


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [T, C] in 8 bits: whole numbers from -127 to 127 in float32 [T, C], and each row's scale [T, 1].

    A row's scale is its largest absolute value / 127, and x is about numbers times scale. A row of zeros has zeros, and
    one that is not finite the scale NaN.
    """
    wide = x.float()
    peaks = wide.abs().amax(dim=1, keepdim=True)
    scales = torch.where(peaks.isfinite(), peaks / _MOST_CODE, torch.nan)
    codes = (wide / torch.where(scales == 0, 1.0, scales)).round_().clamp_(-_MOST_CODE, _MOST_CODE)
    return codes, scales


def packed_linear_int8(
    x: Tensor, weight: PackedWeight | TiledWeight, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Return :func:`packed_linear` with inputs that are rounded to 8 bits row by row, see :func:`rounded_rows`.

    The whole numbers are multiplied with the weight as it is meant, in float32; sums are scaled and get their bias
    before they are rounded to x's dtype. A row that is not finite gives NaN.
    """
    if isinstance(weight, TiledWeight):
        weight = untiled(weight)
    codes, scales = rounded_rows(x if weight.order is None else x.index_select(1, weight.order.long()))
    y = torch.nn.functional.linear(codes, unpack(weight, torch.float32)) * scales
    if bias is not None:
        y += bias.float()
    return y.to(x.dtype) if out is None else out.copy_(y)


def after_rounding(product: PackedLinearOp) -> PackedLinearInt8Op:
    """Return :func:`packed_linear_int8` by another product: inputs are rounded, and multiplied as numbers of x's dtype.

    In a 16-bit dtype they are rounded once more to it.
    """

    def packed_linear_int8(
        x: Tensor, weight: PackedWeight | TiledWeight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        codes, scales = rounded_rows(x)
        return product(codes.mul_(scales).to(x.dtype), weight, bias, out)

    return packed_linear_int8


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
