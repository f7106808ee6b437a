"""A folder with config.json and safetensors files as a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from kimicore.errors import ModelLoadError
from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.model.folder_text import folder_text, read_object
from kimicore.model.mapped import fault, read_bounded, sample_digest
from kimicore.model.packed.assembling import assemble
from kimicore.model.packed.joining import expand
from kimicore.model.packed.parts import Coded, find_coded
from kimicore.model.safetensors_header import SafetensorsFile, StoredTensor, read_index, read_safetensors
from kimicore.text.source import TextSource

__all__ = ["SafetensorsSource"]

_CHUNK_BYTES = 8 << 20
_MAX_INDEX_BYTES = 25 << 20
_INDEX = "model.safetensors.index.json"
_READABLE: Mapping[str, tuple[str, torch.dtype]] = MappingProxyType(
    {
        "F16": ("<f2", torch.float16),
        "BF16": ("<i2", torch.bfloat16),
        "F32": ("<f4", torch.float32),
        "F64": ("<f8", torch.float64),
    }
)
_PARTS: Mapping[str, tuple[str, torch.dtype]] = MappingProxyType(
    {**_READABLE, "I8": ("i1", torch.int8), "I32": ("<i4", torch.int32), "I64": ("<i8", torch.int64)}
)
_QUANTIZATION = ("quantization_config", "compression_config")  # the second is the first's older name
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# A model that also sees pictures keeps its language model under these names.
_INNER = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}
_OTHER_TOWERS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


class SafetensorsSource:
    """A model in a folder, in one ``model.safetensors`` or in shards with an index.

    ``file``: read this file and no index. Code that a folder brings is never run: ``auto_map`` is ignored and
    pickled weights are refused. Raises :class:`~kimicore.ModelLoadError` from the constructor for any JSON
    file or header that is out of order; nothing of the weights is read before that.
    """

    def __init__(self, folder: Path, file: Path | None = None) -> None:
        self._path = folder
        self._config, quantization = _config(folder)
        self._files, self._where = _open(folder, file)
        self._text = folder_text(folder, self._config)
        self._fingerprint = _fingerprint({**self._config, **quantization}, self._files)
        self._coded: dict[str, Coded] = {}
        parts: set[str] = set()
        for one in quantization.values():
            stored_names = {name: stored for name, (_, stored) in self._where.items()}
            self._coded, parts = find_coded(
                folder / "config.json", one, self.stored_tensors, stored_names, self._stored
            )
        self._names = [name for name in self._where if name not in parts] + list(self._coded)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    @property
    def fingerprint(self) -> str:
        """Digest of the config, every header, the files' sizes and sampled pages of every tensor."""
        return self._fingerprint

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of ``config.json``, without what it says of quantization: that is done here."""
        return self._config

    @property
    def text(self) -> TextSource:
        """The tokenizer's file, the chat template and the special ids."""
        return self._text

    @property
    def coded(self) -> Mapping[str, Coded]:
        """The quantized matrices by the names of their weights."""
        return MappingProxyType(self._coded)

    @property
    def stored_tensors(self) -> Mapping[str, StoredTensor]:
        """Everything in the files by name, the parts of quantized matrices one by one."""
        return MappingProxyType({name: opened.tensors[stored] for name, (opened, stored) in self._where.items()})

    def names(self) -> Sequence[str]:
        """Names of all tensors; a quantized matrix has the name of its weight."""
        return list(self._names)

    def located(self, name: str) -> tuple[SafetensorsFile, StoredTensor]:
        """Return the file that a stored tensor lies in, and its place there; a part of a quantized matrix is one too.

        Raises :class:`~kimicore.ModelLoadError` for a name that the files have not.
        """
        try:
            file, stored = self._where[name]
        except KeyError:
            raise fault(self._path, f"tensor {name!r}", "is not in the model's files") from None
        return file, file.tensors[stored]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, output features first."""
        coded = self._coded.get(name)
        return self.located(name)[1].shape if coded is None else coded.shape

    def packed(self, name: str) -> PackedWeight | None:
        """Return a matrix in the folder's own codes, or None where the folder has it as floats."""
        coded = self._coded.get(name)
        if coded is None:
            self.located(name)
            return None
        return assemble(self._path, coded, self._stored)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor as ``dtype``, copied and converted a few megabytes at a time.

        Beside a matrix that the folder has quantized, its packed form is in memory for a while.
        """
        packed = self.packed(name)
        if packed is not None:
            return expand(packed, dtype)
        file, tensor = self.located(name)
        if tensor.dtype not in _READABLE:
            raise fault(
                file.file.path,
                f"tensor {name!r} dtype",
                f"{tensor.dtype} is not supported; supported are {', '.join(_READABLE)}",
            )
        return _copied(file, tensor, _READABLE[tensor.dtype], dtype)

    def _stored(self, name: str) -> torch.Tensor:
        """Return a part of a quantized matrix in its own type."""
        file, tensor = self.located(name)
        kind = _PARTS[tensor.dtype]
        return _copied(file, tensor, kind, kind[1])


def _copied(
    file: SafetensorsFile, tensor: StoredTensor, kind: tuple[str, torch.dtype], dtype: torch.dtype
) -> torch.Tensor:
    stored, seen_as = kind
    result = torch.empty(tensor.shape, dtype=dtype)
    flat = result.view(-1)
    width = np.dtype(stored).itemsize
    for start in range(0, tensor.size_bytes, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, tensor.size_bytes)
        # A copy, because torch must never hold memory that it could write to and the map cannot take.
        raw = file.file.data[tensor.offset + start : tensor.offset + stop].copy().view(stored)
        flat[start // width : stop // width] = torch.from_numpy(raw).view(seen_as)
    return result


def _config(folder: Path) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]]]:
    """Return the model's config, and by its key what it says of quantization, if it does."""
    path = folder / "config.json"
    if not path.exists():
        adapter = " (an adapter is not a model by itself)" if (folder / "adapter_config.json").exists() else ""
        raise fault(path, "file", f"is missing{adapter}")
    config = read_object(folder, "config.json", must=True)
    quantization: dict[str, Mapping[str, Any]] = {}
    outermost, inner = config, config.get("text_config")
    if isinstance(inner, dict) and config.get("model_type") == "gemma3":
        outer: dict[str, Any] = {key: value for key, value in config.items() if key.endswith("_token_id")}
        config = {**outer, "model_type": "gemma3_text", **inner}
    for source in (config, outermost):
        for key in _QUANTIZATION:
            found = source.pop(key, None)
            if found is None:
                continue
            if not isinstance(found, dict):
                raise fault(path, key, f"{repr(found)[:60]} is no object")
            quantization = {key: found}
    return config, quantization


