"""What a model is: its sizes, its layers and its KV classes, read from a Hugging Face configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from kimicore.checks import integer, number
from kimicore.errors import ModelLoadError
from kimicore.model.rope_fields import RopeSpec, read_rope, read_ropes_by_layer_type
from kimicore.model.spec_fields import (
    Activation,
    Architecture,
    flag,
    positive,
    read_activation,
    read_windows,
    refuse_unsupported,
    size,
    text_config,
)

__all__ = ["LayerSpec", "ModelSpec", "RopeSpec", "spec_from_config"]


@frozen
class LayerSpec:
    """One layer: its attention window in tokens (None: all) and which of the model's ropes it uses."""

    window: int | None
    rope: int


@frozen
class ModelSpec:
    """Everything that the forward pass needs to know of a model beside its weights.

    ``attention_scale`` multiplies query-key products. ``embed_scale`` multiplies embeddings, rounded to the
    model's dtype (Gemma). ``unit_norm``: norms scale by 1 + w in float32. ``sandwich_norm``: each sublayer's output is
    normed as well. ``context_tokens`` is the longest context that the positions were made for, scaling included.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    heads: int
    kv_heads: int
    head_dim: int
    ropes: tuple[RopeSpec, ...]
    norm_eps: float
    activation: Activation
    attention_scale: float
    tied: bool
    trained_tokens: int
    context_tokens: int
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    unit_norm: bool = False
    sandwich_norm: bool = False
    embed_scale: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None

    def rope_variant(self, rope_tokens: int) -> int:
        """Return what of a row's ``rope_tokens`` changes its keys: 0 unless a dynamic rope is stretched.

        Two rows may share KV blocks only where this is equal.
        """
        stretched = [r for r in self.ropes if r.kind == "dynamic" and rope_tokens > r.trained_tokens]
        return rope_tokens if stretched else 0


def _heads(arch: Architecture, config: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    heads = size(config, "num_attention_heads", arch.heads, high=1 << 16)
    default = heads if arch.kv_heads is None else arch.kv_heads
    value = config.get("num_key_value_heads", default)
    kv_heads = heads if value is None else integer("num_key_value_heads", value, 0, 1 << 16, ModelLoadError)
    if kv_heads == 0 or heads % kv_heads:
        raise ModelLoadError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}: "
            "every key-value head must serve the same number of query heads"
        )
    if config.get("head_dim") is None and arch.head_dim is None and hidden % heads:
        raise ModelLoadError(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={heads} and head_dim is not given"
        )
    head_dim = size(config, "head_dim", arch.head_dim or hidden // heads, high=1 << 14)
    if head_dim % 2:
        raise ModelLoadError(f"head_dim={head_dim}: rotary positions need an even head dimension")
    return heads, kv_heads, head_dim


def _ropes(
    arch: Architecture, config: Mapping[str, Any], windows: list[int | None], head_dim: int, trained: int
) -> tuple[tuple[RopeSpec, ...], list[int]]:
    if not arch.gemma:
        return (read_rope(config, theta=arch.theta, head_dim=head_dim, trained=trained),), [0] * len(windows)
    by_type = read_ropes_by_layer_type(
        config, full_theta=arch.theta, sliding_theta=10_000.0, head_dim=head_dim, trained=trained
    )
    wanted = [by_type["full_attention" if window is None else "sliding_attention"] for window in windows]
    ropes = tuple(dict.fromkeys(wanted))
    return ropes, [ropes.index(rope) for rope in wanted]


def _context_tokens(arch: Architecture, ropes: tuple[RopeSpec, ...], trained: int) -> int:
    lengths = [trained]
    for rope in ropes:
        if rope.kind == "yarn":
            lengths.append(int(rope.original_tokens * rope.factor))
        elif rope.kind in ("linear", "dynamic") and not arch.gemma:  # Gemma's own figure includes its scaling
            lengths.append(int(trained * rope.factor))
    return max(lengths)


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a configuration describes.

    ``config`` is the content of a Hugging Face ``config.json`` (or one rebuilt from other metadata) of Llama,
    Mistral, Qwen2, Qwen3 or Gemma 3 text. Missing fields have the defaults of the architecture's reference code.
    Raises :class:`~kimicore.ModelLoadError`, naming the field and its values, for anything that is malformed,
    contradictory or not computed by this engine.
    """
    arch, config = text_config(config)
    refuse_unsupported(arch, config)
    hidden = size(config, "hidden_size")
    heads, kv_heads, head_dim = _heads(arch, config, hidden)
    trained = size(config, "max_position_embeddings", arch.max_positions, high=1 << 30)
    windows = read_windows(arch, config, size(config, "num_hidden_layers", high=4096))
    ropes, rope_of = _ropes(arch, config, windows, head_dim, trained)
    attention_bias = flag(config, "attention_bias", arch.qkv_bias)
    scalar = positive(config, "query_pre_attn_scalar") or (256.0 if arch.gemma else float(head_dim))
    eps = config.get("rms_norm_eps")
    return ModelSpec(
        architecture=arch.name,
        vocab_size=size(config, "vocab_size", arch.vocab_size, high=1 << 26),
        hidden_size=hidden,
        intermediate_size=size(config, "intermediate_size"),
        layers=tuple(LayerSpec(window, rope) for window, rope in zip(windows, rope_of, strict=True)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ropes=ropes,
        norm_eps=1e-6 if eps is None else number("rms_norm_eps", eps, 0.0, 1.0, ModelLoadError),
        activation=read_activation(arch, config),
        attention_scale=scalar**-0.5,
        tied=flag(config, "tie_word_embeddings", arch.tied),
        trained_tokens=trained,
        context_tokens=_context_tokens(arch, ropes, trained),
        qkv_bias=attention_bias,
        output_bias=attention_bias and arch.output_bias,
        mlp_bias=flag(config, "mlp_bias", False),
        qk_norm=arch.qk_norm,
        unit_norm=arch.gemma,
        sandwich_norm=arch.gemma,
        embed_scale=math.sqrt(hidden) if arch.gemma else None,
        attention_softcap=positive(config, "attn_logit_softcapping"),
        final_softcap=positive(config, "final_logit_softcapping"),
    )
