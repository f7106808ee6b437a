"""Tiny models of every family, whose layers matter, and what transformers makes of them without some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.quantize.conftest import _one_thread, family

from kimicore import EngineConfig, SyncEngine

__all__ = ["_one_thread", "family"]

LAYERS = 5
WINDOWS: dict[str, dict[str, Any]] = {
    "qwen3": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    "gemma3_text": {"sliding_window_pattern": 3},
}
PROMPTS = [[3 + (7 * at + at * at * (number + 1)) % 290 for at in range(30 + 9 * number)] for number in range(3)]
"""Longer than the windows."""
NEW_TOKENS = 16


@pytest.fixture
def layered(family: Callable[..., Path]) -> Callable[..., Path]:
    """Write a model of five layers into a folder, with windows where its family has them: ``layered("qwen3")``."""

    def make(name: str, **changes: Any) -> Path:
        return family(name, **{"num_hidden_layers": LAYERS, **WINDOWS.get(name, {}), **changes})

    return make


@pytest.fixture
def identity(layered: Callable[..., Path]) -> Callable[..., Path]:
    """Make layers of a Llama-type model do nothing: ``identity(3)``."""

    def make(*layers: int) -> Path:
        folder = layered("llama", attention_bias=False, mlp_bias=False)
        tensors = load_file(folder / "model.safetensors")
        for layer in layers:
            for part in ("self_attn.o_proj", "mlp.down_proj"):
                tensors[f"model.layers.{layer}.{part}.weight"].zero_()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


@pytest.fixture(scope="session")
def oracle() -> Callable[[Path, Sequence[int]], Any]:
    """A folder's model in transformers, with layers taken out of it: ``oracle(folder, [1, 3])``."""

    def make(folder: Path, skipped: Sequence[int]) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        kept = [one for one in range(len(model.model.layers)) if one not in skipped]
        model.model.layers = torch.nn.ModuleList([model.model.layers[one] for one in kept])
        model.config.num_hidden_layers = len(kept)
        if getattr(model.config, "layer_types", None) is not None:
            model.config.layer_types = [model.config.layer_types[one] for one in kept]
        return model

    return make


@pytest.fixture(scope="session")
def greedy() -> Callable[[Any], list[tuple[int, ...]]]:
    """The greedy continuations of a model in transformers, each token from the whole text before it."""

    def make(model: Any) -> list[tuple[int, ...]]:
        found = []
        with torch.inference_mode():
            for prompt in PROMPTS:
                ids = list(prompt)
                for _ in range(NEW_TOKENS):
                    ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
                found.append(tuple(ids[len(prompt) :]))
        return found

    return make


@pytest.fixture(scope="session")
def answers() -> Callable[..., list[tuple[int, ...]]]:
    """The same of an engine with these settings: ``answers(folder, skip_layers=(1, 3))``."""

    def make(folder: Path, **settings: Any) -> list[tuple[int, ...]]:
        config = EngineConfig(**{"dtype": "float32", "kv_device_bytes": "4MiB", **settings})
        with SyncEngine(folder, config) as engine:
            found = engine.generate_many(PROMPTS, max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        return [one.token_ids for one in found]

    return make
