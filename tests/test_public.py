"""What the package offers to applications."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import get_type_hints

import pytest

import kimicore
from kimicore import errors

ROOT = Path(__file__).parent.parent
_DIRECTIVE = re.compile(r"^\.\. (?:autoclass|autoexception|data):: kimicore\.(\w+)(?:\(.*\))?$", re.MULTILINE)


def test_the_api_page_documents_exactly_what_is_public() -> None:
    """The names on the API page are those of the package's ``__all__``, each once."""
    names = _DIRECTIVE.findall((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))
    assert sorted(names) == list(kimicore.__all__)


def test_public_names_are_sorted_and_stand_once() -> None:
    """``__all__`` is in order and names nothing twice; ``dir()`` gives the same."""
    assert list(kimicore.__all__) == sorted(set(kimicore.__all__))
    assert dir(kimicore) == list(kimicore.__all__)


@pytest.mark.parametrize("name", kimicore.__all__)
def test_public_names_can_be_imported_and_are_explained(name: str) -> None:
    """Every public name can be had from the package, and every class has a docstring of its own."""
    value = getattr(import_module("kimicore"), name)
    if name != "__version__":
        assert value.__name__ == name
        assert value.__dict__.get("__doc__"), f"{name} has no docstring"


def test_unknown_names_are_refused() -> None:
    """A name that the package does not have is an AttributeError that says so."""
    with pytest.raises(AttributeError, match="Enjine"):
        kimicore.Enjine  # noqa: B018


def test_errors_have_one_root() -> None:
    """Every exception of the package can be caught as KimiCoreError."""
    found = [value for name in kimicore.__all__ if isinstance(value := getattr(kimicore, name), type)]
    errors = [one for one in found if issubclass(one, BaseException)]
    assert errors
    assert all(issubclass(one, kimicore.KimiCoreError) for one in errors)


def test_the_version_is_that_of_the_project() -> None:
    """The version in the package is the one that the project's file names."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert kimicore.__version__ == project["version"]


def test_importing_the_package_is_light() -> None:
    """``import kimicore`` imports neither torch nor a tokenizer, and no extra."""
    heavy = ("torch", "tokenizers", "jinja2", "trio", "triton", "huggingface_hub", "transformers")
    code = f"import sys, kimicore; print([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_tree_of_errors_is_the_one_that_is_drawn() -> None:
    """The tree in the docstring of the errors is the classes' own, and so is the one on the page of errors."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    for drawing in (errors.__doc__ or "", page):
        found: dict[str, str] = {}
        above: list[tuple[int, str]] = []
        for indent, name in re.findall(r"^([ │├└─]*)([A-Z]\w+)(?: \(.*?\))?(?:  .*)?$", drawing, re.MULTILINE):
            if name not in errors.__all__:
                continue
            while above and above[-1][0] >= len(indent):
                above.pop()
            found[name] = above[-1][1] if above else "Exception"
            above.append((len(indent), name))
        assert found == {name: getattr(errors, name).__bases__[0].__name__ for name in errors.__all__}


def test_every_signature_is_typed() -> None:
    """Each argument and each result of a public method has a type that can be resolved."""
    for name in kimicore.__all__:
        methods = inspect.getmembers(getattr(kimicore, name), inspect.isfunction)
        for method, function in methods:
            if not method.startswith("_"):
                hints = get_type_hints(function)
                assert set(inspect.signature(function).parameters) - {"self"} <= set(hints), f"{name}.{method}"
                assert "return" in hints, f"{name}.{method}"


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy comes with the lint extra")
def test_a_type_checker_sees_the_types(tmp_path: Path) -> None:
    """In an application that is checked strictly, every call gives the type that it is documented to give."""
    script = ROOT / "tests" / "typed_use.py"
    package = Path(kimicore.__file__).parent
    assert (package / "py.typed").is_file()
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent"]
    command += [f"--cache-dir={tmp_path}", str(script)]
    search = {**os.environ, "MYPYPATH": str(package.parent)} if "site-packages" not in package.parts else None
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=search)
    assert done.returncode == 0, done.stdout + done.stderr
