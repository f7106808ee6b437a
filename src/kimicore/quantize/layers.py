"""Quantizing one layer: what goes through it is looked at, each matrix rounded, and what comes out passed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from attrs import define, field, frozen
from torch import Tensor

from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.kernels.packed_linear.reference import unpack
from kimicore.model.packed.rounding import check_weight, round_to_nearest
from kimicore.policies.precision.formats import PRECISIONS
from kimicore.quantize.decoder import Decoder, Weights
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.rounding import Compensation, compensated, with_searched_scales
from kimicore.quantize.scaling import channel_scales, fold_into_norm
from kimicore.quantize.statistics import InputStatistics

__all__ = ["FLOATS", "LayerRounding", "Stored", "kept_as", "round_matrix", "stored_weight"]

FLOATS: Final[Mapping[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

Stored = dict[str, Tensor | PackedWeight]
"""A layer's tensors as they are kept, by name, such as "mlp.up_proj.weight"."""


def kept_as(weight: Tensor, precision: str, name: str) -> Tensor:
    """Return a tensor in a float precision; raises :class:`~kimicore.ModelLoadError` where it has not the range."""
    kept = weight.to(FLOATS[precision])
    if bool(torch.isfinite(weight).all()) and not bool(torch.isfinite(kept).all()):
        check_weight(kept.reshape(1, -1), f"{name} in {precision}")
    return kept


def stored_weight(value: Tensor | PackedWeight) -> Tensor:
    """Return what a tensor means, as it is kept, in float32."""
    return value.float() if isinstance(value, Tensor) else unpack(value, torch.float32)


def round_matrix(
    weight: Tensor, precision: str, name: str, inputs: InputStatistics | None, settings: QuantizeSettings
) -> PackedWeight:
    """Return a weight [O, C] rounded as the settings say; without inputs it is rounded to nearest."""
    check_weight(weight, name)
    if inputs is None or settings.method.rounding == "nearest":
        return round_to_nearest(weight, precision, name=name)
    if settings.method.rounding == "searched":
        return with_searched_scales(weight, precision, inputs)
    return compensated(weight, precision, inputs, Compensation(settings.damping, settings.act_order))


@frozen(eq=False)
class LayerRounding:
    """Rounds layer after layer of a model.

    ``precisions``: by module name, such as "layers.3.mlp.down_proj", for the whole model.
    """

    decoder: Decoder
    precisions: Mapping[str, str]
    settings: QuantizeSettings

    def quantize(self, index: int, weights: Weights, hidden: Tensor | None) -> tuple[Stored, Tensor | None]:
        """Return layer ``index`` as it is kept, and what comes out of it for inputs ``hidden`` [N, T, C].

        ``weights``: its tensors in float32. Without ``hidden`` all is rounded to nearest.
        """
        work = _Layer(self, index, dict(weights))
        if hidden is None:
            for name in weights:
                work.keep(name)
            return work.stored, None
        hidden = work.attention(hidden)
        hidden = work.feed_forward(hidden)
        return work.stored, hidden


