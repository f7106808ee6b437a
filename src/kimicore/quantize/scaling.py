"""Activation-aware scaling: channels whose inputs are large get finer steps, and what feeds them is divided instead.

The idea is AWQ's (Lin et al. 2023, arXiv:2306.00978). A matrix W with inputs x is the same as W s with inputs x / s.
The division costs nothing where it can be put into what makes the inputs: a norm's weight, or the rows of the matrix
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kimicore.model.packed.rounding import SCALE_DTYPE, code_limits, codes_for, group_width, integer_format
from kimicore.policies.precision.formats import NumberFormat
from kimicore.quantize.statistics import InputStatistics

__all__ = ["channel_scales", "fold_into_norm"]

_EXPONENTS: Final = tuple(step / 10 for step in range(1, 10))
_ROWS: Final = 512  # of each matrix are enough to choose by: every channel is in each of them
_MOST: Final = 1e4  # the largest scale over the smallest: beyond it, sixteen bits of what is divided would suffer


def channel_scales(matrices: Sequence[tuple[Tensor, str]], inputs: InputStatistics) -> Tensor:
    """Return scales [C] of the input channels that several matrices [O, C] share, each with its precision.

    Tried are powers of the mean absolute input, alone and over a power of the mean absolute weight; chosen is what errs
    least in the outputs of all matrices together, ones included. Their geometric mean is about 1.
    """
    forms = [(_some_rows(weight), integer_format(precision)) for weight, precision in matrices]
    ones = torch.ones(matrices[0][0].shape[1])
    best, least = ones, _error(forms, inputs, ones)
    acts = inputs.mean_abs
    if not bool((acts > 0.0).any()):
        return ones
    acts = acts.clamp_min(float(acts.max()) / _MOST)
    weights = torch.stack([weight.abs().mean(dim=0) for weight, _ in forms]).mean(dim=0)
    weights = weights.clamp_min(float(weights.max()) / _MOST) if bool((weights > 0.0).any()) else ones
    for exponent in _EXPONENTS:
        for divisor in (ones, weights.pow(1.0 - exponent)):
            scales = acts.pow(exponent) / divisor
            scales = scales / torch.sqrt(scales.max() * scales.min())
            scales = scales.clamp(_MOST**-0.5, _MOST**0.5)
            error = _error(forms, inputs, scales)
            if error < least:
                best, least = scales, error
    return best


def _some_rows(weight: Tensor) -> Tensor:
    return weight[:: -(-len(weight) // _ROWS)].contiguous()


def _error(forms: Sequence[tuple[Tensor, NumberFormat]], inputs: InputStatistics, scales: Tensor) -> float:
    total = 0.0
    for weight, form in forms:
        wrong = _plainly_rounded(weight * scales, form).div_(scales).sub_(weight)
        total += float(inputs.error(wrong).sum())
    return total


def _plainly_rounded(weight: Tensor, form: NumberFormat) -> Tensor:
    """Return a weight as the plainest scales make it, whose last code is the largest weight of the group."""
    depth = weight.shape[1]
    width = group_width(form, depth)
    short = -depth % width
    groups = (torch.nn.functional.pad(weight, (0, short)) if short else weight).reshape(len(weight), -1, width)
    largest = groups.abs().amax(dim=-1) / code_limits(form)[1]
    steps = largest.clamp_min_(torch.finfo(SCALE_DTYPE).tiny).to(SCALE_DTYPE)
    found = codes_for(groups, steps, form) * steps.float().unsqueeze(-1)
    return found.reshape(len(weight), -1)[:, :depth].contiguous()


def fold_into_norm(norm: Tensor, scales: Tensor, dtype: torch.dtype, *, unit: bool) -> tuple[Tensor, Tensor]:
    """Return a norm's weight [C] divided by ``scales``, and the scales [C] that this is exactly.

    The norm's weight is rounded to ``dtype``, in which it will be kept, and the scales are what the rounded weight
    divides by, so that the matrices behind it make up for the rounding as well. ``unit``: the norm multiplies with
    1 + weight. Channels that the norm makes 0 keep their weight and have a scale of 1.
    """
    one = 1.0 if unit else 0.0
    whole = norm + one
    kept = (whole / scales - one).to(dtype).float()
    exact = whole / (kept + one)
    usable = torch.isfinite(exact) & (exact > 0.0)
    return torch.where(usable, kept, norm), torch.where(usable, exact, torch.ones_like(exact))
