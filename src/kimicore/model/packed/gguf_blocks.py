"""GGUF's blocks as packed weights: their codes and scales are moved, no number of them is changed."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from kimicore.kernels.packed_linear.layout import CODE_BITS, PackedWeight, pack_codes
from kimicore.model.dequantize import QuantType, Split
from kimicore.model.mapped import Bytes

__all__ = ["pack_blocks"]

_ROW_ELEMENTS: Final = 1 << 20


def pack_blocks(raw: Bytes, kind: QuantType, shape: tuple[int, int], rows: Tensor | None = None) -> PackedWeight | None:
    """Return a matrix [O, C] of whole blocks, or None for a type that has no codes.

    ``raw``: the blocks of all rows, one after the other. ``rows`` [O] int64: where each of them belongs. A few
    megabytes are used beside the result. A scale that is infinite or no number stays so, and makes its weights NaN.
    """
    if kind.split is None:
        return None
    outs, depth = shape
    by_row = raw.reshape(outs, -1)
    step = max(1, _ROW_ELEMENTS // depth)
    parts: dict[str, Tensor] = {}
    bits = zero = 0
    for start in range(0, outs, step):
        chunk = by_row[start : start + step]
        split = kind.split(chunk.reshape(-1, kind.block_bytes))
        bits, zero = _held(split.bits), split.zero
        target = torch.arange(start, start + len(chunk)) if rows is None else rows[start : start + len(chunk)]
        for name, part in _tensors(split, len(chunk), bits).items():
            if name not in parts:
                parts[name] = torch.empty((outs, *part.shape[1:]), dtype=part.dtype)
            parts[name].index_copy_(0, target, part)
    group = depth // parts["scales"].shape[1]
    return PackedWeight(
        outs,
        depth,
        bits,
        group,
        parts["codes"],
        parts["scales"],
        zero=zero,
        offsets=parts.get("offsets"),
        super_scales=parts.get("super_scales"),
        super_offsets=parts.get("super_offsets"),
    )


def _held(bits: int) -> int:
    """Return the bits that codes of ``bits`` are kept in."""
    return next(one for one in CODE_BITS if one >= bits)


def _tensors(split: Split, rows: int, bits: int) -> dict[str, Tensor]:
    """Return the parts of whole rows, each [rows, ...]."""
    found = {"codes": pack_codes(torch.from_numpy(split.codes).reshape(rows, -1), bits)}
    for name in ("scales", "offsets", "super_scales", "super_offsets"):
        values = getattr(split, name)
        if values is not None:
            found[name] = torch.from_numpy(
                np.array(values).reshape(rows, -1)
            )  # a copy: the file's map cannot be written
    return found