@define(eq=False)
class _Layer:
    """A layer at work: ``weights`` become what they are once they are kept."""

    rounding: LayerRounding
    index: int
    weights: dict[str, Tensor]
    stored: Stored = field(factory=dict)

    def precision(self, tensor: str) -> str:
        module = tensor if tensor.endswith(".bias") else tensor.removesuffix(".weight")
        return self.rounding.precisions[f"layers.{self.index}.{module}"]

    def is_rounded(self, tensor: str) -> bool:
        return PRECISIONS[self.precision(tensor)].kind == "int"

    def keep(self, tensor: str, inputs: InputStatistics | None = None) -> None:
        """Take a tensor into what is stored, and go on with it as it is stored."""
        if tensor in self.stored:
            return
        precision, name = self.precision(tensor), f"layers.{self.index}.{tensor}"
        if self.is_rounded(tensor):
            self.stored[tensor] = round_matrix(self.weights[tensor], precision, name, inputs, self.rounding.settings)
        else:
            self.stored[tensor] = kept_as(self.weights[tensor], precision, name)
        self.weights[tensor] = stored_weight(self.stored[tensor])

    def keep_with_bias(self, matrices: list[str], inputs: InputStatistics | None) -> None:
        for one in matrices:
            self.keep(f"{one}.weight", inputs)
            if f"{one}.bias" in self.weights:
                self.keep(f"{one}.bias")

    def statistics(self, matrices: list[str], x: Tensor) -> InputStatistics | None:
        """Return the statistics of inputs where any of the matrices that have them is to be rounded."""
        return InputStatistics.of(x) if any(self.is_rounded(f"{one}.weight") for one in matrices) else None

    def scale_inputs(self, matrices: list[str], norm: str, inputs: InputStatistics) -> InputStatistics:
        """Scale the input channels of matrices behind a norm, and fold the scales into it."""
        rounded = [f"{one}.weight" for one in matrices if self.is_rounded(f"{one}.weight")]
        wanted = channel_scales([(self.weights[name], self.precision(name)) for name in rounded], inputs)
        kept, scales = fold_into_norm(
            self.weights[norm], wanted, FLOATS[self.precision(norm)], unit=self.rounding.decoder.spec.unit_norm
        )
        self.weights[norm] = kept
        for one in matrices:
            self.weights[f"{one}.weight"] = self.weights[f"{one}.weight"] * scales
        return inputs.scaled(scales)

    def attention(self, hidden: Tensor) -> Tensor:
        """Round the attention's matrices and return the stream behind them."""
        decoder, into, out = self.rounding.decoder, [f"self_attn.{part}_proj" for part in "qkv"], ["self_attn.o_proj"]
        norm = "input_layernorm.weight"
        inputs = self.statistics(into, decoder.attention_in(hidden, self.weights))
        if inputs is not None and self.rounding.settings.method.scaling:
            inputs = self.scale_inputs(into, norm, inputs)
        for name in [norm, *(one for one in self.weights if one.startswith("self_attn.") and "_norm." in one)]:
            self.keep(name)
        self.keep_with_bias(into, inputs)
        attended = decoder.attend(decoder.attention_in(hidden, self.weights), self.weights, self.index)
        self.keep_with_bias(out, self.statistics(out, attended))
        if decoder.spec.sandwich_norm:
            self.keep("post_attention_layernorm.weight")
        return decoder.after_attention(hidden, attended, self.weights)

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Round the feed-forward matrices and return the stream behind them."""
        decoder, into, out = self.rounding.decoder, ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]
        norm, scaling = f"{decoder.mlp_norm}.weight", self.rounding.settings.method.scaling
        if scaling and self.is_rounded("mlp.down_proj.weight"):
            self.scale_middle(hidden)
        inputs = self.statistics(into, decoder.mlp_in(hidden, self.weights))
        if inputs is not None and scaling:
            inputs = self.scale_inputs(into, norm, inputs)
        self.keep(norm)
        self.keep_with_bias(into, inputs)
        mid = torch.cat(
            [decoder.mlp_mid(decoder.mlp_in(one, self.weights), self.weights) for one in hidden.unsqueeze(1)]
        )
        self.keep_with_bias(out, self.statistics(out, mid))
        for name in list(self.weights):
            self.keep(name)
        parts = zip(hidden.unsqueeze(1), mid.unsqueeze(1), strict=True)
        return torch.cat([decoder.after_mlp(one, middle, self.weights) for one, middle in parts])

    def scale_middle(self, hidden: Tensor) -> None:
        """Scale the input channels of the down projection, and fold the scales into the rows of the up projection."""
        decoder, down, up = self.rounding.decoder, "mlp.down_proj.weight", "mlp.up_proj.weight"
        inputs = InputStatistics.empty(self.weights[down].shape[1])
        for one in hidden.unsqueeze(1):
            inputs.add(decoder.mlp_mid(decoder.mlp_in(one, self.weights), self.weights)[0])
        scales = channel_scales([(self.weights[down], self.precision(down))], inputs)
        self.weights[down] = self.weights[down] * scales
        self.weights[up] = self.weights[up] / scales.unsqueeze(1)
        if (bias := self.weights.get("mlp.up_proj.bias")) is not None:
            self.weights["mlp.up_proj.bias"] = bias / scales
