"""A GGUF file that is malformed or lies is refused with its field named, before anything is allocated for it."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest

from kimicore.errors import ModelLoadError
from kimicore.model.gguf import read_gguf
from kimicore.model.gguf_source import GGUFSource
from kimicore.model.load import open_source

from .forge import BYTES, TOKENS, gguf, header, padded, pair, string, tensor, tiny_arrays, tiny_gguf, vocabulary

ROOM = bytes(1 << 12)


def _refused(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=match) as caught:
        GGUFSource(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("tensors", "pairs"), [(1 << 60, 0), (0, 1 << 60), (1 << 60, 1 << 60), (2**64 - 1, 1)])
def test_absurd_counts_cost_nothing(tensors: int, pairs: int, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#15711: counts are held against the file's size before memory is taken for them."""
    tracemalloc.start()
    try:
        _refused(tmp_path, struct.pack("<4sIQQ", b"GGUF", 3, tensors, pairs), r"count: is \d+")
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "dims",
    [[1 << 62, 2], [1 << 62, 4], [2**64 - 1] * 4, [0, 64], [64, 0], [8] * 5, [], [1 << 20]],
    ids=lambda dims: "x".join(map(str, dims)) or "none",
)
def test_dimensions_never_wrap_around(dims: list[int], tmp_path: Path) -> None:
    """ggml-org/llama.cpp#27203: a product of dimensions that is too large, zero, or of too many is refused."""
    _refused(tmp_path, padded(header([], [tensor("x", dims, 0, 0)])) + ROOM, r"tensor 'x' dimensions: ")


@pytest.mark.parametrize(
    ("kind", "value"), [("i32", 32), ("u32", 0), ("u32", 3), ("u32", 1 << 31), ("str", "32"), ("u64", 32), ("u32", 96)]
)
def test_odd_alignments_are_refused(kind: str, value: int | str, tmp_path: Path) -> None:
    """ggml-org/llama.cpp#26318: an alignment of another type, zero or no power of two is an error, not an abort."""
    pairs = [pair("general.alignment", kind, value)]
    _refused(tmp_path, padded(header(pairs, [tensor("x", [8], 0, 0)])) + ROOM, "general.alignment|tensor 'x' offset")


def test_a_stated_alignment_is_used(tmp_path: Path) -> None:
    """A power of two that the file states decides where its tensors lie."""
    path = tmp_path / "model.gguf"
    arrays = tiny_arrays()
    path.write_bytes(gguf([pair("general.alignment", "u32", 128)], arrays, alignment=128))
    file = read_gguf(path)
    assert file.alignment == 128
    for name, info in file.tensors.items():
        assert bytes(file.file.data[info.offset : info.offset + info.size_bytes]) == arrays[name].tobytes()


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ([tensor("x", [8], 0, 4)], "no multiple of the alignment"),
        ([tensor("x", [8], 0, 1 << 63)], "truncated"),
        ([tensor("x", [16], 0, 0), tensor("y", [8], 0, 32)], "'y' offset: is 32: the tensor overlaps 'x'"),
        ([tensor("x", [8], 0, 0), tensor("x", [8], 0, 32)], "duplicate"),
        ([tensor("", [8], 0, 0)], "is empty"),
        ([tensor(b"\xff", [8], 0, 0)], "not UTF-8"),
        ([tensor("x", [8], 2, 0)], "no multiple of Q4_0's block of 32"),
    ],
)
def test_tensor_entries_are_checked(entries: list[bytes], match: str, tmp_path: Path) -> None:
    """Offsets that lie outside, are not aligned or overlap, and names that repeat, are refused by name."""
    _refused(tmp_path, padded(header([], entries)) + ROOM, match)


@pytest.mark.parametrize(
    ("pairs", "match"),
    [
        ([pair("a", "u8", 1), pair("a", "u8", 2)], "'a': duplicate"),
        ([pair("", "u8", 1) + ROOM], "metadata key 0: is empty"),
        ([pair(b"\xff", "u8", 1)], "metadata key 0: not UTF-8"),
        ([pair("a", "str", b"\xc3(")], "a: not UTF-8 at byte 0"),
        ([string("a") + struct.pack("<I", 77) + ROOM], r"a \(type\): unknown type 77"),
        ([string("a") + struct.pack("<IIQ", 9, 9, 1) + ROOM], "cannot stand in an array"),
        ([string("a") + struct.pack("<IIQ", 9, 8, 1 << 40) + ROOM], r"a \(count\): is"),
        ([string("a") + struct.pack("<IIQ", 9, 6, 1 << 62) + ROOM], r"a \(count\): is"),
        ([string("a") + struct.pack("<IIQQ", 9, 8, 2, 2**64 - 1) + ROOM], r"a\[0\]: reaches past the end"),
        (
            [string("a") + struct.pack("<IIQQ", 9, 8, 2, 0) + struct.pack("<Q", 1 << 20)],
            r"a\[1\]: reaches past the end",
        ),
        ([string("a") + struct.pack("<IQ", 8, 1 << 50) + ROOM], r"a \(length\)"),
        ([string("a") + struct.pack("<IB", 7, 2) + ROOM], "must be 0 or 1"),
        ([pair("split.count", "u16", 3)], "join the parts"),
    ],
)
def test_metadata_is_checked(pairs: list[bytes], match: str, tmp_path: Path) -> None:
    """Types, lengths and counts in the metadata are refused by their key."""
    _refused(tmp_path, header(pairs, []), match)


@pytest.mark.parametrize(
    ("version", "match"), [(1, "versions 2 and 3"), (4, "versions 2 and 3"), (3 << 24, "big endian")]
)
def test_other_versions_are_refused(version: int, match: str, tmp_path: Path) -> None:
    """A version that is not read, and a file of the other byte order, are told apart."""
    _refused(tmp_path, header([], [], version=version), match)


