"""The folder of a pruned model: the tensors that are left under new names, in files of a good size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from kimicore.errors import ConfigError
from kimicore.model.modules import modules_of
from kimicore.model.safetensors_source import SafetensorsSource
from kimicore.model.skipping import LayerCut, WithoutLayers
from kimicore.model.source import WeightSource
from kimicore.model.spec import spec_from_config
from kimicore.policies.precision.named import policy_named, resolved_by
from kimicore.pruning.carrying import check_carried, quantization
from kimicore.quantize.files import Piece, join, write_json, write_safetensors, write_shards
from kimicore.quantize.finish import model_config
from kimicore.quantize.text_files import write_text_files

__all__ = ["check_storable", "stored_bytes", "write_folder"]

_STORABLE: Final = ("BF16", "F16", "F32", "I32", "I64", "I8")


def check_storable(source: WeightSource) -> None:
    """Refuse tensors of a type that no folder is written with; raises :class:`~kimicore.ConfigError`."""
    if isinstance(source, SafetensorsSource):
        for name, stored in source.stored_tensors.items():
            if stored.dtype not in _STORABLE:
                raise ConfigError(
                    f"{source.path}: tensor {name[:200]!r} is of the type {stored.dtype}, which is not carried over; "
                    f"types that are: {', '.join(_STORABLE)}"
                )


def stored_bytes(source: WeightSource, cut: LayerCut) -> dict[str, int]:
    """Return what each tensor that is left takes in the new folder, by its new name."""
    if isinstance(source, SafetensorsSource):
        sizes = {name: stored.size_bytes for name, stored in source.stored_tensors.items()}
    else:
        sizes = {name: 2 * torch.Size(source.shape(name)).numel() for name in source.names()}
    return {new: size for name, size in sizes.items() if (new := cut.renamed(name)) is not None}


def write_folder(source: WeightSource, cut: LayerCut, folder: Path, record: Mapping[str, Any], name: str) -> int:
    """Write a source without some layers into an empty folder, and return the bytes of its weights.

    Tensors of a safetensors folder are the same bytes as they were, quantized ones as well; those of other files come
    in bfloat16. ``record``: what is told of the making, under ``name``.

    Raises :class:`~kimicore.ConfigError` where it cannot be written, and :class:`~kimicore.ModelLoadError`.
    """
    sizes = stored_bytes(source, cut)
    if isinstance(source, SafetensorsSource):
        _write_stored(source, cut, folder, sizes)
        config = cut.config(source.config) | quantization(source, cut)
        config.pop("auto_map", None)  # code that is never run
    else:
        view = WithoutLayers(source, cut)
        write_shards(
            folder,
            sizes,
            lambda path, names: write_safetensors(path, {one: view.read(one, torch.bfloat16) for one in names}),
        )
        plain = resolved_by(policy_named("none"), modules_of(spec_from_config(view.config)))
        config = model_config(view.config, plain)
    write_json(folder / "config.json", config)
    write_text_files(source, folder)
    write_json(folder / name, record)
    made = SafetensorsSource(folder)
    if isinstance(source, SafetensorsSource):
        check_carried(source, cut, made)
    return sum(sizes.values())


def _write_stored(source: SafetensorsSource, cut: LayerCut, folder: Path, sizes: Mapping[str, int]) -> None:
    """Write the tensors of a folder as they lie in its files."""
    pieces = {
        new: Piece(new, *source.located(name))
        for name in source.stored_tensors
        if (new := cut.renamed(name)) is not None
    }
    write_shards(folder, sizes, lambda path, names: join(path, [pieces[one] for one in names]))
