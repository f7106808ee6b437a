"""The folder of a run that is not over: what it is a run of, and how far it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from attrs import frozen
from torch import Tensor

from kimicore.errors import ConfigError, KimiCoreError
from kimicore.model.safetensors_header import read_safetensors
from kimicore.quantize.files import disk_errors, read_tensor, write_json, write_safetensors

__all__ = ["PartialRun"]

_STATE: Final = "state.json"


@frozen
class PartialRun:
    """A folder beside the result's, whose layers are those of the run with this ``digest``.

    What goes into a layer is deleted once the layer is done, but into each ``every``-th (0: none is kept).
    """

    folder: Path
    digest: str
    every: int = 0

    @classmethod
    def open(cls, out: Path, digest: str, what: dict[str, Any], *, anew: bool, every: int = 0) -> PartialRun:
        """Return the run that goes on in ``out``'s partial folder, or a new one.

        Raises :class:`~kimicore.ConfigError` where that folder holds another run, unless it is to begin ``anew``.
        """
        folder = out.with_name(f"{out.name}.partial")
        found = cls(folder, digest, every)
        if folder.exists():
            if found._is_own():
                return found
            if not anew:
                raise ConfigError(
                    f"{folder}: holds an interrupted run of another model, map, method or setting; "
                    "delete it, name another --out, or give --overwrite"
                )
            with disk_errors(folder):
                shutil.rmtree(folder)
        with disk_errors(folder):
            folder.mkdir()
        write_json(folder / _STATE, {"digest": digest, **what})
        return found

    def _is_own(self) -> bool:
        try:
            state = json.loads((self.folder / _STATE).read_text(encoding="utf-8"))
            return isinstance(state, dict) and state.get("digest") == self.digest
        except (OSError, ValueError):
            return False

    def layer_path(self, index: int) -> Path:
        """Return where a layer lies."""
        return self.folder / f"layer-{index:05}.safetensors"

    def part_path(self, name: str) -> Path:
        """Return where what belongs to no layer lies."""
        return self.folder / f"{name}.safetensors"

    def _hidden_path(self, index: int) -> Path:
        return self.folder / f"hidden-{index:05}.safetensors"

    def done_layers(self) -> int:
        """Return how many layers are done and sound, from the first on."""
        count = 0
        while self.has_layer(count):
            count += 1
        return count

    def has_layer(self, index: int) -> bool:
        """Return whether a layer is done and sound."""
        return self._is_sound(self.layer_path(index))

    @staticmethod
    def _is_sound(path: Path) -> bool:
        if not path.exists():
            return False
        try:
            read_safetensors(path)
        except KimiCoreError:
            return False
        return True

    def hidden(self, done: int) -> Tensor | None:
        """Return what came out of the last of ``done`` layers, or None where it is not there."""
        path = self._hidden_path(done)
        return read_tensor(path, "hidden") if self._is_sound(path) else None

    def keep(self, index: int, tensors: dict[str, Tensor], hidden: Tensor | None) -> None:
        """Keep a layer and what came out of it; a layer's file is there only when all that follows it needs is."""
        if hidden is not None:
            write_safetensors(self._hidden_path(index + 1), {"hidden": hidden})
        write_safetensors(self.layer_path(index), tensors)
        if not self.every or index % self.every:
            self._hidden_path(index).unlink(missing_ok=True)

    def take(self, other: PartialRun, layers: Sequence[int]) -> None:
        """Move layers of another run here, where they would be the same; those that are here already stay."""
        for index in layers:
            self._move(other.layer_path(index), self.layer_path(index))

    def take_first(self, other: PartialRun, most: int) -> None:
        """Move another run's first layers here, at most so many, and what came out of them.

        It ends with a layer whose outputs are there: a later one could not be built on.
        """
        count = next((index for index in range(most, 0, -1) if other._is_sound(other._hidden_path(index))), 0)
        for index in range(1, count + 1):
            if other._hidden_path(index).exists():
                self._move(other._hidden_path(index), self._hidden_path(index))
        self.take(other, range(count))

    @staticmethod
    def _move(old: Path, new: Path) -> None:
        if not new.exists():
            with disk_errors(new):
                old.replace(new)
