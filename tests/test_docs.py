"""The documentation keeps its promises: its blocks run, its links lead somewhere, its command lines are understood.

The ``bash`` blocks are not run here, since they install packages and need a fresh machine; continuous integration runs
the README's that way. What they name (commands, options, extras) is checked.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import fields, frozen

from kimicore.cli import main as cli
from kimicore.config import EngineConfig
from kimicore.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

_FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_EXCUSE = re.compile(r"<!--\s*not run:\s*(\S.*?)\s*-->\s*\Z", re.DOTALL)
_LINK = re.compile(r"(?<!\!)\[[^\]\n]*\]\(([^)\s]+)\)")
_OUTSIDE = ("https://", "http://", "mailto:")


@frozen
class Block:
    """A fenced block: its language, its code at its own line of the page, and why it is not run ("": it is)."""

    language: str
    code: str
    line: int
    excuse: str


def blocks(page: Path, language: str) -> Iterator[Block]:
    """Yield the page's blocks of one language, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        if found[1] == language:
            excuse = _EXCUSE.search(text, 0, found.start())
            line = text.count("\n", 0, found.start(2))
            yield Block(found[1], found[2], line + 1, excuse[1] if excuse else "")


def anchors(page: Path) -> set[str]:
    """Return what a link may name on a page: its headings, written as the site and the forge write them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#{1,6} +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_blocks_run(page: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every Python block of a page runs, in order, in one namespace."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, "python"):
        if not block.excuse:
            code = "\n" * (block.line - 1) + block.code  # so that an error names the line of the page
            exec(compile(code, str(page), "exec", dont_inherit=True), names)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_relative_links_lead_somewhere(page: Path) -> None:
    """A relative link names a file of the repository and, where it names a heading, one that is there."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if link.startswith(_OUTSIDE):
            continue
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}: there is no such file"
        assert target.is_relative_to(ROOT), f"{page.name}: {link}: leaves the repository"
        if heading and target.suffix == ".md":
            assert heading in anchors(target), f"{page.name}: {link}: there is no such heading"


def command_lines(page: Path) -> Iterator[list[str]]:
    """Yield the ``kimicore`` commands of a page's bash blocks, without what the shell does with them."""
    for block in blocks(page, "bash"):
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["kimicore"]:
                end = next((i for i, word in enumerate(words) if word in ("<", ">", "|", "&&", "2>")), len(words))
                yield words[1:end]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_command_lines_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ``kimicore`` command of a page is one that the real parser takes."""
    reached: list[str] = []
    for command in (
        cli.generate,
        cli.chat,
        cli.doctor,
        cli.simulate,
        cli.bench,
        cli.check_policy,
        cli.policies,
        cli.precision,
        cli.prune,
        cli.quantize,
        cli.verify,
        cli.warmup,
    ):
        # The parser is the real one; only what would follow it, a model's answer, is left out.
        monkeypatch.setattr(command, "run", lambda options: reached.append(options.command) or 0)
    for words in command_lines(page):
        before = len(reached)
        assert cli.main(words) == 0
        assert reached[before:] == words[:1]


def test_extras_exist() -> None:
    """Every extra that a page installs is one of the project's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = 0
    for page in PAGES:
        for names in re.findall(r"pip install '(?:\.|kimicore)\[([\w,]+)\]'", page.read_text(encoding="utf-8")):
            assert set(names.split(",")) <= set(project["optional-dependencies"]), f"{page.name}: {names}"
            found += 1
    assert found > 0


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("generate", "cli.md"),
        ("chat", "cli.md"),
        ("doctor", "cli.md"),
        ("quantize", "quantizing.md"),
        ("prune", "pruning.md"),
        ("verify", "verify.md"),
    ],
)
def test_a_command_s_page_names_every_option(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The page of a command names every option that its help lists."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"}
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert options <= set(re.findall(r"--[a-z][a-z-]*", page))


@pytest.mark.parametrize(
    ("page", "record", "optional"),
    [("settings.md", EngineConfig, False), ("sampling.md", SamplingParams, True)],
    ids=["settings", "sampling"],
)
def test_every_field_stands_on_its_page(page: str, record: type, optional: bool) -> None:
    """A page of fields has a row for each field of its record, with its default, and none for another."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z_0-9]+)` \| ([^|]+?) \|", text, re.MULTILINE))
    defaults = {one.name: one.default for one in fields(record)}
    assert rows.keys() == defaults.keys()
    for name, default in defaults.items():
        shown = rows[name].strip("`").replace('"', "'")
        assert shown == repr(default) or (optional and shown == "{}" and default == ()), f"{page}: {name}: {shown}"


def test_every_page_is_in_the_index() -> None:
    """Each page of the documentation is named in the index's table of contents."""
    listed: set[str] = set()
    for found in re.findall(r"^```\{toctree\}\n(.*?)^```", (ROOT / "docs" / "index.md").read_text(), re.M | re.S):
        listed.update(line for line in found.splitlines() if line and not line.startswith(":"))
    assert listed == {page.stem for page in PAGES if page.parent.name == "docs"} - {"index"}
