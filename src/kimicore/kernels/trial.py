"""A short trial of each native operation against its reference, before it is chosen.

The kernels are compiled on the user's machine, by a compiler and for a processor that were perhaps never tried: one
that gives wrong results here is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from kimicore.kernels.block_mass import reference as mass
from kimicore.kernels.choose_blocks import reference as choice
from kimicore.kernels.gated_act import reference as gated
from kimicore.kernels.key_summary import reference as extremes
from kimicore.kernels.kv_quantize import reference as packing
from kimicore.kernels.kv_quantize.layout import packed_layer_bytes
from kimicore.kernels.linear import reference as product
from kimicore.kernels.ops import (
    ArrangeOp,
    BlockMassOp,
    ChooseBlocksOp,
    GatedActOp,
    KeySummaryOp,
    KvQuantizeOp,
    LinearOp,
    PackedLinearInt8Op,
    PackedLinearOp,
    PackedRowsOp,
    PagedAttentionOp,
    QuantizedAttentionOp,
    RmsNormOp,
    RotaryWriteOp,
)
from kimicore.kernels.packed_linear import native as unpacking_native
from kimicore.kernels.packed_linear import reference as unpacking
from kimicore.kernels.packed_linear.crossover import Crossover
from kimicore.kernels.packed_linear.layout import PackedWeight, pack_codes
from kimicore.kernels.paged_attention import quantized
from kimicore.kernels.paged_attention import reference as attention
from kimicore.kernels.rms_norm import reference as norm
from kimicore.kernels.rotary_write import reference as rotary

__all__ = ["TRIALS"]

_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def _noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _near(a: Tensor, b: Tensor) -> bool:
    tolerance = _TOLERANCE[a.dtype]
    return torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)


def linear(op: LinearOp, dtype: torch.dtype) -> bool:
    """Return whether the product agrees, for sizes that fill no tile."""
    x, weight, bias = _noise(1, 7, 83).to(dtype), _noise(2, 13, 83).to(dtype) / 8, _noise(3, 13).to(dtype)
    return _near(op(x, weight, bias), product.linear(x, weight, bias))


def rms_norm(op: RmsNormOp, dtype: torch.dtype) -> bool:
    """Return whether the normalization agrees."""
    x, residual, weight = _noise(1, 3, 83).to(dtype), _noise(2, 3, 83).to(dtype), _noise(3, 83).to(dtype)
    return all(map(_near, op(x, weight, 1e-6, residual), norm.rms_norm(x, weight, 1e-6, residual)))


def rotary_write(op: RotaryWriteOp, dtype: torch.dtype) -> bool:
    """Return whether rotated queries and the cache agree."""
    found = []
    for call in (op, rotary.rotary_write):
        q, k, v = _noise(1, 5, 4, 26).to(dtype), _noise(2, 5, 2, 26).to(dtype), _noise(3, 5, 2, 26).to(dtype)
        kv = torch.zeros(3, 2, 2, 2, 16, 26, dtype=dtype)
        call(q, k, v, _noise(4, 5, 13).cos(), _noise(4, 5, 13).sin(), kv, 1, torch.arange(14, 19))
        found.append((q, kv))
    return all(map(_near, *found))


def gated_act(op: GatedActOp, dtype: torch.dtype) -> bool:
    """Return whether both activations agree."""
    x = 4 * _noise(1, 3, 2 * 83).to(dtype)
    return all(_near(op(x, kind), gated.gated_act(x, kind)) for kind in ("silu", "gelu_tanh"))


def paged_attention(op: PagedAttentionOp, dtype: torch.dtype) -> bool:
    """Return whether output and importance agree, for a prompt's chunk and a single token over two parts of keys."""
    kv, q = _noise(1, 24, 1, 2, 2, 16, 40).to(dtype), _noise(2, 8, 6, 40).to(dtype)
    table = torch.arange(40, dtype=torch.int32).view(2, 20) % 24
    starts, contexts = torch.tensor([0, 7, 8], dtype=torch.int32), torch.tensor([19, 300], dtype=torch.int32)
    found = []
    for call in (op, attention.paged_attention):
        importance = torch.zeros(2, 20)
        out = call(q, kv, 0, table, starts, contexts, scale=0.2, window=290, softcap=30.0, importance=importance)
        found.append((out, importance.to(dtype)))
    return all(map(_near, *found))


def block_mass(op: BlockMassOp, dtype: torch.dtype) -> bool:
    """Return whether the shares of blocks agree, for some queries of a prompt and a single token."""
    kv, q = _noise(1, 24, 1, 2, 2, 16, 40).to(dtype), _noise(2, 8, 6, 40).to(dtype)
    table = torch.arange(40, dtype=torch.int32).view(2, 20) % 24
    starts, contexts = torch.tensor([0, 7, 8], dtype=torch.int32), torch.tensor([19, 300], dtype=torch.int32)
    calls = (op, mass.block_mass)
    a, b = (call(q, kv, 0, table, starts, contexts, scale=0.2, window=290, softcap=30.0) for call in calls)
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def key_summary(op: KeySummaryOp, dtype: torch.dtype) -> bool:
    """Return whether the extremes of two blocks are the same, and nothing else is written."""
    kv = _noise(1, 5, 2, 2, 3, 16, 40).to(dtype)
    found = torch.zeros(2, 5, 2, 3, 2, 40, dtype=dtype)
    for call, summary in zip((op, extremes.key_summary), found, strict=True):
        call(kv, 1, torch.tensor([3, 0], dtype=torch.int32), summary)
    return torch.equal(*found)


def choose_blocks(op: ChooseBlocksOp, dtype: torch.dtype) -> bool:
    """Return whether the same blocks are chosen for a long and a short row, by estimates that lie apart."""
    q, summary = _noise(1, 2, 6, 40).to(dtype), _noise(2, 40, 2, 2, 2, 40).to(dtype).sort(dim=3).values
    table, contexts = torch.arange(80, dtype=torch.int32).view(2, 40) % 40, torch.tensor([601, 77], dtype=torch.int32)
    calls, keep = (op, choice.choose_blocks), torch.tensor([12, 9], dtype=torch.int32)
    a, b = (call(q, summary, 1, table, contexts, keep, block_tokens=16, scale=0.3) for call in calls)
    return all(map(torch.equal, a, b))


