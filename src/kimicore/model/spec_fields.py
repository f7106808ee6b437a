"""What each architecture adds to the common decoder, and readers of a configuration's fields."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from attrs import frozen

from kimicore.checks import integer, number
from kimicore.errors import ModelLoadError

__all__ = [
    "ARCHITECTURES",
    "Activation",
    "Architecture",
    "flag",
    "positive",
    "read_activation",
    "read_windows",
    "refuse_unsupported",
    "size",
    "text_config",
]

Activation = Literal["silu", "gelu_tanh"]


@frozen
class Architecture:
    """How an architecture differs from the common pre-norm decoder; defaults as its reference code has them.

    ``windows``: "none", "all" (every layer has ``sliding_window``), "late" (layers from ``max_window_layers``
    on, where ``use_sliding_window``), "pattern" (every n-th layer is full). ``bias_fields``: bias settings that the
    architecture knows; ``qkv_bias`` is the default of the attention biases, ``output_bias`` whether the output
    projection shares them. ``gemma``: norms scale by 1 + w and stand on both sides of a sublayer, embeddings are
    scaled, soft caps and ``query_pre_attn_scalar`` exist.
    """

    name: str
    windows: Literal["none", "all", "late", "pattern"]
    activation: str = "silu"
    max_positions: int = 2048
    kv_heads: int | None = None
    heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    theta: float = 10_000.0
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = True
    bias_fields: tuple[str, ...] = ()
    gemma: bool = False


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture("llama", "none", bias_fields=("attention_bias", "mlp_bias")),
        "mistral": Architecture("mistral", "all", max_positions=131_072, kv_heads=8),
        "qwen2": Architecture(
            "qwen2", "late", max_positions=32_768, qkv_bias=True, output_bias=False, bias_fields=("attention_bias",)
        ),
        "qwen3": Architecture(
            "qwen3", "late", max_positions=32_768, head_dim=128, qk_norm=True, bias_fields=("attention_bias",)
        ),
        "gemma3_text": Architecture(
            "gemma3_text",
            "pattern",
            activation="gelu_pytorch_tanh",
            max_positions=131_072,
            heads=8,
            kv_heads=4,
            head_dim=256,
            vocab_size=262_208,
            theta=1_000_000.0,
            tied=True,
            qk_norm=True,
            bias_fields=("attention_bias",),
            gemma=True,
        ),
    }
)

_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
)
_EXPERTS = "mixtures of experts"
_LATENT = "latent attention"
_FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "num_experts": _EXPERTS,
        "num_local_experts": _EXPERTS,
        "n_routed_experts": _EXPERTS,
        "num_experts_per_tok": _EXPERTS,
        "kv_lora_rank": _LATENT,
        "q_lora_rank": _LATENT,
        "quantization_config": "pre-quantized safetensors",
        "compression_config": "compressed weights",
        "attention_chunk_size": "chunked attention",
        "no_rope_layers": "layers without rotary positions",
        "no_rope_layer_interval": "layers without rotary positions",
        "use_mrope": "multimodal rotary positions",
        "mrope_section": "multimodal rotary positions",
        "alibi": "ALiBi positions",
        "use_bidirectional_attention": "bidirectional attention",
        "is_encoder_decoder": "encoder-decoder models",
        "add_cross_attention": "cross attention",
        "cross_attention_layers": "cross attention",
        "use_qk_norm": "QK norms under this model_type",
        "qk_norm": "QK norms under this model_type",
        "qk_layernorm": "QK norms under this model_type",
        "clip_qkv": "clipped projections",
    }
)
_MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "scale_emb",
    "scale_depth",
)
_GEMMA_ONLY = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "rope_local_base_freq")


def text_config(config: Mapping[str, Any]) -> tuple[Architecture, Mapping[str, Any]]:
    """Return the architecture and its part of the configuration (the text part of a multimodal Gemma 3)."""
    model_type = config.get("model_type")
    if model_type == "gemma3":
        inner = config.get("text_config")
        if not isinstance(inner, Mapping):
            raise ModelLoadError(f"text_config={inner!r}: a gemma3 configuration needs it as an object")
        inner_type = inner.get("model_type", "gemma3_text")
        if inner_type != "gemma3_text":
            raise ModelLoadError(f"text_config.model_type={inner_type!r}: must be gemma3_text within gemma3")
        tied = config.get("tie_word_embeddings")
        config = {"tie_word_embeddings": tied, **inner} if tied is not None else inner
        model_type = "gemma3_text"
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join([*ARCHITECTURES, "gemma3"])
        raise ModelLoadError(f"model_type={model_type!r} is not supported; supported are {known}")
    return ARCHITECTURES[model_type], config


def refuse_unsupported(arch: Architecture, config: Mapping[str, Any]) -> None:
    """Refuse settings that would change the result and that this engine does not compute, by their names."""
    for key, feature in _FEATURES.items():
        if config.get(key):
            raise ModelLoadError(f"{key}={config[key]!r}: {feature} are not supported")
    for key in _MULTIPLIERS:
        if config.get(key) is not None and config[key] != 1:
            raise ModelLoadError(f"{key}={config[key]!r} is not supported for model_type={arch.name!r}")
    for key in ("attention_bias", "mlp_bias"):
        if key not in arch.bias_fields and config.get(key):
            raise ModelLoadError(f"{key}={config[key]!r} is not supported for model_type={arch.name!r}")
    for key in _GEMMA_ONLY:
        if not arch.gemma and config.get(key) is not None:
            raise ModelLoadError(f"{key}={config[key]!r} is not supported for model_type={arch.name!r}")


def size(config: Mapping[str, Any], name: str, default: int | None = None, *, high: int = 1 << 24) -> int:
    """Return a positive integer field; a missing or null one is ``default``, or an error where there is none."""
    value = config.get(name)
    if value is None:
        if default is None:
            raise ModelLoadError(f"{name} is missing from the model's configuration")
        return default
    return integer(name, value, 1, high, ModelLoadError)


def flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a boolean field; a missing or null one is ``default``."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelLoadError(f"{name}={value!r}: must be true or false")
    return value


def positive(config: Mapping[str, Any], name: str) -> float | None:
    """Return a positive number, or None where it is missing or null."""
    value = config.get(name)
    return None if value is None else number(name, value, 0.0, 1e9, ModelLoadError, above=True)


def read_activation(arch: Architecture, config: Mapping[str, Any]) -> Activation:
    """Return the gated activation, from ``hidden_activation`` (Gemma) or ``hidden_act``."""
    names = ("hidden_activation", "hidden_act") if arch.gemma else ("hidden_act", "hidden_activation")
    name, value = next(((n, config[n]) for n in names if config.get(n) is not None), (names[0], arch.activation))
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ModelLoadError(f"{name}={value!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


def _window(config: Mapping[str, Any], default: int | None) -> int | None:
    """Return ``sliding_window``: null is none, missing is the architecture's default."""
    if "sliding_window" not in config:
        return default
    value = config["sliding_window"]
    return None if value is None else integer("sliding_window", value, 1, 1 << 30, ModelLoadError)


