"""The architecture, held by reading the imports: floors, two towers, a light package, no hidden state, small files."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"

# A module belongs to the longest prefix that is named here: (floor, tower).
PLACES = {
    "kimicore": (5, "shell"),
    **dict.fromkeys(
        [
            f"kimicore.{name}"
            for name in (
                "block_records", "checks", "clock", "config", "errors", "guard", "memory", "moves", "records",
                "sampling_params", "types",
            )
        ],
        (0, "records"),
    ),
    **dict.fromkeys(["kimicore.contracts", "kimicore.plugins", "kimicore.policies"], (1, "policies")),
    **dict.fromkeys(
        [
            f"kimicore.{name}"
            for name in (
                "admission", "asking", "below", "blocks", "book", "cost", "importance", "leap", "ledger", "loading",
                "plan", "prefix", "rates", "requests", "room", "roster", "shelf", "sinking", "slabs", "steps", "tiers",
            )
        ],
        (2, "decide"),
    ),
    "kimicore.text": (2, "text"),
    "kimicore.kernels": (2, "device"),
    **dict.fromkeys(["kimicore.model", "kimicore.kv"], (3, "device")),
    **dict.fromkeys(["kimicore.mover", "kimicore.runner"], (4, "device")),
    # The loop fills handles and wakes their readers, so they stand on its floor, below the faces.
    **dict.fromkeys([f"kimicore.{name}" for name in ("block_moves", "handle", "intake", "loop", "wake")], (4, "loop")),
    **dict.fromkeys(
        [
            f"kimicore.{name}"
            for name in (
                "assembly", "engine", "face", "saved_turns", "session", "sync", "sync_session", "tiering", "turns",
            )
        ],
        (5, "shell"),
    ),
    **dict.fromkeys([f"kimicore.{name}" for name in ("asgi", "cli", "integrations", "report", "sim")], (6, "top")),
    **dict.fromkeys(["kimicore.pruning", "kimicore.quantize", "kimicore.verify"], (6, "top")),
    "kimicore.testing": (6, "top"),
}  # fmt: skip

# What each tower may import from outside, besides the standard library and attrs.
OUTSIDE = {
    "records": set(),
    "policies": {"entrypoints", "numpy"},
    "decide": {"numpy"},
    "text": {"tokenizers", "jinja2"},
    "device": {"torch", "numpy", "triton", "zstandard", "xxhash", "huggingface_hub"},
    "loop": {"anyio", "trio"},
    "shell": {"anyio", "trio", "torch"},
    "top": {"anyio", "trio", "torch", "numpy", "hypothesis", "kimicore"},
}
EVENT_LOOPS = {"anyio", "asyncio", "trio", "sniffio"}
AWAITS = ("kimicore.wake", "kimicore.engine", "kimicore.session", "kimicore.asgi", "kimicore.cli")

MAKES_STATE = {
    "Condition", "ContextVar", "Counter", "Event", "OrderedDict", "Queue", "RLock", "Random", "Semaphore",
    "SimpleQueue", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "bytearray", "count", "cycle", "default_rng",
    "defaultdict", "deque", "local",
}  # fmt: skip
CHANGES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault",
    "update",
}  # fmt: skip
# A compiled library is loaded into the process once whatever asks for it, so its cache is the process's.
PROCESS_WIDE = {"kimicore.kernels.build"}

MOST_LINES, MOST_FUNCTION_LINES = 400, 60


class Import(NamedTuple):
    """One imported module or name, and whether it is imported for annotations alone."""

    module: str
    name: str | None
    typing_only: bool


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(path): ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}


def imports_of(tree: ast.AST, typing_only: bool = False) -> Iterator[Import]:
    """All imports, those inside functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the floor"
            yield from (Import(node.module or "", alias.name, typing_only) for alias in node.names)
        else:
            guard = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            yield from imports_of(node, typing_only or guard)


