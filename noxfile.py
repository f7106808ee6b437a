"""The repository's chores, each in a fresh environment: ``pip install nox``, then ``nox -s NAME`` (``nox -l``: all)."""

from __future__ import annotations

import re
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "typing", "tests"]

ROOT = Path(__file__).parent
PAGES = ("README.md", "docs/*.md", "docs/**/*.md")

# Runs where no source tree is in sight, so that it is the wheel that answers.
SMOKE = """
import sys
import kimicore
assert "torch" not in sys.modules, "importing the package has loaded torch"
folder = __import__("pathlib").Path(kimicore.__file__).parent
assert "site-packages" in str(folder), folder
missing = [name for name in {sources!r} if not (folder / name).is_file()]
assert not missing, f"not in the wheel: {{missing}}"
with kimicore.SyncEngine("smollm2-135m-instruct") as engine:
    result = engine.generate("One, two, three,", max_tokens=8, temperature=0.0)
assert result.usage.completion_tokens == 8, result
print(repr(result.text))
"""

# One page is one program: what a block defines, later blocks may use.
RUN_BLOCKS = """
names = {{"__name__": "__main__"}}
for block in {blocks!r}:
    exec(compile(block, {page!r}, "exec"), names)
"""


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting; ``nox -s lint -- --fix`` mends what can be mended."""
    session.install("ruff>=0.15")
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session
def typing(session: nox.Session) -> None:
    """Check the package's types, strictly."""
    session.install(".[lint]")
    session.run("mypy", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests as the README does; arguments go to pytest."""
    session.install(".[test]")
    session.run("pytest", "-q", *session.posargs)


DEEP = ("tests/decide", "tests/kit", "tests/kv", "tests/sampling", "tests/text")


@nox.session
def machines(session: nox.Session) -> None:
    """Run property tests and state machines deeply, then the long forms (stress, whole corpora)."""
    session.install(".[test]")
    deep = {"KIMICORE_HYPOTHESIS": "deep"}
    session.run("pytest", "-q", *DEEP, *session.posargs, env=deep)
    session.run("pytest", "-q", "-s", "-m", "long", "--timeout=0", *session.posargs, env=deep)


@nox.session
def kernels(session: nox.Session) -> None:
    """Test the operations with the system's compiler, and once more as on a machine that has none."""
    session.install(".[test]")
    folders = ("tests/kernels", "tests/sampling")
    session.run("pytest", "-q", *folders, *session.posargs)
    without = {"CXX": "no-compiler-here", "KIMICORE_CACHE": str(Path(session.create_tmp()) / "cache")}
    session.run("pytest", "-q", *folders, *session.posargs, env=without)


def python_blocks(page: Path) -> list[str]:
    """The page's ```python blocks, each at its own line, so that an error names the line of the page."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation, where a warning is an error, and run every Python block of it and of the README."""
    session.install(".[docs,trio]")
    session.run("sphinx-build", "-W", "--keep-going", "-n", "-b", "html", "docs", "docs/_build/html")
    pages = sorted({page for pattern in PAGES for page in ROOT.glob(pattern) if "_build" not in page.parts})
    folder = Path(session.create_tmp())
    for page in pages:
        blocks = python_blocks(page)
        if blocks:
            (folder / "page.py").write_text(RUN_BLOCKS.format(blocks=blocks, page=str(page)), encoding="utf-8")
            session.log(f"{page.relative_to(ROOT)}: {len(blocks)} blocks")
            with session.chdir(folder):
                session.run("python", "page.py")


@nox.session
def plugins(session: nox.Session) -> None:
    """Install the example plugin for real, run its tests and the kit, and see that choosing it changes the engine."""
    example = ROOT / "examples" / "kimicore-example-policies"
    session.install(".[testing]")
    session.install(f"{example}[test]")
    listed = str(session.run("kimicore", "policies", silent=True))
    missing = [name for name in ("tenant-turns", "deepest-first") if name not in listed]
    if missing:
        session.error(f"installed and not listed: {', '.join(missing)}\n{listed}")
    with session.chdir(session.create_tmp()):  # where no source tree is in sight
        session.run("pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", str(example / "tests"), *session.posargs)
        session.run("kimicore", "check-policy", "batching", "tenant-turns", "--set", "in_a_row=2")
        session.run("kimicore", "check-policy", "deepest-first")
        session.run("python", str(example / "demo.py"))


@nox.session
def package(session: nox.Session) -> None:
    """Build the wheel, install it in a clean environment without the source tree, and let it answer a prompt."""
    folder = Path(session.create_tmp()).resolve()
    for old in folder.glob("*.whl"):
        old.unlink()
    session.run("python", "-m", "pip", "wheel", "--no-deps", "-w", str(folder), ".")
    (wheel,) = folder.glob("*.whl")
    session.install(str(wheel))
    package_root = ROOT / "src" / "kimicore"
    carried = (".cpp", ".h", ".md", ".txt")  # kernels; the texts that quantizing calibrates on and verify judges by
    sources = [str(path.relative_to(package_root)) for path in package_root.rglob("*") if path.suffix in carried]
    if not all(any(name.startswith(f"{part}/texts/") for name in sources) for part in ("quantize", "verify")):
        session.error("no texts in quantize/texts or in verify/texts of src/kimicore: the wheel would be without them")
    with session.chdir(folder):
        session.run("python", "-c", SMOKE.format(sources=["py.typed", *sorted(sources)]))
        session.run("kimicore", "doctor")


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmark; arguments go to it."""
    session.install(".[test]")
    session.run("python", "benchmarks/engine.py", *session.posargs)
