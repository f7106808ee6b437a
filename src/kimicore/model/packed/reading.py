"""Matrices read in the form that they are to have: as they are stored, as a precision map says, packed or plain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen
from torch import Tensor

from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.model.packed.joining import expand, joined, same_form
from kimicore.model.packed.rounding import round_to_nearest
from kimicore.model.products import Stack, Table, Weight
from kimicore.policies.precision import PRECISIONS

if TYPE_CHECKING:
    from kimicore.model.source import WeightSource

__all__ = ["Matrices", "is_rounded_to"]

_PLAIN: Final = (None, None, None, None)


def is_rounded_to(weight: PackedWeight, precision: str) -> bool:
    """Return whether a weight has the form that rounding to a map's integer precision gives."""
    form = PRECISIONS[precision]
    group = weight.depth if not form.group or form.group >= weight.depth else form.group
    extras = (weight.zeros, weight.offsets, weight.super_scales, weight.order)
    return (weight.bits, weight.group, weight.zero) == (form.bits, group, 1 << (form.bits - 1)) and extras == _PLAIN


@frozen
class Matrices:
    """Reads a model's matrices in ``dtype`` or packed.

    ``packed``: keep codes in memory; otherwise every matrix is expanded, and has the values of what it was packed as.
    ``precision``: what a map says of a tensor's name; None: tensors keep the form that the file gives them.
    """

    source: WeightSource
    dtype: torch.dtype
    packed: bool = False
    precision: Callable[[str], str] | None = None

    def _coded(self, name: str) -> PackedWeight | None:
        """Return a matrix in codes, or None where it has none; nothing is read then."""
        if self.precision is None:
            return self.source.packed(name) if self.packed else None
        wanted = self.precision(name)
        if PRECISIONS[wanted].kind == "float":
            return None
        stored = self.source.packed(name)
        if stored is not None and is_rounded_to(stored, wanted):
            return stored
        return round_to_nearest(self.source.read(name, torch.float32), wanted, name=f"{self.source.path}: {name}")

    def one(self, name: str) -> Tensor | PackedWeight:
        """Return a matrix [O, C]."""
        found = self._coded(name)
        if found is None:
            return self.source.read(name, self.dtype)
        return found if self.packed else expand(found, self.dtype)

    def stacked(self, names: Sequence[str]) -> Weight:
        """Return matrices joined along their rows, as few parts as their forms allow.

        Only one part exists beside the result at a time, and parts of one packed form until they are joined.
        """
        parts: list[Table] = []
        plain: list[str] = []
        coded: list[PackedWeight] = []

        def close() -> None:
            if plain:
                parts.append(self._joined_plain(plain))
                plain.clear()
            if coded:
                parts.append(joined(coded))
                coded.clear()

        for name in names:
            found = self._coded(name) if self.packed else None
            if found is None:
                if coded:
                    close()
                plain.append(name)
                continue
            if plain or (coded and not same_form(coded[0], found)):
                close()
            coded.append(found)
        close()
        return parts[0] if len(parts) == 1 else Stack(tuple(parts))

    def _joined_plain(self, names: Sequence[str]) -> Tensor:
        shapes = [tuple(self.source.shape(name)) for name in names]
        result = torch.empty((sum([shape[0] for shape in shapes]), *shapes[0][1:]), dtype=self.dtype)
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            result[row : row + shape[0]].copy_(self._plain(name))
            row += shape[0]
        return result

    def _plain(self, name: str) -> Tensor:
        """Return a matrix in floats, by way of codes where a map asks for them."""
        found = None if self.packed else self._coded(name)
        return self.source.read(name, self.dtype) if found is None else expand(found, self.dtype)
