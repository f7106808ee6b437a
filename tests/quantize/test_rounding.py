"""Rounding a weight: finite scales, half a step, every last column, and errors that name the tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kimicore.errors import ConfigError, ModelLoadError
from kimicore.kernels.packed_linear.layout import PackedWeight, unpack_codes
from kimicore.kernels.packed_linear.reference import unpack
from kimicore.model.packed.rounding import integer_format, round_to_nearest
from kimicore.policies.precision import PRECISIONS

INTEGERS = [one.name for one in PRECISIONS.values() if one.kind == "int"]


def steps_of(packed: PackedWeight) -> Tensor:
    """The size of a step at each weight [O, C]."""
    return packed.scales.float().abs().repeat_interleave(packed.group, dim=1)[:, : packed.depth]


def check(weight: Tensor, precision: str) -> PackedWeight:
    """Round a weight and check what is promised of every rounding."""
    packed = round_to_nearest(weight, precision)
    found = unpack(packed, torch.float32)
    assert packed.shape == tuple(weight.shape)
    assert packed.scales.dtype == torch.bfloat16
    assert packed.scales.isfinite().all()
    assert (packed.scales != 0).all()
    assert packed.zero == 1 << (packed.bits - 1)
    assert found.isfinite().all()
    step = steps_of(packed)
    assert ((found - weight.float()).abs() <= 0.5001 * step).all()
    assert (found[weight == 0] == 0).all()
    return packed


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Weights of many sizes, with groups that are empty, tiny, alike or lopsided."""
    outs, depth = draw(st.integers(1, 4)), draw(st.sampled_from([1, 7, 31, 32, 64, 100, 128, 160, 200, 576]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    weight = torch.randn((outs, depth), generator=generator) * 10.0 ** draw(st.integers(-38, 30))
    kind = draw(st.sampled_from(["as it is", "zero", "alike", "lopsided", "one"]))
    at = draw(st.integers(0, depth - 1))
    if kind == "zero":
        weight[:, at:] = draw(st.sampled_from([0.0, -0.0]))
    elif kind == "alike":
        weight[:, at:] = draw(st.sampled_from([1e-30, 1e-38, 6e-8, 0.5, -3e38, 1e-45]))
    elif kind == "lopsided":
        weight = weight.abs() * draw(st.sampled_from([-1.0, 1.0]))
    elif kind == "one":
        weight[:, at] *= 1e3
    return weight.nan_to_num(0.0, 1e38, -1e38)


@given(weights(), st.sampled_from(INTEGERS))
def test_every_weight_is_within_half_a_step(weight: Tensor, precision: str) -> None:
    """Whatever the weights, scales are finite, zero stays zero, and no weight moves by more than half its step."""
    check(weight, precision)


@pytest.mark.parametrize("precision", INTEGERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, 1e-38, 6e-8, 3e-5, -6e-8])
def test_groups_of_almost_nothing(value: float, dtype: torch.dtype, precision: str) -> None:
    """ggml-org/llama.cpp#7313: groups of zeros, tiny numbers or subnormals come back within half a step or as zeros."""
    weight = torch.full((2, 256), value, dtype=dtype)
    weight[1, 128:] = 0.25
    check(weight, precision)


def test_the_last_partial_group_has_a_scale_of_its_own() -> None:
    """vllm-project/vllm-ascend#9159: 576 inputs in groups of 128 are five; the last 64 err no more than the rest."""
    weight = torch.randn((8, 576), generator=torch.Generator().manual_seed(0))
    weight[:, 512:] *= 100.0
    packed = check(weight, "int4")
    assert packed.scales.shape == (8, 5)
    relative = (unpack(packed, torch.float32) - weight).square().mean(dim=0) / weight.square().mean(dim=0)
    assert relative[512:].mean() < 1.5 * relative[:512].mean()


@pytest.mark.parametrize("precision", INTEGERS)
def test_the_shape_of_the_formats(precision: str) -> None:
    """Bits and groups are those of the format's table; 8 bits never have the code -128."""
    form = PRECISIONS[precision]
    packed = check(torch.randn((4, 256), generator=torch.Generator().manual_seed(1)), precision)
    assert (packed.bits, packed.group) == (form.bits, form.group or 256)
    codes = unpack_codes(packed.codes, 256, packed.bits).int() - packed.zero
    assert codes.min() >= (-127 if form.bits == 8 else -(1 << form.bits - 1))


@pytest.mark.parametrize("precision", ["int5", "int4", "int4-g64", "int4-g32"])
def test_chosen_scales_beat_the_plain_ones(precision: str) -> None:
    """On normal weights, the scale of least squared error leaves at least 15 % less error than largest / last code."""
    weight = torch.randn((64, 512), generator=torch.Generator().manual_seed(2))
    found = (unpack(round_to_nearest(weight, precision), torch.float32) - weight).square().sum()
    form = integer_format(precision)
    groups = weight.view(64, -1, form.group)
    high = (1 << form.bits - 1) - 1
    steps = groups.abs().amax(dim=-1, keepdim=True) / high
    plain = ((groups / steps).round().clamp(-high - 1, high) * steps - groups).square().sum()
    assert found < 0.85 * plain


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_weights_that_are_no_numbers_are_named(value: float) -> None:
    """An infinite weight or one that is no number is an error with the tensor's name and the place."""
    weight = torch.zeros((3, 64))
    weight[1, 5] = value
    with pytest.raises(ModelLoadError, match=r"layers\.2\.mlp\.up_proj: 1 of its weights .* at \[1, 5\]"):
        round_to_nearest(weight, "int4", name="layers.2.mlp.up_proj")


def test_what_is_no_integer_precision_or_no_matrix_is_refused() -> None:
    """A float precision, an unknown one, and a vector are refused by name."""
    for precision in ("bfloat16", "int3"):
        with pytest.raises(ConfigError, match=f"precision='{precision}'.*int8, int5, int4"):
            round_to_nearest(torch.zeros(2, 64), precision)
    with pytest.raises(ModelLoadError, match=r"norm: .* is no matrix"):
        round_to_nearest(torch.zeros(64), "int8", name="norm")
