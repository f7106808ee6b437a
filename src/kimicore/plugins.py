"""Finding a policy by name, and keeping its faults from hurting the engine.

Built-in policies are named here and imported when chosen. Others are found through the entry-point groups
``kimicore.eviction``, ``kimicore.batching``, ``kimicore.padding`` and ``kimicore.precision``; nothing that is
installed is imported unless its name is asked for, and a built-in is never replaced.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from kimicore.errors import ConfigError, PluginError

__all__ = ["KINDS", "PolicyFaults", "known", "resolve"]

_log = logging.getLogger("kimicore")

KINDS: Mapping[str, Mapping[str, str]] = {
    "batching": {
        "fcfs": "kimicore.policies.batching.fcfs:Fcfs",
        "priority": "kimicore.policies.batching.priority:Priority",
    },
    "eviction": {"lru": "kimicore.policies.eviction.lru:Lru"},
    "padding": {
        "max-len": "kimicore.policies.padding.max_len:MaxLen",
        "packed": "kimicore.policies.padding.packed:Packed",
    },
    "precision": {},
}


def resolve(kind: str, name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """Return the policy ``name`` of ``kind`` ("batching", "eviction", "padding"), made with ``settings``.

    Raises :class:`~kimicore.PluginError` for an unknown name (with the known ones), for a name that two
    installed packages claim or that belongs to a built-in, and for a policy that cannot be imported or made.
    """
    if kind not in KINDS:
        raise PluginError(f"there is no kind of policy {kind!r}; kinds are {', '.join(sorted(KINDS))}")
    found = _named(kind, name)
    if not found:
        raise PluginError(f"{kind}={name!r} is not known; known are: {', '.join(sorted(known(kind)))}")
    if len(found) > 1:
        origins = ", ".join(f"{target} ({origin})" for target, origin in found)
        raise PluginError(f"{kind}={name!r} is claimed more than once: {origins}; remove or rename one")
    target, origin = found[0]
    try:
        return _load(target)(**(settings or {}))
    except ConfigError:
        raise
    except Exception as error:
        raise PluginError(f"{kind}={name!r} ({target}, {origin}) cannot be used: {error!r}") from error


def known(kind: str) -> dict[str, str]:
    """Return the names of a kind with where each comes from ("built in", or the distribution's name)."""
    names = {name: origin for name, _, origin in _installed(f"kimicore.{kind}")}
    return {**names, **dict.fromkeys(KINDS[kind], "built in")}


def _named(kind: str, name: str) -> list[tuple[str, str]]:
    found = [(KINDS[kind][name], "built in")] if name in KINDS[kind] else []
    for other, target, origin in _installed(f"kimicore.{kind}"):
        if other == name and (target, origin) not in found:
            found.append((target, origin))
    return sorted(found)


def _load(target: str) -> Any:
    module, _, attribute = target.partition(":")
    loaded: Any = import_module(module)
    for part in attribute.split(".") if attribute else ():
        loaded = getattr(loaded, part)
    return loaded


def _installed(group: str) -> Iterator[tuple[str, str, str]]:
    """Yield ``(name, target, distribution)`` of a group.

    The library raises out of its whole scan when one installed file is malformed, so each folder of the path
    is scanned alone, and a folder that fails is read one distribution at a time.
    """
    try:
        import entrypoints
    except ImportError:  # without the library there are built-ins only
        return
    seen: set[tuple[str, str]] = set()
    for folder in sys.path:
        for entry in _scan(entrypoints, group, folder):
            origin = entry.distro.name if entry.distro is not None else "unknown"
            target = f"{entry.module_name}:{entry.object_name}" if entry.object_name else entry.module_name
            if (entry.name, origin) not in seen:  # a distribution found twice on the path counts once
                seen.add((entry.name, origin))
                yield entry.name, target, origin


def _scan(entrypoints: Any, group: str, folder: str) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one malformed line of a neighbour is no news to our caller
        try:
            return list(entrypoints.get_group_all(group, path=[folder]))
        except Exception as error:
            _log.warning("entry points in %s cannot be scanned together (%r); reading them one by one", folder, error)
            return list(_one_by_one(entrypoints, group, folder))


def _one_by_one(entrypoints: Any, group: str, folder: str) -> Iterator[Any]:
    import configparser
    import pathlib

    for file in sorted(pathlib.Path(folder).glob("*-info/entry_points.txt")):
        if file.parent.suffix not in (".dist-info", ".egg-info"):
            continue
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        try:
            parser.read([file], encoding="utf-8")
            lines = dict(parser[group]) if group in parser else {}
        except Exception as error:
            _log.warning("%s is left out: %r", file, error)
            continue
        distro = entrypoints.Distribution.from_name_version(file.parent.stem)
        for name, line in lines.items():
            try:
                yield entrypoints.EntryPoint.from_string(line, name, distro)
            except Exception as error:
                _log.warning("%s in %s is left out: %r", name, file, error)


class PolicyFaults:
    """Counts what a policy did wrong, warns about it, and says when it has to be set aside.

    ``kind`` and ``name`` are the policy's; after ``limit`` faults ``set_aside`` is True and the built-in
    default serves for good. The 1st, 2nd, 4th, 8th ... fault is logged at warning level.
    """

    def __init__(self, kind: str, name: str, limit: int = 16) -> None:
        self.kind = kind
        self.name = name
        self.limit = limit
        self.count = 0
        self.last = ""

    @property
    def set_aside(self) -> bool:
        """Whether the policy is not asked any more."""
        return self.count >= self.limit

    def note(self, promise: str, error: BaseException | None = None) -> None:
        """Count one broken promise; ``error`` is what the policy raised, if it did."""
        self.count += 1
        self.last = promise if error is None else f"{promise}: {error!r}"
        if self.count & (self.count - 1) == 0 or self.count == self.limit:
            then = "it is set aside, the default serves from now on" if self.set_aside else "the default serves"
            _log.warning("%s policy %r, fault %d: %s; %s", self.kind, self.name, self.count, self.last, then)
