"""What each matrix costs: the loss when it alone is rounded, at each precision that it could have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from attrs import define, field, frozen
from torch import Tensor

from kimicore.kernels.packed_linear.reference import unpack
from kimicore.model.packed.rounding import round_to_nearest
from kimicore.policies.precision.formats import PRECISIONS, fitting
from kimicore.policies.precision.resolving import ResolvedMap, ResolvedModule
from kimicore.quantize.decoder import Decoder
from kimicore.quantize.reading import ModelReader

__all__ = ["RUNGS", "Cost", "measure_costs", "rungs_of", "total"]

RUNGS: Final = ("int4", "int4-g64", "int4-g32", "int5", "int8", "bfloat16")
"""Precisions from the coarsest to 16 bits."""
_EVERY: Final = 4  # positions whose logits are compared: the output matrix is the dearest of all

Progress = Callable[[str, int, int], None]


@frozen
class Cost:
    """A matrix and the mean KL(float32 || rounded) in nats a token when it alone has each of its precisions."""

    module: ResolvedModule
    losses: Mapping[str, float]


def rungs_of(module: ResolvedModule) -> tuple[str, ...]:
    """Return the precisions that a matrix can have from its own on upwards, each larger than the one before."""
    inputs = module.module.shape[1]
    found = [module.precision]
    start = RUNGS.index(module.precision) + 1 if module.precision in RUNGS else len(RUNGS) - 1
    for name in RUNGS[start:]:
        size = PRECISIONS[name].weight_bytes(module.module.shape)
        if fitting(name, inputs) == name and size > PRECISIONS[found[-1]].weight_bytes(module.module.shape):
            found.append(name)
    return tuple(found)


def measure_costs(
    reader: ModelReader, found: ResolvedMap, token_ids: Tensor, progress: Progress | None = None
) -> tuple[Cost, ...]:
    """Return the costs of all matrices that a map rounds, on sequences [N, T].

    The loss at the map's own precision is measured, with scales of rounding to nearest; that at finer ones is as much
    smaller as the weights' squared error is. One layer is in memory at a time, and a stream of activations per layer.
    """
    with torch.inference_mode():
        return _Bench(reader, token_ids).costs(found, progress)


@define(eq=False)
class _Bench:
    """A model's layers, what enters each of them, and what comes out in the end."""

    reader: ModelReader
    token_ids: Tensor
    decoder: Decoder = field(init=False)
    head: Tensor = field(init=False)
    streams: list[Tensor] = field(init=False)
    wanted: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        reader = self.reader
        self.decoder = Decoder.make(reader.spec, self.token_ids.shape[1])
        table = reader.embedding()
        own = reader.own_head()
        self.head = table if own is None else own
        self.streams = [self.decoder.embed(table, self.token_ids)]
        for index in range(len(reader.spec.layers)):
            self.streams.append(self.decoder.layer(self.streams[-1], reader.layer(index), index))
        self.wanted = self.log_probabilities(self.streams[-1], self.head)

    def log_probabilities(self, hidden: Tensor, head: Tensor) -> Tensor:
        kept = hidden[:, _EVERY - 1 :: _EVERY]
        found: Tensor = self.decoder.logits(kept, self.reader.final_norm(), head).log_softmax(-1)
        return found

    def loss(self, hidden: Tensor, start: int, head: Tensor) -> float:
        """Return the mean KL where ``hidden`` enters layer ``start``."""
        for index in range(start, len(self.reader.spec.layers)):
            hidden = self.decoder.layer(hidden, self.reader.layer(index), index)
        found = self.log_probabilities(hidden, head)
        return max(0.0, float((self.wanted.exp() * (self.wanted - found)).sum(dim=-1).mean()))

    def costs(self, found: ResolvedMap, progress: Progress | None) -> tuple[Cost, ...]:
        rounded = [one for one in found.modules if PRECISIONS[one.precision].kind == "int"]
        costs = []
        for number, one in enumerate(rounded):
            if progress is not None:
                progress("sensitivity", number, len(rounded))
            name = one.module.name
            weight, loss = self.table_cost(one) if not name.startswith("layers.") else self.layer_cost(one)
            errors = {rung: _error(weight, rung) for rung in rungs_of(one)}
            scale = loss / errors[one.precision] if errors[one.precision] else 0.0
            costs.append(Cost(one, {rung: scale * error for rung, error in errors.items()}))
        return tuple(costs)

    def layer_cost(self, one: ResolvedModule) -> tuple[Tensor, float]:
        """Return a layer's matrix and the loss when it is rounded."""
        _, number, name = one.module.name.split(".", 2)
        index, key = int(number), f"{name}.weight"
        weights = self.reader.layer(index)
        weight = weights[key]
        weights[key] = unpack(round_to_nearest(weight, one.precision, name=one.module.name), torch.float32)
        return weight, self.loss(self.decoder.layer(self.streams[index], weights, index), index + 1, self.head)

    def table_cost(self, one: ResolvedModule) -> tuple[Tensor, float]:
        """Return the embedding or the head and the loss when it is rounded; a tied embedding is both."""
        layers = len(self.reader.spec.layers)
        weight = self.head if one.module.name == "lm_head" else self.reader.embedding()
        rounded = unpack(round_to_nearest(weight, one.precision, name=one.module.name), torch.float32)
        if one.module.name == "lm_head":
            return weight, self.loss(self.streams[-1], layers, rounded)
        head = rounded if self.reader.head is None else self.head
        return weight, self.loss(self.decoder.embed(rounded, self.token_ids), 0, head)


def _error(weight: Tensor, precision: str) -> float:
    if PRECISIONS[precision].kind == "float":
        return 0.0
    return float((unpack(round_to_nearest(weight, precision), torch.float32) - weight).square().sum())


def total(costs: Sequence[Cost], precisions: Mapping[str, str]) -> float:
    """Return the sum of the losses that modules have at given precisions."""
    return sum(one.losses[precisions[one.module.module.name]] for one in costs)
