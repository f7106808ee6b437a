"""How far an operation may be from the float64 result, per type: the one table of the kernel tests."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["DTYPES", "assert_close"]

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

# (relative, absolute). The absolute part covers sums of about a thousand products of unit size.
_TABLE: Final = {
    "linear": {torch.float32: (1e-5, 2e-4), torch.bfloat16: (1e-2, 5e-2), torch.float16: (2e-3, 2e-2)},
    "rms_norm": {torch.float32: (1e-5, 1e-6), torch.bfloat16: (2e-2, 1e-3), torch.float16: (3e-3, 1e-3)},
    "rotary_write": {torch.float32: (1e-5, 1e-6), torch.bfloat16: (1e-2, 1e-2), torch.float16: (2e-3, 2e-3)},
    "gated_act": {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 1e-3), torch.float16: (3e-3, 1e-4)},
    "paged_attention": {torch.float32: (1e-5, 5e-6), torch.bfloat16: (1e-2, 1e-2), torch.float16: (2e-3, 2e-3)},
    "block_mass": {torch.float32: (1e-5, 1e-6), torch.bfloat16: (1e-5, 1e-6), torch.float16: (1e-5, 1e-6)},
    "importance": {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-3, 2e-3), torch.float16: (1e-4, 1e-4)},
}


def assert_close(op: str, found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Compare what ``op`` gave in ``dtype`` with the float64 result; a NaN in either is a difference."""
    relative, absolute = _TABLE[op][dtype]
    torch.testing.assert_close(found.double(), expected.double(), rtol=relative, atol=absolute)
