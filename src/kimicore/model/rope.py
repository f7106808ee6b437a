"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) and their scaled variants."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kimicore.model.rope_fields import RopeSpec

__all__ = ["Rotary", "inverse_frequencies"]


def inverse_frequencies(rope: RopeSpec, rope_tokens: int = 0) -> Tensor:
    """Return the angle per position of each pair of dimensions, float32 [D/2].

    ``rope_tokens`` is the length that stretches a dynamic rope; up to the trained length it is the plain rope.
    """
    if rope.kind == "dynamic":
        return _plain(_stretched_theta(rope, rope_tokens), rope.head_dim)
    plain = _plain(rope.theta, rope.head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "factors":
        return plain / torch.tensor(rope.factors, dtype=torch.float32)
    if rope.kind == "yarn":
        return _yarn(rope)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return plain


def _powers(theta: float, head_dim: int) -> Tensor:
    return torch.pow(theta, torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _plain(theta: float, head_dim: int) -> Tensor:
    return 1.0 / _powers(theta, head_dim)


def _stretched_theta(rope: RopeSpec, rope_tokens: int) -> float:
    """Return the base of dynamic NTK scaling.

    A length under the trained one would make the stretch negative and its power complex, so it is the plain rope.
    """
    length = max(rope_tokens, rope.trained_tokens)
    stretch = rope.factor * length / rope.trained_tokens - (rope.factor - 1.0)
    return float(rope.theta * stretch ** (rope.head_dim / (rope.head_dim - 2)))


def _yarn(rope: RopeSpec) -> Tensor:
    """Peng et al. 2023, arXiv:2309.00071: high frequencies stay, low ones are interpolated, a ramp between."""
    dim = rope.head_dim

    def dimension_of(rotations: float) -> float:
        return dim * math.log(rope.original_tokens / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _powers(rope.theta, dim)
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones stay, a smooth step between."""
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = 2 * math.pi / plain
    smooth = (rope.original_tokens / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    stretched = torch.where(wavelength > rope.original_tokens / low, plain / rope.factor, between)
    return torch.where(wavelength < rope.original_tokens / high, plain, stretched)


class Rotary:
    """The rotary embeddings of a model, ready to give a step's cosines and sines."""

    def __init__(self, ropes: Sequence[RopeSpec]) -> None:
        self._ropes = tuple(ropes)
        self._frequencies = tuple(inverse_frequencies(rope) for rope in ropes)

    def cos_sin(self, positions: Tensor, rope_tokens: Tensor | None = None) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return ``(cos, sin)``, float32 [T, D/2] each, for every rope of the model.

        ``positions`` [T] int64; ``rope_tokens`` [T] int64: the length that fixes the factor of a dynamic rope, per
        token, None where no row is over the trained length.
        """
        column = positions.to(torch.float32).unsqueeze(1)
        return tuple(
            self._one(rope, self._per_token(rope, frequencies, rope_tokens), column)
            for rope, frequencies in zip(self._ropes, self._frequencies, strict=True)
        )

    @staticmethod
    def _per_token(rope: RopeSpec, frequencies: Tensor, rope_tokens: Tensor | None) -> Tensor:
        if rope.kind != "dynamic" or rope_tokens is None:
            return frequencies
        lengths, which = torch.unique(rope_tokens.clamp_min(rope.trained_tokens), return_inverse=True)
        if lengths.tolist() == [rope.trained_tokens]:
            return frequencies
        # One short vector per length: a token's frequencies never depend on what else is in the step.
        return torch.stack([inverse_frequencies(rope, length) for length in lengths.tolist()])[which]

    @staticmethod
    def _one(rope: RopeSpec, frequencies: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        # The float32 angle is part of the definition. Its cosine is taken in float64 and rounded, so that a
        # vector unit's treatment of an array's last elements cannot show in the result.
        angles = (column * frequencies).to(torch.float64)
        cos, sin = angles.cos().to(torch.float32), angles.sin().to(torch.float32)
        if rope.attention_factor != 1.0:
            cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
        return cos, sin
