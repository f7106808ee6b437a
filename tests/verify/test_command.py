"""``kimicore verify`` as it is typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimicore.cli.main import main
from kimicore.model.load import open_source
from kimicore.verify import Report

SMALL = ["--prompts", "5", "--tokens", "6", "--quiet"]


def test_a_pass_ends_with_zero_and_leaves_reports(
    llama: Path, changed: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A candidate that passes: status 0, a table, the report where it was asked for and beside the weights."""
    same = changed(llama, "nothing", lambda name, tensor: tensor)
    out = tmp_path / "out.json"
    assert main(["verify", str(llama), str(same), *SMALL, "--json", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.endswith("pass: agreement 100.00% is at least 98.5%\n")
    report = Report.read(out)
    assert report == Report.read(same / "verify.json")
    assert report.passed
    assert report.prompts == 5
    assert report.table() + "\n" == shown.out
    tree = json.loads(out.read_text())
    assert tree["candidate"]["fingerprint"] == open_source(same).fingerprint
    assert {"torch", "kimicore"} <= tree["libraries"].keys()
    assert tree["noise"]["all"]["prompts"] == 5


def test_a_fail_ends_with_one(
    llama: Path,
    changed: Callable[..., Path],
    noisy: Callable[[float], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A candidate that fails: status 1, and with ``--no-keep`` nothing is written beside its weights."""
    worse = changed(llama, "layers.0.mlp", noisy(0.6))
    words = ["--no-keep", "--no-edit", "--no-noise", "--json", "-"]
    assert main(["verify", str(llama), str(worse), *SMALL, *words]) == 1
    report = Report.from_json(capsys.readouterr().out)
    assert not report.passed
    assert report.noise is None
    assert report.scores.all.edit is None
    assert not (worse / "verify.json").exists()


def test_own_texts_and_settings_reach_the_comparison(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--text`` gives the categories, ``--precision`` and ``--set`` the map; progress stands on standard error."""
    text = tmp_path / "letters.txt"
    text.write_text("\n\n".join(f"This is letter number {n}, and it says little. It ends here." for n in range(6)))
    words = ["--precision", "uniform", "--set", "weights=int8", "--text", str(text), "--json", "-", "--no-noise"]
    assert main(["verify", str(llama), "--prompts", "4", "--tokens", "6", *words]) in (0, 1)
    shown = capsys.readouterr()
    report = Report.from_json(shown.out)
    assert list(report.by_category) == ["letters"]
    assert report.candidate.precision == "uniform"
    assert report.scores.all.kl.value > 1e-6
    assert "comparing with the baseline" in shown.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{llama}"], "no candidate"),
        (["{llama}", "{llama}", "--json", "/nowhere/out.json"], "there is no folder /nowhere"),
        (["{llama}", "/nowhere/model"], "/nowhere/model: no such file or folder"),
        (["{llama}", "{llama}", "--prompts", "99999"], "prompts=99999"),
        (["{llama}", "{llama}", "--set", "weights=int8"], "--set goes with --precision"),
        (["{llama}", "--precision", "asymetric"], "asymetric"),
        (["{llama}", "--precision", "uniform", "--set", "weights=int3"], "int3"),
        (["{llama}", "--dtype", "int4"], "dtype='int4'"),
        (["{llama}", "{gemma}"], "cannot be compared"),
    ],
)
def test_mistakes_are_told(
    words: list[str], told: str, llama: Path, gemma: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake ends with 2, never with the 1 of a failed verdict, and one line on standard error that names it."""
    assert main(["verify", *(one.format(llama=llama, gemma=gemma) for one in words)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert told in shown.err
    assert shown.err.count("\n") == 1
