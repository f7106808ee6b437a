"""Opening a model file: a read-only memory map, and what to say when it is not a model at all."""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from kimicore.errors import ModelLoadError

__all__ = ["Bytes", "MappedFile", "fault", "map_file", "not_a_model", "parse_json", "read_bounded", "sample_digest"]

Bytes = npt.NDArray[np.uint8]
_PAGE_BYTES = 4096
_PAGES_PER_TENSOR = 16


def fault(path: Path, where: str, problem: str) -> ModelLoadError:
    """Return the error that names the file, the field in it and what is wrong with that."""
    return ModelLoadError(f"{path}: {where}: {problem}")


@frozen(eq=False)
class MappedFile:
    """A file mapped read-only. ``data`` [size_bytes] is a view of the map; nothing has been read yet."""

    path: Path
    size_bytes: int
    buffer: mmap.mmap
    data: Bytes


def _regular_size(path: Path) -> int:
    # A pipe or a device would block or never end, so only regular files are opened at all.
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelLoadError(f"{path}: is not a regular file")
    return status.st_size


def map_file(path: Path) -> MappedFile:
    """Map a file read-only.

    Raises :class:`~kimicore.ModelLoadError` where it cannot be opened, is empty or is no regular file.
    """
    size = _regular_size(path)
    if size == 0:
        raise not_a_model(path, b"", 0, "a model file")
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be mapped: {error}") from error
    data = np.frombuffer(buffer, dtype=np.uint8)
    return MappedFile(path, data.size, buffer, data)


def not_a_model(path: Path, head: bytes, size: int, wanted: str) -> ModelLoadError:
    """Return the error for a file that does not begin as ``wanted`` does, and say what it seems to be."""
    start = head[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    expected = ""
    if size == 0:
        seems = "it is empty (0 bytes)"
    elif start.startswith(b"version https://git-lfs"):
        match = re.search(rb"^size (\d{1,19})\s*$", head[:1024], re.MULTILINE)
        expected = f", expected {int(match[1])} bytes" if match else ""
        seems = "it is a Git LFS pointer, not the file that it points to; fetch it with 'git lfs pull'"
    elif start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        seems = "it is an HTML page; the download saved an error or login page"
    elif head.startswith((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\x03\x04")):
        seems = "it looks like a pickle or zip archive, which is never opened because loading one can run code"
    else:
        seems = f"it begins with {head[:8]!r}"
    return ModelLoadError(
        f"{path}: truncated or not a model file: {seems} (actual {size} bytes{expected}; want {wanted})"
    )


def read_bounded(path: Path, limit_bytes: int) -> bytes:
    """Return a small file's content, or raise :class:`~kimicore.ModelLoadError` where it is over the limit."""
    size = _regular_size(path)
    if size > limit_bytes:
        raise ModelLoadError(f"{path}: has {size} bytes; at most {limit_bytes} are read")
    try:
        with path.open("rb") as file:
            content = file.read(limit_bytes + 1)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    if len(content) > limit_bytes:
        raise ModelLoadError(f"{path}: grew over {limit_bytes} bytes while it was read")
    return content


def _unique(path: Path, where: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise fault(path, where, f"duplicate name {twice[:200]!r}")
        return result

    return pairs


def parse_json(content: bytes, path: Path, where: str, *, unique: bool = False) -> dict[str, Any]:
    """Return the JSON object in ``content``; anything else is a :class:`~kimicore.ModelLoadError`.

    ``unique``: refuse an object that has a key twice, where Python would let the last one win.
    """
    try:
        text = content.decode("utf-8-sig" if not unique else "utf-8")
    except UnicodeDecodeError as error:
        raise fault(path, where, f"not UTF-8 at byte {error.start}") from error
    try:
        value = json.loads(text, object_pairs_hook=_unique(path, where) if unique else None)
    except RecursionError as error:
        raise fault(path, where, "nested too deeply") from error
    except ValueError as error:
        raise fault(path, where, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise fault(path, where, f"must be a JSON object, is {type(value).__name__}")
    return value


def sample_digest(digest: hashlib.blake2b, data: Bytes, spans: Iterable[tuple[int, int]]) -> None:
    """Feed ``digest`` with pages spread evenly over every ``(offset, size_bytes)`` of ``data``, ends included."""
    for offset, size in spans:
        if size <= _PAGES_PER_TENSOR * _PAGE_BYTES:
            digest.update(data[offset : offset + size].data)
            continue
        last = size - _PAGE_BYTES
        for page in range(_PAGES_PER_TENSOR):
            start = offset + last * page // (_PAGES_PER_TENSOR - 1)
            digest.update(data[start : start + _PAGE_BYTES].data)
