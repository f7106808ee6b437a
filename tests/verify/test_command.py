"""``kimicore verify`` and ``kimicore doctor MODEL`` as they are typed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimicore.cli.main import main
from kimicore.model.load import open_source
from kimicore.verify import Report
from kimicore.verify.stored import stored_formats

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
    ("words", "status", "told"),
    [
        (["{llama}"], 2, "no candidate"),
        (["{llama}", "{llama}", "--json", "/nowhere/out.json"], 2, "there is no folder /nowhere"),
        (["{llama}", "/nowhere/model"], 1, "/nowhere/model: no such file or folder"),
        (["{llama}", "{llama}", "--prompts", "99999"], 2, "prompts=99999"),
        (["{llama}", "{llama}", "--set", "weights=int8"], 2, "--set goes with --precision"),
        (["{llama}", "--precision", "asymetric"], 1, "asymetric"),
        (["{llama}", "--precision", "uniform", "--set", "weights=int3"], 2, "int3"),
        (["{llama}", "--dtype", "int4"], 2, "dtype='int4'"),
        (["{llama}", "{gemma}"], 2, "cannot be compared"),
    ],
)
def test_mistakes_are_told(
    words: list[str], status: int, told: str, llama: Path, gemma: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake ends with one line on standard error that names it, and nothing on standard output."""
    assert main(["verify", *(one.format(llama=llama, gemma=gemma) for one in words)]) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert told in shown.err
    assert shown.err.count("\n") == 1


# ---------------------------------------------------------------- doctor


def doctor(model: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["doctor", str(model), "--dtype", "float32"]) == 0
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
