"""Block-quantized weights taken apart, and back to float32, as ggml defines the formats.

Every function takes raw blocks [N, block_bytes] uint8. Formats and order of arithmetic:
https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from kimicore.model.mapped import Bytes

__all__ = ["QUANT_TYPES", "QuantType", "Split", "dequantize", "quant_type"]

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[Any]


@frozen(eq=False)
class Split:
    """Blocks taken apart: a weight is ``scale * (code - zero) + offset``, in float32.

    ``codes`` [N, block] uint8, of ``bits`` each. ``scales`` [N, G], each for a run of block / G codes: float16; or
    integers, and then they are multiplied by the block's ``super_scales`` [N, 1] float16. ``offsets`` [N, G] likewise.
    """

    codes: Numbers
    bits: int
    zero: int
    scales: Numbers
    offsets: Numbers | None = None
    super_scales: Numbers | None = None
    super_offsets: Numbers | None = None

    def floats(self) -> Floats:
        """Return the weights [N, block]."""
        blocks, groups = self.scales.shape
        values = self.codes.reshape(blocks, groups, -1).astype(np.float32)
        values -= np.float32(self.zero)
        values *= _product(self.scales, self.super_scales)[:, :, None]
        if self.offsets is not None:
            values += _product(self.offsets, self.super_offsets)[:, :, None]
        return values.reshape(blocks, -1)


def _product(values: Numbers, supers: Numbers | None) -> Floats:
    floats = values.astype(np.float32)
    return floats if supers is None else supers.astype(np.float32) * floats


def _halves(raw: Bytes) -> Numbers:
    return np.ascontiguousarray(raw).view("<f2")


def _half(raw: Bytes) -> Floats:
    return _halves(raw).astype(np.float32)


def _f32(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view("<f4").astype(np.float32)


def _bf16(raw: Bytes) -> Floats:
    wide = np.ascontiguousarray(raw).view("<u2").astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """Return low nibbles, then high nibbles: [N, B] to [N, 2B]."""
    return np.concatenate((raw & 15, raw >> 4), axis=1)


def _fifth_bits(raw: Bytes) -> Bytes:
    """Return bit i of each little-endian 32-bit word, moved to the value 16: [N, 4] to [N, 32]."""
    return np.unpackbits(raw, axis=1, bitorder="little") * np.uint8(16)


def _q4_0(raw: Bytes) -> Split:
    return Split(_nibbles(raw[:, 2:]), 4, 8, _halves(raw[:, :2]))


def _q4_1(raw: Bytes) -> Split:
    return Split(_nibbles(raw[:, 4:]), 4, 0, _halves(raw[:, :2]), _halves(raw[:, 2:4]))


def _q5_0(raw: Bytes) -> Split:
    return Split(_nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6]), 5, 16, _halves(raw[:, :2]))


def _q5_1(raw: Bytes) -> Split:
    codes = _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])
    return Split(codes, 5, 0, _halves(raw[:, :2]), _halves(raw[:, 2:4]))


def _q8_0(raw: Bytes) -> Split:
    return Split(raw[:, 2:] ^ np.uint8(128), 8, 128, _halves(raw[:, :2]))  # signed bytes, 128 higher


def _scales_6_bit(raw: Bytes) -> tuple[Numbers, Numbers]:
    """Unpack the eight 6-bit scales and minima of a Q4_K or Q5_K block: [N, 12] to two of [N, 8]."""
    first, second, third = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 6) << 4)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=1)
    return scales, minima


def _affine(codes: Numbers, bits: int, scales: Numbers, minima: Numbers, supers: Bytes) -> Split:
    """Return blocks of scale * code - minimum, whose ``supers`` [N, 4] are those of the scales and of the minima."""
    return Split(
        codes.reshape(len(codes), -1), bits, 0, scales, minima, _halves(supers[:, :2]), -_halves(supers[:, 2:])
    )


def _shifted(raw: Bytes, shifts: tuple[int, ...], width: int) -> Bytes:
    """Return runs of ``width`` bytes, each run once per shift: [N, R * width] to [N, R, S, width]."""
    runs = raw.reshape(len(raw), -1, 1, width)
    return runs >> np.array(shifts, dtype=np.uint8).reshape(1, 1, -1, 1)


def _q4_k(raw: Bytes) -> Split:
    codes = _shifted(raw[:, 16:144], (0, 4), 32) & 15
    return _affine(codes, 4, *_scales_6_bit(raw[:, 4:16]), raw[:, :4])


def _q5_k(raw: Bytes) -> Split:
    low = (_shifted(raw[:, 48:176], (0, 4), 32) & 15).reshape(-1, 8, 32)
    high = (_shifted(raw[:, 16:48], (0, 1, 2, 3, 4, 5, 6, 7), 32) & 1).reshape(-1, 8, 32)
    return _affine(low | (high << 4), 5, *_scales_6_bit(raw[:, 4:16]), raw[:, :4])


def _q6_k(raw: Bytes) -> Split:
    low = (_shifted(raw[:, :128], (0, 4), 64) & 15).reshape(-1, 8, 32)
    high = (_shifted(raw[:, 128:192], (0, 2, 4, 6), 32) & 3).reshape(-1, 8, 32)
    codes = (low | (high << 4)).reshape(len(raw), -1)
    return Split(codes, 6, 32, raw[:, 192:208].view(np.int8), super_scales=_halves(raw[:, 208:210]))


def _q2_k(raw: Bytes) -> Split:
    codes = _shifted(raw[:, 16:80], (0, 2, 4, 6), 32) & 3
    return _affine(codes, 2, raw[:, :16] & 15, raw[:, :16] >> 4, raw[:, 80:84])


def _q3_k(raw: Bytes) -> Split:
    low = _shifted(raw[:, 32:96], (0, 2, 4, 6), 32) & 3
    # The mask says where four is not subtracted, one bit plane for each 32 weights.
    kept = _shifted(raw[:, :32], (0, 1, 2, 3, 4, 5, 6, 7), 32) & 1
    codes = low.reshape(len(raw), -1) | (kept.reshape(len(raw), -1) << 2)
    packed = raw[:, 96:108]
    small = _nibbles(packed[:, :8])
    large = (_shifted(packed[:, 8:12], (0, 2, 4, 6), 4) & 3).reshape(-1, 16)
    scales = (small | (large << 4)).view(np.int8) - np.int8(32)
    return Split(codes, 3, 4, scales, super_scales=_halves(raw[:, 108:110]))


@frozen
class QuantType:
    """A storage format: weights per block, bytes per block, and the way back to numbers.

    ``expand`` gives the float32 weights; ``split`` the parts of a block that has codes, None where it has none.
    """

    name: str
    block: int
    block_bytes: int
    expand: Callable[[Bytes], Floats] = field(repr=False)
    split: Callable[[Bytes], Split] | None = field(default=None, repr=False)


def _coded(name: str, block: int, block_bytes: int, split: Callable[[Bytes], Split]) -> QuantType:
    return QuantType(name, block, block_bytes, lambda raw: split(raw).floats(), split)


QUANT_TYPES: Mapping[int, QuantType] = MappingProxyType(
    {
        0: QuantType("F32", 1, 4, _f32),
        1: QuantType("F16", 1, 2, _half),
        2: _coded("Q4_0", 32, 18, _q4_0),
        3: _coded("Q4_1", 32, 20, _q4_1),
        6: _coded("Q5_0", 32, 22, _q5_0),
        7: _coded("Q5_1", 32, 24, _q5_1),
        8: _coded("Q8_0", 32, 34, _q8_0),
        10: _coded("Q2_K", 256, 84, _q2_k),
        11: _coded("Q3_K", 256, 110, _q3_k),
        12: _coded("Q4_K", 256, 144, _q4_k),
        13: _coded("Q5_K", 256, 176, _q5_k),
        14: _coded("Q6_K", 256, 210, _q6_k),
        30: QuantType("BF16", 1, 2, _bf16),
    }
)
_REFUSED = MappingProxyType(
    {
        4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
        20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
        29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
    }
)  # fmt: skip


def quant_type(number: int) -> QuantType | str:
    """Return a ggml type's format, or what to call it where it cannot be read."""
    return QUANT_TYPES.get(number) or _REFUSED.get(number, f"unknown type {number}")


def dequantize(raw: Bytes, kind: QuantType) -> Floats:
    """Return the float32 weights of whole blocks: [N * block_bytes] uint8 to [N * block]."""
    with np.errstate(all="ignore"):  # a NaN or infinite scale in a file gives NaN weights, not a warning
        result: Floats = kind.expand(raw.reshape(-1, kind.block_bytes)).reshape(-1)
    return result
