"""Finding a policy by name, and making it with its settings.

Built-in policies are named here and imported when chosen. Others are found through the entry-point groups
``kimicore.eviction``, ``kimicore.batching``, ``kimicore.padding`` and ``kimicore.precision``; nothing that is
installed is imported unless its name is asked for, and a built-in is never replaced.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from typing import Any

from kimicore.config import EngineConfig
from kimicore.errors import ConfigError, PluginError
from kimicore.guard import RAISED, PolicyFaults

__all__ = ["KINDS", "built_in", "faults_of", "known", "resolve", "started"]

_log = logging.getLogger("kimicore")

KINDS: Mapping[str, Mapping[str, str]] = {
    "batching": {
        "fcfs": "kimicore.policies.batching.fcfs:Fcfs",
        "priority": "kimicore.policies.batching.priority:Priority",
        "shortest-remaining": "kimicore.policies.batching.shortest_remaining:ShortestRemaining",
        "tiered": "kimicore.policies.batching.tiered:Tiered",
    },
    "eviction": {
        "activity-importance": "kimicore.policies.eviction.activity_importance:ActivityImportance",
        "arc": "kimicore.policies.eviction.arc:Arc",
        "lfu": "kimicore.policies.eviction.lfu:Lfu",
        "lru": "kimicore.policies.eviction.lru:Lru",
        "s3-fifo": "kimicore.policies.eviction.s3_fifo:S3Fifo",
    },
    "padding": {
        "lcm": "kimicore.policies.padding.lcm:Lcm",
        "max-len": "kimicore.policies.padding.max_len:MaxLen",
        "packed": "kimicore.policies.padding.packed:Packed",
    },
    "precision": {
        "asymmetric": "kimicore.policies.precision.asymmetric:Asymmetric",
        "custom": "kimicore.policies.precision.custom:Custom",
        "uniform": "kimicore.policies.precision.uniform:Uniform",
    },
}
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "batching": ("start",),
    "eviction": ("start",),
    "padding": ("shape", "waste_tokens", "shapes"),
    "precision": ("rules",),
}

_STATE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "batching": ("rank",),
    "eviction": ("added", "touched", "removed", "importance", "victims"),
}


def resolve(kind: str, name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """Return the policy ``name`` of ``kind`` ("batching", "eviction", "padding", "precision"), made with ``settings``.

    Raises :class:`~kimicore.PluginError` for an unknown name (with the known ones), for a name that two
    installed packages claim or that belongs to a built-in, for a policy that cannot be imported or made, and for one
    that lacks what its kind needs; :class:`~kimicore.ConfigError` for a setting that it does not have or refuses.
    """
    if kind not in KINDS:
        raise PluginError(f"there is no kind of policy {kind!r}; kinds are {', '.join(sorted(KINDS))}")
    found = _named(kind, name)
    if not found:
        raise PluginError(
            f"{kind}={name!r} is not known; known are: {', '.join(sorted(known(kind)))}{_near(kind, name)}"
        )
    if len(found) > 1:
        origins = ", ".join(f"{target} ({origin})" for target, origin in found)
        raise PluginError(f"{kind}={name!r} is claimed more than once: {origins}; remove or rename one")
    target, origin = found[0]
    where = f"{kind}={name!r} ({target}, {origin})"
    try:
        maker = _load(target)
    except RAISED as error:
        raise PluginError(f"{where} cannot be used: {error!r}") from error
    return _made(kind, name, where, maker, dict(settings or {}))


def _made(kind: str, name: str, where: str, maker: Any, settings: dict[str, Any]) -> Any:
    has = _settings_of(maker)
    for key in settings:
        if has is not None and key not in has:
            names = ", ".join(sorted(has)) or "none"
            near = get_close_matches(key, has, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"policy.{kind}.{key}: {name!r} has no such setting; it has: {names}{hint}")
    try:
        policy = maker(**settings)
    except ConfigError as error:
        raise ConfigError(f"policy.{kind}: {error}") from error
    except RAISED as error:
        given = f" with {settings}" if settings else ""
        raise PluginError(f"{where} cannot be made{given}: {error!r}") from error
    try:
        missing = [one for one in ("name", *_NEEDS[kind]) if not hasattr(policy, one)]
        if missing or isinstance(policy, type):
            lacks = ", ".join(missing) or "an instance: calling it gives a class"
            raise PluginError(f"{where} is no {kind} policy: it lacks {lacks}")
        if not isinstance(policy.name, str):
            raise PluginError(f"{where} is no {kind} policy: its name={policy.name!r} is no text")
    except PluginError:
        raise
    except RAISED as error:
        raise PluginError(f"{where} cannot be used: it does not tell its name and methods: {error!r}") from error
    return policy


def _settings_of(maker: Any) -> frozenset[str] | None:
    """Return the names that a maker takes, or None where it takes any, or does not say."""
    try:
        parameters = signature(maker).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return frozenset(one.name for one in parameters if one.kind is not one.POSITIONAL_ONLY and one.name != "name")


def _near(kind: str, name: str) -> str:
    near = get_close_matches(name, known(kind), 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def started(kind: str, policy: Any, *arguments: Any) -> Any:
    """Return ``policy.start(...)``; raises :class:`~kimicore.PluginError` that names the policy where that raises, or
    answers with no state.
    """
    try:
        state = policy.start(*arguments)
        missing = [one for one in _STATE_NEEDS[kind] if not callable(getattr(state, one, None))]
    except ConfigError:
        raise
    except RAISED as error:
        raise PluginError(f"{kind}={policy.name!r}: start() failed: {error!r}") from error
    if missing:
        raise PluginError(
            f"{kind}={policy.name!r}: start() gave no {kind} state but a {type(state).__name__}: "
            f"it lacks {', '.join(missing)}"
        )
    return state


def faults_of(kind: str, name: str, config: EngineConfig) -> PolicyFaults:
    """Return the counter of a policy's faults; calls of a policy that is not built in are timed."""
    limit_s = None if built_in(kind, name) else config.policy_limit_s
    return PolicyFaults(kind, name, config.policy_fault_limit, limit_s=limit_s)


def built_in(kind: str, name: str) -> bool:
    """Return whether ``name`` is a built-in policy of ``kind``."""
    return name in KINDS[kind]


def known(kind: str) -> dict[str, str]:
    """Return the names of a kind with where each comes from ("built in", or the distribution's name).

    Of a name that is claimed more than once all origins are told, and that it cannot be used.
    """
    claims = {name: [(target, "built in")] for name, target in KINDS[kind].items()}
    for name, target, origin in _installed(f"kimicore.{kind}"):
        pairs = claims.setdefault(name, [])
        if (target, origin) not in pairs:
            pairs.append((target, origin))
    return {name: _told([origin for _, origin in pairs]) for name, pairs in claims.items()}


def _told(origins: list[str]) -> str:
    if len(origins) == 1:
        return origins[0]
    origins.sort(key=lambda one: (one != "built in", one))
    return f"{', '.join(origins)}: claimed more than once, so it cannot be used; remove or rename one"


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
