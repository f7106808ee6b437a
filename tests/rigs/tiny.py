"""A tiny Llama-type model with random weights, in a folder as a real one would come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["SPECIALS", "TEMPLATE", "make_tiny", "tiny_tokenizer"]

SPECIALS = ("<|pad|>", "<|begin|>", "<|end|>")
MERGES = (
    "t h", "i n", "e r", "a n", "Ġ t", "Ġt h", "o n", "Ġ a", "r e", "Ġ s", "a t", "e n", "o r", "e s", "i s",
    "Ġ w", "i t", "o u", "Ġ o", "Ġth e", "Ġ c", "Ġ b", "in g", "Ġ f", "a l", "Ġ in", "e d", "Ġ m", "Ġa n", "l l",
    "a r", "Ġ d", "Ġ p", "an d", "Ġan d", "l e", "Ġo f", "Ġt o", "i c", "a s", "Ġb e",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<|begin|>' + m['role'] + '\\n' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\\n' }}{% endif %}"
)
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _byte_letters() -> list[str]:
    """Return the letter that byte-level BPE writes for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def tiny_tokenizer() -> str:
    """Return a byte-level BPE ``tokenizer.json`` of 300 pieces: 3 special ones, 256 bytes, 41 merges."""
    vocab = {text: i for i, text in enumerate(SPECIALS)}
    for piece in [*_byte_letters(), *(merge.replace(" ", "") for merge in MERGES)]:
        vocab[piece] = len(vocab)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [merge.split(" ") for merge in MERGES],
    }
    tree = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": text, **flags} for i, text in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }
    return json.dumps(tree)


def make_tiny(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write the model into ``folder`` and return it; ``changes`` go into its config.json.

    Weights are large enough that the next token depends on the whole context.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    config = {**SIZES, "vocab_size": len(SPECIALS) + 256 + len(MERGES), **changes}
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale / shape[-1] ** 0.5

    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    tensors = {
        "model.embed_tokens.weight": weight(vocab, width, scale=8.0),
        "lm_head.weight": weight(vocab, width, scale=3.0),
        "model.norm.weight": torch.ones(width),
    }
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        tensors |= {
            f"{at}input_layernorm.weight": torch.ones(width),
            f"{at}post_attention_layernorm.weight": torch.ones(width),
            f"{at}self_attn.q_proj.weight": weight(width, width, scale=1.5),
            f"{at}self_attn.k_proj.weight": weight(kv, width, scale=1.5),
            f"{at}self_attn.v_proj.weight": weight(kv, width, scale=2.0),
            f"{at}self_attn.o_proj.weight": weight(width, width, scale=2.0),
            f"{at}mlp.gate_proj.weight": weight(inner, width, scale=1.5),
            f"{at}mlp.up_proj.weight": weight(inner, width, scale=1.5),
            f"{at}mlp.down_proj.weight": weight(width, inner, scale=1.5),
        }
        if config["model_type"] == "qwen2":
            sizes = {"q": width, "k": kv, "v": kv}
            tensors |= {f"{at}self_attn.{name}_proj.bias": weight(size) for name, size in sizes.items()}
    save_file(tensors, folder / "model.safetensors")
    names = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "pad_token": SPECIALS[0]}
    texts = {
        "config.json": json.dumps(config),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": json.dumps({**names, "add_bos_token": False, "chat_template": TEMPLATE}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder
