"""Block-quantized weights back to float32, as ggml defines the formats.

Every function takes raw blocks [N, block_bytes] uint8 and returns float32 [N, block]. Formats and order
of arithmetic: https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from kimicore.model.mapped import Bytes

__all__ = ["QUANT_TYPES", "QuantType", "dequantize", "quant_type"]

Floats = npt.NDArray[np.float32]


def _half(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _nibbles(raw: Bytes) -> Bytes:
    """Return low nibbles, then high nibbles: [N, B] to [N, 2B]."""
    return np.concatenate((raw & 15, raw >> 4), axis=1)


def _fifth_bits(raw: Bytes) -> Bytes:
    """Return bit i of each little-endian 32-bit word, moved to the value 16: [N, 4] to [N, 32]."""
    return np.unpackbits(raw, axis=1, bitorder="little") * np.uint8(16)


def _f32(raw: Bytes) -> Floats:
    return np.ascontiguousarray(raw).view("<f4").astype(np.float32)


def _bf16(raw: Bytes) -> Floats:
    wide = np.ascontiguousarray(raw).view("<u2").astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def _q4_0(raw: Bytes) -> Floats:
    return _half(raw[:, :2]) * (_nibbles(raw[:, 2:]).view(np.int8) - np.int8(8)).astype(np.float32)


def _q4_1(raw: Bytes) -> Floats:
    return _half(raw[:, :2]) * _nibbles(raw[:, 4:]).astype(np.float32) + _half(raw[:, 2:4])


def _q5_0(raw: Bytes) -> Floats:
    codes = (_nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])).view(np.int8) - np.int8(16)
    return _half(raw[:, :2]) * codes.astype(np.float32)


def _q5_1(raw: Bytes) -> Floats:
    codes = _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])
    return _half(raw[:, :2]) * codes.astype(np.float32) + _half(raw[:, 2:4])


def _q8_0(raw: Bytes) -> Floats:
    return _half(raw[:, :2]) * raw[:, 2:].view(np.int8).astype(np.float32)


def _scales_6_bit(raw: Bytes) -> tuple[Floats, Floats]:
    """Unpack the eight 6-bit scales and minima of a Q4_K or Q5_K block: [N, 12] to two of [N, 8]."""
    first, second, third = raw[:, 0:4], raw[:, 4:8], raw[:, 8:12]
    scales = np.concatenate((first & 63, (third & 15) | ((first >> 6) << 4)), axis=1)
    minima = np.concatenate((second & 63, (third >> 4) | ((second >> 6) << 4)), axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _affine(scale: Floats, minimum: Floats, codes: npt.NDArray[Any]) -> Floats:
    """Return scale * code - minimum per group: [N, G], [N, G] and [N, G, E] to [N, G * E]."""
    result = scale[:, :, None] * codes.astype(np.float32)
    result -= minimum[:, :, None]
    return result.reshape(len(codes), -1)


def _shifted(raw: Bytes, shifts: tuple[int, ...], width: int) -> Bytes:
    """Return runs of ``width`` bytes, each run once per shift: [N, R * width] to [N, R, S, width]."""
    runs = raw.reshape(len(raw), -1, 1, width)
    return runs >> np.array(shifts, dtype=np.uint8).reshape(1, 1, -1, 1)


def _q4_k(raw: Bytes) -> Floats:
    scales, minima = _scales_6_bit(raw[:, 4:16])
    codes = (_shifted(raw[:, 16:144], (0, 4), 32) & 15).reshape(-1, 8, 32)
    return _affine(_half(raw[:, :2]) * scales, _half(raw[:, 2:4]) * minima, codes)


def _q5_k(raw: Bytes) -> Floats:
    scales, minima = _scales_6_bit(raw[:, 4:16])
    low = (_shifted(raw[:, 48:176], (0, 4), 32) & 15).reshape(-1, 8, 32)
    high = (_shifted(raw[:, 16:48], (0, 1, 2, 3, 4, 5, 6, 7), 32) & 1).reshape(-1, 8, 32)
    return _affine(_half(raw[:, :2]) * scales, _half(raw[:, 2:4]) * minima, low | (high << 4))


def _q6_k(raw: Bytes) -> Floats:
    low = (_shifted(raw[:, :128], (0, 4), 64) & 15).reshape(-1, 8, 32)
    high = (_shifted(raw[:, 128:192], (0, 2, 4, 6), 32) & 3).reshape(-1, 8, 32)
    codes = ((low | (high << 4)).view(np.int8) - np.int8(32)).reshape(-1, 16, 16).astype(np.float32)
    scales = _half(raw[:, 208:210]) * raw[:, 192:208].view(np.int8).astype(np.float32)
    codes *= scales[:, :, None]
    return codes.reshape(len(raw), 256)


def _q2_k(raw: Bytes) -> Floats:
    codes = (_shifted(raw[:, 16:80], (0, 2, 4, 6), 32) & 3).reshape(-1, 16, 16)
    scales = _half(raw[:, 80:82]) * (raw[:, :16] & 15).astype(np.float32)
    minima = _half(raw[:, 82:84]) * (raw[:, :16] >> 4).astype(np.float32)
    return _affine(scales, minima, codes)


def _q3_k(raw: Bytes) -> Floats:
    low = (_shifted(raw[:, 32:96], (0, 2, 4, 6), 32) & 3).reshape(-1, 16, 16)
    # The mask says where four is not subtracted, one bit plane for each 32 weights.
    kept = (_shifted(raw[:, :32], (0, 1, 2, 3, 4, 5, 6, 7), 32) & 1).reshape(-1, 16, 16)
    codes = low.view(np.int8) - ((kept ^ 1) << 2).view(np.int8)
    packed = raw[:, 96:108]
    small = _nibbles(packed[:, :8])
    large = (_shifted(packed[:, 8:12], (0, 2, 4, 6), 4) & 3).reshape(-1, 16)
    scales = ((small | (large << 4)).view(np.int8) - np.int8(32)).astype(np.float32)
    result = codes.astype(np.float32)
    result *= (_half(raw[:, 108:110]) * scales)[:, :, None]
    return result.reshape(len(raw), 256)


@frozen
class QuantType:
    """A storage format: weights per block, bytes per block, and the way back to float32."""

    name: str
    block: int
    block_bytes: int
    expand: Callable[[Bytes], Any] = field(repr=False)


QUANT_TYPES: Mapping[int, QuantType] = MappingProxyType(
    {
        0: QuantType("F32", 1, 4, _f32),
        1: QuantType("F16", 1, 2, _half),
        2: QuantType("Q4_0", 32, 18, _q4_0),
        3: QuantType("Q4_1", 32, 20, _q4_1),
        6: QuantType("Q5_0", 32, 22, _q5_0),
        7: QuantType("Q5_1", 32, 24, _q5_1),
        8: QuantType("Q8_0", 32, 34, _q8_0),
        10: QuantType("Q2_K", 256, 84, _q2_k),
        11: QuantType("Q3_K", 256, 110, _q3_k),
        12: QuantType("Q4_K", 256, 144, _q4_k),
        13: QuantType("Q5_K", 256, 176, _q5_k),
        14: QuantType("Q6_K", 256, 210, _q6_k),
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
