"""Logits of tiny random models against transformers, float32: every architecture, rope and window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.modeling_utils
from transformers.models.gemma3.modeling_gemma3 import eager_attention_forward

THETA = {"rope_theta": 10_000.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn-attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 200,
        "attention_factor": 1.3,
        "beta_fast": 20,
        "beta_slow": 2,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 500,  # so that the ramp's ends lie between whole dimensions
        "mscale": 1.5,
        "mscale_all_dim": 0.6,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bias-mha": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {"hidden_size": 96}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "attention_bias": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def _run_all_ways(made: Any, prompt: Callable[..., list[int]], close: Callable[..., None]) -> None:
    """Compare whole prompts in one batch, the long one in chunks, and the rows' further tokens one at a time."""
    bench = made.bench()
    prompts = [prompt(90), prompt(17, 1), prompt(1, 2)]
    rows = [bench.row(tokens) for tokens in prompts]
    for tokens, logits in zip(prompts, bench.run([(r, len(r.tokens)) for r in rows], dummies=5), strict=True):
        close(logits, made.expected(tokens), f"batch, {len(tokens)} tokens")
    expected = made.expected(prompts[0])
    close(bench.whole(prompts[0], chunk=7), expected, "chunks of 7")
    row, other = bench.row(prompts[0]), bench.row(prompts[1])
    bench.run([(row, 80), (other, 3)], selected="none")
    for position in range(80, 90):
        logits = bench.run([(other, 1), (row, 1)], selected="last")[1]
        close(logits, (expected[0][position : position + 1], expected[1]), f"decode at {position}")


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", MODELS)
def test_logits(name: str, rope: str, tiny: Any, prompt: Any, close: Any) -> None:
    """Every architecture, rope and window gives the logits of transformers: in batches, in chunks, token by token."""
    model_type, changes = MODELS[name]
    _run_all_ways(tiny(model_type, rope_parameters={**THETA, **ROPES[rope]}, **changes), prompt, close)


