"""A GGUF file as a model: tensors dequantized or in their own codes, the vocabulary as the tokenizer needs it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kimicore.errors import ModelLoadError
from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.model.dequantize import dequantize
from kimicore.model.gguf import GGUFFile, StringArray, read_gguf
from kimicore.model.gguf_config import Keys, architecture_of, gguf_config
from kimicore.model.gguf_names import Placed, place_tensors
from kimicore.model.mapped import fault, sample_digest
from kimicore.model.packed.gguf_blocks import pack_blocks
from kimicore.text.source import GGUFVocabulary, TextSource

__all__ = ["GGUFSource"]

_CHUNK_ELEMENTS = 1 << 20
_BYTE_TYPE = 6
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Byte-level vocabularies whose models are trained with a first token, where a file does not say so.
_PRE_WITH_BOS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "llama4"})


class GGUFSource:
    """A model in one GGUF file.

    Raises :class:`~kimicore.ModelLoadError` from the constructor for anything that is out of order in the
    file's header, config, tensor shapes or vocabulary; nothing of the weights is read before that.
    """

    def __init__(self, path: Path) -> None:
        self._gguf = read_gguf(path)
        self._architecture = architecture_of(self._gguf)
        self._config = gguf_config(self._gguf)
        self._placed = place_tensors(self._gguf, self._architecture, self._config)
        self._text = _text(self._gguf, self._config)
        self._config["eos_token_id"] = list(self._text.eos_ids) or None
        self._fingerprint = _fingerprint(self._gguf)

    @property
    def path(self) -> Path:
        """The file."""
        return self._gguf.path

    @property
    def fingerprint(self) -> str:
        """Digest of the header, the file's size and sampled pages of every tensor."""
        return self._fingerprint

    @property
    def config(self) -> Mapping[str, Any]:
        """The config as ``config.json`` would have it."""
        return self._config

    @property
    def text(self) -> TextSource:
        """The vocabulary, the chat template and the special ids."""
        return self._text

    def names(self) -> Sequence[str]:
        """Names of all tensors as ``transformers`` has them."""
        return list(self._placed)

    def _find(self, name: str) -> Placed:
        try:
            return self._placed[name]
        except KeyError:
            raise fault(self.path, f"tensor {name!r}", "is not in the file") from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, output features first."""
        return self._find(name).info.shape

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor as ``dtype``, dequantized in float32 a block of rows at a time."""
        placed = self._find(name)
        result = torch.empty(placed.info.shape, dtype=dtype)
        if placed.heads:
            self._read_heads(placed, result)
        else:
            self._read_flat(placed, result.view(-1))
        return result

    def packed(self, name: str) -> PackedWeight | None:
        """Return a matrix in the file's own codes, or None where the file has it as floats."""
        placed = self._find(name)
        info = placed.info
        if len(info.shape) != 2 or placed.offset:
            return None
        rows = _untangled(info.shape[0], placed.heads) if placed.heads else None
        raw = self._gguf.file.data[info.offset : info.offset + info.size_bytes]
        return pack_blocks(raw, info.type, (info.shape[0], info.shape[1]), rows)

    def _floats(self, placed: Placed, start: int, stop: int) -> torch.Tensor:
        """Return elements ``start`` to ``stop`` (both at block borders) in float32."""
        kind, offset = placed.info.type, placed.info.offset
        first, last = start // kind.block * kind.block_bytes, stop // kind.block * kind.block_bytes
        values = dequantize(self._gguf.file.data[offset + first : offset + last], kind)
        if placed.offset:
            values += np.float32(placed.offset)
        return torch.from_numpy(values)

    def _read_flat(self, placed: Placed, result: torch.Tensor) -> None:
        for start in range(0, result.numel(), _CHUNK_ELEMENTS):
            stop = min(start + _CHUNK_ELEMENTS, result.numel())
            result[start:stop] = self._floats(placed, start, stop)

    def _read_heads(self, placed: Placed, result: torch.Tensor) -> None:
        rows = result.shape[0]
        width = result.numel() // rows
        order = _untangled(rows, placed.heads)
        step = max(1, _CHUNK_ELEMENTS // width)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            block = self._floats(placed, start * width, stop * width).view(-1, *result.shape[1:])
            result[order[start:stop]] = block.to(result.dtype)


def _untangled(rows: int, heads: int) -> torch.Tensor:
    """Return where each row of a rotated projection belongs.

    ggml rotates neighbours, and files store each head's rows as (0, D/2, 1, D/2 + 1, ...).
    """
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).reshape(-1)


