"""Writes GGUF files whose matrices are random blocks of any type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kimicore.model.dequantize import QUANT_TYPES, QuantType

from .forge import TOKENS, header, padded, pair, tensor, vocabulary

CODED = {kind.name: kind for kind in QUANT_TYPES.values() if kind.split is not None}
NUMBERS = {kind.name: number for number, kind in QUANT_TYPES.items()}
# Where a block has its float16 scales, as bytes from its start.
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
SMALL_SCALE = 0x1400
"""Float16 for about .001."""
WIDTH, INNER, HEADS, KV_HEADS, DIM = 256, 512, 4, 2, 64
_EXTRAS: dict[str, dict[str, int]] = {
    "llama": {},
    "qwen2": {"attn_q.bias": HEADS * DIM, "attn_k.bias": KV_HEADS * DIM, "attn_v.bias": KV_HEADS * DIM},
    "qwen3": {"attn_q_norm.weight": DIM, "attn_k_norm.weight": DIM},
    "gemma3": {
        "attn_q_norm.weight": DIM,
        "attn_k_norm.weight": DIM,
        "post_attention_norm.weight": WIDTH,
        "post_ffw_norm.weight": WIDTH,
    },
}


def blocks(kind: QuantType, rows: int, per_row: int, seed: int, scale: int | None) -> np.ndarray:
    """Random blocks, all of whose scales are one float16 where ``scale`` gives its bits."""
    raw = np.random.default_rng(seed).integers(0, 256, (rows * per_row, kind.block_bytes), dtype=np.uint8)
    if scale is not None:
        for at in SCALES[kind.name]:
            raw[:, at : at + 2] = np.frombuffer(np.uint16(scale).tobytes(), dtype=np.uint8)
    return raw.reshape(-1)


def coded_gguf(path: Path, *types: str, architecture: str = "llama", layers: int = 1) -> Path:
    """Write a tiny model whose matrices have the given types in turn; norms and biases are floats."""
    random = np.random.default_rng(11)
    wide, narrow = HEADS * DIM, KV_HEADS * DIM
    matrices = {"token_embd.weight": (len(TOKENS), WIDTH)}
    vectors = {"output_norm.weight": WIDTH}
    for layer in range(layers):
        own = {
            "attn_q": (wide, WIDTH), "attn_k": (narrow, WIDTH), "attn_v": (narrow, WIDTH), "attn_output": (WIDTH, wide),
            "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
        }  # fmt: skip
        matrices |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
        extras = {"attn_norm.weight": WIDTH, "ffn_norm.weight": WIDTH, **_EXTRAS[architecture]}
        vectors |= {f"blk.{layer}.{name}": size for name, size in extras.items()}
    entries, data = [], b""
    for index, (name, (outs, depth)) in enumerate(matrices.items()):
        kind = CODED[types[index % len(types)]]
        entries.append(tensor(name, (depth, outs), NUMBERS[kind.name], len(data)))
        data += padded(blocks(kind, outs, depth // kind.block, index, SMALL_SCALE).tobytes())
    for name, size in vectors.items():
        entries.append(tensor(name, (size,), 0, len(data)))
        data += padded((1.0 + 0.2 * random.standard_normal(size)).astype("<f4").tobytes())
    path.write_bytes(padded(header([*_pairs(architecture, layers), *vocabulary()], entries)) + data)
    return path


def _pairs(architecture: str, layers: int) -> list[bytes]:
    values: dict[str, Any] = {
        "block_count": ("u32", layers), "embedding_length": ("u32", WIDTH), "feed_forward_length": ("u32", INNER),
        "attention.head_count": ("u32", HEADS), "attention.head_count_kv": ("u32", KV_HEADS),
        "attention.layer_norm_rms_epsilon": ("f32", 1e-5), "context_length": ("u32", 512),
    }  # fmt: skip
    if architecture in ("qwen3", "gemma3"):
        values |= {"attention.key_length": ("u32", DIM), "attention.value_length": ("u32", DIM)}
    if architecture == "gemma3":
        values["attention.sliding_window"] = ("u32", 16)
    pairs = [pair("general.architecture", "str", architecture)]
    return pairs + [pair(f"{architecture}.{key}", *value) for key, value in values.items()]
