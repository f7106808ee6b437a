"""A model's modules with weights, as a precision map names them."""

from __future__ import annotations

from kimicore.contracts import ModuleView
from kimicore.model.spec import ModelSpec

__all__ = ["modules_of"]


def modules_of(spec: ModelSpec) -> tuple[ModuleView, ...]:
    """Return the modules of a model in the order in which they compute.

    A name is that of the tensor in the model's files without what stands before the layers and without ``.weight``:
    ``embed_tokens``, ``layers.3.mlp.down_proj``, ``norm``, ``lm_head``. A bias is a module of its own, such as
    ``layers.3.self_attn.q_proj.bias``, of its owner's kind. A tied model has no ``lm_head``: its embedding serves.
    """
    hidden = spec.hidden_size
    found = [ModuleView("embed_tokens", "embedding", (spec.vocab_size, hidden))]
    for index in range(len(spec.layers)):
        found += [ModuleView(f"layers.{index}.{name}", kind, shape) for name, kind, shape in _layer(spec)]
    found.append(ModuleView("norm", "norm", (hidden,)))
    if not spec.tied:
        found.append(ModuleView("lm_head", "head", (spec.vocab_size, hidden)))
    return tuple(found)


def _layer(spec: ModelSpec) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return the modules of one layer as (name within the layer, kind, shape)."""
    hidden, inner, dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    wide, narrow = spec.heads * dim, spec.kv_heads * dim
    found: list[tuple[str, str, tuple[int, ...]]] = [("input_layernorm", "norm", (hidden,))]
    for part, rows, columns, bias in (
        ("q", wide, hidden, spec.qkv_bias),
        ("k", narrow, hidden, spec.qkv_bias),
        ("v", narrow, hidden, spec.qkv_bias),
        ("o", hidden, wide, spec.output_bias),
    ):
        found.append((f"self_attn.{part}_proj", "attention", (rows, columns)))
        found += [(f"self_attn.{part}_proj.bias", "attention", (rows,))] if bias else []
    if spec.qk_norm:
        found += [("self_attn.q_norm", "norm", (dim,)), ("self_attn.k_norm", "norm", (dim,))]
    found.append(("post_attention_layernorm", "norm", (hidden,)))
    if spec.sandwich_norm:
        found.append(("pre_feedforward_layernorm", "norm", (hidden,)))
    for part, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        found.append((f"mlp.{part}_proj", "ffn", (rows, columns)))
        found += [(f"mlp.{part}_proj.bias", "ffn", (rows,))] if spec.mlp_bias else []
    if spec.sandwich_norm:
        found.append(("post_feedforward_layernorm", "norm", (hidden,)))
    return found
