"""Products with inputs of 8 bits and weights in tiles: near the exact product of the rounded inputs, row by row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kimicore.kernels.packed_linear import native, reference
from kimicore.kernels.packed_linear.layout import CODE_BITS, PackedWeight
from kimicore.kernels.packed_linear.tiled import tiled

from .cases import guarded_outputs
from .test_packed_linear import KINDS, SHAPES, forged

Product = Callable[..., Tensor]


@pytest.fixture(scope="module")
def product() -> Product:
    """The native product of bytes."""
    found, reason = native.load_int8(torch.bfloat16)
    if found is None:
        pytest.skip(reason)
    return found


def rounded(x: Tensor) -> Tensor:
    """Return rows in float64, rounded to 127 steps of their largest."""
    step = x.float().abs().amax(dim=1, keepdim=True) / 127
    return torch.where(step > 0, (x.float() / step).round() * step, 0.0).double()


def near(found: Tensor, x: Tensor, weight: PackedWeight, share: float) -> bool:
    """Whether results are within bfloat16's rounding of the product of rounded inputs, and a share of its terms."""
    meant = reference.unpack(weight, torch.float32).double()
    exact, terms = rounded(x) @ meant.T, rounded(x).abs() @ meant.abs().T
    return bool(((found.double() - exact).abs() <= exact.abs() / 250 + terms * share + 1e-6).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize(("outs", "depth", "group"), [*SHAPES, (50, 1000, 1000)])
def test_product_of_bytes_is_near_the_exact_one(
    product: Product, outs: int, depth: int, group: int, bits: int, kind: str
) -> None:
    """The product of rounded inputs is met within what a rounding of the weights to 8 bits a row allows."""
    weight = forged(outs, depth, bits, group, kind)
    own = tiled(weight)
    noise = torch.Generator().manual_seed(4)
    for rows in (1, 5, 16, 17, 33, 70):
        x = torch.randn(rows, depth + 3, generator=noise).bfloat16()[:, 1 : depth + 1]
        with guarded_outputs():
            found = product(x, own)
        assert near(found, x, weight, 0.02), rows


def test_weights_of_8_bits_a_row_are_not_rounded_again(product: Product) -> None:
    """Weights that have one scale a row and use all of its range are met as they are."""
    weight = forged(40, 512, 8, 512)
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(4)).bfloat16()
    assert near(product(x, tiled(weight)), x, weight, 0.003)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", CODE_BITS)
def test_row_of_bytes_is_the_same_in_every_batch(product: Product, bits: int, kind: str) -> None:
    """A row has the same bits alone as among others, and one that is not finite shows in its own results alone."""
    own = tiled(forged(37, 192, bits, 32, kind))
    x = torch.randn(41, 192, generator=torch.Generator().manual_seed(6)).bfloat16()
    whole = product(x, own)
    for rows in (1, 2, 15, 16, 17, 32, 33, 40):
        assert torch.equal(product(x[:rows], own), whole[:rows]), rows
        assert torch.equal(product(x[-rows:], own), whole[-rows:]), rows
    for bad in (0, 16, 40):
        for value in (torch.nan, torch.inf, -torch.inf):
            spoiled = x.clone()
            spoiled[bad, 100] = value
            found = product(spoiled, own)
            others = torch.arange(41) != bad
            assert torch.equal(found[others], whole[others])
            assert not found[bad].isfinite().any()


def test_extreme_rows_and_weights(product: Product) -> None:
    """Rows of zeros give zeros, tiny ones nothing but tiny results, and outputs whose weights are 0 give the bias."""
    weight = forged(20, 128, 4, 32)
    weight.scales[3] = 0.0
    own = tiled(weight)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(6)).bfloat16()
    x[1] = 0.0
    x[2] = 1e-39
    bias = torch.arange(20).bfloat16()
    found = product(x, own, bias)
    assert torch.equal(found[1], bias) and torch.equal(found[:, 3], bias[3].expand(3))
    assert (found[2] - bias).abs().max() == 0
    wide = torch.full((3, 40), 7.0, dtype=torch.bfloat16)
    product(x, own, bias, wide[:, 11:31])
    assert torch.equal(wide[:, 11:31], found) and (wide[:, :11] == 7).all() and (wide[:, 31:] == 7).all()


def test_negative_scales(product: Product) -> None:
    """A scale may be negative, as some roundings choose it."""
    weight = forged(20, 128, 4, 32)
    weight.scales[::2] *= -1
    x = torch.randn(33, 128, generator=torch.Generator().manual_seed(6)).bfloat16()
    assert near(product(x, tiled(weight)), x, weight, 0.02)