def kv_quantize(op: KvQuantizeOp, dtype: torch.dtype) -> bool:
    """Return whether two blocks get the same bytes with 8 and with 4 bits, and no other block is written."""
    kv = (_noise(1, 3, 1, 2, 2, 16, 40) * _noise(2, 3, 1, 2, 2, 16, 1).exp()).to(dtype)
    sources, targets = torch.tensor([2, 1], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    for bits in (8, 4):
        found = torch.full((2, 3, 1, packed_layer_bytes(2, 16, 40, bits)), 170, dtype=torch.uint8)
        for call, packed in zip((op, packing.kv_quantize), found, strict=True):
            call(kv, 0, sources, packed, targets, bits)
        if not torch.equal(*found):
            return False
    return True


def quantized_attention(op: QuantizedAttentionOp, dtype: torch.dtype) -> bool:
    """Return whether the output agrees with 8 and with 4 bits, for a chunk over block edges and a single token."""
    kv, q = _noise(1, 24, 1, 2, 2, 16, 40).to(dtype), _noise(2, 21, 6, 40).to(dtype)
    table, slots = torch.arange(40, dtype=torch.int32).view(2, 20) % 24, torch.arange(24, dtype=torch.int32)
    starts, contexts = torch.tensor([0, 20, 21], dtype=torch.int32), torch.tensor([35, 300], dtype=torch.int32)
    for bits in (8, 4):
        packed = torch.zeros(24, 1, packed_layer_bytes(2, 16, 40, bits), dtype=torch.uint8)
        packing.kv_quantize(kv, 0, slots, packed, slots, bits)
        given = (q, packed, bits, kv, 0, table, table.flip(0), starts, contexts)
        calls = (op, quantized.quantized_attention)
        if not _near(*(call(*given, scale=0.2, window=290, softcap=30.0) for call in calls)):
            return False
    return True


def _packed(bits: int, levels: bool) -> PackedWeight:
    """Return a weight [35, 96] in groups of 32; ``levels``: with scales and offsets of two levels."""
    codes = pack_codes((_noise(bits, 35, 96).abs() * 1000).to(torch.int64).to(torch.uint8) & (1 << bits) - 1, bits)
    scales = _noise(2, 35, 3).abs() / 16
    if not levels:
        return PackedWeight(35, 96, bits, 32, codes, scales.half(), zero=1 << bits - 1)
    small, supers = (scales * 256).to(torch.uint8), _noise(4, 35, 1).half() / 256
    return PackedWeight(
        35, 96, bits, 32, codes, small, offsets=small.flip(0), super_scales=supers, super_offsets=supers.flip(0)
    )


def packed_linear(op: PackedLinearOp, dtype: torch.dtype) -> bool:
    """Return whether the product agrees for all numbers of bits, for few rows and for many."""
    bias = _noise(3, 35).to(dtype)
    for rows, bits, levels in ((1, 4, False), (7, 4, True), (40, 5, False), (7, 6, True), (40, 8, False)):
        x, weight = _noise(1, rows, 96).to(dtype) / 8, _packed(bits, levels)
        if not _near(op(x, weight, bias), unpacking.packed_linear(x, weight, bias)):
            return False
    return True


def arrange(op: ArrangeOp, dtype: torch.dtype) -> bool:
    """Return whether products and rows agree with weights as they are arranged, whichever way they are multiplied."""
    product, rows_of = unpacking_native.load(dtype, Crossover(4, 64))[0], unpacking_native.load_rows(dtype)[0]
    if product is None or rows_of is None:
        return False
    which = torch.tensor([34, 0, 7])
    for bits, levels in ((4, False), (4, True), (5, True), (6, True), (8, False)):
        weight = _packed(bits, levels)
        own = op(weight)
        for rows in (1, 6, 40, 600):
            x = _noise(1, rows, 96).to(dtype) / 8
            if not _near(product(x, own), unpacking.packed_linear(x, weight)):
                return False
        if not torch.equal(rows_of(own, which, dtype), unpacking.packed_rows(weight, which, dtype)):
            return False
    return True


def packed_linear_int8(op: PackedLinearInt8Op, dtype: torch.dtype) -> bool:
    """Return whether the product of rounded inputs agrees, but for weights that may be rounded to 8 bits a row."""
    for rows, bits, levels in ((1, 4, False), (40, 4, True), (7, 5, False), (40, 6, True), (7, 8, False)):
        x, weight = _noise(1, rows, 96).to(dtype), _packed(bits, levels)
        expected = unpacking.packed_linear_int8(x, weight).float()
        if (op(x, weight).float() - expected).abs().max() > 0.05 * expected.abs().max():
            return False
    return True


def packed_rows(op: PackedRowsOp, dtype: torch.dtype) -> bool:
    """Return whether rows are the same."""
    rows = torch.tensor([34, 0, 7])
    cases = [_packed(bits, levels) for bits in (4, 5, 6, 8) for levels in (False, True)]
    return all(torch.equal(op(one, rows, dtype), unpacking.packed_rows(one, rows, dtype)) for one in cases)


TRIALS: Final[dict[str, Callable[[Any, torch.dtype], bool]]] = {
    "linear": linear,
    "rms_norm": rms_norm,
    "rotary_write": rotary_write,
    "gated_act": gated_act,
    "paged_attention": paged_attention,
    "block_mass": block_mass,
    "key_summary": key_summary,
    "choose_blocks": choose_blocks,
    "kv_quantize": kv_quantize,
    "quantized_attention": quantized_attention,
    "packed_linear": packed_linear,
    "packed_linear_int8": packed_linear_int8,
    "packed_rows": packed_rows,
    "arrange": arrange,
}
