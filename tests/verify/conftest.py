"""Small models in folders to compare: a Llama type, a Gemma type with windows, and damaged copies."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the rigs

from rigs.tiny import SPECIALS, make_tiny, tiny_tokenizer


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products are slower on two
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama-type model."""
    return make_tiny(tmp_path_factory.mktemp("verify") / "llama")


@pytest.fixture(scope="session")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 text model: most layers see 24 tokens, the vocabulary is padded and ids are tied."""
    folder = tmp_path_factory.mktemp("verify") / "gemma"
    torch.manual_seed(5)
    config = transformers.Gemma3TextConfig(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=24,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tiny_tokenizer(), encoding="utf-8")
    names = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "pad_token": SPECIALS[0], "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return folder


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """Copy a model with some tensors changed: ``changed(folder, "layers.1.", lambda name, tensor: ...)``."""

    def make(folder: Path, part: str, change: Callable[[str, Tensor], Tensor], **config: Any) -> Path:
        copy = tmp_path / f"changed-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("verify.json"))
        file = copy / "model.safetensors"
        tensors = {
            name: (change(name, tensor) if part in name else tensor).contiguous()
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
        if config:
            tree = json.loads((copy / "config.json").read_text())
            (copy / "config.json").write_text(json.dumps({**tree, **config}))
        return copy

    return make


@pytest.fixture(scope="session")
def noisy() -> Callable[[float], Callable[[str, Tensor], Tensor]]:
    """A change that adds noise of this size relative to the tensor's own, the same every time."""

    def make(size: float) -> Callable[[str, Tensor], Tensor]:
        def change(name: str, tensor: Tensor) -> Tensor:
            generator = torch.Generator().manual_seed(len(name))
            return tensor + size * tensor.float().std() * torch.randn(tensor.shape, generator=generator)

        return change

    return make
