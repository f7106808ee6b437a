"""The decoder's forward pass over a packed batch and a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kimicore.model.attending import LayerAttention
from kimicore.model.batch import Batch, Measured
from kimicore.model.importance import measured_layers
from kimicore.model.kv_layout import kv_places
from kimicore.model.packed.joining import form_of
from kimicore.model.products import Halves, Weight, by_halves, holds_codes, lookup, product
from kimicore.model.rope import Rotary
from kimicore.model.spec import ModelSpec
from kimicore.model.weights import LayerWeights, ModelWeights, load_weights, matrices_of, weight_bytes

if TYPE_CHECKING:
    from kimicore.kernels.registry import Ops
    from kimicore.model.source import Progress, WeightSource
    from kimicore.policies.precision import ActivationPrecision, ResolvedMap

__all__ = ["Transformer"]


class Transformer:
    """A loaded model. It holds no state beside its weights: what a step needs is in the batch and the arenas."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        ops: Ops,
        *,
        known_tokens: int | None = None,
        precision: ResolvedMap | None = None,
        activations: ActivationPrecision | None = None,
    ) -> None:
        self.spec = spec
        self.ops = ops
        self.weights = weights
        self.precision = precision
        self.activations = activations if _rounds(activations, weights) else None
        """Of its inputs by position, where any are rounded to 8 bits."""
        self.dtype = weights.dtype
        self.weight_bytes = weight_bytes(weights)
        self._known_tokens = spec.vocab_size if known_tokens is None else min(known_tokens, spec.vocab_size)
        self._rotary = Rotary(spec.ropes)
        self._places = kv_places(spec)
        self._measured_layers = measured_layers(spec)
        self._attention = [
            LayerAttention(ops, group, place, spec.attention_scale, layer.window, spec.attention_softcap)
            for (group, place), layer in zip(self._places, spec.layers, strict=True)
        ]
        self._embed_scale: float | None = None
        if spec.embed_scale is not None:  # rounded to the model's dtype, as the reference code has it
            self._embed_scale = float(torch.tensor(spec.embed_scale, dtype=torch.float32).to(self.dtype))

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        source: WeightSource,
        ops: Ops,
        dtype: torch.dtype,
        progress: Progress | None = None,
        *,
        known_tokens: int | None = None,
        packed: bool = False,
        precision: ResolvedMap | None = None,
        activations: ActivationPrecision | None = None,
    ) -> Transformer:
        """Return the model with its weights read from ``source`` in ``dtype``.

        ``progress("weights", done_bytes, total_bytes)`` is called as tensors arrive. ``known_tokens``: size of the
        tokenizer's vocabulary; the logits of ids from there on (rows that pad the vocabulary) are -inf. ``packed``:
        keep quantized weights in their codes. ``precision``: the map that matrices are rounded by. ``activations``: the
        precision of inputs of packed matrices; all others are multiplied with inputs as they are.

        Raises :class:`~kimicore.ModelLoadError`; see :func:`kimicore.model.weights.load_weights`.
        """
        weights = load_weights(
            spec, source, dtype, progress, packed=packed, precision=precision, arrange=ops.arrange if packed else None
        )
        return cls(spec, weights, ops, known_tokens=known_tokens, precision=precision, activations=activations)

    @property
    def packed(self) -> bool:
        """Whether any of its weights is packed."""
        return not all(isinstance(one, Tensor) for one in matrices_of(self.weights))

    def forms(self) -> tuple[tuple[str, int, int], ...]:
        """Return for each form that matrices have its name, how many have it, and their bytes."""
        found: dict[str, tuple[int, int]] = {}
        for one in matrices_of(self.weights):
            name = str(one.dtype).removeprefix("torch.") if isinstance(one, Tensor) else form_of(one)
            size = one.numel() * one.element_size() if isinstance(one, Tensor) else one.weight_bytes
            count, total = found.get(name, (0, 0))
            found[name] = (count + 1, total + size)
        return tuple([(name, *sums) for name, sums in found.items()])

    def forward(
        self,
        batch: Batch,
        arenas: Sequence[Tensor],
        mass: Sequence[Tensor] = (),
        summaries: Sequence[Tensor | None] = (),
    ) -> Tensor:
        """Write the batch's keys and values, and return the final hidden states of ``batch.selected`` [n, C].

        ``arenas``, ``summaries``: per KV class, see :class:`kimicore.kv.arena.Arena`. ``mass``: per group of layers
        [M, N] float32; where ``batch.measured`` is given, it gains what each block gets in the group's measured layers.
        The caller enters ``torch.inference_mode``.
        """
        ops, eps, layers = self.ops, self.spec.norm_eps, self.weights.layers
        hidden = lookup(ops, self.weights.embedding, batch.token_ids, self.dtype)
        if self._embed_scale is not None:
            hidden = hidden * self._embed_scale
        cos_sin = self._rotary.cos_sin(batch.positions, batch.rope_tokens)
        normed, residual = ops.rms_norm(hidden, layers[0].input_norm, eps)
        halves = Halves.of(len(batch.token_ids), batch.middle)
        for index, layer in enumerate(layers):
            last = index + 1 == len(layers)
            q = self._project(index, layer, normed, batch, arenas, cos_sin, halves)
            for whole in batch.whole:
                self._attention[index].finish(whole, arenas, summaries)
            if batch.measured is not None and index in self._measured_layers:
                self._measure(index, q, batch.measured, arenas, mass)
            if last and not len(batch.selected):
                return hidden.new_empty((0, self.spec.hidden_size))  # the cache is all that was wanted
            attended = self._attention[index].attend(q, batch, arenas, summaries).flatten(1)
            if last:  # nothing reads the other tokens any more
                attended = attended.index_select(0, batch.selected)
                residual = residual.index_select(0, batch.selected)
                halves = None if halves is None else halves.among(batch.selected)
            mixed = self._multiply(attended, layer.output, layer.output_bias, halves)
            normed, residual = self._join(mixed, residual, layer.attention_out_norm, layer.mlp_norm)
            mixed = self._feed_forward(normed, layer, halves)
            following = self.weights.final_norm if last else layers[index + 1].input_norm
            normed, residual = self._join(mixed, residual, layer.mlp_out_norm, following)
        return normed

    def _multiply(self, x: Tensor, weight: Weight, bias: Tensor | None, halves: Halves | None) -> Tensor:
        """Return the product of x [T, C] with a weight, where that is packed by halves."""
        own = halves if holds_codes(weight) else None
        return by_halves(x, own, lambda rows, int8: product(self.ops, rows, weight, bias, int8=int8))

    def _feed_forward(self, x: Tensor, layer: LayerWeights, halves: Halves | None) -> Tensor:
        """Return the feed-forward part of x [T, C]; rows that are rounded go their own way from start to end."""

        def compute(rows: Tensor, int8: bool) -> Tensor:
            wide = product(self.ops, rows, layer.gate_up, layer.gate_up_bias, int8=int8)
            gated = self.ops.gated_act(wide, self.spec.activation)
            return product(self.ops, gated, layer.down, layer.down_bias, int8=int8)

        own = halves if holds_codes(layer.gate_up) or holds_codes(layer.down) else None
        return by_halves(x, own, compute)

    def _join(self, x: Tensor, residual: Tensor, out_norm: Tensor | None, next_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Add a sublayer's output to the stream and norm it for the next; a sandwich norms the output first."""
        if out_norm is not None:
            x, _ = self.ops.rms_norm(x, out_norm, self.spec.norm_eps)
        return self.ops.rms_norm(x, next_norm, self.spec.norm_eps, residual)

    def _project(
        self,
        index: int,
        layer: LayerWeights,
        x: Tensor,
        batch: Batch,
        arenas: Sequence[Tensor],
        cos_sin: tuple[tuple[Tensor, Tensor], ...],
        halves: Halves | None,
    ) -> Tensor:
        """Write the layer's keys and values and return its rotated queries [T, H, D]."""
        spec = self.spec
        qkv = self._multiply(x, layer.qkv, layer.qkv_bias, halves).view(len(x), -1, spec.head_dim)
        q, k, v = torch.split(qkv, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, _ = self.ops.rms_norm(q, layer.q_norm, spec.norm_eps)
            k, _ = self.ops.rms_norm(k, layer.k_norm, spec.norm_eps)
        cos, sin = cos_sin[spec.layers[index].rope]
        kv_class, place = self._places[index]
        self.ops.rotary_write(q, k, v, cos, sin, arenas[kv_class], place, batch.slots[kv_class])
        return q

    def _measure(
        self, index: int, q: Tensor, measured: Measured, arenas: Sequence[Tensor], mass: Sequence[Tensor]
    ) -> None:
        """Add the layer's shares of attention to its class's ``mass`` [M, N]."""
        kv_class, place = self._places[index]
        mass[kv_class].add_(
            self.ops.block_mass(
                q.index_select(0, measured.tokens),
                arenas[kv_class],
                place,
                measured.block_tables[kv_class],
                measured.row_starts,
                measured.contexts,
                scale=self.spec.attention_scale,
                window=self.spec.layers[index].window,
                softcap=self.spec.attention_softcap,
            )
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the vocabulary's logits, float32 [n, vocab_size], for hidden states [n, C].

        That is ``4 * vocab_size`` bytes a row: score long prompts in pieces.
        """
        scores = product(self.ops, hidden, self.weights.head).float()
        cap = self.spec.final_softcap
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if self._known_tokens < self.spec.vocab_size:
            scores[:, self._known_tokens :] = -torch.inf
        return scores


def _rounds(activations: ActivationPrecision | None, weights: ModelWeights) -> bool:
    """Return whether any product of the layers has inputs in 8 bits: at some position, and with a packed weight."""
    if activations is None or "int8" not in (activations.middle, activations.ends):
        return False
    return any(
        holds_codes(one) for layer in weights.layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down)
    )
