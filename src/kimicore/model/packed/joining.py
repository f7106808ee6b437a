"""Packed weights in one: joined along their outputs, cut, compared, expanded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from attrs import evolve
from torch import Tensor

from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.kernels.packed_linear.reference import packed_rows
from kimicore.kernels.packed_linear.tiled import TiledWeight

__all__ = ["expand", "first_rows", "form_of", "joined", "same_form"]

_ROW_ELEMENTS: Final = 1 << 20
_BY_ROW = ("codes", "scales", "zeros", "offsets", "super_scales", "super_offsets")


def same_form(a: PackedWeight, b: PackedWeight) -> bool:
    """Return whether two weights can be one: whether their rows are laid out alike and mean the same."""
    if (a.depth, a.bits, a.group, a.zero) != (b.depth, b.bits, b.group, b.zero):
        return False
    for name in _BY_ROW:
        mine, other = getattr(a, name), getattr(b, name)
        if (mine is None) != (other is None):
            return False
        if mine is not None and (mine.dtype, mine.shape[1:]) != (other.dtype, other.shape[1:]):
            return False
    if a.order is None or b.order is None:
        return a.order is b.order
    return torch.equal(a.order, b.order)


def joined(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Return weights of one form as one, their rows one after the other."""
    if len(parts) == 1:
        return parts[0]
    found: dict[str, Any] = {"outs": sum([part.outs for part in parts])}
    for name in _BY_ROW:
        tensors = [getattr(part, name) for part in parts]
        if tensors[0] is not None:
            found[name] = torch.cat(tensors)
    return evolve(parts[0], **found)


def first_rows(weight: PackedWeight, count: int) -> PackedWeight:
    """Return the first ``count`` rows of a weight, sharing its memory."""
    if count == weight.outs:
        return weight
    parts = {name: getattr(weight, name) for name in _BY_ROW}
    return evolve(weight, outs=count, **{name: part[:count] for name, part in parts.items() if part is not None})


def expand(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the weight [O, C] in ``dtype``, columns in the input's order, using a few megabytes beside it."""
    result = torch.empty(weight.shape, dtype=dtype)
    step = max(1, _ROW_ELEMENTS // weight.depth)
    for start in range(0, weight.outs, step):
        rows = torch.arange(start, min(start + step, weight.outs))
        result[start : start + len(rows)] = packed_rows(weight, rows, dtype)
    return result


def form_of(weight: PackedWeight | TiledWeight) -> str:
    """Return what a weight is kept as, in words such as "4 bits in groups of 32 with offsets"."""
    found = f"{weight.bits} bits in " + ("rows" if weight.group == weight.depth else f"groups of {weight.group}")
    extras = [
        name
        for name, part in (("zeros", weight.zeros), ("offsets", weight.offsets), ("order", weight.order))
        if part is not None
    ]
    return found + (f" with {' and '.join(extras)}" if extras else "")
