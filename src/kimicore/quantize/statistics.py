"""What rounding needs to know of the inputs of a matrix."""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor

__all__ = ["InputStatistics"]


@define(eq=False)
class InputStatistics:
    """Inputs x [n, C] of a matrix, summed up: ``gram`` = sum of x x^T [C, C], ``sums`` = sum of |x| [C], float32.

    With them the squared error that a changed weight makes in all outputs is known without the inputs: for a
    difference E [O, C] it is the trace of E gram E^T.
    """

    gram: Tensor
    sums: Tensor
    count: int = field(default=0)

    @classmethod
    def empty(cls, inputs: int) -> InputStatistics:
        """Return the statistics of nothing yet."""
        return cls(torch.zeros((inputs, inputs)), torch.zeros(inputs))

    @classmethod
    def of(cls, x: Tensor) -> InputStatistics:
        """Return the statistics of inputs [..., C]."""
        found = cls.empty(x.shape[-1])
        for part in torch.split(x.reshape(-1, x.shape[-1]), 1 << 12):
            found.add(part)
        return found

    def add(self, x: Tensor) -> None:
        """Take in inputs [n, C] float32."""
        self.gram.addmm_(x.t(), x)
        self.sums += x.abs().sum(dim=0)
        self.count += len(x)

    @property
    def mean_abs(self) -> Tensor:
        """The mean absolute input of each channel [C]."""
        return self.sums / max(1, self.count)

    def scaled(self, scales: Tensor) -> InputStatistics:
        """Return the statistics of the inputs divided by ``scales`` [C]."""
        inverse = 1.0 / scales
        return InputStatistics(self.gram * inverse.unsqueeze(1) * inverse, self.sums * inverse, self.count)

    def error(self, difference: Tensor) -> Tensor:
        """Return the squared error [O] that a difference of a weight [O, C] makes in each output, over all inputs."""
        return ((difference @ self.gram) * difference).sum(dim=1)

    def blocks(self, width: int) -> Tensor:
        """Return the diagonal blocks of ``gram`` [G, width, width], the last filled with zeros."""
        inputs = len(self.gram)
        groups = -(-inputs // width)
        found = torch.zeros((groups, width, width))
        for at in range(groups):
            part = self.gram[at * width : (at + 1) * width, at * width : (at + 1) * width]
            found[at, : len(part), : len(part)] = part
        return found
