"""Writing safetensors files: tensors one after another, under a temporary name until they are whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor

from kimicore.errors import ConfigError
from kimicore.model.safetensors_header import SafetensorsFile, StoredTensor, read_safetensors

__all__ = [
    "Piece",
    "disk_errors",
    "join",
    "needs_bytes",
    "read_tensor",
    "write_json",
    "write_safetensors",
    "write_shards",
    "write_text",
]

_NAMES: Final[Mapping[torch.dtype, str]] = MappingProxyType(
    {
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.int8: "I8",
        torch.int32: "I32",
        torch.int64: "I64",
    }
)
_COPY_BYTES: Final = 8 << 20
_SHARD_BYTES: Final = 2 << 30  # a file of tensors that are made here is in memory as a whole


@contextmanager
def disk_errors(what: Path) -> Iterator[None]:
    """Turn a full disk and other failures to write into :class:`~kimicore.ConfigError` that name the place."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(
                f"{what}: the disk is full; make room and run the same command again, it goes on where it stopped"
            ) from error
        raise ConfigError(f"{what}: cannot be written: {error.strerror or error}") from error


def needs_bytes(folder: Path, wanted: int) -> None:
    """Refuse to begin where a folder's disk has not so many bytes left; raises :class:`~kimicore.ConfigError`."""
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise ConfigError(
            f"{folder}: {free / 1e6:,.0f} MB are free and {wanted / 1e6:,.0f} MB are needed; "
            "make room or name another --out"
        )


@contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    """Open a file that takes its name once it is whole and on the disk."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def write_text(path: Path, text: str) -> None:
    """Write a text file as a whole or not at all."""
    with disk_errors(path), _replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file as a whole or not at all."""
    write_text(path, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def _header(entries: Sequence[tuple[str, str, Sequence[int], int]]) -> bytes:
    """Return the head of a file whose tensors are (name, type, shape, bytes) in their order."""
    tree: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, kind, shape, size in entries:
        tree[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a file, as a whole or not at all."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # each begins where it may
    entries = [(name, _NAMES[t.dtype], t.shape, t.numel() * t.element_size()) for name, t in ordered]
    with disk_errors(path), _replacing(path) as file:
        file.write(_header(entries))
        for _, tensor in ordered:
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


@frozen
class Piece:
    """A tensor in a file that was written."""

    name: str
    file: SafetensorsFile
    stored: StoredTensor


def join(path: Path, pieces: Sequence[Piece]) -> None:
    """Write a file of tensors that lie in others, byte by byte the same; as a whole or not at all."""
    widths = {kind: dtype.itemsize for dtype, kind in _NAMES.items()}
    ordered = sorted(pieces, key=lambda one: -widths[one.stored.dtype])  # each begins where its type may
    entries = [(one.name, one.stored.dtype, one.stored.shape, one.stored.size_bytes) for one in ordered]
    with disk_errors(path), _replacing(path) as file:
        file.write(_header(entries))
        for one in ordered:
            data = one.file.file.data
            for start in range(0, one.stored.size_bytes, _COPY_BYTES):
                stop = min(start + _COPY_BYTES, one.stored.size_bytes)
                file.write(data[one.stored.offset + start : one.stored.offset + stop].data)


def write_shards(folder: Path, sizes: Mapping[str, int], write: Callable[[Path, list[str]], None]) -> None:
    """Have a model's tensors written into one file, or into several of up to 2 GiB with an index of them.

    ``sizes``: bytes of each tensor by name, in the order in which they are to lie. ``write(path, names)`` writes the
    tensors of these names into a file; a tensor that is larger than all that is alone in one.
    """
    shards: list[list[str]] = [[]]
    taken = 0
    for name, size in sizes.items():
        if shards[-1] and taken + size > _SHARD_BYTES:
            shards.append([])
            taken = 0
        shards[-1].append(name)
        taken += size
    if len(shards) == 1:
        write(folder / "model.safetensors", shards[0])
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write(folder / file, names)
        where |= dict.fromkeys(names, file)
    tree = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
    write_json(folder / "model.safetensors.index.json", tree)


def read_tensor(path: Path, name: str) -> Tensor:
    """Return a tensor of a file that :func:`write_safetensors` wrote."""
    file = read_safetensors(path)
    stored = file.tensors[name]
    kinds = {kind: dtype for dtype, kind in _NAMES.items()}
    raw = file.file.data[stored.offset : stored.offset + stored.size_bytes].copy()
    return torch.from_numpy(raw).view(kinds[stored.dtype]).reshape(stored.shape)
