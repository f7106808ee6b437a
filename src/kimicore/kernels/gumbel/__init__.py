"""Counter-based Gumbel noise: a token's noise depends on seed, choice, position and its id, and on nothing else."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from kimicore.kernels.gumbel.reference import gumbel_argmax

__all__ = ["FusedGumbel", "GumbelOp", "draw"]


class GumbelOp(Protocol):
    """See :func:`kimicore.kernels.gumbel.reference.gumbel`."""

    def __call__(self, seed: int, choice: int, position: int, ids: Tensor, /) -> Tensor: ...


@runtime_checkable
class FusedGumbel(Protocol):
    """A :class:`GumbelOp` that draws from a whole vocabulary without writing the noise down."""

    def __call__(self, seed: int, choice: int, position: int, ids: Tensor, /) -> Tensor: ...

    def argmax(self, scores: Tensor, seed: int, choice: int, position: int) -> int:
        """See :func:`kimicore.kernels.gumbel.reference.gumbel_argmax`."""
        ...


def draw(gumbel: GumbelOp, scores: Tensor, seed: int, choice: int, position: int) -> int:
    """Return the id that wins once noise is added to ``scores`` [V], by the fused operation where there is one."""
    if isinstance(gumbel, FusedGumbel):
        return gumbel.argmax(scores, seed, choice, position)
    return gumbel_argmax(scores, seed, choice, position)
