"""Rounding of one matrix with an eye on its inputs: scales by output error, and error-compensated rounding."""

from __future__ import annotations

from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.model.packed.rounding import (
    SCALE_DTYPE,
    code_limits,
    codes_for,
    group_scales,
    group_width,
    integer_format,
    packed_from,
)
from kimicore.policies.precision.formats import NumberFormat
from kimicore.quantize.statistics import InputStatistics

__all__ = ["Compensation", "compensated", "searched_scales", "with_searched_scales"]

_SHRINKS: Final = tuple(1.0 - 0.04 * step for step in range(13))  # of the largest weight that the codes still reach
_ROW_ELEMENTS: Final = 1 << 21
_BLOCK: Final = 128


@frozen
class Compensation:
    """Settings of error-compensated rounding: ``damping`` as a share of the mean diagonal, and ``act_order``.

    ``act_order``: columns are rounded in the order of their inputs' energy, the largest first; groups stay neighbours.
    """

    damping: float = 0.01
    act_order: bool = True


def _grouped(weight: Tensor, width: int) -> Tensor:
    short = -weight.shape[1] % width
    whole = torch.nn.functional.pad(weight, (0, short)) if short else weight
    return whole.reshape(len(weight), -1, width)


def searched_scales(weight: Tensor, form: NumberFormat, inputs: InputStatistics) -> Tensor:
    """Return scales [O, G] bfloat16 of a weight [O, C] whose groups, each for itself, err least in the output.

    Tried are ranges from the whole group down to half of it: what is cut off there may cost less than the finer steps
    save. Below eight bits the side of the largest weight may have the one code more.
    """
    width = group_width(form, weight.shape[1])
    blocks = inputs.blocks(width)
    step = max(1, _ROW_ELEMENTS // weight.shape[1])
    return torch.cat([_searched(_grouped(rows, width), form, blocks) for rows in torch.split(weight.float(), step)])


def _searched(groups: Tensor, form: NumberFormat, blocks: Tensor) -> Tensor:
    low, high = code_limits(form)
    smallest = torch.finfo(SCALE_DTYPE).tiny
    top, bottom = groups.amax(dim=-1), groups.amin(dim=-1)
    largest = torch.maximum(top, -bottom)
    sign = torch.where(top > -bottom, -1.0, 1.0)
    best = (largest / high).clamp_min_(smallest).to(SCALE_DTYPE)
    least = torch.full_like(largest, torch.inf)
    for codes, signs in ((high, torch.ones_like(sign)), (-low, sign)):
        for shrink in _SHRINKS:
            scale = (signs * (largest * shrink / codes).clamp_min_(smallest)).to(SCALE_DTYPE)
            wrong = codes_for(groups, scale, form).mul_(scale.float().unsqueeze(-1)).sub_(groups)
            error = (torch.einsum("ogw,gwv->ogv", wrong, blocks) * wrong).sum(dim=-1)
            better = error < least
            best = torch.where(better, scale, best)
            least = torch.where(better, error, least)
        if form.bits == 8:
            break
    return best


def _rounded(weight: Tensor, scales: Tensor, form: NumberFormat) -> PackedWeight:
    width = group_width(form, weight.shape[1])
    codes = codes_for(_grouped(weight, width), scales, form).reshape(len(weight), -1)[:, : weight.shape[1]]
    return packed_from(codes, scales, form)


def with_searched_scales(weight: Tensor, precision: str, inputs: InputStatistics) -> PackedWeight:
    """Return a weight [O, C] rounded to nearest with scales of :func:`searched_scales`."""
    form = integer_format(precision)
    return _rounded(weight.float(), searched_scales(weight, form, inputs), form)


def compensated(
    weight: Tensor, precision: str, inputs: InputStatistics, settings: Compensation | None = None
) -> PackedWeight:
    """Return a weight [O, C] rounded column by column, the columns still to come making up for each one's error.

    That is GPTQ (Frantar et al. 2022, arXiv:2210.17323): with H the inputs' Gram matrix and U the upper Cholesky factor
    of its inverse, the error of column i, divided by U[i, i], is taken off the columns behind it in proportion to U[i].
    Scales are those of :func:`searched_scales`, found beforehand, so that groups are of neighbours in any order.
    Channels that the inputs never reach are rounded to nearest.
    """
    settings = settings or Compensation()
    form = integer_format(precision)
    outs, depth = weight.shape
    width = group_width(form, depth)
    scales = searched_scales(weight, form, inputs)
    energy = inputs.gram.diagonal()
    order = torch.argsort(energy, descending=True, stable=True) if settings.act_order else torch.arange(depth)
    factor = _factor(inputs.gram, order, settings.damping)
    if factor is None:  # no inputs at all, or none that can be told apart
        return _rounded(weight.float(), group_scales(weight, form), form)
    left = weight.float()[:, order].contiguous()
    steps = scales.float()[:, order // width]
    low, high = code_limits(form)
    codes = torch.empty((outs, depth))
    for start in range(0, depth, _BLOCK):
        stop = min(start + _BLOCK, depth)
        errors = torch.empty((outs, stop - start))
        block = left[:, start:stop].clone()
        for at in range(start, stop):
            column, scale = block[:, at - start], steps[:, at]
            code = torch.round(column / scale).clamp_(low, high)
            codes[:, at] = code
            error = (column - code * scale) / factor[at, at]
            block[:, at - start :].addr_(error, factor[at, at:stop], alpha=-1.0)
            errors[:, at - start] = error
        left[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1.0)
    restored = torch.empty_like(codes)
    restored[:, order] = codes
    return packed_from(restored, scales, form)


def _factor(gram: Tensor, order: Tensor, damping: float) -> Tensor | None:
    """Return the upper Cholesky factor [C, C] float32 of the inverse of a damped Gram matrix in an order of columns."""
    whole = gram.double()[order][:, order]
    diagonal = whole.diagonal()
    mean = float(diagonal.mean())
    if not mean > 0.0:
        return None
    diagonal[diagonal == 0.0] = mean
    for _ in range(6):
        damped = whole + torch.eye(len(whole), dtype=torch.float64) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                found: Tensor = upper.float()
                return found
        damping = max(10.0 * damping, 1e-6)
    return None
