"""Writes a Llama folder with a byte-level BPE tokenizer, such as ``train_llama.py`` makes, as a GGUF file of one type.

    python benchmarks/write_gguf.py FOLDER OUT.gguf [--type Q4_1]

Matrices are rounded to nearest by the ``gguf`` package; norms stay in float32. It is for comparing a file that is
quantized already with what it was made from (``precision.py --stored OUT.gguf``). Needs the test extra.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def name_of(tensor: str) -> str:
    """Return what GGUF calls a tensor of a Llama folder."""
    name = tensor.removesuffix(".weight")
    if name in OUTER:
        return f"{OUTER[name]}.weight"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.weight"


def turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return a query or key matrix [heads * dim, C] with the two halves of each head's channels in turns.

    GGUF files of Llama rotate neighbouring channels, folders the first half with the second.
    """
    outs, depth = weight.shape
    return weight.reshape(heads, 2, outs // heads // 2, depth).swapaxes(1, 2).reshape(outs, depth)


def add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the model's sizes."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, end: int) -> None:
    """Write the vocabulary and the merges."""
    tree = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tree["model"]["vocab"]
    special = {one["content"] for one in tree["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [gguf.TokenType.CONTROL if one in special else gguf.TokenType.NORMAL for one in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in tree["model"]["merges"]])
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def write(folder: Path, out: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write the file."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(out, "llama")
    add_settings(writer, config)
    add_tokenizer(writer, folder, config["eos_token_id"])
    for name, weight in load_file(folder / "model.safetensors").items():
        values = weight.astype(np.float32)
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            values = turned(values, config[heads]) if part in name else values
        if values.ndim == 1:
            writer.add_tensor(name_of(name), values)
        else:
            writer.add_tensor(name_of(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="Q4_1", choices=("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))
    options = parser.parse_args()
    write(options.folder, options.out, gguf.GGMLQuantizationType[options.type])
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