def _layer_types(config: Mapping[str, Any], layers: int) -> list[str] | None:
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        count = len(types) if isinstance(types, (list, tuple)) else repr(types)
        raise ModelLoadError(f"layer_types has {count} entries for num_hidden_layers={layers}")
    for index, name in enumerate(types):
        if name not in ("full_attention", "sliding_attention"):
            raise ModelLoadError(
                f"layer_types[{index}]={name!r} is not supported; supported are full_attention, sliding_attention"
            )
    return list(types)


def read_windows(arch: Architecture, config: Mapping[str, Any], layers: int) -> list[int | None]:
    """Return each layer's window in tokens (None: the layer sees everything)."""
    types = _layer_types(config, layers)
    if arch.windows == "none":
        window = _window(config, None)
        sliding = [False] * layers
        if window is not None and (types is None or "sliding_attention" in types):
            raise ModelLoadError(f"sliding_window={window} is not supported for model_type={arch.name!r}")
    elif arch.windows == "all":
        window = _window(config, 4096)
        sliding = [window is not None] * layers
    elif arch.windows == "late":
        window = _window(config, 4096) if flag(config, "use_sliding_window", False) else None
        start = integer("max_window_layers", config.get("max_window_layers") or 0, 0, None, ModelLoadError)
        start = start if config.get("max_window_layers") is not None else 28
        sliding = [window is not None and i >= start for i in range(layers)]
    else:
        window = _window(config, 4096)
        pattern = size(config, "sliding_window_pattern", size(config, "_sliding_window_pattern", 6))
        sliding = [(i + 1) % pattern != 0 for i in range(layers)]
    if types is not None:
        given = [name == "sliding_attention" for name in types]
        if arch.windows in ("none", "all") and given != sliding:
            raise ModelLoadError(
                f"layer_types mixes or contradicts sliding_window={window!r}: model_type={arch.name!r} "
                "treats all of its layers alike"
            )
        sliding = given
    if any(sliding) and window is None:
        raise ModelLoadError(
            f"layer {sliding.index(True)} is sliding_attention, but sliding_window={config.get('sliding_window')!r} "
            f"and use_sliding_window={config.get('use_sliding_window')!r} give no window"
        )
    return [window if slides else None for slides in sliding]
