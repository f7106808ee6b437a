"""Tiny models of every family in folders that load by themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.rigs.tiny import SPECIALS, tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "gemma3_text": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 24},
    "gemma3_text": {"sliding_window": 24, "sliding_window_pattern": 2, "final_logit_softcapping": 20.0},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products are slower on two
    yield
    torch.set_num_threads(before)


@pytest.fixture
def family(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny random model of a family into a folder: ``family("qwen3")``."""

    def make(name: str, **changes: Any) -> Path:
        config_class, model_class = CLASSES[name]
        torch.manual_seed(3)
        model = model_class(config_class(**{**SIZES, **OWN.get(name, {}), **changes})).eval()
        generator = torch.Generator().manual_seed(7)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases start as ones and zeros, in which no mistake would show
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
        folder = tmp_path / f"source-{name}"
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(tiny_tokenizer(), encoding="utf-8")
        names = f'{{"bos_token": "{SPECIALS[1]}", "eos_token": "{SPECIALS[2]}", "add_bos_token": false}}'
        (folder / "tokenizer_config.json").write_text(names, encoding="utf-8")
        return folder

    return make
