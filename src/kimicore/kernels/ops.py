"""How each operation is called, whatever implements it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.kernels.packed_linear.tiled import TiledWeight

__all__ = [
    "ArrangeOp",
    "BlockMassOp",
    "ChooseBlocksOp",
    "GatedActOp",
    "KeySummaryOp",
    "KvQuantizeOp",
    "LinearOp",
    "PackedLinearInt8Op",
    "PackedLinearOp",
    "PackedRowsOp",
    "PagedAttentionOp",
    "QuantizedAttentionOp",
    "RmsNormOp",
    "RotaryWriteOp",
]


class LinearOp(Protocol):
    """See :func:`kimicore.kernels.linear.reference.linear`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


class ArrangeOp(Protocol):
    """Puts a packed weight into the form in which this machine's products read it.

    See :func:`kimicore.kernels.packed_linear.reference.arrange` and :func:`kimicore.kernels.packed_linear.tiled.tiled`.
    """

    def __call__(self, weight: PackedWeight) -> PackedWeight | TiledWeight: ...


class PackedLinearOp(Protocol):
    """See :func:`kimicore.kernels.packed_linear.reference.packed_linear`."""

    def __call__(
        self, x: Tensor, weight: PackedWeight | TiledWeight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor: ...


class PackedLinearInt8Op(Protocol):
    """See :func:`kimicore.kernels.packed_linear.reference.packed_linear_int8`."""

    def __call__(
        self, x: Tensor, weight: PackedWeight | TiledWeight, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor: ...


class PackedRowsOp(Protocol):
    """See :func:`kimicore.kernels.packed_linear.reference.packed_rows`."""

    def __call__(self, weight: PackedWeight | TiledWeight, rows: Tensor, dtype: torch.dtype) -> Tensor: ...


class RmsNormOp(Protocol):
    """See :func:`kimicore.kernels.rms_norm.reference.rms_norm`."""

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


class RotaryWriteOp(Protocol):
    """See :func:`kimicore.kernels.rotary_write.reference.rotary_write`."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, layer: int, slots: Tensor
    ) -> None: ...


class GatedActOp(Protocol):
    """See :func:`kimicore.kernels.gated_act.reference.gated_act`."""

    def __call__(self, gate_up: Tensor, kind: str) -> Tensor: ...


class PagedAttentionOp(Protocol):
    """See :func:`kimicore.kernels.paged_attention.reference.paged_attention`."""

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        layer: int,
        block_table: Tensor,
        row_starts: Tensor,
        contexts: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        bias: Tensor | None = None,
        importance: Tensor | None = None,
    ) -> Tensor: ...


class BlockMassOp(Protocol):
    """See :func:`kimicore.kernels.block_mass.reference.block_mass`."""

    def __call__(
        self,
        q: Tensor,
        kv: Tensor,
        layer: int,
        block_table: Tensor,
        row_starts: Tensor,
        contexts: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor: ...


class KeySummaryOp(Protocol):
    """See :func:`kimicore.kernels.key_summary.reference.key_summary`."""

    def __call__(self, kv: Tensor, layer: int, slots: Tensor, summary: Tensor) -> None: ...


class ChooseBlocksOp(Protocol):
    """See :func:`kimicore.kernels.choose_blocks.reference.choose_blocks`."""

    def __call__(
        self,
        q: Tensor,
        summary: Tensor,
        layer: int,
        block_table: Tensor,
        contexts: Tensor,
        keep: Tensor,
        *,
        block_tokens: int,
        scale: float,
        first: int = 1,
        recent: int = 2,
    ) -> tuple[Tensor, Tensor]: ...


class KvQuantizeOp(Protocol):
    """See :func:`kimicore.kernels.kv_quantize.reference.kv_quantize`."""

    def __call__(self, kv: Tensor, layer: int, sources: Tensor, packed: Tensor, targets: Tensor, bits: int) -> None: ...


class QuantizedAttentionOp(Protocol):
    """See :func:`kimicore.kernels.paged_attention.quantized.quantized_attention`."""

    def __call__(
        self,
        q: Tensor,
        packed: Tensor,
        bits: int,
        kv: Tensor,
        layer: int,
        packed_table: Tensor,
        tail_table: Tensor,
        row_starts: Tensor,
        contexts: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor: ...
