"""A decoder layer in plain float32 over whole sequences, cut where inputs of its matrices can be looked at."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import Tensor

from kimicore.kernels.gated_act.reference import gated_act
from kimicore.kernels.rms_norm.reference import rms_norm
from kimicore.model.rope import Rotary
from kimicore.model.spec import ModelSpec

__all__ = ["Decoder", "Weights"]

Weights = Mapping[str, Tensor]
"""A layer's tensors in float32 by name, such as "mlp.up_proj.weight", as they stand in the model's files."""


@frozen(eq=False)
class Decoder:
    """What of a model's layers does not depend on the layer: its spec and the angles of its positions."""

    spec: ModelSpec
    angles: tuple[tuple[Tensor, Tensor], ...]
    tokens: int

    @classmethod
    def make(cls, spec: ModelSpec, tokens: int) -> Decoder:
        """Return the decoder for sequences of ``tokens`` tokens."""
        return cls(spec, Rotary(spec.ropes).cos_sin(torch.arange(tokens)), tokens)

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """Return hidden states [N, T, C] of token ids [N, T]; ``table`` [V, C] of any floating type."""
        hidden = torch.nn.functional.embedding(token_ids, table).float()
        return hidden if self.spec.embed_scale is None else hidden * self.spec.embed_scale

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return ``x`` normed with a norm's weight as its file has it."""
        return rms_norm(x, weight + 1.0 if self.spec.unit_norm else weight, self.spec.norm_eps)[0]

    def linear(self, x: Tensor, weights: Weights, name: str) -> Tensor:
        """Return the product with a matrix of the layer, its bias added where it has one."""
        return torch.nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def attention_in(self, hidden: Tensor, weights: Weights) -> Tensor:
        """Return what queries, keys and values are made of."""
        return self.norm(hidden, weights["input_layernorm.weight"])

    def attend(self, x: Tensor, weights: Weights, index: int) -> Tensor:
        """Return what the output projection of a layer gets [N, T, H D] for the inputs [N, T, C] of its attention."""
        return torch.cat([self._attend_one(one, weights, index) for one in x.unsqueeze(1)])

    def _attend_one(self, x: Tensor, weights: Weights, index: int) -> Tensor:
        spec = self.spec
        heads = [
            self.linear(x, weights, f"self_attn.{part}_proj").view(1, self.tokens, -1, spec.head_dim) for part in "qkv"
        ]
        q, k, v = heads
        if spec.qk_norm:
            q = self.norm(q, weights["self_attn.q_norm.weight"])
            k = self.norm(k, weights["self_attn.k_norm.weight"])
        cos, sin = self.angles[spec.layers[index].rope]
        q, k = _turned(q, cos, sin).transpose(1, 2), _turned(k, cos, sin).transpose(1, 2)
        groups = spec.heads // spec.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.transpose(1, 2).repeat_interleave(groups, dim=1)
        mixed = self._mixed(q, k, v, spec.layers[index].window)
        return mixed.transpose(1, 2).reshape(1, self.tokens, -1)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        at = torch.arange(self.tokens)
        seen = at.unsqueeze(1) >= at
        if window is not None:
            seen &= at > at.unsqueeze(1) - window
        cap, scale = self.spec.attention_softcap, self.spec.attention_scale
        if cap is None:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
        scores = cap * torch.tanh((q @ k.transpose(2, 3)) * (scale / cap))
        return scores.masked_fill_(~seen, -torch.inf).softmax(dim=-1) @ v

    def after_attention(self, hidden: Tensor, attended: Tensor, weights: Weights) -> Tensor:
        """Return the stream behind the attention part: ``attended`` projected, normed in a sandwich, and added."""
        mixed = self.linear(attended, weights, "self_attn.o_proj")
        if self.spec.sandwich_norm:
            mixed = self.norm(mixed, weights["post_attention_layernorm.weight"])
        return hidden + mixed

    @property
    def mlp_norm(self) -> str:
        """The name of the norm before the feed-forward part."""
        return "pre_feedforward_layernorm" if self.spec.sandwich_norm else "post_attention_layernorm"

    def mlp_in(self, hidden: Tensor, weights: Weights) -> Tensor:
        """Return what gate and up get."""
        return self.norm(hidden, weights[f"{self.mlp_norm}.weight"])

    def mlp_mid(self, x: Tensor, weights: Weights) -> Tensor:
        """Return what the down projection gets."""
        gate, up = self.linear(x, weights, "mlp.gate_proj"), self.linear(x, weights, "mlp.up_proj")
        return gated_act(torch.cat((gate, up), dim=-1), self.spec.activation)

    def after_mlp(self, hidden: Tensor, mid: Tensor, weights: Weights) -> Tensor:
        """Return the stream behind the feed-forward part."""
        mixed = self.linear(mid, weights, "mlp.down_proj")
        if self.spec.sandwich_norm:
            mixed = self.norm(mixed, weights["post_feedforward_layernorm.weight"])
        return hidden + mixed

    def layer(self, hidden: Tensor, weights: Weights, index: int) -> Tensor:
        """Return the stream [N, T, C] behind layer ``index``."""
        attended = self.attend(self.attention_in(hidden, weights), weights, index)
        hidden = self.after_attention(hidden, attended, weights)
        mids = [self.mlp_mid(self.mlp_in(one, weights), weights) for one in hidden.unsqueeze(1)]
        return torch.cat(
            [self.after_mlp(one, mid, weights) for one, mid in zip(hidden.unsqueeze(1), mids, strict=True)]
        )

    def logits(self, hidden: Tensor, final_norm: Tensor, head: Tensor) -> Tensor:
        """Return the vocabulary's logits [..., V] of final hidden states [..., C]."""
        scores = torch.nn.functional.linear(self.norm(hidden, final_norm), head)
        cap = self.spec.final_softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys [1, T, H, D] turned by angles [T, D/2]: dimension i turns with i + D/2."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
