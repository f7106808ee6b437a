"""GGUF metadata as the config that the same model has on the hub."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from attrs import frozen

from kimicore.errors import ModelLoadError
from kimicore.model.dequantize import dequantize
from kimicore.model.gguf import GGUFFile
from kimicore.model.mapped import fault

__all__ = ["ARCHITECTURES", "Keys", "architecture_of", "gguf_config"]

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"gemma3": "gemma3_text", "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
)
"""GGUF architectures that are read, and the ``model_type`` that each becomes."""

_GEMMA_PATTERN = 6
_GEMMA_LOCAL_BASE = 10000.0
_GEMMA_27B_LAYERS = 62
_MAX_SIZE = 1 << 31


@frozen(eq=False)
class Keys:
    """Typed access to a file's metadata; a value of the wrong type or range is refused by its key.

    Keys that begin with a dot stand for the architecture's own, ".block_count" for "llama.block_count".
    """

    gguf: GGUFFile
    architecture: str = ""

    def name(self, key: str) -> str:
        """Return the key in full."""
        return self.architecture + key if key.startswith(".") else key

    def has(self, key: str) -> bool:
        """Return whether the file has the key."""
        return self.name(key) in self.gguf.metadata

    def fault(self, key: str, problem: str) -> ModelLoadError:
        """Return an error about the key."""
        return fault(self.gguf.path, self.name(key), problem)

    def missing(self, key: str) -> ModelLoadError:
        """Return the error for a key that the architecture cannot do without."""
        others = sorted({name.split(".")[0] for name in self.gguf.metadata} - {"general", "tokenizer", "GGUF"})
        return self.fault(
            key,
            f"is missing: general.architecture is {self.architecture!r}, which needs it; the file's keys are of "
            f"{', '.join(others)[:200] or 'no architecture'}",
        )

    def integer(self, key: str, default: int | None = None, low: int = 1, high: int = _MAX_SIZE) -> int:
        """Return an integer from ``low`` to ``high``; an array with one value for all layers counts as that value."""
        if not self.has(key):
            if default is None:
                raise self.missing(key)
            return default
        value = self.gguf.metadata[self.name(key)]
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "ui" and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fault(key, f"must be one integer, is {self.gguf.types[self.name(key)]}")
        if not low <= value <= high:
            raise self.fault(key, f"is {value}; must be from {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """Return a finite number."""
        if not self.has(key):
            if default is None:
                raise self.missing(key)
            return default
        value = self.gguf.metadata[self.name(key)]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fault(key, f"must be a number, is {self.gguf.types[self.name(key)]}")
        if not math.isfinite(value) or (positive and value <= 0):
            raise self.fault(key, f"is {value}; must be finite{' and over 0' if positive else ''}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        if not self.has(key):
            if default is None:
                raise self.missing(key)
            return default
        value = self.gguf.metadata[self.name(key)]
        if not isinstance(value, str):
            raise self.fault(key, f"must be a string, is {self.gguf.types[self.name(key)]}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        value = self.gguf.metadata.get(self.name(key), default)
        if not isinstance(value, bool):
            raise self.fault(key, f"must be a truth value, is {self.gguf.types[self.name(key)]}")
        return value

    def token(self, key: str, vocabulary: int) -> int | None:
        """Return a token id, None where there is none (absent, or all bits set)."""
        name = f"tokenizer.ggml.{key}_token_id"
        value = self.integer(name, -1, low=-1, high=(1 << 32) - 1)
        if value in (-1, (1 << 32) - 1):
            return None
        if value >= vocabulary:
            raise self.fault(name, f"is {value}; the vocabulary has {vocabulary} tokens")
        return value


def architecture_of(gguf: GGUFFile) -> str:
    """Return the file's architecture, or raise with the supported ones."""
    name = Keys(gguf).text("general.architecture", "")
    if name not in ARCHITECTURES:
        problem = f"{name[:100]!r} is not supported" if name else "is missing"
        raise fault(gguf.path, "general.architecture", f"{problem}; supported are {', '.join(ARCHITECTURES)}")
    return name


def gguf_config(gguf: GGUFFile) -> dict[str, Any]:
    """Return the config of the model in a GGUF file, with the keys that its ``config.json`` would have.

    Raises :class:`~kimicore.ModelLoadError` for an unknown architecture, a key that is missing, and sizes
    that the file cannot hold.
    """
    architecture = architecture_of(gguf)
    keys = Keys(gguf, architecture)
    if keys.integer(".expert_count", 0, low=0) > 0:
        raise keys.fault(".expert_count", "mixture-of-experts models are not supported")
    config: dict[str, Any] = {"model_type": ARCHITECTURES[architecture], **_sizes(keys)}
    config |= {
        "rms_norm_eps": keys.number(".attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number(".rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys, config),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
        "hidden_act": "silu",
        "sliding_window": None,
    }
    rotated = keys.integer(".rope.dimension_count", config["head_dim"])
    if rotated > config["head_dim"] or rotated % 2:
        raise keys.fault(".rope.dimension_count", f"is {rotated}; must be even and at most {config['head_dim']}")
    if rotated != config["head_dim"]:
        config["partial_rotary_factor"] = rotated / config["head_dim"]
    if architecture == "gemma3":
        config |= _gemma(keys, config)
    elif architecture == "llama" and keys.has(".attention.sliding_window"):
        # Only Mistral's first models come with a window; otherwise the two families are one.
        config |= {"model_type": "mistral", "sliding_window": keys.integer(".attention.sliding_window")}
    vocabulary = config["vocab_size"]
    for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        config[name] = keys.token(key, vocabulary)
    return config


