"""Writes model files by hand, well-formed or not, independently of the package's readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FORMATS = {
    "u8": 0,
    "i8": 1,
    "u16": 2,
    "i16": 3,
    "u32": 4,
    "i32": 5,
    "f32": 6,
    "bool": 7,
    "str": 8,
    "u64": 10,
    "f64": 12,
}
_PACK = {
    "u8": "B",
    "i8": "b",
    "u16": "H",
    "i16": "h",
    "u32": "I",
    "i32": "i",
    "f32": "f",
    "bool": "?",
    "u64": "Q",
    "f64": "d",
}


def string(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: str, value: Any) -> bytes:
    return string(value) if kind == "str" else struct.pack(f"<{_PACK[kind]}", value)


def pair(key: str | bytes, kind: str, value: Any) -> bytes:
    """One metadata pair; a list makes an array of the kind."""
    if isinstance(value, (list, tuple)):
        head = struct.pack("<IIQ", 9, FORMATS[kind], len(value))
        return string(key) + head + b"".join(scalar(kind, entry) for entry in value)
    return string(key) + struct.pack("<I", FORMATS[kind]) + scalar(kind, value)


def tensor(name: str | bytes, dims: Sequence[int], kind: int, offset: int) -> bytes:
    """One tensor entry; dims as in the file, the row's length first."""
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(pairs: Sequence[bytes], tensors: Sequence[bytes], *, version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(pairs)) + b"".join([*pairs, *tensors])


def padded(raw: bytes, alignment: int = 32) -> bytes:
    return raw + bytes(-len(raw) % alignment)


def gguf(pairs: Sequence[bytes], arrays: Mapping[str, np.ndarray], *, version: int = 3, alignment: int = 32) -> bytes:
    """A whole file with float32 tensors."""
    entries, data = [], b""
    for name, array in arrays.items():
        entries.append(tensor(name, array.shape[::-1], 0, len(data)))
        data += padded(array.astype("<f4").tobytes(), alignment)
    return padded(header(pairs, entries, version=version), alignment) + data


BYTES = [f"<0x{number:02X}>" for number in range(256)]
TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", *BYTES, "a", "b", "ab", "\u2581"]


def vocabulary(**changes: Any) -> list[bytes]:
    """Metadata of a small SentencePiece vocabulary; a change of None leaves the key out."""
    count = len(TOKENS)
    values: dict[str, Any] = {
        "model": ("str", "llama"),
        "tokens": ("str", TOKENS),
        "scores": ("f32", [0.0] * count),
        "token_type": ("i32", [3, 3, 3, 2, *[6] * 256, *[1] * (count - 260)]),
        "bos_token_id": ("u32", 2),
        "eos_token_id": ("u32", 1),
        **changes,
    }
    return [pair(f"tokenizer.ggml.{key}", *value) for key, value in values.items() if value is not None]


def tiny_gguf(architecture: str = "llama", *, arrays: Mapping[str, np.ndarray] | None = None, **changes: Any) -> bytes:
    """A tiny valid model of one layer, 2 query heads of 4 on a hidden state of 8."""
    values: dict[str, Any] = {
        "block_count": ("u32", 1),
        "embedding_length": ("u32", 8),
        "feed_forward_length": ("u32", 16),
        "attention.head_count": ("u32", 2),
        "attention.head_count_kv": ("u32", 1),
        "attention.layer_norm_rms_epsilon": ("f32", 1e-5),
        "context_length": ("u32", 64),
        **changes,
    }
    pairs = [pair("general.architecture", "str", architecture)]
    pairs += [pair(f"{architecture}.{key}", *value) for key, value in values.items() if value is not None]
    return gguf([*pairs, *vocabulary()], tiny_arrays() if arrays is None else arrays)


def tiny_arrays() -> dict[str, np.ndarray]:
    """The tensors of the tiny model."""
    random = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), 8), "output_norm.weight": (8,)}
    shapes |= {
        "blk.0.attn_norm.weight": (8,),
        "blk.0.ffn_norm.weight": (8,),
        "blk.0.attn_q.weight": (8, 8),
        "blk.0.attn_k.weight": (4, 8),
        "blk.0.attn_v.weight": (4, 8),
        "blk.0.attn_output.weight": (8, 8),
        "blk.0.ffn_gate.weight": (16, 8),
        "blk.0.ffn_up.weight": (16, 8),
        "blk.0.ffn_down.weight": (8, 16),
    }
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def safetensors(head: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file around a header that is an object, or bytes to put there as they are."""
    raw = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data
