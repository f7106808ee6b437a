"""How much memory this process may still use."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

__all__ = ["available_bytes", "give_back", "huge_pages"]

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes that can be allocated without swapping: the system's, or the container's where that is less."""
    system = _meminfo(meminfo)
    limits = [
        (cgroup / "memory.max", cgroup / "memory.current"),
        (cgroup / "memory/memory.limit_in_bytes", cgroup / "memory/memory.usage_in_bytes"),
    ]
    for limit, used in limits:
        most, now = _number(limit), _number(used)
        if most is not None and now is not None:
            return max(0, min(system, most - now))
    return system


def huge_pages(setting: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> str:
    """Return whether the KV cache in host memory gets huge pages when it asks for them, in words."""
    try:
        words = setting.read_text().split()
    except (OSError, UnicodeDecodeError):
        return "not here: the system has none"
    chosen = next((one.strip("[]") for one in words if one.startswith("[")), "unknown")
    return f"{'off' if chosen == 'never' else 'on'} for the KV cache in host memory (the system's setting: {chosen})"


def give_back() -> None:
    """Ask the C library to give memory that has been freed back to the system; where it cannot (no glibc), do nothing.

    Loading a model frees tens of megabytes in pieces, which glibc would keep.
    """
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _meminfo(path: Path) -> int:
    try:
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 4 << 30


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None
