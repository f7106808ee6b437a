"""The folder of a quantized model: its weights in files of a good size, its config, its text side, its map."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kimicore import __version__
from kimicore.assembly import RECORD_FILE
from kimicore.errors import ConfigError
from kimicore.model.safetensors_header import read_safetensors
from kimicore.policies.precision.formats import PRECISIONS
from kimicore.policies.precision.resolving import ResolvedMap
from kimicore.quantize.files import Piece, disk_errors, join, write_json, write_shards
from kimicore.quantize.layout import quantization_config
from kimicore.quantize.partial import PartialRun
from kimicore.quantize.reading import ModelReader
from kimicore.quantize.text_files import write_text_files

__all__ = ["model_config", "read_record", "write_model"]

_FORMAT: Final = "kimicore quantize"
_VERSION: Final = 1
_CLASSES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
    }
)


def model_config(config: Mapping[str, Any], found: ResolvedMap) -> dict[str, Any]:
    """Return the ``config.json`` of a quantized model: the source's, with what is true of its weights now."""
    own = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    floats = Counter(one.precision for one in found.modules if PRECISIONS[one.precision].kind == "float")
    if floats:
        own["dtype" if "dtype" in own else "torch_dtype"] = floats.most_common(1)[0][0]
    if "architectures" not in own and own.get("model_type") in _CLASSES:
        own["architectures"] = [_CLASSES[own["model_type"]]]
    packed = quantization_config(found)
    return own if packed is None else own | {"quantization_config": packed}


def write_model(reader: ModelReader, partial: PartialRun, found: ResolvedMap, record: Mapping[str, Any]) -> int:
    """Write the finished folder ``model`` within a partial run's, and return the bytes of its weights."""
    folder = partial.folder / "model"
    with disk_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    paths = [partial.part_path("tables"), *(partial.layer_path(index) for index in range(len(reader.spec.layers)))]
    files = [read_safetensors(path) for path in paths]
    pieces = {name: Piece(name, file, stored) for file in files for name, stored in file.tensors.items()}
    sizes = {name: one.stored.size_bytes for name, one in pieces.items()}
    write_shards(folder, sizes, lambda path, names: join(path, [pieces[name] for name in names]))
    write_json(folder / "config.json", model_config(reader.source.config, found))
    write_text_files(reader.source, folder)
    tree = {
        "format": _FORMAT,
        "version": _VERSION,
        "kimicore": __version__,
        **record,
        "map": json.loads(found.to_json()),
    }
    write_json(folder / RECORD_FILE, tree)
    return sum(sizes.values())


def read_record(folder: Path) -> tuple[dict[str, Any], ResolvedMap]:
    """Return what a folder says of its making, and its map; raises :class:`~kimicore.ConfigError`."""
    path = folder / RECORD_FILE
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if tree["format"] != _FORMAT or tree["version"] != _VERSION:
            raise ValueError(f"format {tree['format']!r}, version {tree['version']!r}")
        return tree, ResolvedMap.from_json(json.dumps(tree["map"]))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: is no record of kimicore quantize, or damaged: {error!r:.200}") from error
