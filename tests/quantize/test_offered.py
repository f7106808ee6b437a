"""What ``kimicore.quantize`` offers to applications is enough to do in code what the command does."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.quantize.test_folder import resolved

import kimicore.quantize
from kimicore.cli.main import main
from kimicore.errors import ConfigError, ModelLoadError, PluginError
from kimicore.model.load import open_source
from kimicore.quantize import QuantizeSettings, precision_map, quantize_model

ROOT = Path(__file__).parents[2]
_DIRECTIVE = re.compile(r"^\.\. (?:auto\w+|data):: kimicore\.quantize\.(\w+)(?:\(.*\))?$", re.MULTILINE)


@pytest.mark.parametrize("name", kimicore.quantize.__all__)
def test_names_can_be_imported_and_are_explained(name: str) -> None:
    """Every name that is offered can be had from the package, and what is no constant has a docstring."""
    value: Any = getattr(kimicore.quantize, name)
    if not name.isupper():
        assert value.__name__ == name
        assert value.__doc__, f"{name} has no docstring"


def test_the_api_page_documents_what_is_offered() -> None:
    """The API page has every name that is offered, once, and none that is not; ``dir()`` gives the same."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert sorted(_DIRECTIVE.findall(page)) == dir(kimicore.quantize) == sorted(set(kimicore.quantize.__all__))


def test_unknown_names_are_refused() -> None:
    """A name that is not offered is an AttributeError that says so."""
    with pytest.raises(AttributeError, match="quantise_model"):
        kimicore.quantize.quantise_model  # noqa: B018


def test_importing_it_is_light() -> None:
    """``import kimicore.quantize`` loads neither torch nor numpy nor a tokenizer before one of its names is used."""
    code = (
        "import sys, kimicore.quantize as own; heavy = ('torch', 'numpy', 'tokenizers');"
        "before = [one for one in heavy if one in sys.modules]; own.quantize_model;"
        "print(before, [one for one in heavy if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] ['torch', 'numpy', 'tokenizers']"


def test_code_and_command_write_the_same(family: Callable[..., Path], tmp_path: Path) -> None:
    """What an application does with the names that are offered gives the command's folder, byte by byte."""
    source = family("qwen3")
    made = quantize_model(
        source,
        tmp_path / "code",
        precision_map(source, "asymmetric", {"ffn": "int8"}),
        QuantizeSettings(samples=5, sample_tokens=32),
    )
    options = ["--set", "ffn=int8", "--samples", "5", "--sample-tokens", "32", "--quiet"]
    assert main(["quantize", str(source), "--out", str(tmp_path / "command"), *options]) == 0
    found = {one.name: one.read_bytes() for one in made.folder.iterdir()}
    assert found == {one.name: one.read_bytes() for one in (tmp_path / "command").iterdir()}
    assert made.ffn_share == 1.0


def test_a_map_by_name_is_the_policy_s(family: Callable[..., Path]) -> None:
    """A map has the precisions that the named policy gives to the model's modules, for a path as for a source."""
    source = family("llama")
    mixed = {"patterns": [["*.1.mlp.*_proj", "int5"]]}
    for name, settings in (("asymmetric", None), ("uniform-int8", None), ("custom", mixed)):
        expected = resolved(source, name, settings)
        assert precision_map(source, name, settings) == precision_map(open_source(source), name, settings) == expected
    assert precision_map(source) == precision_map(source, "asymmetric")


def test_what_cannot_be_a_map_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    """A wrong name or setting is told first, and then that there is no such model."""
    nowhere = tmp_path / "nowhere"
    with pytest.raises(PluginError, match="no-such-map"):
        precision_map(nowhere, "no-such-map")
    with pytest.raises(ConfigError, match="ffn='int3'"):
        precision_map(nowhere, "asymmetric", {"ffn": "int3"})
    with pytest.raises(ModelLoadError, match="nowhere"):
        precision_map(nowhere)
