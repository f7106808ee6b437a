"""Products with packed weights: the bits of the dense product with what the weight means, for every way to keep it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kimicore.kernels.linear import native as dense
from kimicore.kernels.packed_linear import native, reference
from kimicore.kernels.packed_linear.layout import CODE_BITS, PackedWeight, pack_codes, row_bytes, unpack_codes

from .cases import guarded_outputs, implementations
from .tolerances import assert_close

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = [
    pytest.param(op.values[0], dtype, id=f"{op.id}-{dtype}")
    for dtype in DTYPES
    for op in implementations(native.load(dtype), reference=reference.packed_linear)
]
ROWS = [
    pytest.param(op.values[0], dtype, id=f"{op.id}-{dtype}")
    for dtype in DTYPES
    for op in implementations(native.load_rows(dtype), reference=reference.packed_rows)
]


def forged(
    outs: int, depth: int, bits: int, group: int, kind: str = "plain", seed: int = 0, order: bool = False
) -> PackedWeight:
    """Return a random weight: plain with one zero, with zeros per group, with offsets, or with two levels of both."""
    random = torch.Generator().manual_seed(seed + bits)
    codes = torch.randint(0, 1 << bits, (outs, depth), generator=random).to(torch.uint8)
    groups = -(-depth // group)
    given_: dict[str, Any] = {}
    scales = (torch.rand(outs, groups, generator=random) + 0.1) / (1 << bits) / 4
    if kind == "levels":
        runs = 2 if groups % 2 == 0 else 1
        given_["super_scales"] = (torch.rand(outs, runs, generator=random) / 4000).half()
        given_["super_offsets"] = (-torch.rand(outs, runs, generator=random) / 400).half()
        given_["offsets"] = torch.randint(0, 64, (outs, groups), generator=random).to(torch.uint8)
        scales = torch.randint(-127, 128, (outs, groups), generator=random).to(torch.int8)
    elif kind == "zeros":
        given_["zeros"] = (
            torch.randint(0, (1 << bits) + 1, (outs, groups), generator=random).clamp(max=255).to(torch.uint8)
        )
        scales = scales.half()
    elif kind == "offsets":
        given_["offsets"] = torch.randn(outs, groups, generator=random).bfloat16()
        scales = scales.bfloat16()
    else:
        given_["zero"] = 1 << bits - 1
    if order:
        given_["order"] = torch.randperm(depth, generator=random).to(torch.int32)
    return PackedWeight(outs, depth, bits, group, pack_codes(codes, bits), scales, **given_)


def by_hand(weight: PackedWeight, codes: Tensor) -> Tensor:
    """Return in float64 what the weight means, element by element of the definition."""
    meant = torch.empty(weight.shape, dtype=torch.float64)
    for o in range(weight.outs):
        for k in range(weight.depth):
            g = k // weight.group
            scale, offset = float(weight.scales[o, g]), 0.0
            if weight.super_scales is not None:
                scale *= float(weight.super_scales[o, g * weight.super_scales.shape[1] // weight.groups])
            if weight.offsets is not None:
                offset = float(weight.offsets[o, g])
                if weight.super_offsets is not None:
                    offset *= float(weight.super_offsets[o, g * weight.super_offsets.shape[1] // weight.groups])
            zero = weight.zero if weight.zeros is None else int(weight.zeros[o, g])
            meant[o, k] = scale * (int(codes[o, k]) - zero) + offset
    return meant


@given(st.integers(1, 5), st.integers(1, 200), st.sampled_from(CODE_BITS), st.randoms(use_true_random=False))
def test_codes_come_back(outs: int, depth: int, bits: int, random: Any) -> None:
    """Codes of every width and number come back as they were, and what pads a row is 0."""
    codes = torch.tensor([[random.randrange(1 << bits) for _ in range(depth)] for _ in range(outs)], dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (outs, row_bytes(depth, bits))
    assert torch.equal(unpack_codes(packed, depth, bits), codes)
    padded = -(-depth // 64) * 64
    assert not unpack_codes(packed, padded, bits)[:, depth:].any()


KINDS = ("plain", "zeros", "offsets", "levels")
SHAPES = [(5, 128, 32), (33, 576, 64), (3, 83, 83), (40, 96, 16), (2, 200, 48), (7, 256, 128), (1, 17, 17)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize(("outs", "depth", "group"), SHAPES)
def test_reference_means_what_the_layout_says(outs: int, depth: int, group: int, bits: int, kind: str) -> None:
    """The reference's weight is the definition's, computed element by element, to float32's rounding."""
    weight = forged(min(outs, 6), depth, bits, group, kind)
    exact = by_hand(weight, unpack_codes(weight.codes, depth, bits))
    assert torch.allclose(reference.unpack(weight, torch.float32).double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize(("outs", "depth", "group"), SHAPES)
@pytest.mark.parametrize(("op", "dtype"), ROWS)
def test_rows_are_the_weight_s_own(
    op: Any, dtype: torch.dtype, outs: int, depth: int, group: int, bits: int, kind: str, order: bool
) -> None:
    """Rows that are read, in any order and twice, are those of the whole weight, bit for bit."""
    weight = forged(outs, depth, bits, group, kind, order=order)
    rows = torch.tensor([outs - 1, 0, outs // 2, outs - 1])
    whole = torch.empty(weight.shape, dtype=dtype)
    columns = torch.arange(depth) if weight.order is None else weight.order.long()
    whole[:, columns] = reference.unpack(weight, dtype)
    with guarded_outputs():
        assert torch.equal(op(weight, rows, dtype), whole[rows])
    assert op(weight, rows[:0], dtype).shape == (0, depth)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize(("outs", "depth", "group"), SHAPES)
@pytest.mark.parametrize(("op", "dtype"), OPS)
def test_product_is_the_dense_one(
    op: Any, dtype: torch.dtype, outs: int, depth: int, group: int, bits: int, kind: str
) -> None:
    """A product with a packed weight has the bits of the dense product with the unpacked one, for few rows and many.

    Where there are matrix tiles, the dense product of bfloat16 sums in another order than weights that lie row by row.
    """
    weight = forged(outs, depth, bits, group, kind)
    plain = reference.unpack(weight, dtype)
    native_dense = dense.load(dtype)[0]
    same = native_dense if op is not reference.packed_linear else torch.nn.functional.linear
    if dtype == torch.bfloat16 and op is not reference.packed_linear and native.load_int8(dtype)[0] is not None:
        same = None
    random = torch.Generator().manual_seed(1)
    for rows in (0, 1, 3, 17, 33, 70):
        x = torch.randn(rows, depth + 3, generator=random).to(dtype)[:, 1 : depth + 1]
        bias = torch.randn(outs, generator=random).to(dtype) if rows % 2 else None
        with guarded_outputs():
            found = op(x, weight, bias)
        if same is not None:
            assert torch.equal(found, same(x, plain, bias)), rows
        exact = x.double() @ plain.double().T + (0 if bias is None else bias.double())
        assert_close("linear", found, exact, dtype)


@pytest.mark.parametrize(("op", "dtype"), OPS)
def test_order_and_place(op: Any, dtype: torch.dtype) -> None:
    """Columns out of order meet their own inputs, and a result goes into a part of a wider one and nowhere else."""
    weight = forged(19, 96, 4, 32, order=True)
    assert weight.order is not None
    meant = torch.empty(weight.shape, dtype=dtype)
    meant[:, weight.order.long()] = reference.unpack(weight, dtype)
    x = torch.randn(6, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    wide = torch.full((6, 40), 7.0, dtype=dtype)
    op(x, weight, None, wide[:, 11:30])
    assert_close("linear", wide[:, 11:30], x.double() @ meant.double().T, dtype)
    assert (wide[:, :11] == 7).all() and (wide[:, 30:] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_does_not_fit_is_refused(dtype: torch.dtype) -> None:
    """A native product refuses inputs of another width or type instead of reading beyond them."""
    op, reason = native.load(dtype)
    if op is None:
        pytest.skip(reason)
    weight = forged(8, 64, 4, 32)
    for x in (torch.ones(2, 63, dtype=dtype), torch.ones(2, 64, dtype=torch.float64), torch.ones(64, 2, dtype=dtype).T):
        with pytest.raises(ValueError, match="do not fit"):
            op(x, weight)
    with pytest.raises(ValueError, match="do not fit"):
        op(torch.ones(2, 64, dtype=dtype), weight, None, torch.empty(2, 9, dtype=dtype))
    rows, _ = native.load_rows(dtype)
    assert rows is not None
    for bad in ([8], [-1], [0, 9]):
        with pytest.raises(IndexError):
            rows(weight, torch.tensor(bad), dtype)


def test_parts_that_do_not_fit_together_are_refused() -> None:
    """A weight whose parts have other sizes or types than its description says is never made."""
    good = forged(8, 64, 4, 32, "levels")
    parts = {name: getattr(good, name) for name in ("codes", "scales", "offsets", "super_scales", "super_offsets")}
    sizes: dict[str, int] = {"outs": 8, "depth": 64, "bits": 4, "group": 32}
    PackedWeight(**sizes, **parts)
    for change in ({"outs": 9}, {"depth": 65}, {"bits": 7}, {"group": 24}, {"group": 0}, {"bits": 5}):
        with pytest.raises(ValueError, match="fit together"):
            PackedWeight(**{**sizes, **change}, **parts)
    for name, wrong in {
        "codes": good.codes.to(torch.int32),
        "scales": good.scales.float().double(),
        "offsets": good.offsets[:, :1] if good.offsets is not None else None,
        "super_scales": None,
    }.items():
        with pytest.raises(ValueError, match="fit together"):
            PackedWeight(**sizes, **{**parts, name: wrong})


def test_bytes_are_counted() -> None:
    """The bytes of a weight are its codes' and its scales'."""
    assert forged(10, 128, 4, 32).weight_bytes == 10 * (64 + 4 * 4)
    assert forged(10, 128, 8, 128, "zeros").weight_bytes == 10 * (128 + 2 + 1)
