"""What a folder says of its quantized matrices, carried over to one with fewer layers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import evolve

from kimicore.assembly import RECORD_FILE
from kimicore.errors import ConfigError
from kimicore.model.folder_text import read_object
from kimicore.model.packed.schemes import read_schemes
from kimicore.model.safetensors_source import SafetensorsSource
from kimicore.model.skipping import LayerCut
from kimicore.policies.precision.resolving import ResolvedMap

__all__ = ["check_carried", "precision_map", "quantization"]

_KEYS: Final = ("quantization_config", "compression_config")
_ESCAPED: Final = re.compile(r"(?<!\w)layers\\\.(\d+)(?=\\\.|$)")


def quantization(source: SafetensorsSource, cut: LayerCut) -> dict[str, Any]:
    """Return what the folder's ``config.json`` says of quantization, by its key, with layers as they are called now."""
    if not any(cut.renamed(name) is not None for name in source.coded):
        return {}
    return {key: _without_empty_groups(_carried(one, cut)) for key, one in _told(source.path).items()}


def _told(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what a folder's config says of quantization as it stands there, by its key."""
    config = read_object(folder, "config.json", must=True)
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, dict) else {}):
        for key in _KEYS:
            if isinstance(place.get(key), dict):
                return {key: place[key]}
    return {}


def _carried(value: Any, cut: LayerCut) -> Any:
    """Return a value of the config in which every name of a layer is the new one, and those of lost ones are gone."""
    if isinstance(value, str):
        return _name(value, cut)
    if isinstance(value, list):
        pairs = [(one, _carried(one, cut)) for one in value]
        return [new for old, new in pairs if old is None or new is not None]
    if isinstance(value, dict):
        named = {_name(key, cut): _carried(one, cut) for key, one in value.items()}
        return {key: one for key, one in named.items() if key is not None}
    return value


def _name(text: str, cut: LayerCut) -> str | None:
    """Return a module's name, or a pattern that spells one layer's number, after the cut; None: that layer is gone."""
    found = _ESCAPED.search(text)
    if found is None:
        return cut.renamed(text)
    new = cut.renamed(f"layers.{found[1]}")
    return None if new is None else f"{text[: found.start(1)]}{new.rpartition('.')[2]}{text[found.end(1) :]}"


def _without_empty_groups(config: dict[str, Any]) -> dict[str, Any]:
    groups = config.get("config_groups")
    if not isinstance(groups, dict):
        return config
    return config | {"config_groups": {key: one for key, one in groups.items() if one.get("targets") != []}}


def check_carried(source: SafetensorsSource, cut: LayerCut, made: SafetensorsSource) -> None:
    """Refuse a written folder that means other matrices than it was cut from; raises :class:`~kimicore.ConfigError`.

    Patterns in somebody else's config may catch layers by their numbers in ways that cannot be told anew.
    """
    renamed = {name: new for name in source.names() if (new := cut.renamed(name)) is not None}
    wanted = {renamed[name]: (one.scheme, one.shape) for name, one in source.coded.items() if name in renamed}
    same = {name: (one.scheme, one.shape) for name, one in made.coded.items()} == wanted
    for one, other in zip(_told(source.path).values(), _told(made.path).values(), strict=False):  # none: all are plain
        before, after = read_schemes(source.path, one)[1], read_schemes(made.path, other)[1]
        for name, new in renamed.items():  # plain ones count too: other programs go by the config alone
            same &= before((name.removesuffix(".weight"),)) == after((new.removesuffix(".weight"),))
    if not same:
        raise ConfigError(
            f"{source.path / 'config.json'}: quantization_config names layers by patterns that cannot be told anew "
            "without some of them; prune the plain weights and quantize the result"
        )


def precision_map(folder: Path, cut: LayerCut) -> Mapping[str, Any] | None:
    """Return the precision map in the record beside a folder's weights, without the lost layers; None: there is none.

    Raises :class:`~kimicore.ConfigError` where the record cannot be read.
    """
    path = folder / RECORD_FILE
    if not folder.is_dir() or not path.exists():
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8")).get("map")
        if tree is None:
            return None
        whole = ResolvedMap.from_json(json.dumps(tree))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (AttributeError, ConfigError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: holds no precision map that can be read: {error!s:.200}") from error
    modules = [
        evolve(one, module=evolve(one.module, name=new))
        for one in whole.modules
        if (new := cut.renamed(one.module.name)) is not None
    ]
    found: Mapping[str, Any] = json.loads(evolve(whole, modules=tuple(modules)).to_json())
    return found
