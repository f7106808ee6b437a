"""Reading a configuration: what is accepted, what it becomes, and what is refused by its name."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from kimicore.errors import ModelLoadError
from kimicore.model.kv_layout import kv_classes, kv_places
from kimicore.model.spec import spec_from_config

BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 64,
}


def spec(model_type: str = "llama", **changes: Any) -> Any:
    config = {"model_type": model_type, **BASE, **changes}
    return spec_from_config({key: value for key, value in config.items() if value is not ...})


def windows(model_type: str, **changes: Any) -> list[int | None]:
    return [layer.window for layer in spec(model_type, **changes).layers]


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(5, 2), (7, 3), (2, 4), (6, 0)], ids=["5/2", "7/3", "more kv than query", "no kv"]
)
def test_heads_that_do_not_divide(heads: int, kv_heads: int) -> None:
    """flash-linear-attention#1029: query heads that KV heads do not divide are a load error with both numbers."""
    with pytest.raises(ModelLoadError, match=rf"num_attention_heads={heads} .*num_key_value_heads={kv_heads}\b"):
        spec(num_attention_heads=heads, num_key_value_heads=kv_heads)


@pytest.mark.parametrize(
    ("rope_scaling", "kind", "factor"),
    [
        ({"type": "linear", "factor": 2.0}, "linear", 2.0),
        ({"rope_type": "linear", "factor": 2}, "linear", 2.0),
        ({"type": "dynamic", "rope_type": "dynamic", "factor": 4.0}, "dynamic", 4.0),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, "yarn", 4.0),
        (None, "default", 1.0),
        ({}, "default", 1.0),
        ({"rope_type": "default"}, "default", 1.0),
    ],
)
@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_rope_spellings(where: str, rope_scaling: Any, kind: str, factor: float) -> None:
    """mlxcel#1386: 'type' and 'rope_type', both, one, null and {} are read alike, in either place."""
    rope = spec(**{where: rope_scaling}).ropes[0]
    assert (rope.kind, rope.factor, rope.theta) == (kind, factor, 10_000.0)