def test_version_two_is_read(tmp_path: Path) -> None:
    """Version 2 has the same layout and is read."""
    path = tmp_path / "model.gguf"
    content = tiny_gguf()
    path.write_bytes(content[:4] + struct.pack("<I", 2) + content[8:])
    assert GGUFSource(path).config["hidden_size"] == 8


@pytest.mark.parametrize("part", ["0", "4", "half", "n-1"])
def test_truncated_files_say_so(part: str, tmp_path: Path) -> None:
    """smthemex/ComfyUI_YuE#28: a cut file is called truncated, with the expected and the actual size."""
    content = tiny_gguf()
    size = {"0": 0, "4": 4, "half": len(content) // 2, "n-1": len(content) - 1}[part]
    _refused(tmp_path, content[:size], rf"(?s)(?=.*truncated)(?=.*actual {size}\b)")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML page.*actual 44 bytes"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456789\n",
            "Git LFS pointer.*expected 123456789 bytes",
        ),
        (b"PK\x03\x04" + bytes(60), "pickle or zip"),
        (b"ggml" + bytes(60), "begins with b'ggml"),
    ],
)
@pytest.mark.parametrize("name", ["model.gguf", "model"])
def test_something_else_saved_as_the_model(content: bytes, match: str, name: str, tmp_path: Path) -> None:
    """smthemex/ComfyUI_YuE#28: an error page, an LFS pointer or an archive is called what it is."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=f"(?s)not a model file.*{match}"):
        open_source(path)


@pytest.mark.parametrize("piece", ["<0x+7>", "<0xGG>", "<0x1FF>", "<0x>", "<0x41>", "41", ""])
def test_odd_byte_pieces_are_refused(piece: str, tmp_path: Path) -> None:
    """lmstudio-ai/lmstudio-bug-tracker#2289: a byte token is '<0x00>' to '<0xFF>', each once, or refused."""
    tokens = [*TOKENS[:4], piece, *BYTES[1:], *TOKENS[260:]]
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.tokens\[\d+\]: .*(marked as a byte|duplicate)"):
        _open(tmp_path, vocabulary(tokens=("str", tokens)))


def test_byte_pieces_that_are_not_marked_are_text(tmp_path: Path) -> None:
    """A normal token may look like a byte piece; it is plain text then."""
    tokens = [*TOKENS[:-1], "<0x+7>"]
    source = _open(tmp_path, vocabulary(tokens=("str", tokens)))
    assert source.text.gguf is not None
    assert source.text.gguf.tokens[-1] == "<0x+7>"


def _open(tmp_path: Path, text: list[bytes]) -> GGUFSource:
    path = tmp_path / "model.gguf"
    sizes = [pair("general.architecture", "str", "llama")]
    for key, value in {
        "block_count": 1,
        "embedding_length": 8,
        "feed_forward_length": 16,
        "context_length": 64,
    }.items():
        sizes.append(pair(f"llama.{key}", "u32", value))
    sizes += [pair("llama.attention.head_count", "u32", 2), pair("llama.attention.head_count_kv", "u32", 1)]
    sizes.append(pair("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5))
    path.write_bytes(gguf([*sizes, *text], tiny_arrays()))
    return GGUFSource(path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model": ("str", "bert")}, "'bert' is not supported; supported are gpt2, llama"),
        ({"model": None}, "tokenizer.ggml.model"),
        ({"tokens": None}, "tokenizer.ggml.tokens: is missing"),
        ({"tokens": ("u32", [1, 2])}, "must be an array of at least 1 strings"),
        ({"tokens": ("str", [*TOKENS, "one more"])}, "but token_embd.weight has"),
        ({"tokens": ("str", [*TOKENS[:-1], b"\xff"])}, r"tokens\[\d+\]: not UTF-8"),
        ({"token_type": ("i32", [1])}, "has 1 entries, expected"),
        ({"token_type": ("str", ["x"] * len(TOKENS))}, "must be an array of numbers"),
        ({"scores": None}, "scores: is missing"),
        ({"scores": ("f32", [0.0])}, "has 1 entries, expected"),
        ({"model": ("str", "gpt2")}, "merges: is missing"),
        ({"model": ("str", "gpt2"), "merges": ("str", ["ab"])}, r"merges\[0\]: 'ab' is not two parts"),
        ({"eos_token_id": ("u32", len(TOKENS))}, "eos_token_id: is"),
        ({"bos_token_id": ("str", "2")}, "bos_token_id: must be one integer"),
        ({"add_bos_token": ("u32", 1)}, "add_bos_token: must be a truth value"),
        ({"add_bos_token": ("bool", True), "bos_token_id": None}, "there is no bos_token_id"),
    ],
)
def test_vocabularies_are_checked(changes: dict[str, tuple[str, object] | None], match: str, tmp_path: Path) -> None:
    """Everything that the tokenizer is built from has the right type and one entry for each token."""
    with pytest.raises(ModelLoadError, match=match):
        _open(tmp_path, vocabulary(**changes))


def test_end_ids_are_all_found(tmp_path: Path) -> None:
    """Every id that ends a text is listed once: the end of text, of a turn and of a message."""
    ends = {"eot_token_id": ("u32", 3), "eom_token_id": ("u32", 1), "padding_token_id": ("u32", 2**32 - 1)}
    source = _open(tmp_path, vocabulary(**ends))
    assert source.text.eos_ids == (1, 3)
    assert source.config["eos_token_id"] == [1, 3]
    assert source.text.pad_id is None
    assert source.text.add_bos
    assert source.text.bos_id == 2
