"""Which layers go: one after another, each time the one that the model misses least."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from attrs import frozen

from kimicore.checks import integer
from kimicore.errors import ConfigError

__all__ = ["CANDIDATES", "MEASURES", "Choice", "Removal", "check_count", "choose"]

MEASURES: Final = ("influence", "kl")
CANDIDATES: Final = 4
"""Layers of least influence whose loss is measured before one goes."""

Influence = Callable[[Sequence[int]], Sequence[float]]
"""From the layers that are left, in their order, to the influence of each."""


@frozen
class Removal:
    """A layer that goes, by its number in the whole model.

    ``influence``: its own among the layers that were left then. ``kl``: the loss of the model once it is gone as well,
    against the whole one; None: not measured.
    """

    layer: int
    influence: float
    kl: float | None = None


@frozen
class Choice:
    """The influence of each layer in the whole model, and the layers that go, in their order of going."""

    influence: tuple[float, ...]
    removals: tuple[Removal, ...]

    @property
    def skip_layers(self) -> tuple[int, ...]:
        """The layers that go, by number: a value for :attr:`~kimicore.EngineConfig.skip_layers`."""
        return tuple(sorted(one.layer for one in self.removals))

    def table(self) -> str:
        """Return each layer's influence as a line of text, with its turn and the loss behind it where it goes."""
        turns = {one.layer: (turn, one) for turn, one in enumerate(self.removals, 1)}
        lines = [f"{'layer':>5}  {'influence':>9}"]
        for layer, influence in enumerate(self.influence):
            line = f"{layer:>5}  {influence:>9.5f}"
            if layer in turns:
                turn, one = turns[layer]
                line += f"  goes as number {turn}, at {one.influence:.5f}"
                line += "" if one.kl is None else f", KL then {one.kl:.5f}"
            lines.append(line)
        return "\n".join(lines)


def check_count(count: int, layers: int | None = None) -> int:
    """Return how many of a model's ``layers`` (None: not known yet) go; raises :class:`~kimicore.ConfigError`."""
    integer("layers", count, 1, None, ConfigError)
    if layers is not None and count >= layers:
        raise ConfigError(f"layers={count}: the model has {layers}, and at least one must be left")
    return count


def choose(layers: int, count: int, influence: Influence, loss: Callable[[Sequence[int]], float] | None) -> Choice:
    """Return which ``count`` of a model's ``layers`` go; of two alike the first one.

    After each removal the influence of those that are left is measured anew. With ``loss``, which takes the layers that
    would be left, the :data:`CANDIDATES` of least influence are tried, and the one whose loss is least goes.

    Raises :class:`~kimicore.ConfigError` for a count under 1, or one that leaves no layer.
    """
    check_count(count, layers)
    kept = list(range(layers))
    first: tuple[float, ...] = ()
    removals: list[Removal] = []
    for _ in range(count):
        found = dict(zip(kept, influence(kept), strict=True))
        first = first or tuple(found.values())
        ranked = sorted(kept, key=lambda one: (found[one], one))
        if loss is None:
            gone, kl = ranked[0], None
        else:
            losses = {one: loss([other for other in kept if other != one]) for one in ranked[:CANDIDATES]}
            gone = min(losses, key=lambda one: (losses[one], found[one], one))
            kl = losses[gone]
        removals.append(Removal(gone, found[gone], kl))
        kept.remove(gone)
    return Choice(first, tuple(removals))
