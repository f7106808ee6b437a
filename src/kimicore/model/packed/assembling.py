"""A folder's quantized matrix from its parts: codes and scales are moved, no number of them is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kimicore.kernels.packed_linear.layout import CODE_BITS, PackedWeight, pack_codes, row_bytes
from kimicore.model.mapped import fault
from kimicore.model.packed.parts import Coded
from kimicore.model.packed.words import INTERLEAVED, spaced_codes, stream_codes

__all__ = ["assemble"]

_ROW_ELEMENTS: Final = 1 << 20
_ROW_STEP: Final = 32  # outputs in whole words of every number of bits


def assemble(folder: Path, coded: Coded, load: Callable[[str], Tensor]) -> PackedWeight:
    """Return a matrix of the parts that ``load`` reads as they are stored.

    Raises :class:`~kimicore.ModelLoadError` where a table of groups does not give each group its inputs.
    """
    outs, depth = coded.shape
    parts = {word: load(name) for word, name in coded.parts.items() if word != "weight_shape"}
    bits = 8 if coded.scheme.layout == "bytes" else next(one for one in CODE_BITS if one >= coded.scheme.bits)
    order = _order(folder, coded, parts)
    zeros = _zeros(coded, parts)
    zero = 1 << ((8 if coded.scheme.layout == "bytes" else coded.scheme.bits) - 1)
    if zeros is not None and int(zeros.min()) == int(zeros.max()):
        zero, zeros = int(zeros[0, 0]), None
    codes = torch.empty((outs, row_bytes(depth, bits)), dtype=torch.uint8)
    step = max(1, _ROW_ELEMENTS // depth // _ROW_STEP) * _ROW_STEP
    for start in range(0, outs, step):
        stop = min(start + step, outs)
        found = _codes(coded, parts, start, stop)
        if order is not None:
            found = found.index_select(1, order)
        codes[start:stop] = pack_codes(found, bits)
    return PackedWeight(
        outs,
        depth,
        bits,
        coded.group,
        codes,
        _scales(coded, parts),
        zero=zero,
        zeros=zeros,
        order=None if order is None else order.to(torch.int32),
    )


def _codes(coded: Coded, parts: dict[str, Tensor], start: int, stop: int) -> Tensor:
    """Return codes [n, C] uint8 of some outputs."""
    bits, depth = coded.scheme.bits, coded.shape[1]
    each = 32 // bits
    if coded.scheme.layout == "bytes":
        return parts["weight"][start:stop].view(torch.uint8) ^ 128  # signed bytes, 128 higher
    if coded.scheme.layout == "packed":
        return _of_words(coded, parts["weight_packed"][start:stop], depth)
    if coded.scheme.layout == "awq":
        return spaced_codes(parts["qweight"][:, start // each : stop // each], bits, INTERLEAVED).t().contiguous()
    return spaced_codes(parts["qweight"][:, start:stop].t().contiguous(), bits)


def _of_words(coded: Coded, words: Tensor, count: int) -> Tensor:
    """Return codes of compressed-tensors."""
    if coded.streamed:
        return stream_codes(words, coded.scheme.bits, count)
    return spaced_codes(words, coded.scheme.bits)[:, :count]


def _scales(coded: Coded, parts: dict[str, Tensor]) -> Tensor:
    """Return scales [O, G]."""
    outs, groups = coded.shape[0], coded.groups
    if "scales" in parts:
        return parts["scales"].t().contiguous()
    return parts["weight_scale"].reshape(-1, groups).expand(outs, groups).contiguous()


def _zeros(coded: Coded, parts: dict[str, Tensor]) -> Tensor | None:
    """Return the codes of zero [O, G] uint8, or None where all are the middle one."""
    (outs, groups), bits = (coded.shape[0], coded.groups), coded.scheme.bits
    if coded.scheme.layout == "awq":
        return spaced_codes(parts["qzeros"], bits, INTERLEAVED).t().contiguous()
    if coded.scheme.layout == "gptq":
        found = spaced_codes(parts["qzeros"], bits)
        if coded.scheme.zeros_one_less:
            found = (found + 1) & ((1 << bits) - 1)
        return found.t().contiguous()
    if "weight_zero_point" not in parts:
        return None
    stored = parts["weight_zero_point"]
    if stored.dtype == torch.int32:
        return _of_words(coded, stored.t().contiguous(), outs).t().contiguous()
    middle = 128 if coded.scheme.layout == "bytes" else 1 << (bits - 1)
    return (stored.to(torch.int16) + middle).to(torch.uint8).reshape(-1, groups).expand(outs, groups).contiguous()


def _order(folder: Path, coded: Coded, parts: dict[str, Tensor]) -> Tensor | None:
    """Return which input each column belongs to [C] int64, groups being neighbours; None where they are so already."""
    word = next((word for word in ("g_idx", "weight_g_idx") if word in parts), None)
    if word is None:
        return None
    of, depth = parts[word].to(torch.int64), coded.shape[1]
    expected = torch.full((coded.groups,), coded.group)
    expected[-1] = depth - coded.group * (coded.groups - 1)
    within = int(of.min()) >= 0 and int(of.max()) < coded.groups
    if not within or not torch.equal(torch.bincount(of, minlength=coded.groups), expected):
        name = coded.parts[word]
        raise fault(folder, f"tensor {name!r}", f"does not give each of {coded.groups} groups its {coded.group} inputs")
    order = torch.argsort(of, stable=True)
    return None if torch.equal(order, torch.arange(depth)) else order
