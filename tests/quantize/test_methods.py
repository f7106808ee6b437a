"""Rounding with an eye on the inputs: what is compensated, scaled and searched errs less in the outputs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kimicore.errors import ConfigError
from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.kernels.packed_linear.reference import unpack
from kimicore.model.packed.rounding import round_to_nearest
from kimicore.quantize.methods import METHODS, QuantizeSettings
from kimicore.quantize.rounding import Compensation, compensated, with_searched_scales
from kimicore.quantize.scaling import channel_scales, fold_into_norm
from kimicore.quantize.statistics import InputStatistics

PRECISIONS = ["int8", "int5", "int4", "int4-g64", "int4-g32"]


def inputs(count: int = 1500, channels: int = 256, seed: int = 0) -> Tensor:
    """Inputs as a model has them: correlated, with a few channels that are much larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn((channels, channels), generator=generator) / channels**0.5
    sizes = torch.rand(channels, generator=generator).pow(4) * 5 + 0.05
    return torch.randn((count, channels), generator=generator) @ mixing * sizes


def weight(outs: int = 96, channels: int = 256) -> Tensor:
    return torch.randn((outs, channels), generator=torch.Generator().manual_seed(9)) * 0.02


def output_error(packed: PackedWeight, matrix: Tensor, x: Tensor) -> float:
    """The squared error of all outputs, computed with the inputs themselves."""
    return float((x @ (unpack(packed, torch.float32) - matrix).t()).square().sum())


def test_statistics_know_the_error_without_the_inputs() -> None:
    """The Gram matrix gives the same output error as the inputs do, however they were put in, and scales with them."""
    x, difference = inputs(), torch.randn((7, 256), generator=torch.Generator().manual_seed(1))
    found = InputStatistics.of(x.view(3, 500, 256))
    torch.testing.assert_close(found.error(difference), (x @ difference.t()).square().sum(dim=0), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.mean_abs, x.abs().mean(dim=0))
    scales = torch.rand(256, generator=torch.Generator().manual_seed(2)) + 0.5
    other = InputStatistics.of(x / scales)
    torch.testing.assert_close(found.scaled(scales).gram, other.gram, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found.scaled(scales).mean_abs, other.mean_abs)
    assert found.count == 1500


@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_method_beats_the_one_before_it(precision: str) -> None:
    """Searched scales err less in the output than rounding to nearest, and compensation clearly less than both."""
    x, matrix = inputs(), weight()
    found = InputStatistics.of(x)
    nearest = output_error(round_to_nearest(matrix, precision), matrix, x)
    searched = output_error(with_searched_scales(matrix, precision, found), matrix, x)
    made_up_for = output_error(compensated(matrix, precision, found), matrix, x)
    assert searched < nearest
    assert made_up_for < 0.6 * nearest
    assert made_up_for < 0.8 * searched


@pytest.mark.parametrize("precision", PRECISIONS)
def test_scaled_channels_err_less(precision: str) -> None:
    """With scaled channels, rounding to nearest errs clearly less in the output than without."""
    x, matrix = inputs(), weight()
    scales = channel_scales([(matrix, precision)], InputStatistics.of(x))
    packed = round_to_nearest(matrix * scales, precision)
    scaled = float((x @ (unpack(packed, torch.float32) / scales - matrix).t()).square().sum())
    assert scaled < 0.8 * output_error(round_to_nearest(matrix, precision), matrix, x)


def test_large_inputs_first_is_better_and_groups_stay() -> None:
    """Rounding the columns of large inputs first errs less, and no order of columns has to be kept."""
    x, matrix = inputs(), weight()
    found = InputStatistics.of(x)
    first = compensated(matrix, "int4", found, Compensation(act_order=True))
    plain = compensated(matrix, "int4", found, Compensation(act_order=False))
    assert first.order is None
    assert output_error(first, matrix, x) < output_error(plain, matrix, x)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_channels_without_inputs_do_not_break_it(precision: str) -> None:
    """Inputs that are always 0, all the same, or none at all still give finite weights near the given ones."""
    matrix = weight()
    dead, same = inputs(), torch.ones((40, 256))
    dead[:, ::3] = 0.0
    for x in (dead, same, inputs(5), torch.zeros((4, 256))):
        packed = compensated(matrix, precision, InputStatistics.of(x))
        found = unpack(packed, torch.float32)
        assert found.isfinite().all()
        assert output_error(packed, matrix, x) <= 1.01 * output_error(round_to_nearest(matrix, precision), matrix, x)
        assert (channel_scales([(matrix, precision)], InputStatistics.of(x)) > 0).all()


@given(st.integers(0, 1 << 20), st.booleans(), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_folding_into_a_norm_changes_nothing(seed: int, unit: bool, dtype: torch.dtype) -> None:
    """What the norm is divided by, as it is rounded, is what the matrix is multiplied with, also for 1 + w."""
    generator = torch.Generator().manual_seed(seed)
    norm = torch.randn(64, generator=generator)
    norm[3], norm[5] = 0.0, -1.0
    wanted = torch.exp(torch.randn(64, generator=generator))
    kept, exact = fold_into_norm(norm, wanted, dtype, unit=unit)
    one = 1.0 if unit else 0.0
    assert torch.equal(kept, kept.to(dtype).float()) or (exact == 1.0).any()
    torch.testing.assert_close((kept + one) * exact, norm + one, rtol=1e-5, atol=1e-7)
    assert (exact > 0).all()
    usual = exact != 1.0
    assert ((exact / wanted - 1).abs()[usual & ((norm + one).abs() > 0.2)] < 0.1).all()


def test_settings_are_checked() -> None:
    """Unknown methods and settings out of range are refused by name."""
    assert [QuantizeSettings(method=name).method.name for name in METHODS] == ["nearest", "awq", "gptq", "awq-gptq"]
    for wrong in ({"method": "best"}, {"samples": 0}, {"sample_tokens": 1}, {"damping": 0.0}, {"act_order": 1}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
            QuantizeSettings(**wrong)  # type: ignore[arg-type]
