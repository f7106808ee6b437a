"""The KV arena: classes over the same bytes, disjoint slabs, one contiguous run a block."""

from __future__ import annotations

import pytest
import torch

from kimicore.errors import ConfigError
from kimicore.kv.arena import Arena, slab_bytes
from kimicore.types import KVClass


def classes(padding: int = 0) -> tuple[KVClass, ...]:
    full = KVClass("full", (2, 5), None, "float32", (2, 2, 1, 16, 4), 2 * 2 * 16 * 4 * 4 + padding)
    window = KVClass("window-8", (0, 1, 3), 8, "float32", (3, 2, 1, 16, 4), 3 * 2 * 16 * 4 * 4 + 2 * padding)
    return full, window


@pytest.mark.parametrize("padding", [0, 64])
def test_slots_of_a_slab_are_its_bytes(padding: int) -> None:
    """Slot slab * blocks_per_slab + i of every class lies within that slab and beside no other slot of the class."""
    arena = Arena(classes(padding), 100_000)
    assert arena.slab_bytes == slab_bytes(classes(padding))
    assert arena.total_bytes <= 100_000 < arena.total_bytes + arena.slab_bytes
    for view, blocks in zip(arena.views, arena.blocks_per_slab, strict=True):
        assert len(view) == arena.slabs * blocks
        for slab in (1, arena.slabs - 1):
            arena.memory.zero_()
            view[slab * blocks : (slab + 1) * blocks] = 1.0
            touched = arena.memory.nonzero()
            assert slab * arena.slab_bytes <= int(touched.min())
            assert int(touched.max()) < (slab + 1) * arena.slab_bytes
            assert len(touched) == 2 * blocks * view[0].numel()  # 1.0 has two bytes that are not 0


def test_blocks_are_contiguous() -> None:
    """A block is one contiguous run of [L, 2, KH, block_tokens, D] in every class."""
    for view in Arena(classes(64), 100_000).views:
        assert view[3].is_contiguous()
        assert view.shape[2:] == (2, 1, 16, 4)


def test_too_small_an_arena() -> None:
    """An arena without a slab beside slab 0 is refused with the bytes that it would need."""
    needed = 2 * slab_bytes(classes())
    with pytest.raises(ConfigError, match=f"kv_device_bytes={needed - 1}: .*at least {needed} bytes"):
        Arena(classes(), needed - 1)
    assert Arena(classes(), needed).slabs == 2


def test_an_unused_arena_costs_no_memory() -> None:
    """Memory of an arena is touched when it is written, not when it is made."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    before = resident()
    arena = Arena(classes(), 1 << 30)
    assert resident() - before < 64 << 20
    assert arena.memory.dtype == torch.uint8
