"""Rotary embeddings by themselves."""

from __future__ import annotations

import math

import torch
from attrs import evolve

from kimicore.model.rope import Rotary, inverse_frequencies
from kimicore.model.rope_fields import RopeSpec, read_rope

PLAIN = RopeSpec("default", 10_000.0, 16, 64, 64)
DYNAMIC = RopeSpec("dynamic", 10_000.0, 16, 64, 64, factor=4.0)


def test_frequencies_given_one_by_one() -> None:
    """A file that carries its rope factors as a tensor has each frequency divided by its own."""
    factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    config = {"rope_scaling": {"rope_type": "factors", "factors": factors}}
    rope = read_rope(config, theta=10_000.0, head_dim=16, trained=64)
    assert torch.allclose(inverse_frequencies(rope) * torch.tensor(factors), inverse_frequencies(PLAIN), rtol=1e-6)


def test_an_angle_depends_on_its_token_alone() -> None:
    """A token's cosines and sines are the same bits alone, in any batch and beside any other dynamic length."""
    positions = torch.arange(0, 5000, 7)
    rope_tokens = torch.where(positions % 2 == 0, 64, 64 + positions)
    rotary = Rotary([PLAIN, DYNAMIC, evolve(PLAIN, kind="linear", factor=3.0)])
    together = rotary.cos_sin(positions, rope_tokens)
    for index in (0, 1, 2, 333, len(positions) - 1):
        alone = rotary.cos_sin(positions[index : index + 1], rope_tokens[index : index + 1])
        for (cos, sin), (cos_alone, sin_alone) in zip(together, alone, strict=True):
            assert torch.equal(cos[index], cos_alone[0])
            assert torch.equal(sin[index], sin_alone[0])


def test_dynamic_frequencies_are_the_formula() -> None:
    """A stretched dynamic rope has the base theta * (factor * n / trained - factor + 1) ** (d / (d - 2))."""
    for length in (65, 100, 256):
        base = 10_000.0 * (4.0 * length / 64 - 3.0) ** (16 / 14)
        expected = torch.tensor([1 / math.pow(base, 2 * i / 16) for i in range(8)])
        assert torch.allclose(inverse_frequencies(DYNAMIC, length), expected, rtol=1e-6)
    for length in (0, 1, 64):
        assert torch.equal(inverse_frequencies(DYNAMIC, length), inverse_frequencies(PLAIN))
