"""The kinds of KV blocks that a model has: by window, and by precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from attrs import evolve

from kimicore.errors import ModelLoadError
from kimicore.kernels.kv_quantize.layout import packed_layer_bytes
from kimicore.model.spec import ModelSpec
from kimicore.types import KVClass, KVPrecision

__all__ = ["BITS", "kv_classes", "kv_places"]

BITS: Final[dict[KVPrecision, int]] = {"int8": 8, "int4": 4}

_ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_MAX_SLAB_BYTES: Final = 64 << 20
_ALIGN_BYTES: Final = 64
_SPARED: Final = 0.01  # of all blocks together, which larger slabs would have to save: a class in use holds whole ones


def _windows(spec: ModelSpec) -> list[int | None]:
    """Return the distinct windows in class order: full attention first, then windows by length."""
    found = {layer.window for layer in spec.layers}
    full: list[int | None] = [None] if None in found else []
    return full + sorted(window for window in found if window is not None)


def kv_places(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return for each layer its KV class (of full precision) and its place among that class's layers."""
    windows = _windows(spec)
    counts = [0] * len(windows)
    places = []
    for layer in spec.layers:
        index = windows.index(layer.window)
        places.append((index, counts[index]))
        counts[index] += 1
    return tuple(places)


def kv_classes(
    spec: ModelSpec,
    dtype_name: str,
    block_tokens: int,
    precisions: Sequence[KVPrecision] = ("full",),
    *,
    summaries: bool = False,
) -> tuple[KVClass, ...]:
    """Return the model's kinds of KV blocks: full-attention layers share one, each window has its own.

    Those of full precision come first, in the order of :func:`kv_places`; then for each other one of ``precisions``
    those of whole blocks, and those that are being filled. ``summaries``: full-attention blocks of full precision
    have a summary of their keys behind them.

    ``block_bytes`` is the distance between two blocks: a block's size, with padding where the classes' least common
    multiple would otherwise be over 64 MiB (see :func:`kimicore.kv.arena.slab_bytes`).
    """
    if dtype_name not in _ITEM_BYTES:
        raise ModelLoadError(f"dtype={dtype_name!r}: a KV cache is one of {', '.join(_ITEM_BYTES)}")
    places = kv_places(spec)
    full: list[KVClass] = []
    for index, window in enumerate(_windows(spec)):
        layers = tuple(i for i, (owner, _) in enumerate(places) if owner == index)
        shape = (len(layers), 2, spec.kv_heads, block_tokens, spec.head_dim)
        name = "full" if window is None else f"window-{window}"
        more = 1 + 1 / block_tokens if summaries and window is None else 1
        size = round(math.prod(shape) * more) * _ITEM_BYTES[dtype_name]
        full.append(KVClass(name, layers, window, dtype_name, shape, size, summaries=more > 1))
    classes = list(full)
    for precision in precisions:
        if precision != "full":
            classes += _quantized(full, precision)
    sizes = [one.block_bytes for one in classes]
    strides = _strides(sizes, _MAX_SLAB_BYTES if len(classes) == len(full) else 0)
    return tuple(
        evolve(c, block_bytes=stride, content_bytes=c.block_bytes) for c, stride in zip(classes, strides, strict=True)
    )


def _quantized(full: Sequence[KVClass], precision: KVPrecision) -> list[KVClass]:
    """Return the classes of another precision: of whole blocks, and of those that are being filled."""
    mains = []
    for one in full:
        layers, _, kv_heads, block_tokens, dim = one.shape
        if dim * BITS[precision] % 8:
            raise ModelLoadError(f"head_dim={dim}: KV of {precision} needs an even head dimension")
        size = layers * packed_layer_bytes(kv_heads, block_tokens, dim, BITS[precision])
        name = f"{one.name}-{precision}"
        mains.append(evolve(one, name=name, dtype=precision, block_bytes=size, precision=precision, summaries=False))
    tails = [evolve(one, name=f"{one.name}-{precision}-tail", window=1, precision=precision, tail=True) for one in full]
    return [*mains, *tails]


def _strides(sizes: list[int], exact_bytes: int) -> list[int]:
    """Return each class's distance between blocks, padded where their least common multiple is over ``exact_bytes``.

    Equal sizes stay equal.
    """
    if math.lcm(*sizes) <= exact_bytes or len(sizes) == 1:
        return sizes
    found: list[tuple[float, list[int]]] = []
    for largest_per_slab in range(1, 17):
        room = largest_per_slab * max(sizes)
        counts = [room // block for block in sizes]
        unit = math.lcm(*counts) * _ALIGN_BYTES
        slab = -(-room // unit) * unit
        strides = [slab // count for count in counts]
        waste = sum(stride / block for stride, block in zip(strides, sizes, strict=True))
        fits = slab <= _MAX_SLAB_BYTES or largest_per_slab == 1
        if fits:
            found.append((waste, strides))
    least = min(waste for waste, _ in found)
    return next(strides for waste, strides in found if waste <= (1 + _SPARED) * least)