@pytest.mark.parametrize(
    ("rope_scaling", "named"),
    [
        ({"type": "foo", "factor": 2.0}, "'foo'"),
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope'"),
        ({"type": "linear", "rope_type": "dynamic", "factor": 2.0}, "'dynamic' contradicts type='linear'"),
        ({"type": "linear", "factor": 0}, r"factor=0"),
        ({"type": "linear", "factor": -2.0}, r"factor=-2.0"),
        ({"type": "dynamic", "factor": math.nan}, r"factor=nan"),
        ({"type": "linear", "factor": "2"}, r"factor='2'"),
        ({"type": "linear", "factor": True}, r"factor=True"),
        ({"type": "linear"}, "factor is missing"),
        ({"factor": 2.0}, "without a rope_type"),
        ({"type": "linear", "factor": 2.0, "alpha": 1000}, "alpha=1000"),
        ({"type": "default", "mrope_section": [1, 2, 3]}, "mrope_section"),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor is missing"),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor=4.0"),
        ({"type": "yarn", "factor": 4.0, "attention_factor": 0}, "attention_factor=0"),
        ({"type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 32}, "beta_fast=1.0 is under beta_slow=32.0"),
        ({"type": "yarn", "factor": 4.0, "truncate": 1}, "truncate=1"),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}, "original_max_position_embeddings=0"),
        ({"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"type": "factors", "factors": [1.0, 2.0]}, "factors has 2 entries, expected 8"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ("linear", "rope_scaling='linear'"),
    ],
)
def test_bad_ropes(rope_scaling: Any, named: str) -> None:
    """mlxcel#1386: an unknown rope kind, key or value is a load error that names it, never a silent default."""
    with pytest.raises(ModelLoadError, match=named):
        spec(rope_scaling=rope_scaling)


def test_contradicting_ropes() -> None:
    """rope_scaling and rope_parameters may stand beside each other, but not contradict each other."""
    with pytest.raises(ModelLoadError, match=r"rope_scaling\['factor'\]=2.0 contradicts .*=4.0"):
        spec(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "linear", "factor": 4.0})
    both = spec(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_theta": 5000.0})
    assert (both.ropes[0].kind, both.ropes[0].theta) == ("linear", 5000.0)


def test_rope_of_a_model_that_keeps_its_original_length_outside() -> None:
    """original_max_position_embeddings is read at the top level first, then within, else it is the trained length."""
    inner = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert spec(rope_scaling=inner).ropes[0].original_tokens == 16
    assert spec(rope_scaling=inner, original_max_position_embeddings=8).ropes[0].original_tokens == 8
    assert spec(rope_scaling={"type": "yarn", "factor": 4.0}).ropes[0].original_tokens == 64


def test_dynamic_rope_variant() -> None:
    """Rows share KV blocks only where a dynamic rope stretches them alike: not at all up to the trained length."""
    dynamic = spec(rope_scaling={"type": "dynamic", "factor": 4.0})
    assert [dynamic.rope_variant(n) for n in (1, 64, 65, 200)] == [0, 0, 65, 200]
    assert spec().rope_variant(200) == 0


@pytest.mark.parametrize(
    ("rope", "tokens"),
    [
        ({}, 64),
        ({"type": "linear", "factor": 2.0}, 128),
        ({"type": "dynamic", "factor": 4.0}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 64),
    ],
)
def test_context_tokens(rope: dict[str, Any], tokens: int) -> None:
    """The model's context is its trained length, scaled where the rope is stretched beyond it."""
    assert spec(rope_scaling=rope).context_tokens == tokens


def test_windows() -> None:
    """Every spelling of sliding windows gives each layer its window."""
    assert windows("llama") == [None] * 4
    assert windows("mistral", sliding_window=8) == [8] * 4
    assert windows("mistral", sliding_window=None) == [None] * 4
    assert windows("mistral") == [4096] * 4  # missing: what the reference code assumes
    late = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    assert windows("qwen2", **late) == [None, None, None, 8]
    assert windows("qwen3", **{**late, "max_window_layers": 0}) == [8] * 4
    assert windows("qwen2", **{**late, "use_sliding_window": False}) == [None] * 4
    assert windows("gemma3_text", sliding_window=8, sliding_window_pattern=2) == [8, None, 8, None]
    assert windows("gemma3_text", sliding_window=8) == [8] * 4
    types = ["full_attention", "sliding_attention"] * 2
    assert windows("gemma3_text", sliding_window=8, layer_types=types) == [None, 8, None, 8]
    assert windows("qwen3", layer_types=types, use_sliding_window=True, sliding_window=8) == [None, 8, None, 8]


@pytest.mark.parametrize(
    ("model_type", "changes", "named"),
    [
        ("llama", {"hidden_size": 0}, "hidden_size=0"),
        ("llama", {"hidden_size": 48.0}, "hidden_size=48.0"),
        ("llama", {"hidden_size": ...}, "hidden_size is missing"),
        ("llama", {"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ("llama", {"vocab_size": "131"}, "vocab_size='131'"),
        ("llama", {"intermediate_size": None}, "intermediate_size is missing"),
        ("llama", {"head_dim": 15}, "head_dim=15"),
        ("llama", {"head_dim": None, "hidden_size": 50}, "hidden_size=50 .*num_attention_heads=6"),
        ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06"),
        ("llama", {"rope_theta": 0}, "rope_theta=0"),
        ("llama", {"max_position_embeddings": 0}, "max_position_embeddings=0"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("llama", {"sliding_window": 8}, "sliding_window=8"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "layer 0 is sliding_attention"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "3 entries for num_hidden_layers=4"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, r"layer_types\[0\]='linear_attention'"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window=None"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("llama", {"num_local_experts": 8}, "num_local_experts=8: mixtures of experts"),
        ("llama", {"kv_lora_rank": 512}, "kv_lora_rank=512: latent attention"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"residual_multiplier": 0.22}, "residual_multiplier=0.22"),
        ("mistral", {"attention_bias": True}, "attention_bias=True"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias=True"),
        ("mamba", {}, "'mamba' is not supported; supported are llama, mistral, qwen2, qwen3, gemma3_text, gemma3"),
        (None, {}, "model_type=None"),
        ("gemma3", {}, "text_config=None"),
        ("gemma3", {"text_config": {"model_type": "llama"}}, "text_config.model_type='llama'"),
    ],
)
def test_refused(model_type: str, changes: dict[str, Any], named: str) -> None:
    """A field that is malformed, contradictory or not computed here is a load error that names it and its value."""
    with pytest.raises(ModelLoadError, match=named):
        spec(model_type, **changes)


def test_multimodal_gemma_with_a_sparse_text_config() -> None:
    """A gemma3 configuration is read by its text_config; what that leaves out has the reference code's defaults."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    read = spec_from_config({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert (read.heads, read.kv_heads, read.head_dim, read.vocab_size) == (8, 4, 256, 262_208)
    assert read.tied
    assert read.attention_scale == 1 / 16
    assert [(r.kind, r.theta, r.factor) for r in read.ropes] == [("default", 1e4, 1.0), ("linear", 1e6, 8.0)]
    assert [layer.window for layer in read.layers[:6]] == [1024] * 5 + [None]
    assert read.context_tokens == 131_072


def test_kv_classes() -> None:
    """Full-attention layers share a class, each window has its own, and every layer has one place."""
    mixed = spec("gemma3_text", sliding_window=8, sliding_window_pattern=3)
    full, window = kv_classes(mixed, "bfloat16", 16)
    assert (full.name, full.layers, full.window, full.shape) == ("full", (2,), None, (1, 2, 2, 16, 16))
    assert (window.name, window.layers, window.window) == ("window-8", (0, 1, 3), 8)
    assert (full.block_bytes, window.block_bytes) == (2048, 6144)
    assert kv_places(mixed) == ((1, 0), (1, 1), (0, 0), (1, 2))
    assert [c.name for c in kv_classes(spec("mistral", sliding_window=8), "float32", 16)] == ["window-8"]
    with pytest.raises(ModelLoadError, match="dtype='int3'"):
        kv_classes(mixed, "int3", 16)


def test_block_sizes_with_a_large_common_multiple_are_padded() -> None:
    """Where the classes' common multiple is over 64 MiB, blocks are padded a little and a slab stays bounded."""
    wide = {"num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}
    for layers in (61, 62, 64, 97):
        read = spec("gemma3_text", sliding_window=1024, **{**wide, "num_hidden_layers": layers})
        classes = kv_classes(read, "float32", 64)
        natural = [math.prod(c.shape) * 4 for c in classes]
        slab = math.lcm(*(c.block_bytes for c in classes))
        assert slab <= max(64 << 20, 2 * max(natural))
        for c, size in zip(classes, natural, strict=True):
            assert size <= c.block_bytes <= 1.34 * size
            assert c.block_bytes % 64 == 0


def test_reading_a_configuration_needs_no_torch() -> None:
    """A spec is read without torch, so that a tool can look at a model without loading it."""
    code = "import sys, kimicore.model.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
