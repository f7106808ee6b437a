"""``kimicore prune`` as it is typed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kimicore.cli.main import main
from kimicore.model.load import open_source
from kimicore.model.spec import spec_from_config
from kimicore.verify import Report

SMALL = ["--samples", "5", "--sample-tokens", "40", "--prompts", "5", "--quiet"]


def test_a_folder_without_layers(
    layered: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has so many layers fewer, and what is shown are all influences and the layers that went."""
    out, model = tmp_path / "out", layered("gemma3_text")
    capsys.readouterr()  # what transformers says while it saves
    assert main(["prune", str(model), "--layers", "2", "--out", str(out), *SMALL]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert len(re.findall(r"^ +\d+ +\d\.\d{5}", shown.out, re.MULTILINE)) == 5
    record = json.loads((out / "kimicore.json").read_text())
    gone = sorted(one["layer"] for one in record["removed"])
    assert f"skip_layers = {gone}\n" in shown.out
    assert len(spec_from_config(open_source(out).config).layers) == 3
    assert not (out / "verify.json").exists()


def test_verified_at_once(identity: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a layer that does nothing it passes, status 0; without one more it fails, status 1. Reports are kept."""
    source = identity(2)
    for layers, status in ((1, 0), (2, 1)):
        out = tmp_path / f"out-{layers}"
        words = ["--layers", str(layers), "--out", str(out), "--verify", "--threads", "1"]
        assert main(["prune", str(source), *words, *SMALL]) == status
        report = Report.read(out / "verify.json")
        assert report.passed == (status == 0)
        assert report.candidate.fingerprint == open_source(out).fingerprint
        assert report.baseline.fingerprint == open_source(source).fingerprint
        assert report.prompts == 5
        assert report.table() in capsys.readouterr().out


def test_only_told(layered: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without ``--out`` it says which layers would go, by KL where that is asked for, and writes nothing."""
    source = layered("llama")
    assert main(["prune", str(source), "--layers", "2", "--measure", "kl", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert shown.count(", KL then ") == 2
    assert re.search(r"^skip_layers = \[\d, \d\]$", shown, re.MULTILINE)
    assert [one.name for one in tmp_path.iterdir()] == [source.name]


def test_verified_without_a_folder(
    identity: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``--verify`` and no ``--out`` the layers that are left are judged as they are loaded; nothing is written."""
    source = identity(2)
    before = sorted(one.name for one in source.iterdir())
    capsys.readouterr()  # what transformers says while it saves
    for layers, status in ((1, 0), (2, 1)):
        assert main(["prune", str(source), "--layers", str(layers), "--verify", "--threads", "1", *SMALL]) == status
        shown = capsys.readouterr().out
        gone = re.search(r"^skip_layers = \[(.*)\]$", shown, re.MULTILINE)
        assert gone is not None
        assert f"\n{source} without layers {gone[1]}\n{'FAIL' if status else 'pass'}: " in shown
    assert [one.name for one in tmp_path.iterdir()] == [source.name]
    assert sorted(one.name for one in source.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{model}", "--layers", "0", "--out", "{out}"], "--layers=0: must be at least 1"),
        (["{model}", "--layers", "-3", "--out", "{out}"], "--layers=-3"),
        (["{model}", "--layers", "5", "--out", "{out}"], "layers=5: the model has 5, and at least one must be left"),
        (["{model}", "--layers", "1", "--out", "{out}", "--measure", "guess"], "measure='guess'"),
        (["{model}", "--layers", "1", "--out", "/nowhere/out"], "there is no folder /nowhere"),
        (["{model}", "--layers", "1", "--out", "{model}"], "is there already"),
        (["/nowhere/model", "--layers", "1", "--out", "{out}"], "/nowhere/model: no such file or folder"),
        (["{model}", "--layers", "1", "--out", "{out}", "--threads", "0"], "threads=0"),
    ],
)
def test_faults_end_with_two(
    words: list[str],
    told: str,
    layered: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every fault is one line on standard error and status 2, which no verdict has; nothing is written."""
    model = layered("llama")
    capsys.readouterr()  # what transformers says while it saves
    filled = [word.format(model=model, out=tmp_path / "out") for word in words]
    assert main(["prune", *filled, *SMALL]) == 2
    shown = capsys.readouterr()
    assert told in shown.err
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
