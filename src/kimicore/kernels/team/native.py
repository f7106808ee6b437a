"""The entry that native kernels are handed to share their work among threads."""

from __future__ import annotations

import ctypes
from pathlib import Path

from kimicore.kernels.build import load_library

__all__ = ["parallel_entry"]


def parallel_entry() -> int | None:
    """Return the address of ``void entry(void (*fn)(void *), void *data, unsigned threads)``, or None.

    It calls ``fn(data)`` on the calling thread and on ``threads - 1`` others at once, and returns when all have done;
    where the process gets no more threads, on fewer. Each calling thread has helpers of its own, which look out for
    work for 200 microseconds after a call, then sleep, and end with it.
    """
    library = load_library(Path(__file__).with_name("team.cpp"))
    if library.handle is None:
        return None
    return ctypes.cast(library.handle.kimicore_team, ctypes.c_void_p).value