def _open(folder: Path, file: Path | None) -> tuple[list[SafetensorsFile], dict[str, tuple[SafetensorsFile, str]]]:
    index = folder / _INDEX
    single = file or folder / "model.safetensors"
    if single.exists():
        files = [read_safetensors(single)]
        pairs = [(files[0], name) for name in files[0].tensors]
    elif index.exists():
        files, pairs = _shards(folder, index)
    else:
        raise _nothing(folder)
    where: dict[str, tuple[SafetensorsFile, str]] = {}
    for opened, stored in pairs:
        name = stored
        if stored.startswith(_OTHER_TOWERS):
            continue
        for prefix, own in _INNER.items():
            if stored.startswith(prefix):
                name = own + stored[len(prefix) :]
        if name in where:
            raise fault(opened.file.path, f"tensor {stored[:200]!r}", "duplicate: stored under two names")
        where[name] = (opened, stored)
    if not where:
        raise fault(single if single.exists() else index, "header", "there is no tensor in it")
    return files, where


def _shards(folder: Path, index: Path) -> tuple[list[SafetensorsFile], list[tuple[SafetensorsFile, str]]]:
    weight_map = read_index(read_bounded(index, _MAX_INDEX_BYTES), index)
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (folder / name).exists()]
    if absent:
        raise fault(index, "weight_map", f"{len(absent)} of {len(names)} files are missing: {', '.join(absent[:4])}")
    opened = {name: read_safetensors(folder / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in opened[name].tensors:
            raise fault(folder / name, f"tensor {tensor[:200]!r}", f"is missing, though {_INDEX} says that it is here")
    return list(opened.values()), [(opened[name], tensor) for tensor, name in weight_map.items()]


def _nothing(folder: Path) -> ModelLoadError:
    names = sorted(entry.name for entry in folder.iterdir())
    pickled = [name for name in names if name.endswith(_PICKLED)]
    others = [name for name in names if name.endswith(".safetensors")]
    if pickled:
        hint = f"; {pickled[0]} is a pickle, which is never opened because loading one can run code: convert it"
    elif others:
        hint = f"; there is {others[0]}: give the path of that file"
    else:
        hint = ""
    return ModelLoadError(f"{folder}: holds neither model.safetensors nor {_INDEX} nor one GGUF file{hint}")


def _fingerprint(config: Mapping[str, Any], files: Sequence[SafetensorsFile]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    digest.update(json.dumps(["safetensors", config, len(files)], sort_keys=True).encode())
    for file in files:
        digest.update(file.file.size_bytes.to_bytes(8, "little"))
        digest.update(file.file.data[: file.header_bytes].data)
        sample_digest(digest, file.file.data, ((t.offset, t.size_bytes) for t in file.tensors.values()))
    return digest.hexdigest()
