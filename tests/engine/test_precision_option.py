"""``--precision`` and ``--set-precision``: what is typed reaches the engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kimicore import EngineConfig, SyncEngine
from kimicore.cli.main import main

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the rigs

from rigs.tiny import make_tiny

ENGINE = ["--dtype", "float32", "--kv-device-bytes", "8MiB", "-q"]
PROMPT = "the cat and the other one"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of float32 weights."""
    return make_tiny(tmp_path_factory.mktemp("precision") / "tiny")


def answered(model: Path, **settings: object) -> str:
    """The text of an engine with these settings."""
    with SyncEngine(model, EngineConfig(dtype="float32", kv_device_bytes="8MiB", **settings)) as engine:
        return engine.generate(PROMPT, max_tokens=24, temperature=0.0).text


def test_generate_rounds_by_the_map(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``generate`` answers as the engine with that map and its settings does, and otherwise than without."""
    texts = []
    for words, settings in (
        ([], {}),
        (["--precision", "uniform-int4"], {"precision": "uniform-int4"}),
        (
            ["--precision", "uniform", "--set-precision", "weights=int4-g32", "--set-precision", "strict=true"],
            {"precision": "uniform", "policy": {"precision": {"weights": "int4-g32", "strict": True}}},
        ),
    ):
        options = ["-m", str(tiny), "--max-tokens", "24", "--temperature", "0", "--json"]
        assert main(["generate", PROMPT, *options, *ENGINE, *words]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
        assert texts[-1] == answered(tiny, **settings)
    assert len(set(texts)) == 3


def test_chat_takes_a_map(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``chat`` answers otherwise with a map than without."""
    shown = []
    for words in ([], ["--precision", "uniform-int4"]):
        lines = tmp_path / "lines"
        lines.write_text(PROMPT)
        with lines.open() as file:
            monkeypatch.setattr(sys, "stdin", file)
            assert main(["chat", "-m", str(tiny), "--max-tokens", "24", "--temperature", "0", *ENGINE, *words]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] != shown[1]


def test_bench_measures_and_notes_it(tiny: Path, tmp_path: Path) -> None:
    """``bench`` measures with the map, and the fitted times say so."""
    out = tmp_path / "times.json"
    words = ["--repeat", "1", "--max-batch-size", "4", "--max-batch-tokens", "32", "--fit", str(out)]
    assert main(["bench", str(tiny), *words, *ENGINE, "--precision", "uniform-int8"]) == 0
    assert json.loads(out.read_text())["engine"]["precision"] == "uniform-int8"


@pytest.mark.parametrize("command", [["generate", "x", "-m"], ["chat", "-m"], ["bench"]])
@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["--precision", "asymetric"], 1, "asymetric"),
        (["--precision", "none", "--set-precision", "ffn=int8"], 2, "not with 'none'"),
        (["--precision", "asymmetric", "--set-precision", "fnn=int8"], 2, "did you mean 'ffn'"),
    ],
)
def test_mistakes_are_told_before_the_model_is_opened(
    command: list[str], words: list[str], status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A map or a setting that there is not is refused before the model is looked for."""
    assert main([*command, "/nowhere/model", *words]) == status
    assert told in capsys.readouterr().err
