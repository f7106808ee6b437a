"""Whatever the bytes are, opening them gives a model or a ModelLoadError, and little memory is taken."""

from __future__ import annotations

import json
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from kimicore.errors import ModelLoadError
from kimicore.model.gguf import read_gguf
from kimicore.model.gguf_source import GGUFSource
from kimicore.model.safetensors_header import read_index, read_safetensors

from .forge import header, safetensors, tensor, tiny_gguf

TINY = tiny_gguf()
NUMBERS = st.one_of(
    st.integers(0, 40), st.sampled_from([2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1)
)
PLAIN = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def _survives(content: bytes, opened: Callable[[Path], object], limit_bytes: int = 8 << 20) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        path.write_bytes(content)
        message = str(path)
        tracemalloc.start()
        try:
            opened(path)
        except ModelLoadError as error:
            message = str(error)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < limit_bytes
        assert str(path) in message


@given(st.binary(max_size=400))
@example(b"GGUF")
def test_any_bytes_as_gguf(content: bytes) -> None:
    """Arbitrary bytes, bare or behind the magic and version, never raise another exception."""
    _survives(content, GGUFSource)
    _survives(struct.pack("<4sI", b"GGUF", 3) + content, GGUFSource)
    _survives(struct.pack("<4sIQQ", b"GGUF", 3, 1, 1) + content, GGUFSource)


@given(st.lists(st.tuples(st.integers(0, len(TINY) - 9), NUMBERS, st.sampled_from("BIQ")), min_size=1, max_size=4))
def test_a_real_file_with_changed_numbers(changes: list[tuple[int, int, str]]) -> None:
    """Numbers changed anywhere in a valid file give a model or a load error."""
    content = bytearray(TINY)
    for at, value, form in changes:
        struct.pack_into(f"<{form}", content, at, value % (1 << (8 * struct.calcsize(form))))
    _survives(bytes(content), GGUFSource)


@given(st.integers(0, len(TINY)))
def test_a_real_file_cut_anywhere(size: int) -> None:
    """A valid file cut at any byte is refused, unless nothing is missing."""
    _survives(TINY[:size], GGUFSource)


@given(st.lists(st.tuples(st.text(max_size=5), st.lists(NUMBERS, max_size=5), st.integers(0, 42), NUMBERS), max_size=4))
def test_any_tensor_entries(entries: list[tuple[str, list[int], int, int]]) -> None:
    """Any dimensions, types and offsets give a header that fits its file or a load error."""
    content = header([], [tensor(*entry) for entry in entries]) + bytes(600)

    def checked(path: Path) -> None:
        file = read_gguf(path)
        for info in file.tensors.values():
            assert 0 <= info.offset <= info.offset + info.size_bytes <= file.file.size_bytes

    _survives(content, checked)


@given(st.binary(max_size=200))
@example(b"[" * 190)
@example(b'{"a":' + b"[" * 180)
@example(b'{"a":1' + b"0" * 150 + b"}")
def test_any_bytes_as_safetensors(content: bytes) -> None:
    """Arbitrary bytes, bare or as a header of the right length, never raise another exception."""
    _survives(content, read_safetensors)
    _survives(safetensors(content, bytes(8)), read_safetensors)
    _survives(safetensors(content), lambda path: read_index(path.read_bytes(), path))


JSON: Any = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=4)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=8,
)
ENTRY = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.one_of(st.sampled_from(["F32", "BF16", "BOOL", "F4", "F6_E2M3", "X", 7]), JSON),
            "shape": st.one_of(st.lists(NUMBERS, max_size=10), JSON),
            "data_offsets": st.one_of(st.lists(st.integers(-2, 20), max_size=3), JSON),
        },
    ),
)


@given(st.one_of(JSON, st.dictionaries(st.one_of(st.text(max_size=3), st.just("__metadata__")), ENTRY, max_size=4)))
@example(PLAIN)
def test_any_json_as_a_safetensors_header(value: Any) -> None:
    """Any JSON as the header gives ranges that cover the data exactly, or a load error."""

    def checked(path: Path) -> None:
        file = read_safetensors(path)
        assert sum(entry.size_bytes for entry in file.tensors.values()) == 8

    _survives(safetensors(json.dumps(value).encode(), bytes(8)), checked)
    _survives(json.dumps({"weight_map": value}).encode(), lambda path: read_index(path.read_bytes(), path))
