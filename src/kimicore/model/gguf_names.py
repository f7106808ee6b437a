"""Where each tensor of a model lies in a GGUF file, and what was done to it when it was written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from attrs import frozen

from kimicore.model.gguf import GGUFFile, TensorInfo
from kimicore.model.mapped import fault

__all__ = ["Placed", "place_tensors"]

_COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TWO_NORMS = {**_COMMON, "ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA = {
    **_COMMON,
    **_QK_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"llama": _TWO_NORMS, "qwen2": _TWO_NORMS, "qwen3": {**_TWO_NORMS, **_QK_NORMS}, "gemma3": _GEMMA}
)
_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_IGNORED = frozenset({"rope_freqs.weight"})  # read with the config
_SHOWN = 4


@frozen
class Placed:
    """A tensor and how it is brought back to the form that its model has elsewhere.

    ``heads``: with a number, rows of each head are pairs that were interleaved for ggml's rope. ``offset``:
    added to every value (-1 for Gemma's norms, which are stored with their one added).
    """

    info: TensorInfo
    heads: int = 0
    offset: float = 0.0


def _shape(part: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        "attn_q_norm": (dim,),
        "attn_k_norm": (dim,),
    }
    return shapes.get(part, (hidden,))


def _wanted(architecture: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[int, ...], int, bool]]:
    """Yield for each tensor its GGUF name, its own name, its shape, heads to untangle, and whether it must be there."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "token_embd.weight", "model.embed_tokens.weight", (vocabulary, hidden), 0, True
    yield "output_norm.weight", "model.norm.weight", (hidden,), 0, True
    yield "output.weight", "lm_head.weight", (vocabulary, hidden), 0, False
    tangled = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for layer in range(config["num_hidden_layers"]):
        for part, name in _LAYER[architecture].items():
            heads = tangled.get(part, 0) if architecture == "llama" else 0
            shape = _shape(part, config)
            yield f"blk.{layer}.{part}.weight", f"model.layers.{layer}.{name}.weight", shape, heads, True
            if part in _BIASES:
                # The first layer's biases set the rule for all.
                must = f"blk.0.{part}.bias" in config["_tensors"] or (architecture, part) in _QWEN2_BIASES
                yield f"blk.{layer}.{part}.bias", f"model.layers.{layer}.{name}.bias", shape[:1], heads, must


_QWEN2_BIASES = frozenset({("qwen2", "attn_q"), ("qwen2", "attn_k"), ("qwen2", "attn_v")})


def place_tensors(gguf: GGUFFile, architecture: str, config: Mapping[str, Any]) -> dict[str, Placed]:
    """Return every tensor of the model by its name in ``transformers``, with shapes checked against the config.

    Raises :class:`~kimicore.ModelLoadError` that names the architecture and which tensors are missing, do
    not belong to it, or have another shape.
    """
    placed: dict[str, Placed] = {}
    missing: list[str] = []
    seen = set(_IGNORED)
    for stored, name, shape, heads, must in _wanted(architecture, {**config, "_tensors": gguf.tensors}):
        info = gguf.tensors.get(stored)
        if info is None:
            if must:
                missing.append(stored)
            continue
        if info.shape != shape:
            raise fault(
                gguf.path,
                f"tensor {stored!r}",
                f"has shape {list(info.shape)}, expected {list(shape)} for architecture {architecture!r}",
            )
        seen.add(stored)
        norm = architecture == "gemma3" and stored.endswith("norm.weight")
        placed[name] = Placed(info, heads, -1.0 if norm else 0.0)
    foreign = [name for name in gguf.tensors if name not in seen]
    for found, what in ((missing, "needs tensors that are missing"), (foreign, "does not have the file's tensors")):
        if found:
            shown = ", ".join(name[:100] for name in found[:_SHOWN])
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            raise fault(
                gguf.path, "general.architecture", f"architecture {architecture!r} {what}: {shown}{more}; wrong name?"
            )
    return placed
