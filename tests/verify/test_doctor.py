"""``kimicore doctor MODEL``: what lies in a model's files, what was verified of it, and what it is in memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model_files.coded import KINDS, config_as, quantized

from kimicore import EngineConfig, assembly
from kimicore.cli.main import main
from kimicore.kernels.registry import select_ops
from kimicore.model.load import open_source
from kimicore.model.spec import spec_from_config
from kimicore.model.transformer import Transformer
from kimicore.verify.stored import stored_formats

SMALL = ["--prompts", "5", "--tokens", "6", "--quiet"]
STORED = {
    "packed": "pack-quantized, 4 bits in groups of 32",
    "zeros": "pack-quantized, 4 bits in groups of 32",
    "bytes": "int-quantized, 8 bits in rows",
    "awq": "AWQ, 4 bits in groups of 32",
    "gptq": "GPTQ, 4 bits in groups of 32",
    "act-order": "GPTQ, 4 bits in groups of 32, ordered",
}


def doctor(model: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["doctor", str(model), "--dtype", "float32", *words]) == 0
    return capsys.readouterr().out


def test_doctor_shows_what_lies_in_a_model(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page of a model has its architecture and its formats, with bytes that add up to the file's tensors."""
    shown = doctor(llama, capsys)
    assert "llama: 2 layers of 64 and 96, 4 heads over 2 of keys and values, 300 tokens" in shown
    (stored,) = stored_formats(open_source(llama))
    header = int.from_bytes((llama / "model.safetensors").read_bytes()[:8], "little")
    assert stored.name == "F32"
    assert stored.size_bytes == (llama / "model.safetensors").stat().st_size - 8 - header
    assert stored.table_bytes == 2 * 300 * 64 * 4
    rest = stored.size_bytes - stored.table_bytes
    assert f"{stored.size_bytes:,} bytes, {rest:,} without embedding and head" in shown
    assert "no report beside the weights" in shown


def test_doctor_shows_the_report_while_it_is_of_these_weights(
    llama: Path,
    changed: Callable[..., Path],
    noisy: Callable[[float], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The report beside the weights is shown with its verdict; once the weights are others, or it is damaged, not."""
    model = changed(llama, "layers.0.mlp", noisy(0.6))
    assert main(["verify", str(llama), str(model), *SMALL, "--no-noise"]) == 1
    capsys.readouterr()
    shown = doctor(model, capsys)
    assert f"FAIL against {llama} on 5 prompts" in shown
    assert "classical-chinese" in shown
    (model / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    assert "is of other weights" in doctor(model, capsys)
    (model / "verify.json").write_text('{"format": "kimicore verify"}')
    assert "or damaged" in doctor(model, capsys)


def test_doctor_shows_a_gguf_file(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A GGUF file's formats carry the file's own names, and embedding and head are counted apart."""
    formats = {one.name: one for one in stored_formats(open_source(smollm2_path))}
    assert formats["Q4_1"].tensors > 100
    assert sum(one.table_bytes for one in formats.values()) > 20_000_000
    shown = doctor(smollm2_path, capsys)
    assert "llama: 30 layers of 576 and 1536, 9 heads over 3 of keys and values, 49152 tokens, tied" in shown
    assert f"{formats['Q4_1'].tensors} tensors" in shown


def coded(llama: Path, kind: str, folder: Path) -> Path:
    """A model whose linear matrices are quantized as a kind of folder has them."""
    shutil.copytree(llama, folder, ignore=shutil.ignore_patterns("verify.json"))
    tensors, _ = quantized(load_file(folder / "model.safetensors"), kind)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**tree, "quantization_config": config_as(kind)}))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_doctor_names_the_schemes_of_a_quantized_folder(
    kind: str, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quantized matrix is one tensor of its scheme with the bytes of all its parts; no raw integers are listed."""
    folder = coded(llama, kind, tmp_path / "coded")
    tensors = load_file(folder / "model.safetensors")
    matrices = sum(one.nbytes for name, one in tensors.items() if "_proj." in name)
    formats = {one.name: one for one in stored_formats(open_source(folder))}
    assert formats.keys() == {STORED[kind], "F32"}
    assert (formats[STORED[kind]].tensors, formats[STORED[kind]].size_bytes) == (14, matrices)
    assert sum(one.size_bytes for one in formats.values()) == sum(one.nbytes for one in tensors.values())
    (line,) = [one for one in doctor(folder, capsys).splitlines() if one.startswith(f"  {STORED[kind]} ")]
    assert line.endswith(f" 14 tensors, {matrices:,} bytes")


def test_doctor_shows_a_file_beside_its_config(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A safetensors file of any name is shown as the folder with the usual name is."""
    folder = tmp_path / "renamed"
    shutil.copytree(llama, folder)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert stored_formats(open_source(folder / "weights.safetensors")) == stored_formats(open_source(llama))
    assert "F32" in doctor(folder / "weights.safetensors", capsys)


def test_doctor_shows_the_forms_in_memory(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a model is in memory has the forms and the bytes of the model that an engine loads, packed or expanded."""
    folder = coded(llama, "packed", tmp_path / "coded")
    source = open_source(folder)
    ops = select_ops("cpu", torch.float32)
    for words in ([], ["--precision", "none"]):
        packed, _ = assembly.keeps_packed(EngineConfig(precision=words[1] if words else "stored"), ops)
        loaded = Transformer.load(spec_from_config(source.config), source, ops, torch.float32, packed=packed)
        shown = doctor(folder, capsys, *words)
        assert ("quantized weights        stay packed in memory" in shown) == packed
        assert f"in memory                {loaded.weight_bytes:,} bytes of weights" in shown
        for name, count, size in loaded.forms():
            assert any(
                line.startswith(f"  {name} ") and line.endswith(f" {count} matrices, {size:,} bytes")
                for line in shown.splitlines()
            )
        assert ("  4 bits in groups of 32 " in shown.partition("in memory  ")[2]) == packed


def test_doctor_rounds_by_a_map(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a map and its settings, the forms in memory are those that the map gives."""
    shown = doctor(llama, capsys, "--precision", "asymmetric", "--set-precision", "ffn=int8")
    assert "bytes of weights with precision='asymmetric'" in shown
    if "stay packed in memory" in shown:
        assert "  8 bits in rows " in shown
    assert "  float32 " in shown


def test_doctor_loads_nothing_that_has_no_room(
    llama: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model larger than the memory that is available is not loaded, and that is said."""
    monkeypatch.setattr("kimicore.memory.available_bytes", lambda: 1000)
    assert "not loaded: some" in doctor(llama, capsys)


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["--precision", "asymetric"], 1, "asymetric"),
        (["--set-precision", "ffn=int8"], 2, "--set-precision goes with --precision and a map's name"),
        (["--precision", "asymmetric", "--set-precision", "ffn"], 2, "--set-precision 'ffn': write KEY=VALUE"),
        (["--precision", "asymmetric", "--set-precision", "ffn=int3"], 2, "ffn='int3'"),
    ],
)
def test_mistakes_are_told_first(words: list[str], status: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A map or a setting that there is not is refused before anything is printed."""
    assert main(["doctor", "/nowhere/model", *words]) == status
    shown = capsys.readouterr()
    assert told in shown.err
    assert shown.out == ""
