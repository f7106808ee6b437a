"""Arguments of quantizing that contradict each other, or come where nothing hears them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kimicore.cli.main import main
from kimicore.errors import ConfigError
from kimicore.policies.precision.named import policy_named


@pytest.mark.parametrize(
    ("name", "settings"),
    [("uniform-int4", {"weights": "int8"}), ("uniform-int8", {"weights": "int4"}), ("none", {"weights": "int4"})],
)
def test_a_short_name_means_what_it_says(name: str, settings: dict[str, Any]) -> None:
    """A setting that is not what a short name means is refused, with both; what agrees, or is another one, is not."""
    with pytest.raises(ConfigError, match=f"{name}.*{settings['weights']}.*name 'uniform'"):
        policy_named(name, settings)
    assert policy_named("uniform", settings).weights == settings["weights"]
    assert policy_named("uniform-int4", {"weights": "int4", "strict": True}).strict


@pytest.mark.parametrize("words", [["--steps-down", "1"], ["--keep-failed"], ["--prompts", "20"]])
def test_options_of_the_ladder_go_with_it(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --ladder its options are an error, before the model is looked for."""
    assert main(["quantize", str(tmp_path / "nothing"), "--out", str(tmp_path / "out"), *words]) == 2
    assert f"{words[0]}: goes with --ladder" in capsys.readouterr().err


def test_the_ladder_checks_before_the_model_is_judged(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that cannot be and a folder that is there are refused before the judge loads anything."""
    import kimicore.quantize.judge

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("the judge was made")

    monkeypatch.setattr(kimicore.quantize.judge, "Judge", never)
    model = str(smollm2_path)
    assert main(["quantize", model, "--out", str(tmp_path / "out"), "--ladder", "--steps-down", "-1"]) == 2
    assert "steps_down=-1" in capsys.readouterr().err
    (tmp_path / "there").mkdir()
    assert main(["quantize", model, "--out", str(tmp_path / "there"), "--ladder"]) == 2
    assert "there already" in capsys.readouterr().err
