"""A folder with safetensors is read exactly, checked before it is mapped, and never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kimicore.errors import ModelLoadError
from kimicore.model.load import open_source
from kimicore.model.safetensors_header import read_safetensors

from .forge import safetensors

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
B = {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}
TOKENIZER = {
    "added_tokens": [{"id": 0, "content": "<s>"}, {"id": 1, "content": "</s>"}, {"id": 2, "content": "<|end|>"}],
    "model": {"type": "BPE", "vocab": {"<pad>": 7}},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    },
}


def _folder(path: Path, **files: Any) -> Path:
    """Write a model folder; a keyword's two underscores are the dot of a file name."""
    path.mkdir(exist_ok=True)
    defaults = {"config__json": {"model_type": "llama"}, "tokenizer__json": TOKENIZER}
    if not any("safetensors" in name for name in files):
        defaults["model__safetensors"] = safetensors({"a": A}, np.arange(2, dtype="<f4").tobytes())
    for name, content in {**defaults, **files}.items():
        target = path / name.replace("__", ".")
        if content is not None:
            target.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def _refused(tmp_path: Path, match: str, **files: Any) -> None:
    folder = _folder(tmp_path / "model", **files)
    with pytest.raises(ModelLoadError, match=f"(?s){match}") as caught:
        open_source(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_dtype_is_read_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    """All floating dtypes come back as torch converts them; others are refused by name when they are read."""
    torch.manual_seed(1)
    tensors = {"w": torch.randn(33, 7).to(dtype), "big": torch.randn(1100, 2001).to(dtype), "n": torch.arange(5)}
    folder = _folder(tmp_path / "model")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    source = open_source(folder)
    assert sorted(source.names()) == ["big", "n", "w"]
    for name in ("w", "big"):
        for wanted in (torch.float32, torch.bfloat16):
            assert torch.equal(source.read(name, wanted), tensors[name].to(wanted))
    with pytest.raises(ModelLoadError, match="tensor 'n' dtype: I64 is not supported; supported are F16"):
        source.read("n", torch.float32)
    with pytest.raises(ModelLoadError, match="tensor 'x': is not in the model's files"):
        source.shape("x")


@pytest.mark.parametrize("swapped", [False, True])
def test_duplicate_names_are_called_duplicates(swapped: bool, tmp_path: Path) -> None:
    """safetensors/safetensors#401: a name that occurs twice is refused as a duplicate; the last one never wins."""
    entries = [json.dumps(A), json.dumps({**A, "data_offsets": [8, 16]})]
    first, second = reversed(entries) if swapped else entries
    head = f'{{"a":{first},"a":{second}}}'.encode()
    _refused(tmp_path, "header: duplicate name 'a'", model__safetensors=safetensors(head, bytes(16)))


@pytest.mark.parametrize(
    ("head", "match"),
    [
        ([], "header: must be a JSON object, is list"),
        (7, "header: must be a JSON object, is int"),
        (None, "header: must be a JSON object, is NoneType"),
        ({"a": []}, "'a': must be an object, is list"),
        ({"a": {**A, "data_offsets": ["0", "8"]}}, "data_offsets: \"?'0'\"? is no integer"),
        ({"a": {**A, "data_offsets": [-8, 0]}}, "data_offsets: -8 is no integer"),
        ({"a": {**A, "data_offsets": [0.0, 8.0]}}, "data_offsets: 0.0 is no integer"),
        ({"a": {**A, "data_offsets": [0, True]}}, "data_offsets: True is no integer"),
        ({"a": {**A, "data_offsets": [8, 0]}}, "is no range"),
        ({"a": {**A, "data_offsets": [0, 8, 8]}}, "list of at most 2"),
        ({"a": {**A, "data_offsets": [0]}}, "is no range"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "data_offsets: must be a list"),
        ({"a": {**A, "dtype": "F33"}}, "dtype: 'F33' is unknown"),
        ({"a": {**A, "dtype": 32}}, "dtype: 32 is unknown"),
        ({"a": {**A, "shape": [3]}}, r"F32 \[3\] takes 12 bytes, but data_offsets hold 8"),
        ({"a": {**A, "shape": [1 << 61, 1 << 61]}}, "takes .* bytes, but data_offsets hold 8"),
        ({"a": {**A, "shape": [1] * 9 + [2]}}, "list of at most 8"),
        ({"a": {**A, "shape": "2"}}, "shape: must be a list"),
        ({"a": A, "b": {**B, "data_offsets": [4, 8]}}, "overlaps"),
        ({"a": A, "b": {**B, "data_offsets": [12, 16]}}, "'b' data_offsets: .*(gap|truncated)"),
        ({"b": B}, "leaves a gap"),
        ({"a": A, "b": {**B, "data_offsets": [1 << 61, (1 << 61) + 4]}}, "truncated or not a model file"),
        ({"a": A}, "end of file: expected .* bytes, actual"),
        ({"__metadata__": {"format": 1}, "a": A}, "__metadata__: must be an object of strings"),
        (b'{"a": \xff}', "header: not UTF-8 at byte 6"),
        (b'{"a": ', "header: not JSON"),
        (b"[" * 100_000, "header: nested too deeply|header: not JSON"),
    ],
)
def test_headers_of_the_wrong_form(head: Any, match: str, tmp_path: Path) -> None:
    """Comfy-Org/ComfyUI#14657: a header that is JSON but not of the form is one documented error with its field."""
    _refused(tmp_path, match, model__safetensors=safetensors(head, bytes(12)))


@pytest.mark.parametrize("part", ["0", "4", "half", "n-1", "n+1"])
def test_truncated_files_say_so(part: str, tmp_path: Path) -> None:
    """smthemex/ComfyUI_YuE#28: a cut file is 'truncated or not a model file', with expected and actual size."""
    content = safetensors({"a": {**A, "shape": [500], "data_offsets": [0, 2000]}}, bytes(2000))
    size = {"0": 0, "4": 4, "half": len(content) // 2, "n-1": len(content) - 1, "n+1": len(content) + 1}[part]
    _refused(
        tmp_path,
        f"(?=.*truncated or not a model file)(?=.*actual {size} ?)",
        model__safetensors=(content + b"\0")[:size],
    )


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"<!DOCTYPE html><html><body>not found</body></html>", "HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4096\n", "LFS pointer.*expected 4096 bytes"),
        (b"PK\x03\x04" + bytes(40), "pickle or zip"),
        (b"\x80\x04\x95" + bytes(40), "pickle or zip|header"),
        (safetensors({"a": A}, bytes(8), length=1 << 60), "header length: is 1152921504606846976"),
        (safetensors({"a": A}, bytes(8), length=1 << 26), "header length"),
    ],
)
def test_something_else_saved_as_the_model(content: bytes, match: str, tmp_path: Path) -> None:
    """smthemex/ComfyUI_YuE#28: an error page, a pointer or an archive is called what it is, in no memory."""
    _refused(tmp_path, match, model__safetensors=content)


