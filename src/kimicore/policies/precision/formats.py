"""The precisions that a map may name, and what each of them can hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from attrs import frozen

from kimicore.contracts import ModuleView

__all__ = ["PRECISIONS", "NumberFormat", "fitting"]


@frozen
class NumberFormat:
    """How numbers are kept: ``bits`` each, as floats or as integers with a scale per group.

    ``group``: so many weights in a row of a matrix (along its inputs) share a scale; 0: the whole row does, or there
    is none. Integers are symmetric: zero is zero, no offset is kept. A scale takes ``scale_bits``. ``activations``:
    whether activations can be kept so as well.
    """

    name: str
    kind: Literal["float", "int"]
    bits: int
    group: int = 0
    scale_bits: int = 0
    activations: bool = False

    def fault(self, module: ModuleView) -> str:
        """Return why a module's weight cannot be kept so, with what to do about it, or nothing where it can."""
        if self.kind == "float":
            return ""
        if len(module.shape) != 2 or module.kind == "norm":
            what = "a norm" if module.kind == "norm" else f"a vector of {math.prod(module.shape)}"
            return f"{self.name} is for matrices and this is {what}: keep it at 16 or 32 bits"
        inputs = module.shape[1]
        if self.group and inputs % self.group:
            fits = [one.name for one in PRECISIONS.values() if one.kind == "int" and one.takes(inputs)]
            return (
                f"{inputs} inputs are not a multiple of {self.name}'s groups of {self.group}: "
                f"choose {' or '.join(fits)}, or 16 bits"
            )
        return ""

    def takes(self, inputs: int) -> bool:
        """Return whether rows of so many inputs divide into groups."""
        return not self.group or inputs % self.group == 0

    def weight_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a weight of ``shape``, its scales included; each row starts at a whole byte."""
        inputs = shape[-1]
        rows = math.prod(shape[:-1])
        scales = 0 if self.kind == "float" else inputs // self.group if self.group else 1
        return rows * (-(-inputs * self.bits // 8) + -(-scales * self.scale_bits // 8))


def _formats(*formats: NumberFormat) -> Mapping[str, NumberFormat]:
    return MappingProxyType({one.name: one for one in formats})


PRECISIONS: Mapping[str, NumberFormat] = _formats(
    NumberFormat("float32", "float", 32, activations=True),
    NumberFormat("bfloat16", "float", 16, activations=True),
    NumberFormat("float16", "float", 16, activations=True),
    NumberFormat("int8", "int", 8, scale_bits=16, activations=True),
    NumberFormat("int5", "int", 5, group=32, scale_bits=16),
    NumberFormat("int4", "int", 4, group=128, scale_bits=16),
    NumberFormat("int4-g64", "int", 4, group=64, scale_bits=16),
    NumberFormat("int4-g32", "int", 4, group=32, scale_bits=16),
)
"""By name: floats, and symmetric integers with 16-bit scales. ``int8`` has a scale per row, and per token where
activations are kept so; ``int4`` groups of 128, ``int4-g64`` and ``int4-g32`` smaller ones; ``int5`` groups of 32."""

_SMALLER = ("int4", "int4-g64", "int4-g32", "int8")  # from the largest group to none


def fitting(wanted: str, inputs: int) -> str:
    """Return ``wanted``, or where its groups do not divide so many inputs, the next smaller groups that do.

    Those are the next of ``int4``, ``int4-g64``, ``int4-g32`` and at last ``int8``, which fits always.
    """
    own = PRECISIONS[wanted]
    if own.takes(inputs):
        return wanted
    smaller = [PRECISIONS[name] for name in _SMALLER]
    return next(one.name for one in smaller if one.takes(inputs) and (not one.group or one.group < own.group))
