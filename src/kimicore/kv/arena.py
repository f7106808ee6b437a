"""The device's KV memory: one allocation, cut into equal slabs that the KV classes share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kimicore.errors import ConfigError
from kimicore.kernels.kv_quantize.layout import packed_layer_bytes
from kimicore.types import KVClass

__all__ = ["Arena", "slab_bytes"]

PACKED_BITS = {"int8": 8, "int4": 4}


def slab_bytes(classes: Sequence[KVClass]) -> int:
    """Return the size in bytes of a slab: the least that holds a whole number of blocks of every class."""
    return math.lcm(*(c.block_bytes for c in classes))


class Arena:
    """KV memory of one device, seen as blocks of every class over the same bytes.

    ``views[c]`` is ``[S, L, 2, KH, block_tokens, D]``: slot-major, so that a block is one contiguous run. A slab
    belongs to one class at a time (the ledger says which); slot ``slab * blocks_per_slab[c] + i`` of class ``c`` is
    block ``i`` of that slab. Slab 0 is never given out: its slots take what padding writes. Pages are touched
    when they are first written, so an unused arena costs address space alone. A quantized class's view is
    ``[S, L, bytes of a layer]`` uint8 (see :mod:`kimicore.kernels.kv_quantize.layout`). ``summaries[c]``:
    ``[S, L, KH, 2, D]``, behind the keys and values of a class that has them, else None.

    Raises :class:`~kimicore.ConfigError` where ``total_bytes`` holds no slab beside slab 0.
    """

    def __init__(self, classes: Sequence[KVClass], total_bytes: int, device: str | torch.device = "cpu") -> None:
        self.classes = tuple(classes)
        self.slab_bytes = slab_bytes(classes)
        self.slabs = total_bytes // self.slab_bytes
        if self.slabs < 2:
            raise ConfigError(
                f"kv_device_bytes={total_bytes}: this model needs at least {2 * self.slab_bytes} bytes "
                f"(two slabs of {self.slab_bytes})"
            )
        self.total_bytes = self.slabs * self.slab_bytes
        self.blocks_per_slab = tuple(self.slab_bytes // c.block_bytes for c in self.classes)
        self.memory = torch.empty(self.total_bytes, dtype=torch.uint8, device=device)
        self.views = tuple(self._view(c) for c in self.classes)
        self.summaries = tuple(self._summary(c) if c.summaries else None for c in self.classes)

    def _view(self, kv_class: KVClass) -> Tensor:
        count = self.total_bytes // kv_class.block_bytes
        if kv_class.dtype in PACKED_BITS:
            layers, _, kv_heads, block_tokens, dim = kv_class.shape
            layer_bytes = packed_layer_bytes(kv_heads, block_tokens, dim, PACKED_BITS[kv_class.dtype])
            return self.memory.as_strided((count, layers, layer_bytes), (kv_class.block_bytes, layer_bytes, 1))
        items = self.memory.view(getattr(torch, kv_class.dtype))
        stride = kv_class.block_bytes // items.element_size()
        inner = [math.prod(kv_class.shape[i + 1 :]) for i in range(len(kv_class.shape))]
        return items.as_strided((count, *kv_class.shape), (stride, *inner))

    def _summary(self, kv_class: KVClass) -> Tensor:
        items = self.memory.view(getattr(torch, kv_class.dtype))
        layers, _, kv_heads, _, dim = kv_class.shape
        head = 2 * dim
        strides = (kv_class.block_bytes // items.element_size(), kv_heads * head, head, dim, 1)
        count = self.total_bytes // kv_class.block_bytes
        return items.as_strided((count, layers, kv_heads, 2, dim), strides, math.prod(kv_class.shape))
