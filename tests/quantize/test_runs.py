"""Runs that stop and go on, places that cannot be written, and the command."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.quantize.test_folder import SMALL, resolved
from tests.rigs.tiny import make_tiny, tiny_tokenizer

from kimicore.cli.main import main
from kimicore.errors import ConfigError, ModelLoadError
from kimicore.quantize import files
from kimicore.quantize.calibration import KINDS, calibration_texts, calibration_tokens, texts_digest
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.run import Quantized, quantize_model
from kimicore.text.tokenizer import Tokenizer


class Stop(Exception):
    """What an interrupt is in these tests."""


def stop_after(layers: int) -> Callable[[str, int, int], None]:
    def progress(what: str, done: int, total: int) -> None:
        if done == layers:
            raise Stop

    return progress


def start(source: Path, out: Path, method: str = "gptq", **given: Any) -> Quantized:
    found = resolved(source, "asymmetric", {"ffn": "int4-g32"})
    settings = QuantizeSettings(method=method, **{**SMALL, **given.pop("settings", {})})
    return quantize_model(source, out, found, settings, **given)


def content(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir()}


@pytest.mark.parametrize("method", ["nearest", "awq", "gptq"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_an_interrupted_run_goes_on(method: str, layers: int, family: Callable[..., Path], tmp_path: Path) -> None:
    """A run that stopped after any layer goes on there, and its files are those of a run that did not stop."""
    source = family("qwen3")
    whole = start(source, tmp_path / "whole", method)
    with pytest.raises(Stop):
        start(source, tmp_path / "out", method, progress=stop_after(layers))
    assert not (tmp_path / "out").exists()
    seen: list[int] = []
    made = start(source, tmp_path / "out", method, progress=lambda what, done, total: seen.append(done))
    assert made.resumed_at == layers == seen[0]
    assert seen == list(range(layers, 4))
    assert content(made.folder) == content(whole.folder)
    assert not (tmp_path / "out.partial").exists()


def test_a_cut_off_layer_is_computed_again(family: Callable[..., Path], tmp_path: Path) -> None:
    """A layer's file that was cut off counts as not there, and so does one whose outputs were lost."""
    source = family("qwen3")
    whole = start(source, tmp_path / "whole")
    with pytest.raises(Stop):
        start(source, tmp_path / "out", progress=stop_after(2))
    partial = tmp_path / "out.partial"
    last = partial / "layer-00001.safetensors"
    last.write_bytes(last.read_bytes()[:-5])
    made = start(source, tmp_path / "out")
    assert made.resumed_at == 0  # what came out of the first layer is gone by then
    assert content(made.folder) == content(whole.folder)


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {"samples": 6}},
        {"settings": {"damping": 0.02}},
        {"method": "awq"},
        {"texts": {"own": "another text entirely, " * 40}},
    ],
    ids=["samples", "damping", "method", "texts"],
)
def test_a_run_of_another_kind_is_refused(change: dict[str, Any], family: Callable[..., Path], tmp_path: Path) -> None:
    """What another run left is neither used nor deleted, unless that is asked for."""
    source = family("qwen3")
    with pytest.raises(Stop):
        start(source, tmp_path / "out", progress=stop_after(1))
    before = content(tmp_path / "out.partial")
    with pytest.raises(ConfigError, match=r"out\.partial: holds an interrupted run of another .*--overwrite"):
        start(source, tmp_path / "out", **change)
    assert content(tmp_path / "out.partial") == before
    assert start(source, tmp_path / "out", overwrite=True, **change).resumed_at == 0


def test_what_is_there_is_only_replaced_when_asked(family: Callable[..., Path], tmp_path: Path) -> None:
    """A target that exists is refused before any work; with overwrite it stays until the new one is whole."""
    source = family("qwen3")
    made = start(source, tmp_path / "out", "nearest")
    before = content(made.folder)
    with pytest.raises(ConfigError, match="out: is there already"):
        start(source, tmp_path / "out")
    with pytest.raises(Stop):
        start(source, tmp_path / "out", overwrite=True, progress=stop_after(2))
    assert content(made.folder) == before
    start(source, tmp_path / "out", overwrite=True)
    assert content(made.folder) != before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", source.name]
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="is no model's folder"):
        start(source, precious, overwrite=True)
    with pytest.raises(ConfigError, match="is where the model itself lies"):
        start(source, source, overwrite=True)
    with pytest.raises(ConfigError, match="there is no folder"):
        start(source, tmp_path / "nowhere" / "out")


