"""Packed weights as processors with dot products of bytes read them: 16 outputs side by side.

A *tile* is 16 outputs. Its codes lie in steps of 8 columns: 64 bytes, four for each output, whose low halves are
columns 0 to 3 and whose high halves are columns 4 to 7; with 5 bits then 16 bytes, bit ``4 * output + column`` of the
first (of the second) 8 of them being the highest bit of columns 0 to 3 (4 to 7); with 6 bits 16 bytes more; with 8 bits
there are 64 bytes of columns 0 to 3, and then those of columns 4 to 7. So a vector register holds the same columns of
all outputs, each output sums in a lane of its own, and a scale is a lane of the vector of scales. Outputs and columns
behind the last are 0.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import Final

import torch
from attrs import field, frozen
from torch import Tensor

from kimicore.kernels.packed_linear.layout import CHUNK, PackedWeight, pack_codes, unpack_codes
from kimicore.kernels.packed_linear.layout import described_values as values

__all__ = ["TILE", "TiledWeight", "tiled", "untiled"]

TILE: Final = 16
STEP: Final = 8
_DESCRIBED: Final = struct.Struct("4P3q2P3q6q")  # struct Tiled of tiles.h


@frozen(eq=False)
class TiledWeight:
    """A weight [outs, depth] in tiles: the fields of a :class:`PackedWeight`, whose meaning it has.

    ``codes``: [tiles, bytes] uint8. ``scales``, ``zeros``, ``offsets`` [tiles, G, 16], ``super_scales`` and
    ``super_offsets`` [tiles, S, 16]. ``block``: columns whose inputs have one scale where they are rounded to 16 bits,
    a part of a group.
    """

    outs: int
    depth: int
    bits: int
    group: int
    block: int
    codes: Tensor = field(repr=False)
    scales: Tensor = field(repr=False)
    zero: int = 0
    zeros: Tensor | None = field(default=None, repr=False)
    offsets: Tensor | None = field(default=None, repr=False)
    super_scales: Tensor | None = field(default=None, repr=False)
    super_offsets: Tensor | None = field(default=None, repr=False)
    order: Tensor | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(outs, depth)."""
        return self.outs, self.depth

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All parts."""
        parts = (self.codes, self.scales, self.zeros, self.offsets, self.super_scales, self.super_offsets, self.order)
        return tuple([one for one in parts if one is not None])

    @property
    def weight_bytes(self) -> int:
        """The memory that it takes."""
        return sum([one.numel() * one.element_size() for one in self.tensors])

    @cached_property
    def described(self) -> bytes:
        """Addresses and sizes, as the native kernels take them."""
        zeros = 0 if self.zeros is None else self.zeros.data_ptr()
        sizes = (self.outs, self.depth, self.bits, self.group, self.zero, self.block)
        scales, offsets = values(self.scales, self.super_scales), values(self.offsets, self.super_offsets)
        return _DESCRIBED.pack(self.codes.data_ptr(), zeros, *scales, *offsets, *sizes)


def block_columns(group: int, depth: int) -> int:
    """Return how many columns of a group of so many have one scale of their inputs: 128 at most, a multiple of 8."""
    if group <= 128 and group % STEP == 0:
        return group
    if group == depth:
        return 128
    return next(size for size in (128, 64, 32, 16) if group % size == 0)


def _tiles(values: Tensor | None) -> Tensor | None:
    """Return [O, n] as [tiles, n, 16], padded with zeros."""
    if values is None:
        return None
    outs, count = values.shape
    padded = torch.zeros((-(-outs // TILE) * TILE, count), dtype=values.dtype)
    padded[:outs] = values
    return padded.view(-1, TILE, count).transpose(1, 2).contiguous()


def _rows(values: Tensor | None, outs: int) -> Tensor | None:
    """Return [tiles, n, 16] as [outs, n]."""
    return None if values is None else values.transpose(1, 2).reshape(-1, values.shape[1])[:outs].contiguous()


def _bit_bytes(ones: Tensor) -> Tensor:
    """Return [..., 8 n] of 0 and 1 as [..., n] bytes, lowest bit first."""
    weights = torch.tensor([1 << at for at in range(8)], dtype=torch.uint8)
    return (ones.reshape(*ones.shape[:-1], -1, 8) * weights).sum(dim=-1, dtype=torch.uint8)


def _tiled_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes [O, C] uint8 in tiles."""
    outs, depth = codes.shape
    tiles, steps = -(-outs // TILE), -(-depth // CHUNK) * (CHUNK // STEP)
    whole = torch.zeros((tiles * TILE, steps * STEP), dtype=torch.uint8)
    whole[:outs, :depth] = codes
    # [tiles, steps, half of the step, output, column]
    whole = whole.view(tiles, TILE, steps, 2, 4).permute(0, 2, 3, 1, 4).reshape(tiles, steps, 2, TILE * 4)
    if bits == 8:
        return whole.reshape(tiles, -1)
    parts = [(whole[:, :, 0] & 15) | (whole[:, :, 1] << 4)]
    parts += [_bit_bytes(whole >> bit & 1).flatten(2) for bit in range(4, bits)]
    return torch.cat(parts, dim=2).reshape(tiles, -1)


def _untiled_codes(codes: Tensor, outs: int, depth: int, bits: int) -> Tensor:
    """Return the codes [outs, depth] of what :func:`_tiled_codes` made."""
    tiles, steps = codes.shape[0], -(-depth // CHUNK) * (CHUNK // STEP)
    step = codes.view(tiles, steps, -1)
    if bits == 8:
        whole = step.view(tiles, steps, 2, TILE * 4)
    else:
        low = step[:, :, :64]
        whole = torch.stack((low & 15, low >> 4), dim=2)
        for at, bit in enumerate(range(4, bits)):
            plane = step[:, :, 64 + 16 * at : 80 + 16 * at].reshape(tiles, steps, 2, 8, 1)
            whole |= (plane >> torch.arange(8, dtype=torch.uint8) & 1).reshape(tiles, steps, 2, 64) << bit
    rows = whole.view(tiles, steps, 2, TILE, 4).permute(0, 3, 1, 2, 4).reshape(tiles * TILE, steps * STEP)
    return rows[:outs, :depth].contiguous()


def tiled(weight: PackedWeight) -> TiledWeight:
    """Return the weight in tiles."""
    codes = _tiled_codes(unpack_codes(weight.codes, weight.depth, weight.bits), weight.bits)
    scales = _tiles(weight.scales)
    assert scales is not None
    return TiledWeight(
        weight.outs, weight.depth, weight.bits, weight.group, block_columns(weight.group, weight.depth), codes, scales,
        weight.zero, _tiles(weight.zeros), _tiles(weight.offsets), _tiles(weight.super_scales),
        _tiles(weight.super_offsets), weight.order,
    )  # fmt: skip


def untiled(weight: TiledWeight) -> PackedWeight:
    """Return the weight row by row, as it was before :func:`tiled`."""
    outs = weight.outs
    codes = pack_codes(_untiled_codes(weight.codes, outs, weight.depth, weight.bits), weight.bits)
    scales = _rows(weight.scales, outs)
    assert scales is not None
    return PackedWeight(
        outs, weight.depth, weight.bits, weight.group, codes, scales, weight.zero, _rows(weight.zeros, outs),
        _rows(weight.offsets, outs), _rows(weight.super_scales, outs), _rows(weight.super_offsets, outs), weight.order,
    )  # fmt: skip
