"""Product, normalization, rotary embedding and activation: every implementation against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimicore.errors import ConfigError
from kimicore.kernels.gated_act import native as native_gated_act
from kimicore.kernels.gated_act import reference as gated_act
from kimicore.kernels.linear import native as native_linear
from kimicore.kernels.linear import reference as linear
from kimicore.kernels.linear.floor import row_invariant_linear
from kimicore.kernels.rms_norm import native as native_rms_norm
from kimicore.kernels.rms_norm import reference as rms_norm
from kimicore.kernels.rotary_write import native as native_rotary
from kimicore.kernels.rotary_write import reference as rotary_write

from .cases import guarded_outputs, implementations
from .tolerances import DTYPES, assert_close

NORMS = implementations(native_rms_norm.load(), reference=rms_norm.rms_norm)
ROTARIES = implementations(native_rotary.load(), reference=rotary_write.rotary_write)
GATES = implementations(native_gated_act.load(), reference=gated_act.gated_act)
SIZES = [(1, 576), (3, 64), (33, 83), (5, 3), (130, 640)]


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("op", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_norm(op: Any, dtype: torch.dtype, wide: bool, size: tuple[int, int]) -> None:
    """The normalization of the rounded sum is the float64 one, with a weight of either type; the sum is exact."""
    x, residual = noise(1, *size).to(dtype), noise(2, *size).to(dtype)
    weight = noise(3, size[1]).to(torch.float32 if wide else dtype)
    with guarded_outputs():
        y, total = op(x, weight, 1e-5, residual)
    assert torch.equal(total, x + residual) and y.dtype == dtype
    exact = total.double()
    exact = exact / (exact.pow(2).sum(-1, keepdim=True) / size[1] + 1e-5).sqrt()
    assert_close("rms_norm", y, exact * weight.double(), dtype)
    alone, same = op(x, weight, 1e-5)
    assert same is x
    assert torch.equal(alone, op(x, weight, 1e-5, torch.zeros_like(x))[0])


@pytest.mark.parametrize("op", NORMS)
def test_norm_of_heads(op: Any) -> None:
    """Heads [T, H, D] that lie inside a wider product are normalized as they lie, each for itself."""
    wide, weight = noise(1, 5, 9 * 24), noise(2, 24)
    heads = wide[:, 48:192].view(5, 6, 24)
    y, _ = op(heads, weight, 1e-6)
    expected = rms_norm.rms_norm(heads.reshape(30, 24).double(), weight.double(), 1e-6)[0]
    assert y.shape == (5, 6, 24)
    assert_close("rms_norm", y.reshape(30, 24), expected, torch.float32)


@pytest.mark.parametrize("op", NORMS)
def test_norm_keeps_nan_in_its_row(op: Any) -> None:
    """A row that is not finite gives NaN; the others do not."""
    x = noise(1, 4, 40)
    x[2, 7] = torch.inf
    y, _ = op(x, torch.ones(40), 1e-6)
    assert y[2].isnan().any() and y[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("op", ROTARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim", "block_tokens"), [((9, 3), 64, 16), ((4, 1), 256, 32), ((2, 2), 26, 64)])
def test_rotary(op: Any, dtype: torch.dtype, heads: tuple[int, int], dim: int, block_tokens: int) -> None:
    """Queries and keys turn as complex numbers do, and the cache changes at the given slots of the layer alone."""
    tokens, (h, kh) = 21, heads
    product = noise(1, tokens, (h + 2 * kh) * dim).to(dtype)
    q, k, v = (
        part.unflatten(1, (-1, dim)) for part in product.split((h * dim, kh * dim, kh * dim), dim=1)
    )  # fmt: skip
    angle = torch.arange(tokens).unsqueeze(1) * noise(2, dim // 2).double().abs()
    slots = torch.randperm(4 * block_tokens, generator=torch.Generator().manual_seed(3))[:tokens]
    kv = torch.full((4, 3, 2, kh, block_tokens, dim), torch.nan, dtype=dtype)

    def turned(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
        return torch.cat((pairs.real, pairs.imag), dim=-1)

    expected_q, expected_k, plain_v, plain_k = turned(q), turned(k), v.clone(), k.clone()
    op(q, k, v, angle.cos().float(), angle.sin().float(), kv, 1, slots)
    assert_close("rotary_write", q, expected_q, dtype)
    assert torch.equal(k, plain_k) and torch.equal(v, plain_v)
    at = slots // block_tokens, slots % block_tokens
    assert_close("rotary_write", kv[at[0], 1, 0, :, at[1]], expected_k, dtype)
    assert torch.equal(kv[at[0], 1, 1, :, at[1]], plain_v)
    kv[at[0], 1, :, :, at[1]] = torch.nan
    assert kv.isnan().all()


@pytest.mark.parametrize("op", implementations(native_rotary.load()))
def test_rotary_refuses_slots_outside(op: Any) -> None:
    """A slot outside of the cache is refused before anything is written."""
    kv, q = torch.zeros(2, 1, 2, 1, 16, 8), noise(1, 2, 1, 8)
    plain = q.clone()
    for slot in (-1, 32):
        with pytest.raises(ValueError, match="slot"):
            op(q, q, q, torch.zeros(2, 4), torch.ones(2, 4), kv, 0, torch.tensor([3, slot]))
    assert not kv.any() and torch.equal(q, plain)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_gated_activation(op: Any, dtype: torch.dtype, size: tuple[int, int]) -> None:
    """Both activations are the float64 ones, from large negative to large positive numbers, NaN included."""
    tokens, width = size
    x = (6 * noise(1, tokens, 2 * width)).to(dtype)
    x[0, 0], x[0, 1], x[-1, 2] = -100, 100, torch.nan
    gate, up = x.double().chunk(2, dim=1)
    exact = {"silu": gate * torch.sigmoid(gate), "gelu_tanh": torch.nn.functional.gelu(gate, approximate="tanh")}
    for kind, act in exact.items():
        with guarded_outputs():
            found = op(x, kind)
        assert found[-1, 2].isnan() and found.isnan().sum() == 1
        assert_close("gated_act", found.nan_to_num(), (act * up).nan_to_num(), dtype)
    with pytest.raises(ConfigError, match="relu"):
        op(x, "relu")


def products(dtype: torch.dtype) -> list[Any]:
    """The products that serve ``dtype``."""
    return [pytest.param(op.values[0], dtype, id=f"{op.id}-{dtype}") for op in implementations(
        native_linear.load(dtype), reference=linear.linear, padded=row_invariant_linear(9)
    )]  # fmt: skip


@pytest.mark.parametrize(("op", "dtype"), [p for dtype in DTYPES for p in products(dtype)])
@given(tokens=st.integers(1, 80), outs=st.integers(1, 40), depth=st.integers(1, 300), biased=st.booleans())
def test_product(op: Any, dtype: torch.dtype, tokens: int, outs: int, depth: int, biased: bool) -> None:
    """The product is the float64 one for any size, with and without a bias."""
    x, weight, bias = noise(1, tokens, depth).to(dtype), noise(2, outs, depth).to(dtype), noise(3, outs).to(dtype)
    with guarded_outputs():
        found = op(x, weight, bias if biased else None)
    exact = torch.einsum("tc,oc->to", x.double(), weight.double()) + (bias.double() if biased else 0)
    assert found.shape == (tokens, outs)
    assert_close("linear", found, exact, dtype)
