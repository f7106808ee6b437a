"""KV memory of the host: blocks that left the device, cut as the device's arena is."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kimicore.types import KVClass

__all__ = ["HostArena"]


class HostArena:
    """``total_bytes`` of host memory in whole slabs; pages are taken when they are first written.

    Pinned where the device is a CUDA one, so that copies can run beside kernels. Elsewhere the system is asked for huge
    pages (``huge``: whether it was), which a long copy needs fewer translations for.
    """

    def __init__(self, classes: Sequence[KVClass], slab_bytes: int, slabs: int, *, pinned: bool = False) -> None:
        self.classes = tuple(classes)
        self.slab_bytes, self.slabs = slab_bytes, slabs
        self.total_bytes = slab_bytes * slabs
        self.huge = False
        if pinned:
            self.memory: NDArray[np.uint8] = torch.empty(self.total_bytes, dtype=torch.uint8, pin_memory=True).numpy()
            return
        pages = mmap.mmap(-1, self.total_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        advice = getattr(mmap, "MADV_HUGEPAGE", None)
        if advice is not None:
            try:
                pages.madvise(advice)
                self.huge = True
            except OSError:  # a kernel without them
                pass
        self.memory = np.frombuffer(pages, dtype=np.uint8)