SHARD = safetensors({"a": A}, bytes(8))


SHARD_NAMES = ["../outside.safetensors", "/etc/outside.safetensors", "sub/x.safetensors", "..\\x.safetensors", ""]
SHARD_NAMES += ["x.bin", "C:x.safetensors", ".hidden.safetensors", "x\0.safetensors", "a" * 300 + ".safetensors"]


@pytest.mark.parametrize("name", [*SHARD_NAMES, 7, None])
def test_shards_never_leave_the_folder(name: Any, tmp_path: Path) -> None:
    """A shard is the plain name of a file in the folder; a path that climbs out or is absolute is refused."""
    (tmp_path / "outside.safetensors").write_bytes(SHARD)
    index = {"weight_map": {"a": name}}
    _refused(tmp_path, r"weight_map\['a'\]: .* is not the plain name", **{"model__safetensors__index__json": index})


def test_shards(tmp_path: Path) -> None:
    """Shards are read through their index, and one that is missing or lacks a tensor is named."""
    index = {"metadata": {"total_size": 16}, "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    files = {"model__safetensors__index__json": index, "m-1__safetensors": SHARD}
    _refused(tmp_path, "1 of 2 files are missing: m-2.safetensors", **files)
    files["m-2__safetensors"] = SHARD
    _refused(tmp_path, "m-2.safetensors: tensor 'b': is missing", **files)
    files["m-2__safetensors"] = safetensors({"b": {**A}}, np.array([5, 6], dtype="<f4").tobytes())
    source = open_source(_folder(tmp_path / "model", **files))
    assert source.names() == ["a", "b"]
    assert source.read("b", torch.float32).tolist() == [5.0, 6.0]
    for wrong in ([], {}, {"weight_map": []}, {"weight_map": {}}):
        _refused(tmp_path, "index|weight_map", **{**files, "model__safetensors__index__json": wrong})


@pytest.mark.parametrize("name", ["config__json", "tokenizer_config__json", "generation_config__json"])
@pytest.mark.parametrize("content", [b"[]", b"", b"{", b"\xff\xfe", b"<html>", b"[" * 200_000, b" " * (9 << 20)])
def test_bad_json_files(name: str, content: bytes, tmp_path: Path) -> None:
    """A JSON file that is not an object, not JSON, or too large is refused by its name."""
    _refused(tmp_path, name.replace("__", r"\."), **{name: content})


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"config__json": None}, "config.json: file: is missing"),
        ({"tokenizer__json": None}, "tokenizer.json: file: is missing"),
        ({"tokenizer__json": None, "tokenizer__model": b"x"}, "tokenizer.model alone is not enough"),
        ({"config__json": {"quantization_config": {"quant_method": "fp8"}}}, "quantization_config: 'fp8' is not"),
        ({"config__json": {"eos_token_id": "2"}}, "eos_token_id: '2' is no token id"),
        ({"generation_config__json": {"eos_token_id": [1, 2.5]}}, "eos_token_id: 2.5 is no token id"),
        ({"tokenizer_config__json": {"add_bos_token": "yes"}}, "add_bos_token: must be true or false"),
        ({"tokenizer_config__json": {"chat_template": 7}}, "chat_template: must be text"),
        ({"chat_template__jinja": b"\xff"}, "chat_template.jinja: content: not UTF-8"),
    ],
)
def test_what_a_folder_must_have(files: dict[str, Any], match: str, tmp_path: Path) -> None:
    """A file that is missing, and a value of the wrong type, is refused by file and field."""
    _refused(tmp_path, match, **files)


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    """Weights as a pickle are refused with the reason, as a folder's only weights and by their path."""
    folder = _folder(tmp_path / "model", pytorch_model__bin=b"\x80\x04", x__safetensors=b"")
    (folder / "x.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"pytorch_model.bin is a pickle, which is never opened"):
        open_source(folder)
    with pytest.raises(ModelLoadError, match="is a pickle, which is never opened"):
        open_source(folder / "pytorch_model.bin")


def test_code_in_a_folder_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#36192: auto_map in any of the configs is ignored, and no file of the folder is imported."""
    canary = tmp_path / "canary"
    code = f"open({str(canary)!r}, 'w').close()".encode()
    auto = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
    folder = _folder(
        tmp_path / "model",
        config__json={"model_type": "llama", "auto_map": auto},
        tokenizer_config__json={"auto_map": auto, "tokenizer_class": "Evil"},
        generation_config__json={"auto_map": auto, "custom_generate": "evil"},
        evil__py=code,
        __init____py=code,
        conftest__py=code,
    )
    monkeypatch.chdir(folder)
    source = open_source(folder)
    assert source.read("a", torch.float32).tolist() == [0.0, 1.0]
    assert not canary.exists()


def test_special_ids_come_from_every_file(tmp_path: Path) -> None:
    """All ids that end a text are found, each once: the tokenizer's, the generation config's, the config's."""
    folder = _folder(
        tmp_path / "model",
        config__json={"model_type": "llama", "eos_token_id": 1, "bos_token_id": 0},
        generation_config__json={"eos_token_id": [1, 106]},
        tokenizer_config__json={"eos_token": {"content": "<|end|>"}, "pad_token": "<pad>", "bos_token": "<s>"},
    )
    text = open_source(folder).text
    assert (text.bos_id, text.eos_ids, text.pad_id) == (0, (2, 1, 106), 7)
    assert (text.add_bos, text.add_eos, text.chat_template) == (True, False, None)
    assert text.tokenizer_json is not None
    assert json.loads(text.tokenizer_json) == TOKENIZER


@pytest.mark.parametrize(
    ("settings", "jinja", "expected"),
    [
        ({"chat_template": "one"}, None, "one"),
        (
            {"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "two"}]},
            None,
            "two",
        ),
        ({"chat_template": "one"}, b"three", "three"),
        ({"chat_template": ""}, None, None),
        ({"chat_template": [7, {"name": "rag", "template": "x"}]}, None, None),
    ],
)
def test_the_chat_template_is_found(settings: Any, jinja: bytes | None, expected: str | None, tmp_path: Path) -> None:
    """The template's own file goes before tokenizer_config.json, where it is text or the one named default."""
    folder = _folder(tmp_path / "model", tokenizer_config__json=settings, chat_template__jinja=jinja)
    assert open_source(folder).text.chat_template == expected


@pytest.mark.parametrize(
    ("settings", "processor", "expected"),
    [
        ({"add_bos_token": False}, TOKENIZER["post_processor"], (False, False)),
        ({}, None, (False, False)),
        ({}, {"type": "ByteLevel"}, (False, False)),
        ({}, {"type": "Sequence", "processors": [{"type": "ByteLevel"}, TOKENIZER["post_processor"]]}, (True, False)),
        ({"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>"}, None, (True, True)),
    ],
)
def test_what_goes_around_a_prompt(settings: Any, processor: Any, expected: tuple[bool, bool], tmp_path: Path) -> None:
    """The tokenizer config decides on a first and last token; where it is silent, the tokenizer's own template does."""
    tokenizer = {**TOKENIZER, "post_processor": processor}
    text = open_source(_folder(tmp_path / "model", tokenizer_config__json=settings, tokenizer__json=tokenizer)).text
    assert (text.add_bos, text.add_eos) == expected


def test_a_model_that_also_sees_pictures(tmp_path: Path) -> None:
    """Of a Gemma 3 with a vision tower the language model is read, under its plain names."""
    names = ("language_model.model.norm.weight", "vision_tower.x", "model.language_model.embed_tokens.weight")
    head = {name: {**A, "data_offsets": [8 * i, 8 * i + 8]} for i, name in enumerate(names)}
    config = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": {"hidden_size": 8}}
    source = open_source(
        _folder(tmp_path / "model", config__json=config, model__safetensors=safetensors(head, bytes(24)))
    )
    assert sorted(source.names()) == ["model.embed_tokens.weight", "model.norm.weight"]
    assert source.config == {"model_type": "gemma3_text", "hidden_size": 8, "eos_token_id": [1, 106]}


def test_a_valid_header_has_its_tensors(tmp_path: Path) -> None:
    """Tensors without elements and ranges in any order are valid, as the format says."""
    path = tmp_path / "x.safetensors"
    empty = {"dtype": "F32", "shape": [0, 5], "data_offsets": [8, 8]}
    path.write_bytes(safetensors({"b": B, "a": A, "c": empty, "__metadata__": {"format": "pt"}}, bytes(12)))
    assert {name: entry.shape for name, entry in read_safetensors(path).tensors.items()} == {
        "a": (2,),
        "b": (1,),
        "c": (0, 5),
    }


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    """The fingerprint is the same for a copy and another for a changed weight or config."""
    data = {"model__safetensors": safetensors({"a": A}, bytes(7) + b"\1")}
    changed = {"config__json": {"model_type": "llama", "rope_theta": 5.0}}
    prints = [
        open_source(_folder(tmp_path / str(i), **files)).fingerprint for i, files in enumerate(({}, {}, data, changed))
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3
