"""The plugin tutorial, followed to the letter, ends in a package that passes the kit and changes the engine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kimicore

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "plugin-tutorial.md"
EXAMPLE = ROOT / "examples" / "kimicore-example-policies"
_FILE = re.compile(r"^```\{code-block\} \w+\n:caption: (\S+)\n\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def files() -> dict[str, str]:
    """The files that the page gives, by their path in the package."""
    return dict(_FILE.findall(PAGE.read_text(encoding="utf-8")))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The folder of the package as the page describes it, and beside it what an installation leaves behind."""
    folder = tmp_path / "package"
    for name, text in files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / "src" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    lines = []
    for group, names in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in names.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the package's folder, where the package counts as installed."""
    paths = [str(package / "src"), str(Path(kimicore.__file__).parent.parent)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, *arguments], cwd=package, env=env, capture_output=True, text=True)


def test_the_page_is_the_example():
    """The page gives the example package's own files, and all that it needs."""
    given = files()
    for name, text in given.items():
        assert text == (EXAMPLE / name).read_text(encoding="utf-8"), name
    sources = [path for folder in ("src", "tests") for path in (EXAMPLE / folder).rglob("*.py")]
    assert set(given) == {"pyproject.toml", *(str(path.relative_to(EXAMPLE)) for path in sources)}


def test_the_package_of_the_page_passes_its_tests(package: Path):
    """The kit finds nothing in the package's policies, and by their names they change the engine's decisions."""
    done = run(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_command_line_finds_the_package(package: Path):
    """Installed policies are listed with their package and are checked by name, with settings."""
    listed = run(package, "-m", "kimicore.cli.main", "policies")
    assert re.search(r"^batching +tenant-turns +kimicore[-_]example[-_]policies$", listed.stdout, re.MULTILINE)
    command = ["check-policy", "tenant-turns", "--set", "in_a_row=2", "--examples", "4"]
    done = run(package, "-m", "kimicore.cli.main", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TenantTurns(in_a_row=2, name='tenant-turns')" in done.stdout
    refused = run(package, "-m", "kimicore.cli.main", "check-policy", "tenant-turns", "--set", "in_a_row=0")
    assert (refused.returncode, "in_a_row=0" in refused.stderr) == (2, True)
