"""Rounding of a weight to the integer formats of a precision map.

Scales are kept in bfloat16. It has float32's range, so that no scale overflows or vanishes, whatever the weights; its
eight significant bits cost nothing that can be measured, because codes are chosen for the scale as it was rounded; and
it is the type that most models are computed in, so that a program which casts scales to the model's type reads the same
numbers.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kimicore.errors import ConfigError, ModelLoadError
from kimicore.kernels.packed_linear.layout import PackedWeight, pack_codes
from kimicore.policies.precision.formats import PRECISIONS, NumberFormat

__all__ = [
    "SCALE_DTYPE",
    "check_weight",
    "code_limits",
    "codes_for",
    "group_scales",
    "group_width",
    "integer_format",
    "packed_from",
    "round_to_nearest",
]

SCALE_DTYPE: Final = torch.bfloat16
_SMALLEST: Final = torch.finfo(SCALE_DTYPE).tiny  # below it a scale would lose digits
_ROW_ELEMENTS: Final = 1 << 21
# Steps that the largest weight of a group may be: up to half a step beyond the last code nothing is lost by clipping.
_REACHES: Final = (0.0, 0.125, 0.25, 0.375, 0.5)


def integer_format(precision: str) -> NumberFormat:
    """Return the format of an integer precision; raises :class:`~kimicore.ConfigError` for any other name."""
    found = PRECISIONS.get(precision)
    if found is None or found.kind != "int":
        usable = ", ".join(one.name for one in PRECISIONS.values() if one.kind == "int")
        raise ConfigError(f"precision={precision!r}: a weight is rounded to one of {usable}")
    return found


def group_width(form: NumberFormat, depth: int) -> int:
    """Return how many neighbours in a row of ``depth`` share a scale."""
    return form.group or depth


def code_limits(form: NumberFormat) -> tuple[int, int]:
    """Return the lowest and the highest code, zero being 0.

    Eight bits leave out -128, as products with 8-bit activations want it.
    """
    half = 1 << (form.bits - 1)
    return (1 - half if form.bits == 8 else -half), half - 1


def check_weight(weight: Tensor, name: str) -> None:
    """Refuse what cannot be rounded; raises :class:`~kimicore.ModelLoadError` that names the tensor."""
    if weight.dim() != 2 or not weight.numel() or not weight.is_floating_point():
        raise ModelLoadError(
            f"{name}: {list(weight.shape)} {weight.dtype} is no matrix of floats: it cannot be rounded"
        )
    wrong = int((~torch.isfinite(weight)).sum())
    if wrong:
        row, column = torch.nonzero(~torch.isfinite(weight))[0].tolist()
        raise ModelLoadError(
            f"{name}: {wrong} of its weights are infinite or no numbers, the first at [{row}, {column}]: "
            "get the model's files again, or keep this tensor in 16 bits"
        )


def _grouped(weight: Tensor, width: int) -> Tensor:
    """Return a weight [O, C] as groups [O, G, width] in float32, the last one filled with zeros."""
    short = -weight.shape[1] % width
    whole = torch.nn.functional.pad(weight.float(), (0, short)) if short else weight.float()
    return whole.reshape(len(weight), -1, width)


def codes_for(weight: Tensor, scales: Tensor, form: NumberFormat) -> Tensor:
    """Return the nearest codes [..., width] float32 (zero is 0) of weights [..., width] with scales [...]."""
    low, high = code_limits(form)
    return torch.round(weight / scales.float().unsqueeze(-1)).clamp_(low, high)


def group_scales(weight: Tensor, form: NumberFormat) -> Tensor:
    """Return scales [O, G] bfloat16 of a weight [O, C], none of which costs a weight more than half a step.

    Eight bits: the largest of a row is the last code. Fewer: the scale of the least squared error among such as put the
    largest weight at most half a step behind the last code of its side. Where the other side ends earlier, the scale
    may be negative, which lends the larger side the one code more that the negative numbers have.
    """
    groups = _grouped(weight, group_width(form, weight.shape[1]))
    low, high = code_limits(form)
    top, bottom = groups.amax(dim=-1), groups.amin(dim=-1)
    largest = torch.maximum(top, -bottom)
    base = (largest / high).clamp_min_(_SMALLEST)
    best = base.to(SCALE_DTYPE)
    if form.bits == 8:
        return best
    least = torch.full_like(base, torch.inf)
    sign = torch.where(top > -bottom, -1.0, 1.0)
    other = torch.minimum(top, -bottom)
    for codes, signs in ((high, torch.ones_like(sign)), (-low, sign)):
        for reach in _REACHES:
            scale = (largest / (codes + reach)).clamp_min_(_SMALLEST).to(SCALE_DTYPE)
            steps = scale.float()
            fits = (largest <= (codes + 0.5) * steps) & (other <= (high + 0.5) * steps)
            scale = (signs * steps).to(SCALE_DTYPE)
            found = codes_for(groups, scale, form) * scale.float().unsqueeze(-1)
            error = ((found - groups) / base.unsqueeze(-1)).square_().sum(dim=-1)
            better = fits & (error < least)
            best = torch.where(better, scale, best)
            least = torch.where(better, error, least)
    return best


def packed_from(codes: Tensor, scales: Tensor, form: NumberFormat, order: Tensor | None = None) -> PackedWeight:
    """Return the packed weight of codes [O, C] (zero is 0; any number type) and scales [O, G]."""
    outs, depth = codes.shape
    zero = 1 << (form.bits - 1)
    group = depth if group_width(form, depth) >= depth else form.group
    kept = pack_codes((codes + zero).to(torch.uint8), form.bits)
    return PackedWeight(outs, depth, form.bits, group, kept, scales.contiguous(), zero=zero, order=order)


def round_to_nearest(weight: Tensor, precision: str, *, name: str = "weight") -> PackedWeight:
    """Return a weight [O, C] rounded to an integer precision, each group for itself.

    Symmetric: zero is the middle code. Where the group does not divide C, the last one is shorter. Each weight is at
    most half a step (its group's scale) from what it becomes. ``name``: what errors call the tensor.

    Raises :class:`~kimicore.ConfigError` for a precision that is no integer's, and :class:`~kimicore.ModelLoadError`
    for a weight that is no matrix of finite floats.
    """
    form = integer_format(precision)
    check_weight(weight, name)
    outs, depth = weight.shape
    width = group_width(form, depth)
    codes = torch.empty((outs, depth), dtype=torch.int8)
    scales = torch.empty((outs, -(-depth // width)), dtype=SCALE_DTYPE)
    step = max(1, _ROW_ELEMENTS // depth)
    for start in range(0, outs, step):
        rows = weight[start : start + step]
        scales[start : start + step] = own = group_scales(rows, form)
        found = codes_for(_grouped(rows, width), own, form)
        codes[start : start + step] = found.reshape(len(rows), -1)[:, :depth].to(torch.int8)
    return packed_from(codes.short(), scales, form)
