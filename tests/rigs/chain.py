"""A 'chain' model on a real vocabulary: the next token is a fixed function of the last one.

Attention and MLP outputs are zero, embeddings are random unit vectors, and the output row of the token that follows
``i`` is the embedding of ``i``; so any text of distinct tokens, or a cycle, can be scripted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kimicore.model.load import open_source
from kimicore.text.tokenizer import Tokenizer

__all__ = ["COUNT", "GEMMA_START", "START", "make_chain", "successors"]

WIDTH = 64
START, COUNT, GEMMA_START = 30_001, 30_002, 100_001
"""Tokens that begin scripted texts."""


def successors(vocab_size: int, chains: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the next token of each token [V], a permutation in which every chain's tokens follow each other."""
    following: dict[int, int] = {}
    for chain in chains:
        for one, then in pairwise(chain):
            if following.get(one, then) != then:
                raise ValueError(f"token {one} is followed by {following[one]} and by {then}")
            following[one] = then
    if len(set(following.values())) != len(following):
        raise ValueError("a token follows two others")
    free_from = [one for one in range(vocab_size) if one not in following]
    taken = set(following.values())
    free_to = [one for one in range(vocab_size) if one not in taken]
    following.update(zip(free_from, free_to[1:] + free_to[:1], strict=True))
    return torch.tensor([following[one] for one in range(vocab_size)])


def make_chain(
    folder: Path,
    vocabulary: Path,
    chains: Sequence[Sequence[int]],
    *,
    eos_ids: Sequence[int] | None = None,
    **more: Any,
) -> Path:
    """Write a chain model on the vocabulary of the GGUF file ``vocabulary`` into ``folder`` and return it.

    ``more``: further fields of tokenizer_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = open_source(vocabulary).text
    tokenizer = Tokenizer.from_source(text)
    size = tokenizer.vocab_size
    generator = torch.Generator().manual_seed(5)
    embedding = torch.nn.functional.normalize(torch.randn(size, WIDTH, generator=generator), dim=1)
    head = torch.empty_like(embedding)
    head[successors(size, chains)] = embedding
    zeros, ones = torch.zeros(WIDTH, WIDTH), torch.ones(WIDTH)
    at = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": 8.0 * ones,  # logits of 64 for the right token
        f"{at}input_layernorm.weight": ones,
        f"{at}post_attention_layernorm.weight": ones,
        **{f"{at}self_attn.{name}_proj.weight": zeros for name in "qkvo"},
        **{f"{at}mlp.{name}_proj.weight": zeros for name in ("gate", "up", "down")},
    }
    save_file({name: one.to(torch.bfloat16) for name, one in tensors.items()}, folder / "model.safetensors")
    ends = list(text.eos_ids if eos_ids is None else eos_ids)
    config = {
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": WIDTH,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "bos_token_id": text.bos_id,
        "eos_token_id": ends,
    }
    settings = {"add_bos_token": text.add_bos, "chat_template": text.chat_template, **more}
    files = {
        "config.json": json.dumps(config),
        "generation_config.json": json.dumps({"eos_token_id": ends}),
        "tokenizer.json": tokenizer._parts.parsing.to_str(),
        "tokenizer_config.json": json.dumps(settings),
    }
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder
