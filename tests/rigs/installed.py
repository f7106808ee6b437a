"""A package of policies, laid out as pip would."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest


def distribution(folder: Path, name: str, entry_points: str) -> None:
    """Lay out an installed distribution with these entry points."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def bad_policies(folder: Path, patch: pytest.MonkeyPatch, module: str, source: str, kinds: Iterable[str]) -> None:
    """Put a package on the path that has a policy ``bad-KIND`` for each kind, which ``source`` calls ``Kind``."""
    (folder / f"{module}.py").write_text(source)
    lines = [f"[kimicore.{kind}]\nbad-{kind} = {module}:{kind.title()}" for kind in kinds]
    distribution(folder, "bad_policies", "\n".join(lines))
    patch.setattr(sys, "path", [*sys.path, str(folder)])
    patch.delitem(sys.modules, module, raising=False)
