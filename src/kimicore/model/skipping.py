"""A model without some of its layers: a view of its files in which the others have closed ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from attrs import frozen

from kimicore.errors import ConfigError
from kimicore.model.source import WeightSource
from kimicore.model.spec import spec_from_config
from kimicore.model.spec_fields import text_config
from kimicore.text.source import TextSource

if TYPE_CHECKING:
    import torch

    from kimicore.kernels.packed_linear.layout import PackedWeight

__all__ = ["LayerCut", "WithoutLayers", "without_layers"]

_LAYER: Final = re.compile(r"(?<!\w)(layers\.)(\d+)(?=\.|$)")
_PATTERNS: Final = ("sliding_window_pattern", "_sliding_window_pattern")


@frozen
class LayerCut:
    """Which of a model's ``layers`` are ``kept``, in their order; made by :meth:`of`."""

    layers: int
    kept: tuple[int, ...]

    @classmethod
    def of(cls, layers: int, skipped: Sequence[int]) -> Self:
        """Return the cut that takes away the ``skipped`` layers, counted from 0.

        Raises :class:`~kimicore.ConfigError` for one that the model has not, one named twice, and where none is left.
        """
        for at, layer in enumerate(skipped):
            if not 0 <= layer < layers:
                raise ConfigError(
                    f"skip_layers[{at}]={layer}: the model has {layers} layers, numbered from 0 to {layers - 1}"
                )
        gone = set(skipped)
        if len(gone) < len(skipped):
            raise ConfigError(f"skip_layers={tuple(skipped)}: name each layer once")
        if len(gone) == layers:
            raise ConfigError(f"skip_layers={tuple(skipped)}: these are all {layers} layers; leave at least one")
        return cls(layers, tuple([one for one in range(layers) if one not in gone]))

    @property
    def skipped(self) -> tuple[int, ...]:
        """The layers that are gone, in their order."""
        return tuple([one for one in range(self.layers) if one not in self.kept])

    def renamed(self, name: str) -> str | None:
        """Return what a tensor or module is called after the cut; None where its layer is gone.

        A name of no layer, or of one that the model has not, stays as it is.
        """
        found = _LAYER.search(name)
        if found is None or int(found[2]) >= self.layers:
            return name
        layer = int(found[2])
        if layer not in self.kept:
            return None
        return f"{name[: found.start(2)]}{self.kept.index(layer)}{name[found.end(2) :]}"

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model's configuration after the cut.

        Where windows followed from a layer's number, they are told layer by layer now. Raises
        :class:`~kimicore.ModelLoadError` for a configuration that is out of order.
        """
        spec = spec_from_config(config)
        arch, own = text_config(config)
        found = {**own, "model_type": arch.name, "num_hidden_layers": len(self.kept)}
        types = own.get("layer_types")
        if types is not None:
            found["layer_types"] = [types[one] for one in self.kept]
        elif arch.windows == "pattern" or (arch.windows == "late" and any(one.window for one in spec.layers)):
            names = ["full_attention" if one.window is None else "sliding_attention" for one in spec.layers]
            found["layer_types"] = [names[one] for one in self.kept]
        if arch.windows == "pattern":
            found = {key: value for key, value in found.items() if key not in _PATTERNS}
        return found


class WithoutLayers:
    """A source with fewer layers; those that are left are numbered anew, and the others are never read.

    Raises :class:`~kimicore.ModelLoadError` from the constructor for a configuration that is out of order.
    """

    def __init__(self, source: WeightSource, cut: LayerCut) -> None:
        self._source = source
        self._config = cut.config(source.config)
        renamed = {name: cut.renamed(name) for name in source.names()}
        self._old = {new: name for name, new in renamed.items() if new is not None}
        text = f"{source.fingerprint} without layers {cut.skipped}"
        self._fingerprint = blake2b(text.encode(), digest_size=32).hexdigest()

    @property
    def path(self) -> Path:
        """The file or folder that the whole model lies in."""
        return self._source.path

    @property
    def fingerprint(self) -> str:
        """Digest of the whole model's and of which layers are gone."""
        return self._fingerprint

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of a model of so many layers."""
        return self._config

    @property
    def text(self) -> TextSource:
        """What the tokenizer and the chat template are built from."""
        return self._source.text

    def names(self) -> Sequence[str]:
        """Names of the tensors that are left, by their new numbers."""
        return list(self._old)

    def _name(self, name: str) -> str:
        return self._old.get(name, f"{name} (of the layers that are left)")  # the source tells that it is missing

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, output features first."""
        return self._source.shape(self._name(name))

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor as ``dtype``, as the source reads it."""
        return self._source.read(self._name(name), dtype)

    def packed(self, name: str) -> PackedWeight | None:
        """Return a matrix as the file has quantized it, or None where it has it as floats."""
        return self._source.packed(self._name(name))


def without_layers(source: WeightSource, skipped: Sequence[int]) -> WeightSource:
    """Return the model of a source without some layers, as a source; itself where none is ``skipped``.

    Raises :class:`~kimicore.ConfigError` where the model has no such layers, and :class:`~kimicore.ModelLoadError`.
    """
    if not skipped:
        return source
    layers = len(spec_from_config(source.config).layers)
    return WithoutLayers(source, LayerCut.of(layers, skipped))