def own_imports(module: str) -> Iterator[tuple[str, str | None]]:
    """The modules of the package that ``module`` imports, each with the name that is taken from it."""
    for module_name, name, _ in imports_of(TREES[module]):
        if module_name.split(".")[0] != "kimicore":
            continue
        whole = f"{module_name}.{name}"
        yield (whole, None) if whole in TREES else (module_name, name)


def place(module: str) -> tuple[int, str]:
    parts = module.split(".")
    while ".".join(parts) not in PLACES:
        parts.pop()
    return PLACES[".".join(parts)]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def bad(check: Callable[[str], object]) -> dict[str, object]:
    """What ``check`` finds, by module; empty where the rule holds."""
    return {module: found for module in TREES if (found := check(module))}


def upward_imports(module: str) -> list[str]:
    if module == "kimicore":
        return []  # offers what stands on every floor, and imports it on first use: see the test of its weight
    return [target for target, _ in own_imports(module) if place(target)[0] > place(module)[0]]


def tower_crossings(module: str) -> list[str]:
    tower = place(module)[1]
    if tower in ("shell", "top"):
        return []
    below = {"loop": {"text", "decide"}, "device": {"text"}}.get(tower, set())
    return [
        target for target, _ in own_imports(module) if place(target)[1] not in below | {tower, "records", "policies"}
    ]


def strangers(module: str) -> set[str]:
    found = {one.module.split(".")[0] for one in imports_of(TREES[module])} - set(sys.stdlib_module_names)
    return found - OUTSIDE[place(module)[1]] - {"attrs", "kimicore"}


def awaiting(module: str) -> list[str]:
    if module.startswith(AWAITS):
        return []
    loops = {one.module.split(".")[0] for one in imports_of(TREES[module])} & EVENT_LOOPS
    kinds = (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)
    return [*loops, *(ast.unparse(node)[:60] for node in ast.walk(TREES[module]) if isinstance(node, kinds))]


def test_every_module_has_its_place() -> None:
    """Each module is put on a floor and in a tower by name: a new one has to be placed."""
    assert [
        name for name in TREES if name != "kimicore" and place(name) == PLACES["kimicore"] and name not in PLACES
    ] == []


def test_imports_go_down() -> None:
    """A module imports from its own floor or from below, for annotations as well."""
    assert bad(upward_imports) == {}


def test_the_towers_never_meet() -> None:
    """Decisions, device and text know only themselves and the records and policies that all share."""
    assert bad(tower_crossings) == {}


def test_outside_packages_stay_in_their_tower() -> None:
    """torch is imported by the device tower and what assembles it, a tokenizer by the text; decisions need neither."""
    assert bad(strangers) == {}


def test_only_the_shell_awaits() -> None:
    """Event loops and coroutines appear in the shell, in asgi and on the command line, and nowhere else."""
    assert bad(awaiting) == {}


def loaded_by(statement: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after ``statement``, besides the standard library."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.split(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names)


def test_importing_the_package_is_light() -> None:
    """``import kimicore`` loads nothing from outside but attrs: no torch, no numpy, no extra."""
    assert loaded_by("import kimicore") == {"attr", "attrs", "kimicore"}


def test_decisions_and_text_run_without_torch() -> None:
    """The decide tower, the policies and the text can be used where torch is never loaded."""
    light = [name for name in TREES if place(name)[1] in ("records", "policies", "decide", "text")]
    assert "torch" not in loaded_by(f"import {', '.join(light)}")


def module_names(tree: ast.Module) -> set[str]:
    """Names that are assigned at module level."""
    targets: list[ast.expr] = []
    for node in tree.body:
        targets += node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []
    return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}


def changed_in_place(function: ast.AST) -> Iterator[str]:
    """Names whose items, attributes or contents ``function`` changes."""
    for node in ast.walk(function):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            target: ast.expr = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            target = node.func.value
        else:
            continue
        if isinstance(target, ast.Name):
            yield target.id


