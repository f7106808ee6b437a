"""Stores of small segments, and a check of the limit around each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kimicore.kv.disk import DiskStore

from .rig import LIMIT, folder_bytes, opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is not there yet."""
    return tmp_path / "tier"


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., DiskStore]]:
    """Open the folder's store, closing the one before; at the end the limit must have been kept."""
    made: list[DiskStore] = []
    limits = [LIMIT]

    def run(limit: int = LIMIT, **settings: Any) -> DiskStore:
        if made:
            made[-1].close()
        limits.append(limit)
        made.append(opened(folder, limit, **settings))
        return made[-1]

    yield run
    if folder.is_dir():
        assert folder_bytes(folder) <= limits[-1]
    if made:
        made[-1].close()