def _sizes(keys: Keys) -> dict[str, int]:
    tensors = keys.gguf.tensors
    layers = keys.integer(".block_count")
    if layers > len(tensors):
        raise keys.fault(".block_count", f"is {layers}, but the file has {len(tensors)} tensors in all")
    hidden = keys.integer(".embedding_length")
    heads = keys.integer(".attention.head_count", high=1 << 16)
    kv_heads = keys.integer(".attention.head_count_kv", heads, high=1 << 16)
    if heads % kv_heads:
        raise keys.fault(".attention.head_count_kv", f"{kv_heads} does not divide the {heads} query heads")
    if not keys.has(".attention.key_length") and hidden % heads:
        raise keys.fault(".attention.head_count", f"{heads} does not divide {hidden}, and there is no key_length")
    head_dim = keys.integer(".attention.key_length", hidden // heads or None, high=1 << 16)
    if keys.integer(".attention.value_length", head_dim) != head_dim:
        raise keys.fault(".attention.value_length", f"must be {head_dim}, as the key length is")
    if head_dim % 2:
        raise keys.fault(".attention.key_length", f"is {head_dim}; must be even")
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise fault(
            keys.gguf.path, "token_embd.weight", f"architecture {keys.architecture!r} needs it; the tensor is missing"
        )
    vocabulary = embedding.shape[0]
    if keys.integer(".vocab_size", vocabulary) != vocabulary:
        raise keys.fault(".vocab_size", f"does not agree with the {vocabulary} rows of token_embd.weight")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": keys.integer(".feed_forward_length"),
        "vocab_size": vocabulary,
        "max_position_embeddings": keys.integer(".context_length"),
    }


def _gemma(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any]:
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    pattern_key = ".attention.sliding_window_pattern"
    pattern = keys.gguf.metadata.get(keys.name(pattern_key), _GEMMA_PATTERN)
    if isinstance(pattern, np.ndarray):
        if pattern.dtype.kind not in "bui" or pattern.size != layers:
            raise keys.fault(pattern_key, f"must be one number, or {layers} truth values")
        local = [bool(entry) for entry in pattern]
    else:
        period = keys.integer(pattern_key, _GEMMA_PATTERN)
        local = [(layer + 1) % period != 0 for layer in range(layers)]
    # The largest model scales by the width of a head's share of the hidden state, all others by head_dim.
    scalar = float(config["hidden_size"] // config["num_attention_heads"] if layers == _GEMMA_27B_LAYERS else head_dim)
    if keys.has(".attention.scale"):
        scalar = keys.number(".attention.scale") ** -2
    result: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "rope_theta": keys.number(".rope.freq_base", 1e6),
        "rope_local_base_freq": keys.number(".rope.freq_base_swa", _GEMMA_LOCAL_BASE),
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "sliding_window": keys.integer(".attention.sliding_window"),
        "layer_types": ["sliding_attention" if entry else "full_attention" for entry in local],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if keys.has(f".{name}"):
            result[name] = keys.number(f".{name}")
    return result


def _rope_scaling(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = keys.text(".rope.scaling.type", "none")
    factors = _frequency_factors(keys, config)
    if keys.has(".rope.scale_linear") and kind == "none":  # what files of 2023 have
        factor = keys.number(".rope.scale_linear")
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else factors
    if kind == "none":
        return factors
    if factors is not None:
        raise keys.fault(".rope.scaling.type", f"is {kind!r} beside a rope_freqs.weight; only one of them can hold")
    if kind == "linear":
        return {"rope_type": "linear", "factor": keys.number(".rope.scaling.factor")}
    if kind != "yarn":
        raise keys.fault(".rope.scaling.type", f"{kind[:100]!r} is not supported; supported are none, linear, yarn")
    factor = keys.number(".rope.scaling.factor")
    result: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = keys.integer(".rope.scaling.original_context_length", 0, low=0)
    result["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if keys.has(f".rope.scaling.{key}"):
            result[name] = keys.number(f".rope.scaling.{key}")
    if keys.has(".rope.scaling.attn_factor"):
        # ggml multiplies this on top of the paper's own factor, a config.json states the product.
        result["attention_factor"] = keys.number(".rope.scaling.attn_factor") * (0.1 * math.log(max(factor, 1.0)) + 1)
    return result


def _frequency_factors(keys: Keys, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rope scaling behind a ``rope_freqs.weight``, which divides each frequency [D / 2].

    Llama 3 files hold the result of its rule and not the rule's figures, so those are worked out again.
    """
    tensor = keys.gguf.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    where = "rope_freqs.weight"
    half = keys.integer(".rope.dimension_count", config["head_dim"]) // 2
    if tensor.shape != (half,):
        raise keys.fault(where, f"has shape {list(tensor.shape)}, expected {[half]}")
    raw = keys.gguf.file.data[tensor.offset : tensor.offset + tensor.size_bytes]
    factors = dequantize(raw, tensor.type).astype(np.float64)
    if not np.isfinite(factors).all() or factors.min() <= 0:
        raise keys.fault(where, "must hold finite numbers over 0")
    if (factors == 1).all():
        return None
    most = float(factors.max())
    base = keys.number(".rope.freq_base", 10000.0)
    wavelengths = 2 * math.pi * base ** (np.arange(half) / half)
    smooth = np.clip((8192 / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    if np.allclose(factors, 1 / ((1 - smooth) / most + smooth), rtol=1e-4, atol=0):
        return {
            "rope_type": "llama3",
            "factor": float(f"{most:.6g}"),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    raise keys.fault(where, "holds factors that do not follow from Llama 3's rule; no other rule is supported")
