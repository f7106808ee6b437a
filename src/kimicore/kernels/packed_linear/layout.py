"""How a weight of 4, 5, 6 or 8 bits lies in memory, whatever file or rounding it came from.

A weight [O, C] has a code for each element, and for each *group* of so many of a row's elements a scale, and perhaps a
zero or an offset::

    w[o, k] = scale[o, g] * (code[o, k] - zero[o, g]) + offset[o, g]        g = k // group

computed in float32, each operation rounded, and then rounded to the type that the product has. That holds what others
write without loss: GGUF's types (scales there may have two levels), AWQ and GPTQ (whose zeros are integers),
compressed-tensors.

Codes are unsigned. A row lies in chunks of 64 elements: 32 bytes whose low halves are elements 0 to 31 and whose high
halves are elements 32 to 63; with 5 bits then 8 bytes, whose bit i is element i's highest; with 6 bits 16 bytes, the
fifth bits and then the sixth; with 8 bits there are 64 bytes, an element each. What is behind C in the last chunk is 0.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import Final

import torch
from attrs import field, frozen
from torch import Tensor

__all__ = ["CHUNK", "CODE_BITS", "PackedWeight", "described_values", "pack_codes", "row_bytes", "unpack_codes"]

CHUNK: Final = 64
CODE_BITS: Final = (4, 5, 6, 8)
GROUP_STEP: Final = 16
_SCALES: Final = (torch.float16, torch.bfloat16, torch.float32)
_TYPES: Final = {
    one: at for at, one in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8))
}
_DESCRIBED: Final = struct.Struct("4P3q2P3q5q")  # struct Packed of unpack.h


def row_bytes(depth: int, bits: int) -> int:
    """Return the bytes of a row's codes."""
    return -(-depth // CHUNK) * (CHUNK * bits // 8)


def _sized(weight: PackedWeight, tensor: Tensor, *columns: int) -> bool:
    return tensor.is_contiguous() and tensor.shape[:1] == (weight.outs,) and tensor.shape[1:] in [(n,) for n in columns]


@frozen(eq=False)
class PackedWeight:
    """A weight [outs, depth] in codes of ``bits`` each; see the head of this file for what the fields mean.

    ``codes``: [outs, row_bytes(depth, bits)] uint8. ``group``: a multiple of 16, or ``depth``; G groups cover a row,
    the last of which may be shorter. ``scales``: [outs, G] float16, bfloat16 or float32; or, with two levels, int8 or
    uint8, and then the scale is the group's times ``super_scales`` [outs, S] of the run of G / S groups that it is in
    (S divides G). ``zero``: what all groups have, or ``zeros`` [outs, G] uint8. ``offsets``: [outs, G] of the scales'
    types, with ``super_offsets`` [outs, S] where they are integers; None: 0. ``order`` [depth] int32: column ``k`` is
    multiplied with the input's ``order[k]``; None: they are in order. All tensors are contiguous.
    """

    outs: int
    depth: int
    bits: int
    group: int
    codes: Tensor = field(repr=False)
    scales: Tensor = field(repr=False)
    zero: int = 0
    zeros: Tensor | None = field(default=None, repr=False)
    offsets: Tensor | None = field(default=None, repr=False)
    super_scales: Tensor | None = field(default=None, repr=False)
    super_offsets: Tensor | None = field(default=None, repr=False)
    order: Tensor | None = field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        sound = self.bits in CODE_BITS and self.outs > 0 and self.depth > 0 and 0 <= self.zero < 1 << self.bits
        sound = sound and (self.group == self.depth or (self.group > 0 and self.group % GROUP_STEP == 0))
        sound = sound and self.codes.dtype == torch.uint8 and _sized(self, self.codes, row_bytes(self.depth, self.bits))
        sound = sound and _levels(self, self.scales, self.super_scales)
        if self.offsets is not None:
            sound = sound and _levels(self, self.offsets, self.super_offsets)
        if self.zeros is not None:
            sound = sound and self.zeros.dtype == torch.uint8 and _sized(self, self.zeros, self.groups)
        if self.order is not None:
            sound = sound and self.order.dtype == torch.int32 and self.order.shape == (self.depth,)
        if not sound:
            raise ValueError(f"{self}: shapes or types of its parts do not fit together")

    @property
    def groups(self) -> int:
        """How many groups a row has."""
        return -(-self.depth // self.group)

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
        sizes = (self.outs, self.depth, self.bits, self.group, self.zero)
        scales = described_values(self.scales, self.super_scales)
        offsets = described_values(self.offsets, self.super_offsets)
        return _DESCRIBED.pack(self.codes.data_ptr(), _address(self.zeros), *scales, *offsets, *sizes)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def described_values(values: Tensor | None, supers: Tensor | None) -> tuple[int, ...]:
    """Return struct Values of unpack.h."""
    kind = 0 if values is None else _TYPES[values.dtype]
    many = (0, 1) if supers is None else (_TYPES[supers.dtype], supers.shape[1])
    return (_address(values), _address(supers), kind, *many)


def _levels(weight: PackedWeight, values: Tensor, supers: Tensor | None) -> bool:
    """Whether scales or offsets, and what they are multiplied with, have the sizes and types that they must have."""
    if not _sized(weight, values, weight.groups):
        return False
    if supers is None:
        return values.dtype in _SCALES
    if values.dtype not in (torch.int8, torch.uint8) or supers.dtype not in _SCALES or supers.dim() != 2:
        return False
    runs = supers.shape[1]
    return runs > 0 and weight.groups % runs == 0 and _sized(weight, supers, runs)


def _planes(bits: int) -> tuple[int, ...]:
    return {4: (), 5: (4,), 6: (4, 5), 8: ()}[bits]


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes [O, C] uint8 below ``2 ** bits`` as they are kept: [O, row_bytes(C, bits)] uint8."""
    outs, depth = codes.shape
    chunks = -(-depth // CHUNK)
    whole = torch.zeros((outs, chunks * CHUNK), dtype=torch.uint8)
    whole[:, :depth] = codes
    whole = whole.view(outs, chunks, CHUNK)
    if bits == 8:
        return whole.view(outs, chunks * CHUNK)
    half = CHUNK // 2
    parts = [(whole[..., :half] & 15) | (whole[..., half:] << 4)]
    weights = torch.tensor([1 << at for at in range(8)], dtype=torch.uint8)
    for bit in _planes(bits):
        ones = (whole >> bit & 1).view(outs, chunks, CHUNK // 8, 8)
        parts.append((ones * weights).sum(dim=-1, dtype=torch.uint8))
    return torch.cat(parts, dim=2).reshape(outs, row_bytes(depth, bits))


def unpack_codes(packed: Tensor, depth: int, bits: int) -> Tensor:
    """Return the codes [O, depth] uint8 of what :func:`pack_codes` made."""
    outs, chunks, half = packed.shape[0], -(-depth // CHUNK), CHUNK // 2
    if bits == 8:
        return packed[:, :depth].clone()
    chunk = packed.view(outs, chunks, CHUNK * bits // 8)
    low = chunk[..., :half]
    codes = torch.cat((low & 15, low >> 4), dim=2)
    shifts = torch.arange(8, dtype=torch.uint8)
    for at, bit in enumerate(_planes(bits)):
        plane = chunk[..., half + 8 * at : half + 8 * at + 8].unsqueeze(-1) >> shifts & 1
        codes |= plane.reshape(outs, chunks, CHUNK) << bit
    return codes.view(outs, chunks * CHUNK)[:, :depth].contiguous()
