"""The modules that a precision map names are the tensors that are loaded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from kimicore.model.load import open_source
from kimicore.model.modules import modules_of
from kimicore.model.spec import spec_from_config


def tensor_name(module: str) -> str:
    """Return what a module's tensor is called in a Hugging Face file."""
    name = module if module.endswith(".bias") else f"{module}.weight"
    return name if module == "lm_head" else f"model.{name}"


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 32}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("gemma3_text", {"sliding_window": 32}),
    ],
)
def test_modules_are_the_tensors_of_a_file(model_type: str, changes: dict[str, Any], tiny: Any) -> None:
    """For every architecture, names and shapes are exactly those of the tensors that its reference code writes."""
    source = tiny(model_type, **changes).source()
    modules = modules_of(spec_from_config(source.config))
    found = {tensor_name(one.name): one.shape for one in modules}
    assert len(found) == len(modules)
    assert found == {name: source.shape(name) for name in source.names()}


def test_kinds_follow_from_what_a_module_does(tiny: Any) -> None:
    """Attention, feed-forward, norm, embedding and head are told apart; a bias has its owner's kind."""
    source = tiny("qwen2", tie_word_embeddings=False).source()
    kinds = {one.name: one.kind for one in modules_of(spec_from_config(source.config))}
    assert kinds["embed_tokens"] == "embedding"
    assert kinds["lm_head"] == "head"
    assert kinds["norm"] == kinds["layers.1.post_attention_layernorm"] == "norm"
    assert kinds["layers.2.self_attn.k_proj"] == kinds["layers.2.self_attn.k_proj.bias"] == "attention"
    assert kinds["layers.0.mlp.gate_proj"] == "ffn"


@pytest.mark.parametrize("model", ["smollm2_path", "gemma_path"])
def test_modules_of_the_demo_models(model: str, request: pytest.FixtureRequest) -> None:
    """The demo models' modules are the tensors of their files, each with its shape, and hold all their weights."""
    path: Path = request.getfixturevalue(model)
    source = open_source(path)
    spec = spec_from_config(source.config)
    modules = modules_of(spec)
    names = set(source.names())
    assert {tensor_name(one.name) for one in modules} == names - {"lm_head.weight"} if spec.tied else names
    for one in modules:
        assert source.shape(tensor_name(one.name)) == one.shape
    total = sum(math.prod(one.shape) for one in modules)
    assert total == {"smollm2_path": 134_515_008, "gemma_path": 268_098_176}[model]