def test_a_full_disk_is_told_and_can_be_gone_on_from(
    family: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too little room is told before the work, and a disk that fills up in it with what to do; nothing is lost."""
    source = family("qwen3")
    whole = start(source, tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
        with pytest.raises(ConfigError, match="MB are free and"):
            start(source, tmp_path / "out")
    written: list[str] = []

    def fsync(number: int) -> None:
        written.append("")
        if len(written) == 6:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fsync)
        with pytest.raises(ConfigError, match="the disk is full; make room and run the same command again"):
            start(source, tmp_path / "out")
    made = start(source, tmp_path / "out")
    assert made.resumed_at > 0
    assert content(made.folder) == content(whole.folder)


def test_weights_that_are_no_numbers_stop_it(tmp_path: Path) -> None:
    """A weight that is infinite ends the run with the name of its module."""
    from safetensors.torch import load_file, save_file

    source = make_tiny(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(tensors, source / "model.safetensors")
    for method in ("nearest", "gptq"):
        with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj\.weight: .* infinite"):
            start(source, tmp_path / method, method)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command tells of smaller groups and of what it wrote, and its folder can be quantized from again."""
    source, out = make_tiny(tmp_path / "source"), tmp_path / "out"
    words = ["quantize", str(source), "--out", str(out), "--samples", "5", "--sample-tokens", "32", "-q"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "4 matrices have int4-g64: 64 inputs are no multiple of 128, the group of int4" in captured.err
    assert "2 matrices have int4-g32: 96 inputs" in captured.err
    assert "100.0% of the feed-forward weights are under 16 bits" in captured.out
    tree = json.loads((out / "kimicore.json").read_text())
    assert tree["method"] == "gptq"
    assert main(["generate", "the cat", "-m", str(out), "--max-tokens", "3", "--dtype", "float32", "-q"]) == 0
    again = ["quantize", str(out), "--out", str(tmp_path / "again"), "--map", "uniform-int8", "--method", "nearest"]
    assert main([*again, "-q", "--threads", "1"]) == 0


@pytest.mark.parametrize(
    ("words", "status", "named"),
    [
        (["--map", "best"], 2, "asymmetric"),
        (["--set", "ffn=int3"], 2, "ffn='int3'"),
        (["--set", "fnn=int4"], 2, "did you mean 'ffn'"),
        (["--strict"], 2, "mlp.gate_proj: 64 inputs are not a multiple of int4's groups of 128"),
        (["--method", "magic"], 2, "method='magic': must be one of nearest, awq, gptq, awq-gptq"),
        (["--samples", "0"], 2, "samples=0"),
        (["--sample-tokens", "100000"], 2, "sample_tokens="),
        (["--sample-tokens", "60000"], 2, "sample_tokens=8192: the text 'news' has"),
        (["--threads", "0"], 2, "--threads=0"),
    ],
)
def test_what_cannot_be_is_told_before_the_work(
    words: list[str], status: int, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong map, setting or method ends with one error that names it, and nothing is written."""
    source = make_tiny(tmp_path / "source")
    assert main(["quantize", str(source), "--out", str(tmp_path / "out"), *words]) == status
    assert named in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["source"]


# ---------------------------------------------------------------- the calibration set


def shingles(text: str) -> set[str]:
    """All runs of 60 characters, of Chinese ones 20: shorter ones are idioms that many texts share."""
    plain = "".join(text.split())
    length = 60 if plain.isascii() or sum(map(str.isascii, plain)) > len(plain) // 2 else 20
    return {plain[at : at + length] for at in range(len(plain) - length)}


def test_the_calibration_set_is_small_and_its_own() -> None:
    """Five kinds of text take less than 250 KB, and share no passage with the texts that models are judged on."""
    texts = calibration_texts()
    assert tuple(texts) == KINDS
    assert sum(len(one.encode()) for one in texts.values()) < 250_000
    root = Path(__file__).parent.parent
    others = [*(root / "data").glob("*.txt"), *(root.parent / "src" / "kimicore" / "verify").rglob("*.txt")]
    assert len(others) > 3
    own = set().union(*map(shingles, texts.values()))
    for path in others:
        assert sorted(own & shingles(path.read_text(encoding="utf-8")))[:3] == [], path.name


def test_sequences_differ_and_take_turns(tmp_path: Path) -> None:
    """Every kind has its turn, no sequence comes twice, and each begins as the model's texts do."""
    from kimicore.text.source import TextSource

    def tokenizer(add_bos: bool) -> Tokenizer:
        return Tokenizer.from_source(
            TextSource(tiny_tokenizer().encode(), None, None, bos_id=1, eos_ids=(2,), pad_id=0, add_bos=add_bos)
        )

    texts = calibration_texts()
    found = calibration_tokens(tokenizer(False), texts, 60, 512)
    assert found.shape == (60, 512)
    assert len({tuple(row) for row in found.tolist()}) == 60
    for at, text in enumerate(texts.values()):
        assert tokenizer(False).decode(found[at].tolist(), skip_special=True)[:60] == text[:60]
    assert (calibration_tokens(tokenizer(True), texts, 7, 64)[:, 0] == 1).all()
    assert texts_digest(texts) != texts_digest({**texts, "news": texts["news"] + "."})