def module_state(module: str) -> list[str]:
    tree = TREES[module]
    found = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Global)]
    if module in PROCESS_WIDE:
        return found
    apart = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for statement in [node for node in tree.body if not isinstance(node, apart)]:
        calls = [ast.unparse(node.func).split(".")[-1] for node in ast.walk(statement) if isinstance(node, ast.Call)]
        found += [name for name in calls if name in MAKES_STATE]
    names = module_names(tree)
    for function in functions(tree):
        found += [name for name in changed_in_place(function) if name in names]
        found += [text for one in function.decorator_list if "cache" in (text := ast.unparse(one))]
    return [one for one in found if "cached_property" not in one]


def test_no_module_holds_state() -> None:
    """Nothing at module level can change after the import, so that two engines in one process share nothing."""
    assert bad(module_state) == {}


def unoffered(module: str) -> list[str]:
    """What ``module`` takes from other modules although their ``__all__`` does not offer it."""
    return [
        f"{target}.{name}"
        for target, name in own_imports(module)
        if name is not None and name not in getattr(importlib.import_module(target), "__all__", ())
    ]


def false_offers(module: str) -> list[str]:
    loaded = importlib.import_module(module)
    offered = getattr(loaded, "__all__", [])
    public = [node for node in TREES[module].body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    if not offered and any(not node.name.startswith("_") for node in public):
        return ["no __all__"]
    return [name for name in offered if not hasattr(loaded, name) or offered.count(name) > 1]


def test_what_a_module_offers_is_what_is_taken() -> None:
    """``__all__`` names things that exist, without repeats, and other modules take nothing else."""
    assert bad(false_offers) == {}
    assert bad(unoffered) == {}


def test_files_and_functions_can_be_read_at_one_sitting() -> None:
    """No file of the package or its tests is over 400 lines, no function of the package over 60."""
    files = [*SOURCE.rglob("*.py"), *SOURCE.rglob("*.cpp"), *(ROOT / "tests").rglob("*.py")]
    long = [str(path.relative_to(ROOT)) for path in files if len(path.read_text().splitlines()) > MOST_LINES]
    assert long == []
    spans = {
        (name, one.name): (one.end_lineno or 0) - one.lineno + 1 for name in TREES for one in functions(TREES[name])
    }
    assert {name: lines for name, lines in spans.items() if lines > MOST_FUNCTION_LINES} == {}


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("_SEEN = set()\ndef f(x):\n    _SEEN.add(x)\n", "_SEEN"),
        ("TABLE = {}\ndef f(x):\n    TABLE[x] = 1\n", "TABLE"),
        ("_LAST = None\ndef f(x):\n    global _LAST\n    _LAST = x\n", "global _LAST"),
        ("from itertools import count\n_NUMBERS = count()\n", "count"),
        ("import functools\n@functools.cache\ndef f(x):\n    return x\n", "functools.cache"),
    ],
)
def test_planted_state_is_found(planted: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule against module state sees the usual ways of having some."""
    monkeypatch.setitem(TREES, "kimicore.planted", ast.parse(planted))
    assert module_state("kimicore.planted") == [found]


@pytest.mark.parametrize(
    ("check", "module", "planted", "found"),
    [
        (strangers, "kimicore.book", "import torch", "torch"),
        (tower_crossings, "kimicore.plan", "def f():\n    from kimicore.model.spec import ModelSpec", "model.spec"),
        (tower_crossings, "kimicore.kernels.linear", "import kimicore.ledger", "ledger"),
        (upward_imports, "kimicore.types", "from kimicore.contracts import RowView", "contracts"),
        (awaiting, "kimicore.runner", "async def f(): ...", "async def f"),
        (awaiting, "kimicore.loop", "import asyncio", "asyncio"),
        (unoffered, "kimicore.plan", "from kimicore.book import _hidden", "book._hidden"),
    ],
)
def test_planted_imports_are_found(
    check: Callable[[str], object], module: str, planted: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that breaks a rule is found where it is planted."""
    monkeypatch.setitem(TREES, module, ast.parse(planted))
    assert found in str(check(module))
