"""What one run of a series leaves to the next: layers that come out the same, so that they are not computed again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import define, field, frozen

from kimicore.policies.precision.resolving import ResolvedMap
from kimicore.quantize.files import disk_errors
from kimicore.quantize.partial import PartialRun

__all__ = ["EarlierLayers"]


@frozen
class _Run:
    """A finished run: its layers' files, its map, and what else it was a run of."""

    partial: PartialRun
    found: ResolvedMap
    record: Mapping[str, Any]


@define(eq=False)
class EarlierLayers:
    """The layers of the last run of a series, in ``folder``; each run of the series is given the same one of these.

    What is taken over is what would come out the same to the last bit. A layer that is rounded without looking at its
    inputs depends on its own precisions alone. Where inputs are looked at, a layer depends on those of all layers
    before it as well, and of the embedding: then the layers up to the first one that differs are taken over.
    """

    folder: Path
    _last: _Run | None = field(default=None, init=False)

    def give(self, partial: PartialRun, found: ResolvedMap, record: Mapping[str, Any], *, calibrated: bool) -> None:
        """Move what is the same in a run of the map ``found`` into its folder, and delete the rest.

        ``record``: what it is a run of, but for its map; a run of anything else takes nothing over. ``calibrated``:
        whether it looks at inputs.
        """
        last, self._last = self._last, None
        if last is not None and last.record == record:
            same = _same_layers(last.found, found)
            if calibrated:
                partial.take_first(last.partial, _first(same) if _same_embedding(last.found, found) else 0)
            else:
                partial.take(last.partial, [index for index, is_same in enumerate(same) if is_same])
        self.clear()

    def keep(self, partial: PartialRun, found: ResolvedMap, record: Mapping[str, Any]) -> None:
        """Take over the folder of a run that is finished."""
        self.clear()
        with disk_errors(self.folder):
            partial.folder.rename(self.folder)
        self._last = _Run(PartialRun(self.folder, partial.digest, partial.every), found, dict(record))

    def clear(self) -> None:
        """Delete what is kept."""
        self._last = None
        if self.folder.exists():
            with disk_errors(self.folder):
                shutil.rmtree(self.folder)


def _by_layer(found: ResolvedMap) -> dict[int, list[tuple[str, str]]]:
    """Return the names and precisions of each layer's modules, by its number."""
    layers: dict[int, list[tuple[str, str]]] = {}
    for one in found.modules:
        if one.module.name.startswith("layers."):
            layers.setdefault(int(one.module.name.split(".")[1]), []).append((one.module.name, one.precision))
    return layers


def _same_layers(old: ResolvedMap, new: ResolvedMap) -> list[bool]:
    """Return for each layer whether all its modules have the same precision in two maps."""
    before, after = _by_layer(old), _by_layer(new)
    return [before.get(index) == after[index] for index in range(len(after))]


def _first(same: list[bool]) -> int:
    """Return the number of layers before the first that is not the same."""
    return same.index(False) if False in same else len(same)


def _same_embedding(old: ResolvedMap, new: ResolvedMap) -> bool:
    return old.precision("embed_tokens") == new.precision("embed_tokens")
