"""The table of public failures in docs/field-failures.md is true: what it names exists and cites its thread."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "field-failures.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| \[([^\]]+)\]\((https://github\.com/[^)]+)\) \| (.+) \|$", TABLE, re.MULTILINE)


@cache
def docstrings(path: Path) -> dict[str, str]:
    """Return the docstring of each test in a file."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = ast.get_docstring(node) or ""
    return found


def test_the_table_is_read() -> None:
    """Every line of the table that holds a thread is understood, and no thread stands twice."""
    assert len(ROWS) == TABLE.count("\n| [")
    assert len(ROWS) > 70
    assert len({thread for thread, _, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("thread", "address", "held_by"), ROWS, ids=[row[0] for row in ROWS])
def test_a_thread_is_held_by_tests_that_exist(thread: str, address: str, held_by: str) -> None:
    """A public failure is shown by tests that exist and cite it, or a reason says why it does not apply."""
    repository, number = thread.split("#")
    assert re.fullmatch(rf"https://github\.com/{re.escape(repository)}/(issues|pull)/{number}", address)
    tests = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", held_by)
    if not tests:
        assert held_by.startswith("does not apply")
        return
    assert len(tests) == held_by.count("`") // 2
    for path, name in tests:
        doc = docstrings(ROOT / path)[name]
        assert re.search(rf"(?<![\w-]){re.escape(repository.split('/')[1])}#{number}\b", doc), f"{name}: {doc}"
