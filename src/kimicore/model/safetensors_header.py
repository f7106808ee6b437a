"""A reader of safetensors headers that trusts no number in them.

The format is eight bytes of length, a JSON object and the data
(https://github.com/safetensors/safetensors#format); ranges must cover the data without gap or overlap.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import frozen

from kimicore.model.mapped import MappedFile, fault, map_file, not_a_model, parse_json

__all__ = ["SafetensorsFile", "StoredTensor", "read_index", "read_safetensors"]

_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
        "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
        "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    }
)  # fmt: skip
_MAX_HEADER_BYTES = 25 << 20
_MAX_DIMS = 8
_MAX_NUMBER = 1 << 62
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")


@frozen
class StoredTensor:
    """Where a tensor lies: its dtype by the format's name, its shape, absolute offset and size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@frozen(eq=False)
class SafetensorsFile:
    """A checked header over a mapped file."""

    file: MappedFile
    tensors: Mapping[str, StoredTensor]
    header_bytes: int


def _natural(value: Any, path: Path, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_NUMBER:
        raise fault(path, where, f"{repr(value)[:60]} is no integer from 0 to 2^62")
    return value


def _numbers(value: Any, path: Path, where: str, most: int) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > most:
        raise fault(path, where, f"must be a list of at most {most} integers, is {repr(value)[:60]}")
    return tuple(_natural(entry, path, where) for entry in value)


def _entry(name: str, entry: Any, path: Path, base: int, size: int) -> StoredTensor:
    where = f"tensor {name[:200]!r}"
    if not isinstance(entry, dict):
        raise fault(path, where, f"must be an object, is {type(entry).__name__}")
    dtype = entry.get("dtype")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise fault(path, f"{where} dtype", f"{repr(dtype)[:60]} is unknown")
    shape = _numbers(entry.get("shape"), path, f"{where} shape", _MAX_DIMS)
    offsets = _numbers(entry.get("data_offsets"), path, f"{where} data_offsets", 2)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fault(path, f"{where} data_offsets", f"{list(offsets)} is no range")
    if base + offsets[1] > size:
        raise fault(
            path,
            f"{where} data_offsets",
            f"end at byte {base + offsets[1]}, expected at least that, actual {size}: truncated or not a model file",
        )
    bits = _BITS[dtype]
    for dim in shape:
        bits *= dim
    length = offsets[1] - offsets[0]
    if bits != length * 8:
        raise fault(path, where, f"{dtype} {list(shape)} takes {bits / 8:.15g} bytes, but data_offsets hold {length}")
    return StoredTensor(dtype, shape, base + offsets[0], length)


def read_safetensors(path: Path) -> SafetensorsFile:
    """Map a safetensors file and check its header.

    Raises :class:`~kimicore.ModelLoadError` that names the file and the field for anything out of order.
    """
    file = map_file(path)
    size = file.size_bytes
    head = bytes(file.buffer[:1024])
    wanted = "a safetensors file: a length of 8 bytes, then a JSON object"
    if size < 10:
        raise not_a_model(path, head, size, wanted)
    length = int.from_bytes(head[:8], "little")
    if length > size - 8 or length > _MAX_HEADER_BYTES:
        if head[:1] in b"<vP\x80" or head[:2] == b"PK":
            raise not_a_model(path, head, size, wanted)
        raise fault(
            path,
            "header length",
            f"is {length}, expected a file of at least {8 + length} bytes, actual {size} (at most "
            f"{_MAX_HEADER_BYTES} are read): truncated or not a model file",
        )
    header = parse_json(bytes(file.buffer[8 : 8 + length]), path, "header", unique=True)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise fault(path, "__metadata__", "must be an object of strings")
    base = 8 + length
    tensors = {name: _entry(name, entry, path, base, size) for name, entry in header.items()}
    end = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size_bytes)):
        if tensor.offset != end:
            problem = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise fault(path, f"tensor {name[:200]!r} data_offsets", f"{problem}: begins at {tensor.offset}, not {end}")
        end += tensor.size_bytes
    if end != size:
        raise fault(path, "end of file", f"expected {end} bytes, actual {size}: truncated or not a model file")
    return SafetensorsFile(file, tensors, base)


def read_index(content: bytes, path: Path) -> dict[str, str]:
    """Return the checked ``weight_map`` of a shard index: tensor name to the name of a file beside it.

    Raises :class:`~kimicore.ModelLoadError` for a shard name that is not a plain file name, so that no
    index reaches out of its folder.
    """
    weight_map = parse_json(content, path, "index", unique=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise fault(path, "weight_map", "must be an object that names a file for each tensor")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or _SHARD_NAME.fullmatch(shard) is None:
            raise fault(
                path,
                f"weight_map[{name[:200]!r}]",
                f"{repr(shard)[:200]} is not the plain name of a .safetensors file in the same folder",
            )
    return weight_map