@pytest.mark.parametrize("rope", ["default", "linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("sliding", ["default", "linear", "yarn"])
@pytest.mark.parametrize("pattern", [2, 3])
def test_gemma_logits(pattern: int, sliding: str, rope: str, tiny: Any, prompt: Any, close: Any) -> None:
    """Gemma 3 has a rope of its own on each kind of layer, windows by pattern, and its own scales."""
    changes = {
        "rope_parameters": {
            "full_attention": {"rope_theta": 1_000_000.0, **ROPES[rope]},
            "sliding_attention": {"rope_theta": 10_000.0, **ROPES[sliding]},
        },
        "sliding_window": 8,
        "sliding_window_pattern": pattern,
        "query_pre_attn_scalar": 24,
        "final_logit_softcapping": 3.0 if pattern == 2 else None,
        "num_key_value_heads": 1 if pattern == 3 else 2,
    }
    _run_all_ways(tiny("gemma3_text", **changes), prompt, close)


def test_gemma_as_published(tiny: Any, prompt: Any, close: Any) -> None:
    """A configuration in the older spelling (rope_local_base_freq, rope_scaling, a pattern) means the same model."""
    made = tiny(
        "gemma3_text", num_hidden_layers=7, sliding_window=8, rope_scaling={"factor": 8.0, "rope_type": "linear"}
    )
    older = {key: value for key, value in made.config.items() if key not in ("rope_parameters", "layer_types")}
    older |= {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6}
    made.config = {**older, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    _run_all_ways(made, prompt, close)


def test_gemma_attention_softcap(tiny: Any, prompt: Any, close: Any) -> None:
    """attn_logit_softcapping caps the attention scores before the mask."""

    def capped(module: Any, *args: Any, **kwargs: Any) -> Any:
        return eager_attention_forward(module, *args, **{**kwargs, "softcap": module.config.attn_logit_softcapping})

    transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register("capped", capped)
    transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(
        "capped", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"]
    )
    made = tiny("gemma3_text", ("capped",), attn_logit_softcapping=0.7, sliding_window=8, sliding_window_pattern=2)
    _run_all_ways(made, prompt, close)


@pytest.mark.parametrize("chunk", [4, 7, 16, None])
@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_window_edges(model_type: str, chunk: int | None, tiny: Any, prompt: Any, close: Any) -> None:
    """transformers#47708: window 8 with prompts around its multiples equals masked full attention, however chunked."""
    made = tiny(model_type, sliding_window=8)
    bench = made.bench()
    for count in (1, 3, 7, 8, 9, 15, 16, 17):
        tokens = prompt(count + 5, count)
        expected, tolerance = made.expected(tokens)
        row = bench.row(tokens)
        while row.computed < count:
            start, step = row.computed, min(chunk or count, count - row.computed)
            close(bench.run([(row, step)])[0], (expected[start : start + step], tolerance), f"{count} at {start}")
        for position in range(count, count + 5):
            close(bench.run([(row, 1)])[0], (expected[position : position + 1], tolerance), f"{count}: {position}")


@pytest.mark.parametrize("rope", ["linear", "dynamic", "yarn-attention", "llama3"])
def test_scaling_is_applied_at_a_distance(rope: str, tiny: Any, prompt: Any) -> None:
    """mlx-vlm#1710: logits at positions 0, 100 and 1000 follow the scaled rope, to 1e-4, and not the plain one."""
    scaling = dict(ROPES[rope])
    if "original_max_position_embeddings" in scaling:
        scaling["original_max_position_embeddings"] = 256
    size = {"max_position_embeddings": 512, "initializer_range": 0.08}
    made = tiny("llama", rope_parameters={**THETA, **scaling}, **size)
    tokens = prompt(1001)
    expected, _ = made.expected(tokens)
    actual = made.bench().whole(tokens)
    made.config["rope_parameters"] = {**THETA, "rope_type": "default"}
    plain = made.bench().whole(tokens)
    for position in (0, 100, 1000):
        assert torch.allclose(actual[position], expected[position], rtol=0, atol=1e-4), position
    assert (plain[1000] - expected[1000]).abs().max() > 1e-2


def test_dynamic_rope_does_not_leak_between_rows(tiny: Any, prompt: Any) -> None:
    """transformers#25306: a row over the trained length changes no other row, before it, after it or beside it."""
    made = tiny("llama", rope_parameters={**THETA, **ROPES["dynamic"]})
    bench = made.bench()
    short, long = prompt(20), prompt(200, 1)
    before = bench.whole(short)
    alone = bench.whole(long)
    after = bench.whole(short)
    assert torch.equal(before, after)
    rows = [bench.row(short), bench.row(long), bench.row(short)]
    together = bench.run([(row, len(row.tokens)) for row in rows])
    for actual, expected in zip(together, (before, alone, before), strict=True):
        assert torch.allclose(actual, expected, rtol=0, atol=1e-4)


def test_dynamic_rope_under_the_trained_length(tiny: Any, prompt: Any, close: Any) -> None:
    """vllm#52675: a context limit under the trained length is the plain rope, and finite."""
    dynamic = {**THETA, "rope_type": "dynamic", "factor": 4.0}
    made = tiny("llama", rope_parameters=dynamic, max_position_embeddings=512)
    tokens = prompt(100)
    actual = made.bench().whole(tokens, rope_tokens=100)
    close(actual, made.expected(tokens))
    made.config["rope_parameters"] = {**THETA, "rope_type": "default"}
    assert torch.equal(actual, made.bench().whole(tokens))


def test_heads_times_head_dim_is_not_hidden(tiny: Any, prompt: Any, close: Any) -> None:
    """entrenar#262: with an explicit head_dim the query output is heads x head_dim wide, whatever the hidden size."""
    made = tiny("qwen3", num_attention_heads=4, num_key_value_heads=1, head_dim=32, hidden_size=40)
    layer = made.model().weights.layers[0]
    assert (tuple(layer.qkv.shape), tuple(layer.output.shape)) == ((128 + 2 * 32, 40), (40, 128))
    _run_all_ways(made, prompt, close)
