"""The file that says how much attention blocks usually get by their place in a sequence."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Self

from attrs import frozen

from kimicore.errors import ConfigError
from kimicore.model.cache import cache_folder

__all__ = ["ImportanceTable", "table_path"]

_FORMAT: Final = "kimicore importance"
_VERSION: Final = 1
_MOST_BYTES: Final = 4 << 20
_MOST_VALUE: Final = 1e6


def table_path(fingerprint: str, block_tokens: int) -> Path:
    """Return where the table of a model is kept: ``importance/`` in the cache folder, under the model's fingerprint."""
    name = blake2b(f"{fingerprint} {block_tokens}".encode(), digest_size=16).hexdigest()
    return cache_folder() / "importance" / f"{name}.json"


@frozen
class ImportanceTable:
    """How much attention blocks of a model get by their place, 1 being the mean of those that were compared.

    ``model``: the model's fingerprint. ``samples``: texts that it was made from. ``classes``: names of the KV classes.
    ``values``: of each class, by block; NaN where too few samples tell.
    """

    model: str
    block_tokens: int
    samples: int
    classes: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]

    def write(self, path: Path) -> None:
        """Write the file, for its owner alone, whole or not at all; raises :class:`~kimicore.ConfigError`."""
        body = {
            "model": self.model,
            "block_tokens": self.block_tokens,
            "samples": self.samples,
            "classes": [
                {"name": name, "values": [None if math.isnan(one) else round(one, 4) for one in values]}
                for name, values in zip(self.classes, self.values, strict=True)
            ],
        }
        text = json.dumps({"format": _FORMAT, "version": _VERSION, "digest": _digest(body), **body}, indent=1)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".importance-", dir=path.parent)  # for its owner alone
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(text + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(name, path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error

    @classmethod
    def read(cls, path: Path, model: str, block_tokens: int, classes: Sequence[str]) -> Self:
        """Return the table of ``model``; raises :class:`~kimicore.ConfigError` that names the file and what is wrong.

        A file is refused that is damaged, of another version, of another model or block size, or that others may write.
        """
        body = _body(path)
        if body.get("model") != model:
            raise ConfigError(f"{path}: is the table of another model")
        if body.get("block_tokens") != block_tokens:
            raise ConfigError(f"{path}: is of blocks of {body.get('block_tokens')} tokens, not of {block_tokens}")
        try:
            names = tuple([one["name"] for one in body["classes"]])
            values = tuple([tuple([_value(one) for one in found["values"]]) for found in body["classes"]])
            samples = body["samples"]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}: is damaged: {error!r}") from error
        if names != tuple(classes):
            raise ConfigError(f"{path}: has the KV classes {', '.join(map(str, names))}, not {', '.join(classes)}")
        return cls(model, block_tokens, samples, names, values)


def _body(path: Path) -> dict[str, Any]:
    """Return what the file holds, once its owner, size, format, version and digest are as they should be."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if hasattr(os, "geteuid") and status.st_uid not in (0, os.geteuid()):
                raise ConfigError(f"{path}: belongs to another user")
            if status.st_mode & 0o022:
                raise ConfigError(f"{path}: can be written by other users")
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no table at {path}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{path}: is no importance table: it has over {_MOST_BYTES} bytes")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is no importance table, or damaged: {error}") from error
    if not isinstance(body, dict) or body.pop("format", None) != _FORMAT:
        raise ConfigError(f"{path}: is no importance table")
    version = body.pop("version", None)
    if version != _VERSION:
        raise ConfigError(f"{path}: has version {version!r}, and this one reads version {_VERSION}")
    if body.pop("digest", None) != _digest(body):
        raise ConfigError(f"{path}: is damaged: its digest is another one")
    return body


def _digest(body: dict[str, Any]) -> str:
    return blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()


def _value(one: Any) -> float:
    if one is None:
        return math.nan
    if isinstance(one, bool) or not isinstance(one, (int, float)) or not 0.0 <= one <= _MOST_VALUE:
        raise ValueError(f"{one!r} is no importance")
    return float(one)
