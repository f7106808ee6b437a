"""Products of 8-bit inputs with packed weights: the reference, and what stands in for it by another product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimicore.kernels.packed_linear import native, reference
from kimicore.kernels.packed_linear.layout import CODE_BITS
from kimicore.kernels.packed_linear.tiled import tiled
from kimicore.kernels.registry import describe, select_ops

from .test_packed_linear import forged
from .tolerances import DTYPES, assert_close

KINDS = ("plain", "zeros", "offsets", "levels")
NATIVE = [(dtype, native.load(dtype)[0]) for dtype in DTYPES]
OPS = [
    *(pytest.param(reference.packed_linear_int8, dtype, id=f"reference-{dtype}") for dtype in DTYPES),
    *(pytest.param(reference.after_rounding(reference.packed_linear), dtype, id=f"torch-{dtype}") for dtype in DTYPES),
    *(
        pytest.param(reference.after_rounding(op), dtype, id=f"native-{dtype}")
        for dtype, op in NATIVE
        if op is not None
    ),
]


def noise(rows: int, depth: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Return rows of very different sizes."""
    random = torch.Generator().manual_seed(seed)
    sizes = torch.rand(rows, 1, generator=random) * 4 - 3
    return (torch.randn(rows, depth, generator=random) * sizes.exp()).to(dtype)


def rounded_by_hand(x: torch.Tensor) -> torch.Tensor:
    """Return in float64 what x is once it is rounded, row by row from the definition."""
    found = torch.zeros(x.shape, dtype=torch.float64)
    for row, values in enumerate(x.float().tolist()):
        peak = torch.tensor(max(map(abs, values)), dtype=torch.float32)
        scale = float(peak / 127)
        for at, value in enumerate(values):
            ratio = float(torch.tensor(value, dtype=torch.float32) / torch.tensor(scale, dtype=torch.float32))
            found[row, at] = scale * max(-127, min(127, round(ratio))) if scale else 0.0
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize(("op", "dtype"), OPS)
def test_product_is_that_of_rounded_inputs(op: Any, dtype: torch.dtype, bits: int, kind: str) -> None:
    """The product is that of the rounded inputs with the weight as it is meant, plus a bias, for few rows and many.

    What stands in by another product has inputs and weight in its own dtype, as that product has.
    """
    weight = forged(19, 96, bits, 32, kind)
    held = torch.float32 if op is reference.packed_linear_int8 else dtype
    meant = reference.unpack(weight, held).double()
    for rows in (1, 3, 40):
        x = noise(rows, 99, dtype)[:, 1:97]
        bias = torch.randn(19, generator=torch.Generator().manual_seed(3)).to(dtype) if rows > 1 else None
        exact = rounded_by_hand(x).to(held).double() @ meant.T + (0 if bias is None else bias.double())
        assert_close("linear", op(x, weight, bias), exact, dtype)


@pytest.mark.parametrize(("op", "dtype"), OPS)
def test_order_and_place(op: Any, dtype: torch.dtype) -> None:
    """Columns out of order meet their own inputs, and a result goes into a part of a wider one and nowhere else."""
    weight = forged(19, 96, 4, 32, order=True)
    assert weight.order is not None
    meant = torch.empty(weight.shape, dtype=torch.float64)
    meant[:, weight.order.long()] = reference.unpack(weight, torch.float32).double()
    x = noise(6, 96, dtype)
    wide = torch.full((6, 40), 7.0, dtype=dtype)
    op(x, weight, None, wide[:, 11:30])
    assert_close("linear", wide[:, 11:30], rounded_by_hand(x) @ meant.T, dtype)
    assert (wide[:, :11] == 7).all() and (wide[:, 30:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_ordinary(dtype: torch.dtype) -> None:
    """A row of zeros gives the bias, one with NaN or an infinity gives NaN, and no neighbour notices."""
    weight, bias = forged(19, 96, 4, 32), torch.arange(19).to(dtype)
    x = noise(6, 96, dtype)
    x[1], x[2, 5], x[3, 7], x[4, 90] = 0.0, torch.nan, torch.inf, -torch.inf
    for op in (reference.packed_linear_int8, reference.after_rounding(reference.packed_linear)):
        found = op(x, weight, bias)
        assert torch.equal(found[1], bias)
        assert found[2:5].isnan().all()
        assert_close("linear", found[[0, 5]], op(x[[0, 5]], weight, bias).double(), dtype)
    assert reference.packed_linear_int8(x[:0], weight).shape == (0, 19)


def test_tiles_are_read() -> None:
    """A weight in tiles gives what it gives as it was before."""
    weight = forged(32, 128, 4, 32)
    x = noise(5, 128, torch.bfloat16)
    expected = reference.packed_linear_int8(x, weight)
    assert torch.equal(reference.packed_linear_int8(x, tiled(weight)), expected)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=12))
def test_rounding_is_near_and_symmetrical(values: list[float]) -> None:
    """No value is off by more than half a step, the largest is 127 steps, and the negative row has negative numbers."""
    x = torch.tensor([values], dtype=torch.float32)
    codes, scales = reference.rounded_rows(x)
    assert torch.equal(codes, codes.round()) and codes.abs().max() <= 127
    assert torch.equal(reference.rounded_rows(-x)[0], -codes)
    peak = float(x.abs().max())
    if peak > 1e-30:  # below, a float32 scale has few bits left
        assert codes.abs().max() == 127
        off = (codes.double() * scales.double() - x.double()).abs().max()
        assert off <= float(scales) * 0.5001
    if peak == 0:
        assert not codes.any() and not scales.any()


@pytest.mark.parametrize("kernels", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_engine_has_the_product(dtype: torch.dtype, kernels: bool) -> None:
    """The table of operations has it for every type, says by what, and it is near its reference."""
    ops = select_ops("cpu", dtype, native=kernels)
    assert [one[0] for one in describe(ops)].count("packed_linear_int8") == 1
    weight, x = forged(32, 128, 4, 32), noise(5, 128, dtype)
    found = ops.packed_linear_int8(x, ops.arrange(weight))
    assert_close("linear", found, reference.packed_linear_int8(x, weight).double(), dtype)
