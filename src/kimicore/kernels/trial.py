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
from kimicore.kernels.gated_act import reference as gated
from kimicore.kernels.linear import reference as product
from kimicore.kernels.ops import BlockMassOp, GatedActOp, LinearOp, PagedAttentionOp, RmsNormOp, RotaryWriteOp
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


TRIALS: Final[dict[str, Callable[[Any, torch.dtype], bool]]] = {
    "linear": linear,
    "rms_norm": rms_norm,
    "rotary_write": rotary_write,
    "gated_act": gated_act,
    "paged_attention": paged_attention,
    "block_mass": block_mass,
}
