"""The map that a model is quantized by, from a policy's name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kimicore.model.load import open_source
from kimicore.model.modules import modules_of
from kimicore.model.source import WeightSource
from kimicore.model.spec import spec_from_config
from kimicore.policies.precision.named import policy_named, resolved_by
from kimicore.policies.precision.resolving import ResolvedMap

__all__ = ["precision_map"]


def precision_map(
    model: str | os.PathLike[str] | WeightSource, name: str = "asymmetric", settings: Mapping[str, Any] | None = None
) -> ResolvedMap:
    """Return the precision of each of a model's modules, as a named policy gives it.

    ``model``: an alias, folder, GGUF file or hub id, or an opened source; of its files only the configuration is read.
    ``name``, ``settings``: what ``--map`` and ``--set`` of ``kimicore quantize`` are.

    Raises :class:`~kimicore.PluginError` and :class:`~kimicore.ConfigError` for a policy that is not there, settings
    that it does not take and a map that does not fit the model, and :class:`~kimicore.ModelLoadError` for a model that
    cannot be read.
    """
    policy = policy_named(name, settings)
    source = open_source(model) if isinstance(model, (str, os.PathLike)) else model
    return resolved_by(policy, modules_of(spec_from_config(source.config)))
