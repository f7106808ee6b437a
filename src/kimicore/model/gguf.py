"""A reader of GGUF headers that trusts no number in them.

Every count, length, offset and dimension is held against the file's size before anything is allocated
for it. Versions 2 and 3, little endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from attrs import frozen

from kimicore.errors import ModelLoadError
from kimicore.model.dequantize import QUANT_TYPES, QuantType, quant_type
from kimicore.model.mapped import MappedFile, fault, map_file, not_a_model

__all__ = ["GGUFFile", "StringArray", "TensorInfo", "read_gguf"]

_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_TYPE_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MAX_TENSORS = 1 << 20
_MAX_PAIRS = 1 << 16
_MAX_NAME_BYTES = 1 << 16
_MAX_TEXT_BYTES = 64 << 20
_MAX_DIMS = 4
_MIN_PAIR_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_DEFAULT_ALIGNMENT = 32
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class StringArray(Sequence[str]):
    """An array of strings in a GGUF file, each decoded only when it is asked for.

    Raises :class:`~kimicore.ModelLoadError` from the access where a string is not UTF-8.
    """

    def __init__(self, file: MappedFile, where: str, ends: array[int], start: int) -> None:
        self._file = file
        self._where = where
        self._ends = ends
        self._start = start

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        start = (self._ends[number - 1] if number else self._start) + 8
        return self._decode(number, start, self._ends[number])

    def __iter__(self) -> Iterator[str]:
        start = self._start
        for number, end in enumerate(self._ends):
            yield self._decode(number, start + 8, end)
            start = end

    def _decode(self, number: int, start: int, end: int) -> str:
        try:
            return self._file.buffer[start:end].decode()
        except UnicodeDecodeError as error:
            raise fault(self._file.path, f"{self._where}[{number}]", f"not UTF-8 at byte {error.start}") from error


@frozen
class TensorInfo:
    """Where a tensor lies: ``shape`` with output features first, absolute ``offset`` and size in bytes."""

    name: str
    shape: tuple[int, ...]
    type: QuantType
    offset: int
    size_bytes: int


@frozen(eq=False)
class GGUFFile:
    """A checked header. Number arrays in ``metadata`` are read-only numpy views, string arrays are lazy."""

    file: MappedFile
    version: int
    alignment: int
    metadata: Mapping[str, Any]
    types: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    header_bytes: int

    @property
    def path(self) -> Path:
        """The file."""
        return self.file.path


class _Cursor:
    """A position in the file that never moves past its end."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.at = 0

    def fault(self, where: str, problem: str) -> ModelLoadError:
        return fault(self.file.path, where, problem)

    def take(self, count: int, where: str) -> int:
        start, left = self.at, self.file.size_bytes - self.at
        if count > left:
            raise self.fault(
                where,
                f"needs {count} bytes at offset {start}, expected a file of at least {start + count} bytes, "
                f"actual {self.file.size_bytes}: the file is truncated or its header lies",
            )
        self.at = start + count
        return start

    def u32(self, where: str) -> int:
        return int(_U32.unpack_from(self.file.buffer, self.take(4, where))[0])

    def u64(self, where: str) -> int:
        return int(_U64.unpack_from(self.file.buffer, self.take(8, where))[0])

    def count(self, where: str, least_bytes: int, most: int) -> int:
        value, left = self.u64(where), self.file.size_bytes - self.at
        if value > most or value * least_bytes > left:
            raise self.fault(
                where,
                f"is {value}; each takes at least {least_bytes} bytes, {left} are left and at most {most} are read",
            )
        return value

    def string(self, where: str, most: int) -> str:
        length = self.u64(f"{where} (length)")
        if length > most:
            raise self.fault(f"{where} (length)", f"is {length} bytes; at most {most} are read")
        start = self.take(length, where)
        try:
            return self.file.buffer[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.fault(where, f"not UTF-8 at byte {error.start}") from error

    def strings(self, where: str, count: int) -> StringArray:
        # The loop is the hot spot of opening a file (a vocabulary has 262,144 entries), so it is kept flat.
        start = at = self.at
        last = self.file.size_bytes - 8
        buffer, unpack = self.file.buffer, _U64.unpack_from
        ends = array("Q")
        append = ends.append
        for _ in range(count):
            if at > last or (length := unpack(buffer, at)[0]) > last - at:
                raise self.fault(
                    f"{where}[{len(ends)}]", f"reaches past the end of the file (actual {self.file.size_bytes} bytes)"
                )
            at += 8 + length
            append(at)
        self.at = at
        return StringArray(self.file, where, ends, start)

    def numbers(self, where: str, kind: int, count: int) -> Any:
        dtype = np.dtype(_NUMBERS[kind])
        start = self.take(count * dtype.itemsize, where)
        raw = self.file.data[start : start + count * dtype.itemsize]
        if kind == _BOOL and count and int(raw.max()) > 1:
            raise self.fault(where, "a truth value must be 0 or 1")
        return raw.view(dtype)

    def value(self, where: str) -> tuple[Any, str]:
        kind = self.u32(f"{where} (type)")
        if kind == _STRING:
            return self.string(where, _MAX_TEXT_BYTES), "string"
        if kind in _NUMBERS:
            value = self.numbers(where, kind, 1)[0]
            # float32 in its shortest form: 1e-06 and not 9.999999974752427e-07, as the model's config has it.
            return (float(str(value)) if kind == 6 else value.item()), _TYPE_NAMES[kind]
        if kind != _ARRAY:
            raise self.fault(f"{where} (type)", f"unknown type {kind}")
        inner = self.u32(f"{where} (element type)")
        if inner == _STRING:
            return self.strings(where, self.count(f"{where} (count)", 8, 1 << 32)), "array of string"
        if inner not in _NUMBERS:
            raise self.fault(f"{where} (element type)", f"type {inner} cannot stand in an array")
        size = np.dtype(_NUMBERS[inner]).itemsize
        count = self.count(f"{where} (count)", size, 1 << 40)
        return self.numbers(where, inner, count), f"array of {_TYPE_NAMES[inner]}"


def _start(cursor: _Cursor) -> tuple[int, int, int]:
    file = cursor.file
    head = bytes(file.buffer[:1024])
    if not head.startswith(b"GGUF") or file.size_bytes < 24:
        raise not_a_model(file.path, head, file.size_bytes, "a GGUF file of at least 24 bytes that begins with b'GGUF'")
    cursor.at = 4
    version = cursor.u32("version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        why = "the file is big endian" if swapped in (1, 2, 3) else "versions 2 and 3 are read"
        raise cursor.fault("version", f"is {version}; {why}")
    tensors = cursor.count("tensor count", _MIN_TENSOR_BYTES, _MAX_TENSORS)
    pairs = cursor.count("metadata count", _MIN_PAIR_BYTES, _MAX_PAIRS)
    return version, tensors, pairs


def _metadata(cursor: _Cursor, pairs: int) -> tuple[dict[str, Any], dict[str, str]]:
    values: dict[str, Any] = {}
    types: dict[str, str] = {}
    for number in range(pairs):
        key = cursor.string(f"metadata key {number}", _MAX_NAME_BYTES)
        if not key:
            raise cursor.fault(f"metadata key {number}", "is empty")
        if key in values:
            raise cursor.fault(f"metadata key {key[:200]!r}", "duplicate: the key occurs twice")
        values[key], types[key] = cursor.value(key[:200])
    return values, types


def _alignment(cursor: _Cursor, values: Mapping[str, Any], types: Mapping[str, str]) -> int:
    key = "general.alignment"
    if key not in values:
        return _DEFAULT_ALIGNMENT
    if types[key] != "u32":
        raise cursor.fault(key, f"must be u32, is {types[key]}")
    value = int(values[key])
    if value == 0 or value & (value - 1):
        raise cursor.fault(key, f"is {value}; must be a power of two")
    return value


def _tensor(cursor: _Cursor, number: int) -> tuple[str, tuple[int, ...], QuantType, int, int]:
    name = cursor.string(f"name of tensor {number}", _MAX_NAME_BYTES)
    where = f"tensor {name[:200]!r}" if name else f"tensor {number}"
    if not name:
        raise cursor.fault(f"{where} name", "is empty")
    dims_count = cursor.u32(f"{where} dimensions")
    if not 1 <= dims_count <= _MAX_DIMS:
        raise cursor.fault(f"{where} dimensions", f"there are {dims_count}; 1 to {_MAX_DIMS} are allowed")
    dims = [cursor.u64(f"{where} dimension {i}") for i in range(dims_count)]
    kind = cursor.u32(f"{where} type")
    offset = cursor.u64(f"{where} offset")
    found = quant_type(kind)
    if isinstance(found, str):
        known = ", ".join(entry.name for entry in QUANT_TYPES.values())
        raise cursor.fault(f"{where} type", f"{found} is not supported; supported are {known}")
    elements = 1
    for dim in dims:
        elements *= dim
    if elements == 0:
        raise cursor.fault(f"{where} dimensions", f"{dims} hold no element")
    if dims[0] % found.block:
        raise cursor.fault(f"{where} dimensions", f"{dims[0]} is no multiple of {found.name}'s block of {found.block}")
    size = elements // found.block * found.block_bytes
    if size > cursor.file.size_bytes:
        raise cursor.fault(
            f"{where} dimensions",
            f"{dims} in {found.name} take {size} bytes, expected at least that, actual {cursor.file.size_bytes}: "
            "the file is truncated or its header lies",
        )
    return name, tuple(reversed(dims)), found, offset, size


def _place(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    found: dict[str, tuple[tuple[int, ...], QuantType, int, int]] = {}
    for number in range(count):
        name, shape, kind, offset, length = _tensor(cursor, number)
        if name in found:
            raise cursor.fault(f"tensor {name[:200]!r}", "duplicate: the name occurs twice")
        found[name] = (shape, kind, offset, length)
    base = -(-cursor.at // alignment) * alignment
    size, end, before = cursor.file.size_bytes, base, ""
    tensors: dict[str, TensorInfo] = {}
    for name, (shape, kind, offset, length) in sorted(found.items(), key=lambda item: item[1][2]):
        where = f"tensor {name[:200]!r} offset"
        start = base + offset
        if offset % alignment:
            raise cursor.fault(where, f"is {offset}, no multiple of the alignment of {alignment}")
        if start < end:
            raise cursor.fault(where, f"is {offset}: the tensor overlaps {before[:200]!r}")
        end, before = start + length, name
        if end > size:
            raise cursor.fault(
                where, f"the tensor ends at byte {end}, expected at least that, actual {size}: the file is truncated"
            )
        tensors[name] = TensorInfo(name, shape, kind, start, length)
    padded = -(-end // alignment) * alignment
    if end < size < padded:
        raise cursor.fault("end of file", f"expected {padded} bytes, actual {size}: the file is truncated")
    return {name: tensors[name] for name in found}


def read_gguf(path: Path) -> GGUFFile:
    """Map a GGUF file and read its header.

    Raises :class:`~kimicore.ModelLoadError` that names the file and the field for anything out of order.
    """
    cursor = _Cursor(map_file(path))
    version, tensor_count, pair_count = _start(cursor)
    values, types = _metadata(cursor, pair_count)
    alignment = _alignment(cursor, values, types)
    if int(values.get("split.count", 1) if types.get("split.count", "").startswith("u") else 1) > 1:
        raise cursor.fault("split.count", f"is {values['split.count']}: join the parts into one file first")
    tensors = _place(cursor, tensor_count, alignment)
    return GGUFFile(cursor.file, version, alignment, values, types, tensors, cursor.at)
