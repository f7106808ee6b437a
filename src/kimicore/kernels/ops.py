"""How each operation is called, whatever implements it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["BlockMassOp", "GatedActOp", "LinearOp", "PagedAttentionOp", "RmsNormOp", "RotaryWriteOp"]


class LinearOp(Protocol):
    """See :func:`kimicore.kernels.linear.reference.linear`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


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
