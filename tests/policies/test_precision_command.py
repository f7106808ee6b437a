"""``kimicore precision``: the map of a model, as a table and as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimicore.cli.main import main
from kimicore.policies.precision import ResolvedMap


def test_the_demo_model_s_default_map(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The default map of SmolLM2-135M: 576 inputs have groups of 64, 1536 groups of 128, all else is at 16 bits."""
    assert main(["precision", str(smollm2_path)]) == 0
    text = capsys.readouterr().out
    assert main(["precision", str(smollm2_path), "--json"]) == 0
    found = ResolvedMap.from_json(capsys.readouterr().out)
    assert found.table() + "\n" == text
    assert found.precision("layers.29.mlp.down_proj") == "int4"
    assert found.precision("layers.0.mlp.up_proj") == "int4-g64"
    assert found.precision("embed_tokens") == found.precision("layers.3.self_attn.o_proj") == "bfloat16"
    assert found.activations.middle == "int8"
    ffn = [one for one in found.modules if one.module.kind == "ffn"]
    assert len(ffn) == 90
    assert all(one.precision in ("int4", "int4-g64") for one in ffn)


def test_settings_reach_the_map(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings are given as KEY=VALUE, where a value may be JSON."""
    words = ["precision", str(smollm2_path), "--precision", "custom", "--json", "--set", "default=float16"]
    assert main([*words, "--set", 'patterns=[["*.mlp.*", "int8"]]']) == 0
    found = ResolvedMap.from_json(capsys.readouterr().out)
    assert {one.precision for one in found.modules if one.module.kind == "ffn"} == {"int8"}
    assert {one.precision for one in found.modules if one.module.kind != "ffn"} == {"float16"}


@pytest.mark.parametrize(
    ("words", "status", "named"),
    [
        (["--precision", "best"], 1, "asymmetric"),
        (["--set", "ffn"], 2, "KEY=VALUE"),
        (["--set", "ffn=int3"], 2, "ffn='int3'"),
        (["--set", "strict=true"], 2, "mlp.gate_proj: 576 inputs are not a multiple of int4's groups of 128"),
        (["--precision", "uniform-int4", "--set", "strict=true"], 2, "embed_tokens: 576 inputs are not a multiple"),
        (
            ["--precision", "uniform", "--set", "weights=int4", "--set", "strict=true"],
            2,
            "embed_tokens: 576 inputs are not a multiple",
        ),
    ],
)
def test_what_cannot_be_is_one_error(
    words: list[str], status: int, named: str, smollm2_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong name, setting or map ends with a status and an error that names it, and prints no map."""
    assert main(["precision", str(smollm2_path), *words]) == status
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.out == ""