def _fingerprint(gguf: GGUFFile) -> str:
    digest = hashlib.blake2b(digest_size=32)
    layout = [[t.name, t.shape, t.type.name, t.offset, t.size_bytes] for t in gguf.tensors.values()]
    digest.update(json.dumps(["gguf", gguf.file.size_bytes, layout]).encode())
    digest.update(gguf.file.data[: gguf.header_bytes].data)
    sample_digest(digest, gguf.file.data, ((t.offset, t.size_bytes) for t in gguf.tensors.values()))
    return digest.hexdigest()


def _strings(keys: Keys, key: str, least: int) -> tuple[str, ...]:
    value = keys.gguf.metadata.get(key)
    if value is None and not least:
        return ()
    if not isinstance(value, StringArray) or len(value) < least:
        problem = "is missing" if value is None else f"must be an array of at least {least} strings"
        raise keys.fault(key, f"{problem}; the tokenizer is built from it")
    return tuple(value)


def _per_token(keys: Keys, key: str, kinds: str, count: int) -> list[Any] | None:
    value = keys.gguf.metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
        raise keys.fault(key, f"must be an array of numbers, is {keys.gguf.types[key]}")
    if value.size != count:
        raise keys.fault(key, f"has {value.size} entries, expected {count}, one for each token")
    entries: list[Any] = value.tolist()
    return entries


def _check_bytes(keys: Keys, tokens: Sequence[str], types: Sequence[int]) -> None:
    seen: dict[str, int] = {}
    for number, kind in enumerate(types):
        if kind != _BYTE_TYPE:
            continue
        where, token = f"tokenizer.ggml.tokens[{number}]", tokens[number]
        if _BYTE_PIECE.fullmatch(token) is None:
            raise keys.fault(where, f"{token[:40]!r} is marked as a byte; bytes are named '<0x00>' to '<0xFF>'")
        if token.upper() in seen:
            raise keys.fault(where, f"duplicate: {token!r} is token {seen[token.upper()]} already")
        seen[token.upper()] = number


def _vocabulary(keys: Keys, rows: int) -> GGUFVocabulary:
    model = keys.text("tokenizer.ggml.model", "")
    if model not in ("gpt2", "llama"):
        raise keys.fault("tokenizer.ggml.model", f"{model[:100]!r} is not supported; supported are gpt2, llama")
    tokens = _strings(keys, "tokenizer.ggml.tokens", 1)
    if len(tokens) > rows:
        raise keys.fault("tokenizer.ggml.tokens", f"has {len(tokens)} tokens, but token_embd.weight has {rows} rows")
    types = _per_token(keys, "tokenizer.ggml.token_type", "ui", len(tokens)) or [1] * len(tokens)
    scores = _per_token(keys, "tokenizer.ggml.scores", "f", len(tokens))
    merges = _strings(keys, "tokenizer.ggml.merges", 1 if model == "gpt2" else 0)
    for number, merge in enumerate(merges):
        if merge.find(" ", 1) < 1:
            raise keys.fault(f"tokenizer.ggml.merges[{number}]", f"{merge[:100]!r} is not two parts with a space")
    if model == "llama":
        if scores is None:
            raise keys.fault("tokenizer.ggml.scores", "is missing; a SentencePiece vocabulary needs scores")
        _check_bytes(keys, tokens, types)
    return GGUFVocabulary(
        model=model,
        pre=keys.text("tokenizer.ggml.pre", ""),
        tokens=tokens,
        scores=scores,
        types=types,
        merges=merges,
        add_space_prefix=keys.flag("tokenizer.ggml.add_space_prefix", model == "llama"),
    )


def _text(gguf: GGUFFile, config: Mapping[str, Any]) -> TextSource:
    keys = Keys(gguf)
    vocabulary = _vocabulary(keys, config["vocab_size"])
    count = len(vocabulary.tokens)
    ends = [keys.token(key, count) for key in ("eos", "eot", "eom")]
    with_bos = vocabulary.model == "llama" or vocabulary.pre in _PRE_WITH_BOS
    bos = keys.token("bos", count)
    add_bos = keys.flag("tokenizer.ggml.add_bos_token", with_bos and bos is not None)
    if add_bos and bos is None:
        raise ModelLoadError(f"{gguf.path}: tokenizer.ggml.add_bos_token: is true, but there is no bos_token_id")
    return TextSource(
        tokenizer_json=None,
        gguf=vocabulary,
        chat_template=keys.text("tokenizer.chat_template", "") or None,
        bos_id=bos,
        eos_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        pad_id=keys.token("padding", count),
        add_bos=add_bos,
        add_eos=keys.flag("tokenizer.ggml.add_eos_token", False),
    )
